"""The whiteboard as a plotly figure: what each row says, and the whole state below it; KDA on the left, adding on the right."""

from __future__ import annotations

import textwrap
from itertools import groupby
from typing import Any

import numpy as np
import plotly.graph_objects as go

from k3viz.theme import LIGHT, ROLES, Theme, axis, diverging, format_number, layout, text_on
from k3viz.whiteboard.story import AUDIBLE, PHASES, WhiteboardStory, whiteboard_story

LEFT, RIGHT = (0.0, 0.455), (0.545, 1.0)  # where the two boards stand across the figure
BOARD, STATE = (0.61, 0.88), (0.0, 0.385)  # and how high: the rows above, the state below
PHASE_ROLES = {"fade": "decay", "erase": "erase", "write": "write"}
HATCHES = {"write": "", "erase": "/", "leak": "."}  # the second channel: never color alone
LEGEND = {"write": "the word it should say", "erase": "the word it replaced", "leak": "words of other rows"}
EQUATION = {  # the part of Eq. 1 that a sub-step computes is set in bold
    "erase": "(I − β k k<sup>⊤</sup>)",
    "fade": "Diag(α)",
    "write": "β k v<sup>⊤</sup>",
}


def whiteboard_figure(
    story: WhiteboardStory | None = None, *, frame: int | None = None, slider: bool = True, theme: Theme = LIGHT
) -> go.Figure:
    """Draw a whiteboard story (default: ``whiteboard_story()``), by hand or learned.

    frame: the sub-step to show, counted from the end if negative (default: the last one). slider: add a slider through all
    sub-steps. theme: ``k3viz.theme.LIGHT`` or ``DARK``. Raises ValueError for a frame that the story doesn't have.
    """
    story = whiteboard_story() if story is None else story
    if not isinstance(story, WhiteboardStory):
        from k3viz.whiteboard.learned_figure import learned_figure

        return learned_figure(story, frame=frame, slider=slider, theme=theme)
    shown = frame_index(len(story.frames), frame)
    picture = whiteboard_picture(story, shown, theme)
    if slider:
        labels = frame_labels(story)
        add_slider(picture, [whiteboard_picture(story, i, theme) for i in range(len(labels))], labels, shown, theme)
    return go.Figure(picture)


def frame_index(count: int, frame: int | None) -> int:
    """A position 0..count-1; ValueError in one sentence for anything else."""
    frame = -1 if frame is None else frame
    if isinstance(frame, bool) or not isinstance(frame, (int, np.integer)) or not -count <= frame < count:
        raise ValueError(f"frame must be a whole number from {-count} to {count - 1}, got {frame!r}")
    return int(frame) % count


def frame_labels(story: WhiteboardStory) -> list[str]:
    """One short label a frame: "start", "client: Acme, fade", ..."""
    return ["start" if f.step < 0 else f"{story.writes[f.step].text.rstrip('.')} · {f.phase}" for f in story.frames]


def whiteboard_picture(story: WhiteboardStory, index: int, theme: Theme, *, title: bool = True) -> dict[str, Any]:
    """{"data", "layout"} of one frame: the plain dict that both the figure and the live panel draw."""
    frame = story.frames[index]
    boards = ((frame.board, frame.state, "", LEFT), (frame.additive_board, frame.additive, "2", RIGHT))
    data, notes = [], [*_headings(theme), *_equation(frame.phase, theme)]
    for board, state, n, _ in boards:
        bars, small = _row_bars(story, board, story.current(index), n, theme)
        data += [*bars, _state_map(state, _largest(story), f"{int(n or 1) + 2}", theme)]
        notes += small
    low, high = _reach(story)
    names = list(story.rows)
    band = story.keys.shape[1] // len(names)
    ticks = {"tickvals": [band * (i + 0.5) for i in range(len(names))], "ticktext": names}
    out = layout(theme, height=640, margin={"l": 90, "r": 20, "t": 96 if title else 44, "b": 50}, barmode="relative", annotations=notes)
    if title:
        out["title"] = {"text": wrapped(frame.sentence), "x": 0.01, "xanchor": "left", "y": 0.965, "yanchor": "top", "font": {"size": 15}}
    for n, x in (("", LEFT), ("2", RIGHT)):
        out[f"xaxis{n}"] = axis(theme, domain=x, anchor=f"y{n}", range=[low, high], title=small_title("strength (1 = written once, in full)", theme))
        out[f"yaxis{n}"] = axis(theme, domain=BOARD, anchor=f"x{n}", categoryorder="array", categoryarray=names[::-1], showgrid=False)
    channels = small_title(f"{story.values.shape[1]} value channels", theme)
    for n, x in (("3", LEFT), ("4", RIGHT)):
        out[f"xaxis{n}"] = axis(theme, domain=x, anchor=f"y{n}", showgrid=False, zeroline=False, title=channels)
        out[f"yaxis{n}"] = axis(theme, domain=STATE, anchor=f"x{n}", autorange="reversed", showgrid=False, zeroline=False, **ticks)
    return {"data": data, "layout": out}


