"""Three scenes of published facts, each with its source on the stage and nothing of ours: the control experiment, the bet, the ancestors.

    manim -ql animations/evidence.py TwinResults     # Kimi Linear against its twin
    manim -ql animations/evidence.py ProveItSmall    # K2, the testbed and K3, drawn to scale
    manim -ql animations/evidence.py Lineage         # what every part of K3 grew from

In Python: a subclass with ``story = twins_story()``, ``sizes_story()`` or ``lineage_story()``, or with one of your own making.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # manim runs this file by its path, the packages lie one up

import numpy as np
from manim import Arrow, Square, VGroup

from animations.charts import Bars, appear, vanish
from animations.stage import SAFE, SMALL, THEME, Label, StageScene, paragraph, swap
from k3viz import lineage_story
from k3viz.evidence.published_story import HYBRID, TWIN, Size, sizes_story, twins_story
from k3viz.theme import MIXER_COLORS, ROLES, format_count

NAMES, BARS, LONGEST, ROW = -1.9, 0.2, 4.3, 1.1  # the contests: left edge of names and bars, longest bar, height of a row


class TwinResults(StageScene):
    """A control experiment: the hybrid against a twin that differs in nothing but its layers. Less memory, faster, no worse."""

    story = None

    def construct(self) -> None:
        story = self.story or twins_story()
        n = len(story.contests)
        tops = [3.45 - ROW * i for i in range(n)]

        self.next_section("question")
        self.ask(f"Two models, {story.setting}, one recipe. One has full attention in every layer, one in every fourth.",
                 "What does it cost to keep fewer notes?")  # fmt: skip

        self.next_section("contests")
        self.play(appear(self.cite(f"Published, not measured here: {story.contests[0].source.split(', abstract')[0]}")))
        for contest, top in zip(story.contests, tops, strict=True):
            heading = VGroup(Label(contest.claim, size=SMALL, bold=True).at(-SAFE[0], top - 0.2),
                             Label(contest.unit, size=SMALL, color=THEME.muted).at(-SAFE[0], top - 0.62),
                             Label(TWIN, size=SMALL).at(NAMES, top - 0.2), Label(HYBRID, size=SMALL).at(NAMES, top - 0.62))  # fmt: skip
            bars = Bars([top - 0.2, top - 0.62], left=BARS, unit=LONGEST / max(contest.values),
                        colors=[MIXER_COLORS["mla"], MIXER_COLORS["kda"]], height=0.3)  # fmt: skip
            self.next_section(contest.claim)
            self.play(appear(heading), bars.show(contest.values, contest.texts), self.say(contest.said))
            self.wait(2.3)

        self.next_section("answer")
        twin, hybrid = (f"{x:.1f}" for x in story.average)
        self.play(self.say(f"Fewer notes cost nothing on average: over {story.tests} long-context tests {hybrid} points, the twin {twin}.",
                           bold=True))  # fmt: skip
        self.wait(4.5)


class ProveItSmall(StageScene):
    """Prove it small, then bet the company: a testbed between two giants, all three drawn to scale."""

    story = None
    SIDE, FLOOR = 3.5, -1.35  # side of the largest model's square, where the squares stand

    def construct(self) -> None:
        self.told = story = self.story or sizes_story()
        first, testbed, last = story.models[0], story.models[story.testbed], story.models[-1]
        lefts = np.linspace(-SAFE[0], SAFE[0] - self.SIDE, len(story.models))
        small, large = (short(m.total) for m in (testbed, last))

        self.next_section("question")
        self.ask("A new kind of memory, and a model with trillions of parameters to build.", "Where do you try it first?")

        self.next_section(first.name)
        self.play(appear(self.cite("Areas to scale. K3 report (arXiv 2607.24653), Kimi Linear (arXiv 2510.26692)")),
                  appear(self.model(first, lefts[0])),
                  self.say(f"{first.name}: {short(first.total)} parameters (pale), {short(first.active)} active for a word (dark). "
                           "Full attention in every layer."))  # fmt: skip
        self.wait(3)

        self.next_section(testbed.name)
        self.play(appear(self.model(testbed, lefts[story.testbed])), self.say(
            f"{testbed.name}, {self.months(first, testbed)} months on: {small}. Small enough to train twice, with the new layers and "
            "without."))  # fmt: skip
        self.wait(3.4)

        self.next_section(last.name)
        start, y = lefts[story.testbed] + self.side(testbed.total) + 0.2, self.FLOOR + self.side(testbed.total) / 2
        arrow = Arrow([start, y, 0], [lefts[-1] - 0.2, y, 0], buff=0, color=THEME.ink, stroke_width=6, tip_length=0.25)
        times = Label(f"{story.times} times", bold=True)
        times.at(arrow.get_x() - times.width / 2, y - 0.4)
        self.play(appear(arrow, times, self.model(last, lefts[-1])), self.say(
            f"The testbed was faster, and no worse on average. {self.months(testbed, last)} months later the same design, "
            f"{story.times} times the size."))  # fmt: skip
        self.wait(3)

        self.next_section("answer")
        self.play(self.say(f"Proven with {small} parameters, then built with {large}: {last.name} carries the testbed's memory at "
                           f"{story.times} times its size.", bold=True))  # fmt: skip
        self.wait(4.5)

    def side(self, parameters: float) -> float:
        """Side of the square with these parameters as its area."""
        return self.SIDE * (parameters / max(m.total for m in self.told.models)) ** 0.5

    def model(self, size: Size, left: float) -> VGroup:
        """A square with the model's parameters as its area, the active ones in its corner, and its name above."""
        sides = [self.side(x) for x in (size.total, size.active)]
        whole, part = (Square(side, stroke_width=0).move_to([left + side / 2, self.FLOOR + side / 2, 0]) for side in sides)
        whole.set_fill(ROLES["published"], 0.4)
        part.set_fill(ROLES["published"], 1)
        top = self.FLOOR + sides[0]
        lines = (Label(f"{short(size.total)}, {short(size.active)} active", size=SMALL).at(left, top + 0.3),
                 Label(size.month, size=SMALL, color=THEME.muted).at(left, top + 0.72),
                 Label(size.name, bold=True).at(left, top + 1.16))  # fmt: skip
        return VGroup(whole, part, *lines)

    def months(self, a: Size, b: Size) -> int:
        (y, m), (z, n) = (map(int, size.month.split("-")) for size in (a, b))
        return 12 * (z - y) + n - m


