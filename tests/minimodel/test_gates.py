"""The forget gates, their bounds and their start."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimodel import bounded_log_decay, kda, softplus_log_decay
from minimodel.delta_rule import mamba_dt_bias
from tests.minimodel.common import assert_within, golden

CASES = {
    "softplus": lambda f, A_log, bias: softplus_log_decay(f, A_log, bias),
    "lb5": lambda f, A_log, bias: bounded_log_decay(f, A_log, bias),
    "lb5_A0": lambda f, A_log, bias: bounded_log_decay(f, 0 * A_log, bias, lower_bound=-5.0),
}


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    z = golden("kda_gates")
    f, A_log, bias = (z[f"normal/{name}"].requires_grad_() for name in ("g", "A_log", "dt_bias"))
    g = CASES[case](f, A_log, bias.view(3, 16))
    assert_within(g, z[f"normal/{case}/out"], 2e-6)
    (g * z["normal/do"]).sum().backward()
    assert_within(f.grad, z[f"normal/{case}/dg"], 2e-6)
    assert_within(bias.grad, z[f"normal/{case}/ddt_bias"], 1e-4)
    if case != "lb5_A0":
        assert_within(A_log.grad, z[f"normal/{case}/dA_log"], 1e-4)


def test_golden_kimi_linear_projections():
    """The low-rank projection and the gate together, from another library's Kimi Linear."""
    z = golden("kda_gates")
    x, A_log, bias, W_a, W_b = (z[f"hf_forget_gate/{n}"] for n in ("x", "A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight"))
    g = softplus_log_decay((x @ W_a.T @ W_b.T).unflatten(-1, (3, 8)), A_log.flatten(), bias.view(3, 8))
    assert_within(g, z["hf_forget_gate/out"], 2e-6)


@settings(max_examples=40)
@given(B=st.integers(1, 3), T=st.integers(1, 5), H=st.integers(1, 3), K=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_formulas_channel_by_channel(B, T, H, K, seed):
    draw = torch.Generator().manual_seed(seed)
    f, A_log, bias = (3 * torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((B, T, H, K), (H,), (H, K)))
    bounded, unbounded = bounded_log_decay(f, A_log, bias), softplus_log_decay(f, A_log, bias)
    for b, t, h, k in itertools.product(*map(range, f.shape)):
        A, z = math.exp(A_log[h]), float(f[b, t, h, k] + bias[h, k])
        softplus = z if z > 30 else math.log1p(math.exp(z))
        assert math.isclose(float(unbounded[b, t, h, k]), -A * softplus, rel_tol=1e-9, abs_tol=1e-300)
        expected = -5 / (1 + math.exp(-A * z)) if A * z > -700 else 0.0
        assert math.isclose(float(bounded[b, t, h, k]), expected, rel_tol=1e-9, abs_tol=1e-300)


def test_the_bound_is_not_a_clamp():
    """Inside the bound the gate still answers to its input everywhere; only float32 saturates it, at -5 and at 0."""
    f = torch.linspace(-12, 12, 101, dtype=torch.float64).view(1, -1, 1, 1).requires_grad_()
    g = bounded_log_decay(f, torch.zeros(1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64))
    g.sum().backward()
    assert bool((f.grad < 0).all()) and bool((g > -5).all()) and bool((g < 0).all())
    far = bounded_log_decay(torch.tensor([-1e4, 1e4]).view(1, 2, 1, 1), torch.zeros(1), torch.zeros(1, 1))
    assert far.flatten().tolist() == [0.0, -5.0]
    assert float(softplus_log_decay(torch.full((1, 1, 1, 1), 142.0), torch.zeros(1), torch.zeros(1, 1))) == -142.0


@pytest.mark.parametrize("dtype, result", [
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64),
])  # fmt: skip
def test_precision(dtype, result):
    f = torch.randn(1, 2, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    for gate in (bounded_log_decay, softplus_log_decay):
        g = gate(f, torch.tensor([0.2, 0.4]), torch.full((2, 3), 0.1))
        assert g.dtype == result
        assert_within(g, gate(f.double(), torch.tensor([0.2, 0.4]), torch.full((2, 3), 0.1)), 1e-6)


@pytest.mark.parametrize("gate", [bounded_log_decay, softplus_log_decay])
def test_finite_differences(gate):
    draw = torch.Generator().manual_seed(0)
    arguments = [torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in ((2, 2, 2, 3), (2,), (2, 3))]
    assert torch.autograd.gradcheck(gate, arguments)


def test_initial_retentions():
    """The published start: one-step retentions from 0.995 (slow channels) to 0.62 (fast ones) where A_log and f are zero."""
    bias = mamba_dt_bias((4, 500), torch.Generator().manual_seed(0))
    alpha = bounded_log_decay(torch.zeros(1, 1, 4, 500), torch.zeros(4), bias).exp()
    assert 0.615 < float(alpha.min()) < 0.63 and 0.994 < float(alpha.max()) < 0.9955
    step = torch.nn.functional.softplus(bias)
    assert 1e-3 <= float(step.min()) * 1.001 and float(step.max()) <= 0.1001
    assert abs(float(step.log().mean()) - math.log(0.01)) < 0.1  # log-uniform: centered on the geometric mean
    assert torch.equal(bias, mamba_dt_bias((4, 500), torch.Generator().manual_seed(0)))


@pytest.mark.bad_input
@pytest.mark.parametrize("gate", [bounded_log_decay, softplus_log_decay])
@pytest.mark.parametrize("shapes, words", [
    (((2, 3, 4), (3,), (3, 4)), "f must be [B, T, H, K], got shape (2, 3, 4)"),
    (((1, 2, 3, 4), (4,), (3, 4)), "A_log must be [H] = (3,) for f of shape (1, 2, 3, 4), got (4,)"),
    (((1, 2, 3, 4), (3,), (12,)), "dt_bias must be [H, K] = (3, 4) for f of shape (1, 2, 3, 4), got (12,)"),
])  # fmt: skip
def test_wrong_shapes(gate, shapes, words):
    with pytest.raises(ValueError) as caught:
        gate(*(torch.zeros(s) for s in shapes))
    assert str(caught.value) == words


@pytest.mark.bad_input
@pytest.mark.parametrize("bound", [0.0, -5.1, 1.0, math.nan])
def test_wrong_bound(bound):
    with pytest.raises(ValueError, match=r"lower_bound must lie in \[-5, 0\), got"):
        bounded_log_decay(torch.zeros(1, 1, 1, 1), torch.zeros(1), torch.zeros(1, 1), bound)


@pytest.mark.bad_input
@pytest.mark.parametrize("gate", [bounded_log_decay, softplus_log_decay])
def test_integers_are_refused(gate):
    with pytest.raises(TypeError, match="f must be a floating-point tensor, got torch.int64"):
        gate(torch.zeros(1, 1, 1, 1).long(), torch.zeros(1), torch.zeros(1, 1))


def test_bounded_gate_needs_no_more_than_its_bound():
    """The extremes of the bounded gate, saturated in float32, are still legal log-decays."""
    f = torch.tensor([-1e9, -20.0, 0.0, 20.0, 1e9]).view(1, 5, 1, 1)
    g = bounded_log_decay(f, torch.zeros(1), torch.zeros(1, 1))
    ones = torch.ones(1, 5, 1, 1)
    assert bool(torch.isfinite(kda(ones, ones, ones, g, torch.ones(1, 5, 1))[0]).all())
