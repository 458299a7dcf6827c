"""The memory curve under the learner's hand: which models, how many tokens, how many bits, which axes."""

from __future__ import annotations

from typing import Any

from k3viz.memory.figure import SCALES, memory_picture
from k3viz.memory.story import DTYPES, KINDS, LONGEST, MODELS, memory_story
from k3viz.panel import Checks, Choice, Drawing, Panel, Slider
from k3viz.theme import Theme, format_count


def memory_panel(
    *,
    kinds: tuple[str, ...] = tuple(KINDS),
    models: tuple[str, ...] = ("k3", "kimi_linear", "kimi_k2", "k3_all_mla", "k3_gqa"),
    tokens: int = 1024,
    context: int = 1_048_576,
    dtype: str = "bfloat16",
    scale: str = "linear",
) -> Panel:
    """A live memory curve. kinds, models, tokens, context, dtype: as in ``memory_story``; scale: "linear" or "log".

    context: the slider stops at powers of two; any other number starts at the one nearest to it. Returns a ``Panel``.
    """
    memory_story(kinds=kinds, models=models, tokens=tokens, context=context, dtype=dtype)  # wrong arguments are named here

    def draw(values: dict[str, Any], theme: Theme) -> Drawing:
        story = memory_story(kinds=values["kinds"], models=values["models"], tokens=tokens, context=1 << int(values["context"]),
                             dtype=values["dtype"])  # fmt: skip
        return Drawing(story, memory_picture(story, values["scale"], theme, title=False), f"{story.sentence} {story.measured_sentence}")

    powers = range(6, LONGEST.bit_length())  # 64, the least that ``memory_story`` takes, to LONGEST
    controls = [
        Slider("context", "Tokens read", round_log2(context), powers[0], powers[-1], 1,
               labels=tuple(format_count(1 << p) for p in powers)),
        Choice("dtype", "Numbers stored as", dtype, tuple((d, d) for d in DTYPES)),
        Choice("scale", "Axes", scale, tuple((s, s) for s in SCALES)),
        Checks("models", "Published", tuple(models), tuple((name, label) for name, (label, *_) in MODELS.items())),
        Checks("kinds", "Measured", tuple(kinds), tuple(KINDS.items())),
    ]  # fmt: skip
    return Panel(name="Memory: what a conversation keeps", controls=controls, draw=draw)


def round_log2(n: int) -> int:
    """The exponent of the power of two nearest to n."""
    low = n.bit_length() - 1
    return low + (n - (1 << low) > (1 << (low + 1)) - n)
