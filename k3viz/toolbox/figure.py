"""The toolbox as a plotly figure: what each technique keeps of every token, its bytes and its answer; below, one of them looked into."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch

from k3viz.theme import (
    LIGHT,
    MIXER_COLORS,
    ROLES,
    Theme,
    axis,
    diverging,
    format_bytes,
    format_count,
    format_probability,
    layout,
    literal,
    note,
    sequential,
    text_on,
    wrapped,
)  # fmt: skip
from k3viz.toolbox.story import IDEAS, LABELS, Kept, ToolboxStory, toolbox_story
from minimodel import cache_bytes
from minimodel.accounting import row_numbers
from minimodel.tasks import meeting
from minimodel.toolbox import TECHNIQUES, toolbox_config

TOKENS, BYTES, ANSWER = (0.0, 0.55), 0.575, (0.735, 1.0)  # columns, as shares of the width
UPPER, LOWER = (0.46, 0.94), (0.13, 0.37)
SHORTEST, FEW = 24, 44  # tokens: the axis is at least so long; up to so many all have their names
LONG = 31  # characters that fit above an answer's bar
TALL = 0.8  # of a row, for the largest number of numbers


def toolbox_figure(*, story: ToolboxStory | None = None, theme: Theme = LIGHT) -> go.Figure:
    """Draw a toolbox story (default: ``toolbox_story()``)."""
    return go.Figure(toolbox_picture(toolbox_story() if story is None else story, theme))


def toolbox_picture(story: ToolboxStory, theme: Theme, *, title: bool = True) -> dict[str, Any]:
    """{"data", "layout"}: the plain dict that both the figure and the live panel draw."""
    name = LABELS[story.technique]
    rows, last = len(story.kept), max(len(story.tokens), SHORTEST) - 0.5
    data = [trace for i, k in enumerate(story.kept) for trace in _bars(story, k, rows - 1 - i, theme)]
    data += [*_answers(story, theme), _heads(story, theme)]
    notes = [
        note(theme, "<b>What is kept of each token</b> (height: numbers in a layer)", TOKENS[0], UPPER[1] + 0.01),
        note(theme, "<b>Measured</b>", BYTES, UPPER[1] + 0.01),
        note(theme, f"<b>Asked for the {story.slot}</b>", ANSWER[0], UPPER[1] + 0.01),
        note(theme, f"<b>{name[0].upper()}{name[1:]}, layer {story.layer}: what counts for the blank</b> (italics: question)",
             TOKENS[0], LOWER[1] + 0.01),
        note(theme, _explained(story), BYTES, LOWER[1], size=12, yanchor="top"),
    ]  # fmt: skip
    for i, k in enumerate(story.kept):
        y, words = rows - 1 - i, [f"{w} {format_probability(p)}" for w, p in k.answer]
        end = (" (a guess)" if k.guess else "") + ("" if k.as_trained else " *")
        said = " · ".join(words[: 2 if len(" · ".join(words[:2]) + end) <= LONG else 1]) + end
        notes += [
            {**note(theme, f"<b>{format_bytes(k.bytes)}</b><br>{_growth(k)}", BYTES, y + 0.4, size=12), "yref": "y", "yanchor": "middle"},
            {**note(theme, literal(said), ANSWER[0], y + 0.34, size=11), "yref": "y"},
        ]  # fmt: skip
    if story.read:
        inside = len(story.tokens) <= FEW
        text = f"one state of {format_count(_state_numbers())} numbers a layer"
        place = note(theme, text, 0 if inside else _state_width() + 0.5, TALL / 2, size=12, xref="x", yref="y", yanchor="middle")
        notes.append({**place, "font": {"size": 12, "color": text_on(MIXER_COLORS["kda"]) if inside else theme.ink}})
    if not all(k.as_trained for k in story.kept):
        notes.append(note(theme, "* of the trained size", 1, UPPER[0] - 0.045, size=11, xanchor="right"))
    out = layout(theme, height=640, margin={"l": 92, "r": 12, "t": 96 if title else 18, "b": 10}, barmode="stack", bargap=0.12,
                 annotations=notes, shapes=_shapes(story, theme))  # fmt: skip
    if title:
        out["title"] = {"text": wrapped(story.sentence, 118), "x": 0.01, "xanchor": "left", "y": 0.985, "yanchor": "top",
                        "font": {"size": 14}}  # fmt: skip
    names = [_bold(f"{IDEAS[k.technique]}<br>{LABELS[k.technique]}", k.technique == story.technique) for k in reversed(story.kept)]
    at, words = _token_labels(story)
    plain = {"showgrid": False, "zeroline": False}
    out["xaxis"] = axis(theme, domain=list(TOKENS), anchor="y", range=[-0.5, last], showticklabels=False, ticks="", **plain)
    out["yaxis"] = axis(theme, domain=list(UPPER), anchor="x", range=[-0.1, rows], tickvals=[i + 0.4 for i in range(rows)], ticktext=names,
                        ticks="", **plain)  # fmt: skip
    out["xaxis2"] = axis(theme, domain=list(ANSWER), anchor="y2", range=[0, 1.02], visible=False)
    out["yaxis2"] = axis(theme, domain=list(UPPER), anchor="x2", range=[-0.1, rows], visible=False)
    out["xaxis3"] = axis(theme, domain=list(TOKENS), anchor="y3", range=[-0.5, last], tickvals=at, ticktext=words, tickangle=-60, ticks="",
                         **plain)  # fmt: skip
    out["xaxis3"]["tickfont"] = {"color": theme.ink, "size": 11}
    out["yaxis3"] = axis(theme, domain=list(LOWER), anchor="x3", autorange="reversed", ticks="", **plain)
    return {"data": data, "layout": out}


def _bars(story: ToolboxStory, k: Kept, y: int, theme: Theme) -> list[dict[str, Any]]:
    """A row: one bar a token that is kept; hatched, where a token has slid out but other layers may still carry it on."""
    color, most = MIXER_COLORS[k.technique], max(max(c.numbers, default=0) for c in story.kept) or 1
    if k.technique == "kda":  # a state of one size for all tokens is no bar: see _shapes
        return []
    here = [TALL * n / most for n in k.numbers]
    full = max(here, default=0)
    gone = [0.0 if h or not r else full for h, r in zip(here, k.reachable, strict=True)]
    name = LABELS[k.technique]
    said = [
        f"{w}: {n} numbers in each layer" if n else f"{w}: gone from the window, {'carried on by upper layers' if r else 'out of reach'}"
        for w, n, r in zip(story.tokens, k.numbers, k.reachable, strict=False)
    ]
    looks = {"color": color, "line": {"width": 0}}
    hatch = {"shape": "/", "fgcolor": color, "size": 5, "fillmode": "overlay"}
    hatched = {"color": theme.paper, "line": {"width": 1, "color": color}, "pattern": hatch}
    return [
        {"type": "bar", "name": part, "x": list(range(len(h))), "y": np.round(h, 4).tolist(), "base": y, "width": 0.8, "marker": marker,
         "customdata": said, "hovertemplate": "%{customdata}<extra></extra>"}
        for part, h, marker in ((f"{name}, kept", here, looks), (f"{name}, carried on", gone, hatched)) if any(h)
    ]  # fmt: skip


def _answers(story: ToolboxStory, theme: Theme) -> list[dict[str, Any]]:
    """A thin bar a technique: the likeliest word, the next one, all others."""
    rows = len(story.kept)
    first, second = ([k.answer[i][1] for k in story.kept] for i in (0, 1))
    rest = [max(0.0, 1 - a - b) for a, b in zip(first, second, strict=True)]
    y = [rows - 1 - i + 0.2 for i in range(rows)]
    looks = ((ROLES["write"], ""), (ROLES["erase"], "/"), (theme.grid, ""))
    return [
        {"type": "bar", "orientation": "h", "name": name, "xaxis": "x2", "yaxis": "y2", "x": np.round(p, 4).tolist(), "y": y, "width": 0.2,
         "hoverinfo": "skip", "marker": {"color": color, "line": {"width": 0},
                    "pattern": {"shape": hatch, "fgcolor": theme.paper, "size": 4, "fillmode": "overlay"}}}
        for name, p, (color, hatch) in zip(("likeliest", "second", "all others"), (first, second, rest), looks, strict=True)
    ]  # fmt: skip


def _heads(story: ToolboxStory, theme: Theme) -> dict[str, Any]:
    """Rows: the heads of the layer looked into, and the whole model. Columns: tokens; those not read yet stay empty."""
    unread = [np.nan] * (story.text_tokens - story.read)
    heads, (whole,) = (
        [[None if np.isnan(x) else round(float(x), 3) for x in (*row[: story.read], *unread, *row[story.read :])] for row in rows]
        for rows in (story.heads, story.influence[None])
    )
    signed = story.technique == "kda"
    most = max((abs(x) for row in heads for x in row if x is not None), default=1) or 1
    top = max(x for x in whole if x is not None) or 1
    names = [*(f"head {h + 1}" for h in range(len(heads))), "all layers"]
    return {
        "type": "heatmap", "name": "weights", "xaxis": "x3", "yaxis": "y3", "x": list(range(len(story.tokens))), "y": names,
        "z": [[None if x is None else round(x / scale, 3) for x in row] for row, scale in (*((h, most) for h in heads), (whole, top))],
        "customdata": [["not read" if x is None else f"{x:.3f}" for x in row] for row in [*heads, whole]],
        "text": [list(story.tokens)] * len(names), "hovertemplate": "%{y}, %{text}: %{customdata}<extra></extra>",
        "zmin": -1 if signed else 0, "zmax": 1, "colorscale": diverging(theme) if signed else sequential(theme), "showscale": False,
        "xgap": 1, "ygap": 1, "hoverongaps": False,
    }  # fmt: skip


def _shapes(story: ToolboxStory, theme: Theme) -> list[dict[str, Any]]:
    """Lines between notes, the question's ground, KDA's one state, and what the looked-into window can't read."""
    shapes = [
        {"type": "line", "xref": "x", "yref": "paper", "x0": end - 0.5, "x1": end - 0.5, "y0": LOWER[0], "y1": UPPER[1], "layer": "below",
         "line": {"color": theme.line, "width": 1, "dash": "dot"}}
        for _, end in story.notes
    ]  # fmt: skip
    if story.read:  # the area says how many numbers: as many as so many tokens of MHA, whatever was read
        y = len(story.kept) - 1 - TECHNIQUES.index("kda")
        shapes.append({"type": "rect", "xref": "x", "yref": "y", "x0": -0.4, "x1": _state_width() - 0.4, "y0": y, "y1": y + TALL,
                       "fillcolor": MIXER_COLORS["kda"], "line": {"width": 0}})  # fmt: skip
    if story.technique == "sliding_window":
        closed = int(np.isnan(story.heads[0]).sum())
        first, last = ([*range(story.read), *range(story.text_tokens, len(story.tokens))][i] for i in (0, max(0, closed - 1)))
        if closed:
            shapes.append({"type": "rect", "xref": "x3", "yref": "y3", "x0": first - 0.5, "x1": last + 0.5, "y0": -0.5,
                           "y1": len(story.heads) - 0.5, "line": {"color": theme.muted, "width": 1, "dash": "dash"}})  # fmt: skip
    return shapes


