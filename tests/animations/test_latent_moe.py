"""The experts scene shows its trace, follows it, and can be read."""

from __future__ import annotations

import numpy as np
import pytest

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations.charts import ExpertGrid
from animations.latent_moe import StableLatentMoE
from k3viz.experts.journey_story import journey_story
from k3viz.theme import format_number
from tests.animations.watch import faults, numbers, watch, words

pytestmark = [pytest.mark.scene, pytest.mark.filterwarnings("ignore:'mode' parameter:DeprecationWarning")]  # manim's own use of Pillow


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    told = journey_story(text="The room is now 4B.")
    return told, *watch(type("Told", (StableLatentMoE,), {"story": told}), tmp_path_factory.mktemp("media"))


def test_every_number_on_screen_is_in_the_trace(watched):
    told, _, frames = watched
    held = {format_number(x) for x in (told.weights[-1, 0], told.weights[-1, -1], told.summed[-1], told.normed[-1])}
    assert held <= numbers(frames) <= held | {"2.78"}
    shown = words(frames)
    for said in ("16 of 896 experts", "7,168", "3,584", "2 shared experts", "untrained", f"{told.awake(5)} of 896 experts"):
        assert said in shown


def test_the_grid_ends_with_the_experts_of_all_words(watched):
    told, scene, _ = watched
    grid = next(m for m in scene.get_mobject_family_members() if isinstance(m, ExpertGrid))
    assert grid.rows * grid.columns == 896
    lit = np.flatnonzero(np.abs(grid.colors - grid.colors[grid.colors.sum(1).argmax()]).sum(1) > 1)
    assert set(lit) == set(told.indices.flat)
    left, top, width, height = grid.box
    for expert in lit[:20]:  # the middle of a cell, in the picture that is on the stage
        x, y = grid.place(expert)
        row, column = int((top - y) / height * grid.image.pixel_array.shape[0]), int((x - left) / width * grid.image.pixel_array.shape[1])
        assert grid.image.pixel_array[row, column, :3] == pytest.approx(grid.colors[expert], abs=1)


def test_it_follows_the_story_and_can_be_read(watched):
    _, scene, frames = watched
    assert "4B." in words(frames) and "Thursday." not in words(frames)
    assert "A word pays for 16 + 2 experts, not for 896" in words(frames[-1:]).replace("\n", " ")
    assert not faults(frames)
    assert 10 <= scene.time <= 45


def test_a_sentence_that_does_not_fit_says_so(tmp_path):
    told = journey_story(text="one two three four five six seven eight nine ten eleven twelve")
    with pytest.raises(ValueError, match="^story: the sentence"):
        watch(type("Told", (StableLatentMoE,), {"story": told}), tmp_path)
