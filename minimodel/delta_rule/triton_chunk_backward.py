"""Triton: the gradients inside a chunk, all chunks at once, after the walk backward (``triton_states.py``) has left dX and dS.

Through the writes, X = M Y with Y = V - k_in S, k_in = exp(G) * K and M = (I + diag(beta) A)^-1 diag(beta):

    dV = M^T dX          Z = dX - A^T dV          (Z is (I + diag(beta) A)^-T dX, without dividing by beta)
    dbeta = rowsum(Z * (Y - A X))          dA = -dV X^T   (below the diagonal)          dP = dO X^T   (to the diagonal)

Through the decay of the whole chunk, with k_out = exp(G_C - G) * K:

    dq_in = dO S^T          dk_in = -dV S^T          dk_out = X dS^T          dG from q_in * dq_in + k_in * dk_in - k_out * dk_out

G_C, the chunk's last row, also scales the state: it gathers all of k_out * dk_out and exp(G_C) * S * dS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minimodel.delta_rule.triton_common import CHUNK, Chunks, Numbers, block, dot, load_tokens, store_tokens


@triton.jit
def writes_backward_kernel(k, v, G, A, M, S, dO, dX, dv, dbeta, dA, dP, X, chunk_start, chunk_end, H,
                           C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                           OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """-> dv [tokens, H, V], dbeta [tokens, H], dA, dP [chunks, H, C, C], X [chunks, H, C, V]. One program a chunk and head."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, one = tl.arange(0, C), tl.arange(0, 1)
    A_ = tl.load(block(A, chunk, head, H, rows, rows, C, C))
    M_ = tl.load(block(M, chunk, head, H, rows, rows, C, C))
    dA_ = tl.zeros((C, C), tl.float32)
    dP_ = tl.zeros((C, C), tl.float32)
    dbeta_ = tl.zeros((C, 1), tl.float32)
    for first_column in range(0, V, BV):
        columns = first_column + tl.arange(0, BV)
        Y = load_tokens(v, chunk, head, H, rows, columns, chunk_start, chunk_end, V)  # [C, BV]
        for first_channel in range(0, K, BK):
            channels = first_channel + tl.arange(0, BK)
            G_ = tl.load(block(G, chunk, head, H, rows, channels, C, K))
            k_in = tl.exp(G_) * load_tokens(k, chunk, head, H, rows, channels, chunk_start, chunk_end, K)  # [C, BK]
            S_ = tl.load(block(S, chunk, head, H, channels, columns, K, V))  # [BK, BV]
            Y -= dot(k_in, S_, OPERAND, PRECISION)
        X_ = dot(M_, Y, OPERAND, PRECISION)
        dX_ = tl.load(block(dX, chunk, head, H, rows, columns, C, V)).to(tl.float32)
        dv_ = dot(tl.trans(M_), dX_, OPERAND, PRECISION)
        Z = dX_ - dot(tl.trans(A_), dv_, OPERAND, PRECISION)
        dbeta_ += tl.sum(Z * (Y - dot(A_, X_, OPERAND, PRECISION)), 1)[:, None]
        dO_ = load_tokens(dO, chunk, head, H, rows, columns, chunk_start, chunk_end, V)
        dA_ -= dot(dv_, tl.trans(X_), OPERAND, PRECISION)
        dP_ += dot(dO_, tl.trans(X_), OPERAND, PRECISION)
        tl.store(block(X, chunk, head, H, rows, columns, C, V), X_)
        store_tokens(dv, dv_, chunk, head, H, rows, columns, chunk_start, chunk_end, V)
    row, column = rows[:, None], rows[None, :]
    tl.store(block(dA, chunk, head, H, rows, rows, C, C), tl.where(row > column, dA_, 0.0))
    tl.store(block(dP, chunk, head, H, rows, rows, C, C), tl.where(row >= column, dP_, 0.0))
    store_tokens(dbeta, dbeta_, chunk, head, H, rows, one, chunk_start, chunk_end, 1)


