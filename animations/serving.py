"""What K3 costs and where it lands: a session with and without a prefix cache, and the report's benchmark chart.

    manim -ql animations/serving.py PrefixCache
    manim -ql animations/serving.py WhereK3Lands

K3_TURNS sets how many requests the session has, 2 to 8 (default: 8). In Python: a subclass with ``story = serving_story(...)`` or
``story = benchmarks_story()``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # manim runs this file by its path, the packages lie one up

import numpy as np
from manim import DashedLine, Dot, FadeIn, Line, Rectangle, Square, Triangle, VGroup

from animations.charts import Bars, appear
from animations.stage import SAFE, SMALL, THEME, Change, Label, StageScene, legend
from k3viz import benchmarks_story, serving_story
from k3viz.evidence.story import BenchmarksStory
from k3viz.serving.story import BLOCK, ServingStory, Turn, dollars
from k3viz.theme import ROLES, format_bytes, format_count, format_digits, format_probability, plural
from minimodel.facts import Serving, Standing

K3 = "Kimi K3"
MOST = 8  # turns that fit on the stage
START, TOP, STEP = -5.0, 2.55, 0.41  # left edge of the prompts, the first turn's height, and from turn to turn
BILLS = (-1.05, -1.5)
PARTS = {"resumed": ROLES["memory"], "read": ROLES["key"], "answer": ROLES["value"]}


def story_from_environment(broken: str = "nothing") -> ServingStory:
    """The serving story with K3_TURNS requests."""
    text = os.environ.get("K3_TURNS", str(MOST))
    if not text.strip().isdecimal() or not 2 <= int(text) <= MOST:
        raise ValueError(f"K3_TURNS must be a whole number of requests from 2 to {MOST}, got {text!r}")
    return serving_story(turns=int(text), broken=broken)


class Request(VGroup):
    """One request as a bar: what is resumed, what is read, the answer; small marks stand where it leaves a snapshot."""

    def __init__(self, number: int, turn: Turn, *, y: float, unit: float):
        self.y, self.unit, self.shown = y, unit, [0.0, 0.0, 0.0]
        self.bars = [Rectangle(width=1e-3, height=0.24, stroke_width=0, fill_color=color, fill_opacity=1) for color in PARTS.values()]
        marks = (Triangle(fill_color=THEME.ink, fill_opacity=1, stroke_width=0).scale(0.07).rotate(np.pi) for _ in turn.checkpoints)
        self.marks = VGroup(*(m.move_to([START + at * unit, y + 0.15, 0]) for m, at in zip(marks, turn.checkpoints, strict=True)))
        super().__init__(Label(f"turn {number}", size=SMALL).at(-SAFE[0], y), *self.bars, self.marks.set_opacity(0))

    def go(self, turn: Turn, *, run_time: float = 1.0) -> Change:
        """Show a turn's tokens."""
        before, self.shown = self.shown, [turn.hit * self.unit, turn.read * self.unit, turn.output * self.unit]
        after = self.shown

        def update(alpha: float) -> None:
            x = START
            for bar, a, b in zip(self.bars, before, after, strict=True):
                width = max(a + alpha * (b - a), 1e-3)
                bar.stretch_to_fit_width(width).move_to([x + width / 2, self.y, 0]).set_fill(opacity=float(width > 1e-3))
                x += width
            self.marks.set_opacity(max(0.0, 10 * alpha - 9))  # a snapshot is there when its turn has been read

        return Change(self, update, run_time=run_time)


