"""What K3 costs and where it lands: a session with and without a prefix cache.

    manim -ql animations/serving.py PrefixCache

K3_TURNS sets how many requests the session has, 2 to 8 (default: 8). In Python: a subclass with ``story = serving_story(...)``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # manim runs this file by its path, the packages lie one up

from manim import FadeIn, Rectangle, Triangle, VGroup

from animations.charts import Bars
from animations.stage import SAFE, SMALL, THEME, Change, Label, StageScene, legend
from k3viz import serving_story
from k3viz.serving.story import BLOCK, ServingStory, Turn, dollars
from k3viz.theme import ROLES, format_bytes, format_count, format_digits, format_probability, plural
from minimodel.facts import Serving

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
        marks = (Triangle(fill_color=THEME.ink, fill_opacity=1, stroke_width=0).scale(0.07).rotate(3.14159) for _ in turn.checkpoints)
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
        mark = Triangle(fill_color=THEME.ink, fill_opacity=1, stroke_width=0).scale(0.09).rotate(3.14159)
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
