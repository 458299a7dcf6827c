"""KDA in chunks: the recurrence runs over chunks of C tokens, and inside one everything is a matrix product.

Inside a chunk (Kimi Linear report Eq. 6-9, K3 report Eq. 3-4), with S the state before it, G the running sum of g, and A and P
from ``tiles.py``:

    M  = (I + diag(beta) A)^-1 diag(beta)            all erasures of the chunk, solved at once
    X  = M (V - (exp(G) * K) S)                      what each token really writes: its value less what is recalled, old or of this chunk
    O  = (exp(G) * Q) S + P X
    S' = Diag(exp(G_C)) S + (exp(G_C - G) * K)^T X

The backward pass is written out below. It keeps the inputs and one state a chunk, recomputes the rest, and runs the state's gradient
backward over the chunks, so that memory grows with T (K + V), not with T C.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from minimodel.delta_rule.recurrent import kda_recurrent
from minimodel.delta_rule.tiles import DENSE_BOUND, TILE, decayed_products, decayed_products_backward


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
    T = k.shape[1]
    # exp underflows to zero before this: nothing changes, but a running sum stays exact beside it and -inf does no harm
    g = g.clamp_min(-750.0 if g.dtype == torch.float64 else -110.0)
    C = min(chunk_size, -(-T // TILE) * TILE)
    q, k, v, g, beta = (_chunks(x, C) for x in (q, k, v, g, beta.unsqueeze(-1)))
    o, S = _ChunkedKDA.apply(q, k, v, g, beta, S)
    return o.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :T], S


def _chunks(x: Float[Tensor, "B T H X"], C: int) -> Float[Tensor, "B H N C X"]:
    """Cut time into chunks. Padded rows have k = 0, g = 0, beta = 0: they neither fade nor write."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % C))
    return x.unflatten(1, (-1, C)).permute(0, 3, 1, 2, 4).contiguous()


class _ChunkedKDA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, S):
        dense = bool(g.amin() >= DENSE_BOUND)
        c = _Chunk(q, k, g, beta, dense)
        outputs, states = [], []
        for n in range(q.shape[2]):
            if any(ctx.needs_input_grad):
                states.append(S)
            X = c.M[:, :, n] @ (v[:, :, n] - c.k_in[:, :, n] @ S)
            outputs.append(c.q_in[:, :, n] @ S + c.P[:, :, n] @ X)
            S = c.keep[:, :, n] * S + c.k_out[:, :, n].mT @ X
        ctx.save_for_backward(q, k, v, g, beta, *states)
        ctx.dense = dense
        return torch.stack(outputs, 2), S

    @staticmethod
    def backward(ctx, dO, dS):
        q, k, v, g, beta, *states = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the caller wants to differentiate this backward pass too
            return _differentiable_backward([q, k, v, g, beta, states[0]], dO, dS)
        c = _Chunk(q, k, g, beta, ctx.dense)
        S = torch.stack(states, 2)
        Y = v - c.k_in @ S
        X = c.M @ Y
        dX = c.P.mT @ dO
        dS_out = [None] * len(states)  # gradient of the state *after* each chunk
        for n in reversed(range(len(states))):
            dS_out[n] = dS
            dX[:, :, n] += c.k_out[:, :, n] @ dS
            dY = c.M[:, :, n].mT @ dX[:, :, n]
            dS = c.q_in[:, :, n].mT @ dO[:, :, n] + c.keep[:, :, n] * dS - c.k_in[:, :, n].mT @ dY
        dS_out = torch.stack(dS_out, 2)

        # X = (I + diag(beta) A)^-1 diag(beta) Y, so with Z = (I + diag(beta) A)^-T dX:  dY = beta Z,  d(beta A) = -Z X^T
        Z = c.solve_transposed(dX)
        dV = beta * Z
        ZX = (Z @ X.mT).tril_(-1)
        dbeta = (Z * (Y - c.A @ X)).sum(-1, keepdim=True)
        dq, dk, dG = decayed_products_backward(-beta * ZX, (dO @ X.mT).tril_(), q, k, c.G, ctx.dense)

        # the three places where the whole chunk's decay scales q or k; G's gradient follows from each product
        dq_in, dk_in, dk_out = dO @ S.mT, -dV @ S.mT, X @ dS_out.mT
        dq += c.decay_in * dq_in
        dk += c.decay_in * dk_in + c.decay_out * dk_out
        through_out = c.k_out * dk_out
        dG += c.q_in * dq_in + c.k_in * dk_in - through_out
        dG[..., -1, :] += through_out.sum(-2) + (c.keep * S * dS_out).sum(-1)
        dg = dG.flip(-2).cumsum(-2).flip(-2)
        return dq, dk, dV, dg, dbeta, dS


def _differentiable_backward(inputs: list[Tensor], dO: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
    """The same gradients through autograd's own pass over the recurrence: slow, but with a graph of their own."""
    rows = [x.flatten(2, 3).transpose(1, 2) for x in inputs[:5]]
    o, S, _ = kda_recurrent(*rows[:4], rows[4].squeeze(-1), inputs[5])
    wanted = [x for x in inputs if x.requires_grad]
    found = iter(torch.autograd.grad((o, S), wanted, (dO.flatten(2, 3).transpose(1, 2), dS), create_graph=True))
    return tuple(next(found) if x.requires_grad else None for x in inputs)


class _Chunk:
    """What the forward and the backward pass both need of every chunk, [B, H, N, ...]."""

    def __init__(self, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, dense: bool) -> None:
        self.G = G = g.cumsum(-2)
        self.A, self.P = decayed_products(q, k, G, dense)
        self._system = beta * self.A  # unit lower triangular once the diagonal of ones is read into it
        eye = torch.eye(G.shape[-2], dtype=G.dtype, device=G.device)
        self.M = torch.linalg.solve_triangular(self._system, eye * beta, upper=False, unitriangular=True)
        self.decay_in, self.decay_out = G.exp(), (G[..., -1:, :] - G).exp_()
        self.q_in, self.k_in, self.k_out = self.decay_in * q, self.decay_in * k, self.decay_out * k
        self.keep = self.decay_in[..., -1:, :].mT  # [.., K, 1]

    def solve_transposed(self, dX: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self._system.mT, dX, upper=True, unitriangular=True)
