"""Which text of a plotly picture stands on what: enough to say whether it can be read.

``texts(picture, theme)`` yields (text, ink, ground) with colors as "#rrggbb". A text's ground is the box drawn behind it, else the bar or
heat map cell that it is written in, else the shape that it stands on, else the page.
"""
import base64
import re

import numpy as np
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
    traces = [trace.to_plotly_json() for trace in go.Figure(picture).data]
    maps = [trace for trace in traces if trace["type"] == "heatmap"]
    for trace in traces:
        yield from _trace_texts(trace, ink, page, maps)


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


def _trace_texts(trace, ink, page, maps):
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
        places = zip(_numbers(trace.get("x")), _numbers(trace.get("y")), strict=True)
        for text, color, fill, place in zip(said, colors, fills, places, strict=False):
            below = [_cell_under(cells, *place, page) for cells in maps if _same_axes(cells, trace)]
            yield from _spans(str(text or ""), color, next(filter(None, below), None) or hexed(fill) or page)
    if trace.get("showscale", kind == "heatmap") and kind == "heatmap":
        yield "color bar", trace.get("colorbar", {}).get("tickfont", {}).get("color", ink), page


def _cells(trace, page):
    """The colors between which a heat map's cells lie."""
    return [hexed(color) or page for _, color in trace["colorscale"]] if "colorscale" in trace else []


def _same_axes(one, other):
    return all(one.get(name, name[0]) == other.get(name, name[0]) for name in ("xaxis", "yaxis"))


def _cell_under(cells, x, y, page):
    """The color of the heat map cell at a place, None beside the map or where its places aren't those of its cells' middles."""
    z = _numbers(cells["z"])
    places = [_numbers(cells[name]) if name in cells else list(range(count)) for name, count in (("x", len(z[0])), ("y", len(z)))]
    found = [min(range(len(at)), key=lambda i: abs(at[i] - p)) if isinstance(p, (int, float)) and isinstance(at[0], (int, float))
             else at.index(p) if p in at else None for at, p in zip(places, (x, y), strict=True)]
    if None in found or len(places[0]) != len(z[0]) or len(places[1]) != len(z):
        return None
    flat = [v for row in z for v in row if v is not None]
    low, high = cells.get("zmin", min(flat)), cells.get("zmax", max(flat))
    value = z[found[1]][found[0]]
    return None if value is None else _on_scale(cells["colorscale"], (value - low) / ((high - low) or 1), page)


def _on_scale(scale, share, page):
    share = min(1.0, max(0.0, share))
    for (a, low), (b, high) in zip(scale, scale[1:], strict=False):
        if share <= b:
            return mixed(hexed(high) or page, hexed(low) or page, (share - a) / ((b - a) or 1))
    return hexed(scale[-1][1]) or page


def _numbers(value):
    """A list of plotly's arrays: lists, numpy arrays, or its base64 form."""
    if isinstance(value, dict):
        array = np.frombuffer(base64.b64decode(value["bdata"]), dtype=value["dtype"])
        shape = [int(n) for n in str(value.get("shape", array.size)).split(",")]
        return array.reshape(shape).tolist()
    return value.tolist() if hasattr(value, "tolist") else list(value)


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
