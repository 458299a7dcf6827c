"""What every panel owes its learners. Panels are discovered from k3viz, so a new one is covered as soon as it is registered."""
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import plotly.graph_objects as go
import pytest

import k3viz
from k3viz.theme import DARK, LIGHT, contrast
from tests.k3viz.picture_colors import hexed, texts

ROOT = Path(__file__).resolve().parents[2]
PANELS = sorted(name for name in k3viz.__all__ if name.endswith("_panel"))
LARGEST = 300_000  # bytes of a picture as JSON
READABLE = 4.5  # WCAG AA
HOSTILE = ("", "   ", "?" * 5000, "ünï ∑ 語 🙂", "<b>bold", "no such thing", ";:,", "\x00")  # what may be typed into a text field

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


def test_its_figure_is_a_plotly_figure_of_a_bounded_size(name):
    figure = panel(name).figure
    assert isinstance(figure, go.Figure) and len(figure.data) > 0
    for _, value, picture, _ in [("", "start", panel(name).picture, ""), *moves(name)]:
        assert picture is None or len(json.dumps(picture, separators=(",", ":"))) <= LARGEST, value


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
        wrong = {"slider": [control.get("high", 0) + 1, control.get("low", 0) - 1, "far", float("nan"), True], "player": [-1, 0.5, "end"],
                 "choice": ["no such option", 7], "checks": [["no such option"], "ab", 3], "text": [5, None]}[control["kind"]]
        wishes += [(control["name"], value) for value in wrong]
    for control, value in wishes:
        with pytest.raises(ValueError) as error:
            fresh.set({control: value})
        assert "\n" not in str(error.value) and control in str(error.value)
    assert fresh.picture == before


def test_a_stored_output_shows_a_figure_with_its_sentence(name):
    data, _ = panel(name)._repr_mimebundle_()
    assert data["text/plain"] == panel(name).describe()
    stored = data["application/vnd.plotly.v1+json"]
    assert stored["layout"]["title"]["text"].replace("<br>", " ") == panel(name).describe()
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
