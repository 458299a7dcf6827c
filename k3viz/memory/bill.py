"""What a model costs where it is served: its weights, the sessions that fit beside them, the bytes that every new token moves.

Closed forms on a config; nothing runs. A model "of one's own" is any config with other sizes or another pattern of attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from minimodel import K3Config, cache_bytes, facts, parameter_budget
from minimodel.accounting import with_mixer
from minimodel.config import hybrid_pattern

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
WEIGHTS = {"4-bit experts": (facts.K3.expert_bits.value / 8, 2), "float8": (1, 1), "bfloat16": (2, 2)}  # bytes: of experts, of the rest
PATTERNS = {  # label, mixer of the first kind of layer, of the second, how many of the first for one of the second
    "3:1": ("3 KDA : 1 MLA", "kda", "mla", 3),
    "1:1": ("1 KDA : 1 MLA", "kda", "mla", 1),
    "7:1": ("7 KDA : 1 MLA", "kda", "mla", 7),
    "kda": ("all KDA", "kda", "kda", 3),
    "mla": ("all MLA", "mla", "mla", 3),
    "gqa": ("all GQA", "gqa", "gqa", 3),
    "mha": ("all MHA", "mha", "mha", 3),
    "window": ("all sliding window", "sliding_window", "sliding_window", 3),
    "window:gqa": ("5 sliding window : 1 GQA", "sliding_window", "gqa", 5),
}


@dataclass(frozen=True)
class Bill:
    """weights: bytes of the model. session: bytes that one session keeps at the story's context. sessions: how many of them fit beside
    the weights (0 where the weights alone don't fit). moved: bytes read and written for one new token of one session, in a batch.
    break_even: tokens from which a session keeps no more than with the second kind of layer throughout; None if there are none.
    """

    weights: float
    session: int
    sessions: int
    moved: float
    break_even: int | None


def own_config(*, base: K3Config, pattern: str, layers: int, heads: int, groups: int, latent: int, window: int) -> K3Config:
    """``base`` (its width, experts and head sizes) with another attention.

    pattern: one of PATTERNS; in a mixed one the last layer is always of the second kind. heads: of all mixers; groups: of GQA; latent:
    MLA's numbers a token, without the shared ones beside it; window: tokens that a window layer reads.
    Raises ValueError for a combination that no model has.
    """
    if pattern not in tuple(PATTERNS):
        raise ValueError(f"pattern must be one of {', '.join(PATTERNS)}, got {pattern!r}")
    _, first, second, ratio = PATTERNS[pattern]
    slots, rest = hybrid_pattern(layers, ratio)
    linear = replace(base.linear_attn_config, kda_layers=slots, full_attn_layers=rest, num_heads=heads)
    return base.replace(
        num_hidden_layers=layers, linear_attn_config=linear, num_attention_heads=heads, num_key_value_groups=groups, kv_lora_rank=latent,
        sliding_window=window, linear_mixer=first, full_mixer=second,
    )  # fmt: skip


def pattern_of(config: K3Config) -> str | None:
    """The name of a config's pattern of attention, None for one that is not in PATTERNS."""
    lin = config.linear_attn_config
    for name, (_, first, second, ratio) in PATTERNS.items():
        same = (config.linear_mixer, config.full_mixer) == (first, second)
        if same and (first == second or (lin.kda_layers, lin.full_attn_layers) == hybrid_pattern(config.num_hidden_layers, ratio)):
            return name
    return None


@lru_cache(maxsize=512)
def bill(config: K3Config, *, context: int, dtype: str, batch: int, memory: float, weights: str) -> Bill:
    """The bill of ``config``. context: tokens of a session. dtype: of its cache. batch: sessions that take a step together.
    memory: bytes of all GPUs. weights: how they are stored, one of WEIGHTS."""
    size = sum(_weights(config, weights))
    one = cache_bytes(config, context, dtype=DTYPES[dtype])
    sessions = int(max(0.0, memory - size) // one.total)
    # a step reads the latents, keys and values, and reads and writes the states; the weights it reads are shared by the batch
    moved = _weights_read(config, weights, batch) / batch + one.total + one.fixed
    return Bill(size, one.total, sessions, moved, _break_even(config, dtype))


def _weights(config: K3Config, stored: str) -> tuple[float, float]:
    """Bytes of the routed experts, and of everything else."""
    budget, (of_experts, of_rest) = parameter_budget(config), WEIGHTS[stored]
    experts = budget.by_component["routed_experts"]
    return of_experts * experts, of_rest * (budget.total - experts)


def _weights_read(config: K3Config, stored: str, batch: int) -> float:
    """Bytes of weights that one step reads: all but idle experts and the input embedding. Tokens choose experts evenly and on their own,
    so a batch of B visits E (1 - (1 - k / E)^B) of a layer's E experts."""
    experts, rest = _weights(config, stored)
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return rest - WEIGHTS[stored][1] * table + experts * (1 - (1 - config.num_experts_per_token / config.num_experts) ** batch)


def _break_even(config: K3Config, dtype: str) -> int | None:
    """From where on fixed + windowed + per_token t <= twin's per_token t: once beyond the window, or before it if it is cheap."""
    if len({config.mixer(i) for i in range(config.num_hidden_layers)}) == 1:
        return None
    window = config.sliding_window if config.linear_mixer == "sliding_window" else 1
    mixed = cache_bytes(config, window, dtype=DTYPES[dtype])
    twin = cache_bytes(with_mixer(config, config.full_mixer), window, dtype=DTYPES[dtype])
    if mixed.total <= twin.total:
        return 1
    if mixed.per_token >= twin.per_token:
        return None  # it never catches up
    return -(-(mixed.fixed + mixed.windowed) // (twin.per_token - mixed.per_token))
