"""Depth weights under the learner's hand: any word, any reader, another query, another block size."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from k3viz.panel import Choice, Drawing, Panel, Player, Slider, Text
from k3viz.residuals.figure import residuals_picture
from k3viz.residuals.story import (
    ARTICLE_WEIGHTS,
    QUERIES,
    TEXT,
    DepthRun,
    ResidualsStory,
    block_sizes,
    plain_answer,
    read,
    residuals_story,
    tell,
    trained_block,
    with_block,
)  # fmt: skip
from k3viz.theme import Theme, plural
from minimodel import K3ForCausalLM
from minimodel.pretrained import load_pretrained

NEXT_TO_NOTHING = 0.01  # the smallest share that can be asked for: a softmax gives every source something


def residuals_panel(
    *,
    model: K3ForCausalLM | None = None,
    text: str = TEXT,
    query: str = "learned",
    block: int | None = None,
) -> Panel:
    """A live map of depth weights. model, text, query, block: as in ``residuals_story``; the panel starts with them.

    It starts at the last word and the deepest reader, with the article's 0.6, 0.1 and 0.3 as the shares a chosen query is solved for.
    Returns a ``Panel``.
    """
    model = load_pretrained() if model is None else model
    first = residuals_story(model=model, text=text, query=query, block=block)  # wrong arguments are named here
    trained = trained_block(model)
    blocks = sorted({*block_sizes(model), first.block})
    sources = 1 + max(-(-model.config.num_hidden_layers // b) for b in blocks)

    @lru_cache(maxsize=8)
    def copy(block: int) -> K3ForCausalLM:
        return with_block(model, block)

    @lru_cache(maxsize=8)
    def learned(block: int, text: str) -> DepthRun:
        return read(copy(block), text)

    @lru_cache(maxsize=4)
    def plain(text: str) -> tuple[str, float]:
        return plain_answer(model, text)

    @lru_cache(maxsize=64)  # a run of the model takes a moment; moving back costs nothing
    def story(block: int, text: str, token: int, reader: int, query: str, length: float, asked: tuple[float, ...]) -> ResidualsStory:
        return tell(copy(block), learned(block, text), plain(text), token=token, reader=reader, trained=trained, query=query,
                    length=length, asked=asked)  # fmt: skip

    def draw(values: dict[str, Any], theme: Theme) -> Drawing:
        block, text, query = int(values["block"]), values["text"], values["query"]
        run = learned(block, text)
        token, n = min(values["token"], len(run.tokens) - 1), run.sources[int(values["reader"])].shape[1]
        asked = tuple(values[f"asked_{i}"] for i in range(n))
        seen = story(block, text, token, int(values["reader"]), query, 1.0 if query == "zero" else values["length"],
                     asked if query == "chosen" else ARTICLE_WEIGHTS)  # fmt: skip
        hidden = [f"asked_{i}" for i in range(sources) if query != "chosen" or i >= n] + (["length"] if query == "zero" else [])
        return Drawing(seen, residuals_picture(seen, theme, title=False), seen.sentence, frame=token, labels=run.tokens,
                       hidden=tuple(hidden))  # fmt: skip

    wishes = (*ARTICLE_WEIGHTS, *[NEXT_TO_NOTHING] * sources)[:sources]
    readers = len(first.readers)
    controls = [
        Player("token", "Word", first.token, first.tokens),
        Slider("reader", "Reader", first.reader, 0, readers - 1, 1, labels=first.readers),
        Choice("block", "Block size", str(first.block), tuple((str(b), _block_label(b, trained)) for b in blocks)),
        Choice("query", "This reader's pseudo-query", query, tuple(QUERIES.items())),
        Slider("length", "Query length, ×", 1.0, 0.0, 2.0, 0.1),
        *[Slider(f"asked_{i}", f"Asked of block {i}" if i else "Asked of the embedding", share, NEXT_TO_NOTHING, 1.0, 0.01)
          for i, share in enumerate(wishes)],
        Text("text", "The model reads", text),
    ]  # fmt: skip
    return Panel(name="Attention Residuals: who reads which depth", controls=controls, draw=draw)


def _block_label(block: int, trained: int) -> str:
    return f"{block} {plural('layer', block)}{' (as trained)' if block == trained else ''}"
