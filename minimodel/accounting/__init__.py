"""What a model costs, in closed form: parameters, cache bytes and floating-point operations. No tensor is made.

``parameter_budget`` counts what the module holds, ``cache_bytes`` what one session keeps between two tokens, ``flops`` what one
token costs. The published figures are in ``minimodel.facts``; ``python -m minimodel.accounting --model k3`` prints both side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minimodel import facts
from minimodel.config import K3Config

__all__ = [
    "CacheBytes", "Flops", "ParameterBudget", "cache_bytes", "expert_parameters", "flops", "mixer_parameters", "parameter_budget",
    "row_numbers", "weight_bytes", "with_mixer",
]  # fmt: skip

TABLES = ("embedding", "lm_head")  # one row a token is read (embedding), or all of it (lm_head): what counts as active differs
DELTA_RULE = ("kda", "delta_net", "gated_delta_net")  # mixers that erase before they write, so they have a write strength beta
SCALAR_DECAY = ("mamba2", "gated_delta_net")  # mixers with one decay a head
RECURRENT = ("linear_attention", *SCALAR_DECAY, "delta_net", "kda")  # mixers with KDA's block: state [K, V] a head and short convolutions


@dataclass(frozen=True)
class ParameterBudget:
    """Parameters by component; ``active_by_component`` keeps only the routed experts that one token visits."""

    by_component: dict[str, int]
    active_by_component: dict[str, int]
    tied: bool  # one table serves as embedding and lm_head (listed once, as the embedding)

    @property
    def total(self) -> int:
        return sum(self.by_component.values())

    @property
    def active(self) -> int:
        """What one token multiplies with: lm_head counts, the input embedding does not (a row is looked up). K3: 104.19B."""
        return self.active_with_embedding - (0 if self.tied else self.by_component["embedding"])

    @property
    def active_with_embedding(self) -> int:
        """Both tables counted. K3: 105.36B."""
        return sum(self.active_by_component.values())

    @property
    def active_without_tables(self) -> int:
        """Neither table counted, as small models are often quoted. Kimi Linear: 2.73B."""
        return self.active_with_embedding - sum(self.by_component[name] for name in TABLES)


@dataclass(frozen=True)
class CacheBytes:
    """Bytes that a batch of sessions keeps between two tokens: ``total = fixed + windowed + per_token * tokens``."""

    tokens: int
    per_token: int  # every further token adds this for good (latents, keys and values); window layers are not in it
    fixed: int  # there from the first token on, whatever the length (KDA states and convolution tails)
    windowed: int  # in sliding-window layers: min(tokens, window) rows, so it stops growing at the window

    @property
    def total(self) -> int:
        return self.fixed + self.windowed + self.per_token * self.tokens


@dataclass(frozen=True)
class Flops:
    """Forward floating-point operations of one token by component (a multiply-add counts as two)."""

    by_component: dict[str, int | float]

    @property
    def per_token(self) -> int | float:
        return sum(self.by_component.values())


# ---- parameters ----
def mixer_parameters(config: K3Config, mixer: str) -> int:
    """Parameters of one sequence mixer, its inner norms included (K3: 443.74M a KDA layer, 232.20M a Gated MLA layer)."""
    D, H, N, V = config.hidden_size, config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    if mixer in RECURRENT:
        lin = config.linear_attn_config
        H, K = lin.num_heads, lin.head_dim
        P = H * K
        count = 4 * D * P + 3 * P * lin.short_conv_kernel_size + K  # q k v o, convolutions, o_norm
        count += D * P if lin.use_full_rank_gate else D * K + K * P  # output gate
        if mixer in DELTA_RULE:
            count += D * H  # beta
        if mixer in SCALAR_DECAY:
            count += D * H + 2 * H  # projection, A_log, dt_bias
        if mixer == "kda":
            count += D * K + K * P + H + P  # f_a, f_b, A_log, dt_bias: a decay for every channel
        return count
    if mixer == "mla":
        Q, L, R = config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim
        query = D * H * (N + R) if Q is None else D * Q + Q + Q * H * (N + R)
        gate = D * H * V if config.mla_use_output_gate else 0
        return query + D * (L + R) + L + L * H * (N + V) + gate + H * V * D
    return 2 * D * H * N + 2 * D * _kv_heads(config, mixer) * N  # q and o, k and v


def expert_parameters(config: K3Config) -> int:
    """Parameters of one routed expert (K3: 33.03M)."""
    return 3 * (config.routed_expert_hidden_size or config.hidden_size) * config.moe_intermediate_size


def parameter_budget(config: K3Config) -> ParameterBudget:
    """Parameters of ``K3ForCausalLM(config)`` by component, the router's correction bias included.

    Exact for the released models: 2,779,484,476,000 for K3 and 49,122,681,728 for Kimi Linear (text model, ``A_log`` unpadded).
    """
    D, layers = config.hidden_size, range(config.num_hidden_layers)
    moe = sum(config.is_moe_layer(i) for i in layers)
    table, latent = config.vocab_size * D, config.routed_expert_hidden_size
    count = {"embedding": table, "lm_head": 0 if config.tie_word_embeddings else table}
    for i in layers:
        name = config.mixer(i)
        count[name] = count.get(name, 0) + mixer_parameters(config, name)
    # every sublayer and the output has its own reader: one query and one gain
    count["attention_residuals"] = 2 * D * (2 * len(layers) + 1) if config.attn_res_block_size else 0
    count["norms"] = D * (2 * len(layers) + 1)
    count["dense_mlp"] = (len(layers) - moe) * 3 * D * config.intermediate_size
    count["router"] = moe * config.num_experts * (D + 1)
    count["latent_projections"] = moe * (2 * D * latent + latent * config.latent_moe_use_norm) if latent else 0
    count["shared_experts"] = moe * config.num_shared_experts * 3 * D * config.moe_intermediate_size
    count["routed_experts"] = moe * config.num_experts * expert_parameters(config)
    active = {**count, "routed_experts": moe * config.num_experts_per_token * expert_parameters(config)}
    return ParameterBudget(count, active, config.tie_word_embeddings)


# ---- memory ----
def cache_bytes(config: K3Config, tokens: int, batch: int = 1, dtype: torch.dtype = torch.bfloat16) -> CacheBytes:
    """Bytes of ``K3ForCausalLM(config)``'s cache after ``tokens`` tokens in each of ``batch`` sessions.

    Args:
        tokens: tokens read so far, at least 1 (an unused cache holds nothing).
        batch: sessions side by side.
        dtype: of the latents, keys, values and convolution tails. KDA states are float32 (float64 in a float64 model).

    Raises:
        ValueError: ``tokens`` or ``batch`` is not a positive integer, or ``dtype`` is not a floating-point type.
    """
    for name, value in (("tokens", tokens), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
    lin = config.linear_attn_config
    state = lin.num_heads * lin.head_dim**2 * max(4, dtype.itemsize)
    tail = 3 * lin.num_heads * lin.head_dim * (lin.short_conv_kernel_size - 1) * dtype.itemsize
    per_token = fixed = windowed = 0
    for i in range(config.num_hidden_layers):
        mixer = config.mixer(i)
        if mixer in RECURRENT:
            fixed += state + tail
        elif mixer == "sliding_window":
            windowed += min(tokens, config.sliding_window) * row_numbers(config, mixer) * dtype.itemsize
        else:
            per_token += row_numbers(config, mixer) * dtype.itemsize
    return CacheBytes(tokens, batch * per_token, batch * fixed, batch * windowed)


def row_numbers(config: K3Config, mixer: str) -> int:
    """Numbers that one token leaves in one layer's cache: 576 for K3's MLA, nothing for a mixer with a fixed state."""
    if mixer in RECURRENT:
        return 0
    if mixer == "mla":
        return config.kv_lora_rank + config.qk_rope_head_dim
    return 2 * _kv_heads(config, mixer) * config.qk_nope_head_dim


def _kv_heads(config: K3Config, mixer: str) -> int:
    return config.num_key_value_groups if mixer == "gqa" else config.num_attention_heads


# ---- arithmetic ----
def flops(config: K3Config, tokens: int, *, chunk: int = 64) -> Flops:
    """Forward FLOPs of one token, averaged over a causal sequence of ``tokens`` tokens.

    Matrices cost 2 per active parameter. A KDA or other delta-rule head costs 6K^2 + 3CK + C^2 a token with chunks of C tokens (Kimi
    Linear, Eq. 13), an additive one 4K^2 + 2CK; a softmax head 2 (K + V) for each key it reads, (tokens + 1) / 2 keys on average or
    fewer in a window (Eq. 14 writes 2T^2 d for the whole sequence).
    """
    if tokens < 1 or chunk < 1:
        raise ValueError(f"tokens and chunk must be at least 1, got tokens={tokens!r}, chunk={chunk!r}")
    budget, lin = parameter_budget(config), config.linear_attn_config
    cost = {name: 2.0 * count for name, count in budget.active_by_component.items() if name != "embedding"}
    cost["lm_head"] = 2.0 * config.vocab_size * config.hidden_size
    K, C = lin.head_dim, chunk
    head_dims = {"mla": config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim}
    for i in range(config.num_hidden_layers):
        mixer = config.mixer(i)
        if mixer in RECURRENT:
            head = 6 * K * K + 3 * C * K + C * C if mixer in DELTA_RULE else 4 * K * K + 2 * C * K
            heads = lin.num_heads
        else:
            w = min(tokens, config.sliding_window) if mixer == "sliding_window" else tokens
            keys_read = (w * (w + 1) / 2 + (tokens - w) * w) / tokens
            head = 2 * keys_read * head_dims.get(mixer, 2 * config.qk_nope_head_dim)
            heads = config.num_attention_heads
        name = f"{mixer}_operator"
        cost[name] = cost.get(name, 0.0) + heads * head
    return Flops(cost)


def weight_bytes(config: K3Config) -> float:
    """Bytes of the weights as K3 is released: routed experts in MXFP4 (4.25 bits a weight), everything else in bfloat16."""
    budget = parameter_budget(config)
    experts = budget.by_component["routed_experts"]
    return 2 * (budget.total - experts) + facts.K3.expert_bits.value / 8 * experts


def with_mixer(config: K3Config, mixer: str, **changes: int) -> K3Config:
    """The same model with ``mixer`` in every layer: what a twin without the hybrid would cost."""
    return config.replace(linear_mixer=mixer, full_mixer=mixer, **changes)
