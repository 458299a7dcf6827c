"""What stands in the model's attention slots for the control experiments: ``K3Config.linear_mixer`` and ``full_mixer`` name it.

Every class has the block interface of ``KimiDeltaAttention`` and ``GatedMLA``: ``Mixer(config)``, and
``forward(x, cache=..., mask=..., cu_seqlens=..., padding=..., backend=...)`` on the normed layer input. None of them knows positions.
Plain MLA is ``GatedMLA`` with ``mla_use_output_gate=False``.
"""

from __future__ import annotations

from minimodel.baselines.recurrent import DeltaNet, GatedDeltaNet, LinearAttention, Mamba2
from minimodel.baselines.softmax import GroupedQueryAttention, MultiHeadAttention, SlidingWindowAttention, softmax_attention
from minimodel.trace import Traced

__all__ = [
    "DeltaNet", "GatedDeltaNet", "GroupedQueryAttention", "LinearAttention", "Mamba2", "MultiHeadAttention", "SlidingWindowAttention",
    "build_baseline", "softmax_attention",
]  # fmt: skip

BASELINES: dict[str, type[Traced]] = {
    "mha": MultiHeadAttention,
    "gqa": GroupedQueryAttention,
    "sliding_window": SlidingWindowAttention,
    "linear_attention": LinearAttention,
    "mamba2": Mamba2,
    "delta_net": DeltaNet,
    "gated_delta_net": GatedDeltaNet,
}


def build_baseline(name: str, config) -> Traced:
    """The baseline mixer that the config calls ``name``. Raises ValueError for a name that is none."""
    if name not in BASELINES:
        raise ValueError(f"name must be one of {sorted(BASELINES)}, got {name!r}")
    return BASELINES[name](config)
