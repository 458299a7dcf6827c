"""The one-word scene shows what the operator does with that word."""

from __future__ import annotations

import pytest
import torch

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations.kda_step import KDAStep
from k3viz import whiteboard_story
from k3viz.theme import format_number
from k3viz.whiteboard.story import position
from minimodel import kda
from tests.animations.watch import faults, numbers, watch, words

pytestmark = pytest.mark.scene


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    told = whiteboard_story(update=("meeting day", "Friday"), alpha=0.9)
    return told, *watch(type("Told", (KDAStep,), {"story": told}), tmp_path_factory.mktemp("media"))


def step(told):
    """(held, correction, output) of the last word, by the operator."""
    before = torch.tensor(told.frame(position(len(told.writes) - 2, "write")).state)
    k, v = (torch.tensor(x[labels.index(name)]) for x, labels, name in ((told.keys, told.rows, told.writes[-1].row),
                                                                       (told.values, told.words, told.writes[-1].word)))  # fmt: skip
    g, beta = torch.full_like(k, told.alpha).log(), torch.full((1, 1, 1), told.beta, dtype=k.dtype)
    token = [x[None, None, None] for x in (k, k, v, g)]
    out, _ = kda(*token, beta, scale=1.0, initial_state=before[None, None])
    held, _ = kda(*token, 0 * beta, scale=1.0, initial_state=before[None, None])
    return [x.numpy() for x in (held[0, 0, 0], v - held[0, 0, 0], out[0, 0, 0])]


def test_the_operator_gives_what_the_story_answers(watched):
    told = watched[0]
    _, _, out = step(told)
    assert told.answer("meeting day") == pytest.approx(out, abs=1e-12)
    assert told.words_in(out)[0][0] == "Friday"


def test_every_number_on_screen_is_computed(watched):
    told, _, frames = watched
    computed = {format_number(x) for vector in step(told) for _, x in told.words_in(vector)}
    before = {format_number(x) for _, x in told.says("meeting day", position(len(told.writes) - 2, "write"))}
    shown = numbers(frames)
    assert computed <= shown <= computed | before | {format_number(told.alpha), format_number(told.beta)}


def test_a_write_too_faint_to_be_seen_is_refused(tmp_path):
    with pytest.raises(ValueError, match="^story: beta = 0.004 is too small"):
        watch(type("Told", (KDAStep,), {"story": whiteboard_story(beta=0.004)}), tmp_path, frame_rate=1)


def test_it_follows_the_story_and_can_be_read(watched):
    _, scene, frames = watched
    assert "Friday" in words(frames) and "Thursday" not in words(frames)
    assert "meeting day now says Friday" in words(frames[-1:]).replace("\n", " ")
    assert not faults(frames)
    assert 10 <= scene.time <= 45
