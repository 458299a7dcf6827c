"""The published stories hold the facts, and what they call less, faster and larger is so."""

from __future__ import annotations

import pytest

from k3viz.evidence.published_story import sizes_story, twins_story
from minimodel import K3Config, facts, parameter_budget


def test_every_contest_is_published_and_says_where():
    told, linear = twins_story(), facts.KimiLinear
    assert [c.values for c in told.contests] == [
        (1.0, 0.25), (linear.tpot_twin.value, linear.tpot_hybrid.value), (1.0, 3.98),
        (linear.ruler_128k_twin.value, linear.ruler_128k.value), (47.2, 51.0),
    ]  # fmt: skip
    assert all("arXiv 2510.26692" in c.source for c in told.contests)
    for contest in told.contests:
        assert all(float(text.split()[0]) in (value, 100 * value) for text, value in zip(contest.texts, contest.values, strict=True))


def test_the_claims_follow_from_the_numbers():
    told = twins_story()
    times = told.contests[1]
    assert times.values[0] / times.values[1] == pytest.approx(facts.KimiLinear.tpot_speedup.value, abs=0.1)
    assert told.average == (52.2, 54.5) and told.tests == 8
    means = [sum(row[i] for row in facts.KimiLinear.long_context.rows[:-1]) / told.tests for i in (1, -1)]
    assert told.average == pytest.approx(means, abs=0.06)


def test_the_sizes_are_those_of_the_configs():
    told = sizes_story()
    assert [m.month for m in told.models] == sorted(m.month for m in told.models)
    linear, k3 = told.models[told.testbed], told.models[-1]
    assert told.times == round(k3.total / linear.total)
    for size, config in ((linear, K3Config.kimi_linear_48b()), (k3, K3Config.k3())):
        budget = parameter_budget(config)
        assert budget.total == pytest.approx(size.total, rel=0.03) and budget.active == pytest.approx(size.active, rel=0.1)
    assert str(told.times) in told.sentence and "2.78T" in told.sentence
