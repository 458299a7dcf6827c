"""The four-bit story as a plotly figure: 32 weights beside the grid they may stand on, and the output error while training in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from k3viz.four_bit.story import FourBitStory, four_bit_story
from k3viz.theme import LIGHT, ROLES, Theme, axis, format_bytes, format_number, format_probability, layout, literal, note
from minimodel.mxfp4 import E2M1

LEFT, RIGHT = (0.0, 0.6), (0.7, 1.0)  # block and training across the figure
HALF_WIDTH = 2  # bytes a weight in bfloat16


def four_bit_figure(*, story: FourBitStory | None = None, step: int = -1, theme: Theme = LIGHT) -> go.Figure:
    """Draw a four-bit story (default: ``four_bit_story()``).

    step: how many steps of training are shown, counted from the end if negative. theme: ``k3viz.theme.LIGHT`` or ``DARK``. Raises
    ValueError for a step that the story doesn't have.
    """
    return go.Figure(four_bit_picture(four_bit_story() if story is None else story, step, theme))


def four_bit_picture(story: FourBitStory, step: int, theme: Theme, *, title: bool = True) -> dict[str, Any]:
    """{"data", "layout"}: the plain dict that both the figure and the live panel draw."""
    count = len(story.losses)
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or not -count <= step < count:
        raise ValueError(f"step must be a whole number from {-count} to {count - 1}, got {step!r}")
    step %= count
    out = layout(theme, height=600, margin={"l": 56, "r": 24, "t": 116 if title else 58, "b": 54})
    if title:
        text = literal(story.sentence(step)).replace("%. ", "%.<br>").replace(", with", ",<br>with")
        out["title"] = {"text": text, "x": 0.01, "xanchor": "left", "y": 0.975, "yanchor": "top", "font": {"size": 13}}
    data = [*_block(story, step, theme, out), *_training(story, step, theme, out)]
    return {"data": data, "layout": out}


def _block(story: FourBitStory, step: int, theme: Theme, out: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a weight: where it was, the nearest grid value, and where training in the grid has put it."""
    n, best = len(story.weights), story.trained[story.best(step)]
    rows, scale = list(range(1, n + 1)), 2.0**story.exponent
    edge = max(float(np.abs(story.weights).max()), E2M1[-1] * scale, float(np.abs(best).max())) * 1.06
    links = {"x": [], "y": []}
    for row, a, b in zip(rows, story.weights, story.rounded, strict=True):
        links["x"] += [_digits(a), _digits(b), None]
        links["y"] += [row, row, None]
    said = [
        f"weight {row}: {w:.4g} → code {code}, {format_number(b / scale)} · 2^{story.exponent} = {b:.4g}"
        for row, w, code, b in zip(rows, story.weights, story.codes, story.rounded, strict=True)
    ]
    shared = {"type": "scatter", "mode": "markers", "y": rows}
    moved = [i for i in range(n) if best[i] != story.rounded[i]]
    data = [
        {"type": "scatter", "mode": "lines", **links, "name": "moved by rounding", "hoverinfo": "skip",
         "line": {"color": theme.muted, "width": 1}},
        {**shared, "x": [_digits(b) for b in story.rounded], "name": "nearest grid value", "customdata": said,
         "hovertemplate": "%{customdata}<extra></extra>", "marker": {"color": ROLES["memory"], "symbol": "square", "size": 9}},
        {**shared, "x": [_digits(w) for w in story.weights], "name": "weight", "hoverinfo": "skip",
         "marker": {"color": theme.paper, "symbol": "circle", "size": 8, "line": {"color": theme.ink, "width": 1.5}}},
        {**shared, "x": [_digits(best[i]) for i in moved], "y": [rows[i] for i in moved], "name": "trained in the grid",
         "hovertemplate": "weight %{y}: trained to %{x:.4g}<extra></extra>",
         "marker": {"color": ROLES["key"], "symbol": "diamond", "size": 11, "line": {"color": theme.ink, "width": 1}}},
    ]  # fmt: skip
    power = f"2<sup>{story.exponent}</sup>".replace("-", "−")
    ticks = [float(v) for v in story.grid]
    names = [f"{v / scale:g}".replace("-", "−") for v in ticks]
    names = [name if float(v / scale).is_integer() else "" for v, name in zip(ticks, names, strict=True)]  # no room for 0.5 and 1.5
    out["xaxis"] = axis(theme, domain=LEFT, anchor="y", range=[-edge, edge], tickvals=ticks, ticktext=names, tickangle=0, zeroline=False,
                        title=_small(f"E2M1 value, times the shared scale {power}", theme))  # fmt: skip
    out["xaxis"]["gridcolor"] = theme.line
    out["yaxis"] = axis(theme, domain=(0.0, 1.0), anchor="x", range=[n + 0.8, 0.2], showgrid=False, zeroline=False,
                        tickvals=[1, 8, 16, 24, 32], title=_small("weight of the block", theme))  # fmt: skip
    bits = format_number(8 * story.stored / n)
    size = f"{format_bytes(story.stored)} instead of {format_bytes(HALF_WIDTH * n)} in bfloat16: {bits} bits a weight"
    legend = (
        f"○ weight   <span style='color:{ROLES['memory']}'>■</span> nearest grid value   "
        f"<span style='color:{ROLES['key']}'>◆</span> trained to another one"
    )
    out["annotations"] = [note(theme, f"<b>One block</b>, {size}", 0.0, 1.05), note(theme, legend, 0.0, 1.005, size=12)]
    return data


