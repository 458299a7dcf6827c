"""The Triton kernels of the delta rule against the float64 recurrence: results and all gradients."""

import pytest
import torch

from minimodel import bounded_log_decay, kda, softplus_log_decay
from tests.minimodel.common import assert_within
from tests.minimodel.test_delta_rule import equation, inputs
from tests.minimodel.triton_devices import DEVICES, IN_INTERPRETER, quick_interpreter, tolerance  # noqa: F401

from minimodel.delta_rule.triton_chunked import kda_triton  # isort: skip  after the check that triton is there
from minimodel.delta_rule.triton_common import CHUNK, Chunks
from minimodel.delta_rule.triton_gate import Gate

pytestmark = [pytest.mark.usefixtures("quick_interpreter"), pytest.mark.parametrize("device", DEVICES)]


def gradients(run, leaves):
    """Results and gradients of all leaves, for cotangents that are the same in every precision."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    results = run(*leaves)
    draw = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x) for x in results]
    return [x.detach().cpu() for x in (*results, *torch.autograd.grad(results, leaves, cotangents))]


def assert_follows_the_recurrence(device, arguments, start=None, *, bounds=None, atol=None):
    """Outputs, final state, and gradients for q, k, v, g, beta and the initial state, each relative to its largest value."""
    on = [x.to(device) for x in arguments]
    start = torch.zeros(arguments[0].shape[0], *arguments[0].shape[2:], arguments[2].shape[-1]) if start is None else start
    there = None if bounds is None else bounds.to(device)
    actual = gradients(lambda *x: kda(*x[:5], initial_state=x[5], cu_seqlens=there, backend="triton"), [*on, start.to(device)])
    exact = [x.double() for x in (*arguments, start)]
    expected = gradients(lambda *x: kda(*x[:5], initial_state=x[5], cu_seqlens=bounds, backend="recurrent"), exact)
    for name, a, e in zip(("o", "S", "q", "k", "v", "g", "beta", "initial_state"), actual, expected, strict=True):
        assert bool(torch.isfinite(a).all()), name
        assert_within(a, e, atol or tolerance(device, arguments[0].dtype))


def drawn_state(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("B, T, H, K, V", [
    (1, 1, 1, 16, 16), (1, 16, 1, 16, 16), (1, 17, 1, 16, 16), (2, 32, 2, 16, 32), (1, 33, 1, 32, 16), (1, 80, 2, 16, 16),
    pytest.param(1, 34, 1, 128, 128, id="K3's head"),
])  # fmt: skip
def test_every_shape(device, B, T, H, K, V):
    assert_follows_the_recurrence(device, inputs(B, T, H, K, V, dtype=torch.float32), drawn_state(B, H, K, V))


def test_strongest_bounded_decay(device):
    """g = -5 everywhere: every tile is dense, with exponents up to 40."""
    q, k, v, _, beta = inputs(T=40, K=16, V=16, dtype=torch.float32)
    assert_follows_the_recurrence(device, [q, k, v, torch.full_like(q, -5.0), beta], atol=1e-5)


def test_unbounded_decay(device):
    """Kimi Linear's gate goes to -142 and below: a tile's reciprocals would overflow, so it is computed column by column."""
    q, k, v, _, beta = inputs(T=40, K=32, V=16, dtype=torch.float32)
    g = -(torch.rand(q.shape, generator=torch.Generator().manual_seed(1)) * 12 - 7).exp().clamp_max(150.0)
    g[:, ::7] = -142.0
    assert_follows_the_recurrence(device, [q, k, v, g, beta], drawn_state(1, 1, 32, 16), atol=1e-4)


def test_a_channel_may_forget_everything_at_once(device):
    arguments = inputs(T=40, K=16, V=16, dtype=torch.float32)
    arguments[3][:, 11:30:6, :, 1:3] = -torch.inf
    o, S = kda(*(x.to(device) for x in arguments), backend="triton")
    for actual, expected in zip((o, S), equation(*(x.double() for x in arguments)), strict=True):
        assert_within(actual.cpu(), expected, 1e-5)


@pytest.mark.parametrize("strength", [0.0, 0.999, 1.0])
def test_equal_keys(device, strength):
    """Full writes to one key: a chunk's triangular system is as full as it gets, and powers of it would cancel. And no write at all."""
    q, k, v, g, beta = inputs(T=40, K=16, V=16, dtype=torch.float32)
    k = k[:, :1].expand_as(k)
    arguments = [q, k, v, torch.full_like(g, -1e-4), torch.full_like(beta, strength)]
    assert_follows_the_recurrence(device, arguments, drawn_state(1, 1, 16, 16), atol=2e-5)


@pytest.mark.parametrize("lengths", [[1, 32, 16, 31], [33, 1, 1]])
def test_packed_documents(device, lengths):
    arguments = inputs(T=sum(lengths), H=2, K=16, V=16, dtype=torch.float32)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    assert_follows_the_recurrence(device, arguments, drawn_state(len(lengths), 2, 16, 16), bounds=bounds)


