"""Experts: the story's routes are the model's, loads and messages are counted, and the curve of dead experts is not the entropy's."""
import numpy as np
import pytest
import torch

from k3viz import experts_figure, experts_panel, experts_story
from k3viz.experts.scale import SKEWS, TOKENS, experts_at_scale, seeded_scores
from k3viz.experts.story import TEXT
from k3viz.theme import DARK
from minimodel import K3Config, K3ForCausalLM, parameter_budget, quantile_bias, record, route
from minimodel.pretrained import load_pretrained
from minimodel.tasks import meeting

MODEL = load_pretrained()
STORY = experts_story(model=MODEL)
SCALE = experts_at_scale()


def test_routes_and_weights_are_the_models_own():
    model = load_pretrained().double()
    with torch.no_grad(), record(model) as trace:
        logits = model(torch.tensor([meeting.encode(TEXT)])).logits
    layer = STORY.layer
    scores, bias = trace[f"layers.{layer}.moe.scores"].numpy(), model.routers()[-1].e_score_correction_bias.numpy()
    np.testing.assert_allclose(STORY.scores, scores, atol=1e-12)
    for t, row in enumerate(scores):
        chosen = sorted(np.argsort(-(row + bias))[:2])
        assert sorted(STORY.indices[t]) == chosen
        plain = row[STORY.indices[t]]  # the bias chose; it does not weigh
        np.testing.assert_allclose(STORY.weights[t], plain / plain.sum(), atol=1e-12)
    p = logits[0, -1].softmax(-1)
    assert STORY.answer == STORY.answer_as_trained == (meeting.VOCABULARY[int(p.argmax())], pytest.approx(float(p.max()), abs=1e-12))


def test_loads_count_every_visit():
    assert sum(STORY.loads) == STORY.indices.size == 2 * len(STORY.tokens)
    assert STORY.loads == tuple(int((STORY.indices == j).sum()) for j in range(8))


def test_another_top_k_and_no_shared_experts_really_run():
    story = experts_story(model=MODEL, top_k=5, shared=False)
    assert story.indices.shape[1] == 5 and story.shared == 0 and "no shared expert" in story.sentence
    model = load_pretrained().double()
    for layer in model.model.layers[1:]:
        layer.block_sparse_moe.gate.top_k, layer.block_sparse_moe.shared_experts = 5, None
    with torch.no_grad():
        p = model(torch.tensor([meeting.encode(TEXT)])).logits[0, -1].softmax(-1)
    assert story.answer == (meeting.VOCABULARY[int(p.argmax())], pytest.approx(float(p.max()), abs=1e-12))
    assert MODEL.routers()[0].top_k == 2 and MODEL.model.layers[1].block_sparse_moe.shared_experts is not None


@pytest.mark.parametrize("change", [
    {"text": "The meeting is on Friday."}, {"layer": 1}, {"token": 2}, {"top_k": 3}, {"shared": False},
    {"model": K3ForCausalLM(K3Config.meeting(), seed=4)},
])
def test_another_input_gives_another_story_and_figure(change):
    story = experts_story(**{"model": MODEL, **change})
    assert story.sentence != STORY.sentence
    assert experts_figure(story=story).to_json() != experts_figure(story=STORY).to_json()


@pytest.mark.parametrize("bad, name", [
    ({"text": ""}, "text"), ({"text": "The " * 61}, "text"), ({"text": "語"}, "text"), ({"layer": 0}, "layer"), ({"token": 28}, "token"),
    ({"token": 0.5}, "token"), ({"top_k": 0}, "top_k"), ({"top_k": 9}, "top_k"), ({"top_k": True}, "top_k"),
    ({"model": K3ForCausalLM(K3Config.meeting().replace(first_k_dense_replace=4))}, "model"),
    ({"model": K3ForCausalLM(K3Config.meeting().replace(vocab_size=50))}, "model"),
])
def test_a_wrong_argument_is_named_in_one_sentence(bad, name):
    with pytest.raises(ValueError) as error:
        experts_story(**{"model": MODEL, **bad})
    assert str(error.value).startswith(name) and "\n" not in str(error.value)


