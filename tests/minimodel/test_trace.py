"""The recorder: what it sees, and that it leaves nothing behind."""

import copy

import pytest
import torch
from torch import nn

from minimodel import record
from minimodel.trace import Traced
from tests.minimodel.common import tiny_model, tokens

SHAPES = {
    "layers.0.kda.q": (2, 7, 2, 8), "layers.0.kda.k": (2, 7, 2, 8), "layers.1.kda.v": (2, 7, 2, 8), "layers.3.kda.alpha": (2, 7, 2, 8),
    "layers.0.kda.beta": (2, 7, 2), "layers.0.kda.state": (2, 7, 2, 8, 8), "layers.0.kda.output": (2, 7, 2, 8),
    "layers.2.mla.attention": (2, 3, 7, 7), "layers.2.mla.gate": (2, 7, 3, 5), "layers.4.mla.latent": (2, 7, 14),
    "layers.1.moe.scores": (14, 6), "layers.1.moe.indices": (14, 2), "layers.4.moe.weights": (14, 2), "layers.1.moe.cutoff": (14,),
    "layers.0.mlp_res.weights": (2, 7, 2), "layers.3.attn_res.weights": (2, 7, 3), "output_res.weights": (2, 7, 4),
    "output_res.sources": (2, 7, 4, 20), "logits": (2, 7, 23),
}  # fmt: skip


def test_names_and_shapes():
    model = tiny_model()
    with record(model) as trace:
        out = model(tokens(2, 7))
    assert {name: tuple(trace[name].shape) for name in SHAPES} == SHAPES
    assert torch.equal(trace["logits"], out.logits) and len(list(trace)) == len(trace) and "logits" in trace
    assert not any(trace[name].requires_grad for name in trace)


def test_same_logits_while_recording():
    model, ids = tiny_model(), tokens(2, 30)
    plain = model(ids).logits
    with record(model):
        traced = model(ids).logits
    assert float((traced - plain).detach().abs().max()) < 1e-10
    assert torch.equal(model(ids).logits, plain)


def test_same_gradients_while_recording():
    model, ids = tiny_model(), tokens(1, 9)
    model(ids, labels=ids).loss.backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with record(model):
        model(ids, labels=ids).loss.backward()
    for a, b in zip((p.grad for p in model.parameters() if p.grad is not None), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_what_is_recorded_is_what_was_computed():
    """The recorded parts give the recorded whole: o = S^T q, mixing weights sum to one, alpha is a retention."""
    model = tiny_model()
    with torch.no_grad(), record(model) as trace:
        model(tokens(1, 8))
    S, q = trace["layers.1.kda.state"], trace["layers.1.kda.q"]
    torch.testing.assert_close(torch.einsum("bthkv,bthk->bthv", S, q) * 8**-0.5, trace["layers.1.kda.output"])
    k, v, alpha, beta = (trace[f"layers.1.kda.{name}"] for name in ("k", "v", "alpha", "beta"))
    faded = alpha[:, 5, ..., None] * S[:, 4]
    error = v[:, 5] - torch.einsum("bhkv,bhk->bhv", faded, k[:, 5])
    torch.testing.assert_close(faded + beta[:, 5, :, None, None] * k[:, 5, ..., None] * error[:, :, None], S[:, 5])
    assert bool(((alpha > torch.tensor(-5.0).exp()) & (alpha < 1)).all())
    for name in ("layers.2.mla.attention", "output_res.weights", "layers.1.moe.weights"):
        torch.testing.assert_close(trace[name].sum(-1), torch.ones_like(trace[name].sum(-1)))
    chosen = trace["layers.1.moe.scores"].gather(1, trace["layers.1.moe.indices"])
    torch.testing.assert_close(trace["layers.1.moe.weights"], chosen / chosen.sum(1, keepdim=True))


def test_the_last_pass_is_kept_and_it_is_a_copy():
    model = tiny_model()
    cache = model.new_cache()
    with record(model) as trace:
        model(tokens(1, 5), cache=cache)
        model(tokens(1, 1), cache=cache)
    assert trace["layers.2.mla.attention"].shape == (1, 3, 1, 6) and trace["logits"].shape == (1, 1, 23)
    kept = trace["layers.2.mla.latent"].clone()
    cache.layers[2].live.zero_()  # the model's own tensor, which the recorder was shown
    assert kept.any() and torch.equal(trace["layers.2.mla.latent"], kept)


def test_nothing_stays_when_it_is_over():
    model = tiny_model()
    state, attributes = set(model.state_dict()), {name: set(vars(m)) - {"_trace"} for name, m in model.named_modules()}
    with pytest.raises(KeyError, match="stopped here"):
        with record(model):
            model(tokens(1, 3))
            raise KeyError("stopped here")
    traced = [m for m in model.modules() if isinstance(m, Traced)]
    assert len(traced) > 10 and not any(m.tracing for m in traced) and all(m._trace is None for m in traced)
    assert set(model.state_dict()) == state
    assert {name: set(vars(m)) - {"_trace"} for name, m in model.named_modules()} == attributes
    with record(model) as trace:  # and a new recording starts empty
        assert len(trace) == 0


def test_a_copy_made_while_recording_is_not_recorded():
    model = tiny_model()
    with record(model) as trace:
        other = copy.deepcopy(model)
        other(tokens(1, 3))
        assert len(trace) == 0
        with record(other) as second:
            other(tokens(1, 3))
    assert len(second) > 20


def test_off_it_computes_nothing_extra(monkeypatch):
    """Without a recorder nothing is copied and the token loop is not taken."""
    model, ids = tiny_model(), tokens(1, 20)
    monkeypatch.setattr("minimodel.trace.Trace.write", lambda *a: pytest.fail("written without a recorder"))
    loops = []
    import sys

    module = sys.modules["minimodel.kda"]
    monkeypatch.setattr(module, "kda_recurrent", lambda *a, real=module.kda_recurrent, **k: loops.append(1) or real(*a, **k))
    model(ids)
    assert not loops


def test_part_of_a_model():
    model = tiny_model()
    x = torch.zeros(1, 2, 20, dtype=torch.float64)
    with record(model.model.layers[2].self_attn) as trace:
        model.model.layers[2].self_attn(x)
    assert set(trace) == {"layers.2.mla.attention", "layers.2.mla.gate", "layers.2.mla.latent"}
    from minimodel import GatedMLA

    with record(alone := GatedMLA(model.config).double()) as trace:
        alone(x)
    assert set(trace) == {"attention", "gate", "latent"}


@pytest.mark.bad_input
def test_wrong_use():
    model = tiny_model()
    with record(model) as trace:
        with pytest.raises(RuntimeError, match="model is already being recorded: one recording at a time"):
            with record(model):
                pass
        model(tokens(1, 2))
    with pytest.raises(KeyError, match="nothing recorded under 'layers.0.mla.q'; recorded: "):
        trace["layers.0.mla.q"]
    with pytest.raises(ValueError, match="model: Linear has no traced parts"):
        with record(nn.Linear(2, 2)):
            pass
