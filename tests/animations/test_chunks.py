"""The chunk scene shows what the trace computed both ways."""

from __future__ import annotations

import re

import numpy as np
import pytest

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations.chunks import ChunkwiseKDA
from animations.grids import Grid
from k3viz import chunks_story
from k3viz.theme import format_digits
from tests.animations.watch import faults, watch, words

pytestmark = pytest.mark.scene
TEXT = "The Acme planning meeting is Friday, in room 4B. Lunch is at noon. Please bring the slides."


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    told = chunks_story(text=TEXT, chunk=8, head=(1, 1))
    return told, *watch(type("Told", (ChunkwiseKDA,), {"story": told}), tmp_path_factory.mktemp("media"), frame_rate=1)


def test_the_pictures_end_with_the_outputs_of_both_ways(watched):
    told, scene, _ = watched
    shown = [m.matrix for m in {id(m): m for m in scene.get_mobject_family_members() if isinstance(m, Grid)}.values()]
    for outputs in (told.reference, told.outputs):
        assert any(np.array_equal(x, outputs.T) for x in shown)
    assert any(np.array_equal(x, told.inverse[1]) for x in shown)


def test_numbers_are_the_traces(watched):
    told, _, frames = watched
    n, T = len(told.bounds), len(told.tokens)
    end = words(frames[-1:]).replace("\n", " ")
    assert (n, T) == (3, 21)
    assert f"in {n} steps instead of {T}" in end
    assert format_digits(told.errors.max()) in end and format_digits(told.work / told.loop_work, digits=3) in end
    ranges = [(int(a) - 1, int(b)) for a, b in re.findall(r"^(\d+) to (\d+)$", words(frames), re.M)]
    assert ranges == list(told.bounds)


def test_it_can_be_read(watched):
    _, scene, frames = watched
    assert not faults(frames)
    assert 10 <= scene.time <= 45


def test_outputs_that_are_not_numbers_are_refused(tmp_path):
    told = chunks_story(gate="softplus", shift=8.0)
    with pytest.raises(ValueError, match="^story: 64 of 64 outputs are not numbers"):
        watch(type("Told", (ChunkwiseKDA,), {"story": told}), tmp_path, frame_rate=1)
