"""The whole model against itself: in pieces, alone, differentiated, copied. Its numbers are held in test_released_models.py."""

import copy
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from minimodel import K3Config, K3ForCausalLM, parameter_budget, record
from tests.minimodel.common import assert_within, tiny_config, tiny_model, tokens

KINDS = {
    "k3": {},
    "kimi linear": {"q_lora_rank": None, "mla_use_output_gate": False, "routed_expert_hidden_size": None, "attn_res_block_size": None,
                    "hidden_act": "silu", "num_shared_experts": 1, "routed_scaling_factor": 2.446},
}  # fmt: skip


def kind(name, **changes):
    return tiny_model(**{**KINDS[name], **changes})


# ---- time ----


@pytest.mark.parametrize("name", KINDS)
def test_prefill_equals_decode_at_every_split(name):
    """For every split: prefill up to it, two single steps, the rest at once; and everything token by token."""
    model, ids = kind(name), tokens(2, 19)
    whole = model(ids).logits
    for split in range(19):
        cache, at = model.new_cache(2), split
        parts = [model(ids[:, :split], cache=cache).logits] if split else []
        while at < 19:
            end = at + 1 if split == 0 or at < split + 2 else 19
            parts.append(model(ids[:, at:end], cache=cache).logits)
            at = end
        assert float((torch.cat(parts, 1) - whole).detach().abs().max()) < 1e-10
        assert cache.seen == 19


@settings(max_examples=6)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_prefill_in_pieces(lengths):
    model, ids = tiny_model(), tokens(1, sum(lengths))
    cache = model.new_cache(1)
    pieces = [model(part, cache=cache).logits for part in ids.split(lengths, 1)]
    assert float((torch.cat(pieces, 1) - model(ids).logits).detach().abs().max()) < 1e-10


@pytest.mark.parametrize("name", KINDS)
def test_no_token_sees_the_future(name):
    model, ids = kind(name), tokens(1, 20)
    logits = model(ids).logits
    for t in (1, 7, 16, 19):
        other = model(torch.cat([ids[:, :t], tokens(1, 20, seed=1)[:, t:]], 1)).logits
        assert float((other - logits)[:, :t].detach().abs().max()) < 1e-12
    assert float((other - logits)[:, t:].detach().abs().max()) > 1e-3


def test_rows_of_a_batch_are_alone():
    model, ids = tiny_model(), tokens(3, 11)
    alone = torch.cat([model(row[None]).logits for row in ids])
    assert float((model(ids).logits - alone).detach().abs().max()) < 1e-10


@pytest.mark.parametrize("name", KINDS)
def test_left_padded_rows_equal_rows_alone(name):
    model = kind(name)
    prompts = [tokens(1, n, seed=n)[0] for n in (1, 4, 9)]
    ids = torch.stack([torch.cat([torch.full((9 - len(p),), 7), p]) for p in prompts])
    mask = torch.stack([(torch.arange(9) >= 9 - len(p)).long() for p in prompts])
    cache = model.new_cache(3)
    logits = model(ids, attention_mask=mask).logits
    cached = model(ids, attention_mask=mask, cache=cache).logits
    more = tokens(3, 4, seed=5)
    later = [model(more[:, :1], cache=cache).logits, model(more[:, 1:3], cache=cache).logits, model(more[:, 3:], cache=cache).logits]
    for row, prompt in enumerate(prompts):
        alone = model(torch.cat([prompt, more[row]])[None]).logits[0]
        for padded in (logits, cached):
            assert float((padded[row, 9 - len(prompt) :] - alone[: len(prompt)]).detach().abs().max()) < 1e-10
        assert float((torch.cat(later, 1)[row] - alone[len(prompt) :]).detach().abs().max()) < 1e-10


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=5)
@given(lengths=st.lists(st.integers(1, 18), min_size=1, max_size=4))
def test_packed_documents_do_not_leak(name, lengths):
    model, ids = kind(name), tokens(1, sum(lengths))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    alone = torch.cat([model(part).logits for part in ids.split(lengths, 1)], 1)
    assert float((model(ids, cu_seqlens=bounds).logits - alone).detach().abs().max()) < 1e-10
    with record(model):
        assert float((model(ids, cu_seqlens=bounds).logits - alone).detach().abs().max()) < 1e-10


# ---- gradients, loss ----


