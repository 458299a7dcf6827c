"""Published numbers, each with its source: what others measured or stated, never what this course measures.

Hyper-parameters of the released models are not here but in their ``config.json`` (``K3Config.k3()``); what follows from them by
arithmetic is in ``minimodel.accounting``. A ``Fact`` is one number, a ``Table`` several that belong together.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from minimodel.config import K3Config, LinearAttnConfig

__all__ = [
    "ATTN_RES_PAPER", "DEEPSEEK_V2_PAPER", "DEEPSEEK_V3_PAPER", "K2", "K3", "K3_REPORT", "KIMI_K2_CONFIG", "KIMI_LINEAR_PAPER",
    "OTHER_PRICES", "PRICE_PAGE", "AttentionResiduals", "DeepSeekV2", "Fact", "KimiLinear", "Serving", "Standing", "Table", "benchmarks",
    "deepseek_v3_dimensions", "kimi_k2_dimensions", "lineage", "timeline",
]  # fmt: skip

K3_REPORT = "Kimi K3 technical report, arXiv 2607.24653"
KIMI_LINEAR_PAPER = "Kimi Linear, arXiv 2510.26692"
ATTN_RES_PAPER = "Attention Residuals, arXiv 2603.15031"
DEEPSEEK_V2_PAPER = "DeepSeek-V2, arXiv 2405.04434"
DEEPSEEK_V3_PAPER = "DeepSeek-V3, arXiv 2412.19437"
KIMI_K2_CONFIG = "Kimi K2's released config.json"
PRICE_PAGE = "platform.kimi.ai/docs/pricing/chat-k3, as quoted by several third-party pages"
OTHER_PRICES = "price table of the Rust crate aicost"


@dataclass(frozen=True)
class Fact:
    """One published number. ``unit`` is what the number counts; ``source`` is where it is printed."""

    value: int | float | str
    unit: str
    source: str


@dataclass(frozen=True)
class Table:
    """Published numbers that belong together: every row has one entry a column, None where nothing was published."""

    columns: tuple[str, ...]
    rows: tuple[tuple[int | float | str | None, ...], ...]
    unit: str
    source: str

    def column(self, name: str) -> tuple[int | float | str | None, ...]:
        """The entries of one column, top to bottom. Raises ValueError for an unknown column."""
        if name not in self.columns:
            raise ValueError(f"name must be one of {self.columns}, got {name!r}")
        return tuple(row[self.columns.index(name)] for row in self.rows)


# ---- the models ----
class K3:
    """Kimi K3, July 2026."""

    total_parameters = Fact(2.78e12, "parameters", f"{K3_REPORT}, Table 1")
    active_parameters = Fact(104.2e9, "parameters", f"{K3_REPORT}, Table 1")
    routed_experts = Fact(896, "experts", f"{K3_REPORT}, Table 1")
    active_experts = Fact(16, "experts", f"{K3_REPORT}, Table 1")
    shared_experts = Fact(2, "experts", f"{K3_REPORT}, Table 1")
    sparsity = Fact(56, "x", f"{K3_REPORT}, section 2.3 (896 / 16)")
    times_testbed = Fact(58, "x", "2.78T against the 48B of Kimi Linear, rounded")
    context = Fact(1_048_576, "tokens", "released config.json")
    attn_res_blocks = Fact(8, "blocks", f"{K3_REPORT}, section 2.2 (and the embedding: 9 sources)")
    mtp_layers = Fact(1, "layers", f"{K3_REPORT}, Table 1 (pre-training; the released config has none)")
    draft_unroll_steps = Fact(7, "steps", f"{K3_REPORT}, section 4.1.4")
    vision_parameters = Fact(401e6, "parameters", f"{K3_REPORT}, section 2.4")
    vision_layers = Fact(27, "layers", f"{K3_REPORT}, section 2.4")
    scaling_efficiency = Fact(2.5, "x", f"{K3_REPORT}, section 3 and Figure 7 (against Kimi K2)")
    expert_bits = Fact(4.25, "bits a weight", "MXFP4: 4-bit elements, one 8-bit scale for 32 of them; OCP Microscaling, arXiv 2310.10537")
    download_bytes = Fact(1.56e12, "bytes", "size of the released checkpoint (1.42 TiB)")
    weight_decay = Fact(0.1, "", f"{K3_REPORT}, section 3.3")
    warmup = Fact(0.01, "share of steps", f"{K3_REPORT}, section 3.3")
    specialists = Fact(9, "experts", f"{K3_REPORT}, section 4.1 (3 domains x 3 efforts)")
    license = Fact("Kimi K3 License", "", "model card: neither MIT nor Apache 2.0")
    balancing_example = Table(
        ("E1", "E2", "E3", "E4"),
        (
            (32, 12, 5, 4), (16, 31, 7, 8), (14, 21, 5, 20), (32, 14, 7, 6),
            (21, 12, 5, 20), (18, 31, 13, 4), (22, 10, 21, 2), (16, 8, 21, 12),
        ),
        "bar lengths", f"{K3_REPORT}, Figure 5 (8 tokens, 4 experts; lengths of the drawn bars, the report prints no numbers)",
    )  # fmt: skip
    context_curriculum = Table(
        ("phase", "from", "to"), (("pre-training", 8192, 65536), ("cooldown", 262_144, 1_048_576)), "tokens", f"{K3_REPORT}, section 3"
    )


class K2:
    """Kimi K2, July 2025."""

    total_parameters = Fact(1.04e12, "parameters", f"{K3_REPORT}, Table 1")
    active_parameters = Fact(32.6e9, "parameters", f"{K3_REPORT}, Table 1")
    layers = Fact(61, "layers, all MLA", f"{K3_REPORT}, Table 1")
    hidden_size = Fact(7168, "channels", f"{K3_REPORT}, Table 1")
    heads = Fact(64, "heads", f"{K3_REPORT}, Table 1")
    routed_experts = Fact(384, "experts", f"{K3_REPORT}, Table 1")
    active_experts = Fact(8, "experts", f"{K3_REPORT}, Table 1")
    shared_experts = Fact(1, "experts", f"{K3_REPORT}, Table 1")
    expert_width = Fact(2048, "channels", f"{K3_REPORT}, Table 1")
    context = Fact(131_072, "tokens", f"{K3_REPORT}, Table 1")


class KimiLinear:
    """Kimi-Linear-48B-A3B, October 2025, against its twin with MLA in every layer: same data, size and recipe."""

    total_parameters = Fact(48e9, "parameters", KIMI_LINEAR_PAPER)
    active_parameters = Fact(3e9, "parameters", KIMI_LINEAR_PAPER)
    training_tokens = Fact(1.4e12, "tokens", f"{KIMI_LINEAR_PAPER}, comparison with the twin")
    kv_cache_saving = Fact(0.75, "share, at most", f"{KIMI_LINEAR_PAPER}, abstract")
    tpot_hybrid = Fact(1.84, "ms a token", f"{KIMI_LINEAR_PAPER}, at 1M tokens")
    tpot_twin = Fact(11.48, "ms a token", f"{KIMI_LINEAR_PAPER}, at 1M tokens")
    tpot_speedup = Fact(6.3, "x", f"{KIMI_LINEAR_PAPER}, at 1M tokens, larger batches in the freed memory")
    decode_speedup_128k = Fact(3.98, "x", f"{KIMI_LINEAR_PAPER}, at 128K tokens")
    ruler_128k = Fact(84.3, "points", f"{KIMI_LINEAR_PAPER}, RULER at 128K tokens")
    ruler_128k_twin = Fact(81.3, "points", f"{KIMI_LINEAR_PAPER}, RULER at 128K tokens")
    batch1_decode_speedup_1m = Fact(2.2, "x", f"{KIMI_LINEAR_PAPER}, Figure 7 (the text of section 6.3 says 2.3)")
    batch1_decode_speedup_512k = Fact(1.8, "x", f"{KIMI_LINEAR_PAPER}, Figure 7")
    prefill_speedup_1m = Fact(2.9, "x", f"{KIMI_LINEAR_PAPER}, Figure 7")
    prefill_speedup_512k = Fact(2.3, "x", f"{KIMI_LINEAR_PAPER}, Figure 7")
    scaling_advantage = Fact(1.16, "x compute", f"{KIMI_LINEAR_PAPER}, scaling law")
    scaling_law = Table(
        ("model", "a", "b"),
        (("MLA", 2.3092, -0.0536), ("Kimi Linear", 2.2879, -0.0527)),
        "loss = a C^b", f"{KIMI_LINEAR_PAPER}, scaling law",
    )  # fmt: skip
    longer_training_ruler = Table(
        ("tokens of context", "score"),
        ((131_072, 95.4), (1_048_576, 94.8)),
        "RULER points", f"{KIMI_LINEAR_PAPER}, model trained on 5.7T tokens",
    )  # fmt: skip
    ratio_ablation = Table(
        ("KDA:MLA", "train", "validation"),
        (("3:1", 9.23, 5.65), ("0:1", 9.45, 5.77), ("1:1", 9.29, 5.66), ("7:1", 9.23, 5.70), ("15:1", 9.34, 5.82)),
        "perplexity", f"{KIMI_LINEAR_PAPER}, ablation (16 layers, 16 heads)",
    )  # fmt: skip
    component_ablation = Table(
        ("variant", "train", "validation"),
        (("as published", 9.23, 5.65), ("no output gate", 9.25, 5.67), ("swish output gate", 9.43, 5.81), ("no convolution", 9.29, 5.70)),
        "perplexity", f"{KIMI_LINEAR_PAPER}, ablation (16 layers, 16 heads)",
    )  # fmt: skip
    long_context = Table(
        ("benchmark", "MLA", "Gated DeltaNet hybrid", "Kimi Linear with RoPE", "Kimi Linear"),
        (
            ("RULER", 81.3, 80.5, 78.8, 84.3),
            ("MRCR", 22.6, 23.9, 22.0, 29.6),
            ("HELMET-ICL", 88.0, 85.5, 88.0, 90.0),
            ("LongBench v2", 36.1, 32.6, 35.4, 35.0),
            ("Frames", 60.5, 58.7, 59.9, 58.8),
            ("RepoQA", 63.0, 63.0, 66.5, 68.5),
            ("Long Code Arena, library", 32.8, 34.7, 31.3, 37.1),
            ("Long Code Arena, commit", 33.2, 30.5, 32.5, 32.7),
            ("average", 52.2, 51.2, 51.8, 54.5),
        ),
        "points", f"{KIMI_LINEAR_PAPER}, 128K tokens",
    )  # fmt: skip
    mmlu_pro = Table(
        ("MLA", "Gated DeltaNet hybrid", "Kimi Linear with RoPE", "Kimi Linear"), ((47.2, 47.9, None, 51.0),), "points", KIMI_LINEAR_PAPER
    )
    synthetic_lengths = Fact("256 to 2048", "tokens", f"{KIMI_LINEAR_PAPER}, Figure 4 (palindrome, MQAR, stack; curves only)")


class DeepSeekV2:
    """Multi-head latent attention's first model, against DeepSeek 67B; the head sizes are those of V2 and V3."""

    kv_cache_saving = Fact(0.933, "share", f"{DEEPSEEK_V2_PAPER}, abstract")
    throughput_gain = Fact(5.76, "x, at most", f"{DEEPSEEK_V2_PAPER}, abstract")
    numbers_before = Fact(32_768, "numbers a token and layer", f"{DEEPSEEK_V2_PAPER} (128 heads of 128 + 128)")
    numbers_after = Fact(576, "numbers a token and layer", f"{DEEPSEEK_V2_PAPER} (512 + 64)")


