"""What every panel owes its learners. Panels are discovered from k3viz, so a new one is covered as soon as it is registered."""
import dataclasses
import hashlib
import html
import inspect
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

import k3viz
from k3viz.panel import _with_title
from k3viz.theme import DARK, LIGHT, contrast
from minimodel import K3Config, K3ForCausalLM
from minimodel.tasks import meeting
from tests.k3viz.picture_colors import hexed, texts

ROOT = Path(__file__).resolve().parents[2]
PANELS = sorted(name for name in k3viz.__all__ if name.endswith("_panel"))
LARGEST = 300_000  # bytes of a picture as JSON
READABLE = 4.5  # WCAG AA
TAG = re.compile(r"<[^<>]*>")
TAGS = re.compile(r"</?(b|i|br|extra|sub|sup|span)( style='[^']*')?>")
HOSTILE = ("", "   ", "?" * 5000, "a" * 5000, "ünï ∑ 語 🙂", "<b>bold", "no such thing", ";:,", "\x00")  # typed into a text field

pytestmark = pytest.mark.parametrize("name", PANELS)


def build(name):
    return getattr(k3viz, name)()


@cache
def panel(name):
    """One panel a name for the tests that only look."""
    return build(name)


def other_values(control):
    """Values of a control that differ from where it starts, its ends among them."""
    kind, value = control["kind"], control["value"]
    if kind == "slider":
        inner = control["low"] + round((control["high"] - control["low"]) / control["step"] / 2) * control["step"]
        found = [control["low"], control["high"], type(value)(inner)]
    elif kind == "player":
        found = [0, len(control["labels"]) // 2, len(control["labels"]) - 1]
    elif kind == "choice":
        found = [option for option, _ in control["options"]]
    elif kind == "checks":
        every = [option for option, _ in control["options"]]
        found = [[], every[:1], every]
    else:
        found = list(HOSTILE)
    return [x for x in found if x != value]


@cache
def moves(name):
    """(control, value, picture, sentence) or (control, value, None, problem) of every other value of every control, one at a time."""
    out = []
    for control in build(name).controls:
        fresh = build(name)
        start = dict(fresh.values)
        for value in other_values(control):
            fresh.set_state({"values": {**start, control["name"]: value}, "asked": fresh.asked + 1})  # as the page does it
            out.append((control["name"], value, None if fresh.problem else fresh.picture, fresh.problem or fresh.describe()))
    return out


def test_it_says_what_it_shows_in_words_and_numbers(name):
    said = panel(name).describe()
    assert 20 <= len(said) <= 700 and "\n" not in said and any(c.isdigit() for c in said), said
    assert said.rstrip()[-1] in ".?!" and said[0].upper() == said[0], said
    assert not re.search(r"\b(nan|inf|None)\b", said), said


def test_its_trace_is_frozen(name):
    trace = panel(name).trace
    assert dataclasses.is_dataclass(trace) and trace.__dataclass_params__.frozen


def loose_arrays(x, place):
    """Places of arrays in a trace that can be written to: many traces are kept, and shared by all who ask for the same settings."""
    if isinstance(x, np.ndarray):
        return [place] if x.flags.writeable else []
    if dataclasses.is_dataclass(x):
        x = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, (tuple, list)) else ()
    return [found for key, value in items for found in loose_arrays(value, f"{place}.{key}")]


def test_its_arrays_cannot_be_written_to(name):
    fresh = build(name)
    assert loose_arrays(fresh.trace, "trace") == []
    for control in fresh.controls:
        for value in other_values(control)[:2] if control["kind"] == "choice" else ():
            fresh.set({control["name"]: value})
            assert loose_arrays(fresh.trace, "trace") == [], (control["name"], value)


def strings(x):
    """All texts of a picture."""
    if isinstance(x, dict):
        x = list(x.values())
    return [x] if isinstance(x, str) else [s for item in x for s in strings(item)] if isinstance(x, list) else []