def _state_numbers() -> int:
    """Numbers that KDA keeps in one layer: its state and the tail of its short convolution."""
    config = toolbox_config("kda")
    return cache_bytes(config, 1, dtype=torch.float32).fixed // 4 // config.num_hidden_layers


def _state_width() -> float:
    """How many bars of MHA, 0.8 tokens wide, hold as many numbers."""
    return 0.8 * _state_numbers() / row_numbers(toolbox_config("mha"), "mha")


def _growth(k: Kept) -> str:
    if k.per_token:
        return f"+{format_bytes(k.per_token)} a token"
    return "never grows" if k.technique == "kda" else "full, no growth"


def _explained(story: ToolboxStory) -> str:
    """How to read the lower picture, and the technique's sizes."""
    lines = {
        "mha": "Rows: how much each head attends to each token.",
        "gqa": f"Rows: how much each head attends to each token. All {len(story.heads)} heads read the same "
        f"{'copy' if story.groups == 1 else f'{story.groups} copies'}.",
        "mla": "Rows: how much each head attends to each card.",
        "sliding_window": "Rows: how much each head attends to each token. Framed: slid out of the window, no head can read it.",
        "kda": "Rows: how much of each token's value each head reads out of its state. Blue adds, vermilion takes away.",
    }[story.technique]
    if story.technique == "sliding_window" and story.tray():
        lines += f" In the window in full: {' | '.join(n.rstrip(' ,.') for n in story.tray())}."
    config = story.config(story.technique)
    far = config.max_position_embeddings
    kept = format_bytes(cache_bytes(config, far, dtype=torch.float32).total)
    lines += " Last row: what counts for the answer through all layers (share of its gradient). It has a scale of its own."
    lines += f" At {far:,} tokens it would keep {kept} (by the formula)."
    return "<br>".join(textwrap.wrap(lines, 48))


def _token_labels(story: ToolboxStory) -> tuple[list[int], list[str]]:
    """Tick labels: every token, or only values and the question's words where there are too many."""
    everything = list(range(len(story.tokens)))
    if len(everything) > FEW:
        values = {v for words in meeting.SLOTS.values() for v in words}
        everything = [i for i in everything if story.tokens[i] in values]
    words = [_bold(story.tokens[i], i == story.fact) for i in everything]
    return everything, [f"<i>{w}</i>" if i >= story.text_tokens else w for i, w in zip(everything, words, strict=True)]


def _bold(text: str, when: bool) -> str:
    return f"<b>{text}</b>" if when else text
