"""MXFP8: eight-bit activations in blocks of 32 that share one power-of-two scale (K3 report 4.1.4; OCP microscaling format).

K3 rounds what enters its four-bit routed experts to this format. An element is E4M3 (sign, four exponent bits, three mantissa bits,
largest value 448), the scale E8M0 as in ``mxfp4.py``. The report names neither the element format nor the scale rule: E4M3 and
floor(log2(amax)) - 8 are the OCP standard's.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from minimodel.mxfp4 import BLOCK

LARGEST = 448.0  # of E4M3: 1.75 * 2^8


def fake_quantize_mxfp8(x: Float[Tensor, "*rows N"]) -> Float[Tensor, "*rows N"]:
    """Activations as MXFP8 would store them, with the gradient of the identity (straight-through).

    ``2^E * E4M3(x / 2^E)``, E = floor(log2(amax of the block)) - 8; what then exceeds 448 is clipped to it, as the standard says.

    Args:
        x: activations [..., N], N a multiple of 32.
    Returns: rounded activations in x's dtype; the gradient reaches x unchanged.
    Raises: TypeError if x is not floating point; ValueError for N, or values that are NaN or infinite.
    """
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}")
    if x.ndim == 0 or x.shape[-1] % BLOCK or x.shape[-1] == 0:
        raise ValueError(f"x {list(x.shape)} needs a last dimension that is a positive multiple of {BLOCK}")
    blocks = x.detach().float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    if not bool(torch.isfinite(amax).all()):
        raise ValueError(f"x {list(x.shape)} holds NaN or infinite values, which MXFP8 cannot store")
    exponent = (torch.frexp(amax).exponent - 1 - 8).clamp(-127, 127)  # amax = mantissa * 2^exponent with mantissa in [0.5, 1)
    scaled = torch.ldexp(blocks, -exponent).clamp(-LARGEST, LARGEST)
    rounded = torch.ldexp(scaled.to(torch.float8_e4m3fn).float(), exponent).flatten(-2).to(x.dtype)
    return rounded + (x - x.detach())
