"""An experiment's results as a plotly figure: bars and curves measured here, their spread over seeds; below, apart, what was published."""

from __future__ import annotations

import textwrap
from typing import Any

import plotly.graph_objects as go

from k3viz.evidence.experiment_story import BarPicture, ExperimentStory, LinePicture, experiment_story
from k3viz.theme import LIGHT, ROLES, SERIES, Theme, axis, layout, literal, wrapped

BAR, TALL, HEAD, FOOT, LINES, LINE = 24, 34, 44, 26, 190, 17  # px: bars, above and below a picture, a picture of curves, a line of text
COLUMNS = ((0.0, 0.47), (0.53, 1.0))
NAMES, NUMBERS = 0.42, 0.26  # share of a bar picture for the names at its left; share of its axis for the numbers at its right
LABEL = 27  # letters of a bar's name in one line; longer ones take two, and taller bars
TITLE, WIDE = 50, 118  # letters of a line above a picture, and of one across both columns, that fit a page of 1280 px with a side bar
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def experiment_figure(*, name: str = "toolbox", story: ExperimentStory | None = None, theme: Theme = LIGHT) -> go.Figure:
    """Draw one experiment's stored results: ``experiment_figure(name="twins")``.

    name: as in ``python -m minimodel.experiments list``. story: default ``experiment_story(name=name)``. theme: ``k3viz.theme.LIGHT`` or
    ``DARK``.
    """
    story = experiment_story(name=name) if story is None else story
    rows = [story.pictures[i : i + 2] for i in range(0, len(story.pictures), 2)]
    heights = [HEAD + FOOT + max(map(_height, row)) for row in rows]
    said = [f"<b>{literal(line)}</b>" for line in textwrap.wrap(story.question, 100)]
    said += wrapped(f"Measured here ({story.run}). At this size: {story.verdict}. {story.sentence}", WIDE).split("<br>")
    below = _published(story)
    total, head, foot = sum(heights), LINE * len(said) + 24, LINE * len(below) + 24
    looks = _looks(story)
    data, notes, axes, top = [], [], {}, 0
    for i, (row, height) in enumerate(zip(rows, heights, strict=True)):
        for j, picture in enumerate(row):
            n = str(2 * i + j + 1) if i or j else ""
            upper = 1 - (top + HEAD) / total
            area = (upper - _height(picture) / total, upper)
            draw = _bars if isinstance(picture, BarPicture) else _lines
            marks, its_axes = draw(picture, n, COLUMNS[j], area, looks, theme)
            data += marks
            axes |= its_axes
            notes.append(_heading(picture, COLUMNS[j][0], upper + 6 / total, theme))
        top += height
    notes += [_below(text, -(10 + LINE * (i + 1)) / total, theme) for i, text in enumerate(below)]
    out = layout(theme, height=total + head + foot, margin={"l": 10, "r": 10, "t": head, "b": foot}, annotations=notes, **axes)
    if below:
        out["shapes"] = [_edge(-(10 + LINE * len(below)) / total, -10 / total)]
    out["title"] = {"text": "<br>".join(said), "x": 0.01, "xanchor": "left", "y": 1 - 12 / (total + head + foot), "yanchor": "top",
                    "font": {"size": 13}}  # fmt: skip
    return go.Figure({"data": data, "layout": out})


def _height(picture: BarPicture | LinePicture) -> int:
    if isinstance(picture, BarPicture):
        return (BAR if all(len(bar.label) <= LABEL for bar in picture.bars) else TALL) * len(picture.bars)
    return LINES + LINE * _lines_of_names(picture)


