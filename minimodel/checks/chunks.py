"""Steps of notebook 2, KDA in chunks: inside a chunk everything is a matrix product (Kimi Linear report Eq. 6-9, K3 report Eq. 3-4).

A chunk is [B H C ...]: heads come before time, so that a head's matrices are the last two axes.
"""

from __future__ import annotations

import torch

from minimodel.checks.grading import Step
from minimodel.checks.whiteboard import recurrent, walk_inputs
from minimodel.delta_rule import chunkwise


# ---- the right answers; a test joins them and compares with the token loop ----
def reference_decay(g, chunk):
    return torch.cat([part.cumsum(1) for part in g.split(chunk, 1)], 1)


def meet(rows, k, G):
    return chunkwise.overlaps(rows, k, chunkwise.decay_between(G))


def reference_overlaps(k, G, beta):
    return (beta[..., None] * meet(k, k, G)).tril(-1)


reference_corrected = chunkwise.corrected


def reference_output(q, k, G, S, W, U):
    return (G.exp() * q) @ S + meet(q, k, G) @ (U - W @ S)


def reference_state(k, G, S, W, U):
    left = (G[..., -1:, :] - G).exp() * k  # what is left of each key's row at the chunk's end
    return G[..., -1, :, None].exp() * S + left.mT @ (U - W @ S)


def _eye(L):
    return torch.eye(L.shape[-1], dtype=L.dtype)


# ---- running decay ----
running_decay = Step(
    "running_decay", reference_decay,
    lambda draw: {"g": draw.uniform(-2.0, -0.1, 2, draw.pick(8, 10, 4), 2, 3), "chunk": 4}, ("G [B T H K]",),
)  # fmt: skip


@running_decay.slip("the sum never starts again. Each chunk has its own: what came before is in the state")
def never_restarts(g, chunk):
    return g.cumsum(1)


@running_decay.slip("the token's own decay is missing. It fades the state before it writes, so its g belongs to its sum")
def exclusive(g, chunk):
    return reference_decay(g, chunk) - g


@running_decay.slip("this is exp(G), the share that is left. Asked for is the sum G itself")
def already_exponentiated(g, chunk):
    return reference_decay(g, chunk).exp()


@running_decay.slip("log-decays were multiplied. Shares multiply, so their logarithms add")
def multiplied(g, chunk):
    return torch.cat([part.cumprod(1) for part in g.split(chunk, 1)], 1)


@running_decay.law("the first token of a chunk has its own g alone")
def chunk_begins_with_its_own(mine, g, chunk):
    return torch.allclose(mine(g, chunk)[:, ::chunk], g[:, ::chunk])


# ---- overlaps ----
def _chunk(draw):
    """One chunk; in the last case every g is close to K3's bound and the chunk has 16 tokens: float32 must hold it."""
    C, K, V = draw.pick((5, 3, 4), (4, 3, 3), (6, 4, 2), (3, 3, 3), (16, 4, 3))
    low = draw.pick(-2.0, -1.0, -0.5, -2.0, -5.0)
    G = draw.uniform(low, 0.99 * low if low == -5.0 else -0.05, 2, 2, C, K).cumsum(-2)
    k, beta = draw.unit(2, 2, C, K), draw.uniform(0.2, 0.9, 2, 2, C)
    L = reference_overlaps(k, G, beta)
    v, S = draw.normal(2, 2, C, V), draw.normal(2, 2, K, V)
    W, U = reference_corrected(k, v, G, beta, L)
    return {"q": draw.normal(2, 2, C, K), "k": k, "v": v, "G": G, "beta": beta, "L": L, "S": S, "W": W, "U": U}


def _take(*names):
    """The inputs of a step: these parts of a chunk."""

    def inputs(draw):
        chunk = _chunk(draw)
        return {name: chunk[name] for name in names}

    return inputs


overlaps = Step("overlaps", reference_overlaps, _take("k", "G", "beta"), ("L [B H C C]",))


@overlaps.slip("the diagonal is in it (tril). A token corrects for *earlier* tokens only: strict tril, tril(-1)")
def keeps_the_diagonal(k, G, beta):
    return (beta[..., None] * meet(k, k, G)).tril()


@overlaps.slip("it is the upper half: rows are the tokens that read, columns the earlier ones that they read")
def upper_half(k, G, beta):
    return reference_overlaps(k, G, beta).mT


@overlaps.slip("beta is along the columns. It belongs to the token that writes now, the row")
def beta_of_the_earlier(k, G, beta):
    return (beta[..., None, :] * meet(k, k, G)).tril(-1)


