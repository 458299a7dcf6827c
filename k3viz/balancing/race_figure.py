"""Three balancing rules as a plotly figure: how uneven the load stays, step by step, the loads now, and what happens to the scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from k3viz.balancing.race import EXPERTS, RULES, STEPS, BalancingRace
from k3viz.theme import ROLES, Theme, axis, format_number, layout, note, wrapped

LEFT, RIGHT = (0.0, 0.5), (0.75, 1.0)
UPPER, LOWER = (0.5, 0.92), (0.0, 0.26)
COLORS = {"quantile": ROLES["memory"], "sign": ROLES["key"], "loss": ROLES["decay"]}
DASHES = {"quantile": "solid", "sign": "dash", "loss": "dot"}
HATCHES = {"quantile": "", "sign": "/", "loss": "."}
GAP = 0.075  # least distance of two names, as a share of the height


def race_picture(story: BalancingRace, theme: Theme, *, title: bool = True) -> dict[str, Any]:
    """{"data", "layout"} of the race at one step."""
    top = 1.1 * max(run.violation.max() for run in story.runs.values())
    order = np.argsort(-story.runs["quantile"].loads[0], kind="stable")  # favorites first
    data: list[dict[str, Any]] = []
    for rule, run in story.runs.items():
        line = {"color": COLORS[rule], "width": 3 if rule == "quantile" else 2, "dash": DASHES[rule]}
        said = f"{RULES[rule]}, step %{{x}}: %{{y:.2f}}<extra></extra>", f"{RULES[rule]}: %{{y}} tokens<extra></extra>"
        data += [
            {"type": "scatter", "mode": "lines", "name": rule, "x": list(range(STEPS)), "y": np.round(run.violation, 4).tolist(),
             "line": line, "hovertemplate": said[0]},
            {"type": "scatter", "mode": "lines", "name": f"{rule}, loads", "xaxis": "x2", "yaxis": "y2", "x": list(range(EXPERTS)),
             "y": run.loads[story.step][order].tolist(), "line": {**line, "shape": "hvh"}, "hovertemplate": said[1]},
        ]  # fmt: skip
    moved = [run.moved[story.step] for run in story.runs.values()]
    # bgcolor is unused, but without it plotly takes the list of colors for one and warns
    hatches = {"shape": list(HATCHES.values()), "fillmode": "overlay", "fgcolor": theme.paper, "bgcolor": theme.paper, "size": 5}
    data.append({
        "type": "bar", "orientation": "h", "xaxis": "x3", "yaxis": "y3", "name": "moved", "y": list(range(len(RULES))),
        "x": np.round(moved, 4).tolist(), "textposition": "outside", "cliponaxis": False, "hoverinfo": "skip", "width": 0.6,
        "text": [f"{name} {format_number(x)}" for name, x in zip(RULES.values(), moved, strict=True)],
        "textfont": {"size": 12, "color": theme.ink}, "marker": {"color": list(COLORS.values()), "pattern": hatches},
    })  # fmt: skip
    notes = [
        note(theme, "<b>Fullest expert over the even share</b>, step by step (0: even)", LEFT[0], 1.0, yshift=6),
        note(theme, f"<b>Tokens an expert</b>, step {story.step}", RIGHT[0] - 0.03, UPPER[1], yshift=30),
        note(theme, "favorites of the router on the left", RIGHT[0] - 0.03, UPPER[1], yshift=10, size=12),
        note(theme, "<b>Scores moved</b>, mean", RIGHT[0] - 0.03, LOWER[1], yshift=8),
        note(theme, f"{EXPERTS} experts, {story.top_k} a token; seeded router, not trained", LEFT[0], 0.0, yshift=-52, size=12),
        *_names(story, top, theme),
    ]
    now = {"type": "line", "xref": "x", "yref": "y", "x0": story.step, "x1": story.step, "y0": 0, "y1": top,
           "line": {"color": theme.line, "width": 1.5, "dash": "dot"}}  # fmt: skip
    even = {"type": "line", "xref": "x2", "yref": "y2", "x0": -0.5, "x1": EXPERTS - 0.5, "y0": story.even, "y1": story.even,
            "line": {"color": theme.ink, "width": 1, "dash": "dot"}}  # fmt: skip
    out = layout(theme, height=546 if title else 480, margin={"l": 50, "r": 30, "t": 96 if title else 30, "b": 66}, annotations=notes,
                 shapes=[now, even])  # fmt: skip
    if title:
        text = wrapped(story.sentence, 130)
        out["title"] = {"text": text, "x": 0.01, "xanchor": "left", "y": 0.97, "yanchor": "top", "font": {"size": 13}}
    quiet = {"size": 12, "color": theme.muted}
    most = int(max(run.loads[story.step].max() for run in story.runs.values()))
    out |= {
        "xaxis": axis(theme, domain=LEFT, anchor="y", range=[0, STEPS - 1],
                      title={"text": "optimizer steps", "font": quiet, "standoff": 4}),
        "yaxis": axis(theme, domain=(0, 1), anchor="x", range=[0, top]),
        "xaxis2": axis(theme, domain=RIGHT, anchor="y2", range=[-0.5, EXPERTS - 0.5], showticklabels=False, showgrid=False, zeroline=False),
        "yaxis2": axis(theme, domain=UPPER, anchor="x2", range=[0, 1.1 * most], tickvals=[0, story.even, most],
                       ticktext=["0", f"even: {format_number(story.even).removesuffix('.00')}", str(most)]),
        "xaxis3": axis(theme, domain=RIGHT, anchor="y3", range=[0, 2.4 * max(0.2, *moved)], nticks=4, zeroline=False),
        "yaxis3": axis(theme, domain=LOWER, anchor="x3", range=[2.5, -0.5], showticklabels=False, ticks="", showgrid=False, zeroline=False),
    }  # fmt: skip
    return {"data": data, "layout": out}


def _names(story: BalancingRace, top: float, theme: Theme) -> list[dict[str, Any]]:
    """Each line's name beside its end, moved apart where two would overlap."""
    ends = sorted(((float(run.violation[-1]) / top, rule) for rule, run in story.runs.items()))
    at = [y for y, _ in ends]
    for i in range(1, len(at)):
        at[i] = max(at[i], at[i - 1] + GAP)
    return [
        note(theme, f"<span style='color:{COLORS[rule]}'>━</span> {RULES[rule]}", LEFT[1] + 0.008, y, size=12, yanchor="middle")
        for y, (_, rule) in zip(at, ends, strict=True)
    ]
