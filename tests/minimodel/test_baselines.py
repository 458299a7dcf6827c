"""The mixers that stand in the attention slots: against third-party arrays, a second implementation, and their own caches."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimodel.accounting import cache_bytes, with_mixer
from minimodel.baselines import BASELINES, build_baseline, softmax_attention
from minimodel.baselines.additive import additive_chunked, additive_recurrent
from minimodel.cache import FixedState, Rows
from minimodel.config import K3Config, LinearAttnConfig
from minimodel.mla import attention_mask
from minimodel.model import K3ForCausalLM
from minimodel.trace import record

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "attention.npz")
CASES = sorted({name.split("/")[1] for name in GOLDEN})
SOFTMAX = ("mha", "gqa", "sliding_window")
RECURRENT = tuple(name for name in BASELINES if name not in SOFTMAX)
T, WINDOW = 9, 4
CONFIG = K3Config.mini().replace(
    hidden_size=24, num_attention_heads=4, qk_nope_head_dim=8, sliding_window=WINDOW,
    linear_attn_config=LinearAttnConfig(kda_layers=(1, 2, 3, 5, 6, 7), full_attn_layers=(4, 8, 9), num_heads=2, head_dim=8),
)  # fmt: skip


def mixer(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    module = build_baseline(name, CONFIG).double()
    for part in module.modules():
        if hasattr(part, "reset_parameters") and not isinstance(part, torch.nn.Linear):
            part.reset_parameters()
    return module


def slot(name: str) -> Rows | FixedState:
    if name in RECURRENT:
        return FixedState()
    return Rows(window=WINDOW if name == "sliding_window" else None)


def inputs(batch: int = 2, length: int = T, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, length, CONFIG.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES)
def test_softmax_attention_golden(case):
    q, k, v, do = (torch.from_numpy(GOLDEN[f"sdpa/{case}/{name}"]).double().requires_grad_() for name in ("q", "k", "v", "do"))
    window = int(GOLDEN[f"sdpa/{case}/window"])
    allowed = attention_mask(q.shape[2], k.shape[2], q.device, window=None if window < 0 else window)
    o, p = softmax_attention(q, k, v, allowed)
    torch.testing.assert_close(o, torch.from_numpy(GOLDEN[f"sdpa/{case}/out_f64"]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]), rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad((o * do).sum(), (q, k, v))
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        torch.testing.assert_close(grad, torch.from_numpy(GOLDEN[f"sdpa/{case}/{name}_f64"]), rtol=1e-11, atol=1e-12)


def test_gqa_with_all_heads_is_mha_and_a_wide_window_is_mha():
    mha = mixer("mha")
    x = inputs()
    for other in (
        build_baseline("gqa", CONFIG.replace(num_key_value_groups=4)),
        build_baseline("sliding_window", CONFIG.replace(sliding_window=T)),
    ):
        other.double().load_state_dict(mha.state_dict())
        torch.testing.assert_close(other(x), mha(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", BASELINES)
def test_prefill_is_decode_at_every_split(name):
    module, x = mixer(name), inputs()
    full = module(x)
    for split in range(T):
        cache = slot(name)
        parts = [module(x[:, :split], cache=cache)] if split else []
        parts += [module(x[:, t : t + 1], cache=cache) for t in range(split, T)]
        torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-12, atol=1e-13, msg=lambda m, s=split: f"split {s}: {m}")


@pytest.mark.parametrize("name", BASELINES)
def test_two_prefills_are_one(name):
    module, x = mixer(name), inputs()
    cache = slot(name)
    parts = [module(x[:, :6], cache=cache), module(x[:, 6:], cache=cache)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", BASELINES)
def test_the_future_changes_nothing(name):
    module, x = mixer(name), inputs()
    later = x.clone()
    later[:, 5:] += 1.0
    torch.testing.assert_close(module(later)[:, :5], module(x)[:, :5], rtol=0, atol=1e-14)
    assert (module(later)[:, 5:] - module(x)[:, 5:]).abs().amax() > 1e-3


def test_window_reads_itself_and_the_tokens_before_it():
    module, x = mixer("sliding_window"), inputs()
    for t in range(T):
        changed = x.clone()
        changed[:, t] += 1.0
        moved = (module(changed) - module(x)).abs().amax((0, 2)) > 1e-9
        assert moved.nonzero().flatten().tolist() == list(range(t, min(t + WINDOW, T)))


def test_stacked_windows_reach_layers_times_window():
    """A stack of layers carries a token on: layers * (w - 1) places, no further."""
    config = with_mixer(K3Config.mini().replace(attn_res_block_size=None), "sliding_window", sliding_window=3)
    model = K3ForCausalLM(config).double()
    reach, length = config.num_hidden_layers * 2, 24
    ids = torch.randint(0, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        moved = (model(ids).logits - model(torch.cat([(ids[:, :1] + 1) % config.vocab_size, ids[:, 1:]], 1)).logits).abs().amax((0, 2))
    assert moved[reach] > 1e-10 and moved[reach + 1 :].max() < 1e-13


@pytest.mark.parametrize("name", BASELINES)
def test_documents_do_not_leak(name):
    module, x = mixer(name), inputs(1)
    bounds = [0, 2, 3, 9]
    packed = module(x, cu_seqlens=torch.tensor(bounds))
    alone = torch.cat([module(x[:, a:b]) for a, b in zip(bounds, bounds[1:], strict=False)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("prompt", [3, 6])
def test_left_padding_changes_nothing(name, prompt):
    """Rows of different lengths in one batch equal each row alone, in prefill and while decoding past the window."""
    module, x = mixer(name), inputs()
    pad = torch.tensor([0, 2])
    mask = torch.arange(T) >= pad[:, None]
    noise = torch.where(mask.unsqueeze(-1), x, 7.0)
    cache = slot(name)
    y = [module(noise[:, :prompt], mask=mask[:, :prompt], padding=pad, cache=cache)]
    y += [module(noise[:, t : t + 1], padding=pad, cache=cache) for t in range(prompt, T)]
    y = torch.cat(y, 1)
    torch.testing.assert_close(y[:1], module(x[:1]), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(y[1:, 2:], module(x[1:, 2:]), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", [*BASELINES, "mla", "kda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nbytes_is_the_closed_form(name, dtype):
    config = CONFIG.replace(linear_mixer=name, full_mixer=name if name in (*SOFTMAX, "kda") else "mla")
    model = K3ForCausalLM(config).to(dtype)
    cache, seen = model.new_cache(2), 0
    ids = torch.randint(0, config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    assert cache.nbytes == 0
    for step in (2, 1, 1, 1, 7):  # below the window, at it, past it, and many at once
        model(ids[:, seen : seen + step], cache=cache)
        seen += step
        assert cache.nbytes == cache_bytes(config, seen, batch=2, dtype=dtype).total
        assert cache.nbytes <= cache.reserved_nbytes <= 2 * cache.nbytes


def test_snapshot_of_a_padded_window():
    """A restored cache still knows how much of the padding slid out of the window."""
    model = K3ForCausalLM(with_mixer(CONFIG, "sliding_window")).double()
    ids = torch.randint(0, CONFIG.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[1, :3] = 0
    cache = model.new_cache(2)
    model(ids[:, :5], cache=cache, attention_mask=mask)
    snapshot = cache.snapshot()
    expected = [model(ids[:, t : t + 1], cache=cache).logits for t in range(5, 8)]
    restored = model.new_cache(2)
    restored.restore(snapshot)
    for t, logits in zip(range(5, 8), expected, strict=True):
        torch.testing.assert_close(model(ids[:, t : t + 1], cache=restored).logits, logits, rtol=0, atol=0)


def traced(module: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    module._trace_name = "mixer"
    with record(module) as trace:
        module(x)
    return {name.removeprefix("mixer."): value for name, value in trace.items()}


@pytest.mark.parametrize("name", RECURRENT)
def test_rule_against_the_transition_matrix(name):
    """A second implementation, straight from the table in recurrent.py: S = transition S + write k v^T."""
    module, x = mixer(name), inputs()
    t = traced(module, x)
    eye = torch.eye(8, dtype=torch.float64)
    S = torch.zeros(2, 2, 8, 8, dtype=torch.float64)
    for i in range(T):
        k, v, a, w = t["k"][:, i], t["v"][:, i], t["alpha"][:, i, :, :1, None], t["beta"][:, i, :, None, None]
        outer = k.unsqueeze(-1) * k.unsqueeze(-2)
        transition = {
            "linear_attention": eye, "mamba2": a * eye, "delta_net": eye - w * outer, "gated_delta_net": (eye - w * outer) * a,
        }[name]  # fmt: skip
        S = transition @ S + w * k.unsqueeze(-1) * v.unsqueeze(-2)
        torch.testing.assert_close(t["state"][:, i], S, rtol=1e-12, atol=1e-13)
        o = (S.transpose(-1, -2) @ t["q"][:, i].unsqueeze(-1)).squeeze(-1) * 8**-0.5
        torch.testing.assert_close(t["output"][:, i], o, rtol=1e-12, atol=1e-13)
    assert (t["alpha"] == 1).all() == (name in ("linear_attention", "delta_net"))
    assert (t["beta"] == 1).all() == (name == "linear_attention")


@pytest.mark.parametrize("name", RECURRENT)
def test_every_backend_and_the_recorder_agree(name):
    module, x = mixer(name), inputs(length=70)
    y = module(x, backend="recurrent")
    torch.testing.assert_close(module(x, backend="chunked"), y, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(module(x), y, rtol=1e-11, atol=1e-12)
    module._trace_name = "mixer"
    with record(module):
        torch.testing.assert_close(module(x), y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", BASELINES)
def test_every_parameter_is_trained(name):
    module = mixer(name)
    module(inputs()).square().sum().backward()
    for label, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, label


@given(st.integers(1, 40), st.integers(1, 17), st.integers(1, 3), st.integers(1, 5), st.booleans())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_additive_chunks_equal_the_token_loop(length, chunk, K, V, strong):
    random = torch.Generator().manual_seed(length * 100 + chunk)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(2, length, 2, *shape, dtype=torch.float64, generator=random)

    q, k, v, g, write = draw(K), draw(K), draw(V), -draw().exp() * (30 if strong else 1), draw().abs()
    S = torch.randn(2, 2, K, V, dtype=torch.float64, generator=random)
    expected, last, _ = additive_recurrent(q, k, v, g, write, S)
    o, final = additive_chunked(q, k, v, g, write, S, chunk_size=chunk)
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(final, last, rtol=1e-10, atol=1e-11)


def test_additive_gradients_by_finite_differences():
    random = torch.Generator().manual_seed(0)
    shapes = [(1, 5, 2, 3), (1, 5, 2, 3), (1, 5, 2, 2), (1, 5, 2), (1, 5, 2), (1, 2, 3, 2)]
    q, k, v, g, write, S = (torch.randn(s, dtype=torch.float64, generator=random) for s in shapes)
    args = tuple(x.requires_grad_() for x in (q, k, v, -g.abs() - 0.1, write.abs() + 0.1, S))
    assert torch.autograd.gradcheck(lambda *a: additive_chunked(*a, chunk_size=2), args)


@pytest.mark.bad_input
def test_bad_input_names_the_argument():
    with pytest.raises(ValueError, match="name must be one of .*'rwkv'"):
        build_baseline("rwkv", CONFIG)
    with pytest.raises(ValueError, match="num_attention_heads=4 must be a multiple of num_key_value_groups=3"):
        CONFIG.replace(full_mixer="gqa", num_key_value_groups=3)
    q, k = torch.zeros(1, 4, 2, 8), torch.zeros(1, 3, 2, 8)
    with pytest.raises(ValueError, match="q has 4 heads, k has 3"):
        softmax_attention(q, k, k, attention_mask(2, 2, q.device))
    x = torch.zeros(1, 2, 1, 4)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        additive_chunked(x, x, x, x[..., 0], x[..., 0], torch.zeros(1, 1, 4, 4), chunk_size=0)
