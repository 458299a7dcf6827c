"""KDA in chunks: the recurrence runs over chunks of C tokens, and inside one everything is a matrix product.

Inside a chunk (Kimi Linear report Eq. 6-9, K3 report Eq. 3-4; the equation and its letters: ``chunkwise.py``), with beta on the other side
of the inverse and so E in place of the reports' X = diag(beta) E:

    inverse = (I + A diag(beta))^-1          recall = inverse (exp(G) * K)
    E  = inverse V - recall S                              the error of every token: its value less what is recalled, old or of this chunk
    S' = Diag(exp(G_C)) S + (exp(G_C - G) * K)^T diag(beta) E
    O  = (exp(G) * Q) S + P diag(beta) E

Only E and S' wait for the chunk before. They are two products a chunk; all else is computed for many chunks at once.

Chunks are taken in segments of a few hundred tokens, all heads together: what a segment needs in between fits the processor's cache,
and memory does not grow with T. The backward pass is written out below. It keeps the inputs, E and one state a chunk, recomputes the rest
and runs the state's gradient backward over the chunks, so that memory grows with T (K + V), not with T C.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from minimodel.delta_rule.recurrent import kda_recurrent_backward
from minimodel.delta_rule.tiles import (
    LOG2_E,
    TILE,
    Buffers,
    decayed_products,
    decayed_products_backward,
    sum_between,
    sum_from_here_on,
    tile_decay,
)
from minimodel.delta_rule.triangular import unit_lower_inverse
from minimodel.layers import own_precision

SEGMENT = 2**18  # numbers in one of a segment's buffers, 1 MB in float32: enough work for a call, not too much for the cache


def kda_chunked(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    S: Float[Tensor, "B H K V"],
    *,
    scale: float = 1.0,
    chunk_size: int = 32,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """Same result as ``kda_recurrent`` with ``scale * q``, computed in S's dtype. ``chunk_size``: a multiple of 16."""
    if not torch.is_grad_enabled():  # an autograd.Function is told what its inputs require, not whether anybody records
        q, k, v, g, beta, S = (x.detach() for x in (q, k, v, g, beta, S))
    with own_precision(S):
        return _ChunkedKDA.apply(q, k, v, g, beta, S, scale, chunk_size)


class _ChunkedKDA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, S, scale, chunk_size):
        cut, new = _Cut(k, v, S.dtype, chunk_size), Buffers(S)
        N, C, K, V = cut.N, cut.C, k.shape[-1], v.shape[-1]
        kept = any(ctx.needs_input_grad)
        if kept:
            states, errors = S.new_empty(cut.chunks + 1, N, K, V), S.new_empty(cut.chunks, N, C, V)
        o, state, S = torch.empty_like(v, dtype=q.dtype), S, S.reshape(N, K, V)
        for segment in cut.segments():
            n, c = len(segment), _Segment(cut, segment, q, k, g, beta, scale, new)
            E = errors[segment.start : segment.stop] if kept else new("E", n, N, C, V)
            S_ = states[segment.start : segment.stop + 1] if kept else new("states", n + 1, N, K, V)
            S_[0] = S
            _bmm(c.inverse, cut.take(v, segment, new, "v"), E)
            each = (x.unbind(0) for x in (c.recall, c.keep, c.writes.mT, E, S_[:-1], S_[1:]))  # views at once: a loop of indexing is slow
            for recall, keep, writes, error, before, after in zip(*each, strict=True):
                error.baddbmm_(recall, before, alpha=-1)
                torch.mul(keep, before, out=after).baddbmm_(writes, error)
            S = S_[n]
            O = _bmm(c.Q_in, S_[:n], new("O", n, N, C, V))
            O.flatten(0, 1).baddbmm_(c.own_reads.flatten(0, 1), E.flatten(0, 1))
            cut.put(O, o, segment)
        if kept:
            ctx.save_for_backward(q, k, v, g, beta, state, states, errors)
        ctx.scale, ctx.chunk_size = scale, chunk_size
        return o, S.clone().view_as(state)

    @staticmethod
    def backward(ctx, do, dS):
        *inputs, states, errors = ctx.saved_tensors
        with own_precision(states):
            if torch.is_grad_enabled():  # create_graph: the caller wants to differentiate this backward pass too
                return *kda_recurrent_backward(inputs, ctx.scale, do, dS), None, None
            return *_backward(inputs, states, errors, ctx.scale, ctx.chunk_size, do, dS), None, None


