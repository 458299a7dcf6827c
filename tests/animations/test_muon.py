"""The optimizer scene shows its trace, follows it, and can be read."""

from __future__ import annotations

import numpy as np
import pytest

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations.charts import Bars
from animations.grids import Grid
from animations.muon import PerHeadMuon, story_from_environment
from k3viz.muon.story import MUON_STEPS
from k3viz.theme import format_digits
from tests.animations.watch import faults, numbers, watch, words

pytestmark = [pytest.mark.scene, pytest.mark.filterwarnings("ignore:'mode' parameter:DeprecationWarning")]  # manim's own use of Pillow


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("K3_STRENGTH", "30")
        told = story_from_environment()
    return told, *watch(type("Told", (PerHeadMuon,), {"story": told}), tmp_path_factory.mktemp("media"))


def test_every_number_on_screen_is_in_the_trace(watched):
    told, _, frames = watched
    rows = (told.gradient, told.whole_update[MUON_STEPS], told.head_update[MUON_STEPS])
    bars = {format_digits(x) for row in rows for x in row}
    ratios = {format_digits(told.ratio(MUON_STEPS, per_head)) for per_head in (False, True)}
    shown = numbers(frames) - {"2.5"}  # the report's section
    assert {n for n in bars if "." in n} <= shown <= bars | ratios
    assert "30 times the gradient" in words(frames).replace("\n", " ") and "chosen" in words(frames)


def test_bars_and_matrices_are_the_traces(watched):
    told, scene, _ = watched
    found = list({id(m): m for m in scene.get_mobject_family_members() if isinstance(m, Bars)}.values())
    rows = (told.gradient, told.whole_update[MUON_STEPS], told.head_update[MUON_STEPS])
    for bars, row in zip(sorted(found, key=lambda bars: bars.left), rows, strict=True):
        assert [bar.width for bar in bars.bars] == pytest.approx(row * bars.unit, abs=2e-3)
    grids = list({id(m): m for m in scene.get_mobject_family_members() if isinstance(m, Grid)}.values())
    columns = [np.concatenate([g.matrix for g in sorted(grids, key=lambda g: -g.get_y()) if g.get_x() == pytest.approx(x)])
               for x in sorted({round(g.get_x(), 6) for g in grids})]  # fmt: skip
    for drawn, matrix in zip(columns, (told.gradient_matrix, told.whole_matrix, told.head_matrix), strict=True):
        assert (drawn == matrix).all()


def test_the_matrices_have_the_sizes_of_the_bars(watched):
    told = watched[0]
    for matrix, sizes in ((told.gradient_matrix, told.gradient), (told.whole_matrix, told.whole_update[MUON_STEPS]),
                          (told.head_matrix, told.head_update[MUON_STEPS])):  # fmt: skip
        assert np.sqrt((matrix.reshape(told.shape) ** 2).mean((1, 2))) == pytest.approx(sizes)


def test_it_can_be_read(watched):
    _, scene, frames = watched
    assert not faults(frames)
    assert 10 <= scene.time <= 45 and "Head by head, the head with" in words(frames[-1:])


def test_a_wrong_strength_is_refused(monkeypatch):
    for wrong in ("loud", "2000"):
        monkeypatch.setenv("K3_STRENGTH", wrong)
        with pytest.raises(ValueError, match="strength|K3_STRENGTH"):
            story_from_environment()