class PrefixCache(StageScene):
    """A session of an agent: the unchanged beginning is resumed from a cache, what is new is read; the bill with and without it."""

    story = None

    def construct(self) -> None:
        story = self.story or story_from_environment()
        turns = len(story.turns)
        if turns > MOST or story.broken != "nothing":
            raise ValueError(f"story: this scene draws up to {MOST} turns that nothing breaks, got {turns} turns, broken by {story.broken}")
        clock = story.again(broken="clock")
        last = story.turns[-1]

        self.next_section("question")
        self.ask("An agent sends its whole history again with every request.", "Must all of it be read again?")

        self.next_section("first turn")
        unit = (SAFE[0] - START) / (max(t.prompt + t.output for t in story.turns))
        requests = [Request(i + 1, t, y=TOP - STEP * i, unit=unit) for i, t in enumerate(story.turns)]
        key = legend([(color, words) for words, color in PARTS.items()], x=-SAFE[0], y=3.35)
        mark = Triangle(fill_color=THEME.ink, fill_opacity=1, stroke_width=0).scale(0.09).rotate(np.pi)
        key.add(mark.move_to([key.get_right()[0] + 0.5, 3.35, 0]))
        key.add(Label("snapshot of the states", size=SMALL).at(key.get_right()[0] + 0.15, 3.35))
        most = story.bill(cached=False)
        bills = Bars(BILLS, left=-2.6, unit=7.3 / most, colors=[PARTS["resumed"], ROLES["erase"]])
        rows = zip(("bill with a cache", "without"), BILLS, strict=True)
        names = VGroup(*(Label(words, size=SMALL).at(-SAFE[0], y) for words, y in rows))
        source = self.cite("Hits: a tiny untrained K3, run. Prices: platform.kimi.ai, quoted by others")
        price = [dollars(p.value) for p in (Serving.input_price, Serving.cached_price, Serving.output_price)]
        prices = "A million tokens cost {} read, {} resumed, {} written".format(*price)

        def pay(i: int) -> Change:
            amounts = [story.bill(i), story.bill(i, cached=False)]
            return bills.show(amounts, [dollars(x) for x in amounts])

        first = self.say(f"Turn 1 reads {format_count(story.turns[0].prompt)} tokens: all of its prompt. {prices}.")
        self.play(FadeIn(requests[0], key, bills, names, source), first)
        self.play(requests[0].go(story.turns[0]), pay(0), run_time=1.2)
        self.wait(2.6)

        self.next_section("second turn")
        second = story.turns[1]
        blocks = f"{format_count(second.hit // BLOCK)} {plural('block', second.hit // BLOCK)} of {BLOCK}"
        resumed = f"{format_count(second.hit)} are resumed at a snapshot ({blocks}), {format_count(second.read)} are read"
        self.play(FadeIn(requests[1]), self.say(f"Turn 2 sends {format_count(second.prompt)} tokens: {resumed}."))
        self.play(requests[1].go(second), pay(1), run_time=1.5)
        self.wait(2.8)

        self.next_section("the session")
        if turns > 2:
            self.play(self.say("The history grows with every turn. What is read does not."))
        for i in range(2, turns):
            self.play(FadeIn(requests[i]), requests[i].go(story.turns[i]), pay(i), run_time=0.9)
        same = f"The same next token as reading it all: the logits differ by {format_digits(story.off)} at most"
        kept = f"{last.snapshots} snapshots and {format_count(last.stored)} tokens take {format_bytes(story.kept_bytes())}"
        self.play(self.say(f"{same}. In K3's size the {kept}."))
        self.wait(3)

        self.next_section("broken")
        self.play(self.say("Now the same session with a clock in the first line: the beginning differs, so nothing can be resumed."))
        amounts = [clock.bill(), clock.bill(cached=False)]
        broken = bills.show(amounts, [dollars(x) for x in amounts])
        self.play(*(r.go(t) for r, t in zip(requests, clock.turns, strict=True)), broken, run_time=2)
        self.wait(2.4)

        self.next_section("answer")
        self.play(*(r.go(t) for r, t in zip(requests, story.turns, strict=True)), pay(turns - 1), run_time=1.2)
        saved = f"{format_probability(story.hit_rate())} of the input is resumed, {dollars(story.bill())} instead of {dollars(most)}"
        self.play(self.say(f"Only append: {saved}. One change at the start costs it all.", bold=True))
        self.wait(4.5)


