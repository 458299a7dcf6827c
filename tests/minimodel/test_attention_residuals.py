"""Attention over depth: third-party numbers, full form, blocks of any size, two phases, and the start at a plain average."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimodel import attention_residual
from minimodel.attention_residuals import DepthSources, depth_weights, two_phase_read
from tests.minimodel.common import assert_within, golden, tiny_config, tiny_model, tokens


def draws(*shapes, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]


@pytest.mark.parametrize("case", ["l1", "l4"])
def test_golden(case):
    z = golden("attn_res")
    sources, query, gain = (z[f"{case}/{n}"].requires_grad_() for n in ("residuals", "query", "rms_weight"))
    eps = float(z[f"{case}/eps"])
    h = attention_residual(sources.movedim(0, -2), query, gain, eps)
    for theirs in ("out", "sglang_out", "vllm_out"):
        assert_within(h, z[f"{case}/{theirs}"], 2e-6)
    assert_within(depth_weights(sources.movedim(0, -2), query, gain, eps).T, z[f"{case}/weights"], 2e-6)
    h.backward(z[f"{case}/do"])
    assert_within(sources.grad, z[f"{case}/dresiduals"], 1e-4)
    if case == "l4":  # with one source there is nothing to choose: both gradients are zero up to rounding
        assert_within(query.grad, z[f"{case}/dquery"], 1e-4)
        assert_within(gain.grad, z[f"{case}/drms_weight"], 1e-4)
    else:
        assert query.grad.abs().max() < 1e-6 and gain.grad.abs().max() < 1e-6


def test_golden_block_form():
    """One read of the released K3: three stored blocks and the running prefix."""
    z = golden("kimi_k3_tiny").under("full/attn_res12/")
    stored, prefix, query, gain = z["block_residual"], z["prefix_sum"], z["proj_weight"][0], z["norm_weight"]
    assert_within(attention_residual(torch.cat([stored, prefix[:, None]], 1), query, gain), z["out"], 2e-6)
    assert_within(two_phase_read(stored, prefix, query, gain), z["out"], 2e-6)


@settings(max_examples=40)
@given(
    N=st.integers(1, 9), D=st.integers(1, 8), lead=st.lists(st.integers(1, 3), max_size=2), seed=st.integers(0, 10**6),
    size=st.sampled_from([0.1, 1, 30]),
)  # fmt: skip
def test_equation_source_by_source(N, D, lead, seed, size):
    sources, query, gain = draws((*lead, N, D), (D,), (D,), seed=seed)
    query = size * query
    scores = torch.stack([(query * gain * v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt()).sum(-1) for v in sources.unbind(-2)], -1)
    p = scores.exp() / scores.exp().sum(-1, keepdim=True) if size < 30 else scores.softmax(-1)
    expected = sum(p[..., i, None] * sources[..., i, :] for i in range(N))  # the values are not normalized
    torch.testing.assert_close(attention_residual(sources, query, gain), expected, rtol=1e-10, atol=1e-10)
    if N > 1:
        two = two_phase_read(sources[..., :-1, :], sources[..., -1, :], query, gain)
        torch.testing.assert_close(two, expected, rtol=1e-10, atol=1e-10)


def test_two_phases_survive_large_scores():
    sources, query, gain = draws((4, 3, 6), (6,), (6,))
    query = 1e3 * query
    h = attention_residual(sources, query, gain)
    assert bool(torch.isfinite(h).all())
    torch.testing.assert_close(two_phase_read(sources[:, :-1], sources[:, -1], query, gain), h)


@pytest.mark.parametrize("form", ["whole", "two phases"])
def test_finite_differences(form):
    arguments = [x.requires_grad_() for x in draws((2, 3, 4), (4,), (4,))]
    whole = attention_residual if form == "whole" else lambda v, w, g: two_phase_read(v[..., :-1, :], v[..., -1, :], w, g)
    assert torch.autograd.gradcheck(whole, arguments)


def test_zero_query_is_the_plain_average():
    sources, gain = draws((2, 5, 4), (4,))
    torch.testing.assert_close(attention_residual(sources, torch.zeros(4, dtype=torch.float64), gain), sources.mean(-2))


def test_bfloat16_scores_are_float32():
    sources, query, gain = draws((2, 5, 64), (64,), (64,))
    h = attention_residual(sources.bfloat16(), query.float(), gain.float())
    assert h.dtype == torch.bfloat16
    assert depth_weights(sources.bfloat16(), query.float(), gain.float()).dtype == torch.float32
    assert_within(h, attention_residual(sources.bfloat16().double(), query, gain), 5e-3)


# ---- bookkeeping: which sources a reader sees ----


def run(block, sublayers=13, D=4):
    """(sources each reader saw, the embedding, every sublayer's output) of a stack whose sublayers are fixed maps."""
    maps = draws(*[(D, D)] * sublayers)
    (embedding,) = draws((1, 2, D), seed=1)
    depth, seen, outputs = DepthSources(embedding, block), [], []
    for W in maps:
        sources = depth.stacked()
        seen.append(sources)
        out = torch.tanh(sources.mean(-2) @ W)
        outputs.append(out)
        depth.write(out)
    return [*seen, depth.stacked()], embedding, outputs


@pytest.mark.parametrize("block", [1, 2, 3, 4, 6, 13, 20])
def test_blocks_of_any_size(block):
    """Reader l sees the embedding, the sum of each finished block, and the sum of what its own block has so far."""
    seen, embedding, outputs = run(block)
    for n, sources in enumerate(seen):
        blocks = [outputs[start : min(start + block, n)] for start in range(0, n, block)]
        expected = [embedding, *(torch.stack(b).sum(0) for b in blocks)]
        assert sources.shape[-2] == len(expected)
        torch.testing.assert_close(sources, torch.stack(expected, -2))


def test_full_form_is_blocks_of_one():
    seen, embedding, outputs = run(1)
    torch.testing.assert_close(seen[-1], torch.stack([embedding, *outputs], -2))


def test_none_is_the_plain_residual_stream():
    seen, embedding, outputs = run(None)
    assert all(s.shape[-2] == 1 for s in seen)
    torch.testing.assert_close(seen[-1][..., 0, :], embedding + torch.stack(outputs).sum(0))


def test_a_block_as_long_as_the_stack_still_keeps_the_embedding_apart():
    seen, embedding, outputs = run(13)
    torch.testing.assert_close(seen[-1], torch.stack([embedding, torch.stack(outputs).sum(0)], -2))


# ---- in the model ----


@pytest.mark.parametrize("block", [1, 2, 3, 5, 8])
def test_model_reads_as_the_released_loop_does(block):
    """The loop of the released code, written with prefix and stored blocks, around the same layers, reading in two phases."""
    model, ids = tiny_model(attn_res_block_size=block), tokens(2, 7)

    def read(prefix, stored, proj, norm):
        if not stored:
            return prefix
        return two_phase_read(torch.stack(stored, -2), prefix, proj.weight[0], norm.weight)

    prefix, stored = model.model.embed_tokens(ids), []
    for i, layer in enumerate(model.model.layers):
        h = read(prefix, stored, layer.self_attention_res_proj, layer.self_attention_res_norm)
        if i % block == 0:
            stored.append(prefix)
            prefix = None
        a = layer.self_attn(layer.input_layernorm(h))
        prefix = a if prefix is None else prefix + a
        h = layer.post_attention_layernorm(read(prefix, stored, layer.mlp_res_proj, layer.mlp_res_norm))
        prefix = prefix + (layer.mlp(h) if i == 0 else layer.block_sparse_moe(h))
    out = model.model.norm(read(prefix, stored, model.model.output_attn_res_proj, model.model.output_attn_res_norm))
    torch.testing.assert_close(model(ids).logits, model.lm_head(out), rtol=0, atol=1e-11)


def test_every_pseudo_query_starts_at_zero():
    from minimodel import K3ForCausalLM

    model = K3ForCausalLM(tiny_config())
    queries = [p for n, p in model.named_parameters() if n.endswith("res_proj.weight")]
    assert len(queries) == 2 * 5 + 1  # before every mixer, before every feed-forward, at the output
    assert all(p.shape == (1, 20) and not p.any() for p in queries)


# ---- wrong input ----


@pytest.mark.bad_input
@pytest.mark.parametrize("sources, query, gain, words", [
    ((4,), (4,), (4,), "sources must be [..., N, D] with N >= 1, got shape (4,)"),
    ((2, 0, 4), (4,), (4,), "sources must be [..., N, D] with N >= 1, got shape (2, 0, 4)"),
    ((2, 3, 4), (3,), (4,), "query and gain must be [D] = (4,), got (3,) and (4,)"),
    ((2, 3, 4), (4,), (1, 4), "query and gain must be [D] = (4,), got (4,) and (1, 4)"),
])  # fmt: skip
def test_wrong_shapes(sources, query, gain, words):
    with pytest.raises(ValueError) as caught:
        attention_residual(torch.zeros(sources), torch.zeros(query), torch.zeros(gain))
    assert str(caught.value) == words


@pytest.mark.bad_input
def test_wrong_dtype():
    with pytest.raises(TypeError, match="sources must be a floating-point tensor, got torch.int64"):
        attention_residual(torch.zeros(2, 3, 4).long(), torch.zeros(4), torch.zeros(4))
