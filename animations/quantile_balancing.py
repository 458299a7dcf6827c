"""The balancing scene: four cut-offs move, and every expert gets its share.

    manim -ql animations/quantile_balancing.py QuantileBalancing

A teacher's own scores, through the environment: rows are tokens, columns experts, 0 to 40 (at most 8 tokens, 6 experts):

    K3_SCORES="32 12 5; 16 31 7; 14 21 5; 30 2 9; 28 8 6; 27 1 3" manim -ql animations/quantile_balancing.py QuantileBalancing

In Python: a subclass with ``story = balancing_story(...)``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # manim runs this file by its path, the packages lie one up

import numpy as np
from manim import DashedLine, VGroup

from animations.charts import Bars, Texts, appear
from animations.stage import SAFE, SMALL, THEME, Change, Label, StageScene
from k3viz import balancing_story
from k3viz.balancing.story import LENGTHS, BalancingStory, format_amount
from k3viz.theme import ROLES, plural

TOP, ROW, MOST = 2.7, 0.43, 8  # middle of the first token's row, its height, rows that fit
START, END = -5.75, 4.75  # edges of the experts' columns
CUTS, LOADS = -0.95, -1.5  # heights of the two lines below the table


def story_from_environment() -> BalancingStory:
    """The report's example, or the scores in K3_SCORES where it is set."""
    if not (given := os.environ.get("K3_SCORES")):
        return balancing_story()
    try:
        rows = [[float(x) for x in row.replace(",", " ").split()] for row in given.split(";") if row.strip()]
    except ValueError:
        raise ValueError(f"K3_SCORES must be rows of numbers, separated by semicolons, got {given!r}") from None
    return balancing_story(scores=rows)


class QuantileBalancing(StageScene):
    """Loads 4, 3, 1, 0 become 2, 2, 2, 2: every expert gets a cut-off from its own scores, with no penalty and nothing to tune."""

    story = None

    def construct(self) -> None:
        story = self.story or story_from_environment()
        m, n = story.scores.shape
        if m > MOST:
            raise ValueError(f"story: the drawn table has room for {MOST} tokens, got {m}")
        ys, wide = [TOP - ROW * t for t in range(m)], (END - START) / n
        lefts = [START + wide * e + 0.5 for e in range(n)]
        unit = (wide - 0.75) / max(float(story.scores.max()), 1.0)
        columns = [Bars(ys, left=left, unit=unit, colors=[THEME.line] * m, height=0.27, before=True) for left in lefts]
        names = VGroup(*(Label(f"E{e + 1}", bold=True).at(x, TOP + 0.5) for e, x in enumerate(lefts)),
                       *(Label(f"t{t + 1}").at(-SAFE[0], y) for t, y in enumerate(ys)),
                       Label("goes to", size=SMALL).at(END + 0.3, TOP + 0.5))  # fmt: skip
        goes = Texts([(END + 0.3, y) for y in ys], bold=True)
        cuts, loads = Texts([(x, CUTS) for x in lefts]), Texts([(x, LOADS) for x in lefts], bold=True)
        even = f"{format_amount(story.share)} would be even"

        self.next_section("question")
        experts, tokens = f"{n} experts, {m} tokens", f"{format_amount(story.share)} for each expert would be even"
        self.ask(f"{experts}: {tokens}.", "How does work leave the favorites, without a penalty?")

        self.next_section("scores")
        source = self.cite(self.source(story))
        self.play(appear(names, source), *(c.show(story.scores[:, e], [format_amount(s) for s in story.scores[:, e]])
                  for e, c in enumerate(columns)), self.say("Each token (row) has a score for each expert (column)."))  # fmt: skip
        self.wait(1.6)

        self.next_section("favorites")
        self.play(*self.route(story.before, columns), goes.show(self.targets(story.before)), self.say(
            f"Each token takes its best score. Loads {listed(story.loads_before)}, where {even}."))  # fmt: skip
        self.play(loads.show([f"load {load}" for load in story.loads_before]))
        self.wait(2.4)

        self.next_section("cut-offs")
        lines = VGroup(*(DashedLine([x, TOP + 0.25, 0], [x, ys[-1] - 0.25, 0], color=ROLES["erase"], stroke_width=5) for x in lefts))
        ends = [x + unit * cut for x, cut in zip(lefts, story.cutoffs, strict=True)]
        above = (story.scores > story.cutoffs).sum(0)
        self.play(appear(lines), self.say("Now every expert gets a cut-off (dashed), from its own column alone."))
        self.play(self.slide(lines, lefts, ends))
        self.play(cuts.show([f"cut-off {format_amount(cut)}" for cut in story.cutoffs]), self.say(
            f"Each stops where exactly the expert's share lies above it: {listed(above)} scores."))  # fmt: skip
        self.wait(2.6)

        self.next_section("moved")
        moved = [f"t{t + 1}" for t in story.moved]
        self.play(*self.route(story.after, columns), goes.show(self.targets(story.after)), self.say(
            f"Each token goes where its score lies highest above the cut-off. New targets: {listed(moved) or 'none'}."))  # fmt: skip
        self.play(loads.show([f"load {load}" for load in story.loads_after]))
        self.wait(2.4)

        self.next_section("rule")
        rule = balancing_story(scores=story.scores, scale=story.scale, top_k=story.top_k, how="rule")
        self.play(self.say(f"The step that K3 runs takes margins instead of scores: cut-offs {listed(map(format_amount, rule.cutoffs))}. "
                           f"It gives loads {listed(rule.loads_after)}."))  # fmt: skip
        self.wait(3)

        self.next_section("answer")
        self.play(self.say(f"{n} cut-offs moved {len(moved)} {plural('token', len(moved))}: loads {listed(story.loads_before)} are now "
                           f"{listed(story.loads_after)}. No penalty, nothing to tune.", bold=True))  # fmt: skip
        self.wait(4.5)

    def route(self, chosen: np.ndarray, columns: list[Bars]) -> list[Change]:
        """Color each token's chosen bars."""
        return [c.paint([ROLES["memory"] if e in row else THEME.line for row in chosen]) for e, c in enumerate(columns)]

    def targets(self, chosen: np.ndarray) -> list[str]:
        return [" ".join(f"E{e + 1}" for e in sorted(row)) for row in chosen]

    def slide(self, lines: VGroup, starts: list[float], ends: list[float]) -> Change:
        """Move each cut-off to its place."""

        def update(alpha: float) -> None:
            for line, a, b in zip(lines, starts, ends, strict=True):
                line.set_x(a + alpha * (b - a))

        return Change(lines, update, run_time=1.6)

    def source(self, story: BalancingStory) -> str:
        if np.array_equal(story.scores, np.array(LENGTHS)):
            return "Scores: bars of the K3 report's Figure 5. Routing and cut-offs computed here"
        return "Scores: chosen by hand. Cut-offs computed as in the K3 report, 2.3.3"


def listed(items) -> str:
    return ", ".join(map(str, items))
