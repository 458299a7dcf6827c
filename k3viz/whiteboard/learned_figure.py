"""A trained model's whiteboard: its answers, its write strengths and decays, and the state of one head beside the additive one."""

from __future__ import annotations

from typing import Any

import numpy as np

from k3viz.theme import ROLES, Theme, axis, format_number
from k3viz.whiteboard.learned import LearnedWhiteboard
from k3viz.whiteboard.parts_figure import (
    BOARD,
    LEFT,
    RIGHT,
    Cell,
    equation,
    headings,
    legend,
    page,
    row_axes,
    row_bars,
    small_title,
    state_axes,
    state_map,
)  # fmt: skip

LEGEND = {"write": "its answer now", "erase": "another word of the text", "leak": "words it never read"}
SHOWN = 4  # words a row; the other probabilities are summed up as one last segment
REACH = (0.0, 1.5)  # probabilities end at 1; the rest is room for words too small to write inside


def learned_picture(story: LearnedWhiteboard, index: int, theme: Theme, *, title: bool = True) -> dict[str, Any]:
    """{"data", "layout"} of one frame."""
    frame = story.frame(index)
    layer, head = story.head
    place = f"layer {layer + 1}, head {head + 1}"
    upper = ("What the model answers if asked now", "This head: β (bars), mean α (diamonds)")
    notes = headings(upper, (f"Its state, {place}", "The same writes without the erase"), theme)
    notes += [legend(LEGEND, theme), *equation(frame.phase, theme)]
    rows = {slot: _cells(story, pairs) for slot, pairs in frame.board.items()}
    bars, small = row_bars(rows, REACH, "", theme, behind=1)
    largest = _largest(story)
    data = [*bars, *_gates(story, frame.token, theme), state_map(frame.state, largest, "3", theme),
            state_map(frame.additive, largest, "4", theme)]  # fmt: skip
    out = page(theme, frame.sentence if title else None, [*notes, *small])
    out |= row_axes(story.rows, REACH, "probability", "", LEFT, theme)
    out["xaxis"] |= {"tickvals": [0, 0.25, 0.5, 0.75, 1]}
    T = len(story.tokens)
    out["xaxis2"] = axis(theme, domain=RIGHT, anchor="y2", range=[-0.7, T - 0.3], showgrid=False, zeroline=False, tickvals=list(range(T)),
                         ticktext=list(story.tokens), tickangle=-60)  # fmt: skip
    out["xaxis2"]["tickfont"]["size"] = 11 if T <= 30 else 8
    out["yaxis2"] = axis(theme, domain=BOARD, anchor="x2", range=[0, 1.05])
    for n, x in (("3", LEFT), ("4", RIGHT)):
        out |= state_axes(story.v.shape[1], n, x, theme, title=small_title(f"{story.k.shape[1]} key channels", theme))
    return {"data": data, "layout": out}


def _cells(story: LearnedWhiteboard, pairs: list[tuple[str, float]]) -> list[Cell]:
    """Likeliest words first; what is beyond the first few, of this slot and of all other words, as one segment "other"."""
    said = set(story.tokens)
    cells = [(word, p, "write" if i == 0 else "erase" if word in said else "leak") for i, (word, p) in enumerate(pairs[:SHOWN])]
    return [*cells, ("other", max(0.0, 1.0 - sum(p for _, p, _ in cells)), "leak")]


def _gates(story: LearnedWhiteboard, now: int, theme: Theme) -> list[dict[str, Any]]:
    """beta of every token as bars, the mean alpha as dots; the token at work stands out."""
    T = len(story.tokens)
    fills = [ROLES["write"] if t == now else theme.line if t < now else theme.grid for t in range(T)]
    alpha = story.alpha.mean(-1)
    return [
        {"type": "bar", "xaxis": "x2", "yaxis": "y2", "x": list(range(T)), "y": np.round(story.beta, 4).tolist(), "width": 0.8,
         "marker": {"color": fills}, "customdata": [f"{w}: beta {format_number(b)}" for w, b in zip(story.tokens, story.beta, strict=True)],
         "hovertemplate": "%{customdata}<extra></extra>"},
        {"type": "scatter", "mode": "markers", "xaxis": "x2", "yaxis": "y2", "x": list(range(T)), "y": np.round(alpha, 4).tolist(),
         "marker": {"color": ROLES["decay"], "size": 9, "symbol": "diamond", "line": {"color": theme.ink, "width": 1}},
         "customdata": [f"{w}: mean alpha {format_number(a)}" for w, a in zip(story.tokens, alpha, strict=True)],
         "hovertemplate": "%{customdata}<extra></extra>"},
    ]  # fmt: skip


def _largest(story: LearnedWhiteboard) -> float:
    """Where the color scale ends: half a percent of the numbers may lie beyond, or one outlier would make the board pale."""
    return float(np.quantile(np.abs(np.stack((story.states[1:], story.additive[1:]))), 0.995)) or 1.0
