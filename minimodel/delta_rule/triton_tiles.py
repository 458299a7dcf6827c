"""Triton: what the tokens of one chunk do to each other, from 16-token tiles.

    A[i,j] = sum_c k_i[c] k_j[c] exp(G_i[c] - G_j[c])   j < i        P[i,j] = sum_c q_i[c] k_j[c] exp(G_i[c] - G_j[c])   j <= i
    M = (I + diag(beta) A)^-1 diag(beta)

A chunk has two tiles of rows and so three tiles to fill: two on the diagonal and the one below it. exp(G_i - G_j) is taken apart into a
factor of the row and a factor of the column, measured from an origin, so that a tile is one matrix product.

* Below the diagonal the origin is the row tile's first row: no exponent is positive.
* On the diagonal it is the tile's middle. K3 bounds g by -5, so exponents stay within 8 * 5 = 40, and e^40 is far inside float32's (and
  bfloat16's) range: **every tile is dense**. Without a bound, as in Kimi Linear, a tile with a larger exponent is computed column by
  column, each from its own differences. A program looks at its tile and takes the one or the other.

M needs no triangular solve. The inverse of a triangular matrix follows from those of its halves,

    M = [[M1, 0], [-M2 A21 M1, M2]]

and a 1 x 1 block's is beta itself: four doublings make a tile, a fifth the chunk. No powers of A are formed, which would cancel when keys
are alike and beta is near one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minimodel.delta_rule.triton_common import CHUNK, DENSE, TILE, Chunks, Numbers, block, dot, load_tokens


@triton.jit
def diagonal_tile(q, k, G, k_all, G_all, chunk, head, H, START: tl.constexpr, channels, chunk_start, chunk_end,
                  C: tl.constexpr, K: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """What some channels add to A and P [16, 16] of the tile whose rows q, k, G [16, BK] begin at row START of the chunk."""
    i, one = tl.arange(0, TILE), tl.arange(0, 1)
    exponent = G - tl.load(block(G_all, chunk, head, H, one + START + TILE // 2 - 1, channels, C, K))
    if tl.max(tl.max(tl.abs(exponent), 1), 0) <= DENSE:
        columns = tl.trans(tl.exp(-exponent) * k)
        A = dot(tl.exp(exponent) * k, columns, OPERAND, PRECISION)
        P = dot(tl.exp(exponent) * q, columns, OPERAND, PRECISION)
    else:
        A = tl.zeros((TILE, TILE), tl.float32)
        P = tl.zeros((TILE, TILE), tl.float32)
        for j in range(TILE):
            k_j = load_tokens(k_all, chunk, head, H, one + START + j, channels, chunk_start, chunk_end, K)  # [1, BK]
            G_j = tl.load(block(G_all, chunk, head, H, one + START + j, channels, C, K))
            decayed = k_j * tl.exp(tl.minimum(G - G_j, 0.0))  # rows above j would grow; they are masked at the end
            A = tl.where(i[None, :] == j, tl.sum(k * decayed, 1)[:, None], A)
            P = tl.where(i[None, :] == j, tl.sum(q * decayed, 1)[:, None], P)
    return A, P


@triton.jit
def inverse_tile(A, beta, PRECISION: tl.constexpr):
    """M [16, 16] of one diagonal tile. Each doubling fills the blocks below the diagonal ones: M - M A M, with only those blocks of A."""
    i = tl.arange(0, TILE)
    row, column = i[:, None], i[None, :]
    M = tl.where(row == column, beta[None, :], 0.0)
    for level in tl.static_range(4):
        size = 1 << level
        below = (row // (2 * size) == column // (2 * size)) & (row // size > column // size)
        M -= dot(dot(M, tl.where(below, A, 0.0), tl.float32, PRECISION), M, tl.float32, PRECISION)
    return M


@triton.jit
def tiles_kernel(q, k, beta, G, A, P, M, chunk_start, chunk_end, H, scale,
                 C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """q, k [tokens, H, K], beta [tokens, H], G [chunks, H, C, K] -> A, P, M [chunks, H, C, C]. One program a chunk and head."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    upper, one = tl.arange(0, TILE), tl.arange(0, 1)
    lower = upper + TILE
    nothing = tl.zeros((TILE, TILE), tl.float32)
    A11, P11, A21, P21, A22, P22 = nothing, nothing, nothing, nothing, nothing, nothing
    for first_channel in range(0, K, BK):
        channels = first_channel + tl.arange(0, BK)
        k1 = load_tokens(k, chunk, head, H, upper, channels, chunk_start, chunk_end, K)  # [16, BK]
        q1 = load_tokens(q, chunk, head, H, upper, channels, chunk_start, chunk_end, K) * scale
        G1 = tl.load(block(G, chunk, head, H, upper, channels, C, K))
        k2 = load_tokens(k, chunk, head, H, lower, channels, chunk_start, chunk_end, K)
        q2 = load_tokens(q, chunk, head, H, lower, channels, chunk_start, chunk_end, K) * scale
        G2 = tl.load(block(G, chunk, head, H, lower, channels, C, K))
        A_, P_ = diagonal_tile(q1, k1, G1, k, G, chunk, head, H, 0, channels, chunk_start, chunk_end, C, K, OPERAND, PRECISION)
        A11, P11 = A11 + A_, P11 + P_
        A_, P_ = diagonal_tile(q2, k2, G2, k, G, chunk, head, H, TILE, channels, chunk_start, chunk_end, C, K, OPERAND, PRECISION)
        A22, P22 = A22 + A_, P22 + P_
        origin = tl.load(block(G, chunk, head, H, one + TILE, channels, C, K))  # the lower tile's first row
        columns = tl.trans(tl.exp(origin - G1) * k1)
        A21 += dot(tl.exp(G2 - origin) * k2, columns, OPERAND, PRECISION)
        P21 += dot(tl.exp(G2 - origin) * q2, columns, OPERAND, PRECISION)

    row, column = upper[:, None], upper[None, :]
    A11, P11 = tl.where(row > column, A11, 0.0), tl.where(row >= column, P11, 0.0)
    A22, P22 = tl.where(row > column, A22, 0.0), tl.where(row >= column, P22, 0.0)
    beta1 = tl.sum(load_tokens(beta, chunk, head, H, upper, one, chunk_start, chunk_end, 1), 1)  # [16]
    beta2 = tl.sum(load_tokens(beta, chunk, head, H, lower, one, chunk_start, chunk_end, 1), 1)
    M1, M2 = inverse_tile(A11, beta1, PRECISION), inverse_tile(A22, beta2, PRECISION)
    M21 = -dot(dot(M2, A21, tl.float32, PRECISION), M1, tl.float32, PRECISION)

    store_tiles(A, A11, nothing, A21, A22, chunk, head, H, C)
    store_tiles(P, P11, nothing, P21, P22, chunk, head, H, C)
    store_tiles(M, M1, nothing, M21, M2, chunk, head, H, C)


@triton.jit
def store_tiles(x, x11, x12, x21, x22, chunk, head, H, C: tl.constexpr):
    upper = tl.arange(0, TILE)
    tl.store(block(x, chunk, head, H, upper, upper, C, C), x11)
    tl.store(block(x, chunk, head, H, upper, upper + TILE, C, C), x12)
    tl.store(block(x, chunk, head, H, upper + TILE, upper, C, C), x21)
    tl.store(block(x, chunk, head, H, upper + TILE, upper + TILE, C, C), x22)


def tiles(q: Tensor, k: Tensor, beta: Tensor, G: Tensor, scale: float, chunks: Chunks, numbers: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """A, P and M of every chunk, [chunks, H, C, C]."""
    _, H, K = k.shape
    A, P, M = (torch.empty(len(chunks), H, CHUNK, CHUNK, dtype=numbers.stored, device=k.device) for _ in range(3))
    tiles_kernel[len(chunks), H](
        q, k, beta, G, A, P, M, chunks.start, chunks.end, H, scale, CHUNK, K, 16, numbers.operand, numbers.precision, num_warps=2
    )
    return A, P, M
