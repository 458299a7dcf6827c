"""Four bits under the learner's hand: another block, an outlier, the scale's rule, how alike the inputs are, how long to train."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from k3viz.four_bit.figure import four_bit_picture
from k3viz.four_bit.story import ALIKE, SHOWN, STEPS, FourBitStory, expert_blocks, four_bit_story, tell
from k3viz.panel import Choice, Drawing, Panel, Slider
from k3viz.theme import Theme, format_digits
from minimodel import K3ForCausalLM
from minimodel.pretrained import load_pretrained

OUTLIERS = tuple(2.0 ** (p / 2) for p in range(13))  # 1 to 64 times
RULE_NAMES = (("even", "even: never clips much (released tool)"), ("floor", "floor: clips the largest (OCP)"))
MOST_BLOCKS = 48  # of the slider


def four_bit_panel(
    *, weights: Sequence[float] | None = None, model: K3ForCausalLM | None = None, rule: str = "even", alike: float = ALIKE
) -> Panel:
    """A live block of 32 weights on the MXFP4 grid, rounded afterwards and trained in the grid.

    weights, model, rule, alike: as in ``four_bit_story``; the panel starts with them.
    """
    first = four_bit_story(weights=weights, model=model, block=1, rule=rule, alike=alike, steps=0)  # wrong arguments are named here
    blocks = [first.weights] if weights is not None else expert_blocks(load_pretrained() if model is None else model)[:MOST_BLOCKS]

    @lru_cache(maxsize=32)
    def story_of(block: int, outlier: float, rule: str, alike: float) -> FourBitStory:
        if weights is not None:
            return four_bit_story(weights=weights, outlier=outlier, rule=rule, alike=alike)
        return tell(blocks[block - 1], outlier, rule, alike, STEPS)

    def draw(values: dict[str, Any], theme: Theme) -> Drawing:
        story = story_of(int(values.get("block", 1)), OUTLIERS[int(values["outlier"])], values["rule"], float(values["alike"]))
        step = int(values["step"])
        return Drawing(story, four_bit_picture(story, step, theme, title=False), story.sentence(step))

    times = tuple(f"× {format_digits(x).removesuffix('.0')}" for x in OUTLIERS)
    controls = [
        Slider("outlier", "Largest weight made larger", 0, 0, len(OUTLIERS) - 1, 1, labels=times),
        Slider("alike", "Inputs alike", alike, 0.0, 1.0, 0.05),
        Slider("step", "Steps of training", STEPS, 0, STEPS, 1),
        Choice("rule", "Scale", rule, RULE_NAMES),
    ]
    if len(blocks) > 1:
        controls.insert(0, Slider("block", "Block of the expert", min(SHOWN, len(blocks)), 1, len(blocks), 1))
    return Panel(name="Four bits: a block of weights on its grid", controls=controls, draw=draw)
