"""The KDA layer and its small parts: convolution, norms, cache, documents, padding."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from minimodel import KimiDeltaAttention, kda, record
from minimodel.cache import FixedState
from minimodel.delta_rule import bounded_log_decay
from minimodel.layers import l2norm, rms_norm, short_conv
from tests.minimodel.common import assert_within, golden, tiny_config, tiny_model

SOFTPLUS = {"gate_lower_bound": None, "use_full_rank_gate": False}


def layer(**changes):
    """A KDA layer with every parameter drawn, in float64."""
    return tiny_model(linear_attn_config=replace(tiny_config().linear_attn_config, **changes)).model.layers[0].self_attn


def hidden(B, T, seed=0):
    return torch.randn(B, T, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- other people's numbers ----


def test_golden_layer():
    """The released code's KDA: what goes into its operator, what comes out, and the layer's output."""
    z = golden("kimi_k3_tiny")
    calls = z.under("full/layer4.chunk_kda/")
    q, k = l2norm(calls["q"]), l2norm(calls["k"])
    g = bounded_log_decay(calls["g"], calls["A_log"], calls["dt_bias"].view(4, 16))
    for backend in ("recurrent", "chunked"):
        o, S = kda(q, k, calls["v"], g, torch.sigmoid(calls["beta"]), backend=backend)
        assert_within(o, calls["o"], 2e-6)
        assert_within(S.transpose(-1, -2), calls["final_state_vfirst"], 2e-6)


def test_golden_convolution():
    z, name = golden("kda_gates"), "hf_causal_conv1d_silu"
    x, weight = z[f"{name}/x"].transpose(1, 2), z[f"{name}/weight"]
    y, tail = short_conv(x, weight)
    assert_within(F.silu(y), z[f"{name}/out"].transpose(1, 2), 2e-6)
    assert torch.equal(tail, z[f"{name}/final_state"].transpose(1, 2))
    steps, tail = [], None
    for t in range(x.shape[1]):
        y, tail = short_conv(x[:, t : t + 1], weight, tail)
        steps.append(y)
    assert_within(F.silu(torch.cat(steps, 1)), z[f"{name}/out_stepwise"].transpose(1, 2), 2e-6)


def test_golden_gated_norm_and_l2norm():
    z, name = golden("kda_gates"), "hf_rmsnorm_gated_sigmoid"
    y = rms_norm(z[f"{name}/x"], z[f"{name}/weight"], float(z[f"{name}/eps"])) * torch.sigmoid(z[f"{name}/gate"])
    assert_within(y, z[f"{name}/out"], 2e-6)
    assert_within(l2norm(z["hf_l2norm/x"]), z["hf_l2norm/out"], 2e-6)


def test_eps_is_added_to_the_sum_for_l2norm_and_to_the_mean_for_rms_norm():
    x = torch.full((1, 4), 1e-3, dtype=torch.float64)
    torch.testing.assert_close(l2norm(x), x / (4e-6 + 1e-6) ** 0.5)
    torch.testing.assert_close(rms_norm(x, eps=1e-6), x / (1e-6 + 1e-6) ** 0.5)


# ---- convolution ----


@settings(max_examples=40)
@given(B=st.integers(1, 3), T=st.integers(1, 9), P=st.integers(1, 4), W=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_convolution_tap_by_tap(B, T, P, W, seed):
    draw = torch.Generator().manual_seed(seed)
    x, w, before = (torch.randn(s, generator=draw, dtype=torch.float64) for s in ((B, T, P), (P, W), (B, W - 1, P)))
    y, tail = short_conv(x, w, before)
    past = torch.cat([before, x], 1)
    for t in range(T):
        expected = sum(w[:, i] * past[:, t + i] for i in range(W))  # the last tap multiplies the current token
        torch.testing.assert_close(y[:, t], expected)
    assert torch.equal(tail, past[:, T:])


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5), W=st.integers(1, 5))
def test_convolution_of_packed_documents(lengths, W):
    draw = torch.Generator().manual_seed(W)
    x, w = torch.randn(1, sum(lengths), 3, generator=draw, dtype=torch.float64), torch.randn(3, W, generator=draw, dtype=torch.float64)
    y, _ = short_conv(x, w, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    torch.testing.assert_close(y, torch.cat([short_conv(part, w)[0] for part in x.split(lengths, 1)], 1))


def test_a_tail_keeps_no_long_prompt_alive():
    _, tail = short_conv(torch.zeros(1, 1000, 2), torch.zeros(2, 4))
    assert tail.untyped_storage().nbytes() == tail.nbytes


def test_convolution_finite_differences():
    draw = torch.Generator().manual_seed(0)
    x, w, tail = (torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in ((2, 5, 2), (2, 4), (2, 3, 2)))
    assert torch.autograd.gradcheck(short_conv, (x, w, tail))
    assert torch.autograd.gradgradcheck(short_conv, (x, w, tail))
    row, bounds = x[:1].detach().requires_grad_(), torch.tensor([0, 2, 5])
    assert torch.autograd.gradcheck(lambda x, w: short_conv(x, w, cu_seqlens=bounds)[0], (row, w))


@pytest.mark.parametrize("norm", [l2norm, lambda x: rms_norm(x, torch.tensor([0.5, 2.0, -1.0], dtype=torch.float64))])
def test_norm_finite_differences(norm):
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(norm, (x,))


# ---- the layer ----


@pytest.mark.parametrize("changes", [{}, SOFTPLUS, {"short_conv_kernel_size": 1}], ids=["k3", "kimi linear", "no taps"])
def test_layer_is_its_equation(changes):
    """Token by token, in the words of the report, from the layer's own weights."""
    m, x = layer(**changes), hidden(2, 7)
    H, K = m.num_heads, m.head_dim

    def conv(name):
        y = getattr(m, f"{name}_proj")(x)
        w = getattr(m, f"{name}_conv1d").weight[:, 0]
        past = torch.cat([y.new_zeros(2, w.shape[1] - 1, H * K), y], 1)
        y = sum(w[:, i] * past[:, i : i + 7] for i in range(w.shape[1]))
        return (y * torch.sigmoid(y)).view(2, 7, H, K)

    q, k, v = conv("q"), conv("k"), conv("v")
    q, k = (a / (a.square().sum(-1, keepdim=True) + 1e-6).sqrt() for a in (q, k))
    z = (m.f_b_proj(m.f_a_proj(x)) + m.dt_bias).view(2, 7, H, K)
    A = m.A_log.exp()[:, None]
    alpha = torch.exp(-A * torch.log1p(z.exp()) if changes is SOFTPLUS else -5 / (1 + torch.exp(-A * z)))
    beta = torch.sigmoid(m.b_proj(x))
    gate = torch.sigmoid(m.g_b_proj(m.g_a_proj(x)) if changes is SOFTPLUS else m.g_proj(x)).view(2, 7, H, K)
    S, eye, outputs = torch.zeros(2, H, K, K, dtype=torch.float64), torch.eye(K, dtype=torch.float64), []
    for t in range(7):
        kk, b = k[:, t, :, :, None], beta[:, t, :, None, None]
        S = (eye - b * kk @ kk.mT) @ torch.diag_embed(alpha[:, t]) @ S + b * kk @ v[:, t, :, None]
        outputs.append((S.mT @ q[:, t, :, :, None])[..., 0] * K**-0.5)
    o = torch.stack(outputs, 1)
    o = m.o_norm.weight * o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = m.o_proj((gate * o).flatten(2))
    for backend in ("recurrent", "chunked"):
        torch.testing.assert_close(m(x, backend=backend), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("changes", [{}, SOFTPLUS], ids=["k3", "kimi linear"])
def test_layer_finite_differences(changes):
    m = layer(num_heads=1, head_dim=2, **changes)
    x = hidden(1, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: m(x), (x, *m.parameters()), fast_mode=True)


@pytest.mark.parametrize("T", [1, 2, 5, 19])
def test_prefill_equals_decode_at_every_split(T):
    m, x = layer(), hidden(2, T)
    whole = m(x)
    for split in range(T):
        cache = FixedState()
        parts = [m(x[:, :split], cache=cache)] if split else []
        parts += [m(x[:, t : t + 1], cache=cache) for t in range(split, T)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
        assert cache.tail.shape == (2, 3, 3 * 16) and cache.state.shape == (2, 2, 8, 8)


def test_no_token_sees_the_future():
    m, x = layer(), hidden(1, 20)
    y = m(x)
    for t in (0, 1, 7, 19):
        other = m(torch.cat([x[:, :t], hidden(1, 20, seed=1)[:, t:]], 1))
        torch.testing.assert_close(other[:, :t], y[:, :t], rtol=0, atol=1e-13)
        assert (other[:, t] - y[:, t]).abs().max() > 1e-4


@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_packed_documents(lengths):
    m, x = layer(), hidden(1, sum(lengths))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    alone = torch.cat([m(part) for part in x.split(lengths, 1)], 1)
    torch.testing.assert_close(m(x, cu_seqlens=bounds), alone, rtol=0, atol=1e-12)
    with record(m) as trace:  # the recorder takes the token loop: it must stop at the bounds as well
        torch.testing.assert_close(m(x, cu_seqlens=bounds), alone, rtol=0, atol=1e-12)
    assert trace["layers.0.kda.state"].shape == (1, sum(lengths), 2, 8, 8)


@pytest.mark.parametrize("pad", [1, 2, 3, 4, 7])
def test_left_padding_leaves_no_trace(pad):
    m, x = layer(), hidden(1, 9)
    junk = 10 * hidden(1, pad, seed=5)
    mask = torch.tensor([[False] * pad + [True] * 9])
    cache, alone = FixedState(), FixedState()
    padded = m(torch.cat([junk, x], 1), mask=mask, cache=cache)[:, pad:]
    torch.testing.assert_close(padded, m(x, cache=alone), rtol=0, atol=1e-12)
    torch.testing.assert_close(cache.state, alone.state, rtol=0, atol=1e-12)
    torch.testing.assert_close(cache.tail, alone.tail, rtol=0, atol=1e-12)


def test_start_of_training():
    """K3: A_log = 0; Kimi Linear: exp(A_log) uniform in 1..16; the same Mamba-style bias in both."""
    k3 = KimiDeltaAttention(tiny_config())
    k3.reset_parameters()
    assert k3.A_log.abs().max() == 0
    config = tiny_config(linear_attn_config=replace(tiny_config().linear_attn_config, num_heads=500, head_dim=1, **SOFTPLUS))
    linear = KimiDeltaAttention(config)
    linear.reset_parameters()
    A = linear.A_log.detach().exp()
    assert 1 <= float(A.min()) < 1.5 and 15.5 < float(A.max()) <= 16
    for m in (k3, linear):
        step = F.softplus(m.dt_bias.detach())
        assert 0.99e-3 <= float(step.min()) and float(step.max()) <= 0.1001


def test_bfloat16_layer_keeps_a_float32_state():
    m, x = layer().to(torch.bfloat16), hidden(1, 20).to(torch.bfloat16)
    cache = FixedState()
    y = m(x, cache=cache)
    assert y.dtype == torch.bfloat16 and cache.state.dtype == torch.float32 and cache.tail.dtype == torch.bfloat16
    assert_within(y, layer()(hidden(1, 20)), 0.05)


def test_a_cached_state_may_lie_in_memory_as_it_likes():
    m, x = layer(), hidden(2, 5)
    whole, cache = m(x), FixedState()
    m(x[:, :4], cache=cache)
    cache.state = cache.state.transpose(0, 1).contiguous().transpose(0, 1)
    with torch.no_grad():
        torch.testing.assert_close(m(x[:, 4:], cache=cache), whole[:, 4:], rtol=0, atol=1e-12)


@pytest.mark.bad_input
@pytest.mark.parametrize("backend", ["auto", "recurrent", "chunked"])
def test_a_cache_of_another_batch_is_refused(backend):
    m, cache = layer(), FixedState()
    m(hidden(2, 3), cache=cache)
    with torch.no_grad(), pytest.raises(ValueError, match="cache holds 2 sequences, x has 3"):
        m(hidden(3, 1), cache=cache, backend=backend)


@pytest.mark.bad_input
@pytest.mark.parametrize("tail, bounds, words", [
    (torch.zeros(1, 3, 2), torch.tensor([0, 5]), "tail continues one sequence and cu_seqlens packs several: give one of them"),
    (torch.zeros(1, 3, 2, dtype=torch.float64), None, "tail holds torch.float64, x is torch.float32: a cache serves one precision"),
])  # fmt: skip
def test_wrong_tails(tail, bounds, words):
    with pytest.raises(ValueError) as caught:
        short_conv(torch.zeros(1, 5, 2), torch.zeros(2, 4), tail, bounds)
    assert words in str(caught.value)
