"""The chunk story as a plotly figure: the three matrices of one chunk, how far 1/Gamma reaches, and how far the outputs are off."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from k3viz.chunks.story import ChunksStory, chunks_story, largest_exponent, power
from k3viz.theme import LIGHT, ROLES, Theme, axis, layout, literal, note, sequential

THREE = ((0.0, 0.28), (0.335, 0.615), (0.67, 0.95))  # where the matrices stand across the figure
LEFT, RIGHT = (0.0, 0.41), (0.61, 1.0)  # reach and error
TOP, BOTTOM = (0.56, 0.95), (0.0, 0.32)
FAINT = -4  # log10 of the smallest entry that is drawn
NAMED = 16  # up to so many words a chunk are named
NAME = 0.24  # height of a limit's name, as a share of its axis
SMALLEST = 1e-17  # where the error axis ends: float64's own rounding is about 1e-16
HEADS = ("<b>L</b>: how keys meet earlier ones", "<b>(I + L)<sup>−1</sup></b>: all erasures at once", "<b>P</b>: what a query reads")


def chunks_figure(*, story: ChunksStory | None = None, show: int = -1, theme: Theme = LIGHT) -> go.Figure:
    """Draw a chunk story (default: ``chunks_story()``).

    show: the chunk whose matrices are drawn, counted from the end if negative. theme: ``k3viz.theme.LIGHT`` or ``DARK``. Raises
    ValueError for a chunk that the story doesn't have.
    """
    return go.Figure(chunks_picture(chunks_story() if story is None else story, show, theme))


def chunks_picture(story: ChunksStory, show: int, theme: Theme, *, title: bool = True) -> dict[str, Any]:
    """{"data", "layout"}: the plain dict that both the figure and the live panel draw."""
    n = len(story.bounds)
    if isinstance(show, bool) or not isinstance(show, (int, np.integer)) or not -n <= show < n:
        raise ValueError(f"show must be a whole number from {-n} to {n - 1}, got {show!r}")
    show %= n
    out = layout(theme, height=640, margin={"l": 84, "r": 40, "t": 82 if title else 10, "b": 54}, barmode="overlay")
    if title:
        text = literal(story.sentence).replace("loop. ", "loop.<br>")
        out["title"] = {"text": text, "x": 0.01, "xanchor": "left", "y": 0.975, "yanchor": "top", "font": {"size": 13}}
    out["annotations"] = [note(theme, text, x[0], TOP[1] + 0.01) for text, x in zip(HEADS, THREE, strict=True)]
    data = []
    for n, matrix in (("", story.L), ("2", story.inverse), ("3", story.P)):
        data += _matrix(story, show, matrix[show], n, theme, out)
    data += [*_reach(story, show, theme, out), *_errors(story, show, theme, out)]
    return {"data": data, "layout": out}


def _matrix(story: ChunksStory, show: int, matrix: np.ndarray, n: str, theme: Theme, out: dict[str, Any]) -> list[dict[str, Any]]:
    """The size of every entry on a logarithmic scale; nothing above the diagonal; entries that are not numbers in the color of erasing."""
    start, stop = story.bounds[show]
    place, lower = 0 if n == "" else int(n) - 1, np.tril(np.ones_like(matrix, dtype=bool))
    words, bad = list(range(start + 1, stop + 1)), ~np.isfinite(matrix) & lower
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.where(lower & ~bad, np.clip(np.log10(np.abs(matrix)), FAINT, 0), np.nan)
    named = {"tickvals": words, "ticktext": list(story.tokens[start:stop])} if len(words) <= NAMED else {"nticks": 8}
    quiet = {"showgrid": False, "zeroline": False, "ticks": "", **named}
    ends = (start + 0.5, stop + 0.5)
    out[f"xaxis{n}"] = axis(theme, domain=THREE[place], anchor=f"y{n}", range=list(ends), tickangle=-60, **quiet)
    out[f"yaxis{n}"] = axis(theme, domain=TOP, anchor=f"x{n}", range=list(ends[::-1]), showticklabels=n == "", **quiet)
    out[f"xaxis{n}"]["tickfont"]["size"] = out[f"yaxis{n}"]["tickfont"]["size"] = 11
    ticks = [10.0**p for p in range(FAINT, 1, 2)]
    at = {"x0": start + 1, "dx": 1, "y0": start + 1, "dy": 1}
    cells = {"type": "heatmap", "xaxis": f"x{n}", "yaxis": f"y{n}", **at, "xgap": 0.5, "ygap": 0.5}
    data = [{
        **cells, "z": [[None if np.isnan(x) else round(float(x), 2) for x in row] for row in size], "zmin": FAINT, "zmax": 0,
        "colorscale": sequential(theme), "hovertemplate": "row %{y}, column %{x}: 10^%{z}<extra></extra>", "showscale": n == "3",
        "colorbar": {"thickness": 10, "len": TOP[1] - TOP[0], "y": TOP[0], "yanchor": "bottom", "x": 0.96, "outlinewidth": 0,
                     "tickvals": [np.log10(t) for t in ticks], "ticktext": [f"{t:g}" for t in ticks], "tickfont": {"color": theme.ink}},
    }]  # fmt: skip
    if bad.any():
        data.append({
            **cells, "z": [[1 if x else None for x in row] for row in bad], "colorscale": [[0, ROLES["erase"]], [1, ROLES["erase"]]],
            "showscale": False, "hovertemplate": "row %{y}, column %{x}: not a number<extra></extra>", "name": "not a number",
        })  # fmt: skip
        said = f"<span style='color:{ROLES['erase']}'>■</span> {int(bad.sum()):,} entries are<br>not numbers"
        out["annotations"].append(note(theme, said, THREE[place][1], TOP[1] - 0.01, size=12, xanchor="right", yanchor="top"))
    return data


def _reach(story: ChunksStory, show: int, theme: Theme, out: dict[str, Any]) -> list[dict[str, Any]]:
    """ln of the largest 1/Gamma at every word, against what the formats hold."""
    T = len(story.tokens)
    top = max(float(story.reach.max()), largest_exponent("float32")) * 1.18
    x, y, bound = [], [], []
    for start, stop in story.bounds:  # a gap between chunks: the sum starts anew
        x += [*range(start + 1, stop + 1), None]
        y += [*np.round(story.reach[start:stop], 3).tolist(), None]
        bound += [*(min(-story.bound * i, top) for i in range(1, stop - start + 1)), None]
    data = [
        {"type": "scatter", "mode": "lines", "xaxis": "x4", "yaxis": "y4", "x": x, "y": bound, "name": "every step at the bound",
         "line": {"color": theme.muted, "width": 1.5, "dash": "dot"}, "hoverinfo": "skip"},
        {"type": "scatter", "mode": "lines+markers", "xaxis": "x4", "yaxis": "y4", "x": x, "y": y, "name": "this head",
         "line": {"color": ROLES["decay"], "width": 2}, "marker": {"size": 5, "color": ROLES["decay"]},
         "hovertemplate": "word %{x}: 1/Γ up to e^%{y:.1f}<extra></extra>"},
    ]  # fmt: skip
    named: list[float] = []  # limits with a name so far: the chosen format's first, others where there is room
    for formats in sorted((("float16",), ("float32", "bfloat16"), ("float64",)), key=lambda formats: story.numbers not in formats):
        limit, chosen = largest_exponent(formats[0]), story.numbers in formats
        if limit > top:
            continue
        line = (ROLES["erase"], 3, "solid") if chosen else (theme.line, 1.5, "dash")
        data.append({
            "type": "scatter", "mode": "lines", "xaxis": "x4", "yaxis": "y4", "x": [0.5, T + 0.5], "y": [round(limit, 3)] * 2,
            "name": f"limit of {formats[0]}", "hoverinfo": "skip", "line": dict(zip(("color", "width", "dash"), line, strict=True)),
        })  # fmt: skip
        if any(abs(limit - other) < NAME * top for other in named):
            continue
        named.append(limit)
        text = f"{'<br>'.join(formats)}<br>to e<sup>{power(limit)}</sup>"
        out["annotations"].append({
            "text": f"<b>{text}</b>" if chosen else text, "x": LEFT[1] + 0.006, "y": limit, "xref": "paper", "yref": "y4",
            "xanchor": "left", "yanchor": "middle", "align": "left", "showarrow": False, "font": {"size": 12, "color": theme.ink},
        })  # fmt: skip
    legend = (f"<span style='color:{ROLES['decay']}'>●</span> this head   <span style='color:{theme.muted}'>┄</span> "
              f"every step at the bound, {-story.bound:g} a word")  # fmt: skip
    out["annotations"] += [
        note(theme, "<b>Largest 1/Γ in a chunk, as a power of e</b>", LEFT[0], BOTTOM[1] + 0.05),
        note(theme, legend, LEFT[0], BOTTOM[1] + 0.012, size=12),
    ]
    out["shapes"] = [_here(story, show, f"x{n}", theme) for n in (4, 5)]
    out["xaxis4"] = axis(theme, domain=LEFT, anchor="y4", range=[0.5, T + 0.5], title=_small("word", theme), zeroline=False)
    out["yaxis4"] = axis(theme, domain=BOTTOM, anchor="x4", range=[0, top], title=_small("exponent", theme), zeroline=False)
    return data


def _errors(story: ChunksStory, show: int, theme: Theme, out: dict[str, Any]) -> list[dict[str, Any]]:
    """Error of every output on a logarithmic axis; what is not a number stands on a line of its own at the top."""
    words = list(range(1, len(story.tokens) + 1))
    axes = {"type": "scatter", "xaxis": "x5", "yaxis": "y5"}
    data = []
    for name, errors, color, dash, symbol in (
        ("pair by pair", story.pair_errors, ROLES["additive"], "dash", "square"),
        ("matrix products with 1/Γ", story.errors, ROLES["memory"], "solid", "circle"),
    ):
        y = [None if np.isnan(e) else float(f"{max(e, SMALLEST):.2e}") for e in errors]
        data.append({
            **axes, "mode": "lines+markers", "x": words, "y": y, "name": name, "line": {"color": color, "width": 2, "dash": dash},
            "marker": {"size": 5, "color": color, "symbol": symbol}, "hovertemplate": f"{name}, word %{{x}}: %{{y:.1e}}<extra></extra>",
        })  # fmt: skip
    broken = [w for w, e in zip(words, story.errors, strict=True) if np.isnan(e)]
    data.append({
        **axes, "mode": "markers", "x": broken, "y": [1.0] * len(broken), "name": "not a number",
        "marker": {"symbol": "x", "size": 7, "color": ROLES["erase"]}, "hovertemplate": "word %{x}: not a number<extra></extra>",
    })  # fmt: skip
    legend = (
        f"<span style='color:{ROLES['memory']}'>●</span> products with 1/Γ   "
        f"<span style='color:{ROLES['additive']}'>■</span> pair by pair   <span style='color:{ROLES['erase']}'>✖</span> not a number"
    )
    out["annotations"] += [
        note(theme, "<b>Error of the outputs against the token loop</b>", RIGHT[0], BOTTOM[1] + 0.05),
        note(theme, legend, RIGHT[0], BOTTOM[1] + 0.012, size=12),
    ]
    out["xaxis5"] = axis(theme, domain=RIGHT, anchor="y5", range=[0.5, words[-1] + 0.5], title=_small("word", theme), zeroline=False)
    out["yaxis5"] = axis(theme, domain=BOTTOM, anchor="x5", type="log", range=[np.log10(SMALLEST), 0.6],
                         title=_small("share of the largest", theme), tickvals=[1e-16, 1e-12, 1e-8, 1e-4, 1],
                         ticktext=["10⁻¹⁶", "10⁻¹²", "10⁻⁸", "10⁻⁴", "1"])  # fmt: skip
    return data


def _here(story: ChunksStory, show: int, x: str, theme: Theme) -> dict[str, Any]:
    """A band behind the chunk whose matrices are drawn."""
    start, stop = story.bounds[show]
    return {"type": "rect", "xref": x, "yref": f"y{x[1:]} domain", "x0": start + 0.5, "x1": stop + 0.5, "y0": 0, "y1": 1, "layer": "below",
            "line": {"width": 0}, "fillcolor": theme.empty}  # fmt: skip


def _small(text: str, theme: Theme) -> dict[str, Any]:
    return {"text": text, "font": {"size": 12, "color": theme.muted}, "standoff": 4}
