"""The whiteboard as a plotly figure: what each row says, and the whole state below it; KDA on the left, adding on the right."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from k3viz.theme import LIGHT, Theme, literal
from k3viz.whiteboard.learned import LearnedWhiteboard
from k3viz.whiteboard.learned_figure import learned_picture
from k3viz.whiteboard.parts_figure import (
    LEFT,
    RIGHT,
    Cell,
    add_slider,
    equation,
    frame_index,
    headings,
    legend,
    page,
    row_axes,
    row_bars,
    state_axes,
    state_map,
)  # fmt: skip
from k3viz.whiteboard.story import AUDIBLE, WhiteboardStory, whiteboard_story

LEGEND = {"write": "the word it should say", "erase": "the word it replaced", "leak": "words of other rows"}


def whiteboard_figure(
    *, story: WhiteboardStory | LearnedWhiteboard | None = None, frame: int | None = None, slider: bool | None = None, theme: Theme = LIGHT
) -> go.Figure:
    """Draw a whiteboard story (default: ``whiteboard_story()``).

    frame: the sub-step to show, counted from the end if negative (default: the last one). slider: add a slider through all
    sub-steps (default: for a story by hand; a learned one has a dense 128 x 128 state in each, which makes a large file).
    theme: ``k3viz.theme.LIGHT`` or ``DARK``. Raises ValueError for a frame that the story doesn't have.
    """
    story = whiteboard_story() if story is None else story
    learned = isinstance(story, LearnedWhiteboard)
    draw, labels = learned_picture if learned else whiteboard_picture, story.labels
    shown = frame_index(len(labels), frame)
    picture = draw(story, shown, theme)
    if not learned if slider is None else slider:
        add_slider(picture, [draw(story, i, theme) for i in range(len(labels))], labels, shown, theme)
    return go.Figure(picture)


def whiteboard_picture(story: WhiteboardStory, index: int, theme: Theme, *, title: bool = True) -> dict[str, Any]:
    """{"data", "layout"} of one frame: the plain dict that both the figure and the live panel draw."""
    frame = story.frames[index]
    reach, largest, current = _reach(story), _largest(story), story.current(index)
    notes = headings(("KDA: fade, erase, write", "Adding only: fade, write, no erase"), ("The state behind it",) * 2, theme)
    notes += [legend(LEGEND, theme), *equation(frame.phase, theme)]
    data, names = [], tuple(map(literal, story.rows))
    for n, board, state in (("", frame.board, frame.state), ("2", frame.additive_board, frame.additive)):
        rows = {literal(row): _cells(story, row, strengths, current.get(row)) for row, strengths in zip(story.rows, board, strict=True)}
        bars, small = row_bars(rows, reach, n, theme)
        data += [*bars, state_map(state, largest, {"": "3", "2": "4"}[n], theme)]
        notes += small
    band = story.keys.shape[1] // len(story.rows)
    ticks = {"tickvals": [band * (i + 0.5) for i in range(len(story.rows))], "ticktext": names}
    out = page(theme, frame.sentence if title else None, notes)
    for upper, lower, x in (("", "3", LEFT), ("2", "4", RIGHT)):
        out |= row_axes(names, reach, "strength (1 = written once, in full)", upper, x, theme)
        out |= state_axes(story.values.shape[1], lower, x, theme, **ticks)
    return {"data": data, "layout": out}


def _cells(story: WhiteboardStory, row: str, strengths: np.ndarray, current: str | None) -> list[Cell]:
    """The words that a row says: the one it should say first, then whatever else is there, strongest first."""
    own = {w.word for w in story.writes if w.row == row}
    roles = ["write" if word == current else "erase" if word in own else "leak" for word in story.words]
    cells = list(zip(map(literal, story.words), map(float, strengths), roles, strict=True))
    return sorted(cells, key=lambda cell: (cell[2] != "write", -abs(cell[1])))


def _reach(story: WhiteboardStory) -> tuple[float, float]:
    """One strength axis for both boards and all frames, so that lengths can be compared."""
    boards = np.stack([b for f in story.frames for b in (f.board, f.additive_board)])
    low, high = np.minimum(boards, 0).sum(-1).min(), np.maximum(boards, 0).sum(-1).max()
    return (float(1.15 * low) if low < -AUDIBLE else 0.0), float(max(1.15 * high, 1.2))


def _largest(story: WhiteboardStory) -> float:
    return max(float(max(np.abs(f.state).max(), np.abs(f.additive).max())) for f in story.frames)
