"""Colors by role, fonts and number formats: the only place in the project that holds a color.

Colors are the Okabe-Ito palette, which people with any common color blindness can tell apart. A role keeps its color in
figures, panels and scenes. Text is never written in a role's color (too pale on white): it is ``ink``, or ``text_on(fill)``
inside a filled shape. Every role has a second channel (a label, a hatch, a dash, a marker), so color is never alone.
"""

from __future__ import annotations

import html
import textwrap
from dataclasses import dataclass
from typing import Any

from minimodel.formats import format_bytes, format_count, format_digits, format_number, format_probability, plural

__all__ = [
    "DARK", "FONT", "LIGHT", "MIXER_COLORS", "MIXER_DASHES", "ROLES", "SERIES", "Theme", "axis", "contrast", "diverging", "format_bytes",
    "format_count", "format_digits", "format_number", "format_probability", "layout", "literal", "note", "plural", "sequential", "shade",
    "text_on", "wrapped",
]  # fmt: skip

BLACK, WHITE = "#111111", "#ffffff"
ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILION, PURPLE, GRAY = "#0072b2", "#d55e00", "#cc79a7", "#8c8c8c"

ROLES = {
    "query": SKY,
    "key": ORANGE,
    "value": GREEN,
    "decay": PURPLE,
    "erase": VERMILION,  # what is, or should have been, wiped off
    "write": GREEN,  # a write puts a value down, so it has the value's color
    "memory": BLUE,  # a state, a cache
    "additive": GRAY,  # the update without erase
    "leak": GRAY,  # what another row left here
    "measured": BLUE,
    "published": ORANGE,
    "highlight": YELLOW,
}

# sequence mixers, wherever they are compared
MIXER_COLORS = {"mha": VERMILION, "gqa": ORANGE, "mla": PURPLE, "sliding_window": SKY, "kda": BLUE}
MIXER_DASHES = {"mha": "solid", "gqa": "dash", "mla": "dashdot", "sliding_window": "dot", "kda": "solid"}

# what is compared and has no role: the arms of an experiment, in their order
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GRAY)

FONT = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class Theme:
    """A page to draw on. ``ink`` and ``muted`` are for text, ``grid`` and ``line`` for axes, ``empty`` for a blank board."""

    name: str
    paper: str
    ink: str
    muted: str
    grid: str
    line: str
    empty: str


LIGHT = Theme("light", paper=WHITE, ink="#1a1a1a", muted="#595959", grid="#e3e3e3", line="#9a9a9a", empty="#f4f4f4")
DARK = Theme("dark", paper=BLACK, ink="#ececec", muted="#b4b4b4", grid="#333333", line="#777777", empty="#1e1e1e")


def layout(theme: Theme, *, height: int, **more: Any) -> dict[str, Any]:
    """A plotly layout in the given theme; ``more`` are further plotly layout entries."""
    return {
        "height": height,
        "autosize": True,
        "paper_bgcolor": theme.paper,
        "plot_bgcolor": theme.paper,
        "font": {"family": FONT, "size": 13, "color": theme.ink},
        "hoverlabel": {"bgcolor": theme.empty, "bordercolor": theme.line, "font": {"family": FONT, "size": 13, "color": theme.ink}},
        "template": None,
        "showlegend": False,
        **more,
    }


def axis(theme: Theme, **more: Any) -> dict[str, Any]:
    """A plotly axis in the given theme; grid, zero and axis lines are set too, because dark pages need all of them."""
    return {
        "gridcolor": theme.grid, "zerolinecolor": theme.line, "linecolor": theme.line, "tickcolor": theme.line,
        "tickfont": {"color": theme.ink, "size": 12}, **more,
    }  # fmt: skip


def note(theme: Theme, text: str, x: float, y: float, *, size: int = 13, **more: Any) -> dict[str, Any]:
    """A text on the page, its lower left corner at (x, y) as shares of the plotting area; ``more`` are further annotation entries."""
    return {
        "text": text, "x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False,
        "align": "left", "font": {"size": size, "color": theme.ink}, **more,
    }  # fmt: skip


def literal(text: str) -> str:
    """A text as plotly has to be given it: it takes "<" up to the next ">" for a tag, and "< 0.1 %, > 99.9 %" would vanish."""
    return html.escape(text, quote=False)


def wrapped(text: str, width: int) -> str:
    """A text in lines of at most ``width`` letters, since plotly's titles and notes don't wrap by themselves."""
    return "<br>".join(literal(line) for line in textwrap.wrap(text, width))


def diverging(theme: Theme) -> list[list]:
    """Color scale for signed numbers: vermilion below zero, the page at zero, blue above."""
    return [[0.0, VERMILION], [0.5, theme.paper], [1.0, BLUE]]


def sequential(theme: Theme) -> list[list]:
    """Color scale for 0 upward: from the page to blue."""
    return [[0.0, theme.paper], [1.0, BLUE]]


def shade(scale: list[list], at: float) -> str:
    """The "#rrggbb" of a color scale at a position from 0 to 1, for text that has to be read on it."""
    low, high = next(pair for pair in zip(scale, scale[1:], strict=False) if at <= pair[1][0] or pair[1] is scale[-1])
    part = min(max((at - low[0]) / (high[0] - low[0]), 0.0), 1.0)
    ends = [(int(low[1][i : i + 2], 16), int(high[1][i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in ends)


def contrast(a: str, b: str) -> float:
    """WCAG contrast ratio of two "#rrggbb" colors, from 1 to 21; body text needs 4.5."""
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def text_on(fill: str) -> str:
    """Black or white, whichever reads better on ``fill``."""
    return max(("#000000", WHITE), key=lambda ink: contrast(ink, fill))  # with any paler black some fill has less than 4.5 with both


def _luminance(color: str) -> float:
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
