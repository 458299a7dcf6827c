"""Triton: the gradients through A and P of ``triton_tiles.py``, tile by tile.

With D_ij = exp(G_i - G_j), row by row and column by column of a tile:

    dq_i = sum_j dP_ij D_ij k_j          row_i = sum_j dA_ij D_ij k_j          column_j = sum_i D_ij (dA_ij k_i + dP_ij q_i)
    dk = row + column                    dG = q dq + k (row - column)

exp(G_i - G_j) makes G's gradient free: what reaches row i's factor times that factor, minus the same for column j. Channels do not meet, so
a program takes BK of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minimodel.delta_rule.triton_common import CHUNK, DENSE, TILE, Chunks, Numbers, block, dot, load_tokens, store_tokens


@triton.jit
def diagonal_tile_backward(q, k, G, dA, dP, k_all, G_all, chunk, head, H, START: tl.constexpr, channels, chunk_start, chunk_end,
                           C: tl.constexpr, K: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dq, row, column [16, BK] of the tile whose rows q, k, G [16, BK] begin at row START of the chunk."""
    i, one = tl.arange(0, TILE), tl.arange(0, 1)
    exponent = G - tl.load(block(G_all, chunk, head, H, one + START + TILE // 2 - 1, channels, C, K))
    dA_ = tl.load(block(dA, chunk, head, H, i + START, i + START, C, C))
    dP_ = tl.load(block(dP, chunk, head, H, i + START, i + START, C, C))
    if tl.max(tl.max(tl.abs(exponent), 1), 0) <= DENSE:
        down, up = tl.exp(exponent), tl.exp(-exponent)
        dq = down * dot(dP_, up * k, OPERAND, PRECISION)
        row = down * dot(dA_, up * k, OPERAND, PRECISION)
        column = up * (dot(tl.trans(dA_), down * k, OPERAND, PRECISION) + dot(tl.trans(dP_), down * q, OPERAND, PRECISION))
    else:
        dq, row, column = tl.zeros(q.shape, tl.float32), tl.zeros(q.shape, tl.float32), tl.zeros(q.shape, tl.float32)
        for j in range(TILE):
            k_j = load_tokens(k_all, chunk, head, H, one + START + j, channels, chunk_start, chunk_end, K)  # [1, BK]
            G_j = tl.load(block(G_all, chunk, head, H, one + START + j, channels, C, K))
            decay = tl.exp(tl.minimum(G - G_j, 0.0))  # above the diagonal dA and dP are zero
            dA_j = tl.load(block(dA, chunk, head, H, i + START, one + START + j, C, C))  # [16, 1]
            dP_j = tl.load(block(dP, chunk, head, H, i + START, one + START + j, C, C))
            dq += dP_j * decay * k_j
            row += dA_j * decay * k_j
            column += tl.where(i[:, None] == j, tl.sum(decay * (dA_j * k + dP_j * q), 0)[None, :], 0.0)
    return dq, row, column


@triton.jit
def add_and_store(q, k, dq, row, column, dq_chunk, dk_chunk, dG, dq_out, dk_out, chunk, head, H, rows, channels, chunk_start, chunk_end,
                  scale, C: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Add the tiles' part to the chunk decay's; dq and dk go to the caller's layout, dG stays chunk by chunk."""
    place = block(dG, chunk, head, H, rows, channels, C, K)
    tl.store(place, tl.load(place) + q * dq + k * (row - column))
    dq += tl.load(block(dq_chunk, chunk, head, H, rows, channels, C, K))
    dk = row + column + tl.load(block(dk_chunk, chunk, head, H, rows, channels, C, K))
    store_tokens(dq_out, dq * scale, chunk, head, H, rows, channels, chunk_start, chunk_end, K)
    store_tokens(dk_out, dk, chunk, head, H, rows, channels, chunk_start, chunk_end, K)


@triton.jit
def tiles_backward_kernel(q, k, G, dA, dP, dq_chunk, dk_chunk, dG, dq, dk, chunk_start, chunk_end, H, scale,
                          C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
                          OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dA, dP [chunks, H, C, C] and the chunk decay's parts [chunks, H, C, K] -> dq, dk [tokens, H, K]; dG in place. One program a chunk,
    head and BK channels."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channels = tl.program_id(2) * BK + tl.arange(0, BK)
    upper, one = tl.arange(0, TILE), tl.arange(0, 1)
    lower = upper + TILE
    k1 = load_tokens(k, chunk, head, H, upper, channels, chunk_start, chunk_end, K)  # [16, BK]
    q1 = load_tokens(q, chunk, head, H, upper, channels, chunk_start, chunk_end, K) * scale
    G1 = tl.load(block(G, chunk, head, H, upper, channels, C, K))
    k2 = load_tokens(k, chunk, head, H, lower, channels, chunk_start, chunk_end, K)
    q2 = load_tokens(q, chunk, head, H, lower, channels, chunk_start, chunk_end, K) * scale
    G2 = tl.load(block(G, chunk, head, H, lower, channels, C, K))

    dq1, row1, column1 = diagonal_tile_backward(
        q1, k1, G1, dA, dP, k, G, chunk, head, H, 0, channels, chunk_start, chunk_end, C, K, OPERAND, PRECISION)  # fmt: skip
    dq2, row2, column2 = diagonal_tile_backward(
        q2, k2, G2, dA, dP, k, G, chunk, head, H, TILE, channels, chunk_start, chunk_end, C, K, OPERAND, PRECISION)  # fmt: skip

    origin = tl.load(block(G, chunk, head, H, one + TILE, channels, C, K))
    down, up = tl.exp(G2 - origin), tl.exp(origin - G1)
    dA21 = tl.load(block(dA, chunk, head, H, lower, upper, C, C))
    dP21 = tl.load(block(dP, chunk, head, H, lower, upper, C, C))
    dq2 += down * dot(dP21, up * k1, OPERAND, PRECISION)
    row2 += down * dot(dA21, up * k1, OPERAND, PRECISION)
    column1 += up * (dot(tl.trans(dA21), down * k2, OPERAND, PRECISION) + dot(tl.trans(dP21), down * q2, OPERAND, PRECISION))

    add_and_store(q1, k1, dq1, row1, column1, dq_chunk, dk_chunk, dG, dq, dk, chunk, head, H, upper, channels, chunk_start, chunk_end,
                  scale, C, K)  # fmt: skip
    add_and_store(q2, k2, dq2, row2, column2, dq_chunk, dk_chunk, dG, dq, dk, chunk, head, H, lower, channels, chunk_start, chunk_end,
                  scale, C, K)  # fmt: skip


def tiles_backward(q, k, G, dA, dP, dq_chunk, dk_chunk, dG, scale: float, chunks: Chunks, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """dq, dk [tokens, H, K]; ``dG`` becomes complete in place."""
    _, H, K = k.shape
    dq, dk, BK = torch.empty_like(q), torch.empty_like(k), min(K, 32)
    tiles_backward_kernel[len(chunks), H, K // BK](
        q, k, G, dA, dP, dq_chunk, dk_chunk, dG, dq, dk, chunks.start, chunks.end, H, scale, CHUNK, K, BK,
        numbers.operand, numbers.precision,
    )  # fmt: skip
    return dq, dk
