"""The reading story against the model itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from k3viz.hybrid import recorded
from k3viz.hybrid.reading_story import reading_story
from minimodel import cache_bytes, load_pretrained
from minimodel.tasks import meeting


@pytest.fixture(scope="module")
def told():
    return reading_story()


def test_what_is_read_out_at_the_end_is_the_models_answer(told):
    model = recorded.trained()
    with torch.no_grad():
        p = model(torch.tensor([meeting.encode(told.text)])).logits[0, -1].softmax(-1)
    assert told.layers[-1].said[0] == (meeting.VOCABULARY[int(p.argmax())], pytest.approx(float(p.max())))
    assert [x for _, x in told.layers[-1].said] == pytest.approx(p.topk(len(told.layers[-1].said)).values.tolist())
    assert told.answer[0] == "Thursday"


def test_the_embedding_alone_is_read_out_as_if_there_were_no_layers(told):
    model = recorded.trained()
    with torch.no_grad():
        p = model.lm_head(model.model.norm(torch.tensor(told.vector))).softmax(-1)
    assert told.said[0] == (meeting.VOCABULARY[int(p.argmax())], pytest.approx(float(p.max())))


def test_bytes_are_the_closed_forms_after_every_word(told):
    for t in range(len(told.tokens)):
        assert sum(int(layer.kept[t]) for layer in told.layers) == cache_bytes(told.config, t + 1, dtype=torch.float32).total
    assert [bool(np.ptp(layer.kept)) for layer in told.layers] == [layer.mixer == "mla" for layer in told.layers]


def test_layers_are_the_recorded_ones(told):
    trace = recorded.run(recorded.trained())
    for i, layer in enumerate(told.layers):
        if layer.mixer == "kda":
            assert np.array_equal(layer.states, trace[f"layers.{i}.kda.state"][0]) and layer.attention is None
            assert np.array_equal(layer.alpha, trace[f"layers.{i}.kda.alpha"][0, -1])
        else:
            assert np.array_equal(layer.attention, trace[f"layers.{i}.mla.attention"][0, :, -1]) and layer.states is None
        if layer.experts:
            assert sum(w for _, w in layer.experts) == pytest.approx(1) and len(layer.experts) == told.config.num_experts_per_token


@pytest.mark.parametrize("text", ["", 3, None, "Tuesday", "The meeting is in Xanadu", "the " * 65])
def test_a_text_that_does_not_fit_is_refused(text):
    with pytest.raises(ValueError, match=r"^text|Xanadu"):
        reading_story(text=text)


def test_a_given_model_is_read_and_left_alone():
    model = load_pretrained()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert reading_story(model=model, text="The room is 4B. The room is").answer[0] == "4B"
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.model.layers)