class AttentionResiduals:
    """Mixing earlier outputs with learned weights, against the plain residual sum."""

    compute_advantage = Fact(1.25, "x compute", f"{ATTN_RES_PAPER}, at 5.6 PFLOP/s-days (loss 1.692 against 1.714)")
    training_overhead = Fact(0.04, "share, less than", f"{ATTN_RES_PAPER}, pipeline parallel")
    inference_overhead = Fact(0.02, "share, less than", ATTN_RES_PAPER)
    scaling_law = Table(
        ("residuals", "a", "b"),
        (("plain", 1.891, -0.057), ("block", 1.870, -0.058), ("full", 1.865, -0.057)),
        "loss = a C^b", ATTN_RES_PAPER,
    )  # fmt: skip
    validation_loss = Table(
        ("parameters", "plain", "block", "full"),
        (
            (194e6, 1.931, 1.909, 1.899),
            (241e6, 1.895, 1.875, 1.874),
            (296e6, 1.829, 1.809, 1.804),
            (436e6, 1.766, 1.746, 1.737),
            (528e6, 1.719, 1.693, 1.692),
        ),
        "validation loss", f"{ATTN_RES_PAPER}, five sizes",
    )  # fmt: skip
    ablation = Table(
        ("variant", "loss"),
        (
            ("plain residuals", 1.766), ("DenseFormer", 1.767), ("mHC", 1.747), ("full", 1.737), ("full, query from the input", 1.731),
            ("full, mixing without the input", 1.749), ("full, sigmoid for softmax", 1.741), ("full, no RMSNorm", 1.743),
            ("window of 8 and the embedding", 1.764), ("block of 4", 1.746), ("block, 16 heads", 1.752), ("block, no RMSNorm", 1.750),
        ),
        "validation loss", f"{ATTN_RES_PAPER}, ablation (436M parameters)",
    )  # fmt: skip
    block_size = Table(
        ("sublayers in a block", "loss"),
        (("2 to 8", "1.746 to 1.748"), ("16", 1.753), ("32", 1.757)),
        "validation loss, rounded", ATTN_RES_PAPER,
    )  # fmt: skip
    downstream = Table(
        ("benchmark", "plain", "Attention Residuals"),
        (
            ("MMLU", 73.5, 74.6), ("GPQA-Diamond", 36.9, 44.4), ("BBH", 76.3, 78.0), ("Math", 53.5, 57.1), ("HumanEval", 59.1, 62.2),
            ("MBPP", 72.0, 73.9), ("C-Eval", 79.6, 82.5), ("MMLU-Pro", 52.2, 52.2),
        ),
        "points", f"{ATTN_RES_PAPER}, 48B model, 1.4T tokens",
    )  # fmt: skip


