"""Per-Head Muon against torch's, Moonlight's and NVIDIA's; its groups against the model's own parameters."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minimodel.config import K3Config, LinearAttnConfig
from minimodel.model import K3ForCausalLM
from minimodel.muon import PerHeadMuon, clip_query_key, newton_schulz, parameter_groups

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "muon.npz")
SIZES = ["64x16", "16x64"]


def golden(name):
    return torch.from_numpy(GOLDEN[name])


def tiny_model(**changes):
    lin = LinearAttnConfig(kda_layers=(1,), full_attn_layers=(2,), num_heads=2, head_dim=16)
    config = K3Config(
        vocab_size=11, hidden_size=32, num_hidden_layers=2, linear_attn_config=lin, q_lora_rank=8, num_experts=4,
        routed_expert_hidden_size=16, moe_intermediate_size=8, num_key_value_groups=1,
    )  # fmt: skip
    return K3ForCausalLM(config.replace(**changes))


def draw_grads(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


# ---- Newton-Schulz ----


@pytest.mark.parametrize("size", ["16x16", *SIZES])
def test_newton_schulz_is_torchs_moonlights_and_nvidias(size):
    G = golden(f"ns/s{size}/G")
    torch.testing.assert_close(newton_schulz(G.double()), golden(f"ns/s{size}/torch_f64"), rtol=0, atol=1e-13)
    torch.testing.assert_close(newton_schulz(G), golden(f"ns/s{size}/emerging_f32_simple"), rtol=0, atol=5e-6)
    for theirs in ("torch_bf16", "moonlight_bf16"):  # bfloat16 keeps 8 bits, and rounds differently by product order
        torch.testing.assert_close(newton_schulz(G, dtype=torch.bfloat16), golden(f"ns/s{size}/{theirs}"), rtol=0, atol=0.06)


def test_heads_in_one_batch_are_heads_one_by_one():
    G = golden("per_head/grads")[0].view(4, 16, 64)
    torch.testing.assert_close(newton_schulz(G), golden("per_head/emerging_batched_of_grad0"), rtol=0, atol=5e-6)
    torch.testing.assert_close(newton_schulz(G.double()), torch.stack([newton_schulz(g) for g in G.double()]), rtol=0, atol=1e-13)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 99))
def test_singular_vectors_stay_and_values_come_near_one(m, n, seed):
    G = torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    X = newton_schulz(G, steps=12)  # enough steps for the smallest singular value of an unlucky draw
    U, S, Vh = torch.linalg.svd(G, full_matrices=False)
    middle = U.mT @ X @ Vh.mT
    assert (middle - middle.diagonal().diag()).abs().max() < 1e-6
    large = S / S.max() > 1e-3
    assert (middle.diagonal()[large] - 0.95).abs().max() < 0.32
    torch.testing.assert_close(newton_schulz(G.T, steps=12).T, X, rtol=0, atol=1e-9)


def test_newton_schulz_keeps_dtype_and_a_zero_matrix():
    assert newton_schulz(torch.zeros(2, 3, 4)).eq(0).all()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert newton_schulz(torch.ones(3, 4, dtype=dtype)).dtype == dtype


@pytest.mark.bad_input
def test_newton_schulz_refuses():
    with pytest.raises(ValueError, match=r"G must be matrices .*\[5\]"):
        newton_schulz(torch.ones(5))
    with pytest.raises(TypeError, match="G must be floating point, got torch.int64"):
        newton_schulz(torch.ones(5, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="steps must be a positive integer, got 0"):
        newton_schulz(torch.ones(5, 5), steps=0)


# ---- the optimizer ----


@pytest.mark.parametrize("size", SIZES)
def test_trajectory_is_torch_muons(size):
    grads, reference = golden(f"traj/torch_match_rms_{size}/grads").double(), golden(f"traj/torch_match_rms_{size}/params_f64")
    p = nn.Parameter(reference[0].clone())
    optimizer = PerHeadMuon([p], lr=0.002, weight_decay=0.1)
    for g, after in zip(grads, reference[1:], strict=True):
        p.grad = g
        optimizer.step()
        torch.testing.assert_close(p.detach(), after, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case, params, atol", [("default", "params_f64", 1e-13), ("nonesterov", "params_bf16", 1e-3)])
def test_other_scale_is_another_learning_rate(case, params, atol, size):
    """torch's older scale sqrt(max(1, A/B)) is ours with lr times ratio and decay over ratio."""
    grads, reference = golden(f"traj/torch_{case}_{size}/grads").double(), golden(f"traj/torch_{case}_{size}/{params}").double()
    A, B = reference.shape[1:]
    ratio = max(1, A / B) ** 0.5 / (0.2 * max(A, B) ** 0.5)
    p = nn.Parameter(reference[0].clone())
    momentum, decay = (0.95, 0.1) if case == "default" else (0.9, 0.0)
    optimizer = PerHeadMuon([p], lr=0.02 * ratio, weight_decay=decay / ratio, momentum=momentum, nesterov=case == "default")
    for g, after in zip(grads, reference[1:], strict=True):
        p.grad = g
        optimizer.step()
        torch.testing.assert_close(p.detach(), after, rtol=0, atol=atol)
    assert (reference[1] - reference[0]).abs().max() > 5 * atol  # the steps are larger than what is tolerated