class WhereK3Lands(StageScene):
    """The report's benchmark chart, row by row: where Kimi K3 is first, second or behind, in its authors' own numbers."""

    story = None
    HIGH, ROW = 2.95, 0.42  # the first row's height, from row to row
    LOW, BEST, SCORE, LEADER = -1.2, 2.6, 2.95, 4.2  # ends of the scale; left edges of K3's score and of the leader's name

    def construct(self) -> None:
        story = self.story or benchmarks_story()
        order = sorted(story.tables, key=lambda name: story.ranks[name])  # stable: the report's order where the rank is the same
        ys = {name: self.HIGH - self.ROW * i for i, name in enumerate(order)}
        shares = {name: {m: s / table.rows[0][1] for m, s in table.rows} for name, table in story.tables.items()}
        self.lowest = min(min(row.values()) for row in shares.values())
        n, others = len(order), len({m for row in shares.values() for m in row}) - 1

        self.next_section("question")
        self.ask("Smaller notes, sparse experts, four bits.", "And where does the model land?")

        self.next_section("scale")
        report, _, notes = story.source.partition("Report's note: ")
        best = DashedLine([self.BEST, self.HIGH + 0.3, 0], [self.BEST, ys[order[-1]] - 0.2, 0], color=THEME.line, stroke_width=2)
        lowest, full = (Label(words, size=SMALL, color=THEME.muted) for words in (f"{100 * self.lowest:.0f} %", "best = 100 %"))
        heads = VGroup(self.mark(True).move_to([-SAFE[0] + 0.1, 3.42, 0]), Label(K3, size=SMALL, bold=True).at(-SAFE[0] + 0.35, 3.42),
                       self.mark(False).move_to([-4.2, 3.42, 0]), Label(f"{others} others", size=SMALL).at(-4.0, 3.42),
                       lowest.at(self.LOW - 0.1, 3.42), full.at(self.BEST - full.width + 0.1, 3.42),
                       Label("K3", size=SMALL, bold=True).at(self.SCORE, 3.42),
                       Label("led by", size=SMALL).at(self.LEADER, 3.42))  # fmt: skip
        source = self.cite(f"Published: {report.split(';')[0]}")
        self.play(appear(heads, best, source), self.say(f"{n} benchmarks. Each row's scores are drawn as shares of its best score."))
        self.wait(1.4)

        for place, words in ((1, "First in {}."), (2, "Second in {}."), (3, "Third or lower in {}.")):
            if group := [name for name in order if min(story.ranks[name], 3) == place]:
                self.next_section(words.split(" in")[0])
                self.play(*(appear(self.row(name, shares[name], story, ys[name])) for name in group),
                          self.say(words.format(f"{len(group)} of {n}")))  # fmt: skip
                self.wait(2.6)

        self.next_section("note")
        self.play(self.say(f"The authors' own chart, at maximum effort. {notes}"))
        self.wait(3.4)
        self.next_section("others' tables")
        ranks = ", ".join(f"{rank} of {of} in {board}" for board, _, rank, of in Standing.third_party.rows)
        self.play(self.say(f"Ranks on boards of others (report, Table 5): {ranks}."))
        self.wait(3.2)

        self.next_section("answer")
        first, top = (sum(rank <= k for rank in story.ranks.values()) for k in (1, 2))
        self.play(self.say(f"In its own report Kimi K3 is first in {first} of {n} benchmarks, first or second in {top}.", bold=True))
        self.wait(4.5)

    def mark(self, own: bool) -> VGroup:
        """A diamond for K3, a small disk for any other model."""
        if own:
            return Square(0.2, color=THEME.ink, stroke_width=1.5).set_fill(ROLES["published"], 1).rotate(np.pi / 4)
        return Dot(radius=0.07, color=THEME.line)

    def row(self, name: str, shares: dict[str, float], story: BenchmarksStory, y: float) -> VGroup:
        """A benchmark: its name, a mark for every model, K3's score, and who leads it."""
        table = story.tables[name]
        own = dict(table.rows)[K3]
        last = sorted(shares, key=lambda model: model == K3)  # K3's mark lies on top
        marks = VGroup(*(self.mark(model == K3).move_to([self.x(shares[model]), y, 0]) for model in last))
        leaders = ", ".join(model for model, score in table.rows if score == table.rows[0][1])
        written = f"{own:,}" if table.unit == "Elo" else f"{own:.1f}"
        return VGroup(Line([self.LOW, y, 0], [self.BEST, y, 0], color=THEME.grid, stroke_width=2), marks,
                      Label(name, size=SMALL).at(-SAFE[0], y), Label(written, size=SMALL, bold=True).at(self.SCORE, y),
                      Label(leaders, size=SMALL).at(self.LEADER, y))  # fmt: skip

    def x(self, share: float) -> float:
        return self.LOW + (share - self.lowest) / (1 - self.lowest) * (self.BEST - self.LOW)
