"""The decay story as a plotly figure: the gate with its 128 dials, the clock, and what stands of each word, 128 dials above one."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch

from k3viz.decay.story import AGE, GATES, DecayStory, decay_story, half_life, log_decay, tokens_text
from k3viz.theme import LIGHT, ROLES, Theme, axis, format_digits, format_number, layout, literal, note, sequential

LEFT, RIGHT = (0.0, 0.4), (0.6, 1.0)  # gate and clock across the figure
TOP, MANY, ONE = (0.67, 0.955), (0.27, 0.51), (0.0, 0.215)  # and how high: gate and clock, the two maps
ALPHAS = (0.01, 0.1, 0.5, 0.9, 0.99, 0.999)  # marks on the gate's right axis
ROWS = 64  # of a map
OLDEST = 4096  # tokens on the clock
AGES = np.unique(np.round(np.geomspace(1, OLDEST, 90)).astype(int))
FOLLOWED = 96  # chosen: a dial among the faster ones


def decay_figure(
    *, story: DecayStory | None = None, now: int = -1, age: int = AGE, follow: int = FOLLOWED, theme: Theme = LIGHT
) -> go.Figure:
    """Draw a decay story (default: ``decay_story()``).

    now: the word read last, counted from the end if negative. age: tokens that the clock is asked for, 1 to 4096. follow: the dial
    to follow, 1 (slowest) to K. theme: ``k3viz.theme.LIGHT`` or ``DARK``. Raises ValueError that names the argument.
    """
    return go.Figure(decay_picture(decay_story() if story is None else story, now, age, follow, theme))


def decay_picture(story: DecayStory, now: int, age: int, follow: int, theme: Theme, *, title: bool = True) -> dict[str, Any]:
    """{"data", "layout"}: the plain dict that both the figure and the live panel draw."""
    T, K = story.g.shape
    for name, value, low, high in (("now", now, -T, T - 1), ("age", age, 1, OLDEST), ("follow", follow, 1, K)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
            raise ValueError(f"{name} must be a whole number from {low} to {high}, got {value!r}")
    now, row = now % T, follow - 1
    out = layout(theme, height=760, margin={"l": 74, "r": 62, "t": 96 if title else 14, "b": 92}, barmode="overlay")
    if title:
        text = literal(story.sentence(now, age)).replace(". A note", ".<br>A note").replace("; one", ";<br>one")
        out["title"] = {"text": text, "x": 0.01, "xanchor": "left", "y": 0.98, "yanchor": "top", "font": {"size": 13}}
    data = [*_gate(story, now, row, theme, out), *_clock(story, age, theme, out)]
    largest = float(np.abs(story.beta[:, None] * story.k).max()) or 1.0
    for ink, n, y in ((story.ink, "4", MANY), (story.one_ink, "5", ONE)):
        data.append(_map(story, ink[now] / largest, n, y, theme, out))
    out["annotations"] = _words(story, now, follow, theme)
    return {"data": data, "layout": out}


# ---- the gate ----


def _gate(story: DecayStory, now: int, row: int, theme: Theme, out: dict[str, Any]) -> list[dict[str, Any]]:
    """Half-life over z for both gates, and where this word's dials stand on the chosen one."""
    z, lives = story.z[now], story.half_lives(now)
    low, high = min(-9.0, float(z.min()) - 1), max(9.0, float(z.max()) + 1)
    grid = torch.linspace(low, high, 73, dtype=torch.float64)
    curves = {gate: half_life(log_decay(grid[None], story.A_log, gate, story.bound)[0].numpy()) for gate in GATES}
    ends = [np.log10(np.minimum(np.concatenate([*curves.values(), lives]), 1e30))]
    bottom, top = float(np.min(ends)) - 0.15, float(np.max(ends)) + 0.3
    data = []
    for gate, curve in curves.items():
        data.append({
            "type": "scatter", "mode": "lines", "x": np.round(grid.numpy(), 3).tolist(), "y": _digits(curve), "name": GATES[gate],
            "line": {"color": ROLES["decay"] if gate == story.gate else theme.muted, "width": 3 if gate == story.gate else 2,
                     "dash": "solid" if gate == "bounded" else "dash"},
            "hovertemplate": GATES[gate] + "<br>z %{x:.2f}: half-life %{y:.3g} tokens<extra></extra>",
        })  # fmt: skip
    data.append({
        "type": "scatter", "mode": "markers", "x": np.round(z, 3).tolist(), "y": _digits(lives), "name": "dials",
        "customdata": [_dial_text(story, now, i) for i in range(len(z))], "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"color": ROLES["decay"], "size": 7},
    })  # fmt: skip
    data.append({
        "type": "scatter", "mode": "markers", "x": [round(float(z[row]), 3)], "y": _digits(lives[[row]]), "name": "followed dial",
        "marker": {"color": ROLES["highlight"], "size": 14, "symbol": "diamond", "line": {"color": theme.ink, "width": 1.5}},
        "hoverinfo": "skip",
    })  # fmt: skip
    data.append({"type": "scatter", "xaxis": "x", "yaxis": "y3", "x": [None], "y": [None], "hoverinfo": "skip"})  # wakes the α axis
    decades = range(math.ceil(bottom), math.floor(top) + 1, max(1, math.ceil((top - bottom) / 7)))
    out["xaxis"] = axis(theme, domain=LEFT, anchor="y", range=[low, high], title=_small("dial z (projection + bias)", theme))
    out["yaxis"] = axis(theme, domain=TOP, anchor="x", type="log", range=[bottom, top], title=_small("half-life, tokens", theme),
                        tickvals=[10.0**d for d in decades],
                        ticktext=[format_digits(10.0**d, digits=1) if d <= 3 else f"10<sup>{d}</sup>" for d in decades])  # fmt: skip
    marks = [(a, float(half_life(math.log(a)))) for a in ALPHAS]
    marks = _apart([(a, h) for a, h in marks if bottom <= math.log10(h) <= top], 0.09 * (top - bottom))
    out["yaxis3"] = axis(theme, overlaying="y", side="right", anchor="x", type="log", range=[bottom, top], showgrid=False,
                         tickvals=[h for _, h in marks], ticktext=[f"α {a:g}" for a, _ in marks])  # fmt: skip
    return data


