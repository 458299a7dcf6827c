"""Chunks under the learner's hand: how many words a chunk, which gate, how fast it fades, which numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from k3viz.chunks.figure import chunks_picture
from k3viz.chunks.story import GATES, NUMBERS, SHIFT, TEXT, TILE, ChunksStory, choose, read_tiles, tell
from k3viz.panel import Choice, Drawing, Panel, Player, Slider
from k3viz.theme import Theme
from minimodel import K3ForCausalLM
from minimodel.pretrained import load_pretrained

CHUNKS = (4, 8, 16, 32, 64)


def chunks_panel(
    *,
    model: K3ForCausalLM | None = None,
    text: str = TEXT,
    chunk: int = TILE,
    gate: str | None = None,
    shift: float = 0.0,
    numbers: str = "float32",
) -> Panel:
    """Live chunks: one head of a trained model, token by token and as matrix products.

    model, text, gate, shift, numbers: as in ``chunks_story``; chunk: 4, 8, 16, 32 or 64 words. The panel starts with them.
    """
    if chunk not in CHUNKS:
        raise ValueError(f"chunk must be one of {', '.join(map(str, CHUNKS))} in this panel, got {chunk!r}")
    tiles = read_tiles(load_pretrained() if model is None else model, text)

    @lru_cache(maxsize=8)
    def story_of(head: str, chunk: int, gate: str | None, shift: float, numbers: str) -> ChunksStory:
        place = None if head == "auto" else tuple(int(x) - 1 for x in head.split("."))
        return tell(choose(tiles, place), chunk, gate, shift, numbers)

    def draw(values: dict[str, Any], theme: Theme) -> Drawing:
        story = story_of(values["head"], CHUNKS[int(values["chunk"])], values["gate"], float(values["shift"]), values["numbers"])
        show = min(values["show"], len(story.bounds) - 1)
        return Drawing(story, chunks_picture(story, show, theme, title=False), story.sentence, frame=show, labels=story.labels)

    story = story_of.__wrapped__("auto", chunk, gate, shift, numbers)  # not through the cache, which wants hashable arguments
    heads = tuple((f"{layer + 1}.{h + 1}", f"layer {layer + 1}, head {h + 1}") for layer, h in tiles)
    controls = [
        Slider("chunk", "Chunk size", CHUNKS.index(chunk), 0, len(CHUNKS) - 1, 1, labels=tuple(f"{c} words" for c in CHUNKS)),
        Choice("gate", "Gate", story.gate, tuple(GATES.items())),
        Slider("shift", "Fade faster, z", shift, -SHIFT, SHIFT, 1.0),
        Choice("numbers", "Γ and 1/Γ stored as", numbers, tuple((n, n) for n in NUMBERS)),
        Choice("head", "Head", "auto", (("auto", "the one that forgets most"), *heads)),
        Player("show", "Chunk shown", min(1, len(story.bounds) - 1), story.labels),
    ]
    return Panel(name="Chunks: the token loop as matrix products", controls=controls, draw=draw)
