"""The scenes about forgetting show their traces, follow them, and can be read."""

from __future__ import annotations

import re

import pytest

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations.decay import BoundedDecay, DecayDials, story_from_environment
from k3viz import chunks_story, decay_story
from k3viz.chunks.story import power
from k3viz.decay.story import equal_dial, tokens_text
from k3viz.theme import format_probability
from minimodel import load_pretrained
from tests.animations.watch import faults, watch, words

pytestmark = pytest.mark.scene
TEXT = "The Acme planning meeting is Friday, in room 4B. Lunch is at noon. Please bring the slides. The coffee machine is broken."


@pytest.fixture(scope="module")
def dials(tmp_path_factory):
    told = decay_story(text=TEXT, one_half_life=5.0)
    return told, *watch(type("Told", (DecayDials,), {"story": told}), tmp_path_factory.mktemp("media"), frame_rate=1)


def test_what_is_kept_is_what_the_traces_say(dials):
    told, _, frames = dials
    learned = decay_story(text=TEXT, model=load_pretrained())
    learned = decay_story(text=TEXT, model=load_pretrained(), one_half_life=equal_dial(learned))
    slow = decay_story(text=TEXT, one_half_life=equal_dial(told))
    kept = set()
    for story, ways in ((told, (True, False)), (slow, (True,)), (learned, (True, False))):
        for one in ways:
            facts = [float(story.kept(-1, one=one)[i]) for i, fact in enumerate(story.facts) if fact]
            kept |= {format_probability(x) for x in (*facts, *story.kept_by_kind(-1, one=one))}
    shown = set(re.findall(r"[<>]? ?\d+\.\d %", words(frames)))
    assert shown and {x.strip() for x in shown} <= kept
    for story, one in ((told, False), (slow, True), (learned, False), (learned, True)):
        assert format_probability(story.kept_by_kind(-1, one=one)[1]) in words(frames[-1:])


@pytest.mark.parametrize("model", [None, load_pretrained()], ids=["by hand", "learned"])
def test_the_equal_dial_keeps_as_much_of_the_facts(model):
    told = decay_story(text=TEXT, model=model)
    beside = decay_story(text=TEXT, model=model, one_half_life=equal_dial(told))
    assert beside.kept_by_kind(-1, one=True)[0] == pytest.approx(told.kept_by_kind(-1)[0], abs=1e-9)
    with pytest.raises(ValueError, match="^text: it states no fact"):
        equal_dial(decay_story(text="Lunch is at noon."))


def test_half_lives_are_the_traces(dials):
    told, _, frames = dials
    lives = told.half_lives(-1)
    assert f"128 dials: half-lives {tokens_text(lives.min())} to {tokens_text(lives.max())} words" in words(frames)
    assert "half-life 5 words" in words(frames)


def test_dials_can_be_read_and_follow_the_note(dials):
    _, scene, frames = dials
    assert not faults(frames)
    assert 10 <= scene.time <= 45
    assert "Friday" in words(frames) and "Tuesday" not in words(frames)


def test_a_note_without_a_fact_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("K3_TEXT", "Lunch is at noon.")
    with pytest.raises(ValueError, match="^text: this scene needs"):
        watch(DecayDials, tmp_path, frame_rate=1)


@pytest.fixture(scope="module")
def bounded(tmp_path_factory):
    told = chunks_story(text=TEXT, chunk=12, head=(0, 1))
    return told, *watch(type("Told", (BoundedDecay,), {"story": told}), tmp_path_factory.mktemp("media"), frame_rate=1)


def test_the_gates_reach_what_the_traces_reach(bounded):
    told, _, frames = bounded
    other = chunks_story(text=TEXT, chunk=12, head=(0, 1), gate="softplus")
    shown = set(re.findall(r"(?<=e\^)\d+[\d.]*(?<!\.)", words(frames)))
    assert shown == {power(x) for x in (told.limit, told.reach[11], other.reach[11])}
    assert "12 × 5 = 60." in words(frames) and "a tile of 12 words always fits float32" in words(frames[-1:])


def test_bounded_can_be_read(bounded):
    _, scene, frames = bounded
    assert not faults(frames)
    assert 10 <= scene.time <= 45


def test_an_unbounded_story_is_refused(tmp_path):
    told = chunks_story(text=TEXT, gate="softplus")
    with pytest.raises(ValueError, match="^story: this scene compares"):
        watch(type("Told", (BoundedDecay,), {"story": told}), tmp_path, frame_rate=1)


def test_a_teachers_half_life_is_taken_or_named(monkeypatch):
    monkeypatch.setenv("K3_HALF_LIFE", "5")
    assert story_from_environment().one_half_life == 5.0
    monkeypatch.setenv("K3_HALF_LIFE", "a while")
    with pytest.raises(ValueError, match="^K3_HALF_LIFE must be a number of words, got 'a while'$"):
        story_from_environment()