@pytest.mark.parametrize("split, key", [(True, "torch_blocks_f64"), (False, "torch_full_f64")])
def test_per_head_is_one_torch_parameter_a_head(split, key):
    p = nn.Parameter(golden("per_head/W").double())
    optimizer = PerHeadMuon([{"params": [p], "heads": int(GOLDEN["per_head/num_heads"]) if split else 1}], lr=0.002)
    for g, after in zip(golden("per_head/grads").double(), golden(f"per_head/{key}"), strict=True):
        p.grad = g
        optimizer.step()
        torch.testing.assert_close(p.detach(), after, rtol=0, atol=1e-13)
    assert (golden("per_head/torch_blocks_f64") - golden("per_head/torch_full_f64")).abs().max() > 1e-4


def test_adamw_part_is_torchs():
    ours = [nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)), nn.Parameter(torch.ones(4, dtype=torch.float64))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    a = PerHeadMuon([{"params": ours, "method": "adamw"}], lr=0.01, weight_decay=0.1)
    b = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    for step in range(5):
        for x, y in zip(ours, theirs, strict=True):
            x.grad = torch.cos(x.detach() * (step + 1))
            y.grad = x.grad.clone()
        if step == 2:  # a parameter may sit out a step; its own count then stands still
            ours[1].grad = theirs[1].grad = None
        a.step()
        b.step()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-14)


def test_shapes_updated_together_are_shapes_updated_alone():
    """Batching across layers, orientations and experts must not mix anything up."""
    shapes = [(6, 4), (4, 6), (12, 4), (3, 4, 6), (2, 6, 4), (4, 4)]
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]
    grads = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]
    heads = [1, 2, 3, 1, 1, 2]

    def run(which):
        params = [nn.Parameter(start[i].clone()) for i in which]
        optimizer = PerHeadMuon([{"params": [p], "heads": heads[i]} for p, i in zip(params, which, strict=True)], lr=0.1)
        for p, i in zip(params, which, strict=True):
            p.grad = grads[i]
        optimizer.step()
        return [p.detach() for p in params]

    for i, together in enumerate(run(range(len(shapes)))):
        torch.testing.assert_close(together, run([i])[0], rtol=0, atol=1e-13)
    stack = run([3])[0]
    for e in range(3):  # an expert stack is its matrices
        one = nn.Parameter(start[3][e].clone())
        one.grad = grads[3][e]
        PerHeadMuon([one], lr=0.1).step()
        torch.testing.assert_close(stack[e], one.detach(), rtol=0, atol=1e-13)


def test_update_rms_is_near_a_fifth():
    torch.manual_seed(0)
    for shape in [(32, 32), (32, 96), (96, 32), (4, 24, 48)]:
        p = nn.Parameter(torch.zeros(shape))
        p.grad = torch.randn(shape)
        PerHeadMuon([p], lr=1.0).step()
        assert 0.14 < p.detach().square().mean().sqrt() < 0.23


def test_groups_of_the_model():
    model = tiny_model()
    where = {}
    for group in parameter_groups(model, weight_decay=0.1):
        for name, p in group["params"]:
            assert name not in where and p is dict(model.named_parameters())[name]
            where[name] = (group["method"], group["heads"], group["weight_decay"])
    assert where.keys() == dict(model.named_parameters()).keys()
    kda, mla, moe = "model.layers.0.self_attn.", "model.layers.1.self_attn.", "model.layers.1.block_sparse_moe."
    for name in (f"{kda}q_proj", f"{kda}k_proj", f"{kda}v_proj", f"{mla}q_b_proj", f"{mla}kv_b_proj"):
        assert where[f"{name}.weight"] == ("muon", 2, 0.1)
    for name in (f"{kda}o_proj.weight", f"{kda}g_proj.weight", f"{mla}q_a_proj.weight", f"{moe}gate.weight", f"{moe}experts.w2"):
        assert where[name] == ("muon", 1, 0.1)
    for name in ("model.embed_tokens.weight", "lm_head.weight", f"{kda}q_conv1d.weight"):
        assert where[name] == ("adamw", 1, 0.1)
    for name in (f"{kda}A_log", f"{kda}dt_bias", f"{kda}o_norm.weight", "model.layers.0.mlp_res_proj.weight", "model.norm.weight"):
        assert where[name] == ("adamw", 1, 0.0)


