"""Balancing: the report's example goes from 4, 3, 1, 0 to 2, 2, 2, 2, cut-offs never weigh, and three rules race on one stream."""
import numpy as np
import pytest
import torch

from k3viz import balancing_figure, balancing_panel, balancing_story
from k3viz.balancing.race import EXPERTS, STEPS, TOKENS, balancing_race, batch, router
from k3viz.balancing.story import CUTOFFS, LENGTHS, SCALE
from k3viz.theme import DARK
from minimodel import quantile_bias, route

S = np.array(LENGTHS, dtype=float)


def brute_force(scores, cutoffs):
    """Where each token's score lies highest above the cut-off, by hand."""
    return [max(range(scores.shape[1]), key=lambda j: row[j] - cutoffs[j]) for row in scores]


@pytest.mark.parametrize("how", ["figure", "rule"])
def test_the_reports_example_becomes_even(how):
    story = balancing_story(how=how)
    assert story.loads_before == (4, 3, 1, 0) and story.loads_after == (2, 2, 2, 2)
    assert [t + 1 for t in story.moved] == [3, 5, 7]
    assert story.after[:, 0].tolist() == brute_force(S, story.cutoffs)
    assert story.before[:, 0].tolist() == S.argmax(1).tolist()


def test_the_figures_lines_are_the_third_largest_scores():
    assert balancing_story(how="figure").cutoffs.tolist() == np.sort(S, 0)[::-1][2].tolist() == [22, 21, 13, 12]


def test_the_rules_lines_leave_the_share_of_margins_above_and_are_minimodels_bias():
    story = balancing_story(how="rule")
    second = np.sort(S, 1)[:, -2:-1]
    np.testing.assert_allclose(story.margins, S - second)
    np.testing.assert_allclose(story.cutoffs, np.sort(S - second, 0)[::-1][2])
    assert story.above == (2, 2, 2, 2)
    bias = quantile_bias(torch.tensor(S / SCALE), torch.zeros(4, dtype=torch.float64), 1)
    np.testing.assert_allclose(story.bias, bias, atol=1e-12)
    np.testing.assert_allclose(story.bias * SCALE, (-2.75, -2.75, 3.25, 2.25), atol=1e-9)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_cut_offs_choose_and_never_weigh(top_k):
    story = balancing_story(how="rule", top_k=top_k)
    chosen = np.take_along_axis(S / SCALE, story.after, 1)
    expected = chosen if top_k == 1 else chosen / chosen.sum(1, keepdims=True)
    np.testing.assert_allclose(story.weights, expected, atol=1e-12)


def test_only_differences_between_cut_offs_count():
    one, two = (balancing_story(how="hand", cutoffs=[c + shift for c in (22, 21, 13, 12)]) for shift in (0.0, -17.5))
    assert one.after.tolist() == two.after.tolist()
    np.testing.assert_allclose(one.bias, two.bias)


def test_the_sentence_names_loads_and_the_weight_that_stays():
    said = balancing_story().sentence
    assert "4, 3, 1, 0 into 2, 2, 2, 2" in said and "t3, t5, t7 move" in said and "weight 0.50" in said and "never weigh" in said
    assert "loads 4, 3, 1, 0" in balancing_story(how="none").sentence


@pytest.mark.parametrize("bad, name", [
    ({"scores": [[1, 2], [3]]}, "scores"), ({"scores": [[1.0, 99.0]] * 3}, "scores"), ({"scores": [[1.0, float("nan")]] * 3}, "scores"),
    ({"scores": [[1.0] * 7] * 3}, "scores"), ({"scores": "abc"}, "scores"), ({"scale": 0}, "scale"), ({"top_k": 4}, "top_k"),
    ({"top_k": True}, "top_k"), ({"how": "magic"}, "how"), ({"how": "hand"}, "cutoffs"), ({"cutoffs": (1, 2, 3, 4)}, "cutoffs"),
    ({"how": "hand", "cutoffs": (1, 2)}, "cutoffs"), ({"how": "hand", "cutoffs": (1, 2, 3, float("inf"))}, "cutoffs"),
])
def test_a_wrong_argument_is_named_in_one_sentence(bad, name):
    with pytest.raises(ValueError) as error:
        balancing_story(**bad)
    assert str(error.value).startswith(name) and "\n" not in str(error.value)


