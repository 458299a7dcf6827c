"""Gated MLA as a plotly figure: who reads which card, the cards, the output gate, and what the two forms cost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import plotly.graph_objects as go

from k3viz.mla.forms import MOST_AT_ONCE, NAMES
from k3viz.mla.story import MLAStory, mla_story
from k3viz.theme import (
    LIGHT,
    ROLES,
    Theme,
    axis,
    diverging,
    format_bytes,
    format_count,
    format_number,
    format_probability,
    layout,
    note,
    shade,
    text_on,
    wrapped,
)  # fmt: skip

HEADS, CARDS, LOWER = (0.78, 0.94), (0.43, 0.71), (0.0, 0.25)  # how high: attention, cards, and below them the gate and the costs
GATE, COSTS = (0.0, 0.36), (0.57, 0.83)  # and how wide, the two below
COLORS = {"absorbed": "memory", "rebuilt": "erase", "kept": "leak"}
DASHES = {"absorbed": "solid", "rebuilt": "dash", "kept": "dot"}
SHOWN = 0.05  # smaller shares are a color without a number


def mla_figure(*, story: MLAStory | None = None, position: int = -1, theme: Theme = LIGHT) -> go.Figure:
    """Draw a Gated MLA story (default: ``mla_story()``) as seen from one token.

    position: the reading token, counted from the end if negative. Raises ValueError for a token that the story doesn't have.
    """
    story = mla_story() if story is None else story
    T = len(story.tokens)
    if isinstance(position, bool) or not isinstance(position, int) or not -T <= position < T:
        raise ValueError(f"position must be a whole number from {-T} to {T - 1}, got {position!r}")
    return go.Figure(mla_picture(story, position % T, theme))


def mla_picture(story: MLAStory, position: int, theme: Theme, *, title: bool = True) -> dict[str, Any]:
    """{"data", "layout"} as seen from one token: the plain dict that both the figure and the live panel draw."""
    width = story.latent.shape[1]
    costs, names = _costs(story, theme)
    forms, above = story.forms, 0.006
    notes = [
        note(theme, _answer(story, position), 0, 1.0, size=14),
        note(theme, f"<b>What each head reads, in percent</b>   {story.place}", 0, HEADS[1] + above),
        note(theme, f"<b>The cards: {width} numbers a token</b>   {story.rank} latent and {width - story.rank} extra, shared by all heads",
             0, CARDS[1] + above),
        note(theme, "<b>Output gate, each channel</b>", GATE[0], LOWER[1] + above),
        note(theme, f"<b>Cost of a pass, {forms.model}</b>   one layer, {format_count(forms.context)} cards", COSTS[0], LOWER[1] + above),
        *_open(story, position, theme),
        *names,
    ]  # fmt: skip
    data = [_attention(story, position, theme), *_shares(story, position, theme), _cards(story, position, theme),
            _edge(story, theme), _gate(story, position, theme), *costs]  # fmt: skip
    out = layout(theme, height=720, margin={"l": 106, "r": 20, "t": 90 if title else 34, "b": 50}, annotations=notes)
    if title:
        said = wrapped(story.sentence_at(position), 125)
        out["title"] = {"text": said, "x": 0.01, "xanchor": "left", "y": 0.975, "yanchor": "top", "font": {"size": 13}}
    return {"data": data, "layout": out | _axes(story, theme)}


def _answer(story: MLAStory, position: int) -> str:
    write = format_probability if story.learned else format_number
    said = "   ".join(f"{word} {write(x)}" for word, x in story.answers[position][: 1 if story.learned else 4]) or "nothing"
    what = "the model's next word" if story.learned else "out comes"
    return f"At {story.tokens[position]!r} {what}: <b>{said}</b>"


def _scale(theme: Theme) -> list[list]:
    """From an empty cell to blue: a card that is there and not read looks different from one that is not there yet."""
    return [[0.0, theme.empty], [1.0, ROLES["memory"]]]


# ---- attention and cards: one column a token ----


def _attention(story: MLAStory, position: int, theme: Theme) -> dict[str, Any]:
    shares = np.full((len(story.heads), len(story.tokens)), np.nan)
    shares[:, : position + 1] = story.attention[:, position, : position + 1]
    return {
        "type": "heatmap", "z": _rounded(100 * shares, 2), "y": list(story.heads), "zmin": 0, "zmax": 100, "showscale": False,
        "colorscale": _scale(theme), "xgap": 2, "ygap": 2, "name": "attention",
        "hovertemplate": "%{y}: %{z:.1f} % of card %{x}<extra></extra>",
    }  # fmt: skip


def _shares(story: MLAStory, position: int, theme: Theme) -> list[dict[str, Any]]:
    """Percentages inside the cells, dark on pale ones and pale on dark ones."""
    at = [(h, t, float(story.attention[h, position, t])) for h in range(len(story.heads)) for t in range(position + 1)]
    shown = [(h, t, p) for h, t, p in at if p >= SHOWN]
    return [{
        "type": "scatter", "mode": "text", "x": [t for _, t, _ in shown], "y": [story.heads[h] for h, _, _ in shown],
        "text": [f"{100 * p:.0f}" for *_, p in shown], "hoverinfo": "skip", "name": "shares",
        "textfont": {"size": 12, "color": [text_on(shade(_scale(theme), p)) for *_, p in shown]},
    }]  # fmt: skip


def _cards(story: MLAStory, position: int, theme: Theme) -> dict[str, Any]:
    cards = story.latent.T.copy()
    cards[:, position + 1 :] = np.nan  # not read yet
    largest = float(np.abs(story.latent).max()) or 1.0
    return {
        "type": "heatmap", "xaxis": "x2", "yaxis": "y2", "z": _rounded(cards, 2), "zmin": -largest, "zmax": largest, "xgap": 4,
        "colorscale": diverging(theme), "name": "cards", "hovertemplate": "number %{y} of card %{x}: %{z:.2f}<extra></extra>",
        "colorbar": {"thickness": 8, "len": CARDS[1] - CARDS[0], "y": CARDS[0], "yanchor": "bottom", "outlinewidth": 0, "x": 1.005,
                     "tickvals": [-largest, 0, largest], "ticktext": [format_number(-largest), "0", format_number(largest)],
                     "tickfont": {"color": theme.ink, "size": 11}},
    }  # fmt: skip


def _edge(story: MLAStory, theme: Theme) -> dict[str, Any]:
    """Where the latent numbers end and the extra ones begin."""
    y = story.rank - 0.5
    return {"type": "scatter", "mode": "lines", "xaxis": "x2", "yaxis": "y2", "x": [-0.5, len(story.tokens) - 0.5], "y": [y, y],
            "line": {"color": theme.ink, "width": 1.5, "dash": "dot"}, "hoverinfo": "skip", "name": "extra numbers"}  # fmt: skip


# ---- the gate ----


def _gate(story: MLAStory, position: int, theme: Theme) -> dict[str, Any]:
    return {
        "type": "heatmap", "xaxis": "x3", "yaxis": "y3", "z": _rounded(100 * story.gate[position], 1), "y": list(story.heads), "zmin": 0,
        "zmax": 100, "showscale": False, "colorscale": _scale(theme), "xgap": 1, "ygap": 3, "name": "gate",
        "hovertemplate": "%{y}, channel %{x}: %{z} % open<extra></extra>",
    }  # fmt: skip


def _open(story: MLAStory, position: int, theme: Theme) -> list[dict[str, Any]]:
    return [
        {"text": f"{format_probability(g)} open", "x": GATE[1] + 0.006, "xref": "paper", "y": head, "yref": "y3", "xanchor": "left",
         "showarrow": False, "font": {"size": 12, "color": theme.ink}}
        for head, g in zip(story.heads, story.gate[position].mean(-1), strict=True)
    ]  # fmt: skip


# ---- the two forms ----


def _costs(story: MLAStory, theme: Theme) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(traces, names at the ends of the lines)."""
    forms = story.forms
    grid = [1 << p for p in range(MOST_AT_ONCE.bit_length())]
    data, ends = [], []
    for form, name in NAMES.items():
        color, y = ROLES[COLORS[form]], [forms.flops(form, T) for T in grid]
        said = [f"{name}, {format_count(T)} at once: {format_count(f)} FLOPs" for T, f in zip(grid, y, strict=True)]
        now = forms.flops(form)
        data += [
            {"type": "scatter", "mode": "lines", "xaxis": "x4", "yaxis": "y4", "x": grid, "y": y, "name": name, "customdata": said,
             "line": {"color": color, "width": 3 if form == "absorbed" else 2, "dash": DASHES[form]},
             "hovertemplate": "%{customdata}<extra></extra>"},
            {"type": "scatter", "mode": "markers", "xaxis": "x4", "yaxis": "y4", "x": [forms.at_once], "y": [now], "name": f"{name}, now",
             "marker": {"color": color, "size": 10, "line": {"color": theme.ink, "width": 1}},
             "customdata": [f"{name}: {format_count(now)} FLOPs"], "hovertemplate": "%{customdata}<extra></extra>"},
        ]  # fmt: skip
        ends.append((now, form, f"{name}<br>{format_count(now)} FLOPs, keeps {format_bytes(forms.kept_bytes(form))}"))
    names = []
    for i, (_, form, text) in enumerate(sorted(ends, reverse=True)):
        names.append({
            "text": f"<span style='color:{ROLES[COLORS[form]]}'>━</span> {text}", "x": COSTS[1] + 0.008, "xref": "paper",
            "y": LOWER[1] - 0.095 * i, "yref": "paper", "xanchor": "left", "yanchor": "top", "align": "left", "showarrow": False,
            "font": {"size": 11, "color": theme.ink},
        })  # fmt: skip
    return data, names


