"""Gated MLA: the released module's numbers, absorbed decode against prefill, masks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimodel import GatedMLA, K3Config, record
from minimodel.cache import Rows
from minimodel.mla import attention_mask
from tests.minimodel.common import assert_within, golden, tiny_model

KINDS = {"k3": {}, "kimi linear": {"q_lora_rank": None, "mla_use_output_gate": False}}


def layer(**changes):
    return tiny_model(**changes).model.layers[2].self_attn


def hidden(B, T, seed=0):
    return torch.randn(B, T, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("case", ["k3_gated_qlora", "ungated"])
def test_golden(case):
    z = golden("mla")
    m = GatedMLA(K3Config.from_hf(z.config(f"{case}/config")))
    m.load_state_dict(z.under(f"{case}/w:"))
    assert_within(m(z[f"{case}/x"]), z[f"{case}/out"], 2e-6)


def test_golden_gradients():
    z, case = golden("mla"), "k3_gated_qlora"
    m = GatedMLA(K3Config.from_hf(z.config(f"{case}/config")))
    m.load_state_dict(z.under(f"{case}/w:"))
    x = z[f"{case}/x"].requires_grad_()
    m(x).backward(z[f"{case}/do"])
    assert_within(x.grad, z[f"{case}/dx"], 1e-4)
    gradients = z.under(f"{case}/d:")
    assert gradients.keys() == dict(m.named_parameters()).keys()
    for name, d in gradients.items():
        assert_within(m.get_parameter(name).grad, d, 1e-4)


def test_golden_tells_the_eps_of_the_latent_norms():
    """1e-6, unlike every other norm: with 1e-5 the module leaves its tolerance."""
    z = golden("mla")
    m = GatedMLA(K3Config.from_hf(z.config("k3_gated_qlora/config")))
    m.load_state_dict(z.under("k3_gated_qlora/w:"))
    m.q_a_layernorm.eps = m.kv_a_layernorm.eps = 1e-5
    with pytest.raises(AssertionError, match="relative error"):
        assert_within(m(z["k3_gated_qlora/x"]), z["k3_gated_qlora/out"], 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_layer_is_its_equation(kind):
    """Head by head and token by token, from the layer's own weights."""
    m, x = layer(**KINDS[kind]), hidden(2, 6)
    H, N, R, V, L = m.num_heads, m.nope, m.extra, m.v_dim, m.rank

    def norm(a, gain):
        return gain * a / (a.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    q = m.q_proj(x) if kind == "kimi linear" else norm(x @ m.q_a_proj.weight.T, m.q_a_layernorm.weight) @ m.q_b_proj.weight.T
    latent = x @ m.kv_a_proj_with_mqa.weight.T
    c, e = norm(latent[..., :L], m.kv_a_layernorm.weight), latent[..., L:]
    heads = []
    for h in range(H):
        W = m.kv_b_proj.weight[h * (N + V) : (h + 1) * (N + V)]
        k = torch.cat([c @ W[:N].T, e], -1)  # the extra channels are one shared head, never rotated, never normed
        v, q_h = c @ W[N:].T, q[..., h * (N + R) : (h + 1) * (N + R)]
        scores = q_h @ k.mT / (N + R) ** 0.5
        scores += torch.full((6, 6), -torch.inf, dtype=torch.float64).triu(1)
        heads.append(scores.softmax(-1) @ v)
    o = torch.cat(heads, -1)
    if kind == "k3":
        o = torch.sigmoid(x @ m.g_proj.weight.T) * o  # no norm on o, unlike KDA
    torch.testing.assert_close(m(x), o @ m.o_proj.weight.T, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", [1, 2, 7])
def test_absorbed_decode_equals_prefill_at_every_split(kind, T):
    m, x = layer(**KINDS[kind]), hidden(2, T)
    whole = m(x)
    with torch.no_grad():
        for split in range(T):
            cache = Rows()
            parts = [m(x[:, :split], cache=cache)] if split else []
            parts += [m(x[:, t : t + 1], cache=cache) for t in range(split, T)]
            torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
            assert cache.live.shape == (2, T, m.rank + m.extra)


def test_chunked_prefill():
    """Several tokens onto a filled cache: neither the first prefill nor one-token decode."""
    m, x = layer(), hidden(2, 12)
    with torch.no_grad():
        for a, b in ((1, 3), (4, 5), (5, 11)):
            cache = Rows()
            parts = [m(p, cache=cache) for p in (x[:, :a], x[:, a:b], x[:, b:])]
            torch.testing.assert_close(torch.cat(parts, 1), m(x), rtol=0, atol=1e-12)


def test_no_token_sees_the_future():
    m, x = layer(), hidden(1, 10)
    y = m(x)
    for t in range(10):
        other = m(torch.cat([x[:, :t], hidden(1, 10, seed=1)[:, t:]], 1))
        assert torch.equal(other[:, :t], y[:, :t])
        assert (other[:, t] - y[:, t]).abs().max() > 1e-3


def test_order_of_the_past_does_not_matter():
    """No positions in MLA (NoPE): a token reads a set."""
    m, x = layer(), hidden(1, 8)
    shuffled = torch.cat([x[:, torch.randperm(7, generator=torch.Generator().manual_seed(0))], x[:, 7:]], 1)
    torch.testing.assert_close(m(shuffled)[:, -1], m(x)[:, -1], rtol=0, atol=1e-13)


@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_packed_documents(lengths):
    m, x = layer(), hidden(1, sum(lengths))
    y = m(x, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    torch.testing.assert_close(y, torch.cat([m(part) for part in x.split(lengths, 1)], 1), rtol=0, atol=1e-12)


def test_left_padding():
    m = layer()
    short, long = hidden(1, 5), hidden(1, 8, seed=1)
    batch = torch.cat([torch.cat([50 * hidden(1, 3, seed=2), short], 1), long])
    padding = torch.tensor([3, 0])
    y = m(batch, padding=padding)
    torch.testing.assert_close(y[0, 3:], m(short)[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(y[1], m(long)[0], rtol=0, atol=1e-12)
    assert bool(torch.isfinite(y).all())
    with torch.no_grad():
        cache = Rows()
        steps = [m(batch[:, t : t + 1], cache=cache, padding=padding) for t in range(8)]
    torch.testing.assert_close(torch.cat(steps, 1)[0, 3:], m(short)[0], rtol=0, atol=1e-12)


def test_a_recorder_sees_the_same_attention_in_both_forms():
    m, x = layer(), hidden(1, 6)
    with torch.no_grad(), record(m) as trace:
        y = m(x)
        prefill, gate, latent = (trace[f"layers.2.mla.{name}"] for name in ("attention", "gate", "latent"))
        cache = Rows()
        for t in range(6):
            last = m(x[:, t : t + 1], cache=cache)
        torch.testing.assert_close(trace["layers.2.mla.attention"][:, :, 0], prefill[:, :, -1], rtol=0, atol=1e-12)
    torch.testing.assert_close(prefill.sum(-1), torch.ones(1, 3, 6, dtype=torch.float64))
    torch.testing.assert_close(last[:, 0], y[:, -1], rtol=0, atol=1e-12)
    assert gate.shape == (1, 6, 3, 5) and latent.shape == (1, 6, 14)


@pytest.mark.parametrize("kind", KINDS)
def test_finite_differences(kind):
    small = {"num_attention_heads": 1, "qk_nope_head_dim": 2, "qk_rope_head_dim": 1, "v_head_dim": 2, "kv_lora_rank": 2, "q_lora_rank": 2}
    m = layer(**{**small, **KINDS[kind]})
    x = hidden(1, 3).requires_grad_()
    weights = [w for w in m.parameters() if w.numel() <= 60]
    assert len(weights) >= 4
    assert torch.autograd.gradcheck(lambda x, *_: m(x), (x, *weights))


def test_mask_by_hand():
    device = torch.device("cpu")
    on = attention_mask(3, 4, device, window=2)[0, 0]
    assert on.tolist() == [[True, True, False, False], [False, True, True, False], [False, False, True, True]]
    on = attention_mask(4, 4, device, cu_seqlens=torch.tensor([0, 1, 4]))[0, 0]
    assert on.int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    on = attention_mask(3, 3, device, padding=torch.tensor([2, 0]))[:, 0]
    assert on.int().tolist() == [[[1, 0, 0], [0, 1, 0], [0, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
