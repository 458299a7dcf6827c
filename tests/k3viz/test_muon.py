"""Muon: paths of singular values follow the scalar polynomial, updates are the optimizer's, controls change picture and sentence."""
import numpy as np
import pytest
import torch
from torch import nn

from k3viz import muon_figure, muon_panel, muon_story
from k3viz.muon.story import STEPS, chosen_gradient, model_gradient, orthogonalized
from k3viz.theme import DARK
from minimodel import K3Config, K3ForCausalLM, PerHeadMuon
from minimodel.muon import COEFFICIENTS
from minimodel.tasks import meeting

STORY = muon_story()


def polynomial(s):
    a, b, c = COEFFICIENTS
    return a * s + b * s**3 + c * s**5


def bars(figure, name):
    return np.array(next(t for t in figure.data if t.name == name and t.type == "bar").y)


@pytest.mark.parametrize("directions, strength", [(12, 10.0), (56, 100.0), (1, 1.0)])
def test_singular_values_follow_the_scalar_polynomial(directions, strength):
    story = muon_story(directions=directions, strength=strength)
    for values in (story.whole_values, story.head_values):
        for step in range(STEPS):
            np.testing.assert_allclose(values[step + 1], polynomial(values[step]), atol=1e-8)


def test_values_of_the_whole_matrix_are_those_of_its_gradient():
    G = chosen_gradient(12).clone()
    G[0] *= 10
    s = torch.linalg.svdvals(G.flatten(0, 1))[:12]
    np.testing.assert_allclose(STORY.whole_values[0], (s / s.square().sum().sqrt()).numpy(), atol=1e-12)
    assert STORY.whole_values.shape == (STEPS + 1, 12)  # the other directions are zeros and stay zeros


@pytest.mark.parametrize("heads, rows", [(1, "whole_update"), (6, "head_update")])
@pytest.mark.parametrize("steps", [1, 5, STEPS])
def test_updates_are_those_of_the_optimizer(heads, rows, steps):
    G = chosen_gradient(12).clone()
    G[0] *= 10
    W = nn.Parameter(torch.zeros(96, 56, dtype=torch.float64))
    W.grad = G.flatten(0, 1)
    PerHeadMuon([{"params": [W], "heads": heads}], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, steps=steps).step()
    moved = W.detach().view(6, 16, 56).square().mean((1, 2)).sqrt()
    np.testing.assert_allclose(getattr(STORY, rows)[steps], moved.numpy(), atol=1e-9)


def test_a_strong_head_sets_the_pace_of_one_matrix_only():
    assert STORY.ratio(5, per_head=False) > 5 and STORY.ratio(5, per_head=True) == pytest.approx(1, abs=0.1)
    even = muon_story(strength=1)
    np.testing.assert_allclose(even.head_update, STORY.head_update, atol=1e-9)  # head by head, strength is normalized away
    assert even.ratio(5, per_head=False) == pytest.approx(1, abs=0.2)


def test_heads_that_share_few_directions_suffer_most():
    shares = [muon_story(directions=n, strength=100).whole_update[STEPS, 1:].mean() for n in (12, 24, 56)]
    assert shares == sorted(shares)
    owned = [int((muon_story(directions=n, strength=100).owned > 0.5).sum()) for n in (12, 56)]
    assert owned == [12, 16]  # all of them, then as many as it has rows


def test_the_models_gradient_is_its_own():
    model = K3ForCausalLM(K3Config.meeting(), seed=1)
    G, source = model_gradient(model)
    twin = K3ForCausalLM(K3Config.meeting(), seed=1).double().train()
    ids, labels = meeting.training_batch(0, 0, rows=2, length=96)
    twin(ids, labels=labels).loss.backward()
    torch.testing.assert_close(G.flatten(0, 1), twin.model.layers[0].self_attn.q_proj.weight.grad)
    assert "layer 1" in source and all(p.grad is None for p in model.parameters())
    story = orthogonalized(G, 1.0, source)
    norms = G.square().mean((1, 2)).sqrt()
    assert story.gradient[0] == pytest.approx(float(norms[0] / norms[1])) and story.source == source