@pytest.mark.parametrize("name", KINDS)
def test_finite_differences(name):
    """The loss by every kind of parameter (all layers' q_proj, all A_log, ...) along a random direction."""
    model, ids = kind(name), tokens(1, 5)
    groups = {}
    for full, p in model.named_parameters():
        groups.setdefault(re.sub(r"layers\.\d+\.", "", full), []).append(p)
    assert len(groups) > 30
    model(ids, labels=ids).loss.backward()
    draw, step = torch.Generator().manual_seed(0), 1e-6
    for group, parameters in groups.items():
        directions = [torch.randn(p.shape, generator=draw, dtype=p.dtype) for p in parameters]
        slope = sum(float((p.grad * d).sum()) for p, d in zip(parameters, directions, strict=True) if p.grad is not None)
        losses = []
        with torch.no_grad():
            for move in (step, -2 * step, step):
                for p, d in zip(parameters, directions, strict=True):
                    p += move * d
                losses.append(float(model(ids, labels=ids).loss))
        measured = (losses[0] - losses[1]) / (2 * step)
        assert abs(measured - slope) < 1e-6 * max(1, abs(slope)), group
        assert slope != 0, group


def test_loss_is_the_mean_over_what_is_asked():
    model, ids = tiny_model(), tokens(2, 6)
    labels = torch.full_like(ids, -100)
    labels[0, 3], labels[1, 5], labels[1, 0] = 4, 9, 2  # nothing stands before the first token, so its label asks nothing
    out = model(ids, labels=labels)
    p = out.logits.log_softmax(-1)
    torch.testing.assert_close(out.loss, -(p[0, 2, 4] + p[1, 4, 9]) / 2)
    torch.testing.assert_close(model(ids, labels=ids).loss, F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def test_a_cache_keeps_no_gradients():
    model = tiny_model()
    assert model(tokens(1, 3)).logits.requires_grad
    out = model(tokens(1, 3), cache=(cache := model.new_cache()))
    assert not out.logits.requires_grad and out.cache is cache


# ---- construction ----


def test_seed_makes_the_weights_and_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    a = K3ForCausalLM(tiny_config(), seed=1)
    assert torch.equal(torch.rand(3), expected)
    b, c = K3ForCausalLM(tiny_config(), seed=1), K3ForCausalLM(tiny_config(), seed=2)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)


def test_every_weight_is_drawn():
    model = K3ForCausalLM(tiny_config(initializer_range=0.02, hidden_size=64, vocab_size=500))
    for name, p in model.named_parameters():
        assert bool(torch.isfinite(p).all())
        if "norm" in name:
            assert bool((p == 1).all()), name
        elif "res_proj" in name or name.endswith("A_log"):
            assert not p.any(), name
        elif "conv1d" in name:
            assert 0.2 < float(p.detach().std()) * 12**0.5 / 2 / 0.5 < 1.2 and float(p.detach().abs().max()) <= 0.5, name
        elif "dt_bias" not in name:
            assert 0.01 < float(p.detach().std()) < 0.03, name


@pytest.mark.parametrize("preset", ["k3", "kimi_linear_48b", "meeting", "mini", "small", "base"])
def test_presets_build_without_memory_and_count(preset):
    config = getattr(K3Config, preset)()
    with torch.device("meta"):
        model = K3ForCausalLM(config)
    counted = sum(t.numel() for t in model.state_dict().values())
    assert counted == parameter_budget(config).total
    assert all(t.is_meta for t in model.state_dict().values())


def test_tied_tables_are_one():
    model = K3ForCausalLM(tiny_config(tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(p.numel() for p in model.parameters()) + 4 * 6 == parameter_budget(model.config).total  # and four router biases


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precision_follows(dtype):
    model, ids = tiny_model(), tokens(2, 9)
    expected = model(ids).logits
    low = copy.deepcopy(model).to(dtype)
    out = low(ids, labels=ids)
    assert out.logits.dtype == dtype and out.loss.dtype == torch.float32
    if dtype == torch.float32:
        assert_within(out.logits, expected, 5e-5)
    out.loss.backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in low.parameters() if p.grad is not None)


def test_copies_give_the_same_logits():
    model, ids = tiny_model(), tokens(1, 5)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(ids).logits, model(ids).logits)


def test_inference_mode_and_no_grad():
    model, ids = tiny_model(), tokens(1, 5)
    with torch.inference_mode():
        cache = model.new_cache()
        inside = torch.cat([model(ids[:, :3], cache=cache).logits, model(ids[:, 3:], cache=cache).logits], 1)
    torch.testing.assert_close(inside.clone(), model(ids).logits.detach(), rtol=0, atol=1e-10)


