"""The balancing scene shows its trace, follows it, and can be read."""

from __future__ import annotations

import re

import pytest

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations.charts import Bars
from animations.quantile_balancing import QuantileBalancing, story_from_environment
from k3viz import balancing_story
from k3viz.theme import ROLES
from tests.animations.watch import faults, watch, words

pytestmark = pytest.mark.scene
OWN = "32 12 5; 16 31 7; 14 21 5; 30 2 9; 28 8.5 6; 27 1 3"


@pytest.fixture(scope="module", params=["the report's", "a teacher's"])
def watched(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "the report's":
            patch.setenv("K3_SCORES", OWN)
        told = story_from_environment()
    return told, *watch(type("Told", (QuantileBalancing,), {"story": told}), tmp_path_factory.mktemp("media"))


def test_it_counts_the_loads_that_the_trace_holds(watched):
    told, _, frames = watched
    shown, m = words(frames), len(told.scores)
    for loads in (told.loads_before, told.loads_after):
        assert sum(loads) == m and ", ".join(map(str, loads)) in shown
    assert ("bars of the K3 report's Figure 5" in shown) == (told.loads_before == (4, 3, 1, 0))
    assert ("chosen by hand" in shown) == (told.loads_before != (4, 3, 1, 0))
    if told.loads_before == (4, 3, 1, 0):
        assert told.loads_after == (2, 2, 2, 2) and "cut-off 22" in shown


def test_every_score_on_screen_is_in_the_trace(watched):
    told, _, frames = watched
    alone = {text.words for frame in frames for text in frame if re.fullmatch(r"[\d.]+", text.words)}
    assert alone == {f"{s:.0f}" if s == int(s) else f"{s:.2f}" for s in told.scores.flat}


def test_it_ends_with_the_bars_of_the_last_routing(watched):
    told, scene, _ = watched
    columns = sorted({id(m): m for m in scene.get_mobject_family_members() if isinstance(m, Bars)}.values(), key=lambda bars: bars.left)
    for e, column in enumerate(columns):
        assert [bar.width for bar in column.bars] == pytest.approx(told.scores[:, e] * column.unit, abs=2e-3)
        lit = [t for t, bar in enumerate(column.bars) if bar.get_fill_color().to_hex().lower() == ROLES["memory"]]
        assert lit == [t for t in range(len(told.scores)) if e in told.after[t]]


def test_it_can_be_read(watched):
    _, scene, frames = watched
    assert not faults(frames)
    assert 10 <= scene.time <= 45 and "nothing to tune" in words(frames[-1:])


def test_what_can_not_be_drawn_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("K3_SCORES", "1 2; 3 x")
    with pytest.raises(ValueError, match="^K3_SCORES must be rows of numbers"):
        story_from_environment()
    with pytest.raises(ValueError, match="^story: the drawn table has room for 8 tokens, got 9"):
        watch(type("Told", (QuantileBalancing,), {"story": balancing_story(scores=[[1, 2]] * 9)}), tmp_path)
