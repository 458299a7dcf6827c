"""What a training step takes in memory, in closed form, before anything is allocated.

Weights, gradients and optimizer state are exact: they are numbers times bytes. Activations count the tensors that plain torch keeps between
the forward and the backward pass, read off the modules' code; the kernels for GPUs and the C kernels keep fewer. What operators need for
a moment is estimated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minimodel.accounting import parameter_budget
from minimodel.config import K3Config
from minimodel.muon import AT_ONCE

WIDE = 4  # bytes of float32: masters, gradients, optimizer state, and what norms, gates and activations compute in
CHUNK = 32  # tokens a kept KDA state of the chunked backend covers


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes by what they hold. Activations are there in the passes and scratch in the update, never both."""

    weights: int
    masters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    scratch: int

    @property
    def by_part(self) -> dict[str, int]:
        return {
            "weights": self.weights, "float32 masters of narrower weights": self.masters, "gradients": self.gradients,
            "optimizer state": self.optimizer, "activations (estimate)": self.activations,
            "logits and their gradient (estimate)": self.logits, "or scratch of the update (estimate)": self.scratch,
        }  # fmt: skip

    @property
    def total(self) -> int:
        """The most at one time."""
        return self.weights + self.masters + self.gradients + self.optimizer + max(self.activations + self.logits, self.scratch)


def training_bytes(
    config: K3Config, *, rows: int, length: int, dtype: torch.dtype = torch.float32, recompute: bool = False
) -> TrainingBytes:
    """Memory of one step of :func:`minimodel.train.train` with Per-Head Muon.

    Args:
        config: a K3 or Kimi Linear of any size; its mixers must be KDA and MLA.
        rows, length: windows of one pass and tokens of a window, after cutting a step into passes.
        dtype: of the passes, float32 or bfloat16.
        recompute: keep every layer's input only, and one layer's activations at a time.
    Raises: ValueError for another mixer or dtype.
    """
    if (config.linear_mixer, config.full_mixer) != ("kda", "mla"):
        raise ValueError(f"config: memory is counted for kda and mla, got {config.linear_mixer} and {config.full_mixer}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype must be torch.float32 or torch.bfloat16, got {dtype}")
    a, S = dtype.itemsize, rows * length
    total = parameter_budget(config).total
    vectors, unlearned = _kept_wide(config)  # A_log and dt_bias, the routers' biases
    learned = total - unlearned
    narrow = learned - vectors if a < WIDE else 0
    adamw = _adamw_numbers(config)
    layers = [_layer(config, i, rows, length, a) for i in range(config.num_hidden_layers)]
    D = config.hidden_size
    ends = S * D * a + _read(config, 2 * len(layers), S, a) + _norm(D, S, a)
    kept = len(layers) * S * D * a + max(layers) if recompute else sum(layers)
    largest = max(AT_ONCE, config.num_experts * config.moe_intermediate_size * (config.routed_expert_hidden_size or D))
    return TrainingBytes(
        weights=(total - narrow) * WIDE + narrow * a,
        masters=narrow * WIDE,
        gradients=learned * WIDE,
        optimizer=(learned - adamw) * WIDE + adamw * 2 * WIDE,  # one momentum a matrix entry, two moments for the rest
        activations=ends + kept + max(layers),  # the last: gradients on their way through a layer
        logits=S * config.vocab_size * ((a if a < WIDE else 0) + 3 * WIDE),
        scratch=6 * WIDE * min(largest, learned),  # Newton-Schulz: the update, X, A, two products, the result
    )


def _kept_wide(config: K3Config) -> tuple[int, int]:
    """Numbers that stay float32: learned vectors of the gates, and biases that balancing sets."""
    lin, moe = config.linear_attn_config, sum(config.is_moe_layer(i) for i in range(config.num_hidden_layers))
    return len(lin.kda_layers) * lin.num_heads * (1 + lin.head_dim), moe * config.num_experts