# ---- the rows ----


def _row_bars(story: WhiteboardStory, board: np.ndarray, current: dict[str, str], n: str, theme: Theme) -> tuple[list, list]:
    """Stacked bars, one segment a word: the current word first, then whatever else the row still says, strongest first."""
    rows = [_segments(story, strengths, current.get(row), row) for row, strengths in zip(story.rows, board, strict=True)]
    low, high = _reach(story)

    def wide_enough(word: str, x: float) -> bool:
        return abs(x) > 0.016 * (len(word) + 5) * (high - low)

    bars, small = [], []
    for rank in range(len(story.words)):
        cells = [row[rank] for row in rows]
        fills = [ROLES[role] for _, _, role in cells]
        bars.append({
            "type": "bar", "orientation": "h", "xaxis": f"x{n}", "yaxis": f"y{n}", "width": 0.62,
            "y": list(story.rows), "x": [round(x, 4) for _, x, _ in cells],
            "text": [f"{word} {format_number(x)}" if wide_enough(word, x) else "" for word, x, _ in cells],
            "textposition": "inside", "insidetextanchor": "middle", "textangle": 0, "constraintext": "none",
            "insidetextfont": {"size": 13, "color": [text_on(fill) for fill in fills]},
            "customdata": [f"{word} {format_number(x)}" for word, x, _ in cells], "hovertemplate": "%{y}: %{customdata}<extra></extra>",
            "marker": {"color": fills, "line": {"color": theme.paper, "width": 1},
                       "pattern": {"shape": [HATCHES[role] for _, _, role in cells], "fillmode": "overlay", "fgcolor": theme.paper,
                                   "fgopacity": 0.25, "size": 6, "solidity": 0.25}},
        })  # fmt: skip
    for row, cells in zip(story.rows, rows, strict=True):
        end = sum(x for _, x, _ in cells if x > 0)
        tiny = [f"{word} {format_number(x)}" for word, x, _ in cells if AUDIBLE <= abs(x) and not wide_enough(word, x)]
        text = ", ".join(tiny[:2]) + (", …" if len(tiny) > 2 else "")
        # one note a row even when it is empty: plotly's slider never removes a note that a frame doesn't mention
        small.append({"x": end, "y": row, "xref": f"x{n}", "yref": f"y{n}", "text": f" {text}", "xanchor": "left", "showarrow": False,
                      "font": {"size": 12, "color": theme.muted}})  # fmt: skip
    return bars, small


def _segments(story: WhiteboardStory, strengths: np.ndarray, current: str | None, row: str) -> list[tuple[str, float, str]]:
    own = {w.word for w in story.writes if w.row == row}
    cells = []
    for word, x in zip(story.words, strengths, strict=True):
        role = "write" if word == current else "erase" if word in own else "leak"
        cells.append((word, float(x), role))
    return sorted(cells, key=lambda cell: (cell[2] != "write", -abs(cell[1])))


def _reach(story: WhiteboardStory) -> tuple[float, float]:
    """One strength axis for both boards and all frames, so that lengths can be compared."""
    boards = np.stack([b for f in story.frames for b in (f.board, f.additive_board)])
    low, high = np.minimum(boards, 0).sum(-1).min(), np.maximum(boards, 0).sum(-1).max()
    return float(min(1.15 * low, 0.0)), float(max(1.15 * high, 1.2))


# ---- the state ----


def _largest(story: WhiteboardStory) -> float:
    return max(float(max(np.abs(f.state).max(), np.abs(f.additive).max())) for f in story.frames)


