"""MXFP4 bit for bit: ml_dtypes' tables and rounding, compressed-tensors' packing and scales."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimodel.mxfp4 import E2M1, dequantize_mxfp4, fake_quantize_mxfp4, quantize_mxfp4

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "mxfp4.npz")
CASES = sorted({name.split("/")[1] for name in GOLDEN.files if name.startswith("compressed_tensors/")})


def golden(name):
    return torch.from_numpy(GOLDEN[name])


def random_weights(seed, rows, blocks, spread):
    """Rows whose blocks have very different sizes."""
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, blocks, 32, generator=draw) * torch.exp2(torch.randint(-spread, spread + 1, (rows, blocks, 1), generator=draw))
    return w.flatten(1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compressed_tensors_bit_for_bit(case, dtype):
    packed, scale = quantize_mxfp4(golden(f"compressed_tensors/{case}/x").to(dtype))
    assert torch.equal(packed, golden(f"compressed_tensors/{case}/weight_packed"))
    assert torch.equal(scale, golden(f"compressed_tensors/{case}/weight_scale_e8m0"))
    assert torch.equal(dequantize_mxfp4(packed, scale), golden(f"compressed_tensors/{case}/dequant"))


def test_code_and_scale_tables():
    codes = golden("tables/e2m1_code")
    one_block = torch.cat([codes, codes])
    packed = (one_block[0::2] | one_block[1::2] << 4)[None]
    values = dequantize_mxfp4(packed, torch.tensor([[127]], dtype=torch.uint8))[0, :16]
    assert torch.equal(values, golden("tables/e2m1_value"))
    assert torch.equal(torch.signbit(values), torch.signbit(golden("tables/e2m1_value")))  # code 8 is minus zero
    assert values[:8].tolist() == list(E2M1)
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    ones = torch.full((255, 16), 0x22, dtype=torch.uint8)
    assert torch.equal(dequantize_mxfp4(ones, scales)[:, 0], golden("tables/e8m0_value")[:255])


def test_rounding_is_ml_dtypes():
    x = golden("round/x")
    x, expected = x[x.abs() < 7], golden("round/ml_dtypes")[x.abs() < 7]
    w = torch.zeros(len(x), 32)
    w[:, 0], w[:, 1] = x, 6.0  # a 6 beside it fixes the block's scale at 1
    packed, scale = quantize_mxfp4(w)
    assert (scale == 127).all()
    assert torch.equal(dequantize_mxfp4(packed, scale)[:, 0], expected)


def test_the_two_scale_rules():
    """From 7 times the scale on, "even" takes the next scale; "floor" clips to 6 up to 8."""
    for amax, even, floor in [(4.0, 127, 127), (6.99, 127, 127), (7.0, 128, 127), (7.99, 128, 127), (8.0, 128, 128)]:
        w = torch.full((1, 32), amax)
        assert quantize_mxfp4(w)[1].item() == even
        assert quantize_mxfp4(w, rule="floor")[1].item() == floor
    assert dequantize_mxfp4(*quantize_mxfp4(torch.full((1, 32), 7.5), rule="floor"))[0, 0] == 6.0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.integers(1, 4), st.integers(1, 3), st.integers(0, 60), st.sampled_from(["even", "floor"]))
def test_rounding_twice_is_rounding_once(seed, rows, blocks, spread, rule):
    w = random_weights(seed, rows, blocks, spread)
    packed, scale = quantize_mxfp4(w, rule=rule)
    again = quantize_mxfp4(dequantize_mxfp4(packed, scale), rule=rule)
    assert torch.equal(again[0], packed) and torch.equal(again[1], scale)
    assert torch.equal(dequantize_mxfp4(packed, scale, dtype=torch.bfloat16).float(), dequantize_mxfp4(packed, scale))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.integers(0, 60))
def test_every_weight_goes_to_a_nearest_value(seed, spread):
    """Brute force over the 16 values of each block's scale."""
    w = random_weights(seed, 2, 2, spread).double()
    packed, scale = quantize_mxfp4(w)
    step = torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    grid = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64) * step[..., None]
    nearest = (grid - w[..., None]).abs().amin(-1)
    assert torch.equal((dequantize_mxfp4(packed, scale, dtype=torch.float64) - w).abs(), nearest)


def test_extreme_blocks():
    big, small = 2.9e38, torch.finfo(torch.float32).tiny  # above 7 * 2^125 the rounded weight is 2^128, past float32
    for w in (torch.full((1, 32), big), torch.full((1, 32), -small), torch.zeros(1, 32), torch.full((1, 32), 1e-45)):
        packed, scale = quantize_mxfp4(w)
        back = dequantize_mxfp4(packed, scale, dtype=torch.float64)
        assert torch.isfinite(back).all()
        assert ((back - w).abs() <= w.abs() / 4 + 2.0**-128).all()  # half a step of the smallest scale, or a quarter of the weight
    packed, scale = quantize_mxfp4(torch.zeros(2, 64))
    assert packed.eq(0).all() and scale.eq(0).all()


def test_bytes_per_weight():
    packed, scale = quantize_mxfp4(torch.ones(3, 5, 64))
    assert packed.shape == (3, 5, 32) and scale.shape == (3, 5, 2)
    assert (packed.numel() + scale.numel()) * 8 / (3 * 5 * 64) == 4.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_straight_through(dtype):
    w = random_weights(0, 3, 2, 6).to(dtype).requires_grad_()
    y = fake_quantize_mxfp4(w)
    assert y.dtype == dtype and torch.equal(y, dequantize_mxfp4(*quantize_mxfp4(w), dtype=dtype))
    cotangent = torch.linspace(-1, 1, w.numel(), dtype=dtype).view_as(w)
    y.backward(cotangent)
    assert torch.equal(w.grad, cotangent)


@pytest.mark.bad_input
def test_refuses():
    with pytest.raises(ValueError, match=r"w \[2, 48\] needs a last dimension .* multiple of 32"):
        quantize_mxfp4(torch.ones(2, 48))
    with pytest.raises(ValueError, match="w .* last dimension"):
        quantize_mxfp4(torch.tensor(1.0))
    with pytest.raises(TypeError, match="w must be floating point, got torch.int64"):
        quantize_mxfp4(torch.ones(32, dtype=torch.int64))
    for bad in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(ValueError, match="NaN or infinite"):
            quantize_mxfp4(torch.full((32,), bad))
    with pytest.raises(ValueError, match=r"rule must be one of \('even', 'floor'\), got 'ceil'"):
        quantize_mxfp4(torch.ones(32), rule="ceil")
    packed, scale = quantize_mxfp4(torch.ones(2, 64))
    with pytest.raises(ValueError, match=r"packed \[2, 32\] and scale \[2, 1\] do not belong together"):
        dequantize_mxfp4(packed, scale[:, :1])
    with pytest.raises(ValueError, match="255, which means NaN"):
        dequantize_mxfp4(packed, torch.full_like(scale, 255))
    with pytest.raises(TypeError, match="scale must be uint8, got torch.float32"):
        dequantize_mxfp4(packed, scale.float())
