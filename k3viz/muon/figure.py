"""Muon as a plotly figure: singular values by Newton-Schulz step, as one matrix and head by head, and each head's update."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import plotly.graph_objects as go

from k3viz.muon.story import MUON_STEPS, SIZE, STEPS, MuonStory, muon_story
from k3viz.theme import LIGHT, ROLES, Theme, axis, format_digits, layout, note, wrapped

LEFT, RIGHT = (0.0, 0.45), (0.55, 1.0)
NARROW, BROAD = (0.0, 0.3), (0.38, 1.0)  # the two below
UPPER, LOWER = (0.56, 0.93), (0.0, 0.33)
KEYS = 0.405  # what the line styles mean, below the upper two
STRONG, WEAK = "erase", "memory"  # head 1, and all others
DASH = {STRONG: "solid", WEAK: "dot"}
FLOOR = 1e-4  # singular values below this are drawn at the edge


def muon_figure(*, story: MuonStory | None = None, step: int = MUON_STEPS, theme: Theme = LIGHT) -> go.Figure:
    """Draw a Muon story (default: ``muon_story()``) after ``step`` Newton-Schulz steps, 0 to 8."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= STEPS:
        raise ValueError(f"step must be a whole number from 0 to {STEPS}, got {step!r}")
    return go.Figure(muon_picture(muon_story() if story is None else story, step, theme))


def muon_picture(story: MuonStory, step: int, theme: Theme, *, title: bool = True) -> dict[str, Any]:
    """{"data", "layout"} after ``step`` steps: the plain dict that both the figure and the live panel draw."""
    H, K, D = story.shape
    whole = story.whole_values[:, None, :]
    left, numbers = _now(whole, step, "", theme)
    right, more = _now(story.head_values, step, "2", theme)
    mine = [story.owned > 0.5, np.arange(H) == 0]
    data = [
        *_paths(whole[:, :, mine[0]], STRONG, "", "mostly head 1"), *_paths(whole[:, :, ~mine[0]], WEAK, "", "mostly others"),
        *_paths(story.head_values[:, ~mine[1]], WEAK, "2", "other heads"), *_paths(story.head_values[:, mine[1]], STRONG, "2", "head 1"),
        left, right, *_bars(story, step, theme),
    ]  # fmt: skip
    own, n = int(mine[0].sum()), len(story.owned)
    above = 0.008
    notes = [
        note(theme, f"<b>One matrix</b> {H * K} × {D}: its {n} singular values", LEFT[0], UPPER[1] + above),
        note(theme, f"<b>Head by head</b> {H} × ({K} × {D}): {story.head_values.shape[2]} each", RIGHT[0], UPPER[1] + above),
        note(theme, f"{_key(STRONG)} mostly head 1: {own}   {_key(WEAK)} mostly other heads: {n - own}", LEFT[0], KEYS, size=12),
        note(theme, f"{_key(STRONG)} head 1   {_key(WEAK)} other heads", RIGHT[0], KEYS, size=12),
        note(theme, "<b>Gradient of each head</b>", NARROW[0], LOWER[1] + above),
        note(theme, "<b>Update of each head</b>, RMS", BROAD[0], LOWER[1] + above),
        note(theme, f"<span style='color:{ROLES['additive']}'>▨</span> as one matrix   <span style='color:{ROLES[WEAK]}'>■</span> head by "
             "head", BROAD[1], LOWER[1] + above, size=12, xanchor="right"),
        *numbers, *more,
    ]  # fmt: skip
    out = layout(theme, height=620, margin={"l": 64, "r": 20, "t": 96 if title else 30, "b": 50}, annotations=notes, barmode="group",
                 bargap=0.3, bargroupgap=0.08)  # fmt: skip
    if title:
        text = wrapped(f"{story.sentence_at(step)} Gradient: {story.source}.", 125)
        out["title"] = {"text": text, "x": 0.01, "xanchor": "left", "y": 0.975, "yanchor": "top", "font": {"size": 13}}
    return {"data": data, "layout": out | _axes(story, step, theme)}


# ---- singular values ----


def _paths(values: np.ndarray, role: str, n: str, name: str) -> list[dict[str, Any]]:
    """All paths of one color as one line with gaps; values [STEPS+1, blocks, directions]."""
    paths = values.reshape(len(values), -1).T
    if not len(paths):
        return []
    xs = [*range(len(values)), None] * len(paths)
    ys = [y for path in paths for y in [*np.maximum(path, FLOOR), None]]
    return [{
        "type": "scatter", "mode": "lines", "xaxis": f"x{n}", "yaxis": f"y{n}", "x": xs, "name": name,
        "y": [None if y is None else float(f"{y:.4g}") for y in ys], "line": {"color": ROLES[role], "width": 1.5, "dash": DASH[role]},
        "hovertemplate": f"{name}, step %{{x}}: %{{y:.3g}}<extra></extra>",
    }]  # fmt: skip