@overlaps.slip("the decay between the two tokens is missing: exp(G_i - G_j), one factor a channel")
def no_decay_between(k, G, beta):
    return (beta[..., None] * (k @ k.mT)).tril(-1)


@overlaps.slip("beta is missing: how much of an overlap is erased depends on the token that writes")
def no_beta(k, G, beta):
    return reference_overlaps(k, G, torch.ones_like(beta))


@overlaps.slip("the decay is upside down, exp(G_j - G_i), which grows. With j before i it is exp(G_i - G_j)")
def decay_upside_down(k, G, beta):
    return (beta[..., None] * ((k * (-G).exp()) @ (k * G.exp()).mT)).tril(-1)


@overlaps.law("the first token has nobody before it: row 0 is zero")
def first_row_is_zero(mine, k, G, beta):
    return not mine(k, G, beta)[..., 0, :].any()


# ---- the corrected keys and values ----
corrected = Step("corrected", reference_corrected, _take("k", "v", "G", "beta", "L"), ("W [B H C K]", "U [B H C V]"))


def _from(M, k, v, G):
    return M @ (G.exp() * k), M @ v


@corrected.slip("the sign is wrong: (I + L)^-1, not (I - L)^-1. Earlier writes are taken away")
def wrong_sign(k, v, G, beta, L):
    return reference_corrected(k, v, G, beta, -L)


@corrected.slip("only the first correction is there, I - L. A correction changes those after it: that takes the whole inverse")
def first_order(k, v, G, beta, L):
    return _from((_eye(L) - L) @ torch.diag_embed(beta), k, v, G)


@corrected.slip("beta is on the wrong side of the inverse: M = (I + L)^-1 diag(beta)")
def beta_outside(k, v, G, beta, L):
    return _from(torch.diag_embed(beta) @ torch.linalg.inv(_eye(L) + L), k, v, G)


@corrected.slip("beta is missing: M = (I + L)^-1 diag(beta)")
def no_beta_in_m(k, v, G, beta, L):
    return _from(torch.linalg.inv(_eye(L) + L), k, v, G)


@corrected.slip("W needs the faded keys, exp(G) * k: they read the state from *before* the chunk")
def plain_keys(k, v, G, beta, L):
    return reference_corrected(k, v, torch.zeros_like(G), beta, L)


@corrected.slip("the values were faded as well. Only keys read the old state; W = M (exp(G) * k), U = M v")
def faded_values(k, v, G, beta, L):
    return reference_corrected(k, v, G, beta, L)[0], reference_corrected(k, G[..., :1].exp() * v, G, beta, L)[1]


@corrected.law("without overlaps (L = 0) nothing is corrected: W is beta exp(G) k, U is beta v")
def nothing_to_correct(mine, k, v, G, beta, L):
    W, U = mine(k, v, G, beta, 0 * L)
    return torch.allclose(W, beta[..., None] * G.exp() * k, atol=1e-5) and torch.allclose(U, beta[..., None] * v, atol=1e-5)


# ---- what the chunk gives out, and what it leaves behind ----
chunk_output = Step("chunk_output", reference_output, _take("q", "k", "G", "S", "W", "U"), ("O [B H C V]",))


@chunk_output.slip("strict tril: a token reads its own write too, so here the diagonal stays (tril)")
def does_not_read_itself(q, k, G, S, W, U):
    return (G.exp() * q) @ S + meet(q, k, G).tril(-1) @ (U - W @ S)


@chunk_output.slip("the mask is missing, so a token reads those after it")
def sees_the_future(q, k, G, S, W, U):
    return (G.exp() * q) @ S + ((q * G.exp()) @ (k * (-G).exp()).mT) @ (U - W @ S)


@chunk_output.slip("U stands where U - W S belongs: what the old state already says is not taken off")
def output_without_correction(q, k, G, S, W, U):
    return (G.exp() * q) @ S + meet(q, k, G) @ U


@chunk_output.slip("the old state is read with the plain query. By then it has faded: exp(G) * q")
def plain_query(q, k, G, S, W, U):
    return q @ S + meet(q, k, G) @ (U - W @ S)


@chunk_output.slip("what the chunk read from the state before it, (exp(G) * q) S, is missing")
def only_the_chunk(q, k, G, S, W, U):
    return meet(q, k, G) @ (U - W @ S)


@chunk_output.slip("the scores have no decay between writing and reading, exp(G_i - G_j)")
def scores_without_decay(q, k, G, S, W, U):
    return (G.exp() * q) @ S + (q @ k.mT).tril() @ (U - W @ S)


