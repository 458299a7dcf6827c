"""Pieces of the whiteboard picture that the story by hand and the learned story share: rows, state, equation, slider."""

from __future__ import annotations

import base64
from itertools import groupby
from typing import Any

import numpy as np

from k3viz.theme import ROLES, Theme, axis, diverging, format_number, layout, text_on, wrapped
from k3viz.whiteboard.story import AUDIBLE, PHASES

LEFT, RIGHT = (0.0, 0.47), (0.53, 1.0)  # where the two boards stand across the figure
BOARD, STATE = (0.61, 0.88), (0.0, 0.385)  # and how high: the rows above, the state below
PHASE_ROLES = {"fade": "decay", "erase": "erase", "write": "write"}
LETTER = 0.0225  # a letter's width, as a share of a board's, in a notebook
HATCHES = {"write": "", "erase": "/", "leak": "."}  # the second channel: never color alone
EQUATION = {"erase": "(I − β k k<sup>⊤</sup>)", "fade": "Diag(α)", "write": "β k v<sup>⊤</sup>"}  # the part at work is set in bold

Cell = tuple[str, float, str]  # (word, amount, role) of one segment of a row


def frame_index(count: int, frame: int | None) -> int:
    """A position 0..count-1; ValueError in one sentence for anything else."""
    frame = -1 if frame is None else frame
    if isinstance(frame, bool) or not isinstance(frame, (int, np.integer)) or not -count <= frame < count:
        raise ValueError(f"frame must be a whole number from {-count} to {count - 1}, got {frame!r}")
    return int(frame) % count


def page(theme: Theme, sentence: str | None, notes: list[dict[str, Any]]) -> dict[str, Any]:
    """The layout without its axes; ``sentence`` becomes the title."""
    top = 44 if sentence is None else 96
    out = layout(theme, height=640, margin={"l": 90, "r": 20, "t": top, "b": 50}, barmode="relative", annotations=notes)
    if sentence is not None:
        out["title"] = {"text": wrapped(sentence, 118), "x": 0.01, "xanchor": "left", "y": 0.965, "yanchor": "top", "font": {"size": 15}}
    return out


def small_title(text: str, theme: Theme) -> dict[str, Any]:
    """An axis title that is quieter than the headings."""
    return {"text": text, "font": {"size": 12, "color": theme.muted}, "standoff": 4}


def paper_note(text: str, x: float, y: float, theme: Theme, *, size: int = 14) -> dict[str, Any]:
    """An annotation placed on the page, its lower left corner at (x, y)."""
    return {"text": text, "x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False,
            "align": "left", "font": {"size": size, "color": theme.ink}}  # fmt: skip


def headings(upper: tuple[str, str], lower: tuple[str, str], theme: Theme) -> list[dict[str, Any]]:
    places = [(text, x[0], y[1]) for texts, y in ((upper, BOARD), (lower, STATE)) for text, x in zip(texts, (LEFT, RIGHT), strict=True)]
    return [paper_note(f"<b>{text}</b>", x, y + 0.012, theme) for text, x, y in places]


def legend(meanings: dict[str, str], theme: Theme) -> dict[str, Any]:
    text = "    ".join(f"<span style='color:{ROLES[role]}'>■</span> {meaning}" for role, meaning in meanings.items())
    return paper_note(text, LEFT[0], STATE[1] + 0.075, theme, size=12)


def equation(phase: str, theme: Theme) -> list[dict[str, Any]]:
    """Eq. 1 with the part at work in bold, and the three sub-steps as chips, the one at work filled."""
    part = {name: f"<b>{text}</b>" if name == phase else text for name, text in EQUATION.items()}
    notes = [paper_note(f"S<sub>t</sub> = {part['erase']} {part['fade']} S<sub>t−1</sub> + {part['write']}", LEFT[0], 1.0, theme, size=16)]
    for i, name in enumerate(PHASES):
        fill = ROLES[PHASE_ROLES[name]] if name == phase else theme.empty
        chip = paper_note(f" {i + 1} {name} ", RIGHT[0], 1.0, theme) | {"xshift": 84 * i}
        chip.update(bgcolor=fill, bordercolor=ROLES[PHASE_ROLES[name]], borderwidth=2, borderpad=3)
        chip["font"]["color"] = text_on(fill)
        notes.append(chip)
    return notes


# ---- the rows ----