def _lines_of_names(picture: LinePicture) -> int:
    return -(-len(picture.lines) // _columns(picture)) + 1  # names below the axis and its title


def _columns(picture: LinePicture) -> int:
    """Names stand in two columns where they are short enough."""
    return 2 if all(len(line.label) <= LABEL for line in picture.lines) else 1


def _looks(story: ExperimentStory) -> dict[str, tuple[str, str]]:
    """One color and one dash an arm, the same in all pictures."""
    arms = list(dict.fromkeys(x.arm for p in story.pictures for x in (p.bars if isinstance(p, BarPicture) else p.lines)))
    return {arm: (SERIES[i % len(SERIES)], DASHES[(i + i // len(SERIES)) % len(DASHES)]) for i, arm in enumerate(arms)}


def _bars(picture: BarPicture, n: str, x: tuple, y: tuple, looks: dict, theme: Theme) -> tuple[list[dict], dict[str, Any]]:
    bars = picture.bars
    labels = [wrapped(bar.label, LABEL) for bar in bars]
    high = max(max(bar.high for bar in bars), 0.0) or 1.0
    low = min(min(bar.low for bar in bars), 0.0)
    mark = {
        "type": "bar", "orientation": "h", "width": 0.62, "xaxis": f"x{n}", "yaxis": f"y{n}", "y": labels,
        "x": [bar.value for bar in bars], "marker": {"color": ROLES["measured"]}, "cliponaxis": False, "name": "measured",
        "customdata": [bar.spread for bar in bars], "hovertemplate": "%{y}: %{customdata}<extra>measured here</extra>",
        "error_x": {"type": "data", "symmetric": False, "width": 3,
                    "visible": any(bar.low < bar.high for bar in bars), "array": [bar.high - bar.value for bar in bars],
                    "arrayminus": [bar.value - bar.low for bar in bars], "thickness": 1.5, "color": theme.ink},
    }  # fmt: skip
    # the numbers stand in one column, clear of bars and spreads
    numbers = {
        "type": "scatter", "mode": "text", "xaxis": f"x{n}", "yaxis": f"y{n}", "x": [high + 0.04 * (high - low)] * len(bars),
        "y": labels, "text": [literal(bar.text) for bar in bars], "textposition": "middle right", "cliponaxis": False,
        "textfont": {"size": 12, "color": theme.ink}, "hoverinfo": "skip", "name": "measured",
    }  # fmt: skip
    left, right = x[0] + NAMES * (x[1] - x[0]), x[1]
    order = {"categoryorder": "array", "categoryarray": labels[::-1], "range": [-0.5, len(bars) - 0.5]}
    reach = [low, low + (high - low) / (1 - NUMBERS)]
    return [mark, numbers], {
        f"xaxis{n}": axis(theme, domain=(left, right), anchor=f"y{n}", range=reach, showgrid=False, showticklabels=False, ticks=""),
        f"yaxis{n}": axis(theme, domain=y, anchor=f"x{n}", showgrid=False, ticks="", **order),
    }


def _lines(picture: LinePicture, n: str, x: tuple, y: tuple, looks: dict, theme: Theme) -> tuple[list[dict], dict[str, Any]]:
    marks = []
    for line in picture.lines:
        color, dash = looks[line.arm]
        at = {"xaxis": f"x{n}", "yaxis": f"y{n}", "type": "scatter", "mode": "lines", "showlegend": False}
        if line.low != line.high:
            ring = {
                "x": [*line.x, *line.x[::-1]],
                "y": [*line.high, *line.low[::-1]],
                "fill": "toself",
                "opacity": 0.18,
                "fillcolor": color,
            }
            marks.append({**at, **ring, "line": {"width": 0}, "hoverinfo": "skip", "name": f"{line.label}, spread"})
        hover = "%{x:.4g}: %{y:.1%}" if picture.percent else "%{x:.4g}: %{y:.4g}"
        marks.append({**at, "x": list(line.x), "y": list(line.y), "line": {"color": color, "dash": dash, "width": 2.5}, "name": line.label,
                      "hovertemplate": hover + "<extra>%{fullData.name}, measured here</extra>"})  # fmt: skip
    whole = LINES + LINE * _lines_of_names(picture)
    bottom = y[0] + (y[1] - y[0]) * (whole - LINES + 36) / whole  # of the drawing; the axis and its names stand below it
    names, name_axes = _names(picture, n, x, (y[0], y[0] + (y[1] - y[0]) * LINE * (_lines_of_names(picture) - 1) / whole), looks, theme)
    range_y = {"range": [-0.03, 1.03], "tickformat": ".0%"} if picture.percent else {"rangemode": "tozero"}
    if picture.log_y:
        range_y = {"type": "log", "dtick": 1}
    title = {"text": f"{picture.x} (log)" if picture.log_x else picture.x, "standoff": 4, "font": {"size": 12, "color": theme.ink}}
    scale = (
        {"type": "log", "tickvals": [2**i for i in range(1, 24)], "minor": {"ticks": ""}}
        if picture.log_x
        else {"type": "linear", "nticks": 7}
    )
    return marks + names, {
        f"xaxis{n}": axis(theme, domain=(x[0] + 0.05, x[1]), anchor=f"y{n}", title=title, **scale),
        f"yaxis{n}": axis(theme, domain=(bottom, y[1]), anchor=f"x{n}", nticks=6, **range_y), **name_axes,
    }  # fmt: skip


def _names(picture: LinePicture, n: str, x: tuple, y: tuple, looks: dict, theme: Theme) -> tuple[list[dict], dict[str, Any]]:
    """A sample of each line with its name, two beside each other, on a pair of axes of their own."""
    m, marks, count = f"{100 + int(n or 1)}", [], _lines_of_names(picture) - 1
    for i, line in enumerate(picture.lines):
        color, dash = looks[line.arm]
        left, row = 0.5 * (i % _columns(picture)), count - 1 - i // _columns(picture)
        marks.append({
            "type": "scatter", "mode": "lines+text", "x": [left, left + 0.06], "y": [row, row], "text": ["", f" {literal(line.label)}"],
            "textposition": "middle right", "textfont": {"size": 12, "color": theme.ink},
            "line": {"color": color, "dash": dash, "width": 2.5}, "xaxis": f"x{m}",
            "yaxis": f"y{m}", "hoverinfo": "skip", "cliponaxis": False, "showlegend": False, "name": f"{line.label}, name",
        })  # fmt: skip
    return marks, {
        f"xaxis{m}": axis(theme, domain=(x[0] + 0.05, x[1]), anchor=f"y{m}", range=[0, 1], visible=False),
        f"yaxis{m}": axis(theme, domain=y, anchor=f"x{m}", range=[-0.5, count - 0.5], visible=False),
    }


def _heading(picture: BarPicture | LinePicture, x: float, y: float, theme: Theme) -> dict[str, Any]:
    better = picture.better if isinstance(picture, BarPicture) else ""
    lines = textwrap.wrap(picture.title, TITLE)
    gap = "<br>" if len(lines[-1]) + len(better) > TITLE else " "
    more = f"{gap}<span style='color:{theme.muted}'>{literal(better)}</span>" if better else ""
    text = "<br>".join(f"<b>{literal(line)}</b>" for line in lines) + more
    return {"text": text, "x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "align": "left",
            "showarrow": False, "font": {"size": 13, "color": theme.ink}}  # fmt: skip


def _published(story: ExperimentStory) -> list[str]:
    """Lines of text: each published number with its source; a source that several share is named once."""
    if not story.published:
        return []
    lines = ["<b>Published, by others and of far larger models</b>"]
    for source in dict.fromkeys(fact.source for fact in story.published):
        facts = "; ".join(f"{fact.label}: {fact.text}" for fact in story.published if fact.source == source)
        lines += wrapped(f"◆ {facts} ({source})", WIDE).split("<br>")
    return lines


def _below(text: str, y: float, theme: Theme) -> dict[str, Any]:
    return {"text": text, "x": 0.015, "y": y, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "align": "left",
            "showarrow": False, "font": {"size": 12, "color": theme.ink}}  # fmt: skip


def _edge(low: float, high: float) -> dict[str, Any]:
    """The stripe that marks published numbers, in their color."""
    return {"type": "rect", "xref": "paper", "yref": "paper", "x0": 0, "x1": 0.006, "y0": low, "y1": high, "fillcolor": ROLES["published"],
            "line": {"width": 0}}  # fmt: skip