def test_the_sentence_holds_the_numbers():
    said = STORY.sentence_at(5)
    assert "10 times" in said and f"{STORY.whole_update[5, 0]:.2g}" in said and "owns 12 of the 12 directions" in said


# ---- figure and panel ----

def test_the_figure_draws_the_storys_numbers():
    figure = muon_figure(story=STORY, step=3)
    np.testing.assert_allclose(bars(figure, "as one matrix"), STORY.whole_update[3], rtol=1e-3)
    np.testing.assert_allclose(bars(figure, "head by head"), STORY.head_update[3], rtol=1e-3)
    np.testing.assert_allclose(bars(figure, "gradient"), STORY.gradient, rtol=1e-3)
    paths = [t for t in figure.data if t.type == "scatter" and t.mode == "lines" and t.xaxis == "x"]
    drawn = np.array([y for t in paths for y in t.y if y is not None]).reshape(-1, STEPS + 1)
    np.testing.assert_allclose(np.sort(drawn[:, 3]), np.sort(STORY.whole_values[3]), rtol=1e-3)


@pytest.mark.parametrize("change", [{"strength": 100}, {"directions": 40}, {"model": K3ForCausalLM(K3Config.meeting(), seed=1)}])
def test_another_input_gives_another_figure(change):
    assert muon_figure(story=muon_story(**change)) != muon_figure()


def test_figures_are_the_same_twice_and_small():
    assert muon_figure().to_json() == muon_figure().to_json()
    assert len(muon_figure(story=muon_story(directions=56)).to_json()) < 100_000
    assert muon_figure(step=2) != muon_figure(step=3)


def test_the_panel_answers_to_its_controls():
    panel = muon_panel()
    assert "10 times" in panel.describe()
    panel.set({"strength": 7, "directions": 56})
    assert panel.trace.strength == 100 and "owns 16 of the 56" in panel.describe()
    panel.set({"step": 0})
    assert "Normalized only" in panel.describe()
    np.testing.assert_allclose(bars(panel.figure, "head by head"), panel.trace.head_update[0], rtol=1e-3)
    panel.set_state({"dark": True})
    assert panel.picture["layout"]["font"]["color"] == DARK.ink


def test_the_panel_can_look_at_the_trained_models_gradient():
    panel = muon_panel()
    panel.set({"source": "trained"})
    assert panel.trace.shape == (2, 128, 96) and panel.hidden == ["directions"] and "the trained model's own" in panel.describe()
    panel.set({"source": "chosen"})
    assert panel.trace.shape == (6, 16, 56)


@pytest.mark.parametrize("strength, shown", [(1, 1), (9, 10), (1000, 1000)])
def test_the_panel_starts_at_the_strength_nearest_to_the_one_asked_for(strength, shown):
    assert muon_panel(strength=strength).trace.strength == shown


def test_an_impossible_wish_becomes_a_sentence():
    panel = muon_panel()
    for wish in ({"directions": 0}, {"strength": 99}, {"source": "guessed"}, {"step": -1}):
        panel.set_state({"values": {**muon_panel().values, **wish}, "asked": panel.asked + 1})
        assert panel.problem and "\n" not in panel.problem and panel.answered == panel.asked


@pytest.mark.parametrize("bad, name", [
    ({"strength": 0}, "strength"), ({"strength": float("nan")}, "strength"), ({"strength": "ten"}, "strength"),
    ({"directions": 57}, "directions"), ({"directions": 2.0}, "directions"),
    ({"model": K3ForCausalLM(K3Config.meeting().replace(vocab_size=99))}, "model"),
    ({"model": K3ForCausalLM(K3Config.meeting().replace(linear_mixer="mla"))}, "model"),
])
def test_a_wrong_argument_is_named_in_one_sentence(bad, name):
    with pytest.raises(ValueError) as error:
        muon_story(**bad)
    assert str(error.value).startswith(name) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match="^step must be a whole number from 0 to 8, got 9"):
        muon_figure(story=STORY, step=9)