def row_bars(rows: dict[str, list[Cell]], reach: tuple[float, float], n: str, theme: Theme, *, behind: int = 2) -> tuple[list, list]:
    """(traces, notes): one stacked bar a row, its segments in the given order.

    A segment says its word and strength, or where it is too short its word alone; ``behind`` words that don't fit inside stand behind
    the bar as far as there is room.
    """
    low, high = reach

    def inside(word: str, x: float) -> str:
        said = (f"{word} {format_number(x)}", word)
        return next((text for text in said if abs(x) > LETTER * (len(text) + 0.5) * (high - low)), "")

    bars = []
    for cells in zip(*rows.values(), strict=True):
        fills = [ROLES[role] for _, _, role in cells]
        said = [f"{word} {format_number(x)}" for word, x, _ in cells]
        bars.append({
            "type": "bar", "orientation": "h", "xaxis": f"x{n}", "yaxis": f"y{n}", "width": 0.62,
            "y": list(rows), "x": [round(x, 4) for _, x, _ in cells],
            "text": [inside(word, x) for word, x, _ in cells],
            "textposition": "inside", "insidetextanchor": "middle", "textangle": 0, "constraintext": "none",
            "insidetextfont": {"size": 13, "color": [text_on(fill) for fill in fills]},
            "customdata": said, "hovertemplate": "%{y}: %{customdata}<extra></extra>",
            "marker": {"color": fills, "line": {"color": theme.paper, "width": 1},
                       "pattern": {"shape": [HATCHES[role] for _, _, role in cells], "fillmode": "overlay", "fgcolor": theme.paper,
                                   "bgcolor": theme.paper,  # unused, but without it plotly takes the list of colors for one and warns
                                   "fgopacity": 0.25, "size": 6, "solidity": 0.25}},
        })  # fmt: skip
    notes = []
    for row, cells in rows.items():
        end = sum(x for _, x, _ in cells if x > 0)
        tiny = [f"{word} {format_number(x)}" for word, x, _ in cells if abs(x) >= AUDIBLE and not inside(word, x)]
        some = [", ".join(tiny[:n]) + (", …" if len(tiny) > n else "") for n in range(min(behind, len(tiny)), 0, -1)]
        text = next((text for text in some if LETTER * (len(text) + 1) * (high - low) <= high - end + 0.04 * (high - low)), "")
        # one note a row even when it is empty: plotly's slider never removes a note that a frame doesn't mention
        notes.append({"x": end, "y": row, "xref": f"x{n}", "yref": f"y{n}", "text": f" {text}", "xanchor": "left", "showarrow": False,
                      "font": {"size": 12, "color": theme.muted}})  # fmt: skip
    return bars, notes


def row_axes(names: tuple[str, ...], reach: tuple[float, float], title: str, n: str, x: tuple[float, float], theme: Theme) -> dict:
    rows = {
        "categoryorder": "array",
        "categoryarray": names[::-1],
        "showgrid": False,
        "showticklabels": x == LEFT,
        "ticks": "",
        "automargin": x == LEFT,
    }  # long row names push the board to the right; elsewhere the margins are known (and it is slow)
    return {
        f"xaxis{n}": axis(theme, domain=x, anchor=f"y{n}", range=list(reach), title=small_title(title, theme)),
        f"yaxis{n}": axis(theme, domain=BOARD, anchor=f"x{n}", **rows),
    }


# ---- the state ----


def state_map(state: np.ndarray, largest: float, n: str, theme: Theme) -> dict[str, Any]:
    """The K x V state as colors from -largest to largest."""
    out = {
        "type": "heatmap", "xaxis": f"x{n}", "yaxis": f"y{n}", "colorscale": diverging(theme), "showscale": n == "4",
        "colorbar": {"thickness": 10, "len": STATE[1] - STATE[0], "y": 0.0, "yanchor": "bottom", "outlinewidth": 0,
                     "tickfont": {"color": theme.ink}},
    }  # fmt: skip
    runs = [(row, len(list(group))) for row, group in groupby(np.round(state, 4).tolist())]
    if len(runs) <= len(state) // 2:  # neighboring rows that are equal are one taller row: exact, and a small file
        edges = np.cumsum([0, *(length for _, length in runs)]).tolist()
        out |= {"z": [row for row, _ in runs], "y": edges, "zmin": -largest, "zmax": largest}
        return out | {"hovertemplate": "value channel %{x}: %{z:.2f}<extra></extra>"}
    levels = np.round(np.clip(state / largest, -1, 1) * 127).astype(np.int8)  # as fine as a color can show, in a byte a number
    z = {"dtype": "i1", "bdata": base64.b64encode(levels.tobytes()).decode(), "shape": f"{state.shape[0]}, {state.shape[1]}"}
    out["colorbar"] |= {"tickvals": [-127, 0, 127], "ticktext": [format_number(-largest), "0", format_number(largest)]}
    return out | {"z": z, "zmin": -127, "zmax": 127, "hoverinfo": "skip"}


def state_axes(values: int, n: str, x: tuple[float, float], theme: Theme, **rows: Any) -> dict[str, Any]:
    return {
        f"xaxis{n}": axis(theme, domain=x, anchor=f"y{n}", showgrid=False, zeroline=False,
                          title=small_title(f"{values} value channels", theme)),
        f"yaxis{n}": axis(theme, domain=STATE, anchor=f"x{n}", autorange="reversed", showgrid=False, zeroline=False, ticks="",
                          showticklabels=x == LEFT, **(rows if x == LEFT else {})),
    }  # fmt: skip


# ---- the slider of the static figure ----


def add_slider(picture: dict[str, Any], pictures: list[dict[str, Any]], labels: tuple[str, ...], shown: int, theme: Theme) -> None:
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
        "font": {"size": 1, "color": theme.paper},  # a dozen long labels would run into each other: the current one is enough
        "bgcolor": theme.grid, "bordercolor": theme.line, "activebgcolor": ROLES["highlight"],
    }]  # fmt: skip