def _adamw_numbers(config: K3Config) -> int:
    """Parameters that are no matrices between features: tables, norms, pseudo-queries, convolutions, gate vectors."""
    lin, by = config.linear_attn_config, parameter_budget(config).by_component
    P, moe = lin.num_heads * lin.head_dim, sum(config.is_moe_layer(i) for i in range(config.num_hidden_layers))
    kda = 3 * P * lin.short_conv_kernel_size + lin.head_dim + lin.num_heads + P
    mla = (config.q_lora_rank or 0) + config.kv_lora_rank
    latent = moe * (config.routed_expert_hidden_size or 0) * config.latent_moe_use_norm
    tables = by["embedding"] + by["lm_head"] + by["attention_residuals"] + by["norms"]
    return tables + len(lin.kda_layers) * kda + len(lin.full_attn_layers) * mla + latent


# ---- what autograd keeps, in bytes: S tokens, a bytes a number in the passes' dtype ----
def _layer(config: K3Config, i: int, rows: int, length: int, a: int) -> int:
    S, D = rows * length, config.hidden_size
    mixer = _kda(config, rows, length, a) if config.is_kda_layer(i) else _mla(config, S, a)
    forward = _moe(config, S, a) if config.is_moe_layer(i) else _mlp(config, config.intermediate_size, S, a)
    return _read(config, 2 * i, S, a) + _read(config, 2 * i + 1, S, a) + 2 * _norm(D, S, a) + mixer + forward


def _read(config: K3Config, written: int, S: int, a: int) -> int:
    """One read over depth after ``written`` sublayers: its stacked sources, in float32, once for the scores and once for the sum."""
    if config.attn_res_block_size is None or written == 0:
        return 0
    sources = -(-written // (2 * config.attn_res_block_size)) + 1
    return sources * S * config.hidden_size * WIDE * (1 if a == WIDE else 2)


def _norm(width: int, S: int, a: int) -> int:
    """The input and the normalized vector in float32, the scaled one."""
    return S * width * (2 * WIDE + a)


def _kda(config: K3Config, rows: int, length: int, a: int) -> int:
    lin = config.linear_attn_config
    K, P, S = lin.head_dim, lin.num_heads * lin.head_dim, rows * length
    chunks = -(-length // CHUNK)
    narrow = S * (14 * P + K)  # q, k, v before and after the convolution and after SiLU; q, k normed; three of the output gate; f_a
    wide = S * P * (5 + (2 if a < WIDE else 0))  # decay: three; the output's norm: two; q and k in float32 for their norm
    operator = rows * P * (chunks * CHUNK + (chunks + 2) * K)  # errors of every token, a state a chunk
    return narrow * a + (wide + operator) * WIDE


def _mla(config: K3Config, S: int, a: int) -> int:
    H, Q, L, R = config.num_attention_heads, config.q_lora_rank or 0, config.kv_lora_rank, config.qk_rope_head_dim
    heads = 4 * H * (config.qk_nope_head_dim + R)  # queries, keys, padded values, outputs
    gate = 3 * H * config.v_head_dim * config.mla_use_output_gate
    return _norm(Q, S, a) + _norm(L, S, a) + S * (heads + gate + L + 2 * R) * a


def _mlp(config: K3Config, width: int, S: int, a: int) -> int:
    """SiTU keeps six float32 factors and the product; SwiGLU four numbers."""
    return S * width * (6 * WIDE + a if config.hidden_act == "situ" else 4 * a)


def _moe(config: K3Config, S: int, a: int) -> int:
    k, D = config.num_experts_per_token, config.hidden_size
    L = config.routed_expert_hidden_size
    router = S * (config.num_experts * WIDE + (D * WIDE if a < WIDE else 0))
    routed = S * k * 2 * (L or D) * a + _mlp(config, k * config.moe_intermediate_size, S, a)
    norm = _norm(L, S, a) if L and config.latent_moe_use_norm else 0
    return router + routed + norm + _mlp(config, config.num_shared_experts * config.moe_intermediate_size, S, a)
