"""Where K3's parts come from, as a plotly figure: the models on the way along a line of months, then every component and its ancestors."""

from __future__ import annotations

import textwrap
from typing import Any

import plotly.graph_objects as go

from k3viz.evidence.story import LineageStory, lineage_story
from k3viz.theme import LIGHT, ROLES, Theme, axis, layout, wrapped

LINE, PAD, WAY = 16, 12, 150  # px: a line of text, around a component, the models on the way
MIDDLE = 0.47  # between ancestors and components


def lineage_figure(*, story: LineageStory | None = None, theme: Theme = LIGHT) -> go.Figure:
    """Draw the lineage (default: ``lineage_story()``). theme: ``k3viz.theme.LIGHT`` or ``DARK``."""
    story = lineage_story() if story is None else story
    blocks = [(textwrap.wrap(old, 58), _described(name, does, source, theme)) for name, does, old, source in story.components.rows]
    heights = [LINE * max(len(a), len(b)) + PAD for a, b in blocks]
    total, at, notes, shapes = sum(heights) + WAY, WAY, [], []
    for (old, new), height in zip(blocks, heights, strict=True):
        middle = 1 - (at + height / 2) / total
        notes.append(_note("<br>".join(old), MIDDLE - 0.03, middle, "right", theme))
        notes.append(_note("<br>".join(new), MIDDLE + 0.025, middle, "left", theme))
        notes.append(_arrow(MIDDLE + 0.018, middle, theme))
        shapes.append({"type": "line", "xref": "paper", "yref": "paper", "x0": 0, "x1": 1, "y0": 1 - at / total, "y1": 1 - at / total,
                       "line": {"color": theme.grid, "width": 1}})  # fmt: skip
        at += height
    months = [_month(month) for month in story.timeline.column("month")]
    data = [_way(story, months, theme)]
    out = layout(theme, height=total + 60, margin={"l": 10, "r": 10, "t": 50, "b": 10}, annotations=notes, shapes=shapes)
    out["xaxis"] = axis(theme, domain=(0.06, 0.94), anchor="y", range=[months[0] - 0.8, months[-1] + 1.2], showgrid=False, zeroline=False,
                        tickvals=months, ticktext=list(story.timeline.column("month")))  # fmt: skip
    out["yaxis"] = axis(theme, domain=(1 - (WAY - 40) / total, 1), anchor="x", visible=False, range=[-1, 1])
    text = wrapped(f"{story.sentence} Left: what it grew from. Right: the component and its source.", 125)
    out["title"] = {"text": text, "x": 0.01, "xanchor": "left", "y": 1 - 14 / (total + 60), "yanchor": "top", "font": {"size": 13}}
    return go.Figure({"data": data, "layout": out})


def _described(name: str, does: str, source: str, theme: Theme) -> list[str]:
    first, *more = textwrap.wrap(f"{name}: {does}", 62)
    return [f"<b>{name}</b>{first[len(name):]}", *more, f"<span style='color:{theme.muted}'>{source}</span>"]


def _note(text: str, x: float, y: float, side: str, theme: Theme) -> dict[str, Any]:
    return {"text": text, "x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": side, "yanchor": "middle", "align": side,
            "showarrow": False, "font": {"size": 12, "color": theme.ink}}  # fmt: skip


def _arrow(x: float, y: float, theme: Theme) -> dict[str, Any]:
    return {"x": x, "y": y, "xref": "paper", "yref": "paper", "text": "", "showarrow": True, "arrowhead": 2, "arrowsize": 1.1,
            "arrowwidth": 1.5, "arrowcolor": theme.line, "ax": -32, "ay": 0}  # fmt: skip


def _month(text: str) -> int:
    year, month = text.split("-")
    return 12 * int(year) + int(month)


def _way(story: LineageStory, months: list[int], theme: Theme) -> dict[str, Any]:
    """The models on the way: a line of dots, every second text below it, so that neighbors don't meet."""
    said = [f"<b>{model}</b><br>" + "<br>".join(textwrap.wrap(what, 26)) for model, _, what in story.timeline.rows]
    return {
        "type": "scatter", "mode": "lines+markers+text", "x": months, "y": [0] * len(months), "text": said,
        "textposition": ["top center" if i % 2 == 0 else "bottom center" for i in range(len(months))],
        "textfont": {"size": 12, "color": theme.ink}, "line": {"color": theme.line, "width": 2}, "cliponaxis": False,
        "marker": {"color": ROLES["published"], "size": 13, "symbol": "diamond", "line": {"color": theme.ink, "width": 1}},
        "hoverinfo": "skip",
    }  # fmt: skip
