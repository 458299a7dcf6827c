"""Triton: what every token reads, all chunks at once.

    O = q_in S + P X          the state before the chunk, and what the chunk wrote itself
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minimodel.delta_rule.triton_common import CHUNK, Chunks, Numbers, block, dot, store_tokens


@triton.jit
def outputs_kernel(q_in, S, P, X, O, chunk_start, chunk_end, H,
                   C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                   OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """q_in [chunks, H, C, K], S [chunks, H, K, V], P [chunks, H, C, C], X [chunks, H, C, V] -> O [tokens, H, V]. One program a chunk, head
    and BV columns."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, channels = tl.arange(0, C), tl.arange(0, K)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    q_in_ = tl.load(block(q_in, chunk, head, H, rows, channels, C, K))  # [C, K]
    S_ = tl.load(block(S, chunk, head, H, channels, columns, K, V))  # [K, BV]
    P_ = tl.load(block(P, chunk, head, H, rows, rows, C, C))  # [C, C]
    X_ = tl.load(block(X, chunk, head, H, rows, columns, C, V))  # [C, BV]
    O_ = dot(q_in_, S_, OPERAND, PRECISION) + dot(P_, X_, OPERAND, PRECISION)
    store_tokens(O, O_, chunk, head, H, rows, columns, chunk_start, chunk_end, V)


def outputs(q_in, S, P, X, like: Tensor, chunks: Chunks, numbers: Numbers) -> Tensor:
    """O [tokens, H, V], in the dtype of ``like``, the values."""
    _, H, K, V = S.shape
    O, BV = torch.empty_like(like), min(V, numbers.columns)
    outputs_kernel[len(chunks), H, V // BV](
        q_in, S, P, X, O, chunks.start, chunks.end, H, CHUNK, K, V, BV, numbers.operand, numbers.precision
    )
    return O
