"""MXFP8 activations: the nearest value of a grid that is listed here by hand, ties to even, clipped at 448, straight-through."""

import re

import numpy as np
import pytest
import torch

from minimodel.mxfp8 import LARGEST, fake_quantize_mxfp8

# every non-negative E4M3 value, from its bits: subnormals m/8 * 2^-6, then (1 + m/8) * 2^(e-7); code 127 is NaN
GRID = np.array([(c & 7) / 8 * 2.0**-6 if c < 8 else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3) - 7) for c in range(127)])


def brute_force(x):
    """Blocks of 32 one number at a time; ties go to the even code."""
    out = np.empty_like(x)
    for i in range(0, len(x), 32):
        block = x[i : i + 32]
        amax = np.abs(block).max()
        E = -127 if amax == 0 else max(-127, int(np.floor(np.log2(amax))) - 8)
        for j, value in enumerate(block):
            size = min(abs(value) / 2.0**E, LARGEST)
            distance = np.abs(GRID - size)
            best = np.flatnonzero(distance == distance.min())
            code = best[0] if len(best) == 1 else next(c for c in best if c % 2 == 0)
            out[i + j] = np.copysign(GRID[code] * 2.0**E, value)
    return out


def test_rounding_equals_the_search_over_the_grid():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(32 * 40) * np.repeat(2.0 ** rng.integers(-30, 30, 40), 32)
    x[:32] = 0
    x[32:64] = np.linspace(-511.9, 511.9, 32)  # beyond 448: clipped
    x[64:96] = (GRID[60:92] + GRID[61:93]) / 2  # half-way between two values
    x = torch.from_numpy(x).float()
    assert np.array_equal(fake_quantize_mxfp8(x).numpy(), brute_force(x.double().numpy()).astype(np.float32))


def test_rounding_twice_changes_nothing_and_the_error_is_small():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    once = fake_quantize_mxfp8(x)
    assert torch.equal(fake_quantize_mxfp8(once), once)
    assert 0 < (once - x).abs().max() <= x.abs().max() / 8  # a block's largest may be clipped from just under 512 to 448
    assert fake_quantize_mxfp8(x.bfloat16()).dtype == torch.bfloat16


def test_the_gradient_passes_unchanged():
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weight = torch.arange(64.0).view(2, 32)
    (fake_quantize_mxfp8(x) * weight).sum().backward()
    assert torch.equal(x.grad, weight)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(32, dtype=torch.long), TypeError, "x must be floating point, got torch.int64"),
        (torch.ones(2, 33), ValueError, "x [2, 33] needs a last dimension that is a positive multiple of 32"),
        (torch.full((32,), torch.nan), ValueError, "x [32] holds NaN or infinite values"),
        (torch.tensor(1.0), ValueError, "x [] needs a last dimension"),
    ],
)
def test_what_cannot_be_stored_is_named(x, error, message):
    with pytest.raises(error, match=re.escape(message)):
        fake_quantize_mxfp8(x)
