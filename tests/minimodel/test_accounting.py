"""Closed forms against published counts, against the module itself, and against torch's own operation counter."""

import re
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minimodel import facts
from minimodel.accounting import (
    cache_bytes,
    expert_parameters,
    flops,
    mixer_parameters,
    parameter_budget,
    row_numbers,
    weight_bytes,
    with_mixer,
)
from minimodel.accounting.report import PRESETS, report
from minimodel.baselines import BASELINES
from minimodel.config import K3Config
from minimodel.formats import format_bytes, format_count
from minimodel.model import K3ForCausalLM

MILLION_TOKENS = 1_048_576


def test_k3_exact_counts():
    budget = parameter_budget(K3Config.k3())
    assert budget.total == 2_779_484_476_000
    assert budget.active == 104_189_612_640
    assert budget.active_with_embedding == 105_364_017_760


def test_kimi_linear_exact_counts():
    budget = parameter_budget(K3Config.kimi_linear_48b())
    assert budget.total == 49_122_681_728
    assert budget.active == 3_106_972_544
    assert budget.active_without_tables == 2_729_485_184


def test_k3_layers_in_millions():
    config = K3Config.k3()
    assert round(mixer_parameters(config, "kda") / 1e6, 2) == 443.74
    assert round(mixer_parameters(config, "mla") / 1e6, 2) == 232.20
    assert round(expert_parameters(config) / 1e6, 2) == 33.03


def test_counts_round_to_the_published_ones():
    k3, kimi_linear = parameter_budget(K3Config.k3()), parameter_budget(K3Config.kimi_linear_48b())
    assert round(k3.total / 1e12, 2) * 1e12 == facts.K3.total_parameters.value
    assert round(k3.active / 1e9, 1) * 1e9 == facts.K3.active_parameters.value
    assert round(kimi_linear.active / 1e9) * 1e9 == facts.KimiLinear.active_parameters.value
    assert round(weight_bytes(K3Config.k3()) / 1e12, 2) * 1e12 == facts.K3.download_bytes.value


def test_deepseek_v3_is_671_billion():
    """A model that is not ours, by the same formula: 671B in all, 37B active (DeepSeek-V3, arXiv 2412.19437)."""
    budget = parameter_budget(facts.deepseek_v3_dimensions())
    assert round(budget.total / 1e9) == 671
    assert round(budget.active / 1e9) == 37


def component(config: K3Config, name: str) -> str:
    """Which line of the budget a tensor of the model belongs to."""
    if "embed_tokens" in name:
        return "embedding"
    if "lm_head" in name:
        return "lm_head"
    if "self_attn." in name:
        return config.mixer(int(name.split(".")[2]))
    if "_res_norm" in name or "_res_proj" in name:
        return "attention_residuals"
    parts = {
        "routed_expert_": "latent_projections", "shared_experts": "shared_experts", "experts.w": "routed_experts",
        "block_sparse_moe.gate": "router", ".mlp.": "dense_mlp", "norm": "norms",
    }  # fmt: skip
    return next(label for piece, label in parts.items() if piece in name)


VARIANTS = [K3Config.mini().replace(linear_mixer=mixer) for mixer in (*BASELINES, "mla")]
VARIANTS += [
    K3Config.mini().replace(full_mixer="gqa", num_key_value_groups=1, tie_word_embeddings=True),
    K3Config.mini().replace(q_lora_rank=None, mla_use_output_gate=False, attn_res_block_size=None, routed_expert_hidden_size=None),
    K3Config.mini().replace(latent_moe_use_norm=False, first_k_dense_replace=3, num_shared_experts=0),
]


@pytest.mark.parametrize("config", [*(make() for make in PRESETS.values()), *VARIANTS], ids=[*PRESETS, *map(str, range(len(VARIANTS)))])
def test_budget_is_the_modules_own_count(config):
    with torch.device("meta"):
        model = K3ForCausalLM(config)
    counted: dict[str, int] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        label = component(config, name)
        counted[label] = counted.get(label, 0) + tensor.numel()
    assert counted == {name: n for name, n in parameter_budget(config).by_component.items() if n}


def test_gpu_presets_have_the_size_they_claim():
    assert 0.09e9 < parameter_budget(K3Config.small()).active < 0.11e9
    assert 0.9e9 < parameter_budget(K3Config.base()).active < 1.1e9


