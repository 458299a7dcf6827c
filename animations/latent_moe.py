"""The experts scene: one word, 16 of 896 experts, two that always work.

    manim -ql animations/latent_moe.py StableLatentMoE

A teacher's own sentence, through the environment (up to nine words; the routing follows):

    K3_TEXT="Please bring the slides." manim -ql animations/latent_moe.py StableLatentMoE

In Python: a subclass with ``story = journey_story(...)``. Counts and widths are the released config's; the router is seeded, not trained.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # manim runs this file by its path, the packages lie one up

import numpy as np
from manim import Arrow, Line, SurroundingRectangle, Transform, VGroup

from animations.charts import Box, Edges, ExpertGrid, Texts, appear, vanish
from animations.stage import SAFE, THEME, Formula, StageScene, TokenRow
from k3viz.experts.journey_story import TEXT, JourneyStory, journey_story
from k3viz.theme import ROLES, format_count, format_number, plural

TERMS = ((None, "y ="), ("shared", 'inline(sum) E_"shared" (x)'), (None, "+"), ("up", "W^arrow.t"), ("norm", '"RMSNorm"'), (None, "("),
         ("experts", "inline(sum) p_j E_j"), (None, "("), ("down", "W^arrow.b x"), (None, "))"))  # fmt: skip
ROLE = {"shared": "value", "up": "key", "norm": "decay", "experts": "memory", "down": "key"}
MAIN, SHARED, FORMULA = 0.65, 2.4, -1.55  # heights of the routed path, the shared path, the equation
X, LATENT, GRID, NORM, Y = -5.6, -3.7, (-2.35, 1.9, 3.0, 2.5), 2.45, 5.5  # middles of the boxes; left, top, width, height


class StableLatentMoE(StageScene):
    """896 experts in a layer, and one word pays for 16 of them and two that all words share: how it gets there and back."""

    story = None

    def construct(self) -> None:
        story = self.story or journey_story(text=os.environ.get("K3_TEXT") or TEXT)
        *others, word = story.tokens
        last, sentence = len(story.tokens) - 1, " ".join(story.tokens)
        wide, narrow, count = (format_count(n) for n in (story.hidden, story.latent, story.experts))
        grid = ExpertGrid(story.experts, left=GRID[0], top=GRID[1], width=GRID[2], height=GRID[3])
        middle = GRID[0] + GRID[2] / 2
        shared_words = f"{story.shared} shared {plural('expert', story.shared)}"
        x = Box(wide, "numbers", x=X, y=MAIN, width=1.7, height=1.0, fill=ROLES["query"])
        latent = Box(narrow, "latent", x=LATENT, y=MAIN, width=1.4, height=1.0)
        norm = Box("sum", "and norm", x=NORM, y=MAIN, width=1.7, height=1.0)
        y = Box(wide, "numbers", x=Y, y=MAIN, width=1.7, height=1.0, fill=ROLES["query"])
        shared = Box(shared_words, x=middle, y=SHARED, width=3.3, height=0.6, fill=ROLES["value"])
        router = Box("router", x=X, y=-0.7, width=1.5, height=0.5)

        if TokenRow(f"{sentence}.", {}, x=0, y=0).width > 2 * SAFE[0]:
            raise ValueError(f"story: the sentence {sentence!r} is too long for the drawn row of words")

        self.next_section("question")
        self.ask(f"{count} experts wait in one layer.", "Which of them work on one word, and who pays for the rest?")

        self.next_section("router")
        source = self.cite("Counts: K3's config. Router and experts here: seeded, untrained, narrow")
        names = Texts([(GRID[0], GRID[1] - GRID[3] - 0.28)])
        self.play(self.read(f"{sentence}.", {word: "query"}), appear(x, grid, source), names.show([f"{count} experts"]),
                  self.say(f"A word arrives in this layer as {wide} numbers."))  # fmt: skip
        self.wait(0.8)
        to_router = arrow((X, MAIN - 0.5), (X, -0.45))
        levels = story.scores[last] / story.scores[last].max()
        self.play(appear(router, to_router), grid.shade(0.45 * levels, ROLES["memory"]),
                  self.say(f"A router, here untrained, scores every expert for {word!r}: darker is higher."))  # fmt: skip
        self.wait(1.6)

        self.next_section("top k")
        cells = [grid.place(e) for e in story.indices[last]]
        edges = Edges([router.right] * story.top_k, cells, color=ROLES["key"], thickest=0.5)
        high, low = format_number(story.weights[last, 0]), format_number(story.weights[last, -1])
        self.play(grid.shade(self.lit(story, last), ROLES["memory"]), edges.show(story.weights[last]),
                  names.show([f"{story.top_k} of {count} experts"]),
                  self.say(f"Only the best {story.top_k} run. Their weights, {high} to {low}, add up to 1."))  # fmt: skip
        self.wait(2)

        self.next_section("latent")
        formula = Formula(TERMS, ROLE, {}, x=-SAFE[0], y=FORMULA)
        down = arrow(x.right, latent.left), arrow(latent.right, (GRID[0] - 0.05, MAIN))
        self.play(appear(latent, *down, formula), vanish(edges),
                  self.say(f"They read a latent of the word: {narrow} numbers instead of {wide}."))  # fmt: skip
        self.play(formula.light("down", "experts"))
        self.wait(1.6)
        out = arrow((GRID[0] + GRID[2] + 0.05, MAIN), norm.left), arrow(norm.right, y.left)
        self.play(appear(norm, y, *out), formula.light("norm", "up"), self.say(
            f"Their weighted sum is normed, here from size {format_number(story.summed[last])} to {format_number(story.normed[last])}, "
            f"and taken back to {wide} numbers."))  # fmt: skip
        self.wait(2.6)

        self.next_section("shared")
        by = VGroup(elbow((X, MAIN + 0.5), shared.left), elbow((Y, MAIN + 0.5), shared.right))
        self.play(appear(shared, by), formula.light("shared"),
                  self.say(f"{shared_words} read the full word, whatever the router says."))  # fmt: skip
        self.wait(2)

        if others:
            self.next_section("other words")
            frame = SurroundingRectangle(self.sentence[last], buff=0.04, corner_radius=0.1, color=ROLES["key"], stroke_width=5)
            self.play(formula.light(), appear(frame), self.say("Every other word wakes experts of its own."), run_time=0.8)
            for t in range(len(others)):
                now = SurroundingRectangle(self.sentence[t], buff=0.04, corner_radius=0.1, color=ROLES["key"], stroke_width=5)
                self.play(Transform(frame, now), grid.shade(self.lit(story, t), ROLES["memory"]), run_time=0.9)
            awake = story.awake(len(story.tokens))
            together = np.isin(np.arange(story.experts), story.indices).astype(float)
            self.play(vanish(frame), self.read(f"{sentence}.", dict.fromkeys(story.tokens, "query")),
                      grid.shade(together, ROLES["memory"]), names.show([f"{awake} of {count} experts"]),
                      self.say(f"All {len(story.tokens)} words together: {awake} experts."))  # fmt: skip
            self.wait(1.8)

        self.next_section("answer")
        total, active = format_count(story.total), format_count(story.active)
        self.play(formula.light(), self.say(
            f"A word pays for {story.top_k} + {story.shared} experts, not for {count}: {active} of K3's {total} parameters work on it.",
            bold=True))  # fmt: skip
        self.wait(4.5)

    def lit(self, story: JourneyStory, word: int) -> np.ndarray:
        """Level 1 for the word's experts."""
        return np.isin(np.arange(story.experts), story.indices[word]).astype(float)


def arrow(start: tuple[float, float], end: tuple[float, float]) -> Arrow:
    return Arrow([*start, 0], [*end, 0], buff=0.05, color=THEME.line, stroke_width=5, tip_length=0.2, max_tip_length_to_length_ratio=1)


def elbow(start: tuple[float, float], end: tuple[float, float]) -> VGroup:
    """Up from ``start``, then sideways to ``end``."""
    corner = [start[0], end[1], 0]
    return VGroup(*(Line(a, b, color=THEME.line, stroke_width=5) for a, b in (([*start, 0], corner), (corner, [*end, 0]))))
