"""Configurations: the released ones, the released format, and values that cannot work."""

import dataclasses
import json

import pytest

from minimodel import K3Config
from minimodel.config import LinearAttnConfig, hybrid_pattern
from tests.minimodel.common import golden, tiny_config

PRESETS = ("meeting", "mini", "small", "base", "kimi_linear_48b", "k3")


PUBLISHED = {  # report Table 1 and the released files, typed here once more
    "k3": {
        "num_hidden_layers": 93, "hidden_size": 7168, "vocab_size": 163840, "intermediate_size": 33792, "num_attention_heads": 96,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
        "mla_use_output_gate": True, "first_k_dense_replace": 1, "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2,
        "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True, "moe_renormalize": True,
        "routed_scaling_factor": 1.0, "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 12, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "linear_mixer": "kda", "full_mixer": "mla",
    },
    "kimi_linear_48b": {
        "num_hidden_layers": 27, "hidden_size": 2304, "vocab_size": 163840, "intermediate_size": 9216, "num_attention_heads": 32,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
        "mla_use_output_gate": False, "first_k_dense_replace": 1, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
        "moe_intermediate_size": 1024, "routed_expert_hidden_size": None, "moe_renormalize": True, "routed_scaling_factor": 2.446,
        "hidden_act": "silu", "attn_res_block_size": None, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
}  # fmt: skip
PUBLISHED_LINEAR = {
    "k3": LinearAttnConfig(tuple(i for i in range(1, 93) if i % 4), (*range(4, 93, 4), 93), 96, 128, 4, True, -5.0),
    "kimi_linear_48b": LinearAttnConfig(tuple(i for i in range(1, 27) if i % 4), (*range(4, 27, 4), 27), 32, 128, 4, False, None),
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_released_models_are_the_published_ones(preset):
    config = getattr(K3Config, preset)()
    assert {name: getattr(config, name) for name in PUBLISHED[preset]} == PUBLISHED[preset]
    assert config.linear_attn_config == PUBLISHED_LINEAR[preset]


@pytest.mark.parametrize("layers, kda, full", [
    (4, (1, 2, 3), (4,)), (5, (1, 2, 3), (4, 5)), (9, (1, 2, 3, 5, 6, 7), (4, 8, 9)), (1, (), (1,)), (2, (1,), (2,)),
])  # fmt: skip
def test_three_to_one_and_the_last_layer(layers, kda, full):
    assert hybrid_pattern(layers) == (kda, full)


def test_the_pattern_of_the_released_models():
    assert hybrid_pattern(93)[1] == K3Config.k3().linear_attn_config.full_attn_layers
    assert hybrid_pattern(27)[1] == K3Config.kimi_linear_48b().linear_attn_config.full_attn_layers


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_survive_the_released_format(preset, tmp_path):
    c = getattr(K3Config, preset)()
    assert K3Config.from_hf(c.to_hf()) == c
    text = json.dumps(c.to_hf())
    (tmp_path / "config.json").write_text(text)
    assert K3Config.from_hf(tmp_path) == K3Config.from_hf(tmp_path / "config.json") == K3Config.from_hf(str(tmp_path)) == c
    assert K3Config.from_hf({"text_config": c.to_hf(), "vision_config": {}}) == c
    assert hash(c) == hash(K3Config.from_hf(json.loads(text)))


@pytest.mark.parametrize("preset", ("meeting", "mini", "small", "base"))
def test_our_presets_keep_every_part_of_k3(preset):
    c = getattr(K3Config, preset)()
    assert c.linear_attn_config.head_dim == 128 and c.linear_attn_config.gate_lower_bound == -5.0
    assert not c.is_kda_layer(c.num_hidden_layers - 1) and not c.is_moe_layer(0) and c.is_moe_layer(1)
    assert c.routed_expert_hidden_size * 2 == c.hidden_size and c.num_shared_experts == 2 and c.attn_res_block_size


def test_layers_are_asked_by_number():
    c = tiny_config(first_k_dense_replace=2, linear_mixer="mha", full_mixer="kda")
    assert [c.is_kda_layer(i) for i in range(5)] == [True, True, False, True, False]
    assert [c.is_moe_layer(i) for i in range(5)] == [False, False, True, True, True]
    assert [c.mixer(i) for i in range(5)] == ["mha", "mha", "kda", "mha", "kda"]
    assert [tiny_config(moe_layer_freq=2).is_moe_layer(i) for i in range(5)] == [False, False, True, False, True]


def test_keys_of_a_released_file_that_say_nothing_are_ignored():
    released = {**golden("kimi_k3_tiny").config(), "architectures": ["X"], "use_cache": True, "dtype": "bfloat16"}
    assert K3Config.from_hf(released) == K3Config.from_hf(golden("kimi_k3_tiny").config())


def test_what_a_plain_kimi_linear_file_leaves_out():
    """Where K3's own keys are absent: plain residuals, SwiGLU, no MLA gate, the low-rank gate and the unbounded decay."""
    released = K3Config.kimi_linear_48b().to_hf()
    for key in ("attn_res_block_size", "hidden_act", "mla_use_output_gate"):
        del released[key]
    for key in ("use_full_rank_gate", "gate_lower_bound"):
        del released["linear_attn_config"][key]
    assert K3Config.from_hf(released) == K3Config.kimi_linear_48b()


def test_ours_never_leave():
    assert not {"linear_mixer", "full_mixer", "num_key_value_groups", "sliding_window"} & tiny_config(full_mixer="mha").to_hf().keys()


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_config().hidden_size = 3


# ---- values that cannot work ----


@pytest.mark.bad_input
@pytest.mark.parametrize("changes, words", [
    ({"num_experts_per_token": 7}, "num_experts_per_token=7 exceeds num_experts=6"),
    ({"num_experts_per_token": 0}, "num_experts_per_token must be a positive integer, got 0"),
    ({"attn_res_block_size": 0}, "attn_res_block_size must be a positive integer, got 0"),
    ({"hidden_size": -4}, "hidden_size must be a positive integer, got -4"),
    ({"vocab_size": 2.5}, "vocab_size must be a positive integer, got 2.5"),
    ({"num_attention_heads": True}, "num_attention_heads must be a positive integer, got True"),
    ({"q_lora_rank": 0}, "q_lora_rank must be a positive integer, got 0"),
    ({"routed_expert_hidden_size": "64"}, "routed_expert_hidden_size must be a positive integer, got '64'"),
    ({"num_shared_experts": -1}, "num_shared_experts must be an integer >= 0, got -1"),
    ({"num_shared_experts": True}, "num_shared_experts must be an integer >= 0, got True"),
    ({"first_k_dense_replace": None}, "first_k_dense_replace must be an integer >= 0, got None"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps must be positive, got 0.0"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be positive, got '1e-5'"),
    ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor must be positive, got nan"),
    ({"initializer_range": float("inf")}, "initializer_range must be positive, got inf"),
    ({"activation_situ_linear_beta": 0}, "activation_situ_linear_beta must be positive or None, got 0"),
    ({"hidden_act": "gelu"}, "hidden_act must be 'situ' or 'silu', got 'gelu'"),
    ({"mla_use_nope": False}, "mla_use_nope=False is not supported: K3 has no rotary positions"),
    ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func must be 'sigmoid', got 'softmax'"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be True or False, got 'false'"),
    ({"linear_mixer": "rwkv"}, "linear_mixer must be one of"),
    ({"full_mixer": "mamba2"}, "full_mixer must be one of"),
    ({"full_mixer": "gqa"}, "num_attention_heads=3 must be a multiple of num_key_value_groups=2"),
    ({"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
    ({"num_hidden_layers": 6}, "must cover layers 1..6 (num_hidden_layers) exactly once"),
    ({"hidden": 3}, "unknown config field 'hidden'"),
    ({"linear_attn_config": None}, "linear_attn_config must be a LinearAttnConfig or a dict, got NoneType"),
    ({"linear_attn_config": {"heads": 3}}, "linear_attn_config: unknown key 'heads'"),
    ({"linear_attn_config": {"kda_layers": [1, 2, 3, 4], "full_attn_layers": [4, 5]}}, "must cover layers 1..5 (num_hidden_layers)"),
    ({"linear_attn_config": {"kda_layers": 3}}, "linear_attn_config.kda_layers must be a list of layer numbers, got 3"),
    ({"linear_attn_config": {"kda_layers": "123"}}, "linear_attn_config.kda_layers must be a list of layer numbers, got '123'"),
    ({"linear_attn_config": {"full_attn_layers": [4, "5"]}}, "full_attn_layers must be a list of layer numbers, got (4, '5')"),
])  # fmt: skip
def test_one_sentence_a_fault(changes, words):
    with pytest.raises(ValueError) as caught:
        tiny_config(**changes)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.bad_input
@pytest.mark.parametrize("changes, words", [
    ({"head_dim": 0}, "linear_attn_config.head_dim must be a positive integer, got 0"),
    ({"num_heads": -1}, "linear_attn_config.num_heads must be a positive integer, got -1"),
    ({"short_conv_kernel_size": 0}, "linear_attn_config.short_conv_kernel_size must be a positive integer, got 0"),
    ({"gate_lower_bound": -6.0}, "linear_attn_config.gate_lower_bound must lie in [-5, 0) or be None (softplus gate), got -6.0"),
    ({"gate_lower_bound": 0.0}, "linear_attn_config.gate_lower_bound must lie in [-5, 0) or be None"),
    ({"gate_lower_bound": "low"}, "linear_attn_config.gate_lower_bound must lie in [-5, 0) or be None (softplus gate), got 'low'"),
])  # fmt: skip
def test_one_sentence_a_fault_in_the_linear_part(changes, words):
    with pytest.raises(ValueError) as caught:
        LinearAttnConfig(**changes)
    assert words in str(caught.value)


@pytest.mark.bad_input
@pytest.mark.parametrize("changes, words", [
    ({"mla_use_nope": False}, "mla_use_nope=False is not supported: K3 has no rotary positions"),
    ({"num_expert_group": 8}, "num_expert_group=8 is not supported"),
    ({"topk_group": 2}, "topk_group=2 is not supported"),
    ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1 is not supported"),
    ({"num_key_value_heads": 1}, "num_key_value_heads=1 must equal num_attention_heads=3"),
    ({"vocab_size": None}, "vocab_size must be a positive integer, got None"),
    ({"linear_attn_config": None}, "linear_attn_config must be a LinearAttnConfig or a dict, got NoneType"),
    ({"text_config": 3}, "source: text_config must be a dict, got int"),
])  # fmt: skip
def test_a_released_file_we_cannot_honor(changes, words):
    with pytest.raises(ValueError) as caught:
        K3Config.from_hf({**tiny_config().to_hf(), **changes})
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.bad_input
@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "linear_attn_config"])
def test_a_released_file_without_a_key(key):
    source = tiny_config().to_hf()
    del source[key]
    with pytest.raises(ValueError, match=f"source: config has no '{key}'"):
        K3Config.from_hf(source)


@pytest.mark.bad_input
def test_files_that_are_no_config(tmp_path):
    with pytest.raises(ValueError, match="source: no config file at .*config.json"):
        K3Config.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="source: .*config.json is not JSON"):
        K3Config.from_hf(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="source: .*config.json is not JSON"):
        K3Config.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="source must hold a dict of config keys, got list"):
        K3Config.from_hf(tmp_path)
    for source in (None, 5):
        with pytest.raises(TypeError, match="source must be a dict or a path, got"):
            K3Config.from_hf(source)