def test_no_text_is_taken_for_a_tag(name):
    """plotly leaves out what stands between < and >: a share of "< 0.1 %" before one of "> 99.9 %" would vanish."""
    for _, value, picture, said in [("", "start", panel(name).picture, panel(name).describe()), *moves(name)]:
        texts_drawn = strings(picture) + strings(_with_title(picture, said)["layout"]) if picture else []
        assert [tag for text in texts_drawn for tag in TAG.findall(text) if not TAGS.fullmatch(tag)] == [], value


def test_its_figure_is_a_plotly_figure_of_a_bounded_size(name):
    figure = panel(name).figure
    assert isinstance(figure, go.Figure) and len(figure.data) > 0
    for _, value, picture, _ in [("", "start", panel(name).picture, ""), *moves(name)]:
        assert picture is None or len(json.dumps(picture, separators=(",", ":"))) <= LARGEST, value


def test_a_hatch_on_a_list_of_colors_has_one_color_behind_it(name):
    """Without a bgcolor plotly makes one from the marker's color, and logs "Invalid color specifier" where that is a list."""
    for _, value, picture, _ in [("", "start", panel(name).picture, ""), *moves(name)]:
        for trace in picture["data"] if picture else []:
            marker = trace.get("marker", {})
            if marker.get("pattern", {}).get("shape") and isinstance(marker["color"], list):
                assert isinstance(marker["pattern"].get("bgcolor"), str), value


def test_its_page_needs_no_network(name, tmp_path):
    page = panel(name).to_html(tmp_path / "panel.html").read_text(encoding="utf-8")
    plotly_js = max(re.findall(r"<script[^>]*>(.*?)</script>", page, flags=re.S), key=len)
    rest = page.replace(plotly_js, "")
    assert len(plotly_js) > 1_000_000
    assert not re.search(r"(?:src|href)\s*=\s*['\"]?(?:https?:)?//|@import|url\(", rest)
    assert f"<title>{panel(name).name.split('&')[0][:10]}" in page


def test_its_controls_are_labeled(name):
    controls = panel(name).controls
    labels = [control["label"] for control in controls]
    assert controls and all(label.strip() for label in labels) and len(set(labels)) == len(labels)
    for control in controls:
        options = [text for _, text in control.get("options", ())]
        assert all(text.strip() for text in options) and len(set(options)) == len(options), control["label"]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_its_text_can_be_read(name, theme):
    fresh = build(name)
    fresh.set_state({"dark": theme is DARK})
    seen = [(text[:60], hexed(ink), hexed(ground)) for text, ink, ground in texts(fresh.picture, theme)]
    assert [each for each in seen if contrast(*each[1:]) < READABLE] == []


def test_a_dark_page_shows_the_same_numbers(name):
    fresh = build(name)
    light = [(t.get("x"), t.get("y"), t.get("z")) for t in fresh.picture["data"]]
    fresh.set_state({"dark": True})
    assert [(t.get("x"), t.get("y"), t.get("z")) for t in fresh.picture["data"]] == light
    assert fresh.picture["layout"]["font"]["color"] == DARK.ink


def test_every_control_changes_what_is_seen_or_says_why_not(name):
    start = (panel(name).picture, panel(name).describe())
    for control in panel(name).controls:
        if control["name"] not in panel(name).hidden and len(other_values(control)):
            seen = [(picture, said) for moved, _, picture, said in moves(name) if moved == control["name"]]
            assert any(each != start for each in seen), control["label"]


def test_no_value_breaks_it(name):
    for control, value, picture, said in moves(name):
        assert said and "\n" not in said and "Traceback" not in said, (control, value)
        assert not said.startswith("This panel failed"), (control, value, said)
        assert picture is not None or len(said) <= 400, (control, value)


def test_a_value_out_of_range_is_refused_in_one_sentence(name):
    fresh = build(name)
    before = fresh.picture
    wishes = [("no_such_control", 1)]
    for control in fresh.controls:
        between = [control["low"] + control["step"] / 2] if isinstance(control.get("step"), int) else []
        wrong = {
            "slider": [control.get("high", 0) + 1, control.get("low", 0) - 1, "far", float("nan"), True, *between],
            "player": [-1, 0.5, "end"], "choice": ["no such option", 7],
            "checks": [["no such option"], [["no such option"]], "ab", 3], "text": [5, None],
        }[control["kind"]]  # fmt: skip
        wishes += [(control["name"], value) for value in wrong]
    for control, value in wishes:
        with pytest.raises(ValueError) as error:
            fresh.set({control: value})
        assert "\n" not in str(error.value) and control in str(error.value)
    assert fresh.picture == before


