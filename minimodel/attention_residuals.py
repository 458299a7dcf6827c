"""Attention Residuals: every sublayer reads earlier outputs by attention over *depth* (Attention Residuals report Eq. 2-4; K3 2.2).

A plain transformer adds every output to one stream. Here a sublayer's input is a weighted mix of sources: the embedding, the sums of
finished blocks of layers, and the running sum of the current block. There is no ``h + f(h)``. Nothing is kept along time.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from minimodel.delta_rule.triton_available import use_triton
from minimodel.layers import RMSNorm, own_precision, wide
from minimodel.trace import Traced

__all__ = ["DepthSources", "PseudoQuery", "attention_residual", "depth_weights", "two_phase_read"]


def attention_residual(
    sources: Float[Tensor, "... N D"], query: Float[Tensor, "D"], gain: Float[Tensor, "D"], eps: float = 1e-5
) -> Float[Tensor, "... D"]:
    """``h = sum_i softmax_i(query . RMSNorm(v_i) * gain) v_i`` over N depth sources v_i; the values stay un-normalized.

    Args:
        sources: [..., N, D], oldest first.
        query: the sublayer's learned pseudo-query [D]; zero at initialization, so that depth is averaged at first.
        gain: the gain of the sublayer's own RMSNorm [D].
    """
    if not sources.is_floating_point():
        raise TypeError(f"sources must be a floating-point tensor, got {sources.dtype}")
    if sources.dim() < 2 or sources.shape[-2] < 1:
        raise ValueError(f"sources must be [..., N, D] with N >= 1, got shape {tuple(sources.shape)}")
    D = sources.shape[-1]
    if tuple(query.shape) != (D,) or tuple(gain.shape) != (D,):
        raise ValueError(f"query and gain must be [D] = ({D},), got {tuple(query.shape)} and {tuple(gain.shape)}")
    if use_triton("auto", [sources]):
        from minimodel.triton_depth_read import depth_read  # only here: importing Triton takes a while

        return depth_read(sources, query, gain, eps)
    weights = depth_weights(sources, query, gain, eps)
    return (weights.unsqueeze(-1) * wide(sources)).sum(-2).to(sources.dtype)  # a product of [1, N] and [N, D] a token would be slower


def depth_weights(
    sources: Float[Tensor, "... N D"], query: Float[Tensor, "D"], gain: Float[Tensor, "D"], eps: float = 1e-5
) -> Float[Tensor, "... N"]:
    """The softmax weights of :func:`attention_residual`, in float32 (or float64)."""
    return depth_scores(sources, query, gain, eps).softmax(-1)


def depth_scores(sources: Tensor, query: Tensor, gain: Tensor, eps: float = 1e-5) -> Float[Tensor, "... N"]:
    """``query . (gain * RMSNorm(v_i))``; the norm is a scalar a source, so the product comes first."""
    v = wide(sources)
    with own_precision(v):
        mean_square = torch.linalg.vecdot(v, v) / v.shape[-1]
        along = v @ (gain.to(v.dtype) * query.to(v.dtype))
    return along * torch.rsqrt(mean_square + eps)


def two_phase_read(
    stored: Float[Tensor, "... N D"],
    prefix: Float[Tensor, "... D"],
    query: Float[Tensor, "D"],
    gain: Float[Tensor, "D"],
    eps: float = 1e-5,
) -> Float[Tensor, "... D"]:
    """The same mix in two phases joined by an online softmax (Attention Residuals report, Algorithm 1).

    Phase 1 reads the stored blocks (for all readers of a block at once, in a fast kernel); phase 2 merges the prefix, which changes
    with every sublayer.
    """
    scores = depth_scores(stored, query, gain, eps)
    m1 = scores.amax(-1)
    p = (scores - m1.unsqueeze(-1)).exp()
    o1, l1 = (p.unsqueeze(-2) @ wide(stored)).squeeze(-2), p.sum(-1)
    m2 = depth_scores(prefix.unsqueeze(-2), query, gain, eps).squeeze(-1)
    m = torch.maximum(m1, m2)
    a1, a2 = (m1 - m).exp(), (m2 - m).exp()
    return ((a1.unsqueeze(-1) * o1 + a2.unsqueeze(-1) * wide(prefix)) / (a1 * l1 + a2).unsqueeze(-1)).to(prefix.dtype)


class DepthSources:
    """The bookkeeping of one forward pass: stored blocks and the running sum of the current one.

    ``block`` counts *sublayers*: K3's ``attn_res_block_size`` counts layers, so a model passes twice that. 1 gives full Attention
    Residuals (every output is a source), None a plain residual stream.
    """

    def __init__(self, embedding: Float[Tensor, "B T D"], block: int | None) -> None:
        self.blocks: list[Tensor] = []
        self.prefix = embedding
        self.block, self._written = block, 0

    def copy(self) -> DepthSources:
        """The same sources, to be written on apart."""
        twin = DepthSources(self.prefix, self.block)
        twin.blocks, twin._written = list(self.blocks), self._written
        return twin

    def stacked(self) -> Float[Tensor, "B T N D"]:
        """All sources a reader sees now, oldest first, the running prefix last."""
        return torch.stack([*self.blocks, self.prefix], -2)

    def read(self, query: PseudoQuery | None, norm: RMSNorm | None) -> Float[Tensor, "B T D"]:
        """A sublayer's input. With plain residuals, or before anything is stored, there is one source: the running sum."""
        return query(self.stacked(), norm) if self.blocks else self.prefix

    def write(self, output: Float[Tensor, "B T D"]) -> None:
        """Add a sublayer's output. At a block's start the finished sum is stored and a new one begins (the embedding is block 0)."""
        if self.block is not None and self._written % self.block == 0:
            self.blocks.append(self.prefix)
            self.prefix = output
        else:
            self.prefix = self.prefix + output
        self._written += 1


class PseudoQuery(Traced):
    """One reader of depth: its learned vector, stored [1, D] as released. Zero at first: the reader then averages its sources."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, size))

    def forward(self, sources: Float[Tensor, "B T N D"], norm: RMSNorm) -> Float[Tensor, "B T D"]:
        if self.tracing:
            self.emit(weights=depth_weights(sources, self.weight[0], norm.weight, norm.eps), sources=sources)
        return attention_residual(sources, self.weight[0], norm.weight, norm.eps)
