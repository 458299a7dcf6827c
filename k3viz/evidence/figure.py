"""The evidence as a plotly figure: a facet a claim; published numbers hatched or diamonds, measured ones plain, sources below the claim."""

from __future__ import annotations

import textwrap
from typing import Any

import plotly.graph_objects as go

from k3viz.evidence.story import MEASURED, PUBLISHED, EvidenceStory, Facet, evidence_story
from k3viz.theme import LIGHT, ROLES, Theme, axis, layout, wrapped

HATCHES = {PUBLISHED: "/", MEASURED: ""}
MARKERS = {PUBLISHED: "diamond", MEASURED: "circle"}
COLUMNS = ((0.19, 0.44), (0.72, 0.97))  # room for row names at the left of each
BAR, HEAD, FOOT = 26, 94, 22  # px: a row, what stands above a facet, what stands below
NARROW = 0.3  # where the smallest value is more than this share of the largest, dots on a cut axis; bars must start at 0


def evidence_figure(*, story: EvidenceStory | None = None, theme: Theme = LIGHT) -> go.Figure:
    """Draw an evidence story (default: ``evidence_story()``). theme: ``k3viz.theme.LIGHT`` or ``DARK``."""
    story = evidence_story() if story is None else story
    lines = [story.facets[i : i + 2] for i in range(0, len(story.facets), 2)]
    heights = [HEAD + FOOT + BAR * max(len(f.rows) for f in line) for line in lines]
    total, data, notes, axes, top = sum(heights), [], [], {}, 0
    for i, (line, height) in enumerate(zip(lines, heights, strict=True)):
        for j, facet in enumerate(line):
            n = str(2 * i + j + 1) if i or j else ""
            upper = 1 - (top + HEAD) / total
            lower = upper - BAR * len(facet.rows) / total
            data += _marks(facet, n, theme)
            notes.append(_heading(facet, COLUMNS[j][0] - 0.19, upper, total, theme))
            axes |= _axes(facet, n, COLUMNS[j], (lower, upper), theme)
        top += height
    margin = {"l": 10, "r": 10, "t": 70, "b": 10}
    out = layout(theme, height=total + 80, margin=margin, annotations=notes, barmode="overlay", **axes)
    legend = "  ".join(f"<span style='color:{ROLES[kind]}'>{mark}</span> {said}" for kind, mark, said in
                       ((PUBLISHED, "▨ ◆", "published, source below the claim"), (MEASURED, "■", "measured by this project")))  # fmt: skip
    text = f"{wrapped(story.sentence, 125)}<br>{legend}"
    out["title"] = {"text": text, "x": 0.01, "xanchor": "left", "y": 1 - 14 / (total + 80), "yanchor": "top", "font": {"size": 13}}
    return go.Figure({"data": data, "layout": out})


def _dots(facet: Facet) -> bool:
    """Whether the numbers lie so close together, far from 0, that bars would look alike."""
    values = [row.value for row in facet.rows]
    return not facet.rows[0].text.endswith("%") and min(values) > (1 - NARROW) * max(values)


def _marks(facet: Facet, n: str, theme: Theme) -> list[dict[str, Any]]:
    marks = []
    for kind in (PUBLISHED, MEASURED):
        rows = [row for row in facet.rows if row.kind == kind]
        if not rows:
            continue
        said = {"y": [row.label for row in rows], "x": [row.value for row in rows], "text": [row.text for row in rows], "name": kind}
        said |= {"xaxis": f"x{n}", "yaxis": f"y{n}", "textfont": {"size": 12, "color": theme.ink}, "cliponaxis": False}
        hover = "%{y}: %{text}<br>%{customdata}<extra>" + kind + "</extra>"
        said |= {"customdata": [facet.sources[kind]] * len(rows), "hovertemplate": hover}
        if _dots(facet):
            look = {"color": ROLES[kind], "size": 11, "symbol": MARKERS[kind], "line": {"color": theme.ink, "width": 1}}
            marks.append({"type": "scatter", "mode": "markers+text", "textposition": "middle right", "marker": look, **said})
        else:
            pattern = {"shape": HATCHES[kind], "fillmode": "overlay", "fgcolor": theme.paper, "fgopacity": 0.6, "size": 6, "solidity": 0.3}
            look = {"color": ROLES[kind], "pattern": pattern, "line": {"color": ROLES[kind], "width": 1}}
            marks.append({"type": "bar", "orientation": "h", "textposition": "outside", "width": 0.62, "marker": look, **said})
    return marks


def _heading(facet: Facet, x: float, y: float, total: int, theme: Theme) -> dict[str, Any]:
    sources = "<br>".join(line for kind, text in facet.sources.items() for line in textwrap.wrap(f"{kind}: {text}", 66))
    unit = facet.unit + (" (the axis is cut)" if _dots(facet) else "")
    text = f"<b>{facet.claim}</b><br>{unit}<br><span style='font-size:11px;color:{theme.muted}'>{sources}</span>"
    return {"text": text, "x": x, "y": y + 4 / total, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom",
            "align": "left", "showarrow": False, "font": {"size": 13, "color": theme.ink}}  # fmt: skip


def _axes(facet: Facet, n: str, x: tuple[float, float], y: tuple[float, float], theme: Theme) -> dict[str, Any]:
    values = [row.value for row in facet.rows]
    low, high = (min(values), max(values)) if _dots(facet) else (0.0, max(values))
    wide = (high - low) or 1.0
    reach = [low - 0.08 * wide, high + 0.3 * wide] if _dots(facet) else [0.0, 1.28 * high]  # room for the numbers at the right
    names = {"categoryorder": "array", "categoryarray": [row.label for row in facet.rows][::-1], "range": [-0.5, len(facet.rows) - 0.5]}
    return {
        f"xaxis{n}": axis(theme, domain=x, anchor=f"y{n}", range=reach, showgrid=False, zeroline=False, showticklabels=False, ticks=""),
        f"yaxis{n}": axis(theme, domain=y, anchor=f"x{n}", showgrid=False, ticks="", **names),
    }
