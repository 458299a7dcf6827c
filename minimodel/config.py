"""K3Config: one frozen dataclass whose field names are the keys of the released ``config.json``.

The released file nests the linear-attention settings under ``linear_attn_config``; so do we. Four fields are ours
alone: what stands in the KDA and MLA slots, for the control experiments. They are not part of ``to_hf()``; our own checkpoints write
them under the key "ours", since released configs use such names for other things. Hyper-parameters of the released models:
``config.json`` of Kimi K3 and Kimi-Linear-48B-A3B, K3 report Table 1.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

__all__ = ["K3Config", "LinearAttnConfig", "hybrid_pattern"]

LINEAR_MIXERS = ("kda", "linear_attention", "mamba2", "delta_net", "gated_delta_net", "mha", "gqa", "sliding_window", "mla")
FULL_MIXERS = ("mla", "mha", "gqa", "sliding_window", "kda")

OURS = ("linear_mixer", "full_mixer", "num_key_value_groups", "sliding_window")  # fields that the released format does not have


def hybrid_pattern(num_layers: int, ratio: int = 3) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """1-based (kda_layers, full_attn_layers): every (ratio+1)-th layer is MLA, and so is the last one (K3 report 2.1)."""
    full = tuple(i for i in range(1, num_layers + 1) if i % (ratio + 1) == 0 or i == num_layers)
    return tuple(i for i in range(1, num_layers + 1) if i not in full), full


@dataclass(frozen=True)
class LinearAttnConfig:
    """Settings of the KDA layers. Layer numbers are 1-based, as released."""

    kda_layers: tuple[int, ...] = (1, 2, 3)
    full_attn_layers: tuple[int, ...] = (4,)
    num_heads: int = 2
    head_dim: int = 128  # key = value channels a head
    short_conv_kernel_size: int = 4
    use_full_rank_gate: bool = True  # output gate: full rank (K3) or rank head_dim (Kimi Linear)
    gate_lower_bound: float | None = -5.0  # None: Kimi Linear's unbounded softplus gate

    def __post_init__(self) -> None:
        for name in ("kda_layers", "full_attn_layers"):
            layers = getattr(self, name)
            if not isinstance(layers, (list, tuple)) or any(type(i) is not int for i in layers):
                raise ValueError(f"linear_attn_config.{name} must be a list of layer numbers, got {layers!r}")
            object.__setattr__(self, name, tuple(layers))
        for name in ("num_heads", "head_dim", "short_conv_kernel_size"):
            _positive(f"linear_attn_config.{name}", getattr(self, name))
        _true_or_false("linear_attn_config.use_full_rank_gate", self.use_full_rank_gate)
        low = self.gate_lower_bound
        if low is not None and not (isinstance(low, (int, float)) and -5.0 <= low < 0.0):
            raise ValueError(
                f"linear_attn_config.gate_lower_bound must lie in [-5, 0) or be None (softplus gate), got {low!r}: below -5 a "
                "16-token tile leaves float32's range"
            )


@dataclass(frozen=True)
class K3Config:
    """A K3 of any size. Defaults: the small parts every preset shares; see the class methods for complete models."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    linear_attn_config: LinearAttnConfig = field(default_factory=LinearAttnConfig)
    # Gated MLA
    num_attention_heads: int = 2
    q_lora_rank: int | None = None  # None: direct q_proj (Kimi Linear)
    kv_lora_rank: int = 32
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16  # named after RoPE, but never rotated in K3 (NoPE)
    v_head_dim: int = 32
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    # feed-forward
    intermediate_size: int = 256  # dense layers
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    moe_intermediate_size: int = 32
    num_experts: int = 8
    num_experts_per_token: int = 2
    num_shared_experts: int = 2
    routed_expert_hidden_size: int | None = None  # the latent width; None: experts work on hidden_size (Kimi Linear)
    latent_moe_use_norm: bool = True
    moe_renormalize: bool = True
    moe_router_activation_func: str = "sigmoid"
    routed_scaling_factor: float = 1.0
    hidden_act: str = "situ"  # or "silu" (SwiGLU, Kimi Linear)
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float | None = 25.0
    # depth
    attn_res_block_size: int | None = 2  # in layers, not sublayers; None: plain residuals
    # the rest
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1_048_576
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    # ours, for control experiments; not part of to_hf()
    linear_mixer: str = "kda"
    full_mixer: str = "mla"
    num_key_value_groups: int = 2  # GQA slots: key-value heads shared by the query heads
    sliding_window: int = 32  # window slots: a token reads itself and the window-1 tokens before it

    def __post_init__(self) -> None:
        if not isinstance(self.linear_attn_config, LinearAttnConfig):
            object.__setattr__(self, "linear_attn_config", _linear_attn_from(self.linear_attn_config))
        _validate(self)

    # ---- what the layers ask ----
    def is_kda_layer(self, layer: int) -> bool:
        """Whether 0-based ``layer`` is a KDA (linear) slot; otherwise it is an MLA (full-attention) slot."""
        return layer + 1 in self.linear_attn_config.kda_layers

    def is_moe_layer(self, layer: int) -> bool:
        """Whether 0-based ``layer`` has experts: from ``first_k_dense_replace`` on, where ``moe_layer_freq`` divides it."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def mixer(self, layer: int) -> str:
        """Name of the sequence mixer in 0-based ``layer``."""
        return self.linear_mixer if self.is_kda_layer(layer) else self.full_mixer

    def replace(self, **changes: Any) -> K3Config:
        """A copy with some fields changed; checked like a new one."""
        known = {f.name for f in fields(self)}
        for name in changes:
            if name not in known:
                raise ValueError(f"unknown config field {name!r}; fields are {sorted(known)}")
        return replace(self, **changes)

    # ---- presets ----
    @classmethod
    def meeting(cls) -> K3Config:
        """The smallest trained model of the course: it reads meeting notes. Under a million parameters."""
        from minimodel.tasks.meeting import VOCABULARY

        kda, full = hybrid_pattern(4)
        return cls(
            vocab_size=len(VOCABULARY), hidden_size=96, num_hidden_layers=4,
            linear_attn_config=LinearAttnConfig(kda_layers=kda, full_attn_layers=full, num_heads=2),
            num_attention_heads=2, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
            intermediate_size=256, moe_intermediate_size=32, num_experts=8, num_experts_per_token=2, num_shared_experts=2,
            routed_expert_hidden_size=48, attn_res_block_size=2, initializer_range=0.05, pad_token_id=0,
        )  # fmt: skip

    @classmethod
    def mini(cls) -> K3Config:
        """A CPU-trainable K3 with every part present, two MLA layers at the end and a short last residual block."""
        kda, full = hybrid_pattern(9)
        return cls(
            vocab_size=512, hidden_size=128, num_hidden_layers=9,
            linear_attn_config=LinearAttnConfig(kda_layers=kda, full_attn_layers=full, num_heads=2),
            num_attention_heads=4, q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
            intermediate_size=512, moe_intermediate_size=64, num_experts=16, num_experts_per_token=2, num_shared_experts=2,
            routed_expert_hidden_size=64, attn_res_block_size=2,
        )  # fmt: skip

    @classmethod
    def small(cls) -> K3Config:
        """A GPU config of about 100M active parameters."""
        kda, full = hybrid_pattern(13)
        return cls(
            vocab_size=32768, hidden_size=640, num_hidden_layers=13,
            linear_attn_config=LinearAttnConfig(kda_layers=kda, full_attn_layers=full, num_heads=5),
            num_attention_heads=5, q_lora_rank=256, kv_lora_rank=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            intermediate_size=2560, moe_intermediate_size=512, num_experts=64, num_experts_per_token=4, num_shared_experts=2,
            routed_expert_hidden_size=320, attn_res_block_size=2,
        )  # fmt: skip

    @classmethod
    def base(cls) -> K3Config:
        """A GPU config of about 1B active parameters."""
        kda, full = hybrid_pattern(25)
        return cls(
            vocab_size=65536, hidden_size=1536, num_hidden_layers=25,
            linear_attn_config=LinearAttnConfig(kda_layers=kda, full_attn_layers=full, num_heads=12),
            num_attention_heads=12, q_lora_rank=512, kv_lora_rank=256, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
            intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_token=8, num_shared_experts=2,
            routed_expert_hidden_size=768, attn_res_block_size=4,
        )  # fmt: skip

    @classmethod
    def k3(cls) -> K3Config:
        """The released Kimi K3 (text model): 93 layers, 896 experts, 2.78T parameters."""
        return cls.from_hf(json.loads(resources.files("minimodel").joinpath("released/kimi_k3.json").read_text()))

    @classmethod
    def kimi_linear_48b(cls) -> K3Config:
        """The released Kimi-Linear-48B-A3B, where KDA was proven."""
        return cls.from_hf(json.loads(resources.files("minimodel").joinpath("released/kimi_linear_48b.json").read_text()))

    # ---- the released format ----
    @classmethod
    def from_hf(cls, source: dict | str | Path) -> K3Config:
        """Read a released ``config.json`` (a dict, a file or a folder holding one; nested ``text_config`` is found).

        Keys that say nothing about this model's mathematics are ignored; a value that this model cannot honor raises
        ``ValueError`` with the key and the value.
        """
        if isinstance(source, (str, Path)):
            path = Path(source)
            path = path / "config.json" if path.is_dir() else path
            try:
                source = json.loads(path.read_text())
            except FileNotFoundError:
                raise ValueError(f"source: no config file at {path}") from None
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"source: {path} is not JSON ({error})") from None
            if not isinstance(source, dict):
                raise ValueError(f"source must hold a dict of config keys, got {type(source).__name__} in {path}")
        if not isinstance(source, dict):
            raise TypeError(f"source must be a dict or a path, got {type(source).__name__}")
        hf = source.get("text_config", source)
        if not isinstance(hf, dict):
            raise ValueError(f"source: text_config must be a dict, got {type(hf).__name__}")
        _refuse_unsupported(hf)
        known = {f.name for f in fields(cls)} - {"linear_attn_config", *OURS}
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "linear_attn_config"):
            if name not in hf:
                raise ValueError(f"source: config has no {name!r}")
        values = {name: hf[name] for name in known & hf.keys()}
        # a key that K3 added is absent from older files, and means the old behavior
        older = {"attn_res_block_size": None, "hidden_act": "silu", "mla_use_output_gate": False}
        linear = hf["linear_attn_config"]
        if isinstance(linear, dict):
            linear = {"use_full_rank_gate": False, "gate_lower_bound": None, **linear}
        ours = hf.get("ours", {})
        for name in ours:
            if name not in OURS:
                raise ValueError(f"ours: unknown key {name!r}; keys are {OURS}")
        return cls(linear_attn_config=_linear_attn_from(linear), **{**older, **values, **ours})

    def to_hf(self) -> dict[str, Any]:
        """The released ``config.json`` keys and values of this model; ``from_hf(c.to_hf()) == c`` for the plain K3 mixers."""
        out = asdict(self)
        for name in OURS:
            del out[name]
        lin = out["linear_attn_config"]
        lin["kda_layers"], lin["full_attn_layers"] = list(lin["kda_layers"]), list(lin["full_attn_layers"])
        return {"model_type": "kimi_linear", "num_key_value_heads": self.num_attention_heads, **out}


def _linear_attn_from(source: dict[str, Any]) -> LinearAttnConfig:
    if not isinstance(source, dict):
        raise ValueError(f"linear_attn_config must be a LinearAttnConfig or a dict, got {type(source).__name__}")
    known = {f.name for f in fields(LinearAttnConfig)}
    for name in source:
        if name not in known:
            raise ValueError(f"linear_attn_config: unknown key {name!r}; keys are {sorted(known)}")
    return LinearAttnConfig(**{name: tuple(value) if isinstance(value, list) else value for name, value in source.items()})


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _positive_number(name: str, value: Any, *, or_none: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive{or_none}, got {value!r}")


def _true_or_false(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def _refuse_unsupported(hf: dict[str, Any]) -> None:
    """Settings of the released format that would change the mathematics and that no released K3 or Kimi Linear uses."""
    only = {"num_expert_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
    for key, value in only.items():
        if hf.get(key, value) != value:
            raise ValueError(f"{key}={hf[key]!r} is not supported: this model implements {key}={value!r} only")
    heads, kv_heads = hf.get("num_attention_heads"), hf.get("num_key_value_heads", hf.get("num_attention_heads"))
    if kv_heads != heads:
        raise ValueError(f"num_key_value_heads={kv_heads} must equal num_attention_heads={heads}: MLA shares one latent instead")


def _validate(c: K3Config) -> None:
    for name in (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim",
        "v_head_dim", "intermediate_size", "moe_layer_freq", "moe_intermediate_size", "num_experts", "num_experts_per_token",
        "num_key_value_groups", "sliding_window", "max_position_embeddings",
    ):  # fmt: skip
        _positive(name, getattr(c, name))
    for name in ("q_lora_rank", "routed_expert_hidden_size", "attn_res_block_size"):
        if getattr(c, name) is not None:
            _positive(name, getattr(c, name))
    for name in ("first_k_dense_replace", "num_shared_experts", "qk_rope_head_dim"):
        if type(getattr(c, name)) is not int or getattr(c, name) < 0:
            raise ValueError(f"{name} must be an integer >= 0, got {getattr(c, name)!r}")
    for name in ("rms_norm_eps", "initializer_range", "routed_scaling_factor", "activation_situ_beta"):
        _positive_number(name, getattr(c, name))
    if c.activation_situ_linear_beta is not None:
        _positive_number("activation_situ_linear_beta", c.activation_situ_linear_beta, or_none=" or None")
    for name in ("mla_use_nope", "mla_use_output_gate", "latent_moe_use_norm", "moe_renormalize", "tie_word_embeddings"):
        _true_or_false(name, getattr(c, name))
    if c.num_experts_per_token > c.num_experts:
        raise ValueError(f"num_experts_per_token={c.num_experts_per_token} exceeds num_experts={c.num_experts}")
    if c.hidden_act not in ("situ", "silu"):
        raise ValueError(f"hidden_act must be 'situ' or 'silu', got {c.hidden_act!r}")
    if not c.mla_use_nope:
        raise ValueError("mla_use_nope=False is not supported: K3 has no rotary positions")
    if c.moe_router_activation_func != "sigmoid":
        raise ValueError(f"moe_router_activation_func must be 'sigmoid', got {c.moe_router_activation_func!r}")
    if c.linear_mixer not in LINEAR_MIXERS:
        raise ValueError(f"linear_mixer must be one of {LINEAR_MIXERS}, got {c.linear_mixer!r}")
    if c.full_mixer not in FULL_MIXERS:
        raise ValueError(f"full_mixer must be one of {FULL_MIXERS}, got {c.full_mixer!r}")
    if "gqa" in (c.linear_mixer, c.full_mixer) and c.num_attention_heads % c.num_key_value_groups:
        raise ValueError(
            f"num_attention_heads={c.num_attention_heads} must be a multiple of num_key_value_groups={c.num_key_value_groups}"
        )
    lin = c.linear_attn_config
    covered = sorted(lin.kda_layers + lin.full_attn_layers)
    if covered != list(range(1, c.num_hidden_layers + 1)):
        raise ValueError(
            f"linear_attn_config: kda_layers {lin.kda_layers} and full_attn_layers {lin.full_attn_layers} must cover layers "
            f"1..{c.num_hidden_layers} (num_hidden_layers) exactly once"
        )
