"""Products of rows under their decay, without ever forming an exponential that overflows.

    A[i,j] = sum_c k_i[c] k_j[c] exp(G_i[c] - G_j[c])   j < i        P[i,j] = sum_c q_i[c] k_j[c] exp(G_i[c] - G_j[c])   j <= i

with G the running sum of the log-decay inside a chunk. The trap is exp(G_i - G_j) = exp(G_i) * exp(-G_j): over a long chunk the
second factor
overflows. So rows are taken in tiles of 16 and both factors are measured from an origin in the row's own tile. Columns of earlier
tiles then
have exponents <= 0. In the diagonal tile, with the origin in its middle, exponents stay within 8 steps: with K3's bound g >= -5 that
is e^40, far inside float32, so that *every* tile is one plain matrix product. Without a bound (Kimi Linear's softplus gate) the
diagonal tile is computed pair by pair.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

TILE = 16
DENSE_BOUND = -5.0 - 1e-6  # diagonal tiles are dense products while every g is at least this


def decayed_products(
    q: Float[Tensor, "*N C K"], k: Float[Tensor, "*N C K"], G: Float[Tensor, "*N C K"], dense: bool
) -> tuple[Float[Tensor, "*N C C"], Float[Tensor, "*N C C"]]:
    """A (strictly lower triangular) and P (lower) of the module's docstring. ``dense``: every g is at least -5."""
    C = G.shape[-2]
    A, P = [], []
    for rows in _tiles(C):
        down, up = decay_factors(G, rows, dense)
        columns = up * k[..., : up.shape[-2], :]
        products = torch.cat([down * k[..., rows, :], down * q[..., rows, :]], -2) @ columns.mT
        if not dense:
            decay = _pair_decay(G[..., rows, :])
            diagonal = [torch.einsum("...ik,...jk,...ijk->...ij", x[..., rows, :], k[..., rows, :], decay) for x in (k, q)]
            products = torch.cat([products, torch.cat(diagonal, -2)], -1)
        products = F.pad(products, (0, C - rows.stop))
        A.append(products[..., :TILE, :])
        P.append(products[..., TILE:, :])
    return torch.cat(A, -2).tril_(-1), torch.cat(P, -2).tril_()


def decayed_products_backward(
    dA: Float[Tensor, "*N C C"],
    dP: Float[Tensor, "*N C C"],
    q: Float[Tensor, "*N C K"],
    k: Float[Tensor, "*N C K"],
    G: Float[Tensor, "*N C K"],
    dense: bool,
) -> tuple[Float[Tensor, "*N C K"], Float[Tensor, "*N C K"], Float[Tensor, "*N C K"]]:
    """Gradients for q, k and G. ``dA`` and ``dP`` are zero outside their triangles.

    exp(G_i - G_j) makes G's gradient free: what reaches row i's factor times that factor, minus the same for column j.
    """
    dq, dk_row, dk_column = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(k)
    for rows in _tiles(G.shape[-2]):
        down, up = decay_factors(G, rows, dense)
        last = up.shape[-2]
        dAP = torch.cat([dA[..., rows, :last], dP[..., rows, :last]], -2)
        from_rows = dAP @ (up * k[..., :last, :])
        dk_row[..., rows, :] = down * from_rows[..., :TILE, :]
        dq[..., rows, :] = down * from_rows[..., TILE:, :]
        both = torch.cat([down * k[..., rows, :], down * q[..., rows, :]], -2)
        dk_column[..., :last, :] += dAP.mT @ both * up
        if not dense:
            decay, k_, q_ = _pair_decay(G[..., rows, :]), k[..., rows, :], q[..., rows, :]
            dA_, dP_ = dA[..., rows, rows], dP[..., rows, rows]
            dk_row[..., rows, :] += torch.einsum("...ij,...jk,...ijk->...ik", dA_, k_, decay)
            dq[..., rows, :] += torch.einsum("...ij,...jk,...ijk->...ik", dP_, k_, decay)
            dk_column[..., rows, :] += torch.einsum("...ij,...ik,...ijk->...jk", dA_, k_, decay)
            dk_column[..., rows, :] += torch.einsum("...ij,...ik,...ijk->...jk", dP_, q_, decay)
    return dq, dk_row + dk_column, k * (dk_row - dk_column) + q * dq


def _tiles(C: int) -> list[slice]:
    return [slice(start, start + TILE) for start in range(0, C, TILE)]


def _origin(G: Tensor, rows: slice, dense: bool) -> Tensor:
    """Where exponents are measured from: the tile's middle, or its first row where only columns before it follow."""
    return G[..., rows.start + (TILE // 2 - 1 if dense else 0), None, :]


def decay_factors(G: Float[Tensor, "*N C K"], rows: slice, dense: bool) -> tuple[Float[Tensor, "*N 16 K"], Float[Tensor, "*N columns K"]]:
    """exp(G_i - origin) of a tile of rows, and exp(origin - G_j) of the columns that it covers with one product."""
    origin = _origin(G, rows, dense)
    return (G[..., rows, :] - origin).exp_(), (origin - G[..., : rows.stop if dense else rows.start, :]).exp_()


def _pair_decay(G: Float[Tensor, "*N 16 K"]) -> Float[Tensor, "*N 16 16 K"]:
    """exp(G_i - G_j) for j <= i in one tile, zero above: safe for any decay, at 16 times the memory."""
    causal = torch.ones(TILE, TILE, dtype=torch.bool, device=G.device).tril()[..., None]
    return (G.unsqueeze(-2) - G.unsqueeze(-3)).masked_fill(~causal, -torch.inf).exp_()
