"""A memory that is written by addition only: linear attention (no decay) and Mamba-2's scalar decay, recurrent and in chunks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def additive_recurrent(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H"],
    write: Float[Tensor, "B T H"],
    S: Float[Tensor, "B H K V"],
    *,
    keep_states: bool = False,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"], Float[Tensor, "B T H K V"] | None]:
    """``S_t = exp(g_t) S_(t-1) + write_t k_t v_t^T``, ``o_t = S_t^T q_t``: what a key held before is never erased.

    Args:
        q, k, v: scaled queries and keys [B, T, H, K], values [B, T, H, V].
        g: log-decay <= 0, one a head [B, T, H].
        write: write strength >= 0 [B, T, H].
        S: state before the first token [B, H, K, V].
        keep_states: also return the state after every token.

    Returns: outputs [B, T, H, V], the final state, and every state [B, T, H, K, V] on request.
    """
    outputs, states = [], []
    for t in range(q.shape[1]):
        S = g[:, t, :, None, None].exp() * S + (write[:, t, :, None] * k[:, t]).unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        if keep_states:
            states.append(S)
    return torch.stack(outputs, 1), S, torch.stack(states, 1) if keep_states else None


def additive_chunked(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H"],
    write: Float[Tensor, "B T H"],
    S: Float[Tensor, "B H K V"],
    *,
    chunk_size: int = 64,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """Same result as :func:`additive_recurrent`, chunk by chunk with matrix products inside; any g <= 0 and any chunk size >= 1.

    With G the running sum of g in a chunk: ``O = e^G (Q S) + (Q K^T * e^(G_i - G_j) * write_j) V`` for j <= i. One decay a head keeps
    every difference G_i - G_j <= 0, so nothing can overflow.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    T = q.shape[1]
    C = min(chunk_size, T)
    N = -(-T // C)

    def chunks(x: Tensor) -> Tensor:  # [B, T, H, ...] -> [N, B, H, C, ...]; padded rows write nothing and don't fade
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, N * C - T))
        return x.unflatten(1, (N, C)).movedim(1, 0).transpose(2, 3)

    causal = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    outputs = []
    for q_, k_, v_, g_, w_ in zip(*map(chunks, (q, k, v, g, write)), strict=True):
        G = g_.cumsum(-1)
        decay = (G.unsqueeze(-1) - G.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()  # masked before exp: else inf * 0 in backward
        outputs.append(G.exp().unsqueeze(-1) * (q_ @ S) + (q_ @ k_.transpose(-1, -2) * decay * w_.unsqueeze(-2)) @ v_)
        to_end = ((G[..., -1:] - G).exp() * w_).unsqueeze(-1) * k_
        S = G[..., -1].exp()[..., None, None] * S + to_end.transpose(-1, -2) @ v_
    return torch.cat(outputs, 2)[:, :, :T].transpose(1, 2), S
