"""The readable chunk form: the recurrence in float64, at every cut and decay; and what it judges, the fast chunk forms."""

import pytest
import torch

from minimodel import kda
from minimodel.delta_rule import kda_chunkwise, why_not_native
from minimodel.delta_rule.chunkwise import decay_between
from tests.minimodel.common import assert_within
from tests.minimodel.test_delta_rule import equation, gradients, inputs

GATES = (-5.0, -60.0)  # K3's bound; decays that only a gate without one gives


def case(T=37, K=16, V=32, *, low=-5.0, dtype=torch.float64, seed=0):
    """Two sequences with two heads, and a state to begin with."""
    start = torch.randn(2, 2, K, V, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return [*inputs(2, T, 2, K, V, seed=seed, dtype=dtype, low=low), start.to(dtype)]


def chunkwise(q, k, v, g, beta, S, chunk_size):
    return kda_chunkwise(q * q.shape[-1] ** -0.5, k, v, g, beta, S, chunk_size=chunk_size)


@pytest.mark.parametrize("low", GATES)
@pytest.mark.parametrize("C", [1, 5, 16, 37, 64])
def test_chunks_are_the_recurrence(C, low):
    """Results and gradients; the last chunk is short for 5 and 16, the only one for 64."""
    x = case(K=6, V=3, low=low)
    found, wanted = gradients(lambda *a: chunkwise(*a, C), x), gradients(equation, x)
    for a, e in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-11)


@pytest.mark.parametrize("low", GATES)
def test_the_fast_torch_form_equals_it(low):
    x = case(K=6, V=3, low=low)
    for a, e in zip(kda(*x[:5], initial_state=x[5], backend="chunked", chunk_size=32), chunkwise(*x, 16), strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-11)


@pytest.mark.skipif(why_not_native() is not None, reason=f'backend "native" {why_not_native()}')
@pytest.mark.parametrize("low", GATES)
def test_the_native_kernels_equal_it(low):
    x = case(low=low, dtype=torch.float32)
    for a, e in zip(kda(*x[:5], initial_state=x[5], backend="native"), chunkwise(*(a.double() for a in x), 16), strict=True):
        assert_within(a, e, 2e-6)


def test_no_decay_overflows_in_float32():
    """64 steps at K3's bound: 1 / exp(G) would be e^320."""
    x = case(T=64, dtype=torch.float32)
    x[3] = torch.full_like(x[3], -5.0)
    for a, e in zip(chunkwise(*x, 64), equation(*(a.double() for a in x)), strict=True):
        assert a.dtype == torch.float32
        assert_within(a, e, 5e-6)


def test_the_decay_between_two_tokens_is_that_of_the_steps_between_them():
    g = inputs(T=5)[3][0, :, 0]
    decay = decay_between(g.cumsum(0))
    for i in range(5):
        for j in range(5):
            wanted = g[j + 1 : i + 1].sum(0).exp() if j <= i else torch.zeros(4, dtype=g.dtype)
            torch.testing.assert_close(decay[i, j], wanted)


def test_the_inverse_may_stand_on_either_side_of_beta():
    """The identity by which the fast forms carry errors E, and the reports what is written, X = diag(beta) E."""
    draw = torch.Generator().manual_seed(0)
    A, beta = torch.randn(16, 16, generator=draw, dtype=torch.float64).tril(-1) / 4, torch.rand(16, generator=draw, dtype=torch.float64)
    beta[3] = 0.0
    eye, b = torch.eye(16, dtype=torch.float64), torch.diag(beta)
    torch.testing.assert_close(torch.linalg.inv(eye + b @ A) @ b, b @ torch.linalg.inv(eye + A @ b), rtol=0, atol=1e-12)
