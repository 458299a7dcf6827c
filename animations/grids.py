"""Parts that several scenes draw with: matrices with tiles, notes read word by word, dials, bars of kept shares."""

from __future__ import annotations

import numpy as np
from manim import Rectangle

from animations.board import HeatMap
from k3viz.theme import ROLES


class Grid(HeatMap):
    """A [rows, columns] matrix of any shape as colored cells, on the heat map's scale. A vector is a matrix with one row or column."""

    def __init__(self, matrix: np.ndarray, *, limit: float, left: float, top: float, width: float, height: float):
        super().__init__(matrix, limit=limit, left=left, top=top, size=height)
        self.stretch_to_fit_width(width).move_to([left + width / 2, top - height / 2, 0])

    def spot(self, rows: slice, columns: slice, color: str = ROLES["key"]) -> Rectangle:
        """A frame around a tile of the matrix."""
        n, m = self.matrix.shape
        (top, bottom, _), (start, stop, _) = rows.indices(n), columns.indices(m)
        size = (self.image.width / m * (stop - start), self.image.height / n * (bottom - top))
        frame = Rectangle(width=size[0], height=size[1], color=color, stroke_width=4)
        x = self.image.get_left()[0] + self.image.width * (start + stop) / 2 / m
        return frame.move_to([x, self.image.get_top()[1] - self.image.height * (top + bottom) / 2 / n, 0])
