"""The scenes of published facts show the facts, follow their stories, and can be read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from manim import Square

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations.charts import Bars
from animations.evidence import Lineage, ProveItSmall, TwinResults
from k3viz import lineage_story
from k3viz.evidence.published_story import sizes_story, twins_story
from minimodel.facts import Table
from tests.animations.watch import faults, numbers, watch, words

pytestmark = pytest.mark.scene


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    told = twins_story()
    changed = replace(told.contests[3], values=(70.0, 90.5), texts=("70.0", "90.5"))
    told = replace(told, contests=(*told.contests[:3], changed, told.contests[4]))
    return told, *watch(type("Told", (TwinResults,), {"story": told}), tmp_path_factory.mktemp("media"))


def test_twins_show_every_outcome_and_nothing_else(twins):
    told, scene, frames = twins
    shown = words(frames)
    for contest in told.contests:
        assert all(text in shown for text in contest.texts) and contest.claim in shown
    assert "90.5" in shown and "84.3" not in shown and "Published, not measured here" in shown and "arXiv 2510.26692" in shown
    held = {n for c in told.contests for text in (*c.texts, c.said, c.source) for n in text.replace(",", "").split()}
    held |= {f"{x:.1f}" for x in told.average} | {"1.4"}
    assert numbers(frames) <= {n.rstrip(".") for n in held}
    assert not faults(frames) and 10 <= scene.time <= 45
    assert "54.5" in words(frames[-1:]) and "52.2" in words(frames[-1:])


def test_twins_bars_are_as_long_as_their_values(twins):
    told, scene, _ = twins
    bars = sorted({id(m): m for m in scene.get_mobject_family_members() if isinstance(m, Bars)}.values(), key=lambda b: -b.ys[0])
    for drawn, contest in zip(bars, told.contests, strict=True):
        a, b = (bar.width for bar in drawn.bars)
        assert a / b == pytest.approx(contest.values[0] / contest.values[1], rel=1e-6)


def test_areas_are_to_scale_and_follow_the_story(tmp_path):
    told = sizes_story()
    told = replace(told, models=(*told.models[:2], replace(told.models[2], total=4e12)), times=83)
    scene, frames = watch(type("Told", (ProveItSmall,), {"story": told}), tmp_path)
    squares = [m for m in scene.get_mobject_family_members() if isinstance(m, Square)]
    areas = sorted(square.width**2 for square in squares)
    sizes = sorted(n for model in told.models for n in (model.total, model.active))
    assert [a / areas[-1] for a in areas] == pytest.approx([n / sizes[-1] for n in sizes], rel=1e-6)
    shown = words(frames)
    assert "83 times" in shown and "4T, 104B active" in shown and "48B, 3B active" in shown and "arXiv 2607.24653" in shown
    assert not faults(frames) and 10 <= scene.time <= 45 and "83 times its size" in words(frames[-1:]).replace("\n", " ")


def test_every_component_stands_with_its_ancestors_and_source(tmp_path):
    told = lineage_story()
    mine = ("Pocket attention", "fits anywhere", "Multi-head attention (2017)", "a test")
    told = replace(told, components=Table(told.components.columns, (*told.components.rows[:-1], mine), "", ""))
    scene, frames = watch(type("Told", (Lineage,), {"story": told}), tmp_path, frame_rate=1)
    shown = words(frames).replace("\n", " ").replace("\xa0", " ")
    for row in told.components.rows:
        for text in row:
            assert all(word in shown for word in text.replace(";", "").split()), text
        assert row[0] in words(frames[-1:])
    assert "Pocket attention" in shown and "prefix cache" not in shown
    assert f"Not one of the {len(told.components.rows)} is new from nothing" in words(frames[-1:]).replace("\n", " ")
    assert not faults(frames) and 10 <= scene.time <= 45
