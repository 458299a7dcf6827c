"""The recurrence itself: one token at a time, in the words of the equation. It is the judge of every faster form."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from minimodel.layers import own_precision


def kda_step(
    S: Float[Tensor, "... K V"],
    q: Float[Tensor, "... K"],
    k: Float[Tensor, "... K"],
    v: Float[Tensor, "... V"],
    g: Float[Tensor, "... K"],
    beta: Float[Tensor, "..."],
) -> tuple[Float[Tensor, "... V"], Float[Tensor, "... K V"]]:
    """One step of Kimi Delta Attention, K3 report Eq. 1: ``S = (I - beta k k^T) Diag(alpha) S + beta k v^T``, ``o = S^T q``.

    Written as fade, erase, write. The error is taken against the *already faded* state. ``q`` comes scaled.
    """
    S = g.exp().unsqueeze(-1) * S  # fade: every key channel by its own alpha
    recalled = (k.unsqueeze(-2) @ S).squeeze(-2)  # what the board holds for this key
    delta = beta.unsqueeze(-1) * (v - recalled)  # erase beta of the old, write beta of the new
    S = S + k.unsqueeze(-1) * delta.unsqueeze(-2)
    return (q.unsqueeze(-2) @ S).squeeze(-2), S


def kda_step_(
    S: Float[Tensor, "B H K V"],
    q: Float[Tensor, "B 1 H K"],
    k: Float[Tensor, "B 1 H K"],
    v: Float[Tensor, "B 1 H V"],
    g: Float[Tensor, "B 1 H K"],
    beta: Float[Tensor, "B 1 H"],
    scale: float,
) -> Float[Tensor, "B 1 H V"]:
    """:func:`kda_step` for decoding, written into S: nothing of the state's size is allocated. Returns ``S^T (scale * q)``."""
    B, H, K, V = S.shape
    N = B * H
    q, k, v = q.reshape(N, 1, K), k.reshape(N, 1, K), v.reshape(N, 1, V)  # rows for bmm; a token takes as long to prepare as to multiply
    S = S.view(N, K, V)
    S.mul_(g.exp().reshape(N, K, 1))
    with own_precision(S):
        delta = (v - torch.bmm(k, S)).mul_(beta.reshape(N, 1, 1))
        S.addcmul_(k.view(N, K, 1), delta)
        return torch.bmm(q, S).mul_(scale).view(B, 1, H, V)


def kda_recurrent(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    S: Float[Tensor, "B H K V"],
    *,
    keep_states: bool = False,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"], Float[Tensor, "B T H K V"] | None]:
    """:func:`kda_step` over time. Returns outputs, the final state, and every state on request. ``q`` comes scaled."""
    outputs, states = [], []
    with own_precision(S):
        for t in range(q.shape[1]):
            o, S = kda_step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
            outputs.append(o)
            if keep_states:
                states.append(S)
    o = torch.stack(outputs, 1) if outputs else torch.empty_like(v)
    return o, S, torch.stack(states, 1) if states else None


def kda_recurrent_backward(inputs: list[Tensor], scale: float, do: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, g, beta, S by autograd over :func:`kda_recurrent` on ``scale * q``: slow, but with a graph of their own.

    For second derivatives of the fast forms, whose backward passes are written by hand. None for inputs that require no gradient.
    """
    # views, since one input may have been computed from another, or be the same: what reaches it that way is not ours to count
    q, k, v, g, beta, S = inputs = [x.view_as(x) for x in inputs]
    q_, k_, v_, g_, beta_ = (x.to(S.dtype) for x in (q * scale, k, v, g, beta))
    o, end, _ = kda_recurrent(q_, k_, v_, g_, beta_, S)
    wanted = [x for x in inputs if x.requires_grad]
    found = iter(torch.autograd.grad((o.to(q.dtype), end), wanted, (do, dS), create_graph=True))
    return tuple(next(found) if x.requires_grad else None for x in inputs)
