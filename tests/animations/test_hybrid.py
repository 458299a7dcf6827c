"""The hybrid's scenes show what the trained model's run recorded, and follow another text."""

from __future__ import annotations

import re

import pytest
import torch

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations.hybrid import CONTEXT, HybridStack, InferencePath, story_from_environment
from k3viz.hybrid.reading_story import reading_story
from k3viz.theme import format_bytes, format_number, format_probability
from minimodel import K3Config, cache_bytes
from tests.animations.watch import faults, watch, words

pytestmark = pytest.mark.scene
TEXT = "The Acme planning meeting is Tuesday, in room 4B, with six people attending. The meeting has moved to Friday. The meeting is now on"


@pytest.fixture(scope="module")
def told():
    return reading_story(text=TEXT)


@pytest.fixture(scope="module")
def stack(told, tmp_path_factory):
    return watch(type("Told", (HybridStack,), {"story": told}), tmp_path_factory.mktemp("media"), frame_rate=1)


@pytest.fixture(scope="module")
def path(told, tmp_path_factory):
    return watch(type("Told", (InferencePath,), {"story": told}), tmp_path_factory.mktemp("media"), frame_rate=1)


def test_sizes_are_measured_and_agree_with_the_closed_form(told, stack):
    _, frames = stack
    closed = cache_bytes(told.config, len(told.tokens), dtype=torch.float32).total
    assert sum(int(layer.kept[-1]) for layer in told.layers) == closed
    k3, plain = cache_bytes(K3Config.k3(), CONTEXT).total, CONTEXT * 93 * 576 * 2
    for n in (*(int(layer.kept[-1]) for layer in told.layers), k3, plain):
        assert format_bytes(n) in words(frames)
    assert "24 of 93 layers keep every word, 69 keep a fixed state" in words(frames[-1:]).replace("\n", " ")


def test_the_stack_can_be_read(stack):
    scene, frames = stack
    assert not faults(frames)
    assert 10 <= scene.time <= 45
    assert "Friday" in words(frames) and "Thursday" not in words(frames)


def test_the_path_shows_what_was_recorded(told, path):
    scene, frames = path
    shown, held = words(frames), set()
    for layer in told.layers:
        held |= {format_number(w) for _, w in layer.experts} | {format_probability(p) for _, p in layer.said}
        if layer.mixer == "kda":
            held |= {format_number(x) for x in (layer.alpha.min(), layer.alpha.max(), *layer.beta)}
        else:
            held |= {format_probability(x) for x in (*layer.attention.max(-1), *layer.gate.mean(-1))}
    held |= {format_probability(p) for _, p in told.said}
    found = {x.strip() for x in re.findall(r"[<>]? ?\d+\.\d %|\d\.\d\d", shown)}
    assert found and found <= held
    assert "The blank is filled with Friday" in words(frames[-1:]) and "Thursday" not in shown


def test_the_path_can_be_read(path):
    scene, frames = path
    assert not faults(frames)
    assert 10 <= scene.time <= 45


def test_the_environment_changes_the_text(monkeypatch):
    monkeypatch.setenv("K3_UPDATE", "Friday")
    assert story_from_environment().answer[0] == "Friday"
    monkeypatch.setenv("K3_UPDATE", "Caturday")
    with pytest.raises(ValueError, match="^K3_UPDATE must be a day"):
        story_from_environment()
    monkeypatch.setenv("K3_TEXT", "The room is 4B. The room is")
    assert story_from_environment().tokens[-1] == "is"
