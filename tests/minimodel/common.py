"""What the tests of the model share: golden arrays, how far two results are apart, a small K3 with nothing left at zero."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch

from minimodel.config import K3Config, LinearAttnConfig
from minimodel.model import K3ForCausalLM

FOLDER = Path(__file__).parents[1] / "golden"


class Golden:
    """One file of golden arrays as tensors, by the name under which it stores them."""

    def __init__(self, file):
        self._arrays = np.load(FOLDER / f"{file}.npz")

    def __getitem__(self, name):
        return torch.from_numpy(self._arrays[name].copy())

    def __contains__(self, name):
        return name in self._arrays.files

    def config(self, name="config/json"):
        return json.loads(bytes(self._arrays[name]))

    def under(self, prefix):
        """All arrays below a prefix, by the rest of their names."""
        return {name.removeprefix(prefix): self[name] for name in self._arrays.files if name.startswith(prefix)}


@cache
def golden(file):
    return Golden(file)


def assert_within(actual, expected, tolerance):
    """The largest difference, relative to the largest number of ``expected``, is at most ``tolerance``."""
    assert actual.shape == expected.shape
    actual, expected = actual.detach().double(), expected.detach().double()
    error = float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    assert error <= tolerance, f"relative error {error:.2e} exceeds {tolerance:.0e}"


def tiny_config(**changes):
    """KDA, KDA, MLA, KDA, MLA; a dense layer, four mixtures of experts, a short last residual block; every width different."""
    lin = LinearAttnConfig(kda_layers=(1, 2, 4), full_attn_layers=(3, 5), num_heads=2, head_dim=8)
    return K3Config(
        vocab_size=23, hidden_size=20, num_hidden_layers=5, linear_attn_config=lin, num_attention_heads=3, q_lora_rank=9,
        kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, intermediate_size=28, moe_intermediate_size=7,
        num_experts=6, num_experts_per_token=2, routed_expert_hidden_size=12, attn_res_block_size=2,
    ).replace(**changes)  # fmt: skip


def tiny_model(seed=0, *, dtype=torch.float64, **changes):
    """A model whose every parameter is drawn, those that start at zero or one included, so that no part hides another's mistake."""
    model = K3ForCausalLM(tiny_config(**changes)).to(dtype)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=draw, dtype=dtype) * (0.3 if p.dim() > 1 or "bias" in name or "A_log" in name else 0.2))
            if "norm" in name:
                p += 1
        for router in model.routers():
            router.e_score_correction_bias.copy_(torch.randn(router.e_score_correction_bias.shape, generator=draw) * 0.1)
    return model.eval()


def tokens(B, T, seed=0, vocab=23):
    return torch.randint(0, vocab, (B, T), generator=torch.Generator().manual_seed(seed))
