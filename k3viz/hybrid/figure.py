"""The hybrid as a plotly figure: every layer's cost above, the block diagram of one layer and the whole model's parts below."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import plotly.graph_objects as go

from k3viz.hybrid.parts import Layer, Part
from k3viz.hybrid.story import LENSES, HybridStory, hybrid_story, operations
from k3viz.theme import (
    LIGHT,
    MIXER_COLORS,
    ROLES,
    Theme,
    axis,
    format_bytes,
    format_count,
    format_probability,
    layout,
    note,
    sequential,
    shade,
    text_on,
    wrapped,
)  # fmt: skip

STACK, BLOCK, PARTS = (0.80, 0.97), (0.17, 0.66), (0.17, 0.66)  # heights of the three pictures, as shares of the page
LEFT, RIGHT = (0.0, 0.67), (0.86, 1.0)
SHOWN = 8  # parts of the whole model; the rest is summed up
# Where a part's box stands in a half of the diagram: x from, x to, lane from, lane to (lane 0 is the lowest of three).
PLACES = {
    "read": (0.0, 0.9, 1, 2), "norm": (1.1, 1.75, 1, 2),
    "qkv": (2.0, 3.6, 2, 3), "decay": (2.0, 3.6, 1, 2), "beta": (2.0, 3.6, 0, 1), "state": (3.85, 5.2, 0, 3), "out": (5.4, 6.5, 1, 2),
    "query": (2.0, 3.6, 2, 3), "latent": (2.0, 3.6, 1, 2), "expand": (2.0, 3.6, 0, 1), "attention": (3.85, 5.2, 0, 3),
    "mlp": (2.0, 5.2, 1, 2),
    "router": (2.0, 3.6, 2, 3), "down": (2.0, 3.6, 1, 2), "experts": (3.85, 5.2, 1, 3), "up": (5.4, 6.5, 1, 2), "shared": (2.0, 5.2, 0, 1),
    "embedding": (2.0, 5.2, 1, 2), "head": (2.0, 5.2, 1, 2),
}  # fmt: skip
ARROWS = (
    ("read", "norm"), ("norm", "qkv"), ("norm", "decay"), ("norm", "beta"), ("qkv", "state"), ("decay", "state"), ("beta", "state"),
    ("norm", "query"), ("norm", "latent"), ("latent", "expand"), ("query", "attention"), ("expand", "attention"), ("state", "out"),
    ("attention", "out"), ("out", "add"), ("norm", "mlp"), ("mlp", "add"), ("norm", "router"), ("norm", "down"), ("norm", "shared"),
    ("router", "experts"), ("down", "experts"), ("experts", "up"), ("up", "add"), ("shared", "add"), ("norm", "head"),
)  # fmt: skip
LANE, HALF = 0.82, 3.35  # a box's height in lanes; from one half of the diagram to the other


def hybrid_figure(*, story: HybridStory | None = None, theme: Theme = LIGHT) -> go.Figure:
    """Draw a hybrid story (default: ``hybrid_story()``)."""
    return go.Figure(hybrid_picture(hybrid_story() if story is None else story, theme))


def hybrid_picture(story: HybridStory, theme: Theme, *, title: bool = True) -> dict[str, Any]:
    """{"data", "layout"}: the plain dict that both the figure and the live panel draw."""
    unit = LENSES[story.lens][1]
    data, notes, shapes = [*_stack(story, theme), *_whole(story, theme)], [], []
    notes += [
        note(theme, f"<b>{story.label}, layer by layer: {unit}</b>", 0, STACK[1] + 0.02),
        note(theme, _legend(theme), 1, STACK[1] + 0.02, size=12, xanchor="right"),
        note(theme, f"<b>{story.step.label[0].upper()}{story.step.label[1:]}</b>", LEFT[0], BLOCK[1] + 0.015),
        note(theme, "+ adds to the running sum", LEFT[1], BLOCK[0] - 0.02, size=11, xanchor="right"),
        note(theme, f"<b>The whole model: {unit}</b>", 1, PARTS[1] + 0.015, xanchor="right"),
        note(theme, _details(story.step.part(story.part)), 0, 0.125, size=12, yanchor="top"),
        {"text": "<b>▼</b>", "x": story.at, "y": story.cost(story.step), "xref": "x", "yref": "y", "showarrow": False, "yanchor": "bottom",
         "font": {"size": 13, "color": theme.ink}},
    ]  # fmt: skip
    hover = _diagram(story, theme, shapes, notes)
    out = layout(theme, height=700, margin={"l": 62, "r": 14, "t": 96 if title else 26, "b": 14}, barmode="stack", bargap=0.15,
                 annotations=notes, shapes=shapes)  # fmt: skip
    if title:
        out["title"] = {"text": wrapped(story.sentence, 118), "x": 0.01, "xanchor": "left", "y": 0.985, "yanchor": "top",
                        "font": {"size": 14}}  # fmt: skip
    last = len(story.steps) - 1
    out["xaxis"] = axis(theme, domain=[0, 1], anchor="y", range=[-0.6, last + 0.6], showgrid=False, zeroline=False,
                        tickvals=_ticks(last), ticktext=["in", *map(str, _ticks(last)[1:-1]), "out"])  # fmt: skip
    highest = max(story.cost(s) for s in story.steps) or 1
    marks = _marks(highest)
    out["yaxis"] = axis(theme, domain=list(STACK), anchor="x", range=[0, 1.25 * highest], tickvals=marks,
                        ticktext=[value(m, story.lens, digits=2) for m in marks])  # fmt: skip
    blank = {"visible": False, "fixedrange": True}
    out["xaxis2"] = blank | {"domain": list(LEFT), "anchor": "y2", "range": [-0.05, 7.15]}
    out["yaxis2"] = blank | {"domain": list(BLOCK), "anchor": "x2", "range": [-0.1, HALF + 3.1]}
    out["xaxis3"] = axis(theme, domain=list(RIGHT), anchor="y3", range=[0, 1.45], visible=False)
    out["yaxis3"] = axis(theme, domain=list(PARTS), anchor="x3", autorange="reversed", showgrid=False, zeroline=False, ticks="",
                         tickfont={"color": theme.ink, "size": 11})
    return {"data": [*data, hover], "layout": out}


def value(cost: float, lens: str, *, digits: int = 3) -> str:
    """A cost as its box says it."""
    return format_bytes(cost, digits=digits) if lens == "memory" else format_count(cost, digits=digits)


def _stack(story: HybridStory, theme: Theme) -> list[dict[str, Any]]:
    """Bars: what the mixers and what everything else of every step costs."""
    of = LENSES[story.lens][0]
    groups = {"KDA": [], "MLA": [], "everything else": []}
    for s in story.steps:
        cut = _half(s) or 0  # embedding and output have no mixer
        mixer = sum(getattr(p, of) for p in s.parts[:cut])
        rest = sum(getattr(p, of) for p in s.parts[cut:])
        for name in groups:
            groups[name].append(rest if name == "everything else" else mixer if s.mixer == name.lower() else 0)
    looks = {"KDA": (MIXER_COLORS["kda"], ""), "MLA": (MIXER_COLORS["mla"], "/"), "everything else": (theme.line, "")}
    return [
        {"type": "bar", "name": name, "x": list(range(len(costs))), "y": costs, "ids": [f"at={i}" for i in range(len(costs))], "customdata":
         [f"{s.label}<br>{name}: {value(c, story.lens)}" for s, c in zip(story.steps, costs, strict=True)],
         "hovertemplate": "%{customdata}<extra></extra>",
         "marker": {"color": looks[name][0], "line": {"width": 0},
                    "pattern": {"shape": looks[name][1], "fgcolor": theme.paper, "size": 4, "fillmode": "overlay"}}}
        for name, costs in groups.items()
    ]  # fmt: skip


def _half(step: Layer) -> int | None:
    """How many of a layer's parts belong to its mixer, depth read and norm included; None for embedding and output."""
    names = [p.name for p in step.parts]
    return next((names.index(n) for n in ("read_2", "norm_2") if n in names), None)


