"""The memory curve as a plotly figure: measured small models on the left, published sizes to a million tokens on the right, and below
them what each published model costs where it is served."""

from __future__ import annotations

import math
from typing import Any

import plotly.graph_objects as go

from k3viz.memory.story import OWN, MemoryStory, curve_text, memory_story
from k3viz.theme import LIGHT, MIXER_COLORS, MIXER_DASHES, Theme, axis, format_bytes, format_count, layout, wrapped

LEFT, RIGHT = (0.0, 0.235), (0.48, 0.775)  # each with room for the names at the ends of its lines
DASHES = {"k3": "solid", "kimi_linear": "dash", "kimi_k2": "solid", "deepseek_v3": "dot", "k3_all_mla": "dash"}
MARKERS = {"mha": "circle", "gqa": "square", "mla": "diamond", "sliding_window": "triangle-up", "kda": "star"}
GAP = 0.062  # least distance of two names, as a share of the charts' height
CHARTS, HEADER, ROW, BETWEEN = 330, 46, 27, 74  # px: height of the charts, of the table's header and rows, of the room between them
SCALES = ("linear", "log")
COLUMNS = {"model": 170, "a token adds": 90, "fixed state": 90, "one session": 90, "weights": 90, "sessions that fit": 90,
           "moved per new token": 100, "break-even, tokens": 100}  # px of a picture of 820  # fmt: skip


def memory_figure(*, story: MemoryStory | None = None, scale: str = "linear", theme: Theme = LIGHT) -> go.Figure:
    """Draw a memory story (default: ``memory_story()``). scale: "linear" or "log", of all axes."""
    return go.Figure(memory_picture(memory_story() if story is None else story, scale, theme))


def memory_picture(story: MemoryStory, scale: str, theme: Theme, *, title: bool = True) -> dict[str, Any]:
    """{"data", "layout"}: the plain dict that both the figure and the live panel draw."""
    if scale not in tuple(SCALES):
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    below = BETWEEN + HEADER + ROW * len(story.published) + 4 if story.published else 0
    floor = below / (below + CHARTS)  # where the charts begin, as a share of the plot
    small = _Axes(LEFT, floor, scale, [(c.tokens, c.formula) for c in story.measured])
    large = _Axes(RIGHT, floor, scale, [(c.tokens, c.bytes) for c in story.published])
    data, notes = [], []
    for c in story.measured:
        color, wide = MIXER_COLORS[c.kind], 3 if c.kind == "kda" else 2
        said = [f"{c.label}: {format_bytes(b)} measured at {format_count(t)} tokens" for t, b in zip(c.tokens, c.measured, strict=True)]
        data += [
            {"type": "scatter", "mode": "lines", "x": c.tokens, "y": c.formula, "hoverinfo": "skip", "name": f"{c.label}, formula",
             "line": {"color": color, "width": wide, "dash": MIXER_DASHES[c.kind]}},
            {"type": "scatter", "mode": "markers", "x": c.tokens, "y": c.measured, "name": f"{c.label}, measured",
             "customdata": said, "cliponaxis": False,
             "marker": {"color": color, "size": 8, "symbol": MARKERS[c.kind], "line": {"color": theme.ink, "width": 0.5}},
             "hovertemplate": "%{customdata}<extra></extra>"},
        ]  # fmt: skip
    notes += small.names([(c.label, c.measured[-1], MIXER_COLORS[c.kind]) for c in story.measured], theme)
    for c in story.published:
        said = [f"{format_count(t)} tokens: {format_bytes(b)}<br>{curve_text(c)}" for t, b in zip(c.tokens, c.bytes, strict=True)]
        data.append({
            "type": "scatter", "mode": "lines", "xaxis": "x2", "yaxis": "y2", "x": c.tokens, "y": c.bytes, "name": c.label,
            "line": {"color": MIXER_COLORS[c.mixer], "width": 3 if c.mixer == "kda" else 2, "dash": DASHES.get(c.name, "dashdot")},
            "customdata": said, "hovertemplate": "%{customdata}<extra></extra>",
        })  # fmt: skip
    notes += large.names([(c.label, c.bytes[-1], MIXER_COLORS[c.mixer]) for c in story.published], theme)
    sizes = "Published sizes and yours" if OWN in [c.name for c in story.published] else "Published sizes"
    notes += [_heading("Measured (dots) and the formula (lines)", LEFT, theme),
              _heading(f"{sizes}, {story.dtype}, {_batch(story)}", RIGHT, theme)]  # fmt: skip
    if story.published:
        table = (below - BETWEEN) / (below + CHARTS)
        data.append(_table(story, table, theme))
        place = f"{format_count(story.context)} tokens a session, weights as {story.weights}"
        room = f"{format_bytes(story.memory)} of GPU memory, batch of {format_count(story.batch)}"
        notes.append(_heading(f"The bill at {place}, {room}", LEFT, theme, y=table + 0.004))
    top = 110 if title else 50
    bottom = 10 if below else 50
    margin = {"l": 70, "r": 10, "t": top, "b": bottom}
    out = layout(theme, height=top + CHARTS + below + bottom, margin=margin, annotations=notes)
    if title:
        text = f"{wrapped(story.measured_sentence, 118)}<br>{wrapped(story.sentence, 118)}"
        out["title"] = {"text": text, "x": 0.01, "xanchor": "left", "y": 0.97, "yanchor": "top", "font": {"size": 13}}
    small.add(out, "", theme)
    large.add(out, "2", theme)
    return {"data": data, "layout": out}


