"""Steps of notebook 1, the whiteboard: one KDA step, and KDA over time."""

from __future__ import annotations

import torch

from minimodel.checks.grading import Step
from minimodel.checks.parts import gated_norm, l2norm, log_decay, rms_norm, short_conv, write_strength
from minimodel.delta_rule import kda
from minimodel.delta_rule import kda_step as reference_step


def _step_inputs(draw):
    # heads, key and value channels are all 3 in one case: a beta that lies along the wrong axis then raises no error
    H, K, V = draw.pick((2, 4, 5), (3, 3, 3), (2, 5, 4))
    return {
        "S": draw.normal(H, K, V), "q": draw.normal(H, K), "k": draw.unit(H, K), "v": draw.normal(H, V),
        "g": draw.uniform(-2.0, -0.1, H, K), "beta": draw.uniform(0.2, 0.9, H),
    }  # fmt: skip


kda_step = Step("kda_step", reference_step, _step_inputs, ("o [H V]", "S [H K V]"))


def _recall(S, k):
    """S^T k of every head."""
    return (k[:, None] @ S).squeeze(1)


def _outer(k, v):
    return k[..., None] * v[..., None, :]


def _fade(S, g):
    return g.exp()[..., None] * S


@kda_step.slip("the error v - S^T k was taken before the state faded. Fade first, then compare")
def error_before_fade(S, q, k, v, g, beta):
    S = _fade(S, g) + _outer(k, beta[:, None] * (v - _recall(S, k)))
    return _recall(S, q), S


@kda_step.slip("the decay was applied after the erase. Fade first: what is erased is read from the faded state")
def decay_after_erase(S, q, k, v, g, beta):
    S = _fade(S - _outer(k, beta[:, None] * _recall(S, k)), g) + _outer(k, beta[:, None] * v)
    return _recall(S, q), S


@kda_step.slip("the decay came last, after the write: the new value has faded too")
def decay_after_write(S, q, k, v, g, beta):
    S = _fade(S + _outer(k, beta[:, None] * (v - _recall(S, k))), g)
    return _recall(S, q), S


@kda_step.slip("nothing is erased. Write beta (v - S^T k), not beta v: the old value under this key has to go")
def only_adds(S, q, k, v, g, beta):
    S = _fade(S, g) + _outer(k, beta[:, None] * v)
    return _recall(S, q), S


@kda_step.slip("beta was spread over the channels. It is one number a head: beta[:, None] times the error [H, V]")
def beta_per_channel(S, q, k, v, g, beta):
    S = _fade(S, g)
    S = S + _outer(k, beta * (v - _recall(S, k)))
    return _recall(S, q), S


@kda_step.slip("beta scales the write but not the erase. It is the strength of both: beta (v - S^T k)")
def erases_all(S, q, k, v, g, beta):
    S = _fade(S, g)
    S = S + _outer(k, beta[:, None] * v - _recall(S, k))
    return _recall(S, q), S


@kda_step.slip("g was used as if it were alpha. The share that is kept is exp(g)")
def not_exponentiated(S, q, k, v, g, beta):
    S = g[..., None] * S
    S = S + _outer(k, beta[:, None] * (v - _recall(S, k)))
    return _recall(S, q), S


@kda_step.slip("one decay a head. K3 has one a key channel, exp(g) times the rows of S")
def one_decay_a_head(S, q, k, v, g, beta):
    return reference_step(S, q, k, v, g.mean(-1, keepdim=True).expand_as(g), beta)


@kda_step.slip("the query read the state before this token was written. Read the new one")
def reads_the_old_state(S, q, k, v, g, beta):
    return _recall(S, q), reference_step(S, q, k, v, g, beta)[1]


@kda_step.law("without decay, a value written with beta = 1 is read back under its key")
def written_is_read(mine, S, q, k, v, g, beta):
    o, _ = mine(S, k.clone(), k, v, torch.zeros_like(g), torch.ones_like(beta))
    return torch.allclose(o, v, atol=1e-4)


@kda_step.law("with beta = 0 the state only fades")
def silent_token(mine, S, q, k, v, g, beta):
    return torch.allclose(mine(S, q, k, v, g, torch.zeros_like(beta))[1], _fade(S, g), atol=1e-5)


def walk_inputs(draw, T):
    H, K, V = draw.pick((2, 4, 5), (3, 3, 3), (2, 5, 4))
    return {
        "q": draw.unit(2, T, H, K), "k": draw.unit(2, T, H, K), "v": draw.normal(2, T, H, V),
        "g": draw.uniform(-2.0, -0.05, 2, T, H, K), "beta": draw.uniform(0.2, 0.9, 2, T, H),
    }  # fmt: skip


def recurrent(q, k, v, g, beta):
    return kda(q, k, v, g, beta, backend="recurrent")


kda_recurrent = Step("kda_recurrent", recurrent, lambda draw: walk_inputs(draw, draw.pick(6, 1, 4)), ("o [B T H V]", "S [B H K V]"))


@kda_recurrent.slip("the scale is missing: the query is multiplied by K ** -0.5")
def missing_scale(q, k, v, g, beta):
    return kda(q, k, v, g, beta, scale=1.0, backend="recurrent")


@kda_recurrent.slip("the scale is 1 / K. It is 1 / sqrt(K)")
def scale_without_root(q, k, v, g, beta):
    return kda(q, k, v, g, beta, scale=1 / q.shape[-1], backend="recurrent")


@kda_recurrent.slip("the keys were scaled too. Only the query is: a key keeps length 1, or the erase is too weak")
def scaled_keys(q, k, v, g, beta):
    return recurrent(q, k * k.shape[-1] ** -0.5, v, g, beta)


@kda_recurrent.slip("every token starts with an empty state. Carry it from one token to the next")
def starts_over(q, k, v, g, beta):
    steps = [recurrent(*(x[:, t : t + 1] for x in (q, k, v, g, beta))) for t in range(q.shape[1])]
    return torch.cat([o for o, _ in steps], 1), steps[-1][1]


@kda_recurrent.slip("every token's state is returned. That is what KDA spares: only the last one is kept")
def keeps_every_state(q, k, v, g, beta):
    states = [recurrent(*(x[:, : t + 1] for x in (q, k, v, g, beta)))[1] for t in range(q.shape[1])]
    return recurrent(q, k, v, g, beta)[0], torch.stack(states, 1)


@kda_recurrent.slip("time runs backward")
def backward_in_time(q, k, v, g, beta):
    o, S = recurrent(*(x.flip(1) for x in (q, k, v, g, beta)))
    return o.flip(1), S


@kda_recurrent.law("the state has K x V numbers a head, however many tokens were read")
def state_size(mine, q, k, v, g, beta):
    return mine(q, k, v, g, beta)[1].shape == (len(q), q.shape[2], q.shape[3], v.shape[3])


@kda_recurrent.law("a token does not see the tokens after it")
def kda_is_causal(mine, q, k, v, g, beta):
    o = mine(q, k, v, g, beta)[0]
    return torch.allclose(o[:, :-1], mine(q, k, torch.cat([v[:, :-1], v[:, -1:] + 1], 1), g, beta)[0][:, :-1])


STEPS = (l2norm, rms_norm, short_conv, log_decay, write_strength, kda_step, kda_recurrent, gated_norm)
