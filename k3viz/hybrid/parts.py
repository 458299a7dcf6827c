"""What a layer of K3 is made of, part by part: tensors as the model really holds them, and what each part costs.

Tensors are read off a model on the meta device, which holds no numbers. A part's arithmetic is two operations for each number that a
token multiplies with, as in ``minimodel.accounting.flops``; the two operators, which have no weights, get the rest of that closed form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch

from minimodel import K3Config, K3ForCausalLM, cache_bytes, facts
from minimodel.accounting import flops

EXPERTS = "experts"
# part: its label, and the modules of a layer that belong to it. The order is the way of a token through the layer.
MIXER_PARTS = {
    "kda": {
        "qkv": ("q, k, v, short conv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_conv1d",
                                        "self_attn.k_conv1d", "self_attn.v_conv1d")),
        "decay": ("decay α", ("self_attn.f_a_proj", "self_attn.f_b_proj", "self_attn.A_log", "self_attn.dt_bias")),
        "beta": ("write strength β", ("self_attn.b_proj",)),
        "state": ("state: erase, write", ()),
        "out": ("gate, output", ("self_attn.o_norm", "self_attn.g_proj", "self_attn.g_a_proj", "self_attn.g_b_proj",
                                       "self_attn.o_proj")),
    },
    "mla": {
        "query": ("query", ("self_attn.q_proj", "self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj")),
        "latent": ("latent, kept", ("self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm")),
        "expand": ("k, v from latents", ("self_attn.kv_b_proj",)),
        "attention": ("attention to the past", ()),
        "out": ("gate, output", ("self_attn.g_proj", "self_attn.o_proj")),
    },
}  # fmt: skip
READ = {"read": ("read depth", ("self_attention_res_proj", "self_attention_res_norm")), "norm": ("norm", ("input_layernorm",))}
READ_AGAIN = {"read_2": ("read depth", ("mlp_res_proj", "mlp_res_norm")), "norm_2": ("norm", ("post_attention_layernorm",))}
DENSE_PARTS = {"mlp": ("dense MLP", ("mlp",))}
MOE_PARTS = {
    "router": ("router", ("block_sparse_moe.gate",)),
    "down": ("down to the latent", ("block_sparse_moe.routed_expert_down_proj",)),
    EXPERTS: ("routed experts", ("block_sparse_moe.experts",)),
    "up": ("norm, up", ("block_sparse_moe.routed_expert_norm", "block_sparse_moe.routed_expert_up_proj")),
    "shared": ("shared experts", ("block_sparse_moe.shared_experts",)),
}
ENDS = {
    "embedding": {"embedding": ("embedding", ("model.embed_tokens",))},
    "output": {"read": ("read depth", ("model.output_attn_res_proj", "model.output_attn_res_norm")), "norm": ("norm", ("model.norm",)),
               "head": ("lm_head: logits", ("lm_head",))},
}  # fmt: skip
OPERATORS = {"kda": "state", "mla": "attention"}


@dataclass(frozen=True)
class Part:
    """One part of a layer. tensors: (name, shape) as the model holds them. active: the parameters that one token multiplies with.

    flops: forward operations of one token. memory: bytes that one session keeps here between two tokens. weight_bytes: of the
    weights as released.
    """

    name: str
    label: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    parameters: int
    active: int
    flops: float
    memory: int
    weight_bytes: float


@dataclass(frozen=True)
class Layer:
    """A step of a token's way: the embedding, a layer (mixer and feed-forward), or the output. number: 1-based, of layers only."""

    number: int | None
    label: str
    mixer: str
    parts: tuple[Part, ...]

    def part(self, name: str) -> Part:
        """The part of that name. ValueError if this step has none."""
        found = [p for p in self.parts if p.name == name]
        if not found:
            raise ValueError(f"part: {self.label} has no part {name!r}; its parts are {', '.join(p.name for p in self.parts)}")
        return found[0]

    def total(self, cost: str) -> float:
        """Sum over the parts of "parameters", "active", "flops", "memory" or "weight_bytes"."""
        return sum(getattr(p, cost) for p in self.parts)


@lru_cache(maxsize=64)
def layers_of(config: K3Config, tokens: int) -> tuple[Layer, ...]:
    """Embedding, every layer, output: with all costs at ``tokens`` tokens read, memory in bfloat16 (KDA states float32)."""
    kinds, steps = {}, [_end(config, "embedding")]
    for i in range(config.num_hidden_layers):
        kind = config.mixer(i), config.is_moe_layer(i)
        if kind not in kinds:
            kinds[kind] = _parts(config, *kind, tokens)
        mixer, moe = kind
        label = f"layer {i + 1}: {'KDA' if mixer == 'kda' else 'Gated MLA' if config.mla_use_output_gate else 'MLA'} and " + (
            "experts" if moe else "dense MLP"
        )
        steps.append(Layer(i + 1, label, mixer, kinds[kind]))
    return (*steps, _end(config, "output"))


def _parts(config: K3Config, mixer: str, moe: bool, tokens: int) -> tuple[Part, ...]:
    """The parts of one layer, from a model of one layer on the meta device."""
    one = _single(config, mixer, moe)
    held = {name.removeprefix("model.layers.0."): shape for name, shape in _tensors(one).items()}
    groups = READ | MIXER_PARTS[mixer] | READ_AGAIN | (MOE_PARTS if moe else DENSE_PARTS)
    operator = flops(one, tokens).by_component[f"{mixer}_operator"]
    kept = cache_bytes(one, tokens).total
    keeper = "state" if mixer == "kda" else "latent"
    return tuple(
        part
        for name, (label, modules) in groups.items()
        if (part := _part(config, name, label, modules, held, operator * (name == OPERATORS[mixer]), kept * (name == keeper)))
    )


def _end(config: K3Config, end: str) -> Layer:
    held = _tensors(_single(config, "kda", False))
    parts = tuple(p for name, (label, modules) in ENDS[end].items() if (p := _part(config, name, label, modules, held, 0.0, 0)))
    return Layer(None, end, "", parts)


def _part(config: K3Config, name: str, label: str, modules: tuple, held: dict, operator: float, memory: int) -> Part | None:
    """None if the config has no such part (K3's latent, depth reads, ... in an older model)."""
    tensors = tuple((n, shape) for n, shape in held.items() if any(n == m or n.startswith(m + ".") for m in modules))
    if name == "head" and config.tie_word_embeddings:
        tensors = ()  # the embedding's table, counted there; its product is counted here
        operator = 2.0 * config.vocab_size * config.hidden_size
    if not tensors and not operator:
        return None
    count = sum(prod(shape) for _, shape in tensors)
    active = count * config.num_experts_per_token // config.num_experts if name == EXPERTS else count
    bits = facts.K3.expert_bits.value if name == EXPERTS and config.hidden_act == "situ" else 16  # Kimi Linear is released in bfloat16
    arithmetic = 0.0 if name == "embedding" else 2.0 * active + operator  # an embedding is looked up
    return Part(name, label, tensors, count, active, arithmetic, memory, count * bits / 8)


def _single(config: K3Config, mixer: str, moe: bool) -> K3Config:
    slots = ((1,), ()) if mixer == "kda" else ((), (1,))
    linear = replace(config.linear_attn_config, kda_layers=slots[0], full_attn_layers=slots[1])
    return config.replace(num_hidden_layers=1, linear_attn_config=linear, first_k_dense_replace=0 if moe else 1, moe_layer_freq=1)


@lru_cache(maxsize=64)
def _tensors(config: K3Config) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = K3ForCausalLM(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