class Lineage(StageScene):
    """Almost nothing in K3 is a first draft: every part, what it grew from, and where it was published."""

    story = None
    PAGE, TOP, TALL, LINE = 4, 2.85, 1.5, 0.35  # rows on a page; first line, height of a row, of a line
    RIGHT, MIDDLE, WIDE = -0.5, (-1.15, -0.65), (5.25, 7.0)  # left edge of the parts; the arrows; widths of both columns

    def construct(self) -> None:
        story = self.story or lineage_story()
        rows = story.components.rows
        pages = [rows[i : i + self.PAGE] for i in range(0, len(rows), self.PAGE)]

        self.next_section("question")
        self.ask(f"{len(rows)} building blocks, on the way to Kimi K3 and inside it.", "How many of them are new from nothing?")

        heads = VGroup(Label("grew from", size=SMALL, color=THEME.muted).at(-SAFE[0], self.TOP + 0.55),
                       Label("building block, and its source", size=SMALL, color=THEME.muted).at(self.RIGHT, self.TOP + 0.55))  # fmt: skip
        count = VGroup()
        self.play(appear(heads, self.cite("Published facts; the source of each stands under it")))
        for i, page in enumerate(pages):
            self.next_section(page[0][0])
            drawn = VGroup(*(self.row(row, self.TOP - self.TALL * j) for j, row in enumerate(page)))
            done = Label(f"{i * self.PAGE + len(page)} of {len(rows)}", size=SMALL, color=THEME.muted)
            self.play(appear(drawn), swap(count, VGroup(done.at(SAFE[0] - done.width, self.TOP + 0.55))), run_time=0.8)
            self.wait(4.4)
            self.play(vanish(drawn), run_time=0.5)

        self.next_section("answer")
        orphans = sum(not row[2] for row in rows)
        said = "Not one" if orphans == 0 else f"Only {orphans}"
        deep = -(-len(rows) // 2)
        names = VGroup(*(Label(row[0], size=SMALL).at((-SAFE[0], 0.3)[i // deep], 3.35 - 5.0 * (i % deep) / (deep - 1))
                         for i, row in enumerate(rows)))  # fmt: skip
        self.play(vanish(heads, count), run_time=0.4)
        self.play(appear(names), self.say(
            f"{said} of the {len(rows)} is new from nothing: each refines something that had been proven before.", bold=True))  # fmt: skip
        self.wait(4)

    def row(self, row: tuple, y: float) -> VGroup:
        """What it grew from, an arrow, the component, what it does and its source."""
        name, does, ancestors, source = row
        old = VGroup()
        for each in ancestors.split("; "):
            old.add(*self.lines(each, -SAFE[0], y - self.LINE * len(old), self.WIDE[0]))
        if len(old) * self.LINE > self.TALL:
            old = self.lines(ancestors, -SAFE[0], y, self.WIDE[0])
        new = self.lines(name, self.RIGHT, y, self.WIDE[1], bold=True)
        below = y - self.LINE * len(new)
        does = self.lines(does, self.RIGHT, below, self.WIDE[1])
        where = self.lines(source, self.RIGHT, below - self.LINE * len(does), self.WIDE[1]).set_color(THEME.muted)
        arrow = Arrow([self.MIDDLE[0], y, 0], [self.MIDDLE[1], y, 0], buff=0, color=THEME.line, stroke_width=5, tip_length=0.2)
        return VGroup(old, new, does, where, arrow)

    def lines(self, words: str, x: float, y: float, width: float, *, bold: bool = False) -> VGroup:
        """Small text in lines that stand close."""
        text = paragraph(words.replace("arXiv ", "arXiv\xa0"), x=x, y=y, width=width, size=SMALL, bold=bold)
        return VGroup(*(line.at(x, y - i * self.LINE) for i, line in enumerate(text)))


def short(n: float) -> str:
    """A count as the reports write it, without zeros at its end: 48B, 1.04T."""
    return re.sub(r"[.]0+(?=[A-Z])", "", format_count(n))
