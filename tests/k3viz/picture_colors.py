"""Which text of a plotly picture stands on what: enough to say whether it can be read.

``texts(picture, theme)`` yields (text, ink, ground) with colors as "#rrggbb". A text's ground is the box drawn behind it, else the bar or
heat map cell that it is written in, else the shape that it stands on, else the page.
"""
import re

import plotly.graph_objects as go

LETTERS = re.compile(r"[^\W_]")
COLORED = re.compile(r"<span style=['\"][^'\"]*?color: ?(#[0-9a-fA-F]{6})['\"]>(.*?)</span>")


def hexed(color):
    """"#rrggbb" of a color that plotly understands, None for one that can't be seen."""
    if not isinstance(color, str) or color in ("", "transparent", "rgba(0,0,0,0)"):
        return None
    if color.startswith("#"):
        return "#" + "".join(c * 2 for c in color[1:]) if len(color) == 4 else color[:7]
    parts = re.match(r"rgba?\(([\d.]+), ?([\d.]+), ?([\d.]+)", color)
    assert parts, f"this test can't read the color {color!r}"
    return "#" + "".join(f"{round(float(x)):02x}" for x in parts.groups())


def mixed(color, ground, opacity):
    """A half-transparent color over a ground."""
    pairs = ((int(color[i:i + 2], 16), int(ground[i:i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(opacity * c + (1 - opacity) * g):02x}" for c, g in pairs)


def texts(picture, theme):
    layout = go.Figure(picture).layout.to_plotly_json()
    page, ink = theme.paper, layout.get("font", {}).get("color", "#444444")
    for note in layout.get("annotations", ()):
        ground = hexed(note.get("bgcolor")) or _shape_under(note, layout, page) or page
        yield from _spans(note.get("text", ""), note.get("font", {}).get("color", ink), ground)
    for name, axis in layout.items():
        if re.fullmatch(r"[xy]axis\d*", name) and axis.get("visible", True):
            yield from _spans(_title(axis), axis.get("title", {}).get("font", {}).get("color", ink), page)
            if axis.get("showticklabels", True):
                yield name, axis.get("tickfont", {}).get("color", ink), page
    yield from _spans(_title(layout), layout.get("title", {}).get("font", {}).get("color", ink), page)
    if layout.get("showlegend"):
        yield "legend", layout.get("legend", {}).get("font", {}).get("color", ink), page
    for trace in go.Figure(picture).data:
        yield from _trace_texts(trace.to_plotly_json(), ink, page)


def _title(holder):
    title = holder.get("title", {})
    return title.get("text") or "" if isinstance(title, dict) else title


def _spans(text, ink, ground):
    """A text in its own ink, and those of its parts that have one of their own; a mark without letters (a line's sample) isn't text."""
    for color, part in COLORED.findall(text):
        if LETTERS.search(part):
            yield part, color, ground
    rest = COLORED.sub("", text)
    if LETTERS.search(re.sub(r"<[^>]*>", "", rest)):
        yield rest, ink, ground


def _trace_texts(trace, ink, page):
    kind = trace["type"]
    said = _listed(trace.get("text"), 1)
    inside = trace.get("insidetextfont", trace.get("textfont", {})).get("color")
    if kind == "bar" and any(said) and trace.get("textposition", "auto") in ("inside", "auto"):
        fills = _listed(trace.get("marker", {}).get("color"), len(said))
        for text, color, fill in zip(said, _listed(inside, len(said)), fills, strict=False):
            if text and color is not None:  # without a color of its own plotly picks one that reads on the bar
                yield from _spans(str(text), color, mixed(hexed(fill) or page, page, trace.get("opacity", 1)))
    elif kind == "heatmap" and (trace.get("text") is not None or trace.get("texttemplate")):
        if inside is not None:
            for fill in _cells(trace, page):
                yield "heat map cell", inside, fill
    elif kind == "table":
        for part in ("header", "cells"):
            fonts, fills = trace.get(part, {}).get("font", {}).get("color", ink), trace.get(part, {}).get("fill", {}).get("color") or page
            for color in _flat(fonts):
                for fill in _flat(fills):
                    yield f"table {part}", color, hexed(fill) or page
    elif kind.startswith("scatter") and "text" in trace.get("mode", ""):
        colors = _listed(trace.get("textfont", {}).get("color", ink), len(said))
        centered = "markers" in trace.get("mode", "") and "middle center" in str(trace.get("textposition", "middle center"))
        fills = _listed(trace.get("marker", {}).get("color"), len(said)) if centered else [page] * len(said)
        for text, color, fill in zip(said, colors, fills, strict=False):
            yield from _spans(str(text or ""), color, hexed(fill) or page)
    if trace.get("showscale", kind == "heatmap") and kind == "heatmap":
        yield "color bar", trace.get("colorbar", {}).get("tickfont", {}).get("color", ink), page


def _cells(trace, page):
    """The colors between which a heat map's cells lie."""
    return [hexed(color) or page for _, color in trace["colorscale"]] if "colorscale" in trace else []


def _listed(value, count):
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, (list, tuple)) else [value] * count


def _flat(value):
    return [x for item in value for x in _flat(item)] if isinstance(value, (list, tuple)) else [value]


def _shape_under(note, layout, page):
    """The fill of the last filled rectangle or circle that holds the note's point."""
    found = None
    for shape in layout.get("shapes", ()):
        fill = hexed(shape.get("fillcolor"))
        same = all(shape.get(f"{a}ref", a) == note.get(f"{a}ref", "paper") for a in "xy")
        places = (note.get("x"), note.get("y"), *(shape.get(k) for k in ("x0", "x1", "y0", "y1")))
        numbers = all(isinstance(place, (int, float)) for place in places)
        if fill and same and numbers and shape.get("type", "rect") in ("rect", "circle"):
            inside = all(min(shape[f"{a}0"], shape[f"{a}1"]) <= note[a] <= max(shape[f"{a}0"], shape[f"{a}1"]) for a in "xy")
            if inside:
                found = mixed(fill, page, shape.get("opacity", 1))
    return found
