"""Steps of notebook 3, exact recall: Gated MLA with its absorbed decode (K3 report 2.1.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minimodel.checks.grading import Step
from minimodel.layers import rms_norm
from minimodel.mla import LATENT_EPS


# ---- the row that is cached ----
def reference_latent(x, weight, gain):
    c, e = (x @ weight.T).tensor_split([len(gain)], -1)
    return torch.cat([rms_norm(c, gain, LATENT_EPS), e], -1)


def _latent_inputs(draw):
    D, L, R = draw.pick((5, 4, 2), (6, 3, 3))
    return {"x": draw.pick(1, 1e-3) * draw.normal(2, 3, D), "weight": draw.normal(L + R, D), "gain": draw.normal(L)}


mla_latent = Step("mla_latent", reference_latent, _latent_inputs, ("rows [B T L+R]",))


@mla_latent.slip("the extra key is normed too. The norm is for the latent c alone; e stays as it is")
def norms_everything(x, weight, gain):
    rows = x @ weight.T
    return rms_norm(rows, torch.cat([gain, torch.ones(len(weight) - len(gain), dtype=gain.dtype)]), LATENT_EPS)


@mla_latent.slip("the norm is missing. What is cached is RMSNorm(c)")
def latent_without_norm(x, weight, gain):
    return x @ weight.T


@mla_latent.slip("eps is 1e-5. The two latent norms of K3 use 1e-6")
def larger_eps(x, weight, gain):
    c, e = (x @ weight.T).tensor_split([len(gain)], -1)
    return torch.cat([rms_norm(c, gain, 1e-5), e], -1)


@mla_latent.slip("the rows of the weight are the latent first, then the extra key")
def extra_first(x, weight, gain):
    e, c = (x @ weight.T).tensor_split([len(weight) - len(gain)], -1)
    return torch.cat([rms_norm(c, gain, LATENT_EPS), e], -1)


@mla_latent.law("the extra key comes through as it is: twice x, twice e")
def extra_key_is_linear(mine, x, weight, gain):
    L = len(gain)
    return torch.allclose(mine(2 * x, weight, gain)[..., L:], 2 * mine(x, weight, gain)[..., L:], atol=1e-5)


# ---- keys and values from it ----
def reference_expand(rows, weight, heads, nope):
    L = weight.shape[-1]
    c, e = rows[..., :L], rows[..., L:]
    k, v = (c @ weight.T).unflatten(-1, (heads, -1)).transpose(1, 2).tensor_split([nope], -1)
    return torch.cat([k, e[:, None].expand(-1, heads, -1, -1)], -1), v


def _mla_sizes(draw):
    # as many value as key channels in one case: mixing the two up then raises no error
    return draw.pick((2, 3, 2, 4, 5), (3, 4, 2, 4, 4))  # heads, nope, extra, values, latent


def _expand_inputs(draw):
    H, N, R, V, L = _mla_sizes(draw)
    return {"rows": draw.normal(2, 3, L + R), "weight": draw.normal(H * (N + V), L), "heads": H, "nope": N}


mla_expand = Step("mla_expand", reference_expand, _expand_inputs, ("k [B H T N+R]", "v [B H T V]"))


@mla_expand.slip("the weight was cut into all keys, then all values. Its rows are grouped by head: head 0's key and value, head 1's ...")
def parts_before_heads(rows, weight, heads, nope):
    L = weight.shape[-1]
    up = rows[..., :L] @ weight.T
    k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in up.tensor_split([heads * nope], -1))
    return torch.cat([k, rows[:, None, :, L:].expand(-1, heads, -1, -1)], -1), v


@mla_expand.slip("inside a head the key comes first, then the value")
def value_first(rows, weight, heads, nope):
    L = weight.shape[-1]
    up = (rows[..., :L] @ weight.T).unflatten(-1, (heads, -1)).transpose(1, 2)
    v, k = up.tensor_split([up.shape[-1] - nope], -1)
    return torch.cat([k, rows[:, None, :, L:].expand(-1, heads, -1, -1)], -1), v


@mla_expand.slip("the extra key is missing. All heads share it: it is appended to each head's own key")
def forgets_the_extra_key(rows, weight, heads, nope):
    k, v = reference_expand(rows, weight, heads, nope)
    return k[..., :nope], v


@mla_expand.slip("the extra key stands in front. The order is [key of the head | extra key]")
def extra_key_in_front(rows, weight, heads, nope):
    k, v = reference_expand(rows, weight, heads, nope)
    return torch.cat([k[..., nope:], k[..., :nope]], -1), v


@mla_expand.law("the last channels of the key are the same in every head")
def heads_share_the_extra_key(mine, rows, weight, heads, nope):
    extra = mine(rows, weight, heads, nope)[0][..., nope:]
    return extra.shape[-1] == rows.shape[-1] - weight.shape[-1] and bool((extra == extra[:, :1]).all())


# ---- attention ----
def _attention_inputs(draw):
    T, N, V = draw.pick((4, 3, 2), (5, 4, 4), (1, 3, 2))
    return {"q": draw.normal(2, 2, T, N), "k": draw.normal(2, 2, T, N), "v": draw.normal(2, 2, T, V)}


causal_attention = Step("causal_attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), _attention_inputs,
                        ("o [B H T V]",))  # fmt: skip


def _attend(scores, v, diagonal=1):
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(diagonal)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


@causal_attention.slip("the scale is missing: scores are divided by the root of the width of a query")
def attention_without_scale(q, k, v):
    return _attend(q @ k.mT, v)


@causal_attention.slip("the scores are divided by the width. It is the root of the width")
def attention_scale_without_root(q, k, v):
    return _attend(q @ k.mT / q.shape[-1], v)


@causal_attention.slip("the mask is missing, so that a token reads those after it")
def reads_ahead(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


@causal_attention.slip("a token does not read itself, and the first one has nothing to read (NaN). Mask above the diagonal: triu(1)")
def not_itself(q, k, v):
    return _attend(q @ k.mT * q.shape[-1] ** -0.5, v, 0)


@causal_attention.slip("the mask came after the softmax, so that the weights of a row no longer sum to one")
def masked_too_late(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1).tril() @ v


@causal_attention.slip("hidden scores were set to 0, which is a score like any other. Set them to -inf")
def masked_with_zero(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).tril().softmax(-1) @ v


@causal_attention.law("weights sum to one: where all values are alike, the output is that value")
def weights_sum_to_one(mine, q, k, v):
    return torch.allclose(mine(q, k, torch.ones_like(v)), torch.ones_like(v), atol=1e-5)


@causal_attention.law("a token does not see the tokens after it")
def attention_is_causal(mine, q, k, v):
    changed = torch.cat([v[..., :-1, :], v[..., -1:, :] + 1], -2)
    return torch.allclose(mine(q, k, v)[..., :-1, :], mine(q, k, changed)[..., :-1, :])


# ---- the output gate ----
def reference_gate(o, x, norm_gain, weight):
    return torch.sigmoid((rms_norm(x, norm_gain) @ weight.T).unflatten(-1, o.shape[-2:])) * o


def _gate_inputs(draw):
    H, V, D = draw.pick((2, 3, 4), (3, 2, 5))
    return {"o": draw.normal(2, 3, H, V), "x": 3 * draw.normal(2, 3, D), "norm_gain": draw.normal(D), "weight": draw.normal(H * V, D)}


output_gate = Step("output_gate", reference_gate, _gate_inputs, ("y [B T H V]",))


@output_gate.slip("the gate reads the layer's raw input. It reads the normed one, as queries and keys do")
def gate_from_raw_input(o, x, norm_gain, weight):
    return torch.sigmoid((x @ weight.T).unflatten(-1, o.shape[-2:])) * o


@output_gate.slip("the gate is a softmax, which makes channels compete. It is a sigmoid")
def gate_is_a_softmax(o, x, norm_gain, weight):
    return (rms_norm(x, norm_gain) @ weight.T).unflatten(-1, o.shape[-2:]).softmax(-1) * o


@output_gate.slip("the gate is a SiLU. It is a sigmoid")
def gate_is_a_silu(o, x, norm_gain, weight):
    return F.silu((rms_norm(x, norm_gain) @ weight.T).unflatten(-1, o.shape[-2:])) * o


@output_gate.slip("the norm of the input lacks its gain")
def gate_norm_without_gain(o, x, norm_gain, weight):
    return reference_gate(o, x, torch.ones_like(norm_gain), weight)


@output_gate.slip("the output was normed as well. KDA does that; MLA's output goes to its gate as it is")
def norms_the_output(o, x, norm_gain, weight):
    return reference_gate(rms_norm(o), x, norm_gain, weight)


@output_gate.law("a gate never makes an output larger")
def gate_shrinks(mine, o, x, norm_gain, weight):
    return bool((mine(o, x, norm_gain, weight).abs() <= o.abs()).all())


# ---- one new token, without expanding the cache ----
def reference_decode(q, rows, weight, nope):
    k, v = reference_expand(rows, weight, q.shape[1], nope)
    return F.scaled_dot_product_attention(q[:, :, None], k, v).squeeze(2)


def _decode_inputs(draw):
    H, N, R, V, L = _mla_sizes(draw)
    rows = draw.normal(2, draw.pick(6, 1, 3), L + R)
    return {"q": draw.normal(2, H, N + R), "rows": rows, "weight": draw.normal(H * (N + V), L), "nope": N}


absorbed_decode = Step("absorbed_decode", reference_decode, _decode_inputs, ("o [B H V]",))


def _absorbed(q, rows, weight, nope, *, width=None, extra=True, value_rows=True):
    H, L = q.shape[1], weight.shape[-1]
    up_k, up_v = weight.unflatten(0, (H, -1)).tensor_split([nope], 1)
    scores = torch.einsum("bhn,hnl,btl->bht", q[..., :nope], up_k, rows[..., :L])
    scores = scores + extra * torch.einsum("bhr,btr->bht", q[..., nope:], rows[..., L:])
    p = (scores * (width or q.shape[-1]) ** -0.5).softmax(-1)
    read = torch.einsum("bht,btl->bhl", p, rows[..., :L])
    return torch.einsum("bhl,hvl->bhv", read, up_v if value_rows else up_k)


@absorbed_decode.slip("the scale comes from the latent's width. Moving into it changes no score: it stays 1 / sqrt(nope + extra)")
def scaled_by_the_latent(q, rows, weight, nope):
    return _absorbed(q, rows, weight, nope, width=rows.shape[-1])


@absorbed_decode.slip("the scale counts the nope part alone. A query has nope + extra channels")
def scaled_by_nope(q, rows, weight, nope):
    return _absorbed(q, rows, weight, nope, width=nope)


@absorbed_decode.slip("the extra part of query and key is missing in the scores")
def scores_without_extra(q, rows, weight, nope):
    return _absorbed(q, rows, weight, nope, extra=False)


@absorbed_decode.slip("the way out used the rows of the keys. Of each head's rows, the first `nope` make keys and the rest make values")
def out_by_the_key_rows(q, rows, weight, nope):
    return _absorbed(q, rows, weight, nope, value_rows=False)


@absorbed_decode.slip("this is the mixed latent. Each head still turns it into its value with its own rows of the weight")
def stays_in_the_latent(q, rows, weight, nope):
    H, L = q.shape[1], weight.shape[-1]
    k, _ = reference_expand(rows, weight, H, nope)
    p = (torch.einsum("bhn,bhtn->bht", q, k) * q.shape[-1] ** -0.5).softmax(-1)
    return p @ rows[..., :L]


@absorbed_decode.law("a cache of one row gives that row's value, whatever the query")
def one_row_is_read(mine, q, rows, weight, nope):
    _, v = reference_expand(rows[:, :1], weight, q.shape[1], nope)
    return torch.allclose(mine(q, rows[:, :1], weight, nope), v[:, :, 0], atol=1e-4)


STEPS = (mla_latent, mla_expand, causal_attention, output_gate, absorbed_decode)
