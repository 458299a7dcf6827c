"""The equation of a chunk in plain torch: the readable twin of the fast forms, and with the recurrence their judge.

Kimi Linear report Eq. 6-9, K3 report Eq. 3-4. A chunk has C tokens, one a row of Q (scaled), K and V; S is the state before it::

    A_ij = sum_c k_ic k_jc exp(G_ic - G_jc)   j < i          P_ij = sum_c q_ic k_jc exp(G_ic - G_jc)   j <= i
    L  = diag(beta) A                                        M = (I + L)^-1 diag(beta)
    W  = M (exp(G) * K)                                      U = M V
    X  = U - W S                                             O = (exp(G) * Q) S + P X
    S' = Diag(exp(G_C)) S + (exp(G_C - G) * K)^T X

The letters, in all files of this folder:

    letter    shape     meaning                                                       the reports' letter
    G         [C, K]    running sum of g from the chunk's first token on              log of Gamma
    A         [C, C]    how keys meet the keys of earlier tokens, faded on the way    (part of L)
    P         [C, C]    what queries read of writes up to their own, faded            Tril(..)
    L         [C, C]    A with the write strength of the reading token                L
    M         [C, C]    all corrections of the chunk at once                          M
    W, U      C rows    corrected keys [C, K] and values [C, V]                       W, U
    X         [C, V]    what each token really writes                                 V with a tilde
    Y         [C, V]    V - (exp(G) * K) S: values less what S still says of them
    E         [C, V]    each token's error, value less what is recalled: X = diag(beta) E

Fast forms that carry E take beta to the other side of the inverse, which leaves nothing to divide by where beta is 0:

    (I + diag(beta) A)^-1 diag(beta) = diag(beta) (I + A diag(beta))^-1,   so   E = (I + A diag(beta))^-1 Y   and   X = M Y = diag(beta) E
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from minimodel.layers import own_precision


def decay_between(G: Float[Tensor, "... C K"]) -> Float[Tensor, "... C C K"]:
    """exp(G_i - G_j) for j <= i, else 0. The difference comes before exp: exp(G_i) / exp(G_j) is the same, until exp(-G_j) overflows."""
    later = torch.ones(G.shape[-2], G.shape[-2], dtype=torch.bool, device=G.device).triu(1)
    return (G.unsqueeze(-2) - G.unsqueeze(-3)).masked_fill(later.unsqueeze(-1), -torch.inf).exp()


def overlaps(rows: Float[Tensor, "... C K"], k: Float[Tensor, "... C K"], decay: Float[Tensor, "... C C K"]) -> Float[Tensor, "... C C"]:
    """How row i meets key j after the decay between them, summed over channels: P with queries as rows, A (and its diagonal) with keys."""
    return (rows.unsqueeze(-2) * decay * k.unsqueeze(-3)).sum(-1)


def corrected(
    k: Float[Tensor, "... C K"], v: Float[Tensor, "... C V"], G: Float[Tensor, "... C K"], beta: Float[Tensor, "... C"],
    L: Float[Tensor, "... C C"],
) -> tuple[Float[Tensor, "... C K"], Float[Tensor, "... C V"]]:  # fmt: skip
    """W and U: one triangular system makes all the corrections that the recurrence makes token by token."""
    right = beta.unsqueeze(-1) * torch.cat([G.exp() * k, v], -1)
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return torch.linalg.solve_triangular(eye + L, right, upper=False, unitriangular=True).split([k.shape[-1], v.shape[-1]], -1)


def kda_chunk(
    q: Float[Tensor, "... C K"], k: Float[Tensor, "... C K"], v: Float[Tensor, "... C V"], g: Float[Tensor, "... C K"],
    beta: Float[Tensor, "... C"], S: Float[Tensor, "... K V"],
) -> tuple[Float[Tensor, "... C V"], Float[Tensor, "... K V"]]:  # fmt: skip
    """One chunk: its outputs and the state after it. ``q`` comes scaled."""
    G = g.cumsum(-2)
    decay = decay_between(G)
    L = (beta.unsqueeze(-1) * overlaps(k, k, decay)).tril(-1)
    P = overlaps(q, k, decay)
    W, U = corrected(k, v, G, beta, L)
    X = U - W @ S
    G_C = G[..., -1:, :]  # over the whole chunk
    return (G.exp() * q) @ S + P @ X, G_C.mT.exp() * S + ((G_C - G).exp() * k).mT @ X


def kda_chunkwise(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    S: Float[Tensor, "B H K V"],
    *,
    chunk_size: int = 16,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """:func:`kda_chunk` over time: same result as ``kda_recurrent``. The last chunk may be shorter; ``q`` comes scaled, g finite.

    All inputs are float32, or all float64 (torch solves no triangular system in less). Memory grows with C^2 K, and float32 loses a small
    step behind huge ones in the running sum: this is for reading, and for judging in float64. ``kda_chunked`` is the fast one.
    """
    chunks = zip(*(x.transpose(1, 2).split(chunk_size, 2) for x in (q, k, v, g, beta)), strict=True)  # [B, H, C, ..]
    outputs = []
    with own_precision(S):
        for chunk in chunks:
            o, S = kda_chunk(*chunk, S)
            outputs.append(o)
    return torch.cat(outputs, 2).transpose(1, 2), S