def test_groups_of_other_models():
    direct = {n: g["heads"] for g in parameter_groups(tiny_model(q_lora_rank=None)) for n, _ in g["params"]}
    assert direct["model.layers.1.self_attn.q_proj.weight"] == 2
    grouped = {n: g["heads"] for g in parameter_groups(tiny_model(full_mixer="gqa")) for n, _ in g["params"]}
    assert grouped["model.layers.1.self_attn.q_proj.weight"] == 2 and grouped["model.layers.1.self_attn.k_proj.weight"] == 1
    frozen = tiny_model()
    frozen.model.embed_tokens.requires_grad_(False)
    assert "model.embed_tokens.weight" not in {n for g in parameter_groups(frozen) for n, _ in g["params"]}
    with pytest.raises(ValueError, match="no trainable parameters"):
        parameter_groups(tiny_model().requires_grad_(False))


def test_state_dict_continues_the_run_exactly():
    models = [tiny_model(), tiny_model()]
    optimizers = [PerHeadMuon(m, lr=0.01) for m in models]
    for step in range(2):
        draw_grads(models[0], step)
        optimizers[0].step()
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))  # torch shares tensors otherwise
    for model, optimizer in zip(models, optimizers, strict=True):
        draw_grads(model, 2)
        optimizer.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_closure_and_scheduler():
    p = nn.Parameter(torch.ones(3, 3))
    optimizer = PerHeadMuon([p], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 9.0
    assert torch.equal(p, torch.ones(3, 3))  # the schedule has set lr to zero
    schedule.step()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "options, message",
    [
        ({"lr": -1.0}, "lr must be >= 0, got -1.0"),
        ({"lr": 0.1, "weight_decay": -0.1}, "weight_decay must be >= 0, got -0.1"),
        ({"lr": 0.1, "momentum": 1.0}, r"momentum must lie in \[0, 1\), got 1.0"),
        ({"lr": 0.1, "betas": (0.9, 1.5)}, r"betas\[1\] must lie in \[0, 1\), got 1.5"),
    ],
)
def test_settings_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        PerHeadMuon([nn.Parameter(torch.ones(2, 2))], **options)


@pytest.mark.bad_input
def test_groups_that_cannot_work():
    with pytest.raises(ValueError, match=r"Muon takes matrices .*\[5\]; use method='adamw'"):
        PerHeadMuon([nn.Parameter(torch.ones(5))], lr=0.1)
    with pytest.raises(ValueError, match=r"heads=4 does not cut a parameter \[6, 2\]"):
        PerHeadMuon([{"params": [nn.Parameter(torch.ones(6, 2))], "heads": 4}], lr=0.1)
    with pytest.raises(ValueError, match="method must be one of .*'sgd'"):
        PerHeadMuon([{"params": [nn.Parameter(torch.ones(6, 2))], "method": "sgd"}], lr=0.1)


# ---- weight clipping ----


def test_clipping_scales_the_logits_of_loud_heads_only():
    H, nope, extra, value, rank = 3, 4, 2, 5, 6
    draw = torch.Generator().manual_seed(1)
    q = torch.randn(H * (nope + extra), rank, generator=draw, dtype=torch.float64)
    kv = torch.randn(H * (nope + value), rank, generator=draw, dtype=torch.float64)
    x, c, e = (torch.randn(7, n, generator=draw, dtype=torch.float64) for n in (rank, rank, extra))

    def logits_and_values(q, kv):
        qh = (x @ q.T).view(7, H, nope + extra)
        kh = (c @ kv.T).view(7, H, nope + value)
        k = torch.cat([kh[..., :nope], e[:, None].expand(7, H, extra)], -1)
        return torch.einsum("ihd,jhd->hij", qh, k), kh[..., nope:]

    before, values = logits_and_values(q, kv)
    loudest = before.amax((1, 2))
    threshold = float(loudest.median())
    gamma = clip_query_key(q, kv, loudest, nope_head_dim=nope, threshold=threshold)
    after, values_after = logits_and_values(q, kv)
    torch.testing.assert_close(gamma, (threshold / loudest).clamp_max(1.0))
    assert sorted((gamma < 1).tolist()) == [False, False, True]
    torch.testing.assert_close(after, before * gamma[:, None, None])
    assert torch.equal(values, values_after)


@pytest.mark.bad_input
def test_clipping_refuses():
    q, kv = torch.ones(12, 3), torch.ones(12, 3)
    with pytest.raises(ValueError, match="max_logits must be"):
        clip_query_key(q, kv, torch.tensor([1.0, torch.nan]), nope_head_dim=4)
    with pytest.raises(ValueError, match=r"q_weight \[12, 3\] needs H=5 groups"):
        clip_query_key(q, kv, torch.ones(5), nope_head_dim=1)
    with pytest.raises(ValueError, match="threshold must be positive, got 0"):
        clip_query_key(q, kv, torch.ones(2), nope_head_dim=4, threshold=0)