# ---- the race ----

RACE = balancing_race()


def test_the_race_starts_at_the_same_load_and_counts_every_token():
    first = [run.loads[0].tolist() for run in RACE.runs.values()]
    assert first[0] == first[1] == first[2]
    for run in RACE.runs.values():
        assert (run.loads.sum(1) == TOKENS * RACE.top_k).all()
        np.testing.assert_allclose(run.violation, run.loads.max(1) * EXPERTS / (TOKENS * RACE.top_k) - 1)


def test_the_quantile_rule_is_minimodels_step_by_step():
    directions, popularity = router(RACE.skew)
    bias = torch.zeros(EXPERTS, dtype=torch.float64)
    for step in range(4):
        scores = torch.sigmoid(batch(step) @ directions + popularity)
        chosen = (scores + bias).topk(RACE.top_k).indices
        assert np.bincount(chosen.flatten(), minlength=EXPERTS).tolist() == RACE.runs["quantile"].loads[step].tolist()
        margins = scores - (scores + bias).topk(RACE.top_k + 1).values[:, -1:]
        bias = -margins.sort(0, descending=True).values[TOKENS * RACE.top_k // EXPERTS]
        bias = bias - bias.mean()


def test_one_quantile_step_does_what_takes_the_others_many():
    over = {rule: run.violation for rule, run in RACE.runs.items()}
    assert over["quantile"][1] < 0.25 * over["quantile"][0]
    assert over["sign"][1] > 0.9 * over["sign"][0] and over["loss"][1] > 0.5 * over["loss"][0]
    assert over["quantile"][2:].max() < 0.8


def test_only_the_loss_moves_the_scores():
    assert RACE.runs["quantile"].moved.max() == RACE.runs["sign"].moved.max() == 0
    assert RACE.runs["loss"].moved[-1] > 0.05 and balancing_race(coefficient=0.0).runs["loss"].moved.max() < 1e-12


@pytest.mark.parametrize("bad, name", [
    ({"top_k": 0}, "top_k"), ({"top_k": 2.0}, "top_k"), ({"step": STEPS}, "step"), ({"skew": -1}, "skew"), ({"rate": 2}, "rate"),
    ({"coefficient": float("nan")}, "coefficient"),
])
def test_a_wrong_race_is_named(bad, name):
    with pytest.raises(ValueError, match=f"^{name} must"):
        balancing_race(**bad)


# ---- figures ----

def lanes(figure):
    """(token, expert) -> kind of bar, and the lines of the cut-offs."""
    found = {}
    for bar in (t for t in figure.data if t.type == "bar" and t.name in ("chosen", "left", "other")):
        for said in bar.customdata:
            token, expert = said.split(":")[0].split(", ")
            found[int(token[1:]) - 1, int(expert[1:]) - 1] = bar.name
    return found, sum(shape.line.dash == "dash" for shape in figure.layout.shapes)


@pytest.mark.parametrize("show", ["scores", "margins"])
@pytest.mark.parametrize("how", ["figure", "rule", "none"])
def test_the_figure_draws_the_storys_routes_and_loads(how, show):
    story = balancing_story(how=how)
    figure = balancing_figure(story=story, show=show)
    found, cuts = lanes(figure)
    assert len(found) == story.scores.size and cuts == (0 if how == "none" else 4)
    for (t, j), kind in found.items():
        assert (kind == "chosen") == (j in story.after[t]) and (kind == "left") == (j in story.before[t] and j not in story.after[t])
    loads = {t.name: tuple(t.y) for t in figure.data if t.name in ("no cut-offs", "with cut-offs")}
    assert loads == {"no cut-offs": story.loads_before, "with cut-offs": story.loads_after}


def test_bars_are_as_long_as_the_scores():
    figure = balancing_figure(story=balancing_story(how="none"), show="scores")
    lengths = {}
    for bar in (t for t in figure.data if t.type == "bar" and t.name in ("chosen", "other")):
        for said, x in zip(bar.customdata, bar.x, strict=True):
            lengths[said.split(":")[0]] = x
    ratio = lengths["t1, E1"] / lengths["t1, E2"]
    assert ratio == pytest.approx(S[0, 0] / S[0, 1])


def test_the_race_figure_draws_the_runs():
    figure = balancing_figure(story=RACE)
    drawn = {t.name: t for t in figure.data}
    for rule, run in RACE.runs.items():
        np.testing.assert_allclose(drawn[rule].y, run.violation, atol=1e-4)
        assert sorted(drawn[f"{rule}, loads"].y) == sorted(run.loads[RACE.step])
    np.testing.assert_allclose(drawn["moved"].x, [run.moved[RACE.step] for run in RACE.runs.values()], atol=1e-4)


def test_figures_are_the_same_twice_small_and_follow_input_and_theme():
    for story, other in ((balancing_story(), balancing_story(how="rule")), (RACE, balancing_race(rate=0.1))):
        one, again = balancing_figure(story=story).to_json(), balancing_figure(story=story).to_json()
        assert one == again != balancing_figure(story=other).to_json() and len(one) < 60_000
        assert balancing_figure(story=story, theme=DARK).layout.paper_bgcolor == DARK.paper
    with pytest.raises(ValueError, match="^show must be one of"):
        balancing_figure(show="bars")


# ---- panel ----

def test_the_panel_drags_cut_offs_by_hand():
    panel = balancing_panel()
    assert panel.trace.loads_after == (2, 2, 2, 2) and "cut_0" in panel.hidden
    panel.set({"how": "hand"})
    assert panel.trace.loads_after == (4, 3, 1, 0) and "cut_0" not in panel.hidden
    panel.set({"cut_0": 22.0, "cut_1": 21.0, "cut_2": 13.0, "cut_3": 12.0})
    assert panel.trace.loads_after == (2, 2, 2, 2)
    assert lanes(panel.figure)[0][2, 3] == "chosen"
    for how in CUTOFFS:
        panel.set({"how": how, "show": "margins"})
        assert panel.trace.how == how


def test_the_panel_runs_a_live_router():
    panel = balancing_panel(view="race")
    before = panel.trace
    assert panel.describe() == RACE.sentence and "cut_0" in panel.hidden and "step" not in panel.hidden
    panel.set({"rate": 4})
    assert panel.trace.runs["sign"].violation.tolist() != before.runs["sign"].violation.tolist()
    assert panel.trace.runs["quantile"] is before.runs["quantile"]  # only what changed runs again
    panel.set({"step": 0})
    assert panel.describe().startswith("Before any update")
    panel.set({"skew": 0.0, "top_k": 4, "coefficient": 0, "step": STEPS - 1})
    assert (panel.trace.skew, panel.trace.top_k, panel.trace.coefficient) == (0.0, 4, 0.01)


def test_the_panel_takes_other_scores():
    panel = balancing_panel(scores=[[0.9, 0.5, 0.1], [0.8, 0.7, 0.2], [0.9, 0.1, 0.3]], scale=1.0, how="rule")
    assert sum(c["name"].startswith("cut_") for c in panel.controls) == 3
    story = panel.trace
    assert route(torch.tensor(story.scores), torch.tensor(story.bias), 1)[1].tolist() == story.after.tolist()
    with pytest.raises(ValueError, match="^scores must be"):
        balancing_panel(scores=[1, 2, 3])
    with pytest.raises(ValueError, match="^how must be one of"):
        balancing_panel(how="magic")
