"""MXFP4: four-bit weights in blocks of 32 that share one power-of-two scale (K3 report 4.1.4; OCP microscaling format).

K3 stores only its routed-expert weights this way, and trains with them rounded from supervised fine-tuning onward. An element
is E2M1 (sign, two exponent bits, one mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6), the scale E8M0 (2^(byte - 127)): 4.25 bits a weight.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from minimodel.layers import wide

BLOCK = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code 0..7; codes 8..15 are the same values, negative
RULES = ("even", "floor")


def quantize_mxfp4(w: Float[Tensor, "*rows N"], *, rule: str = "even") -> tuple[UInt8[Tensor, "*rows N//2"], UInt8[Tensor, "*rows N//32"]]:
    """Round weights to MXFP4 blocks along the last dimension.

    The block's exponent is E = floor(log2(amax)) - 2, so that its largest weight lands on the codes 4 and 6. ``rule="even"`` first
    rounds amax to one mantissa bit, ties to even: a block that would clip at 7 or more times 2^E takes the next scale. ``rule="floor"``
    is the OCP standard and clips it to 6. The report does not name its rule; "even" is what the released checkpoint's tool does.

    Args:
        w: weights [..., N], N a multiple of 32; float32 arithmetic (float64 for float64 weights).
        rule: how the scale is chosen, "even" or "floor".
    Returns: packed [..., N/2], element 2i in the low nibble of byte i, and scale [..., N/32], E + 127. A zero block has byte 0.
    Raises: TypeError if w is not floating point; ValueError for N, an unknown rule, or weights that are NaN or infinite.
    Source: OCP Microscaling Formats v1.0; compressed-tensors ``mxfp4-pack-quantized``.
    """
    if not w.is_floating_point():
        raise TypeError(f"w must be floating point, got {w.dtype}")
    if rule not in RULES:
        raise ValueError(f"rule must be one of {RULES}, got {rule!r}")
    if w.ndim == 0 or w.shape[-1] % BLOCK or w.shape[-1] == 0:
        raise ValueError(f"w {list(w.shape)} needs a last dimension that is a positive multiple of {BLOCK}")
    x = wide(w.detach()).unflatten(-1, (w.shape[-1] // BLOCK, BLOCK))
    amax = x.abs().amax(-1)
    if not bool(torch.isfinite(amax).all()):
        raise ValueError(f"w {list(w.shape)} holds NaN or infinite weights, which MXFP4 cannot store")
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
    E = exponent - 3 + (mantissa >= 0.875) if rule == "even" else exponent - 3  # 1.75 * 2^k rounds up to 2^(k+1)
    scale = torch.where(amax == 0, 0, (E + 127).clamp(0, 254)).to(torch.uint8)
    y = x * _e8m0(x.device, x.dtype)[254 - scale.int()][..., None]
    magnitude = y.abs()
    middle = torch.tensor([(a + b) / 2 for a, b in zip(E2M1, E2M1[1:], strict=False)], dtype=x.dtype, device=x.device)
    low, high = torch.bucketize(magnitude, middle), torch.bucketize(magnitude, middle, right=True)
    code = torch.where(low % 2 == 0, low, high)  # they differ only half-way between two values: take the even code
    code = (code + 8 * torch.signbit(y)).to(torch.uint8).flatten(-2)
    return code[..., 0::2] | code[..., 1::2] << 4, scale


def dequantize_mxfp4(
    packed: UInt8[Tensor, "*rows half"], scale: UInt8[Tensor, "*rows blocks"], *, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*rows N"]:
    """The weights that packed codes and scales stand for; exact in float32, and in bfloat16 down to its smallest normal number.

    Args:
        packed: two codes a byte [..., N/2], low nibble first.
        scale: one E8M0 byte a block of 32 [..., N/32].
        dtype: of the result.
    Raises: TypeError if either is not uint8; ValueError if the shapes do not belong together or a scale byte is 255 (NaN).
    """
    for name, value in (("packed", packed), ("scale", scale)):
        if value.dtype != torch.uint8:
            raise TypeError(f"{name} must be uint8, got {value.dtype}")
    if packed.ndim == 0 or packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * BLOCK:
        raise ValueError(f"packed {list(packed.shape)} and scale {list(scale.shape)} do not belong together: [..., N/2] and [..., N/32]")
    if bool((scale == 255).any()):
        raise ValueError("scale holds the byte 255, which means NaN")
    values = torch.tensor([*E2M1, *(-v for v in E2M1)], device=packed.device)
    codes = torch.stack([packed & 15, packed >> 4], -1).unflatten(-2, (scale.shape[-1], BLOCK // 2)).flatten(-2)
    return (values[codes.int()] * _e8m0(scale.device, torch.float32)[scale.int()][..., None]).flatten(-2).to(dtype)


def fake_quantize_mxfp4(w: Float[Tensor, "*rows N"], *, rule: str = "even") -> Float[Tensor, "*rows N"]:
    """Weights as MXFP4 would store them, with the gradient of the identity (straight-through): quantization-aware training.

    Args, errors: see ``quantize_mxfp4``. Returns: rounded weights in w's dtype; the gradient reaches w unchanged.
    """
    rounded = dequantize_mxfp4(*quantize_mxfp4(w, rule=rule), dtype=w.dtype)
    return rounded + (w - w.detach())  # adds exact zeros; rounded - w + w would not give rounded back


def _e8m0(device: torch.device, dtype: torch.dtype) -> Float[Tensor, " 256"]:
    """2^(byte - 127) for every byte. A table, because exp2 may be off by one bit; its first entry is subnormal in float32."""
    return torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [torch.nan], dtype=dtype, device=device)
