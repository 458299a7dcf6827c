"""The whiteboard's two pictures: a board with rows, words and bars, and the state behind it as a heat map."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from manim import RESAMPLING_ALGORITHMS, Group, ImageMobject, Line, ManimColor, Rectangle, RoundedRectangle, SurroundingRectangle, VGroup

from animations.stage import THEME, Change, Label, coming, leaving, legend, mix
from k3viz.theme import ROLES, diverging, format_number


class Entry(VGroup):
    """One word on a board: the word, a bar as long as its strength, and the strength as a number."""

    def __init__(self, word: str, *, y: float, columns: tuple[float, float, float], unit: float):
        self.word = Label(word, bold=True)
        self.bar = Rectangle(width=1, height=0.22, stroke_width=0, fill_opacity=1)
        self.number: VGroup | Label = VGroup()
        self.columns, self.unit, self.strength, self.y = columns, unit, 0.0, y
        super().__init__(self.word, self.bar)

    def go(self, strength: float, y: float, color: str) -> Callable[[float], None]:
        """The update function that takes the entry to this strength and height; strength 0 takes it off the board."""
        from_strength, from_y, old = self.strength, self.y, self.number
        same = bool(strength and from_strength) and format_number(strength) == format_number(from_strength)
        new = old if same else Label(format_number(strength)) if strength else VGroup()
        self.strength, self.y, self.number = strength, y, new
        self.submobjects = [self.word, self.bar, new] if same else [self.word, self.bar, old, new]
        self.bar.set_color(color)

        def update(alpha: float) -> None:
            height = from_y + min(1.0, 2 * alpha) * (y - from_y)
            length = abs(from_strength + alpha * (strength - from_strength)) * self.unit
            self.word.at(self.columns[0], height)
            self.word.set_opacity(1.0 if strength and from_strength else coming(alpha) if strength else leaving(alpha))
            self.bar.stretch_to_fit_width(max(length, 1e-3)).move_to([self.columns[1] + length / 2, height, 0])
            if not same:
                old.set_opacity(leaving(alpha))
                new.set_opacity(coming(alpha))
            for number in (old, new):
                if len(number):
                    number.at(self.columns[2], height)

        return update


class Board(VGroup):
    """A whiteboard: labeled rows, and in each row the words that it says, with their strengths.

    rows: labels, top to bottom. words: every word that may appear, so that the columns are wide enough. limit: the strength of a
    full bar. labels: False leaves the row labels out, for a second board beside the first. Raises ValueError when it doesn't fit.
    """

    def __init__(
        self, rows: Sequence[str], words: Sequence[str], *,
        left: float, right: float, top: float, bottom: float, limit: float, labels: bool = True,
    ):  # fmt: skip
        tall = (top - bottom) / len(rows)
        if tall < 0.8:
            raise ValueError(f"facts: the drawn board has room for {(top - bottom) / 0.8:.0f} rows, got {len(rows)}")
        frame = RoundedRectangle(corner_radius=0.12, width=right - left, height=top - bottom, stroke_color=THEME.line, stroke_width=2)
        super().__init__(frame.set_fill(THEME.empty, 1).move_to([(left + right) / 2, (top + bottom) / 2, 0]))
        self.middle = {row: top - (i + 0.5) * tall for i, row in enumerate(rows)}
        edges = [y + tall / 2 for y in self.middle.values()][1:]
        self.add(*(Line([left, y, 0], [right, y, 0], color=THEME.line, stroke_width=1) for y in edges))
        x = left + 0.25
        if labels:
            names = VGroup(*(Label(row).at(x, y) for row, y in self.middle.items()))
            self.add(names)
            x += names.width + 0.4
        bar = x + max(Label(word, bold=True).width for word in words) + 0.2
        number = right - 0.25 - Label(format_number(limit)).width
        if number - bar < 0.8:
            raise ValueError(f"facts: the labels and words are too long for the drawn board: {', '.join([*rows, *words])}")
        self.columns, self.unit = (x, bar, number), (number - 0.2 - bar) / limit
        self.entries: dict[tuple[str, str], Entry] = {}

    def outline(self, row: str, right: float) -> Rectangle:
        """A frame around a row, from the board's left edge to ``right``, where the same row's band of the state ends."""
        left, tall = self.get_left()[0], 2 * (self.get_top()[1] - next(iter(self.middle.values())))
        frame = Rectangle(width=right - left, height=tall, color=ROLES["key"], stroke_width=4)
        return frame.move_to([(left + right) / 2, self.middle[row], 0])

    def tint(self, row: str, words: Sequence[str], color: str) -> Change:
        """Color the bars of some words in a row."""
        bars = [self.entries[row, word].bar for word in words]
        start = [bar.get_fill_color().to_hex() for bar in bars]

        def update(alpha: float) -> None:
            for bar, old in zip(bars, start, strict=True):
                bar.set_color(mix(old, color, alpha))

        return Change(self, update, run_time=0.8)

    def show(self, says: dict[str, list[tuple[str, float]]], *, color: str = THEME.muted, run_time: float = 1.5) -> Change:
        """Go to what each row now says: row -> (word, strength) pairs. Bars whose number changes take ``color``, the acting term's."""
        updates = []
        for row, middle in self.middle.items():
            targets = {word: (strength, middle + ((len(says[row]) - 1) / 2 - i) * 0.5) for i, (word, strength) in enumerate(says[row])}
            for word in targets:
                if (row, word) not in self.entries:
                    self.entries[row, word] = Entry(word, y=targets[word][1], columns=self.columns, unit=self.unit)
                    self.add(self.entries[row, word])
            for entry in (entry for (r, word), entry in self.entries.items() if r == row):
                strength, y = targets.get(entry.word.text, (0.0, entry.y))
                changed = format_number(strength) != format_number(entry.strength)
                updates.append(entry.go(strength, y, color if changed else THEME.muted))

        def update(alpha: float) -> None:
            for each in updates:
                each(alpha)

        def done() -> None:
            for place in [place for place, entry in self.entries.items() if not entry.strength]:
                self.remove(self.entries.pop(place))

        return Change(self, update, done, run_time=run_time)


