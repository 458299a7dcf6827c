"""Steps of notebook 5, MXFP4: the scale of a block, the codes, two codes a byte, and training through the rounding (K3 report 4.1.4)."""

from __future__ import annotations

import torch

from minimodel import mxfp4
from minimodel.checks.grading import Step


# ---- the scale ----
def reference_scale(w):
    return mxfp4.quantize_mxfp4(w)[1]


def _weights(draw):
    """Blocks of very different size, one of zeros, and some just below and above the place where the scale steps up."""
    w = draw.normal(3, 96) * 2.0 ** draw.integers(-9, 9, 3, 3).repeat_interleave(32, 1)
    w[0, :32] = 0
    for row, largest in ((1, 3.4), (2, 3.6)):
        w[row, :32] = w[row, :32].clamp(-3, 3)
        w[row, 5] = largest
    return {"w": w}


mxfp4_scale = Step("mxfp4_scale", reference_scale, _weights, ("scale [rows blocks]",))


def _exponent(w):
    """floor(log2(amax)) of every block of 32, exactly; 0 where all is zero."""
    amax = w.unflatten(-1, (-1, 32)).abs().amax(-1)
    return torch.frexp(amax)[1] - 1, amax


def _byte(E, amax):
    return torch.where(amax == 0, 0, E + 127).clamp(0, 254).to(torch.uint8)


@mxfp4_scale.slip("this is the OCP rule, floor(log2(amax)) - 2. Here amax is rounded to one mantissa bit first: it steps up at 1.75 * 2^n")
def ocp_floor(w):
    E, amax = _exponent(w)
    return _byte(E - 2, amax)


@mxfp4_scale.slip("the exponent was rounded up, so that half of the codes stay unused. It is a floor: 2 less than that of amax")
def rounded_up(w):
    _, amax = _exponent(w)
    return _byte((amax / 6).log2().ceil().nan_to_num(0, 0, 0), amax)


@mxfp4_scale.slip("the 2 is missing: the largest code is 6, whose own exponent is 2, so E = floor(log2(amax)) - 2")
def exponent_of_the_largest(w):
    return (reference_scale(w).int() + 2 * (reference_scale(w) > 0)).to(torch.uint8)


@mxfp4_scale.slip("the bias is missing: the byte is E + 127")
def without_bias(w):
    return torch.where(reference_scale(w) == 0, 0, reference_scale(w).int() - 127).to(torch.uint8)


@mxfp4_scale.slip("a block of zeros gets the byte 127, the scale 1. Its byte is 0")
def zero_block_as_one(w):
    scale = reference_scale(w)
    return torch.where(scale == 0, 127, scale.int()).to(torch.uint8)


@mxfp4_scale.law("weights twice as large have a byte that is one more, and a block of zeros has byte 0")
def scale_follows_the_weights(mine, w):
    _, amax = _exponent(w)
    return bool((mine(2 * w) == torch.where(amax > 0, mine(w) + 1, 0)).all())


# ---- the codes ----
VALUES = torch.tensor(mxfp4.E2M1)


def reference_codes(x):
    # the largest of each block lies between 4 and 7, so that the scale is one and the codes are those of x itself
    packed, _ = mxfp4.quantize_mxfp4(x)
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _numbers(draw):
    x = draw.uniform(-6.9, 6.9, 2, 64)
    x[0, :14] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0])  # half-way
    x[:, 31], x[:, 63] = 6.9, -6.9
    return {"x": x}


mxfp4_codes = Step("mxfp4_codes", reference_codes, _numbers, ("codes [rows N]",))


def _nearest(x, *, right, sign=8):
    middle = (VALUES[1:] + VALUES[:-1]) / 2
    return (torch.bucketize(x.abs(), middle.to(x.dtype), right=right) + sign * (x < 0)).to(torch.uint8)


@mxfp4_codes.slip("half-way numbers were rounded up. They go to the neighbor with the even code")
def ties_up(x):
    return _nearest(x, right=True)


@mxfp4_codes.slip("half-way numbers were rounded down. They go to the neighbor with the even code")
def ties_down(x):
    return _nearest(x, right=False)


@mxfp4_codes.slip("numbers were cut down to the next value toward zero. Take the nearest")
def cut_down(x):
    return (torch.bucketize(x.abs(), VALUES[1:].to(x.dtype), right=True) + 8 * (x < 0)).to(torch.uint8)


@mxfp4_codes.slip("the sign is lost: negative numbers have codes 8 to 15")
def sign_lost(x):
    return reference_codes(x) & 7


@mxfp4_codes.slip("the sign is in the lowest bit. It is the highest of the four: code + 8")
def sign_in_the_lowest_bit(x):
    codes = reference_codes(x)
    return (codes & 7) << 1 | codes >> 3


@mxfp4_codes.law("the codes of x and -x are 8 apart")
def sign_is_eight(mine, x):
    return bool(((mine(x).int() - mine(-x).int()).abs() == 8).all())