def _legend(theme: Theme) -> str:
    looks = ((MIXER_COLORS["kda"], "■", "KDA"), (MIXER_COLORS["mla"], "▨", "MLA"), (theme.line, "■", "feed-forward, tables"))
    return "   ".join(f"<span style='color:{color}'>{mark}</span> {name}" for color, mark, name in looks)


def _whole(story: HybridStory, theme: Theme) -> list[dict[str, Any]]:
    """Bars: the largest shares of the whole model, parts of one name together; the rest summed up."""
    labels: dict[str, str] = {}
    for s in story.steps:
        for p in s.parts:
            labels.setdefault(p.name.removesuffix("_2"), p.label)
    single = story.shares()
    shares = {name: sum(single.get(n, 0.0) for n in (name, name + "_2")) for name in labels}
    top = sorted((n for n in shares if shares[n] > 0), key=lambda n: -shares[n])[:SHOWN]
    rows = [(labels[n], shares[n], n == story.part) for n in top]
    if (rest := max(0.0, 1 - sum(shares[n] for n in top))) > 1e-9:
        rows.append(("all others", rest, False))
    names = [f"<b>{label}</b>" if chosen else label for label, _, chosen in rows]
    return [{
        "type": "bar", "orientation": "h", "xaxis": "x3", "yaxis": "y3", "y": names, "x": [x for _, x, _ in rows], "name": "whole model",
        "text": [format_probability(x) for _, x, _ in rows], "textposition": "outside", "textfont": {"color": theme.ink, "size": 12},
        "cliponaxis": False, "hoverinfo": "skip", "marker": {"color": ROLES["memory"], "line": {"width": 0}},
    }]  # fmt: skip


