"""Charts on the stage: texts that change in place, bars with numbers, edges as thick as their weights, a grid of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from manim import RESAMPLING_ALGORITHMS, Group, ImageMobject, Line, ManimColor, Rectangle, RoundedRectangle, SurroundingRectangle, VGroup

from animations.stage import SMALL, THEME, Change, Label, coming, leaving, mix
from k3viz.theme import text_on

Point = tuple[float, float]


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