class _Axes:
    """A pair of axes with ranges of our own, so that the names at the lines' ends can be kept apart."""

    def __init__(self, domain: tuple, bottom: float, scale: str, curves: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        self.domain, self.bottom, self.scale = domain, bottom, scale
        last = max((tokens[-1] for tokens, _ in curves), default=1)
        top = max((sizes[-1] for _, sizes in curves), default=1)
        if scale == "linear":
            self.x, self.y = (0.0, float(last)), (0.0, 1.04 * top)
        else:
            first = min(1024, max(1, last // 16))
            low = min((b for tokens, sizes in curves for t, b in zip(tokens, sizes, strict=True) if t >= first), default=1)
            self.x, self.y = (math.log10(first), math.log10(last)), (math.log10(0.7 * low), math.log10(1.4 * top))

    def names(self, ends: list[tuple[str, int, str]], theme: Theme) -> list[dict[str, Any]]:
        """Each line's name and last value beside its end, moved apart where two would overlap."""
        low, high = self.y
        ends = sorted(ends, key=lambda end: end[1])
        at = [((math.log10(b) if self.scale == "log" else b) - low) / (high - low) for _, b, _ in ends]
        for i in range(1, len(at)):
            at[i] = max(at[i], at[i - 1] + GAP)
        for i in range(len(at) - 1, -1, -1):  # and back down, should the highest have left the picture
            at[i] = min(at[i], (at[i + 1] - GAP) if i + 1 < len(at) else 1.0)
        return [
            {"text": f"<span style='color:{color}'>━</span> {name}, {format_bytes(b)}", "x": self.domain[1] + 0.004,
             "y": self.bottom + y * (1 - self.bottom),
             "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "middle", "showarrow": False,
             "font": {"size": 12, "color": theme.ink}}
            for y, (name, b, color) in zip(at, ends, strict=True)
        ]  # fmt: skip

    def add(self, out: dict[str, Any], n: str, theme: Theme) -> None:
        title = {"text": "tokens read", "font": {"size": 12, "color": theme.muted}, "standoff": 6}
        log = {"dtick": 1} if self.scale == "log" else {"nticks": 6}
        out[f"xaxis{n}"] = axis(theme, domain=self.domain, anchor=f"y{n}", type=self.scale, range=list(self.x), title=title,
                                tickformat="~s", **log)  # fmt: skip
        out[f"yaxis{n}"] = axis(theme, domain=(self.bottom, 1.0), anchor=f"x{n}", type=self.scale, range=list(self.y), tickformat="~s",
                                ticksuffix="B", **log)  # fmt: skip


def _table(story: MemoryStory, top: float, theme: Theme) -> dict[str, Any]:
    """One row a published model: what its sessions and weights take, and what a token moves."""
    rows = [
        (c.label, format_bytes(c.per_token), format_bytes(c.fixed) if c.fixed else "none", format_bytes(c.bill.session),
         format_bytes(c.bill.weights), format_count(c.bill.sessions), format_bytes(c.bill.moved),
         "" if c.bill.break_even is None else format_count(c.bill.break_even))
        for c in story.published
    ]  # fmt: skip
    look = {"align": ["left"] + ["right"] * (len(COLUMNS) - 1), "line": {"color": theme.grid, "width": 1}}
    look["font"] = {"size": 12, "color": theme.ink}
    return {
        "type": "table", "domain": {"x": [0, 1], "y": [0, top]}, "columnwidth": list(COLUMNS.values()),
        "header": {"values": [f"<b>{name}</b>" for name in COLUMNS], "fill": {"color": theme.empty}, "height": HEADER, **look},
        "cells": {"values": list(map(list, zip(*rows, strict=True))), "fill": {"color": theme.paper}, "height": ROW, **look},
    }  # fmt: skip


def _batch(story: MemoryStory) -> str:
    return "by the formula" if story.batch == 1 else f"batch of {format_count(story.batch)}"


def _heading(text: str, domain: tuple[float, float], theme: Theme, *, y: float = 1.02) -> dict[str, Any]:
    return {"text": f"<b>{text}</b>", "x": domain[0], "y": y, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom",
            "showarrow": False, "font": {"size": 13, "color": theme.ink}}  # fmt: skip