class HeatMap(Group):
    """A [K, V] matrix as colored cells on the theme's signed scale. limit: the magnitude of full color."""

    def __init__(self, matrix: np.ndarray, *, limit: float, left: float, top: float, size: float):
        self.matrix, self.limit = matrix, limit
        self.image = ImageMobject(self._pixels(matrix))
        self.image.set_resampling_algorithm(RESAMPLING_ALGORITHMS["nearest"])
        self.image.stretch_to_fit_height(size).stretch_to_fit_width(size).move_to([left + size / 2, top - size / 2, 0])
        super().__init__(self.image, SurroundingRectangle(self.image, buff=0, color=THEME.line, stroke_width=2))

    def show(self, matrix: np.ndarray, *, run_time: float = 1.5) -> Change:
        """Go to another matrix, cell by cell along a straight line."""
        old, self.matrix = self.matrix, matrix

        def update(alpha: float) -> None:
            self.image.pixel_array = self._pixels(old + alpha * (matrix - old))

        return Change(self, update, run_time=run_time)

    def legend(self) -> VGroup:
        """The two ends of the color scale with their values, under the map."""
        (_, low), *_, (_, high) = diverging(THEME)
        ends = ((low, format_number(-self.limit)), (high, format_number(self.limit)))
        return legend(ends, x=self.get_left()[0], y=self.get_bottom()[1] - 0.35)

    def _pixels(self, matrix: np.ndarray) -> np.ndarray:
        stops, colors = zip(*diverging(THEME), strict=True)
        level = (np.clip(matrix / self.limit, -1, 1) + 1) / 2
        channels = np.array([ManimColor(color).to_rgb() for color in colors]).T
        rgb = np.stack([np.interp(level, stops, channel) for channel in channels], axis=-1)
        return np.dstack([rgb * 255, np.full(matrix.shape, 255)]).round().astype(np.uint8)
