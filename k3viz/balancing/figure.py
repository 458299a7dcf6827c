"""The balancing example as a plotly figure: a lane of bars per expert with its cut-off, the loads, and what moved."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import plotly.graph_objects as go

from k3viz.balancing.race import BalancingRace
from k3viz.balancing.race_figure import race_picture
from k3viz.balancing.story import BalancingStory, balancing_story, format_amount
from k3viz.theme import LIGHT, ROLES, Theme, axis, layout, note, wrapped

LANES, SIDE = (0.0, 0.66), (0.74, 1.0)
LOADS, MOVES = (0.56, 0.92), 0.4
SHOWS = {"scores": "scores", "margins": "margins over the token's next best"}
HEADINGS = {"scores": "Scores", "margins": "Margins over the next best"}
CUT_BY = {"figure": "; dashed: cut-offs as in Figure 5", "rule": "; dashed: cut-offs by the rule", "none": "",
          "hand": "; dashed: your cut-offs"}  # fmt: skip
ROOM = 0.27  # of a lane, for the number at its right


def balancing_figure(*, story: BalancingStory | BalancingRace | None = None, show: str = "scores", theme: Theme = LIGHT) -> go.Figure:
    """Draw a balancing story (default: ``balancing_story()``) or a ``balancing_race()``. show: what the example's bars are, "scores" or
    "margins"."""
    if isinstance(story, BalancingRace):
        return go.Figure(race_picture(story, theme))
    return go.Figure(balancing_picture(balancing_story() if story is None else story, show, theme))


def balancing_picture(story: BalancingStory, show: str, theme: Theme, *, title: bool = True) -> dict[str, Any]:
    """{"data", "layout"}: the plain dict that both the figure and the live panel draw."""
    if show not in tuple(SHOWS):
        raise ValueError(f"show must be one of {', '.join(SHOWS)}, got {show!r}")
    m, n = story.scores.shape
    lanes = _Lanes(story, show)
    notes = [
        note(theme, f"<b>{HEADINGS[show]}</b>{CUT_BY[story.how]}", 0.0, 1.0, yshift=22),
        note(theme, f"<b>Loads</b>, {format_amount(story.share)} each is even", SIDE[0] - 0.04, 1.0, yshift=22),
        note(theme, _legend(), SIDE[0] - 0.04, LOADS[1], yshift=12, size=12),
        note(theme, _moves(story), SIDE[0] - 0.04, MOVES, yanchor="top", size=12),
    ]
    for j in range(n):
        notes.append({**note(theme, f"<b>E{j + 1}</b>", lanes.at(j, lanes.zero), 1.0, yshift=2), "xref": "x", "xanchor": "center"})
    top = 110 if title else 48
    out = layout(theme, height=54 * m + top + 50, margin={"l": 44, "r": 20, "t": top, "b": 26}, annotations=notes, barmode="group",
                 shapes=lanes.lines(theme), bargap=0.3)  # fmt: skip
    if title:
        text = wrapped(story.sentence, 130)
        out["title"] = {"text": text, "x": 0.01, "xanchor": "left", "y": 0.97, "yanchor": "top", "font": {"size": 13}}
    bare = {"showgrid": False, "zeroline": False, "ticks": ""}
    out |= {
        "xaxis": axis(theme, domain=LANES, anchor="y", range=[0, n], showticklabels=False, **bare),
        "yaxis": axis(theme, anchor="x", range=[m - 0.5, -0.5], tickvals=list(range(m)), ticktext=[f"t{t + 1}" for t in range(m)], **bare),
        "xaxis2": axis(theme, domain=SIDE, anchor="y2", tickvals=list(range(n)), ticktext=[f"E{j + 1}" for j in range(n)], **bare),
        "yaxis2": axis(theme, domain=LOADS, anchor="x2", range=[0, 1.18 * max(*story.loads_before, *story.loads_after)],
                       nticks=5, tickformat="d"),
    }  # fmt: skip
    return {"data": [*lanes.bars(theme), *_loads(story, theme)], "layout": out}


class _Lanes:
    """Bars of every token and expert side by side on one axis, on which a lane is 1 wide."""

    def __init__(self, story: BalancingStory, show: str) -> None:
        self.story = story
        self.values = story.margins if show == "margins" else story.scores
        spread = float(story.scores.max() - story.scores.min()) or 1.0
        self.low = -0.5 * spread if show == "margins" else min(0.0, float(story.cutoffs.min()) - 0.03 * spread)
        self.low = max(self.low, -0.6 * spread)
        self.high = max(float(self.values.max()), 0.1 * spread)
        self.zero = 0.0

    def at(self, lane: int, value: float) -> float:
        """Where a value stands; what lies further left than the lane is drawn at its edge."""
        part = (max(value, self.low) - self.low) / (self.high - self.low)
        return lane + 0.06 + (0.9 - ROOM) * min(part, 1.0 + ROOM / 2)

    def bars(self, theme: Theme) -> list[dict[str, Any]]:
        """One trace a kind of bar: chosen now, chosen before but no longer, and all others."""
        story, kinds = self.story, {"chosen": [], "left": [], "other": []}
        for t, j in np.ndindex(*self.values.shape):
            kind = "chosen" if j in story.after[t] else "left" if j in story.before[t] else "other"
            kinds[kind].append((t, j))
        looks = {"chosen": (ROLES["memory"], ""), "left": (ROLES["erase"], "/"), "other": (theme.grid, "")}
        marks = {"chosen": "● ", "left": "○ ", "other": ""}
        names = {"chosen": "goes here", "left": "went here without cut-offs", "other": "not chosen"}
        out = []
        for kind, cells in kinds.items():
            color, hatch = looks[kind]
            base = [self.at(j, self.zero) for _, j in cells]
            ends = [self.at(j, float(self.values[t, j])) for t, j in cells]
            said = [f"{marks[kind]}{format_amount(self.values[t, j])}" for t, j in cells]
            pairs = [(format_amount(story.scores[t, j]), format_amount(story.margins[t, j])) for t, j in cells]
            hover = [f"t{t + 1}, E{j + 1}: score {score}, margin {margin}, {names[kind]}"
                     for (t, j), (score, margin) in zip(cells, pairs, strict=True)]  # fmt: skip
            out += [
                {"type": "bar", "orientation": "h", "name": kind, "base": base, "x": [e - b for e, b in zip(ends, base, strict=True)],
                 "y": [t for t, _ in cells], "width": 0.5, "offset": -0.25, "customdata": hover,
                 "hovertemplate": "%{customdata}<extra></extra>",
                 "marker": {"color": color, "line": {"color": theme.line, "width": 1},
                            "pattern": {"shape": hatch, "fillmode": "overlay", "fgcolor": theme.paper, "size": 5}}},
                {"type": "scatter", "mode": "text", "name": f"{kind}, numbers", "hoverinfo": "skip", "y": [t for t, _ in cells],
                 "x": [j + 0.94 for _, j in cells], "textposition": "middle left", "cliponaxis": False,
                 "text": [f"<b>{w}</b>" if kind == "chosen" else w for w in said], "textfont": {"size": 12, "color": theme.ink}},
            ]  # fmt: skip
        return out

    def lines(self, theme: Theme) -> list[dict[str, Any]]:
        """Lane edges, the zero of every lane, and the cut-offs."""
        m, n = self.values.shape
        line = {"type": "line", "y0": -0.5, "y1": m - 0.5}
        out = [{**line, "x0": j, "x1": j, "line": {"color": theme.grid, "width": 1}} for j in range(1, n)]
        out += [{**line, "x0": self.at(j, 0), "x1": self.at(j, 0), "line": {"color": theme.line, "width": 1}} for j in range(n)]
        if self.story.how != "none":
            cut = {"color": ROLES["erase"], "width": 2.5, "dash": "dash"}
            out += [{**line, "x0": self.at(j, c), "x1": self.at(j, c), "line": cut} for j, c in enumerate(self.story.cutoffs.tolist())]
        return out


def _loads(story: BalancingStory, theme: Theme) -> list[dict[str, Any]]:
    n, out = story.scores.shape[1], []
    for name, loads, color, hatch in (("no cut-offs", story.loads_before, ROLES["erase"], "/"),
                                      ("with cut-offs", story.loads_after, ROLES["memory"], "")):  # fmt: skip
        out.append({
            "type": "bar", "xaxis": "x2", "yaxis": "y2", "name": name, "x": list(range(n)), "y": list(loads), "text": list(map(str, loads)),
            "textposition": "outside", "cliponaxis": False, "textfont": {"size": 12, "color": theme.ink},
            "hovertemplate": f"E%{{x}}: %{{y}} tokens, {name}<extra></extra>", "customdata": list(range(1, n + 1)),
            "marker": {"color": color, "line": {"color": theme.line, "width": 1},
                       "pattern": {"shape": hatch, "fillmode": "overlay", "fgcolor": theme.paper, "size": 5}},
        })  # fmt: skip
        out[-1]["hovertemplate"] = f"E%{{customdata}}: %{{y}} tokens, {name}<extra></extra>"
    even = {"type": "scatter", "mode": "lines", "xaxis": "x2", "yaxis": "y2", "name": "even share", "x": [-0.5, n - 0.5],
            "y": [story.share] * 2, "line": {"color": theme.ink, "width": 1.5, "dash": "dot"}, "hoverinfo": "skip"}  # fmt: skip
    return [*out, even]


def _legend() -> str:
    return (f"<span style='color:{ROLES['erase']}'>▨</span> ○ before   <span style='color:{ROLES['memory']}'>■</span> ● now   "
            "┄ even")  # fmt: skip


def _moves(story: BalancingStory) -> str:
    """What moved, and what the moved tokens weigh their expert with."""
    if not story.moved:
        return "No token moves."
    lines = []
    for t in story.moved[:6]:
        left, came = (sorted(set(a) - set(b)) for a, b in ((story.before[t], story.after[t]), (story.after[t], story.before[t])))
        lines.append(f"t{t + 1}: {_experts(left)} → {_experts(came)}")
    more = [f"and {len(story.moved) - 6} more"] if len(story.moved) > 6 else []
    weight = textwrap.wrap(story.weight_text(story.moved[0]), 36)
    return "<br>".join(["<b>What moves</b>", *lines, *more, "", "<b>What does not change</b>", *weight])


def _experts(some: list[int]) -> str:
    return ", ".join(f"E{j + 1}" for j in some)
