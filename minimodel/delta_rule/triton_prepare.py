"""Triton: everything of a chunk that does not need the state before it, so that the walk through time has two products a chunk.

    W = M (exp(G) * K)          U = M V          q_in = exp(G) * scale Q          k_out = exp(G_C - G) * K

With these, X = M (V - (exp(G) * K) S) is U - W S. Letters: ``chunkwise.py``; X = diag(beta) E with E of ``chunked.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minimodel.delta_rule.triton_common import CHUNK, Chunks, Numbers, block, dot, load_tokens


@triton.jit
def prepare_kernel(q, k, v, G, M, W, U, q_in, k_out, chunk_start, chunk_end, H, scale,
                   C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """q, k [tokens, H, K], v [tokens, H, V], M [chunks, H, C, C] -> W, q_in, k_out [chunks, H, C, K], U [chunks, H, C, V]."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, channels, columns, one = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V), tl.arange(0, 1)
    M_ = tl.load(block(M, chunk, head, H, rows, rows, C, C))
    G_ = tl.load(block(G, chunk, head, H, rows, channels, C, K))
    k_ = load_tokens(k, chunk, head, H, rows, channels, chunk_start, chunk_end, K)
    tl.store(block(W, chunk, head, H, rows, channels, C, K), dot(M_, tl.exp(G_) * k_, OPERAND, PRECISION))
    G_last = tl.load(block(G, chunk, head, H, one + C - 1, channels, C, K))  # [1, K]
    tl.store(block(k_out, chunk, head, H, rows, channels, C, K), tl.exp(G_last - G_) * k_)
    q_ = load_tokens(q, chunk, head, H, rows, channels, chunk_start, chunk_end, K) * scale
    tl.store(block(q_in, chunk, head, H, rows, channels, C, K), tl.exp(G_) * q_)
    v_ = load_tokens(v, chunk, head, H, rows, columns, chunk_start, chunk_end, V)
    tl.store(block(U, chunk, head, H, rows, columns, C, V), dot(M_, v_, OPERAND, PRECISION))


def prepare(q, k, v, G, M, scale: float, chunks: Chunks, numbers: Numbers) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W, U, q_in, k_out of every chunk."""
    H, K, V = *k.shape[1:], v.shape[-1]
    W, q_in, k_out = (torch.empty(len(chunks), H, CHUNK, K, dtype=numbers.stored, device=k.device) for _ in range(3))
    U = torch.empty(len(chunks), H, CHUNK, V, dtype=numbers.stored, device=k.device)
    prepare_kernel[len(chunks), H](
        q, k, v, G, M, W, U, q_in, k_out, chunks.start, chunks.end, H, scale, CHUNK, K, V, numbers.operand, numbers.precision
    )
    return W, U, q_in, k_out