def _training(story: FourBitStory, step: int, theme: Theme, out: dict[str, Any]) -> list[dict[str, Any]]:
    """Output error of the rounded weights by step, and the smallest so far; rounding afterwards as a level line."""
    steps, percent = list(range(len(story.losses))), 100 * story.losses
    kept = np.minimum.accumulate(percent)
    last = max(1, steps[-1])
    axes = {"type": "scatter", "xaxis": "x2", "yaxis": "y2", "mode": "lines"}
    data = [
        {**axes, "x": [0, last], "y": [_digits(percent[0])] * 2, "name": "rounded afterwards", "hoverinfo": "skip",
         "line": {"color": ROLES["memory"], "width": 2, "dash": "dash"}},
        {**axes, "x": steps[: step + 1], "y": [_digits(p) for p in percent[: step + 1]], "name": "at this step",
         "line": {"color": theme.line, "width": 1}, "hovertemplate": "step %{x}: %{y:.3g} %<extra></extra>"},
        {**axes, "x": steps[: step + 1], "y": [_digits(p) for p in kept[: step + 1]], "name": "best so far",
         "line": {"color": ROLES["key"], "width": 3, "shape": "hv"}, "hovertemplate": "best by step %{x}: %{y:.3g} %<extra></extra>"},
        {**axes, "mode": "markers", "x": [step], "y": [_digits(kept[step])], "name": "kept", "hoverinfo": "skip", "cliponaxis": False,
         "marker": {"color": ROLES["key"], "symbol": "diamond", "size": 11, "line": {"color": theme.ink, "width": 1}}},
    ]  # fmt: skip
    top = float(min(1.05 * percent.max(), 2.5 * percent[0])) or 1.0  # the whole way, unless one step went far astray
    out["xaxis2"] = axis(theme, domain=RIGHT, anchor="y2", range=[0, last], title=_small("step of training", theme), zeroline=False)
    out["yaxis2"] = axis(theme, domain=(0.0, 0.87), anchor="x2", range=[0, top], ticksuffix=" %", nticks=6, zeroline=False,
                         title=_small("error of the output", theme))  # fmt: skip
    legend = (
        f"<span style='color:{ROLES['memory']}'>╍</span> rounded afterwards: {format_probability(story.losses[0])}<br>"
        f"<span style='color:{ROLES['key']}'>◆</span> trained in the grid: {format_probability(kept[step] / 100)}<br>"
        f"<span style='color:{theme.line}'>━</span> every step: rounding flips to and fro"
    )
    out["annotations"] += [
        note(theme, "<b>Trained in the grid</b>", RIGHT[0], 1.05),
        note(theme, legend, RIGHT[0], 1.005, size=12, yanchor="top"),
    ]
    return data


def _small(text: str, theme: Theme) -> dict[str, Any]:
    return {"text": text, "font": {"size": 12, "color": theme.muted}, "standoff": 4}


def _digits(x: float) -> float:
    return float(f"{float(x):.5g}")
