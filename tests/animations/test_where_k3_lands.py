"""The benchmark chart shows the report's numbers, follows its story, and can be read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from manim import Dot, Square

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations.serving import WhereK3Lands
from k3viz import benchmarks_story
from minimodel.facts import Table
from tests.animations.watch import faults, watch, words

pytestmark = pytest.mark.scene


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    told = benchmarks_story()
    changed = Table(("model", "score"), (("Fable 5", 80.0), ("Opus 4.8", 60.0), ("Kimi K3", 40.0)), "points", "")
    told = replace(told, tables=told.tables | {"ProgramBench": changed}, ranks=told.ranks | {"ProgramBench": 3})
    return told, *watch(type("Told", (WhereK3Lands,), {"story": told}), tmp_path_factory.mktemp("media"))


def test_every_benchmark_shows_the_score_and_the_leader(watched):
    told, _, frames = watched
    end = {text.words: text for text in frames[-1]}
    for name, table in told.tables.items():
        row = [text.words for text in frames[-1] if abs((text.bottom + text.top) / 2 - (end[name].bottom + end[name].top) / 2) < 0.12]
        own = dict(table.rows)["Kimi K3"]
        assert {name, f"{own:,}" if table.unit == "Elo" else f"{own:.1f}", table.rows[0][0]} == set(row)
    assert "Published: Kimi K3 technical report (arXiv 2607.24653), Figure 1" in words(frames)


def test_the_counts_follow_the_ranks(watched):
    told, _, frames = watched
    first, second = (sum(rank == k for rank in told.ranks.values()) for k in (1, 2))
    shown = words(frames)
    assert f"First in {first} of 12." in shown and f"Second in {second} of 12." in shown and (first, second) == (3, 6)
    closing = words(frames[-1:]).replace("\n", " ")
    assert f"first in {first} of 12 benchmarks, first or second in {first + second}" in closing


def test_the_marks_stand_at_the_shares(watched):
    told, scene, _ = watched
    marks = [m for m in scene.get_mobject_family_members() if isinstance(m, (Dot, Square)) and m.get_y() < 3.2]
    assert len(marks) == sum(len(table.rows) for table in told.tables.values())
    shares = sorted(score / table.rows[0][1] for table in told.tables.values() for _, score in table.rows)
    low, high, ends = shares[0], shares[-1], (WhereK3Lands.LOW, WhereK3Lands.BEST)
    places = [ends[0] + (share - low) / (high - low) * (ends[1] - ends[0]) for share in shares]
    assert sorted(m.get_x() for m in marks) == pytest.approx(places)
    assert sum(isinstance(m, Square) for m in marks) == len(told.tables)


def test_it_can_be_read(watched):
    _, scene, frames = watched
    assert not faults(frames)
    assert 10 <= scene.time <= 45