def test_an_argument_of_another_kind_is_named(name):
    for argument in inspect.signature(getattr(k3viz, name)).parameters:
        fits = {"text": "no such thing", "shift": -7}.get(argument)  # some panels read a text only when it is looked at
        for wrong in (w for w in (object(), "no such thing", -7) if w != fits):
            with pytest.raises((TypeError, ValueError), match=argument.removesuffix("s")) as error:
                getattr(k3viz, name)(**{argument: wrong})
            assert "\n" not in str(error.value) and "has no attribute" not in str(error.value)


@pytest.mark.parametrize("size", ["mini", "other heads"])
def test_it_takes_other_models_and_configs(name, size):
    config = K3Config.mini() if size == "mini" else K3Config.meeting()
    if size == "other heads":  # few channels, three heads, Kimi Linear's gate, no latent
        linear = dataclasses.replace(config.linear_attn_config, num_heads=3, head_dim=16, gate_lower_bound=None)
        config = config.replace(linear_attn_config=linear, num_attention_heads=3, routed_expert_hidden_size=None)
    takes = inspect.signature(getattr(k3viz, name)).parameters
    given = {"config": config} if "config" in takes else {}
    if "model" in takes:
        given["model"] = K3ForCausalLM(config.replace(vocab_size=len(meeting.VOCABULARY)), seed=2)
    made = getattr(k3viz, name)(**given)
    for control in made.controls:
        for value in other_values(control)[:2] if control["kind"] not in ("player", "text") else ():
            made.set_state({"values": {**made.values, control["name"]: value}, "asked": made.asked + 1})
            assert not made.problem.startswith("This panel failed"), (control["name"], value, made.problem)
            assert not re.search(r"\b(nan|inf|None)\b", made.describe()), made.describe()
            made.set_state({"values": {**made.values, control["name"]: control["value"]}, "asked": made.asked + 1})


def test_a_stored_output_shows_a_figure_with_its_sentence(name):
    data, _ = panel(name)._repr_mimebundle_()
    assert data["text/plain"] == panel(name).describe()
    stored = data["application/vnd.plotly.v1+json"]
    assert html.unescape(stored["layout"]["title"]["text"].replace("<br>", " ")) == panel(name).describe()
    assert len(json.dumps(stored)) <= LARGEST


CODE = """
import hashlib, json, sys, torch
torch.set_num_threads(1)
import k3viz
panels = {name: getattr(k3viz, name)() for name in sys.argv[1:]}
print(json.dumps({name: hashlib.sha256((json.dumps(p.picture) + p.sentence).encode()).hexdigest() for name, p in panels.items()}))
"""


@cache
def elsewhere():
    """Every panel's picture and sentence, hashed, from another process with another hash seed."""
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE, *PANELS], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_two_builds_are_equal(name):
    here = panel(name)
    assert hashlib.sha256((json.dumps(here.picture) + here.sentence).encode()).hexdigest() == elsewhere()[name]


@pytest.mark.bad_input
@pytest.mark.parametrize("wrong", [[], {}, object()], ids=["list", "dict", "object"])
def test_an_argument_of_the_wrong_kind_is_named(name, wrong):
    """Of the panel, its story and its figure, and never by a message about hashing or iterating."""
    for function in [getattr(k3viz, each, None) for each in (name, name.replace("_panel", "_story"), name.replace("_panel", "_figure"))]:
        for argument in set(inspect.signature(function).parameters) - {"story", "theme"} if function else ():
            try:
                function(**{argument: wrong})
            except (ValueError, TypeError) as error:
                assert argument in str(error), f"{function.__name__}({argument}={wrong!r}): {error}"
