"""Triton: the walk through time. It is the only part that is sequential, one chunk after the other, and so holds as little as possible.

    X  = U - W S                                     what each token really writes
    S' = Diag(exp(G_C)) S + k_out^T X

and for the gradients, backward over the chunks (dS is the gradient of the state after a chunk)

    dX  = P^T dO + k_out dS
    dS' = Diag(exp(G_C)) dS + q_in^T dO - W^T dX

Columns of V never meet, so a program walks with BV of them: the state [K, BV] stays in registers in float32 from a document's first
chunk to its last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minimodel.delta_rule.triton_common import CHUNK, Chunks, Numbers, block, dot, load_tokens


@triton.jit
def states_kernel(W, U, k_out, G, S_first, X, S, S_last, first, H,
                  C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                  OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """W, k_out [chunks, H, C, K], U [chunks, H, C, V], S_first [documents, H, K, V] -> X [chunks, H, C, V], the state before each chunk
    S [chunks, H, K, V], S_last [documents, H, K, V] float32. One program a document, head and BV columns."""
    document, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    rows, channels, one = tl.arange(0, C), tl.arange(0, K), tl.arange(0, 1)
    columns = tl.program_id(0) * BV + tl.arange(0, BV)
    state = tl.load(block(S_first, document, head, H, channels, columns, K, V))  # [K, BV]
    for chunk in range(tl.load(first + document), tl.load(first + document + 1)):
        tl.store(block(S, chunk, head, H, channels, columns, K, V), state)
        W_ = tl.load(block(W, chunk, head, H, rows, channels, C, K))  # [C, K]
        X_ = tl.load(block(U, chunk, head, H, rows, columns, C, V)) - dot(W_, state, OPERAND, PRECISION)  # [C, BV]
        tl.store(block(X, chunk, head, H, rows, columns, C, V), X_)
        keep = tl.exp(tl.load(block(G, chunk, head, H, one + C - 1, channels, C, K)))  # [1, K]
        k_out_ = tl.load(block(k_out, chunk, head, H, rows, channels, C, K))
        state = tl.trans(keep) * state + dot(tl.trans(k_out_), X_, OPERAND, PRECISION)
    tl.store(block(S_last, document, head, H, channels, columns, K, V), state)


@triton.jit
def states_backward_kernel(dO, P, W, q_in, k_out, G, dS_last, dX, dS, dS_first, chunk_start, chunk_end, first, H,
                           C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
                           OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dO [tokens, H, V], dS_last [documents, H, K, V] -> dX [chunks, H, C, V], the gradient of the state *after* each chunk
    dS [chunks, H, K, V], dS_first [documents, H, K, V] float32."""
    document, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    rows, channels, one = tl.arange(0, C), tl.arange(0, K), tl.arange(0, 1)
    columns = tl.program_id(0) * BV + tl.arange(0, BV)
    begin, end = tl.load(first + document), tl.load(first + document + 1)
    dstate = tl.load(block(dS_last, document, head, H, channels, columns, K, V))  # [K, BV]
    for step in range(begin, end):
        chunk = begin + end - 1 - step
        tl.store(block(dS, chunk, head, H, channels, columns, K, V), dstate)
        dO_ = load_tokens(dO, chunk, head, H, rows, columns, chunk_start, chunk_end, V)  # [C, BV]
        P_ = tl.load(block(P, chunk, head, H, rows, rows, C, C))
        k_out_ = tl.load(block(k_out, chunk, head, H, rows, channels, C, K))  # [C, K]
        dX_ = dot(tl.trans(P_), dO_, OPERAND, PRECISION) + dot(k_out_, dstate, OPERAND, PRECISION)
        tl.store(block(dX, chunk, head, H, rows, columns, C, V), dX_)
        keep = tl.exp(tl.load(block(G, chunk, head, H, one + C - 1, channels, C, K)))
        q_in_ = tl.load(block(q_in, chunk, head, H, rows, channels, C, K))
        W_ = tl.load(block(W, chunk, head, H, rows, channels, C, K))
        dstate = tl.trans(keep) * dstate + dot(tl.trans(q_in_), dO_, OPERAND, PRECISION) - dot(tl.trans(W_), dX_, OPERAND, PRECISION)
    tl.store(block(dS_first, document, head, H, channels, columns, K, V), dstate)


def states(W, U, k_out, G, S_first: Tensor, chunks: Chunks, numbers: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """X [chunks, H, C, V], the state before each chunk [chunks, H, K, V], and the last one of each document [documents, H, K, V]."""
    documents, H, K, V = S_first.shape
    X, S_last = torch.empty_like(U), torch.empty_like(S_first)
    S = torch.empty(len(chunks), H, K, V, dtype=numbers.stored, device=U.device)
    BV = min(V, numbers.columns)
    states_kernel[V // BV, H, documents](
        W, U, k_out, G, S_first, X, S, S_last, chunks.first, H, CHUNK, K, V, BV, numbers.operand, numbers.precision
    )
    return X, S, S_last


def states_backward(dO, P, W, q_in, k_out, G, dS_last: Tensor, chunks: Chunks, numbers: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """dX [chunks, H, C, V], the gradient of the state after each chunk [chunks, H, K, V], and that of the first [documents, H, K, V]."""
    documents, H, K, V = dS_last.shape
    dX = torch.empty(len(chunks), H, CHUNK, V, dtype=numbers.stored, device=W.device)
    dS, dS_first = torch.empty(len(chunks), H, K, V, dtype=numbers.stored, device=W.device), torch.empty_like(dS_last)
    BV = min(V, numbers.columns)
    states_backward_kernel[V // BV, H, documents](
        dO, P, W, q_in, k_out, G, dS_last, dX, dS, dS_first, chunks.start, chunks.end, chunks.first, H, CHUNK, K, V, BV,
        numbers.operand, numbers.precision, num_warps=8,
    )  # fmt: skip
    return dX, dS, dS_first
