"""What models keep and answer: a meter in bytes, bars over tokens, what heads read, a board of answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from manim import (
    RESAMPLING_ALGORITHMS,
    Group,
    ImageMobject,
    Line,
    ManimColor,
    Rectangle,
    RoundedRectangle,
    SurroundingRectangle,
    VGroup,
)

from animations.charts import Bars, Texts
from animations.notes import NAMES, NoteStrip
from animations.stage import BODY, SAFE, SMALL, THEME, Change, Label, legend, mix
from k3viz.theme import MIXER_COLORS, ROLES, format_bytes, sequential


class TokenBars(VGroup):
    """A bar under each token of a strip, ``unit`` high for each of its numbers, standing on ``base``; all are empty at first."""

    def __init__(self, strip: NoteStrip, *, base: float, unit: float, color: str, name: str = ""):
        width = strip.cell * 0.82
        bars = [Rectangle(width=width, height=1, stroke_width=0, fill_color=color, fill_opacity=0) for _ in strip.story.tokens]
        super().__init__(*bars)
        self.xs, self.base, self.unit, self.numbers = [strip.x(i) for i in range(len(bars))], base, unit, [0.0] * len(bars)
        self.bars, self.color_now = bars, color
        if name:
            self.add(Label(name, size=SMALL).at(-SAFE[0], base + unit / 2))
        self._draw(self.numbers)

    def show(self, numbers: Sequence[float], *, color: str | None = None, run_time: float = 0.8) -> Change:
        """Go to as many numbers a token, and to another color; tokens beyond the given ones keep none."""
        old, self.numbers = self.numbers, [*map(float, numbers), *[0.0] * (len(self.bars) - len(numbers))]
        new, before, self.color_now = self.numbers, self.color_now, color or self.color_now
        after = self.color_now

        def update(alpha: float) -> None:
            self._draw([x + alpha * (y - x) for x, y in zip(old, new, strict=True)])
            for bar in self.bars:
                bar.set_color(mix(before, after, alpha))

        return Change(self, update, run_time=run_time)

    def _draw(self, numbers: Sequence[float]) -> None:
        for bar, x, n in zip(self.bars, self.xs, numbers, strict=True):
            height = max(n * self.unit, 1e-3)
            bar.stretch_to_fit_height(height).move_to([x, self.base + height / 2, 0]).set_fill(opacity=1.0 if n else 0.0)


class HeadRows(Group):
    """How much each head reads of each token, a row a head on the theme's scale from 0 to all of it; what can't be read stays empty.

    Under the rows stand the words that a head reads most of, where that is more than half.
    """

    def __init__(self, strip: NoteStrip, heads: np.ndarray, *, top: float, tall: float = 0.36):
        shares = np.nan_to_num(heads)
        (_, low), (_, high) = sequential(THEME)
        rgb = np.stack(
            [ManimColor(low).to_rgb() + x * (ManimColor(high).to_rgb() - ManimColor(low).to_rgb()) for x in shares.clip(0, 1)[..., None]]
        )
        image = ImageMobject(np.dstack([rgb * 255, np.full(shares.shape, 255)]).round().astype(np.uint8))
        image.set_resampling_algorithm(RESAMPLING_ALGORITHMS["nearest"])
        bottom, right = top - tall * len(heads), strip.edge(len(strip.story.tokens))
        image.stretch_to_fit_height(top - bottom).stretch_to_fit_width(right - strip.left).move_to(
            [(strip.left + right) / 2, (top + bottom) / 2, 0]
        )
        frame = SurroundingRectangle(image, buff=0, color=THEME.line, stroke_width=2)
        names = (Label(f"head {h + 1}", size=SMALL).at(-SAFE[0], top - (h + 0.5) * tall) for h in range(len(heads)))
        most = sorted({int(row.argmax()) for row in shares if row.max() > 0.5})
        words = [Label(strip.story.tokens[i], size=SMALL) for i in most]
        marks = (word.at(strip.x(i) - word.width / 2, bottom - 0.25) for i, word in zip(most, words, strict=True))
        scale = legend(((low, "0 %"), (high, "100 % of its attention")), x=strip.left, y=bottom - 0.68)
        scale[0].set_stroke(THEME.line, 1.5)
        super().__init__(image, frame, *names, *marks, scale)


# ---- memory ----


class Meter(VGroup):
    """A name, a bar as long as the amount, and the amount in words. unit: length of one (byte); start: where the bar starts."""

    def __init__(self, name: str, color: str, *, y: float, unit: float, start: float = NAMES - SAFE[0]):
        self.y, self.unit = y, unit
        self.bars = Bars([y], left=start, unit=unit, colors=[color])
        super().__init__(Label(name, size=SMALL).at(-SAFE[0], y), self.bars)

    def show(self, amount: float, written: str | None = None, *, unit: float | None = None, run_time: float = 0.8) -> Change:
        """Go to an amount, in bytes unless it is written in other words, and to another scale where ``unit`` says so."""
        self.unit = self.unit if unit is None else unit
        return self.bars.show([amount], [format_bytes(amount) if written is None else written], unit=unit, run_time=run_time)


def pair_of_meters(names: dict[str, str], most: float, *, y: float, start: float = -5.0) -> dict[str, Meter]:
    """A meter for each technique, named, one below the other from ``y`` down; ``most`` bytes fill the row."""
    unit = (SAFE[0] - 1.5 - start) / most
    named = enumerate(names.items())
    return {t: Meter(name, MIXER_COLORS[t], y=y - 0.47 * i, unit=unit, start=start) for i, (t, name) in named}


# ---- answers ----


class AnswerBoard(VGroup):
    """A board with a row for each slot: the word that is answered when the slot is asked for, and its probability as text."""

    def __init__(self, rows: Sequence[str], *, left: float, right: float, top: float, bottom: float):
        tall = (top - bottom) / len(rows)
        frame = RoundedRectangle(corner_radius=0.12, width=right - left, height=top - bottom, stroke_color=THEME.line, stroke_width=2)
        super().__init__(frame.set_fill(THEME.empty, 1).move_to([(left + right) / 2, (top + bottom) / 2, 0]))
        self.left, self.right, self.tall = left, right, tall
        self.middle = {row: top - (i + 0.5) * tall for i, row in enumerate(rows)}
        edges = (top - i * tall for i in range(1, len(rows)))
        self.add(*(Line([left, y, 0], [right, y, 0], color=THEME.line, stroke_width=1) for y in edges))
        names = VGroup(*(Label(row).at(left + 0.25, y) for row, y in self.middle.items()))
        self.words = Texts([(left + 0.85 + names.width, y) for y in self.middle.values()], size=BODY, bold=True)
        self.numbers = Texts([(right - 0.25, y) for y in self.middle.values()], right=True, size=BODY)
        self.add(names, self.words, self.numbers)

    def show(self, answers: dict[str, tuple[str, str]], *, run_time: float = 0.8) -> Change:
        """Go to other (word, probability) pairs; rows that are not named stay empty, and what is the same stays as it is."""
        words, numbers = zip(*(answers.get(row, ("", "")) for row in self.middle), strict=True)
        both = self.words.go(words), self.numbers.go(numbers)
        return Change(self, lambda alpha: [update(alpha) for update, _ in both], lambda: [done() for _, done in both], run_time=run_time)

    def outline(self, row: str) -> Rectangle:
        """A frame around a row."""
        frame = Rectangle(width=self.right - self.left, height=self.tall, color=ROLES["write"], stroke_width=5)
        return frame.move_to([(self.left + self.right) / 2, self.middle[row], 0])