# ---- two codes a byte, and back ----
mxfp4_pack = Step("mxfp4_pack", lambda codes: codes[..., 0::2] | codes[..., 1::2] << 4,
                  lambda draw: {"codes": draw.integers(0, 16, 2, draw.pick(32, 64)).to(torch.uint8)}, ("packed [rows N/2]",))  # fmt: skip


@mxfp4_pack.slip("low and high nibble are swapped: the even element 2i is in the *low* four bits of byte i")
def nibbles_swapped(codes):
    return codes[..., 0::2] << 4 | codes[..., 1::2]


@mxfp4_pack.slip("the first half went to the low nibbles, the second to the high ones. Neighbors share a byte: 2i and 2i + 1")
def halves_together(codes):
    low, high = codes.chunk(2, -1)
    return low | high << 4


@mxfp4_pack.slip("the second code was shifted by 3. A nibble has four bits")
def shifted_by_three(codes):
    return codes[..., 0::2] | codes[..., 1::2] << 3


@mxfp4_pack.law("byte by byte, the low nibble and then the high one are the codes in their order")
def unpacks_in_order(mine, codes):
    packed = mine(codes)
    return torch.equal(torch.stack([packed & 15, packed >> 4], -1).flatten(-2), codes)


def _packed(draw):
    blocks = draw.pick(2, 3)
    return {"packed": draw.integers(0, 256, 2, 16 * blocks).to(torch.uint8), "scale": draw.integers(122, 133, 2, blocks).to(torch.uint8)}


dequantize = Step("dequantize", mxfp4.dequantize_mxfp4, _packed, ("w [rows N]",))


@dequantize.slip("low and high nibble are swapped: the element 2i is in the low four bits of byte i")
def read_nibbles_swapped(packed, scale):
    return mxfp4.dequantize_mxfp4(packed << 4 | packed >> 4, scale)


@dequantize.slip("the bias of the scale is missing: 2^(byte - 127)")
def scale_without_bias(packed, scale):
    return mxfp4.dequantize_mxfp4(packed, scale) * 2.0**127


@dequantize.slip("the codes were taken for the numbers. Code 7 stands for 6: look it up in 0, 0.5, 1, 1.5, 2, 3, 4, 6")
def codes_as_numbers(packed, scale):
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    value = torch.where(codes < 8, codes.float(), 8 - codes.float())
    return value * 2.0 ** (scale.float() - 127).repeat_interleave(32, -1)


@dequantize.slip("the scales were laid out in turn. A scale belongs to 32 neighbors: repeat_interleave, not repeat")
def scales_in_turn(packed, scale):
    ones = mxfp4.dequantize_mxfp4(packed, torch.full_like(scale, 127))
    return ones * 2.0 ** (scale.float() - 127).repeat(1, 32)


@dequantize.slip("the sign is lost: codes 8 to 15 are the same values, negative")
def read_without_sign(packed, scale):
    return mxfp4.dequantize_mxfp4(packed, scale).abs()


@dequantize.law("the highest bit of a nibble turns the sign, and nothing else")
def highest_bit_is_the_sign(mine, packed, scale):
    return torch.equal(mine(packed ^ 0x88, scale), -mine(packed, scale))


# ---- training through the rounding ----
def _value_and_gradient(function, w):
    """What a function makes of w, and the gradient that reaches w when the result is weighed 1, 2, 3, ..."""
    w = w.clone().requires_grad_()
    y = function(w)
    weights = torch.arange(1, w.numel() + 1, dtype=w.dtype).view_as(w)
    gradient = torch.autograd.grad((y * weights).sum(), w, allow_unused=True)[0] if y.requires_grad else None
    return y, torch.zeros_like(w) if gradient is None else gradient


def _small_weights(draw):
    w = 0.1 * draw.normal(2, 64)
    w[0, :3] = torch.tensor([0.75, 0.3125, -0.09375])  # with the scale 1/8: the largest value, and two that lie half-way
    return {"w": w}


fake_quantize = Step("fake_quantize", mxfp4.fake_quantize_mxfp4, _small_weights, ("y [rows N]", "gradient [rows N]"),
                     run=_value_and_gradient)  # fmt: skip


def _rounded(w):
    return mxfp4.dequantize_mxfp4(*mxfp4.quantize_mxfp4(w), dtype=w.dtype)


@fake_quantize.slip("no gradient reaches the weights: rounding has none. Let it pass straight through, w + (rounded - w).detach()")
def no_straight_through(w):
    return _rounded(w)


@fake_quantize.slip("the rounding was detached away, so that the weights are not rounded at all")
def not_rounded(w):
    return w + 0 * _rounded(w)


@fake_quantize.slip("the gradient counts twice: one of the two w has to be detached")
def gradient_twice(w):
    return _rounded(w) + 2 * (w - w.detach())


@fake_quantize.law("rounding what is rounded changes nothing")
def rounding_twice(mine, w):
    return torch.allclose(mine(mine(w)), mine(w)) and not torch.allclose(mine(w), w)


STEPS = (mxfp4_scale, mxfp4_codes, mxfp4_pack, dequantize, fake_quantize)