@triton.jit
def decay_backward_kernel(q, k, G, S, dS, dO, dv, X, dq, dk, dG, chunk_start, chunk_end, H, scale,
                          C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                          OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """-> the chunk decay's part of dq (by the scaled q), dk and dG, [chunks, H, C, K] float32. One program a chunk, head, BK channels."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, one = tl.arange(0, C), tl.arange(0, 1)
    channels = tl.program_id(2) * BK + tl.arange(0, BK)
    dq_in = tl.zeros((C, BK), tl.float32)
    dk_in = tl.zeros((C, BK), tl.float32)
    dk_out = tl.zeros((C, BK), tl.float32)
    dkeep = tl.zeros((BK, 1), tl.float32)
    for first_column in range(0, V, BV):
        columns = first_column + tl.arange(0, BV)
        S_ = tl.load(block(S, chunk, head, H, channels, columns, K, V))  # [BK, BV]
        dS_ = tl.load(block(dS, chunk, head, H, channels, columns, K, V))
        dO_ = load_tokens(dO, chunk, head, H, rows, columns, chunk_start, chunk_end, V)  # [C, BV]
        dv_ = load_tokens(dv, chunk, head, H, rows, columns, chunk_start, chunk_end, V)
        X_ = tl.load(block(X, chunk, head, H, rows, columns, C, V))
        dq_in += dot(dO_, tl.trans(S_), OPERAND, PRECISION)
        dk_in -= dot(dv_, tl.trans(S_), OPERAND, PRECISION)
        dk_out += dot(X_, tl.trans(dS_), OPERAND, PRECISION)
        dkeep += tl.sum(S_.to(tl.float32) * dS_.to(tl.float32), 1)[:, None]
    G_ = tl.load(block(G, chunk, head, H, rows, channels, C, K))
    G_last = tl.load(block(G, chunk, head, H, one + C - 1, channels, C, K))  # [1, BK]
    q_ = load_tokens(q, chunk, head, H, rows, channels, chunk_start, chunk_end, K) * scale
    k_ = load_tokens(k, chunk, head, H, rows, channels, chunk_start, chunk_end, K)
    dq_ = tl.exp(G_) * dq_in
    dk_from_out = tl.exp(G_last - G_) * dk_out
    dk_from_in = tl.exp(G_) * dk_in
    dG_ = q_ * dq_ + k_ * (dk_from_in - dk_from_out)
    gathered = tl.sum(k_ * dk_from_out, 0)[None, :] + tl.exp(G_last) * tl.trans(dkeep)
    dG_ += tl.where(rows[:, None] == C - 1, gathered, 0.0)
    tl.store(block(dq, chunk, head, H, rows, channels, C, K), dq_)
    tl.store(block(dk, chunk, head, H, rows, channels, C, K), dk_from_in + dk_from_out)
    tl.store(block(dG, chunk, head, H, rows, channels, C, K), dG_)


def writes_backward(k, v, beta, G, A, M, S, dO, dX, chunks: Chunks, numbers: Numbers) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dv, dbeta in the layout of v and beta; dA, dP, X chunk by chunk."""
    _, H, K, V = S.shape
    dv, dbeta, X = torch.empty_like(v), torch.empty_like(beta), torch.empty_like(dX)
    dA, dP = (torch.empty(len(chunks), H, CHUNK, CHUNK, dtype=torch.float32, device=k.device) for _ in range(2))
    writes_backward_kernel[len(chunks), H](
        k, v, G, A, M, S, dO, dX, dv, dbeta, dA, dP, X, chunks.start, chunks.end, H, CHUNK, K, V, min(K, 32), min(V, numbers.columns),
        numbers.operand, numbers.precision,
    )  # fmt: skip
    return dv, dbeta, dA, dP, X


def decay_backward(q, k, G, S, dS, dO, dv, X, scale: float, chunks: Chunks, numbers: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """Parts of dq, dk and dG, float32, chunk by chunk; ``tiles_backward`` adds what goes through A and P."""
    _, H, K, V = S.shape
    dq, dk, dG = (torch.empty_like(G) for _ in range(3))
    BK = min(K, 32)
    decay_backward_kernel[len(chunks), H, K // BK](
        q, k, G, S, dS, dO, dv, X, dq, dk, dG, chunks.start, chunks.end, H, scale, CHUNK, K, V, BK, min(V, numbers.columns),
        numbers.operand, numbers.precision,
    )  # fmt: skip
    return dq, dk, dG