# ---- use ----
class Serving:
    """What a token costs, and what a cached prefix saves."""

    input_price = Fact(3.00, "$ per million tokens", PRICE_PAGE)
    cached_price = Fact(0.30, "$ per million tokens", PRICE_PAGE)
    output_price = Fact(15.00, "$ per million tokens", PRICE_PAGE)
    coding_hit_rate = Fact(0.90, "share of input tokens, more than", "Moonshot AI, for coding workloads, as cited in press")
    hash_block = Fact(512, "tokens", f"{K3_REPORT}, section 5.4.1, example")
    physical_block = Fact(6144, "tokens", f"{K3_REPORT}, section 5.4.1, example")
    matching_prefix = Fact(2800, "tokens", f"{K3_REPORT}, Figure 12, example")
    resumed_at = Fact(2560, "tokens", f"{K3_REPORT}, Figure 12, example")
    other_prices = Table(
        ("model", "input", "cached", "output"),
        (("Kimi K2.5", 0.60, 0.10, 3.00), ("Kimi K2.6", 0.95, 0.16, 4.00), ("Kimi K2.7 Code", 0.95, 0.19, 4.00)),
        "$ per million tokens", OTHER_PRICES,
    )  # fmt: skip


class Standing:
    """K3 on third-party leaderboards (report Table 5) and in the report's own suite."""

    third_party = Table(
        ("leaderboard", "score", "rank", "of"),
        (("Artificial Analysis Index", 57.1, 4, 580), ("WebDev Arena", 1678, 1, 99), ("Text Arena", 1486, 8, 200)),
        "points", f"{K3_REPORT}, Table 5",
    )  # fmt: skip
    long_context_recall = Fact(74.7, "points", f"{K3_REPORT}, AA-LCR")


