"""Steps of notebook 3, the bill: bytes that one session keeps between two tokens."""

from __future__ import annotations

import torch

from minimodel.accounting import cache_bytes, with_mixer
from minimodel.checks.grading import Step
from minimodel.config import K3Config

DTYPES = {2: torch.bfloat16, 4: torch.float32}


def _inputs(draw):
    model = draw.pick(K3Config.k3, K3Config.kimi_linear_48b, K3Config.meeting, K3Config.mini, K3Config.k3)
    return {"config": model(), "tokens": draw.pick(1, 100, 4096, 1_000_000, 1), "number_bytes": draw.pick(2, 2, 4, 2, 4)}


def _mla_layers(config):
    return config.num_hidden_layers - len(config.linear_attn_config.kda_layers)


def reference_mha(config, tokens, number_bytes):
    return cache_bytes(with_mixer(config, "mha"), tokens, dtype=DTYPES[number_bytes]).total


mha_bytes = Step("mha_bytes", reference_mha, _inputs, ("bytes",))


@mha_bytes.slip("a token leaves a key *and* a value: there is a factor of 2")
def keys_only(config, tokens, number_bytes):
    return reference_mha(config, tokens, number_bytes) // 2


@mha_bytes.slip("every layer keeps its own keys and values: multiply by the number of layers")
def one_layer(config, tokens, number_bytes):
    return reference_mha(config, tokens, number_bytes) // config.num_hidden_layers


@mha_bytes.slip("every head keeps its own keys and values: multiply by the number of heads")
def one_head(config, tokens, number_bytes):
    return reference_mha(config, tokens, number_bytes) // config.num_attention_heads


@mha_bytes.slip("this is what one token leaves. Every token read so far has left as much")
def one_token(config, tokens, number_bytes):
    return reference_mha(config, 1, number_bytes)


@mha_bytes.slip("these are numbers. A number has `number_bytes` bytes")
def numbers_instead(config, tokens, number_bytes):
    return reference_mha(config, tokens, number_bytes) // number_bytes


@mha_bytes.law("twice the tokens, twice the bytes")
def grows_with_tokens(mine, config, tokens, number_bytes):
    return mine(config, 2 * tokens, number_bytes) == 2 * mine(config, tokens, number_bytes) > 0


def reference_mla(config, tokens, number_bytes):
    return cache_bytes(config, tokens, dtype=DTYPES[number_bytes]).per_token * tokens


mla_bytes = Step("mla_bytes", reference_mla, _inputs, ("bytes",))


@mla_bytes.slip("the cache was counted per head. All heads read one shared latent: there is no factor for heads")
def counted_per_head(config, tokens, number_bytes):
    return reference_mla(config, tokens, number_bytes) * config.num_attention_heads


@mla_bytes.slip("the extra key is missing. A row has kv_lora_rank + qk_rope_head_dim numbers")
def without_the_extra_key(config, tokens, number_bytes):
    return _mla_layers(config) * config.kv_lora_rank * number_bytes * tokens


@mla_bytes.slip("all layers were counted. Only the MLA layers keep rows; KDA layers have a state instead")
def all_layers(config, tokens, number_bytes):
    return reference_mla(config, tokens, number_bytes) // _mla_layers(config) * config.num_hidden_layers


@mla_bytes.slip("it was doubled for keys and values. Both are made from the same latent")
def keys_and_values(config, tokens, number_bytes):
    return 2 * reference_mla(config, tokens, number_bytes)


@mla_bytes.law("twice the heads, the same bytes: they share the rows")
def heads_cost_nothing(mine, config, tokens, number_bytes):
    doubled = config.replace(num_attention_heads=2 * config.num_attention_heads)
    return mine(doubled, tokens, number_bytes) == mine(config, tokens, number_bytes)


def _fixed_inputs(draw):
    inputs = _inputs(draw)
    return {"config": inputs["config"], "number_bytes": inputs["number_bytes"]}


def reference_kda(config, number_bytes):
    return cache_bytes(config, 1, dtype=DTYPES[number_bytes]).fixed


kda_bytes = Step("kda_bytes", reference_kda, _fixed_inputs, ("bytes",))


def _fixed(config, number_bytes, *, state_bytes=4, taps=-1, inputs=3):
    lin = config.linear_attn_config
    state = lin.num_heads * lin.head_dim**2 * state_bytes
    tail = inputs * lin.num_heads * lin.head_dim * (lin.short_conv_kernel_size + taps) * number_bytes
    return len(lin.kda_layers) * (state + tail)


@kda_bytes.slip("the tail of the convolution has W - 1 tokens: the newest of the W comes with the next step")
def whole_window(config, number_bytes):
    return _fixed(config, number_bytes, taps=0)


@kda_bytes.slip("the tail of the convolution is missing: W - 1 earlier projections, for query, key and value")
def state_only(config, number_bytes):
    return _fixed(config, number_bytes, inputs=0)


@kda_bytes.slip("one convolution was counted. There are three: for query, key and value")
def one_convolution(config, number_bytes):
    return _fixed(config, number_bytes, inputs=1)


@kda_bytes.slip("the state has 4 bytes a number, whatever the rest has: it is kept in float32")
def small_state(config, number_bytes):
    return _fixed(config, number_bytes, state_bytes=number_bytes)


@kda_bytes.slip("all layers were counted. Only the KDA layers have a state")
def state_in_all_layers(config, number_bytes):
    return reference_kda(config, number_bytes) // len(config.linear_attn_config.kda_layers) * config.num_hidden_layers


@kda_bytes.law("numbers of half the bytes spare less than half: the boards stay in float32")
def boards_stay_in_float32(mine, config, number_bytes):
    return mine(config, 2) < mine(config, 4) < 2 * mine(config, 2)


STEPS = (mha_bytes, mla_bytes, kda_bytes)