# ---- at a released model's size ----

def test_loads_and_dead_experts_by_brute_force():
    scores = seeded_scores(896, SKEWS[SCALE.skew]).numpy()
    chosen = np.argsort(-scores, axis=1)[:, :16]
    loads = np.bincount(chosen.ravel(), minlength=896)
    assert SCALE.loads.tolist() == loads.tolist() and loads.sum() == TOKENS * 16
    assert SCALE.dead[SCALE.skew] == sum(load == 0 for load in loads) / 896
    home = [t * 16 // TOKENS for t in range(TOKENS)]
    crossing = sum(e * 16 // 896 != home[t] for t in range(TOKENS) for e in chosen[t])
    assert SCALE.crossing == pytest.approx(crossing / TOKENS)
    p = scores / scores.sum(1, keepdims=True)
    assert SCALE.entropy[SCALE.skew] == pytest.approx(float(-(p * np.log(p)).sum(1).mean() / np.log(896)))


@pytest.mark.parametrize("top_k", [1, 8, 40])
def test_loads_are_those_of_minimodels_router(top_k):
    scores, none = seeded_scores(896, SKEWS[2]), torch.zeros(896, dtype=torch.float64)
    story = experts_at_scale(top_k=top_k, skew=2)
    assert story.loads.tolist() == torch.bincount(route(scores, none, top_k)[1].flatten(), minlength=896).tolist()
    bias = quantile_bias(scores, none, top_k)
    assert story.balanced.tolist() == torch.bincount(route(scores, bias, top_k)[1].flatten(), minlength=896).tolist()


def test_entropy_hides_dead_experts_and_one_balancing_step_wakes_them():
    assert min(SCALE.entropy) > 0.9 and SCALE.dead[-1] - SCALE.dead[0] > 0.5
    assert (SCALE.balanced == 0).mean() < 0.02 < SCALE.dead[SCALE.skew]


def test_messages_shrink_with_the_latent_and_the_ranks():
    with_latent, without = SCALE.message_bytes
    assert without == with_latent * SCALE.hidden / SCALE.latent == 2 * 2 * SCALE.crossing * 7168
    assert experts_at_scale(ranks=1).crossing == 0
    few, many = (experts_at_scale(ranks=r).crossing for r in (2, 64))
    assert few < SCALE.crossing < many <= 16


def test_parameters_are_the_accountings():
    budget = parameter_budget(K3Config.k3())
    assert (SCALE.total, SCALE.active) == (budget.total, budget.active)
    other = experts_at_scale(top_k=8, shared=1, latent=7168)
    budget = parameter_budget(K3Config.k3().replace(num_experts_per_token=8, num_shared_experts=1, routed_expert_hidden_size=None))
    assert (other.total, other.active) == (budget.total, budget.active) and other.message_bytes[0] == other.message_bytes[1]


def test_other_configs_can_be_counted():
    story = experts_at_scale(config=K3Config.kimi_linear_48b(), ranks=8)
    assert len(story.loads) == 256 and story.top_k == 8 and story.latent == story.hidden == 2304


@pytest.mark.parametrize("bad, name", [
    ({"top_k": 896}, "top_k"), ({"latent": 0}, "latent"), ({"latent": 7169}, "latent"), ({"shared": -1}, "shared"), ({"ranks": 0}, "ranks"),
    ({"ranks": 2.0}, "ranks"), ({"skew": len(SKEWS)}, "skew"), ({"config": K3Config.k3().replace(num_experts=2048)}, "config"),
])
def test_a_wrong_size_is_named(bad, name):
    with pytest.raises(ValueError) as error:
        experts_at_scale(**bad)
    assert str(error.value).startswith(name) and "\n" not in str(error.value)


# ---- figures ----

def test_the_figure_draws_the_storys_routes_loads_and_scores():
    figure = experts_figure(story=STORY)
    drawn = {t.name: t for t in figure.data}
    assert tuple(drawn["loads"].y) == STORY.loads
    np.testing.assert_allclose(drawn["scores"].x, STORY.scores[STORY.token], atol=1e-4)
    np.testing.assert_allclose(drawn["score + bias"].x, STORY.scores[STORY.token] + STORY.bias, atol=1e-4)
    assert len(drawn["all words"].x) == 3 * STORY.indices.size
    lines = {name: t.line.width for name, t in drawn.items() if name.startswith("to E")}
    assert set(lines) == {f"to E{j + 1}" for j in STORY.indices[STORY.token]}
    strongest = STORY.indices[STORY.token][STORY.weights[STORY.token].argmax()]
    assert lines[f"to E{strongest + 1}"] == max(lines.values())  # two may weigh the same, to what a width shows
    assert "shared" in drawn and "shared" not in {t.name for t in experts_figure(story=experts_story(model=MODEL, shared=False)).data}


def test_the_scale_figure_draws_counts():
    figure = experts_figure(story=SCALE)
    drawn = {t.name: t for t in figure.data}
    np.testing.assert_allclose(drawn["dead experts"].y, SCALE.dead, atol=1e-4)
    np.testing.assert_allclose(drawn["router entropy"].y, SCALE.entropy, atol=1e-4)
    assert list(drawn["messages"].y) == [round(b) for b in SCALE.message_bytes]
    assert max(drawn["as routed"].y) == SCALE.loads.max() and max(drawn["as routed"].x) == (SCALE.loads > 0).sum()


def test_figures_are_the_same_twice_small_and_follow_the_theme():
    for story, again in ((STORY, experts_story(model=MODEL)), (SCALE, experts_at_scale())):
        one = experts_figure(story=story).to_json()
        assert one == experts_figure(story=again).to_json() and len(one) < 60_000
        assert experts_figure(story=story, theme=DARK).layout.paper_bgcolor == DARK.paper


# ---- panel ----

def test_the_panel_answers_to_its_controls():
    panel = experts_panel(model=MODEL)
    assert panel.describe() == STORY.sentence and "skew" in panel.hidden
    panel.set({"top_k": 4, "shared": "no", "layer": 0, "token": 3})
    assert panel.trace.indices.shape[1] == 4 and panel.trace.shared == 0 and (panel.trace.layer, panel.trace.token) == (1, 3)
    panel.set({"text": "The meeting is on Friday."})
    assert panel.values["token"] == 3 and panel.trace.tokens[-2] == "Friday"
    panel.set({"view": "scale"})
    assert panel.describe() == SCALE.sentence and "text" in panel.hidden
    panel.set({"latent": 0, "ranks": 1, "skew": 0, "top_k_large": 4, "shared_large": 0})
    story = panel.trace
    assert (story.latent, story.ranks, story.skew, story.top_k, story.shared) == (896, 2, 0, 4, 0)
    assert next(t for t in panel.figure.data if t.name == "messages").y[0] == round(story.message_bytes[0])


@pytest.mark.parametrize("wish", [{"text": " "}, {"text": "no such thing"}, {"text": "Friday " * 99}, {"top_k": 9}, {"ranks": 99}])
def test_an_impossible_wish_becomes_a_sentence(wish):
    panel = experts_panel(model=MODEL)
    before = panel.picture
    panel.set_state({"values": {**panel.values, **wish}, "asked": panel.asked + 1})
    assert panel.problem and "\n" not in panel.problem and "failed" not in panel.problem and panel.picture == before


def test_the_panel_takes_another_config():
    panel = experts_panel(model=MODEL, config=K3Config.kimi_linear_48b(), view="scale")
    assert len(panel.trace.loads) == 256
    with pytest.raises(ValueError, match="^view can't be"):
        experts_panel(model=MODEL, view="x")
