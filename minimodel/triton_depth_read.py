"""Triton: the read of Block Attention Residuals, fused. Plain torch passes over the sources four times; this passes twice, the second
time mostly through the cache.

    a_i = w . v_i with w = gain * query          r_i = 1 / sqrt(mean(v_i^2) + eps)
    p = softmax_i(a_i r_i)                       h = sum_i p_i v_i

    dp_i = dh . v_i          ds_i = p_i (dp_i - sum_j p_j dp_j)          the gradient of the score a_i r_i
    dv_i = p_i dh + ds_i r_i w - (ds_i a_i r_i^3 / D) v_i          dw = sum over tokens and sources of ds_i r_i v_i

There is one program a token: its N sources (9 in K3) are few, their D numbers (7,168) many, so both sums run over D in blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

GROUP = 64  # tokens whose part of dw one program adds up


@triton.jit
def sources_block(v, token, i, d, N, D):
    """[N, BD] of one token's sources [tokens, N, D] in float32; zero outside."""
    there = (i < N)[:, None] & (d < D)[None, :]
    return tl.load(v + (token * N + i[:, None]) * D + d[None, :], mask=there, other=0.0).to(tl.float32)


@triton.jit
def read_kernel(v, w, h, N, D, eps, NP: tl.constexpr, BD: tl.constexpr):
    """v [tokens, N, D], w [D] float32 -> h [tokens, D]."""
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, NP)
    a, squares = tl.zeros((NP,), tl.float32), tl.zeros((NP,), tl.float32)
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        v_ = sources_block(v, token, i, d, N, D)
        a += tl.sum(v_ * tl.load(w + d, mask=d < D, other=0.0)[None, :], 1)
        squares += tl.sum(v_ * v_, 1)
    score = tl.where(i < N, a * tl.rsqrt(squares / D + eps), -float("inf"))
    p = tl.exp(score - tl.max(score, 0))
    p = p / tl.sum(p, 0)
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        h_ = tl.sum(p[:, None] * sources_block(v, token, i, d, N, D), 0)
        tl.store(h + token * D + d, h_, mask=d < D)


@triton.jit
def read_weights_backward_kernel(v, w, dh, p_out, along_w, along_v, N, D, eps, NP: tl.constexpr, BD: tl.constexpr):
    """-> for each token and source [tokens, N]: p, ds r (what goes along w), and ds a r^3 / D (along v)."""
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, NP)
    a, squares, dp = tl.zeros((NP,), tl.float32), tl.zeros((NP,), tl.float32), tl.zeros((NP,), tl.float32)
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        v_ = sources_block(v, token, i, d, N, D)
        a += tl.sum(v_ * tl.load(w + d, mask=d < D, other=0.0)[None, :], 1)
        squares += tl.sum(v_ * v_, 1)
        dp += tl.sum(v_ * tl.load(dh + token * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :], 1)
    r = tl.rsqrt(squares / D + eps)
    score = tl.where(i < N, a * r, -float("inf"))
    p = tl.exp(score - tl.max(score, 0))
    p = p / tl.sum(p, 0)
    ds = p * (dp - tl.sum(p * dp, 0))
    place = token * N + i
    tl.store(p_out + place, p, mask=i < N)
    tl.store(along_w + place, ds * r, mask=i < N)
    tl.store(along_v + place, ds * a * r * r * r / D, mask=i < N)


@triton.jit
def read_sources_backward_kernel(v, w, dh, p, along_w, along_v, dv, dw, tokens, N, D,
                                 NP: tl.constexpr, BD: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """-> dv [tokens, N, D]; this group's part of dw [groups, D]. One program a group of tokens and BD numbers of D."""
    group, i = tl.program_id(0).to(tl.int64), tl.arange(0, NP)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    w_ = tl.load(w + d, mask=d < D, other=0.0)
    dw_ = tl.zeros((BD,), tl.float32)
    for token in range(group * GROUP, tl.minimum(group * GROUP + GROUP, tokens)):
        v_ = sources_block(v, token, i, d, N, D)
        dh_ = tl.load(dh + token * D + d, mask=d < D, other=0.0).to(tl.float32)
        place = token * N + i
        p_ = tl.load(p + place, mask=i < N, other=0.0)
        along_w_ = tl.load(along_w + place, mask=i < N, other=0.0)
        along_v_ = tl.load(along_v + place, mask=i < N, other=0.0)
        dv_ = p_[:, None] * dh_[None, :] + along_w_[:, None] * w_[None, :] - along_v_[:, None] * v_
        tl.store(dv + (token * N + i[:, None]) * D + d[None, :], dv_, mask=(i < N)[:, None] & (d < D)[None, :])
        dw_ += tl.sum(along_w_[:, None] * v_, 0)
    tl.store(dw + group * D + d, dw_, mask=d < D)


def depth_read(
    sources: Float[Tensor, "... N D"], query: Float[Tensor, "D"], gain: Float[Tensor, "D"], eps: float = 1e-5
) -> Float[Tensor, "... D"]:
    """:func:`minimodel.attention_residuals.attention_residual` for float32 or bfloat16 sources. Can be differentiated once."""
    N, D = sources.shape[-2:]
    w = gain.float() * query.float()  # autograd takes dw to the two of them
    return _DepthRead.apply(sources.reshape(-1, N, D).contiguous(), w, eps).view(*sources.shape[:-2], D)


class _DepthRead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, w, eps):
        tokens, N, D = v.shape
        h = v.new_empty(tokens, D)
        with torch.cuda.device_of(v):
            read_kernel[tokens,](v, w, h, N, D, eps, *_blocks(N, D))
        ctx.save_for_backward(v, w)
        ctx.eps = eps
        return h

    @staticmethod
    def backward(ctx, dh):
        if torch.is_grad_enabled():  # create_graph: what follows would silently leave no graph
            raise RuntimeError("attention residuals on a GPU can be differentiated once; second derivatives need the model on the CPU")
        v, w = ctx.saved_tensors
        tokens, N, D = v.shape
        NP, BD = _blocks(N, D)
        groups, dh = triton.cdiv(tokens, GROUP), dh.contiguous()
        p, along_w, along_v = (w.new_empty(tokens, N) for _ in range(3))
        dv, dw = torch.empty_like(v), w.new_empty(groups, D)
        with torch.cuda.device_of(v):
            read_weights_backward_kernel[tokens,](v, w, dh, p, along_w, along_v, N, D, ctx.eps, NP, BD)
            read_sources_backward_kernel[groups, triton.cdiv(D, BD)](
                v, w, dh, p, along_w, along_v, dv, dw, tokens, N, D, NP, BD, GROUP, num_warps=8
            )
        return dv, dw.sum(0), None


def _blocks(N: int, D: int) -> tuple[int, int]:
    """Powers of two: rows for N sources, numbers of D at a time, some 4,096 together."""
    NP = triton.next_power_of_2(N)
    return NP, min(triton.next_power_of_2(D), max(16, 4096 // NP))
