"""The four-bit scene shows its trace, follows it, and can be read."""

from __future__ import annotations

import numpy as np
import pytest
from manim import Dot

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations.four_bit import LEFT, RIGHT, FourBitWeights, story_from_environment
from k3viz import four_bit_story
from k3viz.theme import format_probability
from tests.animations.watch import faults, numbers, watch, words

pytestmark = pytest.mark.scene


@pytest.fixture(scope="module", params=[None, "3"])
def watched(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setenv("K3_OUTLIER", request.param)
        told = story_from_environment()
    return told, *watch(type("Told", (FourBitWeights,), {"story": told}), tmp_path_factory.mktemp("media"))


def test_every_number_on_screen_is_in_the_trace(watched):
    told, _, frames = watched
    errors = {format_probability(x).split()[0] for x in (told.losses[0], told.losses.min())}
    assert errors | {"4.25"} == {n for n in numbers(frames) if n != "4.1"}  # the report's section
    assert "15 places" in words(frames) and "17 B instead of 64 B" in words(frames).replace("\n", " ")
    assert ("2⁻⁴" in words(frames)) == (told.exponent == -4)


def test_the_dots_end_on_the_best_trained_weights(watched):
    told, scene, _ = watched
    dots = sorted({id(m): m for m in scene.get_mobject_family_members() if isinstance(m, Dot)}.values(), key=lambda dot: -dot.get_y())
    weights = told.trained[told.best()]
    limit = max(np.abs(told.weights).max(), np.abs(told.grid).max(), np.abs(told.trained).max())
    assert [dot.get_x() for dot in dots] == pytest.approx(LEFT + (weights / limit + 1) / 2 * (RIGHT - LEFT))
    assert set(np.round(weights, 9)) <= set(np.round(told.grid, 9))


def test_it_can_be_read(watched):
    _, scene, frames = watched
    assert not faults(frames)
    assert 10 <= scene.time <= 45 and "rounded afterwards, the output is off by" in words(frames[-1:]).replace("\n", " ")


def test_no_training_and_a_wrong_outlier(monkeypatch, tmp_path):
    told = four_bit_story(steps=0)
    _, frames = watch(type("Told", (FourBitWeights,), {"story": told}), tmp_path, frame_rate=1)
    assert "0 weights left" in words(frames) and not faults(frames)
    for wrong in ("big", "1000"):
        monkeypatch.setenv("K3_OUTLIER", wrong)
        with pytest.raises(ValueError, match="outlier|K3_OUTLIER"):
            story_from_environment()
