"""One live panel class for every subject: labeled controls, a plotly picture, and one sentence that says what is seen.

A subject gives a list of controls and one function ``draw(values, theme) -> Drawing``. The browser side (``static/panel.js``)
asks for a new drawing when a control moves and never asks twice at once, so updates don't queue. plotly.js travels once a
kernel, gzipped, in a widget that all panels share.
"""

from __future__ import annotations

import gzip
import html
import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import anywidget
import plotly.graph_objects as go
import plotly.io as pio
import torch
import traitlets
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from k3viz.theme import BLUE, DARK, LIGHT, SKY, VERMILION, Theme, wrapped

STATIC = Path(__file__).parent / "static"
END = 1 << 30  # a player's position beyond the end of any story


# ---- controls: what a learner can move ----


@dataclass(frozen=True)
class Slider:
    """A number from low to high; a whole ``step`` means that only whole steps can be chosen. ``labels``, if given, are what the readout
    says, one a step."""

    name: str
    label: str
    value: float
    low: float
    high: float
    step: float
    labels: tuple[str, ...] = ()
    kind: str = field(default="slider", init=False)

    def accepts(self, value: Any) -> bool:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and self.low <= value <= self.high
        return number and (isinstance(self.step, float) or (value - self.low) % self.step == 0)


@dataclass(frozen=True)
class Player:
    """A position in a story: slider, play, rewind, one step back and forth. ``labels``: one a frame; ``draw`` may replace them.

    Standing at the end it stays there when another control makes the story longer; ``draw`` then gets ``END`` and clamps it.
    """

    name: str
    label: str
    value: int
    labels: tuple[str, ...]
    kind: str = field(default="player", init=False)

    def accepts(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0  # draw clamps: the story may get shorter


@dataclass(frozen=True)
class Choice:
    """One of several options, each (value, label)."""

    name: str
    label: str
    value: str
    options: tuple[tuple[str, str], ...]
    kind: str = field(default="choice", init=False)

    def accepts(self, value: Any) -> bool:
        return value in [v for v, _ in self.options]


@dataclass(frozen=True)
class Checks:
    """Any of several options, each (value, label)."""

    name: str
    label: str
    value: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    kind: str = field(default="checks", init=False)

    def accepts(self, value: Any) -> bool:
        return isinstance(value, (list, tuple)) and all(v in [option for option, _ in self.options] for v in value)


@dataclass(frozen=True)
class Text:
    """A short text, drawn when Enter is pressed or the field is left."""

    name: str
    label: str
    value: str
    kind: str = field(default="text", init=False)

    def accepts(self, value: Any) -> bool:
        return isinstance(value, str)


Control = Slider | Player | Choice | Checks | Text


@dataclass(frozen=True)
class Drawing:
    """What ``draw`` returns: the trace, its picture ({"data", "layout"} in plotly's terms) and a sentence with its numbers.

    frame, labels: position and labels of the panel's Player, if it has one. hidden: controls that do nothing just now.
    """

    trace: Any
    picture: dict[str, Any]
    sentence: str
    frame: int | None = None
    labels: tuple[str, ...] | None = None
    hidden: tuple[str, ...] = ()


class PlotlyLibrary(anywidget.AnyWidget):
    """plotly.js for the page, gzipped: sent once a kernel, unpacked once a page."""

    _esm = "export default { render() {} }"
    version = traitlets.Unicode().tag(sync=True)
    gz = traitlets.Bytes().tag(sync=True)


_library: PlotlyLibrary | None = None
_library_lock = threading.Lock()


def plotly_library() -> PlotlyLibrary:
    """The shared library widget; made anew when it was closed (``Widget.close_all()`` closes it with everything else)."""
    global _library
    with _library_lock:
        if _library is None or _library.comm is None:
            _library = PlotlyLibrary(version=get_plotlyjs_version(), gz=gzip.compress(get_plotlyjs().encode(), 6, mtime=0))
        return _library


class Panel(anywidget.AnyWidget):
    """A live panel. Show it as the last line of a cell; ``set`` moves controls from code.

    name: what the panel shows, for its heading and for screen readers. controls: what can be moved. draw: from
    (values by control name, theme) to a ``Drawing``; ValueError in it becomes a sentence in the panel. export: from the same
    values to the figure that ``to_html`` writes (default: the picture on show). ahead: values that a learner will probably choose and
    whose first drawing takes long (a model to load): they are drawn once, unseen, when the page has shown its first picture.
    """

    _esm = STATIC / "panel.js"
    _css = f".k3viz-panel {{ --accent: {BLUE}; --focus: {SKY}; --warn: {VERMILION}; }}\n" + (STATIC / "panel.css").read_text()
    library = traitlets.Unicode().tag(sync=True)
    name = traitlets.Unicode().tag(sync=True)
    controls = traitlets.List().tag(sync=True)
    values = traitlets.Dict().tag(sync=True)
    dark = traitlets.Bool(False).tag(sync=True)  # set by the page
    asked = traitlets.Int(0).tag(sync=True)  # counts the page's questions ...
    answered = traitlets.Int(0).tag(sync=True)  # ... and the last one answered: the page asks again only then
    picture = traitlets.Dict().tag(sync=True)
    sentence = traitlets.Unicode().tag(sync=True)
    problem = traitlets.Unicode().tag(sync=True)
    hidden = traitlets.List().tag(sync=True)
    shown = traitlets.Int(0).tag(sync=True)  # counts views on pages that show their first picture

    def __init__(
        self,
        *,
        name: str,
        controls: Sequence[Control],
        draw: Callable[[dict[str, Any], Theme], Drawing],
        export: Callable[[dict[str, Any]], go.Figure] | None = None,
        ahead: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._controls = {c.name: c for c in controls}
        self._draw, self._export, self._ahead = draw, export, tuple(ahead)
        self._lock = threading.RLock()  # callbacks may come from another thread, also while a cell runs
        values = {c.name: _plain(c.value) for c in controls}
        for c in controls:
            if not c.accepts(c.value):
                raise ValueError(f"{c.name} can't be {c.value!r} in this panel: {_allowed(c)}")
        self._drawing = self._computed(values, LIGHT)  # a wrong argument raises here, in the cell that gave it
        self._drawn = values  # what the drawing was computed from: ``values`` may hold a wish that can't be drawn
        super().__init__(
            library="IPY_MODEL_" + plotly_library().model_id, name=name, controls=[asdict(c) for c in controls],
            values=values, **self._shown(self._drawing),
        )  # fmt: skip
        self.observe(self._redraw, names=["asked", "dark"])
        self.observe(self._draw_ahead, names=["shown"])

    # ---- for people who write code ----

    @property
    def trace(self) -> Any:
        """The story behind the picture on show."""
        return self._drawing.trace

    @property
    def figure(self) -> go.Figure:
        """The picture on show, as a plotly figure on a light page."""
        with self._lock:
            return go.Figure(self._computed(self._drawn, LIGHT).picture)

    def describe(self) -> str:
        """What the picture shows, in one sentence with its numbers."""
        return self.sentence

    def set(self, values: dict[str, Any]) -> None:
        """Move controls, ``panel.set({"alpha": 0.5})``; the others stay as drawn. ValueError: unknown control, impossible value."""
        with self._lock:
            new = self._stays_at_end(self._checked({**self._drawn, **values}), set(values))
            drawing = self._computed(new, self._theme)
            with self.hold_sync():
                self._show(drawing, new)

    def to_html(self, path: str | Path) -> Path:
        """Write the picture and its sentence as one self-contained page that needs no network. Returns the path."""
        path = Path(path)
        if not path.parent.is_dir():
            raise ValueError(f"path: there is no folder {str(path.parent)!r}")
        figure = self._export(dict(self._drawn)) if self._export else self.figure
        picture = figure.to_html(include_plotlyjs=True, full_html=False, auto_play=False)
        name, sentence = html.escape(self.name), html.escape(self.describe())
        page = (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title></head>\n'
            f"<body><h1>{name}</h1>\n{picture}\n<p>{sentence}</p>\n</body></html>\n"
        )
        partial = path.with_name(path.name + ".tmp")
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, path)
        return path

    # ---- the live part ----

    def _redraw(self, _change: Any) -> None:
        with self._lock, self.hold_sync():
            try:
                new = self._checked(self.values)
                new = self._stays_at_end(new, {name for name in new if new[name] != self._drawn[name]})
                self._show(self._computed(new, self._theme), new)
            except ValueError as error:  # the learner chose something impossible: say so, keep the last picture
                self.problem = str(error)
            except Exception as error:  # noqa: BLE001  a traceback in a browser's log helps nobody
                self.problem = f"This panel failed: {type(error).__name__}: {error}"
            self.answered = self.asked

    def _draw_ahead(self, _change: Any) -> None:
        waiting, self._ahead = self._ahead, ()
        for values in waiting:
            with self._lock, suppress(Exception):  # what fails here fails again, with its sentence, when it is asked for
                self._computed({**self._drawn, **values}, self._theme)

    @property
    def _theme(self) -> Theme:
        return DARK if self.dark else LIGHT

    def _computed(self, values: dict[str, Any], theme: Theme) -> Drawing:
        with torch.no_grad():
            drawing = self._draw(dict(values), theme)
        return replace(drawing, picture=json.loads(pio.to_json(drawing.picture, validate=False)))

    def _checked(self, values: dict[str, Any]) -> dict[str, Any]:
        for name, value in values.items():
            if name not in self._controls:
                raise ValueError(f"values: this panel has no control {name!r}; its controls are {', '.join(self._controls)}")
            if not self._controls[name].accepts(value):
                raise ValueError(f"{name} can't be {value!r} in this panel: {_allowed(self._controls[name])}")
        return {name: _plain(value) for name, value in values.items()}

    @property
    def _player(self) -> dict[str, Any] | None:
        """The panel's player as it is on show, with its labels of now."""
        return next((c for c in self.controls if c["kind"] == "player"), None)

    def _stays_at_end(self, new: dict[str, Any], moved: set[str]) -> dict[str, Any]:
        """The values asked for; where other controls were moved, a player at its end is sent to the end of the story to come."""
        player = self._player
        if not moved or player is None or player["name"] in moved or new[player["name"]] != len(player["labels"]) - 1:
            return new
        return {**new, player["name"]: END}

    def _show(self, drawing: Drawing, values: dict[str, Any]) -> None:
        if player := self._player:
            place = self._drawn[player["name"]] if drawing.labels is None else drawing.frame
            values = {**values, player["name"]: place}
            if drawing.labels is not None:
                shown = {**player, "labels": tuple(drawing.labels)}
                self.controls = [shown if c["kind"] == "player" else c for c in self.controls]
        self._drawing, self._drawn, self.values = drawing, values, values
        for name, value in self._shown(drawing).items():
            setattr(self, name, value)

    @staticmethod
    def _shown(drawing: Drawing) -> dict[str, Any]:
        return {"picture": drawing.picture, "sentence": drawing.sentence, "problem": "", "hidden": list(drawing.hidden)}

    # ---- in a notebook file ----

    def _repr_mimebundle_(self, **_options: Any) -> tuple[dict, dict]:
        """The live view, and for pages without a kernel the picture with its sentence as plotly JSON, and the sentence as text.

        With PLOTLY_RENDERER=plotly_mimetype+png in the environment (for those who publish notebooks) a still too.
        """
        data, metadata = super()._repr_mimebundle_()
        with self._lock:
            light = self._computed(self._drawn, LIGHT).picture if self.dark else self._drawing.picture
            stored = _with_title(light, self.describe())
        data["text/plain"] = self.describe()
        data["application/vnd.plotly.v1+json"] = stored
        # asked of the environment: plotly's own registry of renderers takes a second to import, and hardly anyone needs it
        if "png" in os.environ.get("PLOTLY_RENDERER", "").split("+"):
            data.update(pio.renderers["png"].to_mimebundle(stored))
        return data, metadata


def _with_title(picture: dict[str, Any], sentence: str) -> dict[str, Any]:
    """The picture with the sentence above it, and room for that; a title of its own stays."""
    layout = picture["layout"]
    if layout.get("title", {}).get("text"):
        return picture
    text = wrapped(sentence, 118)
    room = 20 * (1 + text.count("<br>")) + 12
    height, margin = layout.get("height", 450) + room, layout.get("margin", {})
    title = {"text": text, "x": 0.01, "xanchor": "left", "y": 1 - 16 / height, "yanchor": "top", "font": {"size": 14}}
    return {**picture, "layout": {**layout, "title": title, "height": height, "margin": {**margin, "t": margin.get("t", 100) + room}}}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _allowed(control: Control) -> str:
    if isinstance(control, Slider):
        steps = "" if isinstance(control.step, float) else f" in steps of {control.step:g}"
        return f"{control.label} goes from {control.low:g} to {control.high:g}{steps}"
    if isinstance(control, (Choice, Checks)):
        return f"choose from {', '.join(v for v, _ in control.options)}"
    return "give a whole number from 0" if isinstance(control, Player) else "give a text"
