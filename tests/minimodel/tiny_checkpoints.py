"""A tiny model and its tensors under released names, for the checkpoint tests."""

import torch

from minimodel.config import K3Config, LinearAttnConfig
from minimodel.model import K3ForCausalLM
from minimodel.mxfp4 import dequantize_mxfp4, quantize_mxfp4

A_LOG, W1 = "model.layers.0.self_attn.A_log", "model.layers.1.block_sparse_moe.experts.2.w1.weight"


def tiny_config(**changes):
    lin = LinearAttnConfig(kda_layers=(1,), full_attn_layers=(2,), num_heads=2, head_dim=8)
    return K3Config(
        vocab_size=11, hidden_size=16, num_hidden_layers=2, linear_attn_config=lin, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8, intermediate_size=24, num_experts=4, routed_expert_hidden_size=32, moe_intermediate_size=32,
    ).replace(**changes)  # fmt: skip


def tiny_model(seed=0, **changes):
    """Every weight different from its neighbors, zeros and ones of the initialization included."""
    model = K3ForCausalLM(tiny_config(**changes))
    draw = torch.Generator().manual_seed(seed)
    for t in model.state_dict().values():
        t.copy_(torch.randn(t.shape, generator=draw))
    return model


def on_grid(model):
    for name, p in model.named_parameters():
        if ".experts." in name:
            p.data = dequantize_mxfp4(*quantize_mxfp4(p.data))
    return model


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def released(model):
    """The model's tensors under released names, written here by hand."""
    out = {}
    for key, t in model.state_dict().items():
        if ".experts.w" in key:
            stem, letter = key.rsplit(".", 1)
            out |= {f"{stem}.{e}.{letter}.weight": t[e].clone() for e in range(len(t))}
        else:
            out[key] = t.clone()
    return out