def _diagram(story: HybridStory, theme: Theme, shapes: list, notes: list) -> dict[str, Any]:
    """Boxes and arrows of the step looked into, as shapes and annotations; returns the markers with hover texts, which take clicks."""
    of, total, points = LENSES[story.lens][0], story.cost(story.step) or 1, []
    boxes: dict[str, tuple[float, float, float, float]] = {}
    cut, names = _half(story.step), [p.name for p in story.step.parts]
    for i, p in enumerate(story.step.parts):
        lower = cut is not None and i >= cut
        x0, x1, low, high = PLACES[p.name.removesuffix("_2")]
        up = 0.0 if lower else HALF if cut is not None else HALF / 2
        box = (x0, x1, low + up + (1 - LANE) / 2, high + up - (1 - LANE) / 2)
        boxes[("lower " if lower else "") + p.name.removesuffix("_2")] = box
        fill = shade(sequential(theme), 0.85 * getattr(p, of) / total)
        chosen = p.name == story.part
        shapes.append({
            "type": "rect", "xref": "x2", "yref": "y2", "x0": box[0], "x1": box[1], "y0": box[2], "y1": box[3], "fillcolor": fill,
            "line": {"color": theme.ink if chosen else theme.line, "width": 3.5 if chosen else 1},
        })  # fmt: skip
        label = "<br>".join(textwrap.wrap(p.label, max(6, int(11.5 * (x1 - x0)))))
        label = f"<b>{label}</b>" if chosen else label
        notes.append({
            "text": f"{label}<br>{value(getattr(p, of), story.lens)}", "x": (box[0] + box[1]) / 2, "y": (box[2] + box[3]) / 2, "xref": "x2",
            "yref": "y2", "showarrow": False, "font": {"size": 11, "color": text_on(fill)},
        })  # fmt: skip
        points.append(((box[0] + box[1]) / 2, (box[2] + box[3]) / 2, _details(p), f"part={p.name}"))
    for prefix, middle in (("", HALF + 1.5), ("lower ", 1.5)):
        if cut is not None:  # what a layer computes is added to the sum of its block of layers
            boxes[prefix + "add"] = (6.75, 7.1, middle - 0.25, middle + 0.25)
            shapes.append({"type": "circle", "xref": "x2", "yref": "y2", "x0": 6.75, "x1": 7.1, "y0": middle - 0.25, "y1": middle + 0.25,
                           "line": {"color": theme.line, "width": 1}, "fillcolor": theme.empty})  # fmt: skip
            notes.append({"text": "+", "x": 6.925, "y": middle, "xref": "x2", "yref": "y2", "showarrow": False,
                          "font": {"size": 14, "color": theme.ink}})  # fmt: skip
        ways = ARROWS + ((("experts", "add"), ("norm", "experts")) if "down" not in names else ())  # no latent: experts read the norm
        for a, b in ways:
            if prefix + a in boxes and prefix + b in boxes:
                notes.append(_arrow(boxes[prefix + a], boxes[prefix + b], theme))
    return {"type": "scatter", "mode": "markers", "xaxis": "x2", "yaxis": "y2", "name": "parts", "x": [p[0] for p in points],
            "y": [p[1] for p in points], "customdata": ["<br>".join(textwrap.wrap(p[2], 70)) for p in points],
            "ids": [p[3] for p in points], "hovertemplate": "%{customdata}<extra></extra>",
            "marker": {"size": 40, "opacity": 0}}  # fmt: skip