def _apart(marks: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """The marks (name, value), rising, that stand at least ``gap`` decades from the one kept before them."""
    kept: list[tuple[float, float]] = []
    for mark in marks:
        if not kept or math.log10(mark[1] / kept[-1][1]) >= gap:
            kept.append(mark)
    return kept


def _dial_text(story: DecayStory, now: int, row: int) -> str:
    z, g = float(story.z[now, row]), float(story.g[now, row])
    alpha = format_number(math.exp(g)) if g < -0.01 else "> 0.99"
    return (
        f"dial {row + 1} (channel {int(story.channels[row]) + 1}): z {_minus(format_number(z))} → g {_minus(format_digits(g))} → "
        f"α {alpha} → half-life {tokens_text(half_life(g))} tokens"
    )


def _minus(number: str) -> str:
    return number.replace("-", "−")


# ---- the clock ----


def _clock(story: DecayStory, age: int, theme: Theme, out: dict[str, Any]) -> list[dict[str, Any]]:
    """For every age, the ages that look the same: a thin band tells the time, one that opens to the top does not."""
    data, top = [], 3.0 * OLDEST
    for one, name, color in ((True, "one dial", ROLES["additive"]), (False, f"{story.g.shape[1]} dials", ROLES["decay"])):
        young, old = story.clock(AGES, one=one)
        old = np.minimum(old, top)
        said = [f"{name}: {a:,} tokens could be {y:,.0f} to {'any age' if o >= top else f'{o:,.0f}'}"
                for a, y, o in zip(AGES.tolist(), young, old, strict=True)]  # fmt: skip
        pattern = {"fillpattern": {"shape": "/", "fgcolor": color, "bgcolor": theme.paper, "size": 6, "solidity": 0.3}} if one else {}
        line = {"color": color, "width": 1.5, "dash": "dash" if one else "solid"}
        shared = {"type": "scatter", "mode": "lines", "xaxis": "x2", "yaxis": "y2", "x": AGES.tolist(), "line": line}
        data.append({**shared, "y": young.tolist(), "name": f"{name}, youngest", "hoverinfo": "skip"})
        data.append({**shared, "y": old.tolist(), "name": f"{name}, oldest", "fill": "tonexty", "fillcolor": color, **pattern,
                     "customdata": said, "hovertemplate": "%{customdata}<extra></extra>"})  # fmt: skip
    data.append({"type": "scatter", "mode": "lines", "xaxis": "x2", "yaxis": "y2", "x": [age, age], "y": [1, top], "name": "asked",
                 "line": {"color": theme.ink, "width": 1.5, "dash": "dot"}, "hoverinfo": "skip"})  # fmt: skip
    ticks = {"type": "log", "tickvals": [1, 10, 100, 1000], "ticktext": ["1", "10", "100", "1,000"]}
    out["xaxis2"] = axis(theme, domain=RIGHT, anchor="y2", range=[0, math.log10(OLDEST)], title=_small("true age, tokens", theme), **ticks)
    out["yaxis2"] = axis(theme, domain=TOP, anchor="x2", range=[0, math.log10(OLDEST)], title=_small("age it could be", theme), **ticks)
    return data


# ---- the words ----


def _map(story: DecayStory, ink: np.ndarray, n: str, y: tuple[float, float], theme: Theme, out: dict[str, Any]) -> dict[str, Any]:
    """Channels by words, in whole percent of the strongest single write."""
    T, K = story.g.shape
    pool = -(-K // ROWS)  # neighboring channels share a row, which shows the larger: a row of one pixel can't be seen
    groups = [np.abs(ink[i : i + pool]).max(0) for i in range(0, K, pool)]
    percent = np.round(100 * np.clip(np.stack(groups), 0, 1)).astype(np.uint8)
    labels = [f"<b>{w}</b>" if fact else w for w, fact in zip(story.tokens, story.facts, strict=True)]
    shown = n == "5"
    out[f"xaxis{n}"] = axis(theme, domain=(0.0, 1.0), anchor=f"y{n}", range=[-0.5, T - 0.5], showgrid=False, zeroline=False,
                            showticklabels=shown, ticks="", tickvals=list(range(T)), ticktext=labels, tickangle=-60)  # fmt: skip
    out[f"xaxis{n}"]["tickfont"]["size"] = 12 if T <= 40 else 11
    out[f"yaxis{n}"] = axis(theme, domain=y, anchor=f"x{n}", range=[K + 0.5, 0.5], showgrid=False, zeroline=False, ticks="",
                            tickvals=[1, K], ticktext=["slowest", "fastest"])  # fmt: skip
    return {
        "type": "heatmap", "xaxis": f"x{n}", "yaxis": f"y{n}", "zmin": 0, "zmax": 100, "colorscale": sequential(theme),
        "z": {"dtype": "u1", "bdata": base64.b64encode(np.ascontiguousarray(percent).tobytes()).decode(), "shape": f"{len(groups)}, {T}"},
        "y0": 1 + (pool - 1) / 2, "dy": pool,
        "showscale": shown, "hovertemplate": "dial %{y:.0f}: %{z} %<extra></extra>", "name": "one dial" if shown else "128 dials",
        "colorbar": {"thickness": 10, "len": ONE[1] - ONE[0], "y": 0.0, "yanchor": "bottom", "outlinewidth": 0, "x": 1.005,
                     "tickvals": [0, 50, 100], "ticktext": ["0 %", "50 %", "100 %"], "tickfont": {"color": theme.ink}},
    }  # fmt: skip


def _words(story: DecayStory, now: int, follow: int, theme: Theme) -> list[dict[str, Any]]:
    """Headings, the two legends, and the followed dial in words."""
    K = story.g.shape[1]
    lines = {gate: (ROLES["decay"] if gate == story.gate else theme.muted, "━" if gate == "bounded" else "╍") for gate in GATES}
    names = {"bounded": f"bounded: g > {story.bound:g}", "softplus": "softplus: no floor"}
    legend = [f"<span style='color:{ROLES['decay']}'>●</span> the {K} dials at “{story.tokens[now]}”"]
    legend += [f"<span style='color:{color}'>{sign}</span> {names[gate]}" for gate, (color, sign) in lines.items()]
    chain = f"<span style='color:{ROLES['highlight']}'>◆</span> {_dial_text(story, now, follow - 1)}"
    bands = f"<span style='color:{ROLES['decay']}'>■</span> {K} dials   <span style='color:{ROLES['additive']}'>▨</span> one dial"
    one = tokens_text(story.one_half_life)
    marker = {"text": f"◄ {follow}", "x": 1.0, "y": follow, "xref": "paper", "yref": "y4", "xanchor": "left", "showarrow": False,
              "font": {"size": 11, "color": theme.ink}}  # fmt: skip
    return [
        note(theme, "<b>From a dial to what its channel keeps</b>", LEFT[0], TOP[1] + 0.01),
        note(theme, _minus("<br>".join(legend)), LEFT[1] - 0.005, TOP[1] - 0.004, size=12, xanchor="right", yanchor="top"),
        note(theme, chain, LEFT[0], MANY[1] + 0.05, size=12),
        note(theme, "<b>Telling an age from the fade</b>", RIGHT[0], TOP[1] + 0.01),
        note(theme, bands, RIGHT[1] - 0.005, TOP[0] + 0.006, size=12, xanchor="right", bgcolor=theme.paper),
        note(theme, f"<b>What is left of each word in each of {K} channels, a dial each</b> (facts in bold)", LEFT[0], MANY[1] + 0.004),
        note(theme, f"<b>The same with one dial for all</b>, half-life {one} tokens", LEFT[0], ONE[1] + 0.004),
        marker,
    ]


def _small(text: str, theme: Theme) -> dict[str, Any]:
    return {"text": text, "font": {"size": 12, "color": theme.muted}, "standoff": 4}


def _digits(x: np.ndarray) -> list[float]:
    """Four significant digits: enough for a logarithmic axis, and a small file."""
    return [float(f"{min(v, 1e30):.4g}") for v in np.asarray(x)]
