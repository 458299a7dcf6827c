"""The journey of words through a narrow, untrained mixture layer with K3's counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from k3viz.experts.journey_story import EXPERT_WIDTH, WIDTH, _vector, journey_story, untrained_layer
from minimodel import K3Config


def test_the_counts_are_the_released_models():
    story = journey_story()
    assert (story.experts, story.top_k, story.shared, story.hidden, story.latent) == (896, 16, 2, 7168, 3584)
    assert story.tokens == ("The", "meeting", "has", "moved", "to", "Thursday")
    assert story.scores.shape == (6, 896) and story.indices.shape == story.weights.shape == (6, 16)


def test_the_words_visit_their_best_experts():
    story = journey_story()
    for scores, indices, weights in zip(story.scores, story.indices, story.weights, strict=True):
        best = np.argsort(-scores)[:16]
        assert set(best) == set(indices)
        assert weights == pytest.approx(scores[indices] / scores[best].sum(), rel=1e-12) and (np.diff(weights) <= 0).all()
    assert story.awake(1) == 16 and story.awake(6) == len({*story.indices.flat}) > 16


def test_the_pieces_are_those_of_the_layers_output():
    config = K3Config.k3().replace(hidden_size=WIDTH, routed_expert_hidden_size=WIDTH // 2, moe_intermediate_size=EXPERT_WIDTH)
    layer, story = untrained_layer(config), journey_story()
    x = torch.stack([_vector(word) for word in story.tokens])
    with torch.no_grad():
        u = sum(torch.tensor(story.weights[:, i, None]) * torch.stack([one(layer, x[t], e) for t, e in enumerate(story.indices[:, i])])
                for i in range(16))  # fmt: skip
        normed = u / (u.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
        torch.testing.assert_close(layer.routed_expert_up_proj(normed) + layer.shared_experts(x), layer(x[None])[0])
    assert story.summed == pytest.approx(u.square().mean(-1).sqrt().numpy()) and story.normed == pytest.approx(1, abs=1e-3)


def one(layer, x, e):
    """A single expert by its matrices: SiTU-GLU, K3 report Eq. 13."""
    z = layer.routed_expert_down_proj(x)
    gate, up = layer.experts.w1[e] @ z, layer.experts.w3[e] @ z
    return layer.experts.w2[e] @ (4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25))


def test_the_same_word_is_the_same_vector_and_others_are_not():
    assert (journey_story(text="attending attendees attending").indices[[0, 2]] == journey_story(text="attending").indices).all()
    assert set(journey_story(text="attending").indices.flat) != set(journey_story(text="attendees").indices.flat)


@pytest.mark.parametrize("wrong", [{"text": " . "}, {"config": K3Config.kimi_linear_48b()}])
def test_a_wrong_argument_is_named(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}"):
        journey_story(**wrong)
