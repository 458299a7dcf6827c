"""Experts at a released model's size as a plotly figure: sorted loads, dead experts against router entropy, and the bytes of messages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from k3viz.experts.scale import SKEWS, TOKENS, ExpertsAtScale
from k3viz.theme import (
    ROLES,
    Theme,
    axis,
    format_bytes,
    format_count,
    format_number,
    format_probability,
    layout,
    literal,
    note,
    plural,
    wrapped,
)

LEFT, MIDDLE, RIGHT = (0.0, 0.27), (0.38, 0.63), (0.8, 1.0)
POINTS = 128  # of a sorted load curve


def scale_picture(story: ExpertsAtScale, theme: Theme, *, title: bool = True) -> dict[str, Any]:
    """{"data", "layout"} of one batch at scale."""
    E = len(story.loads)
    curves = {"as routed": (story.loads, ROLES["erase"], "solid"), "balanced": (story.balanced, ROLES["memory"], "dash")}
    data: list[dict[str, Any]] = []
    for name, (loads, color, dash) in curves.items():
        x, y = _falling(loads)
        data.append({
            "type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": {"color": color, "width": 2.5, "dash": dash},
            "hovertemplate": f"{name}, number %{{x}}: %{{y}} tokens<extra></extra>",
        })  # fmt: skip
    for name, share, color, dash in (("dead experts", story.dead, ROLES["erase"], "solid"),
                                     ("router entropy", story.entropy, ROLES["decay"], "dot")):  # fmt: skip
        sizes = [11 if i == story.skew else 6 for i in range(len(SKEWS))]
        data.append({
            "type": "scatter", "mode": "lines+markers", "xaxis": "x2", "yaxis": "y2", "name": name, "x": list(SKEWS),
            "y": [round(y, 4) for y in share], "line": {"color": color, "width": 2.5, "dash": dash},
            "marker": {"size": sizes, "color": color, "line": {"color": theme.ink, "width": 1}},
            "hovertemplate": f"{name}: %{{y:.1%}}<extra></extra>",
        })  # fmt: skip
    sizes = story.message_bytes
    data.append({
        "type": "bar", "xaxis": "x3", "yaxis": "y3", "name": "messages", "x": [0, 1], "y": [round(b) for b in sizes], "width": 0.6,
        "text": [format_bytes(b) for b in sizes], "textposition": "outside", "cliponaxis": False, "hoverinfo": "skip",
        "textfont": {"size": 13, "color": theme.ink},
        # bgcolor is unused, but without it plotly takes the list of colors for one and warns
        "marker": {"color": [ROLES["memory"], ROLES["additive"]],
                   "pattern": {"shape": ["", "/"], "fillmode": "overlay", "fgcolor": theme.paper, "bgcolor": theme.paper, "size": 6}},
    })  # fmt: skip
    even, most = TOKENS * story.top_k / E, int(max(story.loads.max(), story.balanced.max()))
    chosen = SKEWS[story.skew]
    curve_names = (f"<span style='color:{ROLES['erase']}'>━</span> as routed   "
                   f"<span style='color:{ROLES['memory']}'>╍</span> one balancing step")  # fmt: skip
    dead = int((story.loads == 0).sum())
    shares = f"dead {format_probability(story.dead[story.skew])}, entropy {format_probability(story.entropy[story.skew])} of its most"
    made = (f"Seeded router, not trained: {TOKENS} tokens, {format_count(E)} experts, {story.top_k} a token, {story.ranks} "
            f"{plural('rank', story.ranks)}, messages in bfloat16.<br>"
            f"A whole model with {story.shared} shared {plural('expert', story.shared)} and a latent of "
            f"{format_count(story.latent)} has {format_count(story.total)} parameters, {format_count(story.active)} active.")  # fmt: skip
    notes = [
        note(theme, "<b>Tokens an expert</b>, fullest first", LEFT[0], 1.0, yshift=24),
        note(theme, curve_names, LEFT[0], 1.0, yshift=4, size=12),
        note(theme, "<b>Dead experts, hidden by entropy</b>", MIDDLE[0] - 0.03, 1.0, yshift=24),
        note(theme, literal(shares), MIDDLE[0] - 0.03, 1.0, yshift=4, size=12),
        note(theme, "<b>Messages between ranks</b>", RIGHT[0] - 0.08, 1.0, yshift=24),
        note(theme, f"{format_number(story.crossing)} a token, there and back", RIGHT[0] - 0.08, 1.0, yshift=4, size=12),
        note(theme, made, 0.0, 0.0, yshift=-90, size=12),
    ]
    if dead:
        notes.append({**note(theme, f"{format_count(dead)} dead:<br>the line ends", LEFT[1], 0.02, size=12), "xanchor": "right",
                      "align": "right"})  # fmt: skip
    named = {"xref": "x2", "yref": "y2", "size": 12}
    dead_name, entropy_name = (f"<span style='color:{ROLES[role]}'>━</span> {name}"
                               for role, name in (("erase", "dead experts"), ("decay", "router entropy")))  # fmt: skip
    notes.append(note(theme, dead_name, SKEWS[1], story.dead[1], yanchor="top", xshift=8, **named))
    notes.append(note(theme, entropy_name, SKEWS[-1], story.entropy[-1], xanchor="right", yshift=7, **named))
    mark = {"type": "line", "xref": "x2", "yref": "y2", "x0": chosen, "x1": chosen, "y0": 0, "y1": 1.15,
            "line": {"color": theme.line, "width": 1.5, "dash": "dot"}}  # fmt: skip
    flat = {"type": "line", "xref": "x", "yref": "y", "x0": 1, "x1": E, "y0": even, "y1": even,
            "line": {"color": theme.ink, "width": 1, "dash": "dot"}}  # fmt: skip
    out = layout(theme, height=560 if title else 460, margin={"l": 84, "r": 30, "t": 156 if title else 56, "b": 100}, annotations=notes,
                 shapes=[mark, flat])  # fmt: skip
    if title:
        text = wrapped(story.sentence, 130)
        out["title"] = {"text": text, "x": 0.01, "xanchor": "left", "y": 0.97, "yanchor": "top", "font": {"size": 13}}
    quiet = {"size": 12, "color": theme.muted}
    out |= {
        "xaxis": axis(theme, domain=LEFT, anchor="y", range=[0, E], title={"text": "experts", "font": quiet, "standoff": 4}, nticks=5),
        "yaxis": axis(theme, anchor="x", type="log", range=[math.log10(0.7), math.log10(1.3 * most)], tickvals=[1, even, most],
                      ticktext=["1", f"even: {format_number(even)}", str(most)]),
        "xaxis2": axis(theme, domain=MIDDLE, anchor="y2", range=[-0.1, SKEWS[-1] + 0.1], zeroline=False,
                       title={"text": "favorites: spread of popularity, logits", "font": quiet, "standoff": 4}),
        "yaxis2": axis(theme, anchor="x2", range=[0, 1.15], tickvals=[0, 0.25, 0.5, 0.75, 1], tickformat=".0%"),
        "xaxis3": axis(theme, domain=RIGHT, anchor="y3", range=[-0.5, 1.5], tickvals=[0, 1], showgrid=False, zeroline=False, ticks="",
                       ticktext=[f"latent<br>{format_count(story.latent)}", f"full<br>{format_count(story.hidden)}"]),
        "yaxis3": axis(theme, anchor="x3", range=[0, 1.15 * max(sizes) or 1.0], nticks=5, tickformat="~s", ticksuffix="B"),
    }  # fmt: skip
    return {"data": data, "layout": out}


def _falling(loads: np.ndarray) -> tuple[list[int], list[int]]:
    """Loads from the fullest expert down, thinned; a dead one has no place on a logarithmic axis, so the line ends before it."""
    some = np.sort(loads[loads > 0])[::-1]
    show = np.unique(np.linspace(0, len(some) - 1, min(len(some), POINTS)).round().astype(int))
    return (show + 1).tolist(), some[show].tolist()
