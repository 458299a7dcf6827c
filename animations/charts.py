"""Charts on the stage: parts that come and go cheaply, texts that change in place, bars, edges as thick as weights, a grid of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from manim import (
    RESAMPLING_ALGORITHMS,
    Group,
    ImageMobject,
    Line,
    ManimColor,
    Mobject,
    Rectangle,
    RoundedRectangle,
    SurroundingRectangle,
    VGroup,
    VMobject,
)

from animations.stage import SMALL, THEME, Change, Label, coming, leaving, mix
from k3viz.theme import text_on

Point = tuple[float, float]


def appear(*mobjects: Mobject, run_time: float = 1.0) -> Change:
    """Fade in like manim's ``FadeIn``, which copies every glyph several times: here only opacities change."""
    return Change(Group(*mobjects), _opacities(mobjects), run_time=run_time)


def vanish(*mobjects: Mobject, run_time: float = 1.0) -> Change:
    """Fade out and leave the stage."""
    update = _opacities(mobjects)
    change = Change(Group(*mobjects), lambda alpha: update(1 - alpha), run_time=run_time)
    change.remover = True
    return change


def _opacities(mobjects: Sequence[Mobject]) -> Callable[[float], None]:
    """The update function that shows the mobjects with this share of the opacity that they have now."""
    family = [m for mobject in mobjects for m in mobject.get_family()]
    shapes = [(m, m.get_fill_opacity(), m.get_stroke_opacity()) for m in family if isinstance(m, VMobject) and m.has_points()]
    images = [m for m in family if isinstance(m, ImageMobject)]

    def update(alpha: float) -> None:
        for m, fill, stroke in shapes:
            m.set_fill(opacity=alpha * fill, family=False).set_stroke(opacity=alpha * stroke, family=False)
        for image in images:
            image.set_opacity(alpha)

    return update


class Texts(VGroup):
    """Texts at fixed places. Where one changes, the old leaves before the new comes; what stays the same is not touched.

    places: (x, y) of each text, where its left edge stands, or its right edge with ``right=True``. A text of "" shows nothing.
    """

    def __init__(self, places: Sequence[Point], *, right: bool = False, size: float = SMALL, bold: bool = False):
        self.places, self.right, self.look = list(places), right, {"size": size, "bold": bold}
        self.now = [VGroup() for _ in places]
        super().__init__(*self.now)

    def go(self, texts: Sequence[str]) -> tuple[Callable[[float], None], Callable[[], None]]:
        """(update, done) of a ``Change`` to these texts."""
        pairs = []
        for i, (x, y) in enumerate(self.places):
            old = self.now[i]
            if texts[i] == getattr(old, "text", ""):
                continue
            new = Label(texts[i], **self.look) if texts[i] else VGroup()
            if texts[i]:
                new.at(x - new.width if self.right else x, y).set_opacity(0)
            self.now[i] = new
            pairs.append((old, new))
            self.add(new)

        def update(alpha: float) -> None:
            for old, new in pairs:
                old.set_opacity(leaving(alpha))
                new.set_opacity(coming(alpha))

        def done() -> None:
            self.remove(*(old for old, _ in pairs))

        return update, done

    def show(self, texts: Sequence[str], *, run_time: float = 0.8) -> Change:
        """Change to these texts."""
        return Change(self, *self.go(texts), run_time=run_time)


class Bars(VGroup):
    """Bars to the right, one at each of ``ys``, as long as their value times ``unit``, with the value's text behind the end, or before
    the start with ``before=True``."""

    def __init__(
        self, ys: Sequence[float], *, left: float, unit: float, colors: Sequence[str], height: float = 0.3, before: bool = False
    ):
        self.before = before
        self.ys, self.left, self.unit, self.values = list(ys), left, unit, np.zeros(len(ys))
        self.bars = [Rectangle(width=1, height=height, stroke_width=0, fill_color=c, fill_opacity=1) for c in colors]
        self.labels: list[VGroup] = [VGroup() for _ in ys]
        super().__init__(*self.bars, *self.labels)
        self._draw(self.values)

    def show(self, values: Sequence[float], texts: Sequence[str], *, unit: float | None = None, run_time: float = 1.2) -> Change:
        """Go to other values, and to another scale where ``unit`` says so."""
        start, self.unit = self.values * self.unit, self.unit if unit is None else unit
        self.values = np.asarray(values, dtype=float)
        end, pairs = self.values * self.unit, []
        for i, text in enumerate(texts):
            old = self.labels[i]
            new = old if getattr(old, "text", None) == text else Label(text, size=SMALL).set_opacity(0)
            self.labels[i] = new
            pairs.append((old, new))
            self.add(new)

        def update(alpha: float) -> None:
            lengths = start + alpha * (end - start)
            self._draw(lengths)
            for (old, new), length, y in zip(pairs, lengths, self.ys, strict=True):
                for label in (old, new):
                    if len(label):
                        label.at(self.left - 0.1 - label.width if self.before else self.left + length + 0.12, y)
                if new is not old:
                    old.set_opacity(leaving(alpha))
                    new.set_opacity(coming(alpha))

        return Change(self, update, lambda: self.remove(*(old for old, new in pairs if new is not old)), run_time=run_time)

    def paint(self, colors: Sequence[str], *, run_time: float = 0.8) -> Change:
        """Change the bars' colors."""
        start = [bar.get_fill_color().to_hex() for bar in self.bars]

        def update(alpha: float) -> None:
            for bar, old, new in zip(self.bars, start, colors, strict=True):
                bar.set_fill(mix(old, new, alpha))

        return Change(self, update, run_time=run_time)

    def _draw(self, lengths: np.ndarray) -> None:
        for bar, length, y in zip(self.bars, lengths, self.ys, strict=True):
            bar.stretch_to_fit_width(max(float(length), 1e-3)).move_to([self.left + max(float(length), 1e-3) / 2, y, 0])


