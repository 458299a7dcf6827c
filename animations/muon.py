"""The optimizer scene: one strong head sets the pace, or each head has its own.

    manim -ql animations/muon.py PerHeadMuon

A teacher's own strength of head 1, through the environment (1 to 1000 times the others; the scene and its numbers follow):

    K3_STRENGTH=30 manim -ql animations/muon.py PerHeadMuon

In Python: a subclass with ``story = muon_story(...)``, also of a trained model's own gradient.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # manim runs this file by its path, the packages lie one up

import numpy as np
from manim import Group, VGroup

from animations.charts import Bars, appear, vanish
from animations.grids import Grid
from animations.stage import SAFE, SMALL, Change, Label, StageScene
from k3viz import muon_story
from k3viz.muon.story import MUON_STEPS, MuonStory
from k3viz.theme import ROLES, format_digits

TOP, TALL, GAP = 2.85, 4.2, 0.2  # upper edge and height of the matrices, space between heads once they are cut
COLUMNS = (-5.3, -1.15, 3.0)  # left edges of the gradient and the two updates
WIDE, REACH = 1.5, 1.2  # width of a matrix, length of the longest bar
FULL = 2.5  # times the strongest head's root mean square is drawn in full color
MOST_HEADS = 8


def story_from_environment() -> MuonStory:
    """The chosen gradient, with K3_STRENGTH as the strength of head 1 where it is set."""
    if not (given := os.environ.get("K3_STRENGTH")):
        return muon_story()
    try:
        strength = float(given)
    except ValueError:
        raise ValueError(f"K3_STRENGTH must be a number from 1 to 1000, got {given!r}") from None
    return muon_story(strength=strength)


class PerHeadMuon(StageScene):
    """One strong head takes nearly the whole update of a shared matrix; cut apart, every head gets an update of its own."""

    story = None

    def construct(self) -> None:
        story = self.story or story_from_environment()
        heads, rows, width = story.shape
        if heads > MOST_HEADS:
            raise ValueError(f"story: the drawn matrix has room for {MOST_HEADS} heads, got {heads}")
        times = format_digits(story.gradient[0] / story.gradient[1:].mean())
        ratios = [format_digits(story.ratio(MUON_STEPS, per_head)) for per_head in (False, True)]
        whole, each = story.whole_update[MUON_STEPS], story.head_update[MUON_STEPS]
        ys = [TOP - TALL * (h + 0.5) / heads for h in range(heads)]
        colors = [ROLES["erase"]] + [ROLES["memory"]] * (heads - 1)
        unit = REACH / max(whole.max(), each.max())

        loudest, update = (FULL * max(sizes.max() for sizes in kinds) for kinds in ((story.gradient,), (whole, each)))

        def matrix(i: int, numbers: np.ndarray, limit: float) -> Group:
            bands, size = numbers.reshape(heads, rows, width), {"left": COLUMNS[i], "width": WIDE, "height": TALL / heads}
            return Group(*(Grid(band, limit=limit, top=TOP - TALL * h / heads, **size) for h, band in enumerate(bands)))

        def bars(i: int, unit: float) -> Bars:
            return Bars(ys, left=COLUMNS[i] + WIDE + 0.15, unit=unit, colors=colors, height=0.28)

        def title(i: int, words: str) -> Label:
            return Label(words, size=SMALL, bold=True).at(COLUMNS[i], TOP + 0.35)

        self.next_section("question")
        self.ask("An optimizer that lifts all directions of an update to one size.", "What if one head of the matrix is much louder?")

        self.next_section("gradient")
        names = VGroup(*(Label(f"head {h + 1}", size=SMALL).at(-SAFE[0], y) for h, y in enumerate(ys)))
        gradient, sizes = matrix(0, story.gradient_matrix, loudest), bars(0, REACH / story.gradient.max())
        source = self.cite(self.source(story))
        self.play(appear(names, gradient, title(0, "Gradient"), source),
                  self.say(f"The gradient of one projection: {heads} heads, one above the other."))  # fmt: skip
        self.play(sizes.show(story.gradient, [format_digits(x) for x in story.gradient]), self.say(
            f"Bars: each head's size (root mean square). Head 1 is {times} times as strong as the others."))  # fmt: skip
        self.wait(2)

        self.next_section("one matrix")
        shared, moves = matrix(1, story.whole_matrix, update), bars(1, unit)
        own, n = int((story.owned > 0.5).sum()), len(story.owned)
        self.play(appear(shared, title(1, "As one matrix")), self.say(
            f"Muon makes all {n} directions of this matrix about equal. But head 1 dominates {own} of them."))  # fmt: skip
        self.play(moves.show(whole, [format_digits(x) for x in whole]))
        self.wait(1.4)
        self.play(self.say(f"So head 1 moves {ratios[0]} times as far as the others. Orthogonal, and still unfair."))
        self.wait(2)

        self.next_section("cut")
        cut, after = matrix(2, story.gradient_matrix, loudest), matrix(2, story.head_matrix, update)
        own_moves = bars(2, unit)
        self.play(appear(cut, title(2, "Head by head")), self.say(f"K3 cuts the same gradient into its {heads} heads first."))
        self.play(self.apart(cut, heads))
        self.apart(after, heads).now()
        self.play(vanish(cut), appear(after), own_moves.show(each, [format_digits(x) for x in each]),
                  self.say("Then each block is made orthogonal on its own: every head gets its own pace."))  # fmt: skip
        self.wait(2.4)

        self.next_section("answer")
        self.play(self.say(f"Head by head, the head with {times} times the gradient moves {ratios[1]} times as far as the others, "
                           f"not {ratios[0]} times.", bold=True))  # fmt: skip
        self.wait(4.5)

    def apart(self, parts: Group, heads: int) -> Change:
        """Cut a matrix between its heads: each band gets lower by a gap."""
        scale = 1 - GAP * heads / TALL

        def update(alpha: float) -> None:
            for part in parts:
                part.stretch_to_fit_height((TALL / heads) * (1 + alpha * (scale - 1)), about_point=part.get_center())

        return Change(parts, update, run_time=1.2)

    def source(self, story: MuonStory) -> str:
        made = "Gradient: chosen, seeded" if story.source.startswith("chosen") else "Gradient: a trained model's"
        return f"{made}. {MUON_STEPS} Newton-Schulz steps, computed. K3 report, 2.5"
