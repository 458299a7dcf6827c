"""Depth weights as a plotly figure: readers x sources, a plain sum beside it, and one reader at every word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import plotly.graph_objects as go

from k3viz.residuals.story import ResidualsStory, residuals_story
from k3viz.theme import LIGHT, ROLES, Theme, axis, format_number, format_probability, layout, note, sequential, shade, text_on, wrapped

LEARNED, PLAIN, MIX = (0.0, 0.29), (0.32, 0.655), (0.785, 1.0)  # where the three upper parts stand across the figure
UPPER, LOWER = (0.42, 0.94), (0.0, 0.21)


def residuals_figure(*, story: ResidualsStory | None = None, theme: Theme = LIGHT) -> go.Figure:
    """Draw a residuals story (default: ``residuals_story()``)."""
    return go.Figure(residuals_picture(residuals_story() if story is None else story, theme))


def residuals_picture(story: ResidualsStory, theme: Theme, *, title: bool = True) -> dict[str, Any]:
    """{"data", "layout"}: the plain dict that both the figure and the live panel draw."""
    word, reader, R, T, N = story.tokens[story.token], story.readers[story.reader], *story.weights.shape
    weights, plain = story.weights[:, story.token], story.plain_share[:, story.token]
    over_time = story.weights[story.reader].T[: len(story.row)]
    data = [
        _cells(weights, story.readers, story.sources, "", theme, "weight %{z:.2f}"),
        _numbers(weights, "", theme, format_number),
        _cells(plain, story.readers, story.sources, "2", theme, "%{z:.1%} of the sum"),
        _numbers(plain, "2", theme, format_probability),
        *_mix(story, theme),
        _cells(over_time, story.sources[: len(story.row)], story.tokens, "4", theme, "weight %{z:.2f}"),
    ]
    low = UPPER[0] - 0.15
    legend = f"<span style='color:{ROLES['memory']}'>■</span> these weights   <span style='color:{ROLES['additive']}'>▨</span> plain sum"
    notes = [
        note(theme, f"<b>Weights</b> at {word!r}", LEARNED[0], UPPER[1], yshift=4),
        note(theme, "<b>Plain sum</b>: what it is made of", PLAIN[0], UPPER[1], yshift=4),
        note(theme, "<b>What this reader adds up</b>", MIX[0] - 0.1, UPPER[1], yshift=4),
        note(theme, f"<b>The same query at every word</b>: weights of {reader}{_chosen(story)}", 0.0, LOWER[1], yshift=4),
        note(theme, legend, MIX[0] - 0.1, low, yshift=4),
    ]
    if any(story.partial):
        notes.append(note(theme, "┄ dotted: the sum so far of a block that is not finished", LEARNED[0], low, yshift=4))
    box = {"type": "rect", "line": {"color": ROLES["key"], "width": 3}}
    shapes = [
        {**box, "xref": x, "yref": y, "x0": -0.5, "x1": N - 0.5, "y0": story.reader - 0.5, "y1": story.reader + 0.5}
        for x, y in (("x", "y"), ("x2", "y2"))
    ] + [{**box, "xref": "x4", "yref": "y4", "x0": story.token - 0.5, "x1": story.token + 0.5, "y0": -0.5, "y1": len(story.row) - 0.5}]
    dotted = {"type": "rect", "xref": "x", "yref": "y", "line": {"color": theme.ink, "width": 1.5, "dash": "dot"}}
    for r, partial in enumerate(story.partial):
        if partial:
            n = int((~np.isnan(weights[r])).sum()) - 1
            shapes.append({**dotted, "x0": n - 0.46, "x1": n + 0.46, "y0": r - 0.43, "y1": r + 0.43})
    out = layout(theme, height=700 if title else 620, margin={"l": 156, "r": 40, "t": 104 if title else 10, "b": 66},
                 annotations=notes, shapes=shapes, barmode="group", bargap=0.25, bargroupgap=0.08)  # fmt: skip
    if title:
        text = wrapped(story.sentence, 138)
        out["title"] = {"text": text, "x": 0.01, "xanchor": "left", "y": 0.985, "yanchor": "top", "font": {"size": 13}}
    short = [name.removeprefix("layers ").removeprefix("layer ").replace("embedding", "emb.") for name in story.sources]
    sources = {"tickvals": list(range(N)), "ticktext": short, "tickangle": 0,
               "title": {"text": "embedding and layers", "font": {"size": 12, "color": theme.muted}, "standoff": 4}}  # fmt: skip
    rows = {"tickvals": list(range(R)), "range": [R - 0.5, -0.5]}
    bare = {"showgrid": False, "zeroline": False, "ticks": ""}
    names = [_bold(name, i == story.reader) for i, name in enumerate(story.readers)]
    out |= {
        "xaxis": axis(theme, domain=LEARNED, anchor="y", range=[-0.5, N - 0.5], **sources, **bare),
        "yaxis": axis(theme, domain=UPPER, anchor="x", ticktext=names, **rows, **bare),
        "xaxis2": axis(theme, domain=PLAIN, anchor="y2", range=[-0.5, N - 0.5], **sources, **bare),
        "yaxis2": axis(theme, domain=UPPER, anchor="x2", showticklabels=False, **rows, **bare),
        "xaxis3": axis(theme, domain=MIX, anchor="y3", range=[0, 1.25], tickvals=[0, 0.5, 1], tickformat=".0%", zeroline=False),
        "yaxis3": axis(theme, domain=UPPER, anchor="x3", range=[N - 0.5, -0.5], tickvals=list(range(len(story.row))),
                       ticktext=list(story.sources[: len(story.row)]), **bare),
        "xaxis4": axis(theme, domain=(0, 1), anchor="y4", range=[-0.5, T - 0.5], tickvals=list(range(T)), tickangle=-60,
                       ticktext=[_bold(w, t == story.token) for t, w in enumerate(story.tokens)], **bare),
        "yaxis4": axis(theme, domain=LOWER, anchor="x4", range=[len(story.row) - 0.5, -0.5], tickvals=list(range(len(story.row))),
                       ticktext=list(story.sources[: len(story.row)]), **bare),
    }  # fmt: skip
    out["xaxis4"]["tickfont"]["size"] = 12 if T <= 40 else 11
    return {"data": data, "layout": out}


def _cells(z: np.ndarray, rows: tuple[str, ...], columns: tuple[str, ...], n: str, theme: Theme, hover: str) -> dict[str, Any]:
    """A heat map from 0 to 1; a source that does not exist yet is a gap."""
    return {
        "type": "heatmap", "xaxis": f"x{n}", "yaxis": f"y{n}", "xgap": 2, "ygap": 2, "zmin": 0, "zmax": 1, "showscale": False,
        "colorscale": sequential(theme), "hoverongaps": False,
        "z": [[None if np.isnan(v) else round(float(v), 4) for v in row] for row in z],
        "customdata": [[f"{row}, {column}" for column in columns] for row in rows],
        "hovertemplate": "%{customdata}: " + hover + "<extra></extra>",
    }  # fmt: skip


def _numbers(z: np.ndarray, n: str, theme: Theme, write: Callable[[float], str]) -> dict[str, Any]:
    """The numbers in the cells, each on a patch of its cell's color and in the ink that reads best there."""
    at = [(r, c) for r, c in np.ndindex(*z.shape) if not np.isnan(z[r, c])]
    fills = [shade(sequential(theme), float(z[r, c])) for r, c in at]
    return {
        "type": "scatter", "mode": "markers+text", "xaxis": f"x{n}", "yaxis": f"y{n}", "hoverinfo": "skip", "x": [c for _, c in at],
        "y": [r for r, _ in at], "text": [write(z[r, c]) for r, c in at], "textposition": "middle center",
        "textfont": {"size": 12, "color": [text_on(fill) for fill in fills]},
        "marker": {"symbol": "square", "size": 14, "opacity": 1, "color": fills},
    }  # fmt: skip


