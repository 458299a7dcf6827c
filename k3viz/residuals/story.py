"""The residuals story: which earlier outputs every sublayer of a trained model reads, and what a plain sum would have given it.

A reader's pseudo-query is learned, or *chosen*: solved so that one reader, at one token, takes asked-for shares of its sources (the
article's 0.6, 0.1 and 0.3). The model then really runs with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from minimodel import K3ForCausalLM, record
from minimodel.attention_residuals import PseudoQuery
from minimodel.formats import format_number, format_probability, plural
from minimodel.pretrained import load_pretrained
from minimodel.tasks import meeting

TEXT = " ".join((*meeting.ARTICLE, meeting.question("day")))
LONGEST = 60  # tokens: each has a name in the picture
MOST_SOURCES = 9  # as many as K3 has
ARTICLE_WEIGHTS = (0.6, 0.1, 0.3)  # chosen by the article for its animation
QUERIES = {"learned": "learned", "chosen": "chosen: solved for the shares below", "zero": "zero in every reader, as training starts"}


@dataclass(frozen=True, eq=False)
class DepthRun:
    """One run of a model. weights, norms [R, T, N]: what each reader takes of each source and how long the source is; NaN where the
    source does not exist yet. sources: reader -> [T, n, D]. answer: the likeliest next word and its probability."""

    tokens: tuple[str, ...]
    weights: np.ndarray
    norms: np.ndarray
    sources: tuple[Tensor, ...]
    answer: tuple[str, float]


@dataclass(frozen=True, eq=False)
class ResidualsStory:
    """Depth weights of every reader at every token.

    tokens: T words. readers: R names; the first sublayer reads the embedding alone and is left out. sources: N names, oldest first.
    weights [R, T, N]: the softmax weights; learned_weights [R, T, N]: the same with all queries learned. learned_share, plain_share
    [R, T, N]: each source's part of the length that is added up, with these weights and with weight 1 for all. partial: readers whose
    newest source is the unfinished sum of their block.
    token, reader: the ones looked at. asked: the shares a chosen query was solved for. answer, learned_answer, plain_answer: (next
    word, probability) as shown, with all queries learned, and with plain residuals. In all cases NaN means: not there yet.
    """

    tokens: tuple[str, ...]
    readers: tuple[str, ...]
    sources: tuple[str, ...]
    weights: np.ndarray
    learned_weights: np.ndarray
    learned_share: np.ndarray
    plain_share: np.ndarray
    partial: tuple[bool, ...]
    token: int
    reader: int
    block: int
    trained_block: int
    query: str
    length: float
    asked: tuple[float, ...] | None
    answer: tuple[str, float]
    learned_answer: tuple[str, float]
    plain_answer: tuple[str, float]

    @property
    def row(self) -> np.ndarray:
        """The weights of the reader looked at, at the token looked at, over the sources it has."""
        return _present(self.weights[self.reader, self.token])

    @property
    def learned_row(self) -> np.ndarray:
        """The same with all queries learned."""
        return _present(self.learned_weights[self.reader, self.token])

    @property
    def plain_row(self) -> np.ndarray:
        """The parts of the length that a plain sum of the same sources would add up."""
        return _present(self.plain_share[self.reader, self.token])

    @property
    def row_names(self) -> tuple[str, ...]:
        """The sources of the row; a block that is not finished says so."""
        names = self.sources[: len(self.row)]
        return (*names[:-1], f"{names[-1]}, so far") if self.partial[self.reader] else names

    @property
    def sentence(self) -> str:
        word, reader = self.tokens[self.token], self.readers[self.reader]
        names = self.sources[: len(self.row)]
        taken = ", ".join(f"{format_number(w)} of {_article(name)}" for w, name in zip(self.row, names, strict=True))
        said = f"At {word!r}, {reader} takes {taken}"
        if self.query == "zero":
            said += ": a zero query averages"
        if self.asked is not None:
            wish = " / ".join(map(format_number, self.asked))
            said += f" (chosen: solved here for {wish}{self._scaled()}; other words get other weights)"
        elif self.query == "learned":
            said += self._scaled()
        here, plain = (_present(x[self.reader, self.token]) for x in (self.learned_share, self.plain_share))
        most = int(np.abs(here - plain).argmax())  # the source that a plain sum would treat most differently
        source = _article(names[most])
        shares = f"{format_probability(plain[most])} of a plain sum; of this one: {format_probability(here[most])}"
        return f"{said}. {source[0].upper()}{source[1:]} would be {shares}. {self._answers()}"

    def _scaled(self) -> str:
        return "" if self.length == 1 else f", query times {format_number(self.length)}"

    def _answers(self) -> str:
        said = f"The model's next word: {_said(self.answer)}"
        if self.answer != self.learned_answer:
            said += f"; with learned queries {_said(self.learned_answer)}"
        if self.block != self.trained_block:
            said += f" (trained with {_layers(self.trained_block)} a block, run with {self.block})"
        return f"{said}; run with plain residuals, for which it was not trained: {_said(self.plain_answer)}."


def residuals_story(
    *,
    model: K3ForCausalLM | None = None,
    text: str = TEXT,
    token: int = -1,
    reader: int = -1,
    block: int | None = None,
    query: str = "learned",
    length: float = 1.0,
    asked: Sequence[float] = ARTICLE_WEIGHTS,
) -> ResidualsStory:
    """Let a model read ``text`` and trace what every reader takes from depth.

    model: with Attention Residuals, trained on meeting notes (default: the course's meeting model). text: words of that vocabulary, at
    most 60. token, reader: the ones to look at, counted from the end if negative. block: layers a block (default: as trained). query:
    "learned"; "zero" in every reader; or "chosen", which replaces the query of ``reader`` by one that takes the shares ``asked``
    (normalized; sources beyond them get next to nothing) at ``token``. length: multiplies that reader's query. Raises ValueError
    naming the argument.
    """
    model = load_pretrained() if model is None else model
    trained = trained_block(model)
    block = trained if block is None else block
    copy = with_block(model, block)
    return tell(copy, read(copy, text), plain_answer(model, text), token=token, reader=reader, trained=trained, query=query,
                length=length, asked=asked)  # fmt: skip


def trained_block(model: K3ForCausalLM) -> int:
    """Layers a block, as the model was trained. ValueError for a model that this story can't read."""
    meeting.check_reader(model)
    if model.config.attn_res_block_size is None:
        raise ValueError("model has plain residuals (attn_res_block_size is None), so it has no depth weights")
    return model.config.attn_res_block_size


def with_block(model: K3ForCausalLM, block: int | None) -> K3ForCausalLM:
    """A private float64 copy of the model that stores a depth source every ``block`` layers; None: plain residuals."""
    layers = model.config.num_hidden_layers
    if block is not None and (isinstance(block, bool) or not isinstance(block, int) or not 1 <= block <= layers):
        raise ValueError(f"block must be a whole number of layers from 1 to {layers}, got {block!r}")
    if block is not None and -(-layers // block) + 1 > MOST_SOURCES:
        raise ValueError(f"block: {layers} layers in blocks of {block} give {-(-layers // block) + 1} sources, at most {MOST_SOURCES} fit")
    copy = K3ForCausalLM(model.config.replace(attn_res_block_size=block)).double()
    trained = model.state_dict()
    copy.load_state_dict({name: trained[name] for name in copy.state_dict()})  # plain residuals have no queries to load
    return copy.eval()


def read(copy: K3ForCausalLM, text: str, queries: dict[int, Tensor] | None = None) -> DepthRun:
    """Run a private copy; ``queries`` (reader -> [D]) stand in for learned ones."""
    ids, readers = _encode(text), _readers(copy)
    replaced = {f"{name}.weight": queries[i][None].to(part.weight) for i, (name, part) in enumerate(readers) if i in (queries or {})}
    with torch.no_grad(), record(nn.ModuleList(part for _, part in readers)) as trace:
        logits = functional_call(copy, replaced, (torch.tensor([ids]),)).logits
    seen = [trace[f"{part._trace_name}.sources"][0] for _, part in readers]
    weights = [trace[f"{part._trace_name}.weights"][0] for _, part in readers]
    N = max(x.shape[1] for x in seen)
    return DepthRun(
        tokens=tuple(meeting.VOCABULARY[i] for i in ids), weights=_padded(weights, N), norms=_padded([x.norm(dim=-1) for x in seen], N),
        sources=tuple(seen), answer=_likeliest(logits),
    )  # fmt: skip


def plain_answer(model: K3ForCausalLM, text: str) -> tuple[str, float]:
    """What the same weights answer with plain residuals, which they were not trained for."""
    with torch.no_grad():
        return _likeliest(with_block(model, None)(torch.tensor([_encode(text)])).logits)


def solved_query(sources: Tensor, gain: Tensor, asked: Sequence[float], eps: float) -> Tensor:
    """The shortest pseudo-query [D] for which the softmax over ``sources`` [N, D] gives the shares ``asked``, in float64."""
    keys = sources.double() * torch.rsqrt(sources.double().square().mean(-1, keepdim=True) + eps) * gain.double()
    scores = torch.tensor(asked, dtype=torch.float64).log()
    return torch.linalg.pinv(keys) @ (scores - scores.mean())


def tell(
    copy: K3ForCausalLM, learned: DepthRun, plain: tuple[str, float], *, token: int, reader: int, trained: int, query: str,
    length: float, asked: Sequence[float],
) -> ResidualsStory:  # fmt: skip
    """The story of a private copy whose run with learned queries and whose plain answer are known."""
    readers = _readers(copy)
    if query not in tuple(QUERIES):
        raise ValueError(f"query must be one of {', '.join(QUERIES)}, got {query!r}")
    if isinstance(length, bool) or not isinstance(length, (int, float)) or not 0 <= length <= 10:
        raise ValueError(f"length must lie in [0, 10], got {length!r}")
    token, reader = _position("token", token, len(learned.tokens)), _position("reader", reader, len(readers))
    here, part, norm = learned.sources[reader][token], readers[reader][1], _norm_of(copy, readers[reader][0])
    shares = _shares(asked, len(here)) if query == "chosen" else None
    if query == "zero":
        run = read(copy, " ".join(learned.tokens), {i: torch.zeros_like(q.weight[0]) for i, (_, q) in enumerate(readers)})
    elif shares is not None or length != 1:
        vector = part.weight[0].detach() if shares is None else solved_query(here, norm.weight.detach(), shares, norm.eps)
        run = read(copy, " ".join(learned.tokens), {reader: length * vector})
    else:
        run = learned
    block, layers = copy.config.attn_res_block_size, copy.config.num_hidden_layers
    sublayers = range(1, 2 * layers + 1)  # written before each reader
    pulled = run.weights * run.norms
    return ResidualsStory(
        tokens=run.tokens, readers=tuple(_reader_name(n, layers) for n in sublayers), sources=_source_names(block, layers),
        weights=run.weights, learned_weights=learned.weights, learned_share=_frozen(pulled / np.nansum(pulled, -1, keepdims=True)),
        plain_share=_frozen(run.norms / np.nansum(run.norms, -1, keepdims=True)),
        partial=tuple(n % (2 * block) != 0 and n < 2 * layers for n in sublayers), token=token, reader=reader, block=block,
        trained_block=trained, query=query, length=float(length), asked=shares, answer=run.answer, learned_answer=learned.answer,
        plain_answer=plain,
    )  # fmt: skip


def block_sizes(model: K3ForCausalLM) -> tuple[int, ...]:
    """Block sizes worth trying: the trained one, and doublings of one layer, of those whose sources fit into the picture."""
    layers = model.config.num_hidden_layers
    sizes = {trained_block(model)} | {1 << p for p in range(layers.bit_length()) if 1 << p <= layers}
    return tuple(sorted(b for b in sizes if -(-layers // b) + 1 <= MOST_SOURCES))


def _encode(text: str) -> list[int]:
    if not isinstance(text, str) or not (ids := meeting.encode(text)):
        raise ValueError(f"text must hold at least one word, got {text!r}")
    if len(ids) > LONGEST:
        raise ValueError(f"text: at most {LONGEST} tokens fit in this story, got {len(ids)}")
    return ids


def _readers(model: K3ForCausalLM) -> list[tuple[str, PseudoQuery]]:
    """(name, pseudo-query) in the order of depth, without the first one, which has a single source."""
    return [(name, part) for name, part in model.named_modules() if isinstance(part, PseudoQuery)][1:]


def _norm_of(model: K3ForCausalLM, query: str) -> nn.Module:
    return model.get_submodule(query.replace("_proj", "_norm"))


def _reader_name(sublayer: int, layers: int) -> str:
    return "the output" if sublayer == 2 * layers else f"layer {sublayer // 2 + 1} {('attention', 'feed-forward')[sublayer % 2]}"


def _source_names(block: int, layers: int) -> tuple[str, ...]:
    ends = [(start + 1, min(start + block, layers)) for start in range(0, layers, block)]
    return ("embedding", *(f"layer {a}" if a == b else f"layers {a}–{b}" for a, b in ends))


def _padded(rows: list[Tensor], N: int) -> np.ndarray:
    out = np.full((len(rows), len(rows[0]), N), np.nan)
    for row, x in zip(out, rows, strict=True):
        row[:, : x.shape[1]] = x.double().numpy()
    return _frozen(out)


def _frozen(x: np.ndarray) -> np.ndarray:
    x.setflags(write=False)
    return x


def _shares(asked: Sequence[float], n: int) -> tuple[float, ...]:
    asked = tuple(asked)
    if not asked or any(isinstance(x, bool) or not isinstance(x, (int, float)) or not 0 < x <= 1 for x in asked):
        raise ValueError(f"asked must be shares in (0, 1], got {asked!r}")
    some = (*asked, *[min(asked) / 100] * n)[:n]
    return tuple(x / sum(some) for x in some)


def _position(name: str, value: int, count: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -count <= value < count:
        raise ValueError(f"{name} must be a whole number from {-count} to {count - 1}, got {value!r}")
    return value % count


def _likeliest(logits: Tensor) -> tuple[str, float]:
    p = logits[0, -1].double().softmax(-1)
    return meeting.VOCABULARY[int(p.argmax())], float(p.max())


def _present(row: np.ndarray) -> np.ndarray:
    return row[~np.isnan(row)]


def _article(source: str) -> str:
    return f"the {source}" if source == "embedding" else source


def _said(answer: tuple[str, float]) -> str:
    return f"{answer[0]!r} ({format_probability(answer[1])})"


def _layers(n: int) -> str:
    return f"{n} {plural('layer', n)}"