def test_bfloat16(device):
    """Inputs, outputs and their gradients in bfloat16, the state in float32. The interpreter multiplies in float32, a GPU in bfloat16."""
    arguments = [*(x.bfloat16() for x in inputs(T=40, K=32, V=16)[:3]), *inputs(T=40, K=32, V=16, dtype=torch.float32)[3:]]
    o, S = kda(*(x.to(device) for x in arguments), backend="triton")
    assert o.dtype == torch.bfloat16 and S.dtype == torch.float32
    assert_follows_the_recurrence(device, arguments, drawn_state(1, 1, 32, 16))


@pytest.mark.parametrize("kind", ["bounded", "softplus"])
def test_gate_inside_the_kernels(device, kind):
    """From the raw projection: gradients reach f, A_log and dt_bias as through the torch gate."""
    q, k, v, f, beta = inputs(B=2, T=40, H=2, K=16, V=16)
    draw = torch.Generator().manual_seed(2)
    f, A_log, dt_bias = (size * torch.randn(s, generator=draw, dtype=torch.float64) for s, size in ((f.shape, 3), (2, 0.3), ((2, 16), 1)))
    leaves = [q, k, v, f, beta, A_log, dt_bias]
    bound = -5.0 if kind == "bounded" else None

    def exact(q, k, v, f, beta, A_log, dt_bias):
        g = softplus_log_decay(f, A_log, dt_bias) if bound is None else bounded_log_decay(f, A_log, dt_bias, bound)
        return kda(q, k, v, g, beta, backend="recurrent")

    def fused(q, k, v, f, beta, A_log, dt_bias):
        return kda_triton(q, k, v, f, beta, None, scale=16**-0.5, gate=Gate(A_log, dt_bias, bound))

    actual = gradients(fused, [x.float().to(device) for x in leaves])
    for a, e in zip(actual, gradients(exact, leaves), strict=True):
        assert_within(a, e, 1e-5)


def test_strided_inputs_and_nothing_written_to_them(device):
    arguments = [x.to(device) for x in inputs(B=2, T=18, H=2, K=16, V=16, dtype=torch.float32)]
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in arguments]
    start = drawn_state(2, 2, 16, 16).to(device)
    kept = [x.clone() for x in (*strided, start)]
    results = [kda(*x, initial_state=start, backend="triton") for x in (strided, arguments)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((*strided, start), kept, strict=True))


def test_a_state_may_be_continued_in_place(device):
    arguments = [x.to(device) for x in inputs(T=20, K=16, V=16, dtype=torch.float32)]
    o, S = kda(*arguments, backend="triton")
    first, state = kda(*(x[:, :7] for x in arguments), backend="triton")
    second, end = kda(*(x[:, 7:] for x in arguments), initial_state=state, backend="triton", in_place=True)
    assert end is state
    torch.testing.assert_close(torch.cat([first, second], 1), o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(end, S, rtol=1e-5, atol=1e-5)


def test_chunks_never_cross_a_document(device):
    bounds = torch.tensor([0, 1, 1 + CHUNK, 2 + 2 * CHUNK], device=device)
    chunks = Chunks.of(bounds)
    assert chunks.start.tolist() == [0, 1, 1 + CHUNK, 1 + 2 * CHUNK] and chunks.start.dtype == torch.int64
    assert chunks.end.tolist() == [1, 1 + CHUNK, 2 + 2 * CHUNK, 2 + 2 * CHUNK]
    assert chunks.first.tolist() == [0, 1, 2, 4]


def test_differentiated_once_only(device):
    arguments = [x.to(device).requires_grad_() for x in inputs(T=3, K=16, V=16, dtype=torch.float32)]
    with pytest.raises(RuntimeError, match='can be differentiated once; for second derivatives ask for backend "chunked"'):
        torch.autograd.grad(kda(*arguments, backend="triton")[0].sum(), arguments[0], create_graph=True)


@pytest.mark.bad_input
@pytest.mark.parametrize("changes, words", [
    ({"dtype": torch.float64}, "float32 or bfloat16, one for all, got float64"),
    ({"dtype": torch.float16}, "float32 or bfloat16, one for all, got float16"),
    ({"K": 24}, "powers of two of at least 16, got 24 and 16"),
    ({"V": 8}, "powers of two of at least 16, got 16 and 8"),
])  # fmt: skip
def test_what_the_kernels_do_not_take(device, changes, words):
    with pytest.raises(ValueError) as caught:
        kda(*(x.to(device) for x in inputs(**{"K": 16, "V": 16, "dtype": torch.float32, **changes})), backend="triton")
    assert str(caught.value).startswith('backend "triton"') and words in str(caught.value)