def _mix(story: ResidualsStory, theme: Theme) -> list[dict[str, Any]]:
    """The chosen reader's input, as shares of the length added up: with these weights, and with weight 1 for every source."""
    n, out = len(story.row), []
    for name, share, color, hatch in (("with these weights", story.learned_share, ROLES["memory"], ""),
                                      ("plain sum", story.plain_share, ROLES["additive"], "/")):  # fmt: skip
        x = [float(v) for v in share[story.reader, story.token][:n]]
        out.append({
            "type": "bar", "orientation": "h", "xaxis": "x3", "yaxis": "y3", "name": name, "y": list(range(n)),
            "x": [round(v, 4) for v in x], "text": [format_probability(v) for v in x], "textposition": "outside", "cliponaxis": False,
            "textfont": {"size": 12, "color": theme.ink},
            "marker": {"color": color, "pattern": {"shape": hatch, "fillmode": "overlay", "fgcolor": theme.paper, "size": 6}},
            "customdata": [f"{source}, {name}" for source in story.sources[:n]],
            "hovertemplate": "%{customdata}: %{text}<extra></extra>",
        })  # fmt: skip
    return out


def _chosen(story: ResidualsStory) -> str:
    return "" if story.asked is None else ", query chosen"


def _bold(text: str, yes: bool) -> str:
    return f"<b>{text}</b>" if yes else text
