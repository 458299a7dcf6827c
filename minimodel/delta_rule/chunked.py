"""KDA in chunks: the recurrence runs over chunks of C tokens, and inside one everything is a matrix product.

Inside a chunk (Kimi Linear report Eq. 6-9, K3 report Eq. 3-4), with G the running sum of g and Gamma = exp(G):

    A[i,j] = sum_c k_i[c] k_j[c] exp(G_i[c] - G_j[c])      j < i      how token j's write shows under token i's key
    P[i,j] = sum_c q_i[c] k_j[c] exp(G_i[c] - G_j[c])      j <= i     how token j's write shows under token i's query
    [W | U] = (I + diag(beta) A)^-1 diag(beta) [Gamma*K | V]          all erasures of the chunk solved at once
    V~ = U - W S        O = (Gamma*Q) S + P V~        S' = Diag(Gamma_C) S + (exp(G_C - G) * K)^T V~

The trap is exp(G_i - G_j) = exp(G_i) * exp(-G_j): over a long chunk the second factor overflows. So rows are taken in tiles of
16 and measured from the tile's middle. Columns of earlier tiles then have exponents <= 0. In the diagonal tile the
exponents stay within 8 steps of the middle: with K3's bound g >= -5 that is e^40, far inside float32, and a plain product is safe.
Without a bound (Kimi Linear's softplus gate) the diagonal tile is computed pair by pair instead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

TILE = 16
DENSE_BOUND = -5.0 - 1e-6  # a diagonal tile is a dense product while every g is at least this


def kda_chunked(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    S: Float[Tensor, "B H K V"],
    *,
    chunk_size: int = 64,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """Same result as ``kda_recurrent``; ``q`` comes scaled. Everything in one floating dtype. ``chunk_size``: a multiple of 16."""
    B, T, H, K = k.shape
    C = min(chunk_size, -(-T // TILE) * TILE)
    N = -(-T // C)
    dense = bool(g.amin() >= DENSE_BOUND)

    def chunks(x: Tensor) -> Tensor:  # [B, T, H, ...] -> [B, H, N, C, ...]; padded rows have k = 0, g = 0, beta = 0: they do nothing
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, N * C - T))
        return x.unflatten(1, (N, C)).movedim(3, 1)

    q, k, v, g, beta = map(chunks, (q, k, v, g, beta.unsqueeze(-1)))
    G = g.cumsum(-2)
    A, P = _decayed_products(q, k, G, dense)
    WU = torch.linalg.solve_triangular(beta * A, beta * torch.cat([G.exp() * k, v], -1), upper=False, unitriangular=True)
    W, U = WU.split([K, v.shape[-1]], -1)
    Q = G.exp() * q
    G_end = G[..., -1:, :]
    k_to_end = (G_end - G).exp() * k
    keep = G_end.exp().transpose(-1, -2)  # [B, H, N, K, 1]

    outputs = []
    for W_n, U_n, Q_n, P_n, keep_n, k_n in zip(*(x.unbind(2) for x in (W, U, Q, P, keep, k_to_end))):
        written = U_n - W_n @ S
        outputs.append(Q_n @ S + P_n @ written)
        S = keep_n * S + k_n.transpose(-1, -2) @ written
    o = torch.stack(outputs, 2).flatten(2, 3)[:, :, :T]
    return o.transpose(1, 2), S


def _decayed_products(q: Tensor, k: Tensor, G: Tensor, dense: bool) -> tuple[Tensor, Tensor]:
    """A (strictly lower) and P (lower) of the module's docstring, [B, H, N, C, C], one row of tiles at a time."""
    C = G.shape[-2]
    A_rows, P_rows = [], []
    for start in range(0, C, TILE):
        end = start + TILE
        middle = G[..., start + TILE // 2 - 1, None, :]
        rows = slice(start, end)
        down = (G[..., rows, :] - middle).exp() if dense else (G[..., rows, :] - G[..., start, None, :]).exp()
        origin = middle if dense else G[..., start, None, :]
        last = end if dense else start
        up = (origin - G[..., :last, :]).exp() * k[..., :last, :]
        products = torch.cat([down * k[..., rows, :], down * q[..., rows, :]], -2) @ up.transpose(-1, -2)
        if not dense:
            products = torch.cat([products, _pairwise_tile(q[..., rows, :], k[..., rows, :], G[..., rows, :])], -1)
        products = F.pad(products, (0, C - end))
        A_rows.append(products[..., :TILE, :])
        P_rows.append(products[..., TILE:, :])
    return torch.cat(A_rows, -2).tril(-1), torch.cat(P_rows, -2).tril()


def _pairwise_tile(q: Tensor, k: Tensor, G: Tensor) -> Tensor:
    """[k; q] k^T of one diagonal tile with exp(G_i - G_j) formed pair by pair: safe for any decay, 16 times the memory."""
    difference = G.unsqueeze(-2) - G.unsqueeze(-3)  # [.., i, j, K]
    causal = torch.ones(TILE, TILE, dtype=torch.bool, device=G.device).tril()[..., None]
    decay = difference.masked_fill(~causal, -torch.inf).exp()  # masked before exp: otherwise inf * 0 = NaN in the backward pass
    return torch.cat([torch.einsum("...ik,...jk,...ijk->...ij", x, k, decay) for x in (k, q)], -2)
