"""Parts that several scenes draw with: matrices with tiles, notes read word by word, dials."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from manim import Circle, DashedLine, DashedVMobject, Line, Rectangle, VGroup, VMobject, linear

from animations.board import HeatMap
from animations.stage import SMALL, THEME, Change, Label
from k3viz.theme import ROLES

SLOWEST, FASTEST = 1e3, 1e-1  # half-lives, in words, at the two ends of a dial


class Grid(HeatMap):
    """A [rows, columns] matrix of any shape as colored cells, on the heat map's scale. A vector is a matrix with one row or column."""

    def __init__(self, matrix: np.ndarray, *, limit: float, left: float, top: float, width: float, height: float):
        super().__init__(matrix, limit=limit, left=left, top=top, size=height)
        self.stretch_to_fit_width(width).move_to([left + width / 2, top - height / 2, 0])

    def run(self, matrices: np.ndarray, *, run_time: float) -> Change:
        """Show the matrices [N, rows, columns] one after another, each for the same time."""
        self.matrix = matrices[-1]
        return _evenly(self, len(matrices), lambda i: setattr(self.image, "pixel_array", self._pixels(matrices[i])), run_time)

    def spot(self, rows: slice, columns: slice, color: str = ROLES["key"]) -> Rectangle:
        """A frame around a tile of the matrix."""
        n, m = self.matrix.shape
        (top, bottom, _), (start, stop, _) = rows.indices(n), columns.indices(m)
        size = (self.image.width / m * (stop - start), self.image.height / n * (bottom - top))
        frame = Rectangle(width=size[0], height=size[1], color=color, stroke_width=4)
        x = self.image.get_left()[0] + self.image.width * (start + stop) / 2 / m
        return frame.move_to([x, self.image.get_top()[1] - self.image.height * (top + bottom) / 2 / n, 0])


class Note(VGroup):
    """A text in lines of at most ``width``; what has been read is dark, what is to come is pale. bold: of each token."""

    def __init__(self, tokens: Sequence[str], bold: Sequence[bool], *, x: float, y: float, width: float):
        super().__init__()
        left, space = x, 0.17
        for token, heavy in zip(tokens, bold, strict=True):
            label = Label(token, size=SMALL, bold=heavy)
            gap = 0.03 if token in ".,:;?!" else space if left > x else 0
            if left + gap + label.width > x + width:
                left, y, gap = x, y - 0.42, 0
            self.add(label.at(left + gap, y))
            left += gap + label.width
        self.upto(0)

    def upto(self, read: int) -> None:
        """So many tokens have been read."""
        for i, label in enumerate(self):
            label.set_opacity(1.0 if i < read else 0.35)

    def run(self, *, run_time: float) -> Change:
        """Read the text from the start, each token for the same time."""
        return _evenly(self, len(self), lambda i: self.upto(i + 1), run_time)


class Plot(VGroup):
    """A frame of axes from (x, y) values to the stage. ranges and ends: (lowest, highest) of the values, and where those lie."""

    def __init__(self, xs: tuple[float, float], ys: tuple[float, float], *, left: float, right: float, bottom: float, top: float):
        self.ranges, self.ends = (xs, ys), ((left, right), (bottom, top))
        self.axes = VGroup(*(Line(self.at(xs[0], ys[0]), self.at(*end), color=THEME.line, stroke_width=2) for end in ((xs[1], ys[0]),
                                                                                                             (xs[0], ys[1]))))  # fmt: skip
        super().__init__(self.axes)

    def at(self, x: float, y: float) -> np.ndarray:
        """The point of the stage for these values."""
        place = [
            a + (value - low) / (high - low) * (b - a) for value, (low, high), (a, b) in zip((x, y), self.ranges, self.ends, strict=True)
        ]
        return np.array([*place, 0.0])

    def curve(self, xs: Sequence[float], ys: Sequence[float], color: str, *, dashed: bool = False) -> VMobject:
        """A line through the points; what leaves the frame below or above is left out."""
        low, high = sorted(self.ranges[1])
        line = VMobject(stroke_color=color, stroke_width=5)
        line.set_points_as_corners([self.at(x, y) for x, y in zip(xs, ys, strict=True) if low <= y <= high])
        return DashedVMobject(line, num_dashes=30, dashed_ratio=0.6) if dashed else line

    def mark(self, y: float, color: str = THEME.muted) -> DashedLine:
        """A level line."""
        return DashedLine(self.at(self.ranges[0][0], y), self.at(self.ranges[0][1], y), color=color, stroke_width=3)

    def ticks(self, values: Sequence[float], texts: Sequence[str]) -> VGroup:
        """Numbers left of the vertical axis."""
        labels = [Label(text, size=SMALL) for text in texts]
        return VGroup(*(label.at(self.ends[0][0] - 0.12 - label.width, self.at(0, y)[1]) for label, y in zip(labels, values, strict=True)))


class Dials(VGroup):
    """Dials in ``columns`` columns, one a half-life [K] in words; the hand of one that fades slowly points to the left.

    All faces are one shape and all hands another: a hundred dials cost as much as one.
    """

    def __init__(self, half_lives: np.ndarray, *, columns: int, left: float, top: float, pitch: float):
        n = np.arange(len(half_lives))
        self.middles = np.stack([left + pitch * (n % columns + 0.5), top - pitch * (n // columns + 0.5), 0.0 * n], -1)
        self.radius = 0.44 * pitch
        weight = 1 if len(n) > 1 else 4
        faces = VMobject(stroke_color=THEME.line, stroke_width=weight)
        faces.set_points(np.concatenate([Circle(self.radius).move_to(middle).points for middle in self.middles]))
        self.hands = VMobject(stroke_color=THEME.ink, stroke_width=2 * weight)
        super().__init__(faces, self.hands)
        self.turned = self._turn(half_lives)
        self._draw(self.turned)

    def show(self, half_lives: np.ndarray, *, run_time: float = 1.2) -> Change:
        """Turn the hands to other half-lives."""
        old, self.turned = self.turned, self._turn(half_lives)
        new = self.turned
        return Change(self, lambda alpha: self._draw(old + alpha * (new - old)), run_time=run_time)

    @staticmethod
    def _turn(half_lives: np.ndarray) -> np.ndarray:
        """Angles of the hands: a logarithmic scale over three quarters of a turn."""
        ends = np.log([FASTEST, SLOWEST])
        share = (np.log(np.clip(half_lives, FASTEST, SLOWEST)) - ends[0]) / (ends[1] - ends[0])
        return np.deg2rad(-45 + 270 * share)

    def _draw(self, angles: np.ndarray) -> None:
        tips = self.middles + self.radius * np.stack([np.cos(angles), np.sin(angles), 0 * angles], -1)
        self.hands.set_points(np.concatenate([Line(a, b).points for a, b in zip(self.middles, tips, strict=True)]))


def _evenly(mobject, steps: int, show, run_time: float) -> Change:
    """A change in ``steps`` steps of equal length."""
    change = Change(mobject, lambda alpha: show(min(steps - 1, int(alpha * steps))), run_time=run_time)
    change.rate_func = linear
    return change