@cache
def benchmarks() -> dict[str, Table]:
    """Figure 1 of the K3 report in its order: the benchmark's name, then (model, score) rows with the best model first."""
    data = _packaged("k3_benchmarks.json")
    return {
        name: Table(("model", "score"), tuple(scores.items()), "Elo" if "Elo" in name else "points", data["source"])
        for name, scores in data["benchmarks"].items()
    }


@cache
def lineage() -> Table:
    """Every component of K3: what it does, what it grew from, and the work that introduced it."""
    data = _packaged("lineage.json")
    return Table(tuple(data["columns"]), tuple(map(tuple, data["rows"])), "", "the source column")


@cache
def timeline() -> Table:
    """The models on the way to K3: name, month, size or what was new."""
    rows = tuple(map(tuple, _packaged("lineage.json")["timeline"]))
    return Table(("model", "month", "what"), rows, "", f"{K3_REPORT}; {KIMI_LINEAR_PAPER}; Moonshot AI announcements")


def _packaged(name: str) -> dict:
    return json.loads(resources.files("minimodel").joinpath("released", name).read_text())


# ---- dimensions of models that K3 is compared with ----
def _all_mla(*, vocab_size: int, heads: int, dense_layers: int, experts: int) -> K3Config:
    """Kimi K2 and DeepSeek-V3 differ in these four numbers only. Both rotate the 64 extra channels (RoPE), which costs nothing."""
    return K3Config(
        vocab_size=vocab_size, hidden_size=7168, num_hidden_layers=61,
        linear_attn_config=LinearAttnConfig(kda_layers=(), full_attn_layers=tuple(range(1, 62))),
        num_attention_heads=heads, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        mla_use_output_gate=False, intermediate_size=18432, first_k_dense_replace=dense_layers, moe_intermediate_size=2048,
        num_experts=experts, num_experts_per_token=8, num_shared_experts=1, hidden_act="silu", attn_res_block_size=None,
    )  # fmt: skip


def kimi_k2_dimensions() -> K3Config:
    """Kimi K2's sizes (source: ``KIMI_K2_CONFIG``), for ``cache_bytes`` and ``flops``: to count with, not to run, since K2 uses RoPE."""
    return _all_mla(vocab_size=163840, heads=64, dense_layers=1, experts=384)


def deepseek_v3_dimensions() -> K3Config:
    """DeepSeek-V3's sizes (source: ``DEEPSEEK_V3_PAPER``), for ``cache_bytes``, ``parameter_budget`` and ``flops``: to count with,
    not to run."""
    return _all_mla(vocab_size=129280, heads=128, dense_layers=3, experts=256)
