"""A trained router as a plotly figure: words flow to experts, the load of each expert, and the scores behind one word's choice."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from k3viz.experts.scale import ExpertsAtScale
from k3viz.experts.scale_figure import scale_picture
from k3viz.experts.story import ExpertsStory, experts_story
from k3viz.theme import LIGHT, ROLES, Theme, axis, format_number, layout, note, text_on, wrapped

FLOW, SIDE = (0.0, 0.64), (0.73, 1.0)
UPPER, LOADS = (0.44, 0.86), (0.0, 0.26)


def experts_figure(*, story: ExpertsStory | ExpertsAtScale | None = None, theme: Theme = LIGHT) -> go.Figure:
    """Draw an experts story (default: ``experts_story()``) or an ``experts_at_scale()``."""
    if isinstance(story, ExpertsAtScale):
        return go.Figure(scale_picture(story, theme))
    return go.Figure(experts_picture(experts_story() if story is None else story, theme))


def experts_picture(story: ExpertsStory, theme: Theme, *, title: bool = True) -> dict[str, Any]:
    """{"data", "layout"}: the plain dict that both the figure and the live panel draw."""
    T, E = len(story.tokens), story.scores.shape[1]
    boxes = E + (1 if story.shared else 0)
    places = (np.arange(boxes) + 0.5) * T / boxes - 0.5  # of the experts, on the words' axis; the shared ones last
    data = [*_flow(story, places, theme), _boxes(story, places, theme), _loads(story, places, theme), *_scores(story, theme)]
    shared = "; dotted: shared, every word" if story.shared else ""
    notes = [
        note(theme, f"<b>Words to experts</b>, layer {story.layer + 1}{shared}", FLOW[0], 1.0, yshift=14),
        note(theme, f"<b>Words each expert got</b>, {format_number(story.even)} would be even", FLOW[0], LOADS[1], yshift=6),
        note(theme, f"<b>Scores</b> at {story.tokens[story.token]!r}", SIDE[0] - 0.03, 1.0, yshift=14),
        note(theme, "■ chosen; ◆ score + bias chooses,<br>the bar alone weighs", SIDE[0] - 0.03, 1.0, yshift=-26, size=12),
    ]
    out = layout(theme, height=620 if title else 560, margin={"l": 44, "r": 24, "t": 104 if title else 40, "b": 30}, annotations=notes)
    if title:
        text = wrapped(story.sentence, 130)
        out["title"] = {"text": text, "x": 0.01, "xanchor": "left", "y": 0.97, "yanchor": "top", "font": {"size": 13}}
    bare = {"showgrid": False, "zeroline": False, "ticks": ""}
    words = [f"<b>{w}</b>" if t == story.token else w for t, w in enumerate(story.tokens)]
    names = [f"E{j + 1}" for j in range(E)]
    out |= {
        "xaxis": axis(theme, domain=FLOW, anchor="y", side="top", range=[-0.5, T - 0.5], tickvals=list(range(T)), ticktext=words,
                      tickangle=-60, showline=False, **bare),
        "yaxis": axis(theme, domain=UPPER, anchor="x", range=[-0.12, 1.02], showticklabels=False, showline=False, **bare),
        "xaxis2": axis(theme, domain=FLOW, anchor="y2", range=[-0.5, T - 0.5], tickvals=[round(float(x), 3) for x in places[:E]],
                       ticktext=names, **bare),
        "yaxis2": axis(theme, domain=LOADS, anchor="x2", range=[0, 1.25 * max(*story.loads, story.even)], nticks=4, tickformat="d"),
        "xaxis3": axis(theme, domain=SIDE, anchor="y3", range=[min(0.0, float((story.scores + story.bias).min()) - 0.02), 1.3],
                       tickvals=[0, 0.5, 1], zeroline=False),
        "yaxis3": axis(theme, domain=(0, 0.86), anchor="x3", range=[E - 0.5, -0.5], tickvals=list(range(E)), ticktext=names, **bare),
    }  # fmt: skip
    out["xaxis"]["tickfont"]["size"] = 12 if T <= 32 else 11
    return {"data": data, "layout": out}


def _flow(story: ExpertsStory, places: np.ndarray, theme: Theme) -> list[dict[str, Any]]:
    """A line from every word to each of its experts: one trace for all, one a line for the word looked at, as wide as its weight."""
    x: list[float | None] = []
    for t, experts in enumerate(story.indices):
        for j in experts:
            x += [t, round(float(places[j]), 3), None]
    at = story.token
    base = {"type": "scatter", "mode": "lines", "hoverinfo": "skip"}
    out = [{**base, "name": "all words", "x": x, "y": [1, 0, None] * (len(x) // 3), "line": {"color": theme.line, "width": 0.8}}]
    if story.shared:
        shared = {"color": ROLES["query"], "width": 3, "dash": "dot"}
        out.append({**base, "name": "shared", "x": [at, round(float(places[-1]), 3)], "y": [1, 0], "line": shared})
    for j, p in zip(story.indices[at].tolist(), story.weights[at].tolist(), strict=True):
        line = {"color": ROLES["memory"], "width": round(2 + 6 * p, 2)}
        out.append({**base, "name": f"to E{j + 1}", "x": [at, round(float(places[j]), 3)], "y": [1, 0], "line": line})
    return out


def _boxes(story: ExpertsStory, places: np.ndarray, theme: Theme) -> dict[str, Any]:
    """The experts themselves; those that the word visits are filled."""
    E, chosen = story.scores.shape[1], set(story.indices[story.token].tolist())
    fills = [ROLES["memory"] if j in chosen else theme.empty for j in range(E)] + [ROLES["query"]] * (len(places) - E)
    texts = [f"E{j + 1}" for j in range(E)] + [f"{story.shared}×"] * (len(places) - E)
    hover = [f"E{j + 1}: {load} words" for j, load in enumerate(story.loads)]
    hover += [f"{story.shared} shared, on the full width: every word"] * (len(places) - E)
    return {
        "type": "scatter", "mode": "markers+text", "name": "experts", "x": [round(float(x), 3) for x in places], "y": [-0.03] * len(places),
        "text": texts, "textposition": "middle center", "textfont": {"size": 12, "color": [text_on(fill) for fill in fills]},
        "marker": {"symbol": "square", "size": 27, "opacity": 1, "color": fills, "line": {"color": theme.line, "width": 1}},
        "customdata": hover, "hovertemplate": "%{customdata}<extra></extra>", "cliponaxis": False,
    }  # fmt: skip


def _loads(story: ExpertsStory, places: np.ndarray, theme: Theme) -> dict[str, Any]:
    E = story.scores.shape[1]
    return {
        "type": "bar", "name": "loads", "xaxis": "x2", "yaxis": "y2", "x": [round(float(x), 3) for x in places[:E]], "y": list(story.loads),
        "width": 0.6 * len(story.tokens) / len(places), "text": [str(n) if n else "0: idle" for n in story.loads],
        "textposition": "outside", "textangle": 0, "cliponaxis": False, "textfont": {"size": 12, "color": theme.ink},
        "marker": {"color": ROLES["memory"]}, "hovertemplate": "%{y} words<extra></extra>",
    }  # fmt: skip


def _scores(story: ExpertsStory, theme: Theme) -> list[dict[str, Any]]:
    """The word's scores as bars, the chosen ones filled and with their weights; a diamond where score + bias stands."""
    E, scores = story.scores.shape[1], story.scores[story.token]
    weight = dict(zip(story.indices[story.token].tolist(), story.weights[story.token].tolist(), strict=True))
    biased = scores + story.bias
    text = [format_number(s) + (f", <b>weight {format_number(weight[j])}</b>" if j in weight else "") for j, s in enumerate(scores)]
    fills = [ROLES["memory"] if j in weight else theme.grid for j in range(E)]
    return [
        {"type": "bar", "orientation": "h", "xaxis": "x3", "yaxis": "y3", "name": "scores", "x": np.round(scores, 4).tolist(),
         "y": list(range(E)), "width": 0.45, "hovertemplate": "score %{x:.2f}<extra></extra>",
         "marker": {"color": fills, "line": {"color": theme.line, "width": 1}}},
        {"type": "scatter", "mode": "text", "xaxis": "x3", "yaxis": "y3", "name": "weights", "x": [0.0] * E,
         "y": [j - 0.37 for j in range(E)], "text": text, "textposition": "middle right", "hoverinfo": "skip", "cliponaxis": False,
         "textfont": {"size": 12, "color": theme.ink}},
        {"type": "scatter", "mode": "markers", "xaxis": "x3", "yaxis": "y3", "name": "score + bias", "x": np.round(biased, 4).tolist(),
         "y": list(range(E)), "hovertemplate": "score + bias %{x:.2f}<extra></extra>", "cliponaxis": False,
         "marker": {"symbol": "diamond", "size": 9, "color": ROLES["key"], "line": {"color": theme.ink, "width": 1}}},
    ]  # fmt: skip