def _backward(
    inputs: list[Tensor], states: Tensor, errors: Tensor, scale: float, chunk_size: int, do: Tensor, dS: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, beta and the initial state, chunk by chunk from the last to the first."""
    q, k, v, g, beta, state = inputs
    cut, new = _Cut(k, v, states.dtype, chunk_size), Buffers(states)
    N, C, R, K, V = cut.N, cut.C, cut.R, k.shape[-1], v.shape[-1]
    dq, dk, dv, dg, dbeta = (torch.empty_like(x) for x in (q, k, v, g, beta))
    dS = dS.reshape(N, K, V)
    for segment in reversed(cut.segments()):
        n, c = len(segment), _Segment(cut, segment, q, k, g, beta, scale, new)
        S, E = states[segment.start : segment.stop], errors[segment.start : segment.stop]
        dO, dE, dS_ = cut.take(do, segment, new, "dO"), new("dE", n, N, C, V), new("dS", n + 1, N, K, V)
        dS_[n] = dS  # first: it may lie at the same buffer's start
        _bmm(c.own_reads.mT, dO, dE)
        _bmm(c.Q_in.mT, dO, dS_[:n])
        each = (reversed(x.unbind(0)) for x in (c.recall.mT, c.keep, c.writes, dE, dS_[:-1], dS_[1:]))
        for recall, keep, writes, derror, before, after in zip(*each, strict=True):
            derror.baddbmm_(writes, after)
            before.addcmul_(keep, after).baddbmm_(recall, derror, alpha=-1)
        dS, dS_after = dS_[0], dS_[1:]
        dY = _bmm(c.inverse.mT, dE, new("dY", n, N, C, V))  # Y = V - (exp(G) * K) S
        cut.put(dY, dv, segment)

        # E = (I + A diag(beta))^-1 Y and O: d(A diag(beta)) = -dY E^T, d(P diag(beta)) = dO E^T, inside their triangles
        dread = new("dread", n, N, R, 2, TILE, V)  # (-dY, dO), side by side like (k, q)
        torch.neg(dY.view(n, N, R, TILE, V), out=dread[:, :, :, 0])
        dread[:, :, :, 1] = dO.view(n, N, R, TILE, V)
        dread = dread.view(n, N, 2 * C, V)
        dAP = _bmm(dread, E.mT, new("dAP", n, N, 2 * C, C)).view(n, N, R, 2, TILE, C)
        dcolumns = _bmm(E, dS_after.mT, new("dcolumns", n, N, C, K))
        AP = torch.stack([x.view(n, N, R, TILE, C) for x in (c.A, c.P)], 3)
        dbeta_ = AP.mul_(dAP).sum((2, 3, 4)) + (c.K_out * dcolumns).sum(-1)
        dAP.mul_(cut.triangles).mul_(c.beta.view(n, N, 1, 1, 1, C))
        dcolumns *= c.beta

        # the three places where the whole chunk's decay scales q or k; all of S' is proportional to exp(G_C)
        drows = _bmm(dread, S.mT, new("drows", n, N, 2 * C, K)).view_as(c.rows).mul_(c.into.unsqueeze(3))
        dtotal = torch.mul(states[segment.start + 1 : segment.stop + 1], dS_after, out=new("SdS", n, N, K, V)).sum(-1)
        dcolumns = dcolumns.view_as(c.columns).mul_(c.out_of)
        decayed_products_backward(dAP, c.k, c.q, c.rows, c.columns, c.decay, drows, dcolumns)

        # exp(G_i - G_j) makes G's gradient free: what reaches a row times that row, minus the same for a column
        dk_row, dq_ = drows[:, :, :, 0], drows[:, :, :, 1]
        dG = (dk_row - dcolumns).mul_(c.k).addcmul_(c.q, dq_)
        dG[:, :, -1, -1] += dtotal
        cut.put(sum_from_here_on(dG), dg, segment)
        cut.put(dcolumns.add_(dk_row), dk, segment)
        cut.put(dq_ * scale, dq, segment)
        cut.put(dbeta_, dbeta.unsqueeze(-1), segment)
    return dq, dk, dv, dg, dbeta, dS.clone().view_as(state)


class _Segment:
    """What the forward and the backward pass both need of n chunks, laid out [n, N = B * H, ..]; see ``chunkwise.py`` for the letters."""

    def __init__(self, cut: _Cut, segment: range, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, scale: float, new: Buffers) -> None:
        n, N, C, R, K = len(segment), cut.N, cut.C, cut.R, k.shape[-1]
        self.q, self.k, g = (cut.take(x, segment, new, name).view(n, N, R, TILE, K) for name, x in (("q", q), ("k", k), ("g", g)))
        self.beta = cut.take(beta.unsqueeze(-1), segment, new, "beta")
        self.q *= scale
        # exp underflows to zero before this: nothing changes, and -inf times zero never comes up
        g.clamp_min_(-750.0 if g.dtype == torch.float64 else -110.0).mul_(LOG2_E)
        self.decay = decay = tile_decay(g, new)
        self.rows = new("rows", n, N, R, 2, TILE, K)
        torch.mul(decay.rows, self.k, out=self.rows[:, :, :, 0])
        torch.mul(decay.rows, self.q, out=self.rows[:, :, :, 1])
        self.columns = torch.mul(decay.columns, self.k, out=new("columns", n, N, R, TILE, K))
        self.A, self.P = decayed_products(self.k, self.q, self.rows, self.columns, decay, new)
        self.inverse = unit_lower_inverse(self.A * self.beta.mT, new("inverse", n, N, C, C))
        self.own_reads = torch.mul(self.P, self.beta.mT, out=new("own_reads", n, N, C, C))
        # from tile to chunk: exp(G) * (K, Q), exp(G_C - G) * K and exp(G_C)
        before = torch.cat([torch.zeros_like(decay.whole[:, :, :1]), decay.whole[:, :, :-1].cumsum(2)], 2)
        self.into = (before + decay.head).exp2_().unsqueeze(-2)
        self.out_of = sum_between(decay.whole, R).add_(decay.tail).exp2_().unsqueeze(-2)
        K_in, self.Q_in, self.K_out = (new(name, n, N, C, K) for name in ("K_in", "Q_in", "K_out"))
        torch.mul(self.rows[:, :, :, 0], self.into, out=K_in.view_as(g))
        torch.mul(self.rows[:, :, :, 1], self.into, out=self.Q_in.view_as(g))
        torch.mul(self.columns, self.out_of, out=self.K_out.view_as(g))
        self.keep = (before[:, :, -1] + decay.whole[:, :, -1]).exp2_().unsqueeze(-1)
        self.recall = _bmm(self.inverse, K_in, new("recall", n, N, C, K))
        self.writes = torch.mul(self.K_out, self.beta, out=new("writes", n, N, C, K))


def _bmm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """``a @ b`` into ``out``, all [n, N, .., ..]: one batched product (torch.matmul would go by way of a copy)."""
    torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out=out.flatten(0, 1))
    return out


class _Cut:
    """How [B, T, H, ..] is cut into chunks of C tokens and these into segments: copies there and back.

    Padded tokens have k = 0, g = 0, beta = 0: they neither fade nor write.
    """

    def __init__(self, k: Tensor, v: Tensor, dtype: torch.dtype, chunk_size: int) -> None:
        self.B, self.T, self.H, K = k.shape
        self.N = self.B * self.H
        self.R = min(chunk_size // TILE, -(-self.T // TILE))
        self.C = self.R * TILE
        self.chunks = -(-self.T // self.C)
        self.per_segment = max(1, SEGMENT // (self.N * self.C * max(K, v.shape[-1])))
        ones = torch.ones(2, self.C, self.C, dtype=dtype, device=k.device)
        ones[0].tril_(-1), ones[1].tril_()
        self.triangles = ones.view(2, self.R, TILE, self.C).transpose(0, 1)  # of A and P, tile by tile

    def segments(self) -> list[range]:
        """Chunk numbers, a segment after the other."""
        starts = range(0, self.chunks, self.per_segment)
        return [range(start, min(start + self.per_segment, self.chunks)) for start in starts]

    def take(self, x: Float[Tensor, "B T H X"], segment: range, new: Buffers, name: str) -> Float[Tensor, "n N C X"]:
        """A segment's tokens, in the buffers' dtype; zeros after the last token."""
        out = new(name, len(segment), self.N, self.C, x.shape[-1])
        for rows, tokens in self._pairs(out, x, segment):
            rows.copy_(tokens)
        left = segment.stop * self.C - self.T
        if left > 0:
            out[-1, :, self.C - left :] = 0.0
        return out

    def put(self, rows: Tensor, x: Float[Tensor, "B T H X"], segment: range) -> None:
        """The way back: a segment's results, [n, N, C, X] in any grouping, to their places in ``x``."""
        for part, tokens in self._pairs(rows, x, segment):
            tokens.copy_(part)

    def _pairs(self, rows: Tensor, x: Tensor, segment: range) -> list[tuple[Tensor, Tensor]]:
        """Matching views [B, n, C, H, X] of ``rows`` and ``x``: whole chunks, and what is left of a last one."""
        rows = rows.view(len(segment), self.B, self.H, self.C, x.shape[-1]).permute(1, 0, 3, 2, 4)
        x = x[:, segment.start * self.C : segment.stop * self.C]
        whole, left = divmod(x.shape[1], self.C)
        pairs = [(rows[:, :whole], x[:, : whole * self.C].unflatten(1, (whole, self.C)))] if whole else []
        return [*pairs, (rows[:, whole, :left], x[:, whole * self.C :])] if left else pairs
