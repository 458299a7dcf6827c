"""Stable LatentMoE and SiTU-GLU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimodel import K3Config, StableLatentMoE, situ_glu
from minimodel.latent_moe import RoutedExperts
from minimodel.layers import GatedMLP, glu
from tests.minimodel.common import assert_within, golden, tiny_config, tiny_model


def fill(moe, weights):
    """Load released tensors: one matrix an expert there, one stack a letter here."""
    stacked = {name: t for name, t in weights.items() if not name.startswith("experts.")}
    for letter in ("w1", "w2", "w3"):
        stacked[f"experts.{letter}"] = torch.stack([weights[f"experts.{e}.{letter}.weight"] for e in range(8)])
    moe.load_state_dict(stacked)
    return moe


# ---- other people's numbers ----


@pytest.mark.parametrize("case", ["topk1", "no_latent_silu"])
def test_golden_block(case):
    z = golden("latent_moe")
    moe = fill(StableLatentMoE(K3Config.from_hf(z.config(f"{case}/config"))), z.under(f"{case}/w:")).eval()
    x = z[f"{case}/x"]
    assert_within(moe(x), z[f"{case}/out"], 2e-6)
    weights, indices = moe.gate(x.flatten(0, 1))  # the norm after the sum hides a wrong scale, so the weights are held on their own
    order, theirs = indices.argsort(1), z[f"{case}/topk_idx"].argsort(1)
    assert torch.equal(indices.gather(1, order), z[f"{case}/topk_idx"].gather(1, theirs))
    assert_within(weights.gather(1, order), z[f"{case}/topk_weight"].gather(1, theirs), 2e-6)


@pytest.mark.parametrize("case", ["k3", "beta1", "b4_nolin"])
def test_golden_situ(case):
    z = golden("latent_moe")
    x, beta, linear_beta = (z[f"situ/{case}_float32/{n}"] for n in ("x", "beta", "linear_beta"))
    beta, linear_beta = float(beta), None if linear_beta.isnan() else float(linear_beta)
    x.requires_grad_()
    y = situ_glu(*x.chunk(2, -1), beta, linear_beta)
    assert_within(y, z[f"situ/{case}_float32/out"], 2e-6)
    y.backward(z[f"situ/{case}_float32/do"])
    assert_within(x.grad, z[f"situ/{case}_float32/dx"], 1e-4)
    x = z[f"situ/{case}_bfloat16/x"].bfloat16()
    y = situ_glu(*x.chunk(2, -1), beta, linear_beta)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y.float(), z[f"situ/{case}_bfloat16/out"])  # one rounding, at the end


# ---- SiTU ----


def test_situ_is_bounded_and_starts_as_swiglu():
    big = torch.tensor([-1e30, -50.0, 50.0, 1e30], dtype=torch.float64)
    assert float(situ_glu(big[:, None].expand(4, 4), big.expand(4, 4)).abs().max()) == pytest.approx(100.0)
    small = torch.linspace(-1e-3, 1e-3, 11, dtype=torch.float64)
    swiglu = torch.nn.functional.silu(small)[:, None] * small
    assert float((situ_glu(small[:, None].expand(11, 11), small.expand(11, 11)) - swiglu).abs().max()) < 1e-13
    wide = torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(situ_glu(wide, wide, 1e6, 1e6), torch.nn.functional.silu(wide) * wide)


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_situ_finite_differences(linear_beta):
    gate, up = (torch.randn(2, 3, generator=torch.Generator().manual_seed(s), dtype=torch.float64).requires_grad_() for s in (0, 1))
    assert torch.autograd.gradcheck(lambda a, b: situ_glu(a, b, 4.0, linear_beta), (gate, up))


def test_the_config_names_the_activation():
    gate, up = torch.tensor([3.0]), torch.tensor([2.0])
    assert torch.equal(glu(gate, up, tiny_config()), situ_glu(gate, up, 4.0, 25.0))
    assert torch.equal(glu(gate, up, tiny_config(hidden_act="silu")), torch.nn.functional.silu(gate) * up)


# ---- the experts ----


def experts(E=6, dtype=torch.float64, **changes):
    m = RoutedExperts(tiny_config(num_experts=E, **changes), 12).to(dtype)
    with torch.no_grad():
        for i, w in enumerate(m.parameters()):
            w.copy_(torch.randn(w.shape, generator=torch.Generator().manual_seed(i), dtype=dtype))
    return m


@settings(max_examples=40)
@given(S=st.integers(1, 12), E=st.integers(1, 7), data=st.data(), seed=st.integers(0, 10**6))
def test_grouped_experts_equal_a_plain_loop(S, E, data, seed):
    k = data.draw(st.integers(1, E))
    m, draw = experts(E, num_experts_per_token=1), torch.Generator().manual_seed(seed)
    z, p = torch.randn(S, 12, generator=draw, dtype=torch.float64), torch.rand(S, k, generator=draw, dtype=torch.float64)
    indices = torch.stack([torch.randperm(E, generator=draw)[:k] for _ in range(S)])
    expected = torch.zeros(S, 12, dtype=torch.float64)
    for t in range(S):
        for j, e in enumerate(indices[t].tolist()):
            hidden = situ_glu(m.w1[e] @ z[t], m.w3[e] @ z[t])
            expected[t] += p[t, j] * (m.w2[e] @ hidden)
    torch.testing.assert_close(m(z, p, indices), expected)


def test_cost_follows_routed_tokens_not_experts(monkeypatch):
    """Ten times the experts, the same tokens: the matrix products multiply the same number of rows."""
    from minimodel import latent_moe

    rows = []

    def counting(inputs, w, loads, real=latent_moe._grouped):
        rows.append([n for n in loads if n])
        return real(inputs, w, loads)

    monkeypatch.setattr(latent_moe, "_grouped", counting)
    z, p, indices = torch.zeros(5, 12), torch.ones(5, 2), torch.tensor([[0, 1]] * 5)
    for E in (6, 60):
        experts(E, torch.float32)(z, p, indices)
    assert rows == [[5, 5]] * 6  # three products a call, two experts busy, idle ones not visited


def test_idle_experts_get_no_gradient():
    m = experts()
    m(torch.ones(3, 12, dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64), torch.tensor([[4], [4], [1]])).sum().backward()
    assert [bool(g.any()) for g in m.w2.grad] == [False, True, False, False, True, False]


# ---- the block ----


def block(**changes):
    return tiny_model(**changes).model.layers[1].block_sparse_moe


def hidden(B, T):
    return torch.randn(B, T, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("changes", [
    {}, {"latent_moe_use_norm": False}, {"routed_expert_hidden_size": None}, {"num_shared_experts": 0}, {"num_experts_per_token": 6},
], ids=["k3", "no norm", "no latent", "no shared", "all experts"])  # fmt: skip
def test_block_is_its_equation(changes):
    m, x = block(routed_scaling_factor=1.5, **changes), hidden(2, 4)
    expected = torch.zeros_like(x)
    for b in range(2):
        for t in range(4):
            h = x[b, t]
            scores = torch.sigmoid(m.gate.weight @ h)  # the router reads the full width
            chosen = (scores + m.gate.e_score_correction_bias).topk(m.gate.top_k).indices
            z = m.routed_expert_down_proj(h) if m.routed_expert_down_proj is not None else h
            p = 1.5 * scores / scores[chosen].sum()
            u = sum(p[e] * (m.experts.w2[e] @ situ_glu(m.experts.w1[e] @ z, m.experts.w3[e] @ z)) for e in chosen)
            if m.routed_expert_norm is not None:  # after the sum
                u = m.routed_expert_norm.weight * u / (u.square().mean() + 1e-5).sqrt()
            y = m.routed_expert_up_proj(u) if m.routed_expert_up_proj is not None else u
            expected[b, t] = y + m.shared_experts(h) if m.shared_experts is not None else y
    torch.testing.assert_close(m(x), expected, rtol=1e-10, atol=1e-11)
    assert (m.routed_expert_norm is not None) == (changes.get("latent_moe_use_norm", True) and "routed_expert_hidden_size" not in changes)


def test_fused_shared_experts_are_two_summed():
    """One MLP of twice the width is the sum of two experts on its halves."""
    m, x = block().shared_experts, hidden(1, 3)

    def expert(rows):
        return situ_glu(x @ m.gate_proj.weight[rows].T, x @ m.up_proj.weight[rows].T) @ m.down_proj.weight[:, rows].T

    torch.testing.assert_close(m(x), expert(slice(0, 7)) + expert(slice(7, 14)))


def test_gated_mlp_finite_differences():
    m = GatedMLP(tiny_config(hidden_size=3), 2).double()
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: m(x), (x, *m.parameters()))


@pytest.mark.parametrize("changes", [{}, {"routed_expert_hidden_size": None, "num_experts_per_token": 1}], ids=["k3", "no latent"])
def test_block_finite_differences(changes):
    m, x = block(**changes), hidden(1, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: m(x), (x, *m.parameters()), fast_mode=True)


def test_rows_are_independent():
    m, x = block(), hidden(2, 5)
    torch.testing.assert_close(m(x)[1:, 2:3], m(x[1:, 2:3]), rtol=0, atol=1e-13)


@pytest.mark.bad_input
@pytest.mark.parametrize("arguments, words", [
    ((torch.zeros(2, 3), torch.zeros(2, 4)), "up must have gate's shape (2, 3), got (2, 4)"),
    ((torch.zeros(2), torch.zeros(2), 0.0), "beta and linear_beta must be positive (or linear_beta None), got 0.0 and 25.0"),
    ((torch.zeros(2), torch.zeros(2), 4.0, -1.0), "beta and linear_beta must be positive (or linear_beta None), got 4.0 and -1.0"),
])  # fmt: skip
def test_wrong_arguments(arguments, words):
    with pytest.raises(ValueError) as caught:
        situ_glu(*arguments)
    assert str(caught.value) == words
