"""Steps of notebook 6, both mixers as layers: p holds a layer's weights by their released names (K3 report 2.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from minimodel.checks import parts, recall
from minimodel.checks.grading import Step
from minimodel.checks.whiteboard import recurrent
from minimodel.config import K3Config, LinearAttnConfig
from minimodel.kda import KimiDeltaAttention
from minimodel.layers import l2norm, rms_norm
from minimodel.mla import LATENT_EPS, GatedMLA

SMALL = K3Config.meeting().replace(
    hidden_size=12, q_lora_rank=6, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=3, v_head_dim=4,
    linear_attn_config=LinearAttnConfig(num_heads=2, head_dim=4),
)  # fmt: skip


def _layer(kind: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):  # building draws weights, which are then replaced
        return kind(SMALL)


def _layer_inputs(kind: type[nn.Module]) -> Callable:
    def inputs(draw):
        p = {name: 0.5 * draw.normal(*weight.shape) for name, weight in _layer(kind).named_parameters()}
        return {"x": draw.normal(2, draw.pick(5, 1, 6), SMALL.hidden_size), "p": p, "config": SMALL}

    return inputs


kda_layer = Step("kda_layer", lambda x, p, config: functional_call(_layer(KimiDeltaAttention), p, (x,)), _layer_inputs(KimiDeltaAttention),
                 ("y [B T D]",))  # fmt: skip


def _kda(x, p, config, *, activation=F.silu, value=lambda v: v, taps="qkv", gated=True):
    """The layer from the parts of notebook 1, with what people get wrong left open."""
    H = config.linear_attn_config.num_heads

    def projected(letter, tap):
        y = parts.short_conv.reference(x @ p[f"{letter}_proj.weight"].T, p[f"{tap}_conv1d.weight"][:, 0])
        return activation(y).unflatten(-1, (H, -1))

    q, k, v = (projected(*letters) for letters in zip("qkv", taps, strict=True))
    f = (x @ p["f_a_proj.weight"].T @ p["f_b_proj.weight"].T).unflatten(-1, (H, -1))
    g = parts.log_decay.reference(f, p["A_log"], p["dt_bias"].view(H, -1))
    o, _ = recurrent(l2norm(q), l2norm(k), value(v), g, torch.sigmoid(x @ p["b_proj.weight"].T))
    o = rms_norm(o, p["o_norm.weight"])
    if gated:
        o = o * torch.sigmoid(x @ p["g_proj.weight"].T).unflatten(-1, (H, -1))
    return o.flatten(2) @ p["o_proj.weight"].T


@kda_layer.slip("the values are normed too. Only queries and keys are")
def values_normed(x, p, config):
    return _kda(x, p, config, value=l2norm)


@kda_layer.slip("there is no SiLU after the convolution")
def without_silu(x, p, config):
    return _kda(x, p, config, activation=lambda y: y)


@kda_layer.slip("one convolution was used for all three. Query, key and value have taps of their own")
def one_convolution_for_all(x, p, config):
    return _kda(x, p, config, taps="qqq")


@kda_layer.slip("the output gate is missing: sigmoid(g_proj x) times the normed output")
def kda_without_gate(x, p, config):
    return _kda(x, p, config, gated=False)


@kda_layer.slip("query and key have changed places")
def query_and_key_swapped(x, p, config):
    names = {"q_proj.weight": "k_proj.weight", "q_conv1d.weight": "k_conv1d.weight"}
    names |= {b: a for a, b in names.items()}
    return _kda(x, {name: p[names.get(name, name)] for name in p}, config)


@kda_layer.slip("dt_bias is missing in the decay")
def decay_without_bias(x, p, config):
    return _kda(x, {**p, "dt_bias": 0 * p["dt_bias"]}, config)


mla_layer = Step("mla_layer", lambda x, p, config: functional_call(_layer(GatedMLA), p, (x,)), _layer_inputs(GatedMLA), ("y [B T D]",))


def _mla(x, p, config, *, query_norm=True, gated=True):
    """The layer from the parts of notebook 3."""
    H, nope = config.num_attention_heads, config.qk_nope_head_dim
    a = x @ p["q_a_proj.weight"].T
    a = rms_norm(a, p["q_a_layernorm.weight"], LATENT_EPS) if query_norm else a
    q = (a @ p["q_b_proj.weight"].T).unflatten(-1, (H, -1)).transpose(1, 2)
    rows = recall.reference_latent(x, p["kv_a_proj_with_mqa.weight"], p["kv_a_layernorm.weight"])
    k, v = recall.reference_expand(rows, p["kv_b_proj.weight"], H, nope)
    o = recall.causal_attention.reference(q, k, v).transpose(1, 2).flatten(2)
    return ((torch.sigmoid(x @ p["g_proj.weight"].T) * o) if gated else o) @ p["o_proj.weight"].T


@mla_layer.slip("the query's latent is not normed: q_b_proj reads RMSNorm(q_a_proj x), with eps 1e-6")
def query_not_normed(x, p, config):
    return _mla(x, p, config, query_norm=False)


@mla_layer.slip("the output gate is missing: sigmoid(g_proj x) times the output")
def mla_without_gate(x, p, config):
    return _mla(x, p, config, gated=False)


@mla_layer.slip("the extra key has no part in it (zero). It is not rotated in K3, but it is used")
def extra_part_unused(x, p, config):
    L = config.kv_lora_rank
    weight = p["kv_a_proj_with_mqa.weight"].clone()
    weight[L:] = 0
    return _mla(x, {**p, "kv_a_proj_with_mqa.weight": weight}, config)


@mla_layer.slip("the gain of the key-value latent's norm is missing")
def latent_gain_missing(x, p, config):
    return _mla(x, {**p, "kv_a_layernorm.weight": torch.ones_like(p["kv_a_layernorm.weight"])}, config)


# ---- what is true of both ----
@kda_layer.law("every array of p has a part in it: with another one the result is another")
@mla_layer.law("every array of p has a part in it: with another one the result is another")
def every_array_counts(mine, x, p, config):
    x = torch.cat([x, -x, x.flip(-1)], 1)  # one token has nothing to decay and nothing to choose from
    y = mine(x, p, config)
    return not any(torch.equal(y, mine(x, {**p, name: 0.5 - array}, config)) for name, array in p.items())