def _now(values: np.ndarray, step: int, n: str, theme: Theme) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(markers, numbers) of the smallest and the largest value at the step on show."""
    low, high = float(values[step].min()), float(values[step].max())
    y = [max(low, FLOOR), max(high, FLOOR)]
    marks = {
        "type": "scatter", "mode": "markers", "xaxis": f"x{n}", "yaxis": f"y{n}", "x": [step, step], "y": y, "cliponaxis": False,
        "hoverinfo": "skip", "name": "smallest and largest", "marker": {"color": theme.ink, "size": 8, "symbol": "diamond"},
    }  # fmt: skip
    numbers = [
        note(theme, format_digits(value), step, math.log10(at), size=12, xref=f"x{n}", yref=f"y{n}", xshift=8, yshift=shift,
             yanchor="middle", bgcolor=theme.paper, borderpad=1)
        for value, at, shift in zip((low, high), y, (-6, 8), strict=True)
    ]  # fmt: skip
    return marks, numbers


def _key(role: str) -> str:
    return f"<span style='color:{ROLES[role]}'>{'━━' if DASH[role] == 'solid' else '┅┅'}</span>"


# ---- heads ----


def _bars(story: MuonStory, step: int, theme: Theme) -> list[dict[str, Any]]:
    heads = [str(h + 1) for h in range(story.shape[0])]

    def bars(values: np.ndarray, n: str, name: str, color: Any, shape: str) -> dict[str, Any]:
        return {
            "type": "bar", "xaxis": f"x{n}", "yaxis": f"y{n}", "x": heads, "y": [float(f"{v:.4g}") for v in values], "name": name,
            "text": [format_digits(v, digits=1 if v < 0.1 else 2) for v in values], "textposition": "outside",
            "textfont": {"size": 11, "color": theme.ink},
            "textangle": 0, "cliponaxis": False, "constraintext": "none", "hovertemplate": f"head %{{x}}, {name}: %{{text}}<extra></extra>",
            "marker": {"color": color, "pattern": {"shape": shape, "fgcolor": theme.paper, "fillmode": "overlay", "size": 6,
                                                   "fgopacity": 0.6}},
        }  # fmt: skip

    return [
        bars(story.gradient, "3", "gradient", [ROLES[STRONG], *[ROLES[WEAK]] * (len(heads) - 1)], ""),
        bars(story.whole_update[step], "4", "as one matrix", ROLES["additive"], "/"),
        bars(story.head_update[step], "4", "head by head", ROLES[WEAK], ""),
    ]


# ---- axes ----


def _axes(story: MuonStory, step: int, theme: Theme) -> dict[str, Any]:
    top = 1.25 * max(SIZE, float(story.whole_update.max()), float(story.head_update.max()))
    quiet = {"size": 12, "color": theme.muted}
    steps = {"range": [-0.4, STEPS + 0.9], "dtick": 1, "zeroline": False,
             "title": {"text": "Newton-Schulz step", "font": quiet, "standoff": 2}}  # fmt: skip
    low = min(1e-2, float(max(FLOOR, min(story.whole_values.min(), story.head_values.min()))))
    ticks = [10.0**-p for p in range(4, -1, -1)]
    values = {"type": "log", "range": [math.log10(0.45 * low), 0.45], "tickvals": ticks, "ticktext": [f"{t:g}" for t in ticks]}
    out = {
        "xaxis": axis(theme, domain=LEFT, anchor="y", **steps), "yaxis": axis(theme, domain=UPPER, anchor="x", **values),
        "xaxis2": axis(theme, domain=RIGHT, anchor="y2", **steps), "yaxis2": axis(theme, domain=UPPER, anchor="x2", **values),
        "xaxis3": axis(theme, domain=NARROW, anchor="y3", type="category", title={"text": "head", "font": quiet, "standoff": 2}),
        "yaxis3": axis(theme, domain=LOWER, anchor="x3", nticks=4, range=[0, 1.2 * float(story.gradient.max())],
                       title={"text": "1 = mean of the others", "font": quiet, "standoff": 4}),
        "xaxis4": axis(theme, domain=BROAD, anchor="y4", type="category", title={"text": "head", "font": quiet, "standoff": 2}),
        "yaxis4": axis(theme, domain=LOWER, anchor="x4", range=[0, top], nticks=4),
    }  # fmt: skip
    marks = {"type": "line", "line": {"color": theme.muted, "width": 1, "dash": "dash"}}
    shapes = [marks | {"xref": f"x{n}", "x0": step, "x1": step, "yref": f"y{n} domain", "y0": 0, "y1": 1} for n in ("", "2")]
    return out | {"shapes": shapes}
