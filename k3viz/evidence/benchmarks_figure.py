"""The report's benchmark chart as a plotly figure: twelve small charts, Kimi K3 standing out in each. All published, none ours."""

from __future__ import annotations

import textwrap
from typing import Any

import plotly.graph_objects as go

from k3viz.evidence.story import BenchmarksStory, benchmarks_story
from k3viz.theme import LIGHT, ROLES, Theme, axis, layout, text_on

WIDE = 3  # charts in a line
ROW, HEAD = 21, 40  # px: a model, a chart's name


def benchmarks_figure(*, story: BenchmarksStory | None = None, theme: Theme = LIGHT) -> go.Figure:
    """Draw the benchmarks (default: ``benchmarks_story()``). theme: ``k3viz.theme.LIGHT`` or ``DARK``."""
    story = benchmarks_story() if story is None else story
    names = list(story.tables)
    lines = [names[i : i + WIDE] for i in range(0, len(names), WIDE)]
    height = HEAD + ROW * max(len(t.rows) for t in story.tables.values())
    total, data, notes, axes = height * len(lines), [], [], {}
    for i, line in enumerate(lines):
        for j, name in enumerate(line):
            n = str(WIDE * i + j + 1) if i or j else ""
            rows = story.tables[name].rows
            left, upper = j / WIDE, 1 - (i * height + HEAD) / total
            data.append(_bars(rows, story.tables[name].unit, n, theme))
            notes.append({"text": f"<b>{name}</b>", "x": left, "y": upper + 2 / total, "xref": "paper", "yref": "paper", "xanchor": "left",
                          "yanchor": "bottom", "showarrow": False, "font": {"size": 13, "color": theme.ink}})  # fmt: skip
            order = [_name(model) for model, _ in rows][::-1]
            axes[f"xaxis{n}"] = axis(theme, domain=(left + 0.105, left + 0.31), anchor=f"y{n}", visible=False, range=[0, rows[0][1]])
            axes[f"yaxis{n}"] = axis(theme, domain=(upper - ROW * len(rows) / total, upper), anchor=f"x{n}", showgrid=False, ticks="",
                                     categoryorder="array", categoryarray=order, range=[-0.5, len(rows) - 0.5])  # fmt: skip
    said = [f"<b>{line}</b>" for line in textwrap.wrap(story.sentence, 120)] + textwrap.wrap(story.source, 135)
    top = 20 * len(said) + 20
    out = layout(theme, height=total + top + 20, margin={"l": 10, "r": 10, "t": top, "b": 20}, annotations=notes, **axes)
    out["title"] = {"text": "<br>".join(said), "x": 0.01, "xanchor": "left", "y": 1 - 14 / (total + top + 20), "yanchor": "top",
                    "font": {"size": 12}}  # fmt: skip
    return go.Figure({"data": data, "layout": out})


def _name(model: str) -> str:
    return f"<b>{model}</b>" if model == "Kimi K3" else model


def _bars(rows: tuple, unit: str, n: str, theme: Theme) -> dict[str, Any]:
    fills = [ROLES["published"] if model == "Kimi K3" else theme.grid for model, _ in rows]
    return {
        "type": "bar", "orientation": "h", "xaxis": f"x{n}", "yaxis": f"y{n}", "width": 0.8, "y": [_name(model) for model, _ in rows],
        "x": [score for _, score in rows], "text": [f"{score:,}" if unit == "Elo" else f"{score:.1f}" for _, score in rows],
        "textposition": "inside", "insidetextanchor": "end", "textangle": 0, "constraintext": "none",
        "insidetextfont": {"size": 12, "color": [text_on(fill) for fill in fills]}, "marker": {"color": fills},
        "hovertemplate": "%{y}: %{x} " + unit + ", published<extra></extra>",
    }  # fmt: skip
