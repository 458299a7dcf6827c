"""The small bodies that the experiments train: K3's parts, a few hundred thousand weights."""

from __future__ import annotations

from typing import Any

from minimodel.config import K3Config, LinearAttnConfig, hybrid_pattern
from minimodel.tasks.meeting import VOCABULARY

WIDTH, HEADS, CHANNELS = 64, 4, 32


def plain(
    mixer: str, *, layers: int = 4, vocab_size: int = len(VOCABULARY), heads: int = HEADS, channels: int = CHANNELS, **changes: Any
) -> K3Config:
    """``mixer`` in every layer, dense feed-forwards, one residual stream: nothing but the mixer can make a difference."""
    return _body(tuple(range(1, layers + 1)), (), vocab_size, heads, channels, linear_mixer=mixer, attn_res_block_size=None, **changes)


def hybrid(ratio: int, *, layers: int = 4, vocab_size: int = len(VOCABULARY), **changes: Any) -> K3Config:
    """``ratio`` KDA layers to one Gated MLA layer, dense feed-forwards, one residual stream. 0: MLA everywhere."""
    kda, full = hybrid_pattern(layers, ratio)
    return _body(kda, full, vocab_size, HEADS, CHANNELS, mla_use_output_gate=True, attn_res_block_size=None, **changes)


def mixture(*, layers: int = 4, experts: int = 16, vocab_size: int = len(VOCABULARY), **changes: Any) -> K3Config:
    """Every part of K3: three KDA layers to one Gated MLA, Stable LatentMoE from the second layer on, Attention Residuals."""
    kda, full = hybrid_pattern(layers)
    sizes = {
        "first_k_dense_replace": 1, "num_experts": experts, "num_experts_per_token": 2, "num_shared_experts": 1,
        "moe_intermediate_size": 32, "routed_expert_hidden_size": 32, "mla_use_output_gate": True, "attn_res_block_size": 2,
    }  # fmt: skip
    return _body(kda, full, vocab_size, 2, CHANNELS, **{**sizes, **changes})


def _body(linear: tuple[int, ...], full: tuple[int, ...], vocab_size: int, heads: int, channels: int, **changes: Any) -> K3Config:
    sizes = {
        "hidden_size": WIDTH, "num_attention_heads": heads, "kv_lora_rank": 32, "qk_nope_head_dim": channels, "qk_rope_head_dim": 16,
        "v_head_dim": channels, "mla_use_output_gate": False, "intermediate_size": 3 * WIDTH,
        "first_k_dense_replace": len(linear) + len(full),
        "initializer_range": 0.05, "pad_token_id": 0,
    }  # fmt: skip
    return K3Config(
        vocab_size=vocab_size, num_hidden_layers=len(linear) + len(full),
        linear_attn_config=LinearAttnConfig(kda_layers=linear, full_attn_layers=full, num_heads=heads, head_dim=channels),
        **{**sizes, **changes},
    )  # fmt: skip