class Edges(VGroup):
    """Lines from ``starts`` to ``ends``, as thick as their weights: a weight of 1 is ``thickest`` units wide."""

    def __init__(self, starts: Sequence[Point], ends: Sequence[Point], *, color: str, thickest: float):
        super().__init__(*(Line([*a, 0], [*b, 0], color=color, stroke_width=0) for a, b in zip(starts, ends, strict=True)))
        self.thickest, self.weights = thickest, np.zeros(len(starts))

    def show(self, weights: Sequence[float], *, run_time: float = 1.0) -> Change:
        """Go to other weights."""
        start, self.weights = self.weights, np.asarray(weights, dtype=float)
        end = self.weights

        def update(alpha: float) -> None:
            for line, weight in zip(self, start + alpha * (end - start), strict=True):
                line.set_stroke(width=100 * self.thickest * weight)  # manim's strokes are hundredths of a unit

        return Change(self, update, run_time=run_time)


class Box(VGroup):
    """A filled box with lines of text in its middle; text can be put in and taken out later by ``Texts`` beside it."""

    def __init__(self, *lines: str, x: float, y: float, width: float, height: float, fill: str = THEME.empty, bold: bool = False):
        card = RoundedRectangle(corner_radius=0.1, width=width, height=height, stroke_color=THEME.line, stroke_width=2)
        labels = [Label(line, size=SMALL, color=text_on(fill), bold=bold) for line in lines]
        for i, label in enumerate(labels):
            label.at(x - label.width / 2, y + ((len(lines) - 1) / 2 - i) * 0.38)
        super().__init__(card.set_fill(fill, 1).move_to([x, y, 0]), *labels)
        self.left, self.right = (x - width / 2, y), (x + width / 2, y)


class ExpertGrid(Group):
    """Many experts as one picture: a cell each, row by row, blank at first. ``place(e)``: the middle of an expert's cell."""

    CELL = 8  # pixels, of which one at two edges is the gap

    def __init__(self, experts: int, *, left: float, top: float, width: float, height: float):
        self.experts = experts
        square = (experts * width / height) ** 0.5  # columns of square cells; a nearby divisor leaves no gap in the last row
        near = [c for c in range(1, experts + 1) if experts % c == 0 and 0.75 < c / square < 1.33]
        self.columns = min(near, key=lambda c: abs(c - square), default=max(1, round(square)))
        self.rows = -(-experts // self.columns)
        self.box = (left, top, width, height)
        self.colors = np.tile(_rgb(THEME.grid), (experts, 1))
        self.image = ImageMobject(self._pixels(self.colors))
        self.image.set_resampling_algorithm(RESAMPLING_ALGORITHMS["nearest"])
        self.image.stretch_to_fit_height(height).stretch_to_fit_width(width).move_to([left + width / 2, top - height / 2, 0])
        super().__init__(self.image, SurroundingRectangle(self.image, buff=0.05, color=THEME.line, stroke_width=2))

    def place(self, expert: int) -> Point:
        left, top, width, height = self.box
        row, column = divmod(expert, self.columns)
        return left + width * (column + 0.5) / self.columns, top - height * (row + 0.5) / self.rows

    def shade(self, levels: np.ndarray, color: str, *, run_time: float = 1.0) -> Change:
        """Color each expert from blank (level 0) to ``color`` (level 1)."""
        blank, full = _rgb(THEME.grid), _rgb(color)
        old, self.colors = self.colors, blank + np.asarray(levels, dtype=float)[:, None] * (full - blank)
        new = self.colors

        def update(alpha: float) -> None:
            self.image.pixel_array = self._pixels(old + alpha * (new - old))

        return Change(self, update, run_time=run_time)

    def _pixels(self, colors: np.ndarray) -> np.ndarray:
        cells = np.tile(_rgb(THEME.paper), (self.rows * self.columns, 1))
        cells[: self.experts] = colors
        picture = cells.reshape(self.rows, self.columns, 3).repeat(self.CELL, 0).repeat(self.CELL, 1)
        picture[:: self.CELL] = picture[:, :: self.CELL] = _rgb(THEME.paper)
        return np.dstack([picture, np.full(picture.shape[:2], 255)]).round().astype(np.uint8)


def _rgb(color: str) -> np.ndarray:
    return np.array(ManimColor(color).to_rgb()) * 255
