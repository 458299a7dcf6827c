"""The four-bit scene: round the weights at the end, or let them learn where they have to stand.

    manim -ql animations/four_bit.py FourBitWeights

A teacher's own outlier, through the environment (the largest weight is made so many times larger, 1 to 256; the scene follows):

    K3_OUTLIER=3 manim -ql animations/four_bit.py FourBitWeights

In Python: a subclass with ``story = four_bit_story(...)``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # manim runs this file by its path, the packages lie one up

import numpy as np
from manim import Circle, DashedLine, Dot, Line, Square, VGroup, VMobject, linear

from animations.charts import Texts, appear
from animations.stage import SMALL, THEME, Change, Label, StageScene
from k3viz import four_bit_story
from k3viz.four_bit.story import FourBitStory
from k3viz.theme import ROLES, format_bytes, format_number, format_probability, plural

LEFT, RIGHT, TOP, BOTTOM = -6.2, 1.9, 3.3, -1.2  # of the block
CHART = (2.9, 6.4, 1.9, -1.2)  # left, right, top, bottom of the error's curve
SPOT = 0.07  # radius of a weight's ring and dot
HALF = 2  # bytes a weight in bfloat16


def story_from_environment() -> FourBitStory:
    """A block of the trained model, its largest weight made K3_OUTLIER times larger where that is set."""
    if not (given := os.environ.get("K3_OUTLIER")):
        return four_bit_story()
    try:
        outlier = float(given)
    except ValueError:
        raise ValueError(f"K3_OUTLIER must be a number from 1 to 256, got {given!r}") from None
    return four_bit_story(outlier=outlier)


class FourBitWeights(StageScene):
    """Four bits leave 15 places for a weight: rounding at the end, and training while the weights stand on the grid."""

    story = None

    def construct(self) -> None:
        story = self.story or story_from_environment()
        n, best = len(story.weights), story.best()
        limit = max(np.abs(story.weights).max(), np.abs(story.grid).max(), np.abs(story.trained).max())
        self.xs = lambda w: LEFT + (w / limit + 1) / 2 * (RIGHT - LEFT)
        self.ys = [TOP - 0.2 - (TOP - 0.4 - BOTTOM) * i / (n - 1) for i in range(n)]
        bits, size, full = format_number(8 * story.stored / n), format_bytes(story.stored), format_bytes(HALF * n)

        self.next_section("question")
        self.ask(f"A weight in {bits} bits instead of {8 * HALF}.", "Round at the end, or learn inside the grid?")

        self.next_section("weights")
        rings = VGroup(*(Circle(radius=SPOT, color=THEME.ink, stroke_width=2).move_to([self.xs(w), y, 0])
                         for w, y in zip(story.weights, self.ys, strict=True)))  # fmt: skip
        dots = VGroup(*(Dot([self.xs(w), y, 0], radius=SPOT, color=ROLES["memory"])
                        for w, y in zip(story.weights, self.ys, strict=True)))  # fmt: skip
        source = self.cite("A trained small K3's expert; MXFP4, K3 report 4.1.4. Inputs chosen, seeded")
        self.play(appear(rings, source),
                  self.say(f"{n} weights of a trained expert, one in each row. Left is negative, right is positive."))  # fmt: skip
        self.wait(1.8)

        self.next_section("grid")
        lines, names = self.grid(story)
        scale = "2" + str(story.exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        places = len(story.grid)
        self.play(appear(lines, names), self.say(
            f"Four bits leave {places} places, times a scale that all {n} share, here {scale}: {size} instead of {full}."))  # fmt: skip
        self.wait(2.6)

        self.next_section("round")
        self.bring_to_front(rings)
        self.add(dots)
        self.play(self.move(dots, story.weights, story.rounded), self.say("Rounding afterwards: every weight goes to the nearest place."))
        keys = Texts([(CHART[0] + 0.5, TOP - 0.2), (CHART[0] + 0.5, TOP - 0.65)])
        samples = VGroup(*(line([CHART[0], y, 0], [CHART[0] + 0.4, y, 0], color=ROLES[role], stroke_width=5)
                           for line, y, role in ((DashedLine, TOP - 0.2, "memory"), (Line, TOP - 0.65, "key"))))  # fmt: skip
        top = max(float(story.losses.max()), 1e-9) * 1.08
        axes, level = self.axes(story.losses[0] / top)
        after = f"rounded: {format_probability(story.losses[0])}"
        self.play(appear(axes, level, samples[0]), keys.show([after, ""]), self.say(
            f"What the {n} weights compute together is then off by {format_probability(story.losses[0])} of its mean square."))  # fmt: skip
        self.wait(2.4)

        self.next_section("train")
        curve = VMobject(stroke_color=ROLES["key"], stroke_width=5)
        steps = len(story.losses) - 1
        self.play(self.say(f"Trained in the grid: {steps} steps, each on the error that the rounded weights make."))
        if steps:
            self.play(self.train(dots, curve, story, top))
        kept = format_probability(story.losses[best])
        moved = np.flatnonzero(story.trained[best] != story.rounded)
        self.play(self.move(dots, story.trained[-1], story.trained[best]), appear(samples[1]), keys.show([after, f"trained: {kept}"]))
        weights = f"{len(moved)} {plural('weight', len(moved))}"
        self.play(self.say(f"The best step: {weights} left the nearest place (diamonds), and errors cancel."))
        diamond = Square(0.18, color=THEME.ink, stroke_width=1.5).set_fill(ROLES["key"], 1).rotate(np.pi / 4)
        marks = VGroup(*(diamond.copy().move_to(dots[i]) for i in moved))
        self.play(appear(marks))
        self.wait(2.4)

        self.next_section("answer")
        self.play(self.say(f"Same {size}: rounded afterwards, the output is off by {format_probability(story.losses[0])}; trained inside "
                           f"the grid, by {kept}.", bold=True))  # fmt: skip
        self.wait(4.5)

    def grid(self, story: FourBitStory) -> tuple[VGroup, VGroup]:
        """The places as lines, whole ones with their number in units of the scale."""
        values = story.grid / 2.0**story.exponent
        xs = [self.xs(v) for v in story.grid]
        lines = VGroup(*(Line([x, TOP, 0], [x, BOTTOM, 0], color=THEME.line, stroke_width=1.5) for x in xs))
        labels = [(Label(f"{v:g}".replace("-", "−"), size=SMALL), x) for v, x in zip(values, xs, strict=True) if v == int(v)]
        unit = Label("in units of the scale", size=SMALL, color=THEME.muted)
        names = VGroup(*(label.at(x - label.width / 2, BOTTOM - 0.25) for label, x in labels), unit.at(LEFT, BOTTOM - 0.68))
        return lines, names

    def move(self, dots: VGroup, old: np.ndarray, new: np.ndarray) -> Change:
        """Slide every dot to another weight."""

        def update(alpha: float) -> None:
            for dot, w, y in zip(dots, old + alpha * (new - old), self.ys, strict=True):
                dot.move_to([self.xs(w), y, 0])

        return Change(dots, update, run_time=1.6)

    def axes(self, level: float) -> tuple[VGroup, DashedLine]:
        """The curve's frame, and the error of rounding as a level line at this share of the height."""
        left, right, top, bottom = CHART
        frame = VGroup(Line([left, bottom, 0], [right, bottom, 0]), Line([left, bottom, 0], [left, top, 0])).set_color(THEME.line)
        frame.add(Label("output error", size=SMALL, color=THEME.muted).at(left + 0.5, top + 0.3),
                  Label("step of training", size=SMALL, color=THEME.muted).at(left, bottom - 0.25),
                  Label("0", size=SMALL, color=THEME.muted).at(left - 0.3, bottom))  # fmt: skip
        y = bottom + level * (top - bottom)
        return frame, DashedLine([left, y, 0], [right, y, 0], color=ROLES["memory"], stroke_width=4)

    def train(self, dots: VGroup, curve: VMobject, story: FourBitStory, top: float) -> Change:
        """Go through all steps: the weights of each, and the error's curve up to it."""
        left, right, high, low = CHART
        last = len(story.losses) - 1
        points = [[left + (right - left) * i / last, low + (high - low) * loss / top, 0] for i, loss in enumerate(story.losses)]
        both = VGroup(dots, curve)

        def update(alpha: float) -> None:
            step = round(alpha * last)
            for dot, w, y in zip(dots, story.trained[step], self.ys, strict=True):
                dot.move_to([self.xs(w), y, 0])
            curve.set_points_as_corners(points[: max(step, 1) + 1])

        change = Change(both, update, run_time=5)
        change.rate_func = linear
        return change
