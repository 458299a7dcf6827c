"""The Gated MLA scene shows what the layer computes with the notes it is given."""

from __future__ import annotations

import re

import numpy as np
import pytest

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations.gated_mla import Gate, GatedMLA, story_from_environment
from animations.grids import Grid
from k3viz import mla_story
from k3viz.mla.story import NOTES
from k3viz.theme import format_number, format_probability
from tests.animations.watch import faults, watch, words

pytestmark = pytest.mark.scene


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    told = mla_story(notes=(*NOTES[:-1], ("day", "Friday")))
    return told, *watch(type("Told", (GatedMLA,), {"story": told}), tmp_path_factory.mktemp("media"), frame_rate=1)


def parts(scene, kind):
    return list({id(m): m for m in scene.get_mobject_family_members() if isinstance(m, kind)}.values())


def test_cards_and_gates_are_the_layers(watched):
    told, scene, _ = watched
    shown = [m.matrix[0] for m in parts(scene, Grid)]
    assert len(shown) == len(told.tokens) and all(any(np.array_equal(x, card) for x in shown) for card in told.latent)
    openings = [gate.opening for gate in sorted(parts(scene, Gate), key=lambda gate: gate.get_x())]
    assert openings == pytest.approx(told.gate[-1].mean(-1))


def test_every_number_is_computed(watched):
    told, _, frames = watched
    told_by = [told, *(mla_story(notes=(*NOTES[:-1], ("day", "Friday")), slot="room", gate=gate) for gate in ("learned", "open"))]
    held = {format_probability(x) for story in told_by for x in (*story.gate[-1].mean(-1), story.reads(1)[1])}
    held |= {format_number(x) for story in told_by for _, x in story.answers[-1]}
    shown = set(re.findall(r"[<>]? ?\d+\.\d %|\d\.\d\d", words(frames)))
    assert shown and {x.strip() for x in shown} <= held
    assert f"{5 * told.latent.shape[1]} numbers kept" in words(frames)


def test_it_follows_the_notes_and_can_be_read(watched):
    _, scene, frames = watched
    assert "Friday" in words(frames[-1:]) and "Thursday" not in words(frames)
    assert not faults(frames)
    assert 10 <= scene.time <= 45


def test_the_environment_changes_the_notes(monkeypatch):
    monkeypatch.setenv("K3_UPDATE", "Friday")
    assert story_from_environment().tokens[-2:] == ("day: Friday", "day?")
    monkeypatch.setenv("K3_FACTS", "client: Globex; room: 2A")
    monkeypatch.setenv("K3_UPDATE", "7C")
    told = story_from_environment()
    assert told.tokens == ("client: Globex", "room: 2A", "room: 7C", "room?") and told.answers[-1][0][0] == "7C"


@pytest.mark.parametrize(
    "notes", [[], [("day", "Tuesday")], [("day", "Tuesday"), ("day",)], [("day", "Tuesday"), "day"], [("d", "x")] * 16]
)
def test_notes_that_are_none_are_refused(notes):
    with pytest.raises(ValueError, match="^notes must be 2 to 15"):
        mla_story(notes=notes)