# ---- axes and notes ----


def _axes(story: MLAStory, theme: Theme) -> dict[str, Any]:
    T, width = len(story.tokens), story.latent.shape[1]
    columns = {"range": [-0.5, T - 0.5], "showgrid": False, "zeroline": False, "tickvals": list(range(T)), "ticks": ""}
    quiet = {"size": 12, "color": theme.muted}
    rows = {"autorange": "reversed", "showgrid": False, "zeroline": False, "ticks": ""}
    channels = story.gate.shape[-1]
    ticks = [10**p for p in range(0, 24, 2)]
    out = {
        "xaxis": axis(theme, anchor="y", showticklabels=False, **columns),
        "yaxis": axis(theme, domain=HEADS, **rows),
        "xaxis2": axis(theme, anchor="y2", ticktext=list(story.tokens), tickangle=-45 if T > 12 else 0, **columns),
        "yaxis2": axis(theme, domain=CARDS, anchor="x2", tickvals=[(story.rank - 1) / 2, (story.rank + width - 1) / 2],
                       ticktext=["latent", "extra"], **rows),
        "xaxis3": axis(theme, domain=GATE, anchor="y3", showgrid=False, zeroline=False, ticks="", tickvals=[0, channels - 1],
                       ticktext=["1", str(channels)], title={"text": "value channel", "font": quiet, "standoff": 0}),
        "yaxis3": axis(theme, domain=LOWER, anchor="x3", **rows),
        "xaxis4": axis(theme, domain=COSTS, anchor="y4", type="log", dtick=1, tickformat="~s",
                       range=[-0.2, math.log10(MOST_AT_ONCE) + 0.2], title={"text": "tokens read at once", "font": quiet, "standoff": 0}),
        "yaxis4": axis(theme, domain=LOWER, anchor="x4", type="log", tickvals=ticks, ticktext=[format_count(x, digits=1) for x in ticks],
                       title={"text": "FLOPs", "font": quiet, "standoff": 4}),
    }  # fmt: skip
    if T > 30:
        out["xaxis2"]["tickfont"] = {"color": theme.ink, "size": 11}
    return out


def _rounded(x: np.ndarray, digits: int) -> list[list[float | None]]:
    return [[None if np.isnan(v) else round(float(v), digits) + 0.0 for v in row] for row in x]