def test_router_biases_move_once_a_step():
    model, ids = tiny_model().train(), tokens(4, 30)
    before = [r.e_score_correction_bias.clone() for r in model.routers()]
    model(ids)
    assert all(torch.equal(r.e_score_correction_bias, b) for r, b in zip(model.routers(), before, strict=True))
    model.update_router_bias()
    moved = [r.e_score_correction_bias.clone() for r in model.routers()]
    assert len(moved) == 4 and not any(torch.equal(a, b) for a, b in zip(moved, before, strict=True))
    model.eval()(ids)
    model.update_router_bias()
    assert all(torch.equal(r.e_score_correction_bias, b) for r, b in zip(model.routers(), moved, strict=True))


# ---- wrong input ----

IDS = tokens(2, 5)


@pytest.mark.bad_input
@pytest.mark.parametrize("arguments, error, words", [
    ({"input_ids": IDS.float()}, TypeError, "input_ids must be an integer tensor, got torch.float32"),
    ({"input_ids": [[1, 2]]}, TypeError, "input_ids must be an integer tensor, got list"),
    ({"input_ids": IDS[0]}, ValueError, "input_ids must be [B, T] with B, T >= 1, got shape (5,)"),
    ({"input_ids": IDS[:, :0]}, ValueError, "input_ids must be [B, T] with B, T >= 1, got shape (2, 0)"),
    ({"input_ids": IDS + 23}, ValueError, "input_ids must lie in 0..22 (vocab_size), got 2"),
    ({"input_ids": IDS - 23}, ValueError, "input_ids must lie in 0..22 (vocab_size), got -"),
    ({"labels": IDS[:, :4]}, ValueError, "labels must have input_ids' shape (2, 5), got (2, 4)"),
    ({"labels": IDS.float()}, TypeError, "labels must be an integer tensor, got torch.float32"),
    ({"labels": IDS + 23}, ValueError, "labels must be -100 or lie in 0..22 (vocab_size), got 2"),
    ({"labels": torch.full_like(IDS, -1)}, ValueError, "labels must be -100 or lie in 0..22 (vocab_size), got -1..-1"),
    ({"labels": torch.full_like(IDS, -100)}, ValueError, "labels hold nothing to learn: after the first token every label is -100"),
    ({"input_ids": IDS[:, :1], "labels": IDS[:, :1]}, ValueError, "labels hold nothing to learn"),
    ({"attention_mask": torch.ones(2, 4)}, ValueError, "attention_mask must have input_ids' shape (2, 5), got (2, 4)"),
    ({"attention_mask": [1, 1]}, TypeError, "attention_mask must be a tensor, got list"),
    ({"attention_mask": torch.tensor([[1] * 5, [0] * 5])}, ValueError, "attention_mask masks every token of row 1"),
    ({"attention_mask": torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])}, ValueError, "attention_mask must be left padding: zeros, then ones"),
    ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, "cu_seqlens needs one packed row (B = 1), got B = 2"),
    ({"input_ids": IDS[:1], "cu_seqlens": torch.tensor([0, 6])}, ValueError, "cu_seqlens must rise from 0 to T = 5, got [0, 6]"),
    ({"backend": "fast"}, ValueError, "backend must be one of"),
])  # fmt: skip
def test_wrong_arguments(arguments, error, words):
    with pytest.raises(error) as caught:
        tiny_model()(**{"input_ids": IDS, **arguments})
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.bad_input
def test_wrong_cache():
    model = tiny_model()
    with pytest.raises(ValueError, match="cache holds batch_size 1, input_ids has 2"):
        model(IDS, cache=model.new_cache(1))
    with pytest.raises(ValueError, match="cache belongs to a model with another config: q_lora_rank 8 and 9"):
        model(IDS, cache=tiny_model(q_lora_rank=8).new_cache(2))
    with pytest.raises(ValueError, match="cu_seqlens packs documents for training; it cannot be combined with a cache"):
        model(IDS[:1], cache=model.new_cache(1), cu_seqlens=torch.tensor([0, 5]))
    cache = model.new_cache(2)
    model(IDS, cache=cache)
    with pytest.raises(ValueError, match="attention_mask with padding is for a cache's first call; this cache has seen 5 tokens"):
        model(IDS, cache=cache, attention_mask=torch.tensor([[0, 1, 1, 1, 1]] * 2))
    for other in (model.float(), tiny_model(full_mixer="kda").float(), tiny_model(linear_mixer="mla").float()):
        cache = other.double().new_cache(2)
        other(IDS, cache=cache)
        with pytest.raises(ValueError, match="a cache serves one precision, start a new one"):
            other.float()(IDS, cache=cache)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        model.new_cache(0)