@chunk_output.law("a token does not read what later tokens write")
def output_is_causal(mine, q, k, G, S, W, U):
    changed = torch.cat([U[..., :-1, :], U[..., -1:, :] + 1], -2)
    return torch.allclose(mine(q, k, G, S, W, U)[..., :-1, :], mine(q, k, G, S, W, changed)[..., :-1, :])


chunk_state = Step("chunk_state", reference_state, _take("k", "G", "S", "W", "U"), ("S [B H K V]",))


def _left(k, G):
    return (G[..., -1:, :] - G).exp() * k


def _faded(G, S):
    return G[..., -1, :, None].exp() * S


@chunk_state.slip("U stands where U - W S belongs. A listing in the Kimi Linear report has a slip of this kind (8b)")
def state_without_correction(k, G, S, W, U):
    return _faded(G, S) + _left(k, G).mT @ U


@chunk_state.slip("the old state did not fade. At the chunk's end exp(G) of its last token is left of it")
def old_state_stays(k, G, S, W, U):
    return S + _left(k, G).mT @ (U - W @ S)


@chunk_state.slip("keys carry exp(G), the decay since the chunk's start. A write fades from its own token to the end: exp(G_last - G)")
def decay_since_the_start(k, G, S, W, U):
    return _faded(G, S) + (G.exp() * k).mT @ (U - W @ S)


@chunk_state.slip("writes do not fade inside the chunk. From its own token to the end a write keeps exp(G_last - G)")
def writes_do_not_fade(k, G, S, W, U):
    return _faded(G, S) + k.mT @ (U - W @ S)


@chunk_state.slip("only this chunk's writes are left. The old state, faded, belongs in it")
def old_state_lost(k, G, S, W, U):
    return _left(k, G).mT @ (U - W @ S)


@chunk_state.law("with nothing to add (U = W S) the board only fades")
def board_only_fades(mine, k, G, S, W, U):
    return torch.allclose(mine(k, G, S, W, W @ S), _faded(G, S), atol=1e-5)


# ---- all together ----
kda_chunked = Step(
    "kda_chunked", lambda q, k, v, g, beta, chunk: recurrent(q, k, v, g, beta),
    lambda draw: {**walk_inputs(draw, draw.pick(8, 10, 3)), "chunk": 4}, ("o [B T H V]", "S [B H K V]"),
)  # fmt: skip


@kda_chunked.slip("the state is not carried from chunk to chunk")
def chunks_start_over(q, k, v, g, beta, chunk):
    parts = [recurrent(*part) for part in zip(*(x.split(chunk, 1) for x in (q, k, v, g, beta)), strict=True)]
    return torch.cat([o for o, _ in parts], 1), parts[-1][1]


@kda_chunked.slip("the scale of the query, K ** -0.5, is missing")
def chunks_without_scale(q, k, v, g, beta, chunk):
    return recurrent(q * q.shape[-1] ** 0.5, k, v, g, beta)


@kda_chunked.slip("the last chunk is dropped when it is short. It is a chunk with fewer rows")
def drops_the_rest(q, k, v, g, beta, chunk):
    whole = max(q.shape[1] // chunk * chunk, 1)
    return recurrent(*(x[:, :whole] for x in (q, k, v, g, beta)))


@kda_chunked.slip("the decay is summed from the first token of all, not from the first of the chunk")
def decay_never_restarts(q, k, v, g, beta, chunk):
    """Each chunk fades the state it is given by everything before it, once more."""
    outputs, before = [], 0
    S = torch.zeros(len(q), q.shape[2], q.shape[3], v.shape[3], dtype=q.dtype)
    for Q, K, V, D, b in zip(*(x.split(chunk, 1) for x in (q * q.shape[-1] ** -0.5, k, v, g, beta)), strict=True):
        G = (D.cumsum(1) + before).transpose(1, 2)
        before = before + D.sum(1, keepdim=True)
        Q, K, V, b = (x.transpose(1, 2) for x in (Q, K, V, b))
        W, U = reference_corrected(K, V, G, b, reference_overlaps(K, G, b))
        outputs.append(reference_output(Q, K, G, S, W, U).transpose(1, 2))
        S = reference_state(K, G, S, W, U)
    return torch.cat(outputs, 1), S


@kda_chunked.law("the size of the chunks changes nothing")
def any_chunk_size(mine, q, k, v, g, beta, chunk):
    return torch.allclose(mine(q, k, v, g, beta, 4)[0], mine(q, k, v, g, beta, 2)[0], atol=1e-5)


STEPS = (running_decay, overlaps, corrected, chunk_output, chunk_state, kda_chunked)