def _state_map(state: np.ndarray, largest: float, n: str, theme: Theme) -> dict[str, Any]:
    """The K x V state. Neighboring rows that are equal are drawn as one taller row: exact, and a small file."""
    runs = [(key, len(list(group))) for key, group in groupby(np.round(state, 4).tolist())]
    edges = np.cumsum([0, *(length for _, length in runs)]).tolist()
    return {
        "type": "heatmap", "xaxis": f"x{n}", "yaxis": f"y{n}", "z": [row for row, _ in runs], "y": edges,
        "zmin": -largest, "zmax": largest, "colorscale": diverging(theme), "showscale": n == "4",
        "colorbar": {"thickness": 10, "len": STATE[1] - STATE[0], "y": 0.0, "yanchor": "bottom",
                     "outlinewidth": 0, "tickfont": {"color": theme.ink}},
        "hovertemplate": "value channel %{x}: %{z:.2f}<extra></extra>",
    }  # fmt: skip


# ---- words around the picture ----


def _headings(theme: Theme) -> list[dict[str, Any]]:
    named = (("KDA: fade, erase, write", LEFT, BOARD), ("Adding only: fade, write, no erase", RIGHT, BOARD),
             ("The state behind it", LEFT, STATE), ("The state behind it", RIGHT, STATE))  # fmt: skip
    notes = [paper_note(f"<b>{text}</b>", x[0], y[1] + 0.012, theme, size=14) for text, x, y in named]
    legend = "    ".join(f"<span style='color:{ROLES[role]}'>■</span> {text}" for role, text in LEGEND.items())
    return [*notes, paper_note(legend, LEFT[0], STATE[1] + 0.075, theme, size=12)]


def _equation(phase: str, theme: Theme) -> list[dict[str, Any]]:
    part = {name: f"<b>{text}</b>" if name == phase else text for name, text in EQUATION.items()}
    text = f"S<sub>t</sub> = {part['erase']} {part['fade']} S<sub>t−1</sub> + {part['write']}"
    notes = [paper_note(text, LEFT[0], 1.0, theme, size=16)]
    for i, name in enumerate(PHASES):
        fill = ROLES[PHASE_ROLES[name]] if name == phase else theme.empty
        chip = paper_note(f" {i + 1} {name} ", RIGHT[0] + 0.085 * i, 1.0, theme, size=14)
        chip.update(bgcolor=fill, bordercolor=ROLES[PHASE_ROLES[name]], borderwidth=2, borderpad=3)
        chip["font"]["color"] = text_on(fill)
        notes.append(chip)
    return notes


def paper_note(text: str, x: float, y: float, theme: Theme, *, size: int) -> dict[str, Any]:
    """An annotation placed on the page, its lower left corner at (x, y)."""
    return {"text": text, "x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False,
            "align": "left", "font": {"size": size, "color": theme.ink}}  # fmt: skip


def small_title(text: str, theme: Theme) -> dict[str, Any]:
    """An axis title that is quieter than the headings."""
    return {"text": text, "font": {"size": 12, "color": theme.muted}, "standoff": 4}


def wrapped(sentence: str, width: int = 120) -> str:
    """A sentence over several lines: plotly's titles don't wrap by themselves."""
    return "<br>".join(textwrap.wrap(sentence, width))


def add_slider(picture: dict[str, Any], pictures: list[dict[str, Any]], labels: list[str], shown: int, theme: Theme) -> None:
    """Give ``picture`` a slider through all ``pictures``; each carries only what changes from frame to frame."""
    changing = ("title", "annotations")
    picture["frames"] = [
        {"name": str(i), "data": p["data"], "layout": {k: p["layout"][k] for k in changing if k in p["layout"]}}
        for i, p in enumerate(pictures)
    ]
    at_once = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}
    steps = [{"label": label, "method": "animate", "args": [[str(i)], at_once]} for i, label in enumerate(labels)]
    picture["layout"]["margin"]["b"] = 120
    picture["layout"]["height"] += 70
    picture["layout"]["sliders"] = [{
        "active": shown, "steps": steps, "x": 0, "len": 1, "y": -0.13, "pad": {"t": 10}, "ticklen": 0, "minorticklen": 0,
        "currentvalue": {"prefix": "step: ", "font": {"size": 14, "color": theme.ink}},
        "font": {"size": 1, "color": theme.paper},  # twelve long labels would run into each other: the current one is enough
        "bgcolor": theme.grid, "bordercolor": theme.line, "activebgcolor": ROLES["highlight"],
    }]  # fmt: skip
