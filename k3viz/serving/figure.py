"""An agent's session as a plotly figure: tokens resumed and read at each turn, the bill, and the time to the first token."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from k3viz.serving.story import BLOCK, COPY, SCALE, SPEED, ServingStory, dollars, serving_story
from k3viz.theme import LIGHT, ROLES, Theme, axis, format_bytes, format_count, format_number, format_probability, layout, note, wrapped
from minimodel.facts import Serving

UPPER, LOWER = (0.57, 0.92), (0.08, 0.39)
LEFT, RIGHT = (0.0, 0.33), (0.56, 0.8)  # each with room for the names at the ends of its lines
PARTS = {"resumed": ("memory", ""), "read": ("key", "/"), "written": ("write", ".")}  # role and hatch
GAP = 0.14  # least distance of two names, as a share of the axis


def serving_figure(*, story: ServingStory | None = None, turn: int = -1, theme: Theme = LIGHT) -> go.Figure:
    """Draw a serving story (default: ``serving_story()``) up to a turn, 0-based or counted from the end if negative."""
    story = serving_story() if story is None else story
    n = len(story.turns)
    if isinstance(turn, bool) or not isinstance(turn, int) or not -n <= turn < n:
        raise ValueError(f"turn must be a whole number from {-n} to {n - 1}, got {turn!r}")
    return go.Figure(serving_picture(story, turn % n, theme))


def serving_picture(story: ServingStory, turn: int, theme: Theme, *, title: bool = True) -> dict[str, Any]:
    """{"data", "layout"} up to a turn: the plain dict that both the figure and the live panel draw."""
    n, above = len(story.turns), 0.008
    bill = {"no cache": [story.bill(i, cached=False) for i in range(n)], "this session": [story.bill(i) for i in range(n)]}
    wait = {"no cache": [t.uncached_seconds for t in story.turns], "this session": [t.seconds for t in story.turns]}
    if story.broken != "nothing":
        costs = [t.cost for t in story.unbroken]
        bill["unbroken prefix"] = [sum(costs[: i + 1]) for i in range(n)]
        wait["unbroken prefix"] = [t.seconds for t in story.unbroken]
    prices = [Serving.cached_price, Serving.input_price, Serving.output_price]
    key = "   ".join(
        f"<span style='color:{ROLES[role]}'>■</span> {part}, {dollars(price.value)}"
        for (part, (role, _)), price in zip(PARTS.items(), prices, strict=True)
    )
    lines, names = _lines(bill, turn, "2", LEFT, dollars, theme)
    waits, more = _lines(wait, turn, "3", RIGHT, lambda x: f"{format_number(x)} s", theme)
    notes = [
        note(theme, "<b>Tokens</b>, share resumed", 0, UPPER[1] + above),
        note(theme, f"{key} a million (published)   ◆ snapshot kept", 1, UPPER[1] + above, size=12, xanchor="right"),
        note(theme, "<b>The bill so far</b>", LEFT[0], LOWER[1] + above),
        note(theme, "<b>Time to the first token</b>", RIGHT[0], LOWER[1] + above),
        note(theme, _small_print(story), 0, -0.125, size=11),
        *names, *more, *_shares(story, turn, theme),
    ]  # fmt: skip
    out = layout(theme, height=650, margin={"l": 64, "r": 16, "t": 110 if title else 30, "b": 70}, annotations=notes, barmode="stack",
                 bargap=0.35)  # fmt: skip
    if title:
        said = wrapped(story.sentence_at(turn), 125)
        out["title"] = {"text": said, "x": 0.01, "xanchor": "left", "y": 0.975, "yanchor": "top", "font": {"size": 13}}
    data = [*_bars(story, turn, theme), _snapshots(story, turn, theme), *lines, *waits]
    return {"data": data, "layout": out | _axes(story, bill, wait, theme)}


def _small_print(story: ServingStory) -> str:
    return (
        f"Hits: a tiny K3 with a real prefix cache, 1 of its tokens for {SCALE}, blocks of {BLOCK}. Times: a model of a chosen machine, "
        f"at {story.size}'s size:<br>FLOPs of the tokens read / ({format_count(SPEED)} FLOP/s) + bytes resumed / ({format_bytes(COPY)}/s). "
        f"Published for coding: more than {format_probability(Serving.coding_hit_rate.value)} of input resumed."
    )


# ---- tokens ----


def _bars(story: ServingStory, turn: int, theme: Theme) -> list[dict[str, Any]]:
    shown = story.turns[: turn + 1]
    amounts = {"resumed": [t.hit for t in shown], "read": [t.read for t in shown], "written": [t.output for t in shown]}
    return [
        {"type": "bar", "x": list(range(1, len(shown) + 1)), "y": amounts[part], "name": part,
         "customdata": [f"{format_count(y)} tokens {part}" for y in amounts[part]],
         "hovertemplate": "turn %{x}: %{customdata}<extra></extra>",
         "marker": {"color": ROLES[role], "line": {"color": theme.paper, "width": 1},
                    "pattern": {"shape": shape, "fgcolor": theme.paper, "fgopacity": 0.5, "fillmode": "overlay", "size": 6}}}
        for part, (role, shape) in PARTS.items()
    ]  # fmt: skip


def _snapshots(story: ServingStory, turn: int, theme: Theme) -> dict[str, Any]:
    at = [(i, end) for i, t in enumerate(story.turns[: turn + 1], 1) for end in t.checkpoints]
    return {
        "type": "scatter", "mode": "markers", "x": [i + 0.36 for i, _ in at], "y": [end for _, end in at], "name": "snapshots",
        "customdata": [f"turn {i}: snapshot at {format_count(end)} tokens, block {end // BLOCK}" for i, end in at],
        "hovertemplate": "%{customdata}<extra></extra>", "marker": {"symbol": "diamond", "size": 7, "color": theme.ink},
    }  # fmt: skip


def _shares(story: ServingStory, turn: int, theme: Theme) -> list[dict[str, Any]]:
    """How much of each prompt was resumed, above its bar."""
    return [
        {"text": format_probability(t.hit / t.prompt), "x": i, "y": t.prompt + t.output, "xref": "x", "yref": "y", "yanchor": "bottom",
         "showarrow": False, "font": {"size": 12, "color": theme.ink}}
        for i, t in enumerate(story.turns[: turn + 1], 1)
    ]  # fmt: skip


# ---- lines ----

STYLES = {"this session": ("memory", "solid"), "no cache": ("erase", "dash"), "unbroken prefix": ("additive", "dot")}


def _lines(curves: dict[str, list[float]], turn: int, n: str, domain: tuple, say: Any, theme: Theme) -> tuple[list[dict], list[dict]]:
    """(traces, names): each line up to the turn, and its name with the last value at the right of the axes."""
    top = max(max(y) for y in curves.values())
    data, ends = [], []
    for name, y in curves.items():
        role, dash = STYLES[name]
        shown = [round(v, 4) for v in y[: turn + 1]]
        data.append({
            "type": "scatter", "mode": "lines+markers", "xaxis": f"x{n}", "yaxis": f"y{n}", "x": list(range(1, turn + 2)), "y": shown,
            "name": name, "line": {"color": ROLES[role], "dash": dash, "width": 3 if name == "this session" else 2},
            "marker": {"size": 6}, "customdata": [f"{name}, turn {i}: {say(v)}" for i, v in enumerate(y[: turn + 1], 1)],
            "hovertemplate": "%{customdata}<extra></extra>",
        })  # fmt: skip
        ends.append((shown[-1], name, role, y[turn]))
    at, names = -GAP, []
    for end, name, role, value in sorted(ends):
        at = max(at + GAP, end / (1.08 * top))
        names.append({
            "text": f"<span style='color:{ROLES[role]}'>━</span> {name} {say(value)}", "x": domain[1] + 0.008, "xref": "paper",
            "y": LOWER[0] + at * (LOWER[1] - LOWER[0]), "yref": "paper", "xanchor": "left", "yanchor": "middle", "showarrow": False,
            "font": {"size": 12, "color": theme.ink},
        })  # fmt: skip
    return data, names


def _axes(story: ServingStory, bill: dict[str, list[float]], wait: dict[str, list[float]], theme: Theme) -> dict[str, Any]:
    n = len(story.turns)
    quiet = {"size": 12, "color": theme.muted}
    turns = {"range": [0.4, n + 0.6], "dtick": 1, "showgrid": False, "zeroline": False,
             "title": {"text": "turn", "font": quiet, "standoff": 2}}  # fmt: skip
    top = 1.12 * max(t.prompt + t.output for t in (*story.turns, *story.unbroken))
    reach = {name: [0, 1.08 * max(max(y) for y in curves.values())] for name, curves in (("bill", bill), ("wait", wait))}
    return {
        "xaxis": axis(theme, anchor="y", **turns),
        "yaxis": axis(theme, domain=UPPER, range=[0, top], tickformat="~s", nticks=5),
        "xaxis2": axis(theme, domain=LEFT, anchor="y2", **turns),
        "yaxis2": axis(theme, domain=LOWER, anchor="x2", range=reach["bill"], tickprefix="$", tickformat=".2f", nticks=5),
        "xaxis3": axis(theme, domain=RIGHT, anchor="y3", **turns),
        "yaxis3": axis(theme, domain=LOWER, anchor="x3", range=reach["wait"], ticksuffix=" s", nticks=5),
    }