# Decode-time memory of the released models, from their dimensions: bytes a token and bytes at 2^20 tokens.
K3, KL, K2, V3 = K3Config.k3(), K3Config.kimi_linear_48b(), facts.kimi_k2_dimensions(), facts.deepseek_v3_dimensions()
MEMORY = {
    "K3": (K3, 27_648, 449_372_160),
    "K3 as MLA": (with_mixer(K3, "mla"), 107_136, 0),
    "K3 as MHA": (with_mixer(K3, "mha"), 4_571_136, 0),
    "K3 as GQA-8": (with_mixer(K3, "gqa", num_key_value_groups=8), 380_928, 0),
    "Kimi Linear": (KL, 8_064, 41_943_040 + 1_474_560),
    "Kimi Linear as MHA": (with_mixer(KL, "mha"), 442_368, 0),
    "Kimi Linear as GQA-8": (with_mixer(KL, "gqa", num_key_value_groups=8), 110_592, 0),
    "Kimi K2": (K2, 70_272, 0),
    "Kimi K2 as MHA": (with_mixer(K2, "mha"), 1_998_848, 0),
    "DeepSeek-V3": (V3, 70_272, 0),
    "DeepSeek-V3 as MHA": (with_mixer(V3, "mha"), 3_997_696, 0),
    "DeepSeek-V3 as GQA-8": (with_mixer(V3, "gqa", num_key_value_groups=8), 249_856, 0),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_of_released_models(name):
    config, per_token, fixed = MEMORY[name]
    cost = cache_bytes(config, MILLION_TOKENS)
    assert (cost.per_token, cost.fixed, cost.windowed) == (per_token, fixed, 0)
    assert cost.total == fixed + per_token * MILLION_TOKENS


def test_k3_break_even_lengths():
    """The fixed state costs as much as 16,253 tokens of its own MLA layers, and the hybrid wins over all-MLA from 5,653 tokens on."""
    hybrid, twin = (cache_bytes(config, 1) for config in (K3, with_mixer(K3, "mla")))
    assert hybrid.fixed // hybrid.per_token == 16_253
    assert hybrid.fixed // (twin.per_token - hybrid.per_token) == 5_653
    assert cache_bytes(K3, 5_653).total > cache_bytes(with_mixer(K3, "mla"), 5_653).total
    assert cache_bytes(K3, 5_654).total < cache_bytes(with_mixer(K3, "mla"), 5_654).total


def test_deepseek_latent_is_57_times_smaller():
    before, after = row_numbers(V3, "mha"), row_numbers(V3, "mla")
    assert (before, after) == (facts.DeepSeekV2.numbers_before.value, facts.DeepSeekV2.numbers_after.value)
    assert round(before / after) == 57


def test_window_stops_growing():
    config = with_mixer(K3Config.mini(), "sliding_window", sliding_window=10)
    sizes = [cache_bytes(config, tokens) for tokens in (1, 9, 10, 11, 5000)]
    row = sizes[0].windowed
    assert [size.total for size in sizes] == [row, 9 * row, 10 * row, 10 * row, 10 * row]
    assert all(size.per_token == size.fixed == 0 for size in sizes)


def test_batch_and_dtype_scale():
    one, many = cache_bytes(K3, 100), cache_bytes(K3, 100, batch=3, dtype=torch.float32)
    assert many.per_token == 6 * one.per_token
    state = 69 * 96 * 128**2 * 4
    assert many.fixed == 3 * (state + 2 * (one.fixed - state))  # states stay float32, convolution tails double


BAD_CACHE_ARGUMENTS = [{"tokens": 0}, {"tokens": 1.5}, {"tokens": True}, {"batch": 0}, {"dtype": torch.int8}, {"dtype": "bf16"}]


@pytest.mark.bad_input
@pytest.mark.parametrize("changes", BAD_CACHE_ARGUMENTS)
def test_cache_bytes_names_the_bad_argument(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=name):
        cache_bytes(K3, **{"tokens": 10, **changes})


@pytest.mark.bad_input
def test_flops_names_the_bad_argument():
    with pytest.raises(ValueError, match="tokens=0"):
        flops(K3, 0)


def test_kda_operator_flops_as_published():
    """6 T d^2 + 3 T C d + T C^2 a head and sequence (Kimi Linear, Eq. 13)."""
    T, C, d = 4096, 64, 128
    assert flops(K3, T).by_component["kda_operator"] * T == 69 * 96 * (6 * T * d**2 + 3 * T * C * d + T * C**2)


def test_attention_flops_approach_the_published_form():
    """2 T^2 d a head (Kimi Linear, Eq. 14), up to the diagonal that it rounds away."""
    T, config = 4096, with_mixer(K3Config.mini(), "mha")
    ours = flops(config, T).by_component["mha_operator"] * T
    assert ours == 9 * 4 * 2 * T * (T + 1) * 32


def test_window_flops_count_every_key_once():
    config, T = with_mixer(K3Config.mini(), "sliding_window", sliding_window=5), 13
    read = sum(min(i + 1, 5) for i in range(T))
    assert flops(config, T).by_component["sliding_window_operator"] * T == pytest.approx(9 * 4 * 2 * 2 * 32 * read, rel=1e-12)


def test_flops_against_torch():
    """torch counts the matrix products of a dense MHA model; it multiplies the masked half of the scores too."""
    T = 16
    config = with_mixer(K3Config.mini(), "mha", first_k_dense_replace=9).replace(attn_res_block_size=None)
    with FlopCounterMode(display=False) as counter:
        K3ForCausalLM(config)(torch.zeros(1, T, dtype=torch.long))
    ours = dict(flops(config, T).by_component)
    operator, norms = ours.pop("mha_operator"), ours.pop("norms")
    assert norms == 2 * config.hidden_size * 19  # elementwise: not among torch's matrix products
    assert counter.get_total_flops() == T * (sum(ours.values()) + operator * 2 * T / (T + 1))


def test_report_shows_published_beside_ours():
    text = report("k3")
    assert "2,779,484,476,000" in text and "104,189,612,640" in text
    line = next(line for line in text.splitlines() if line.startswith("active parameters"))
    assert "104.2B" in line and facts.K3.active_parameters.source in line
    assert "published" not in report("mini")


def test_report_writes_numbers_as_everything_else_does():
    config = K3Config.k3()
    k3, linear = (re.sub(" +", " ", report(name)) for name in ("k3", "kimi_linear_48b"))
    assert f"\n1,048,576 tokens {format_bytes(cache_bytes(config, 1_048_576).total)} " in k3
    assert f"\nall parameters {format_count(parameter_budget(config).total)} 2.78T parameters" in k3
    assert "\ncache growth saved 0.74 0.75 share" in linear


@pytest.mark.bad_input
def test_report_of_an_unknown_model():
    with pytest.raises(ValueError, match="name must be one of .*'k4'"):
        report("k4")


def test_command_line():
    done = subprocess.run([sys.executable, "-m", "minimodel.accounting", "--model", "kimi_linear_48b"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == report("kimi_linear_48b")