def _arrow(a: tuple, b: tuple, theme: Theme) -> dict[str, Any]:
    """From box a to box b: level where the boxes face each other, downward if b stands below a."""
    start, end = (a[2] + a[3]) / 2, (b[2] + b[3]) / 2
    if b[0] < a[1]:  # one above the other
        x = (a[0] + a[1]) / 2
        ends = {"ax": x, "ay": a[2], "x": x, "y": b[3]}
    else:
        level = min(max(start, b[2] + 0.1), b[3] - 0.1) if b[3] - b[2] > a[3] - a[2] else end
        ends = {"ax": a[1], "ay": start, "x": b[0], "y": level}
    return ends | {"xref": "x2", "yref": "y2", "axref": "x2", "ayref": "y2", "text": "", "showarrow": True, "arrowhead": 2,
                   "arrowsize": 0.9, "arrowwidth": 1.2, "arrowcolor": theme.line}  # fmt: skip


def _details(part: Part) -> str:
    """A part's tensors and all its costs."""
    held = "; ".join(f"{name.rsplit('self_attn.')[-1].rsplit('block_sparse_moe.')[-1].removesuffix('.weight')} {_shape(shape)}"
                     for name, shape in part.tensors) or "no tensors of its own"  # fmt: skip
    active = f", {format_count(part.active)} used by a token" if part.active != part.parameters else ""
    costs = f"{format_count(part.parameters)} parameters{active}, {format_bytes(part.weight_bytes)} of weights"
    costs += f", {operations(part.flops)} a token"
    kept = f", {format_bytes(part.memory)} kept for a session" if part.memory else ""
    return "<br>".join(textwrap.wrap(f"{part.label}: {held}. {costs}{kept}.", 124))


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(f"{n}" for n in shape)


def _marks(highest: float) -> list[float]:
    """0 and up to three round numbers below the highest bar."""
    size = 10 ** math.floor(math.log10(highest))
    step = next(m * size for m in (0.1, 0.2, 0.5, 1, 2, 5) if highest / (m * size) < 4)
    return [i * step for i in range(int(highest / step) + 1)]


def _ticks(last: int) -> list[int]:
    """The ends, and layers at a round distance, none of them where it would touch an end's name."""
    step = next(s for s in (1, 2, 4, 8, 16) if last / s <= 26)
    return [0, *(i for i in range(step, last) if i % step == 0 and last - i >= step / 2 + 0.5), last]
