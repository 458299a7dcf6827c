"""The inverse of a unit lower triangular matrix, by blocks.

Keys that are alike, written with beta near 1, fill L with numbers near 1. The short cut (I - L)(I + L^2)(I + L^4)... then adds and
subtracts numbers in the thousands to end at -1, and float32 loses three digits. Substitution, here by blocks of 16 rows, does not.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK = 16


def unit_lower_inverse(L: Float[Tensor, "n N C C"], out: Float[Tensor, "n N C C"]) -> Float[Tensor, "n N C C"]:
    """``(I + L)^-1`` for strictly lower triangular L, C a multiple of 16, written to ``out``.

    Row block r of the inverse follows from those above it: ``inverse_r = D_r (I_r - L_r inverse)``, D_r the inverse of its diagonal block.
    """
    C = L.shape[-1]
    blocks = [slice(start, start + BLOCK) for start in range(0, C, BLOCK)]
    diagonal = torch.stack([L[..., rows, rows] for rows in blocks], -3)
    eye = torch.eye(BLOCK, dtype=L.dtype, device=L.device)
    diagonal = torch.linalg.solve_triangular(diagonal, eye, upper=False, unitriangular=True)
    out.zero_()
    for r, rows in enumerate(blocks):
        D, above = diagonal[..., r, :, :], slice(0, rows.start)
        out[..., rows, rows] = D
        if r:
            out[..., rows, above] = (-D) @ (L[..., rows, above] @ out[..., above, above])
    return out
