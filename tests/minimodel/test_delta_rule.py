"""The KDA operator: against the equation written out, at its extremes, against itself in pieces."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimodel import kda
from minimodel.delta_rule import kda_step
from minimodel.delta_rule.tiles import LOG2_E, TILE, Buffers, tile_decay
from minimodel.layers import l2norm
from tests.minimodel.common import assert_within

BACKENDS = ("recurrent", "chunked")
NAMES = ("q", "k", "v", "g", "beta")


def inputs(B=1, T=5, H=1, K=4, V=3, *, seed=0, dtype=torch.float64, low=-5.0):
    """q, k of unit length, v, g in (low, 0), beta in (0, 1)."""
    draw = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, k, v = l2norm(randn(B, T, H, K)), l2norm(randn(B, T, H, K)), randn(B, T, H, V)
    g, beta = low * torch.sigmoid(2 * randn(B, T, H, K)), torch.sigmoid(randn(B, T, H))
    return [x.to(dtype) for x in (q, k, v, g, beta)]


def equation(q, k, v, g, beta, S=None, scale=None):
    """K3 report Eq. 1 with its matrices formed, one token, head and row after the other."""
    B, T, H, K = q.shape
    scale = K**-0.5 if scale is None else scale
    S = torch.zeros(B, H, K, v.shape[-1], dtype=q.dtype) if S is None else S
    eye, outputs = torch.eye(K, dtype=q.dtype), []
    for t in range(T):
        kk = k[:, t, :, :, None]
        erase = eye - beta[:, t, :, None, None] * kk @ kk.transpose(-1, -2)
        S = erase @ torch.diag_embed(g[:, t].exp()) @ S + beta[:, t, :, None, None] * kk @ v[:, t, :, None, :]
        outputs.append((S.transpose(-1, -2) @ (scale * q[:, t, :, :, None])).squeeze(-1))
    return torch.stack(outputs, 1), S


def gradients(f, arguments, *, seed=0):
    """Results of f and the gradients of all arguments, for random cotangents."""
    leaves = [x.detach().clone().requires_grad_() for x in arguments]
    results = f(*leaves)
    draw = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(x.shape, generator=draw, dtype=x.dtype) for x in results]
    return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, cotangents)]


# ---- the equation, in every shape ----


@settings(max_examples=30)
@given(
    B=st.integers(1, 3), T=st.integers(1, 40), H=st.integers(1, 3), K=st.integers(1, 9), V=st.integers(1, 9), seed=st.integers(0, 10**6),
    low=st.sampled_from([-0.01, -5.0, -60.0]), chunk=st.sampled_from([16, 32]), from_zero=st.booleans(),
)  # fmt: skip
def test_every_form_is_the_equation(B, T, H, K, V, seed, low, chunk, from_zero):
    arguments = inputs(B, T, H, K, V, seed=seed, low=low)
    start = torch.zeros(B, H, K, V, dtype=torch.float64) if from_zero else torch.randn(B, H, K, V, dtype=torch.float64)
    arguments.append(start)
    expected = gradients(lambda *x: equation(*x), arguments)
    for options in ({"backend": "recurrent"}, {"backend": "chunked", "chunk_size": chunk}):
        actual = gradients(lambda *x, o=options: kda(*x[:5], initial_state=x[5], **o), arguments)
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)


def test_fade_erase_write_by_hand():
    """One head, two channels: the board holds 8 for key 1; it fades by half, loses a quarter of that, gains a quarter of 10."""
    S = torch.tensor([[8.0], [5.0]], dtype=torch.float64)
    k, q = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([1.0, 1.0], dtype=torch.float64)
    alpha, beta = torch.tensor([0.5, 1.0], dtype=torch.float64), torch.tensor(0.25, dtype=torch.float64)
    o, S = kda_step(S, q, k, torch.tensor([10.0], dtype=torch.float64), alpha.log(), beta)
    assert S.flatten().tolist() == [8 * 0.5 * 0.75 + 0.25 * 10, 5.0]
    assert o.tolist() == [5.5 + 5.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_token_and_defaults(backend):
    q, k, v, g, beta = inputs(B=2, T=1, H=2)
    o, S = kda(q, k, v, g, beta, backend=backend)
    torch.testing.assert_close(S, beta[:, 0, :, None, None] * k[:, 0, :, :, None] * v[:, 0, :, None, :])
    torch.testing.assert_close(o[:, 0], torch.einsum("bhkv,bhk->bhv", S, q[:, 0] * 4**-0.5))


@pytest.mark.parametrize("backend", BACKENDS)
def test_precision_of_the_results(backend):
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        arguments = inputs(T=20, dtype=dtype)
        o, S = kda(*arguments, backend=backend)
        assert (o.dtype, S.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
        wide_o, wide_S = equation(*(x.double() for x in arguments))
        assert_within(S, wide_S, 1e-12 if dtype == torch.float64 else 2e-6)
        assert_within(o, wide_o, {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6, torch.float64: 1e-12}[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 18])
@pytest.mark.parametrize("axes", [(1, 2), (0, 2)])
def test_strided_inputs_and_nothing_written_to_them(backend, T, axes):
    arguments = inputs(B=2, T=T, H=3)
    strided = [x.transpose(*axes).contiguous().transpose(*axes) for x in arguments]
    start = torch.randn(2, 3, 4, 3, dtype=torch.float64)
    kept = [x.clone() for x in (*strided, start)]
    assert strided[0].is_contiguous() == (T == 1 and axes == (1, 2))
    results = [kda(*x, initial_state=start, backend=backend) for x in (strided, arguments)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((*strided, start), kept, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", range(5))
def test_gradient_of_one_input_only(backend, wanted):
    arguments = inputs(T=18)
    arguments[wanted].requires_grad_()
    kda(*arguments, backend=backend)[0].square().sum().backward()
    assert arguments[wanted].grad.abs().sum() > 0


def test_inference_mode_and_no_grad():
    arguments = inputs(T=18)
    with torch.inference_mode():
        inside = kda(*arguments)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(kda(*arguments), inside, strict=True))


@pytest.mark.parametrize("T", [1, 40])
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_does_not_round_the_state(backend, T):
    """Inside torch.autocast, where other products drop to bfloat16, results and gradients stay those of float32."""
    found = []
    for on in (False, True):
        arguments = [x.requires_grad_() for x in inputs(T=T, K=16, V=16, dtype=torch.float32)]
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            o, S = kda(*arguments, backend=backend)
            found.append((o, S, *torch.autograd.grad(o.square().sum() + S.sum(), arguments)) if backend == "chunked" else (o, S))
    assert all(torch.equal(a, e) for a, e in zip(*found, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_without_numbers(backend):
    """On the meta device: a shape for every result, for planning with models that fit no memory."""
    o, S = kda(*(x.to("meta") for x in inputs(B=2, T=40, H=3)), backend=backend)
    assert o.is_meta and o.shape == (2, 40, 3, 3) and S.shape == (2, 3, 4, 3)


# ---- extremes ----


def assert_chunked_follows(arguments, tolerance):
    """Chunked float32 results and gradients against the token loop in float64; finite throughout.

    Gradients by g can be tiny here (nothing is left to fade), so none is measured against less than 0.1.
    """
    expected = gradients(lambda *x: kda(*x, backend="recurrent"), [x.double() for x in arguments])
    leaves = [x.float().requires_grad_() for x in arguments]
    results = kda(*leaves, backend="chunked")
    draw = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(x.shape, generator=draw, dtype=torch.float64).float() for x in results]
    actual = [*results, *torch.autograd.grad(results, leaves, cotangents)]
    for a, e in zip(actual, expected, strict=True):
        assert bool(torch.isfinite(a).all())
        torch.testing.assert_close(a.detach().double(), e, rtol=0, atol=tolerance * max(0.1, float(e.abs().max())))


@pytest.mark.parametrize("T", [15, 16, 17, 18, 64, 65, 130])
def test_strongest_bounded_decay_in_float32(T):
    q, k, v, _, beta = inputs(T=T, K=16, V=8, dtype=torch.float32)
    assert_chunked_follows([q, k, v, torch.full_like(q, -5.0), beta], 1e-5)


def test_unbounded_decay_in_float32():
    """The softplus gate reaches -142 and below; a reciprocal of the decay would overflow at once.

    Differences of running sums, here as large as 1,700, would be off by 1e-4, which is why no exponent is one.
    """
    q, k, v, _, beta = inputs(T=80, K=16, V=8, dtype=torch.float32)
    draw = torch.Generator().manual_seed(1)
    g = -(torch.rand(q.shape, generator=draw) * 12 - 7).exp().clamp_max(150.0)
    g[:, ::7] = -142.0
    assert float(g.min()) <= -142 and float(g.max()) > -0.01
    assert_chunked_follows([q, k, v, g, beta], 3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_channel_may_forget_everything_at_once(dtype):
    """g = -inf is alpha = 0; the chunk's running sums must not turn it into NaN."""
    arguments = inputs(T=40, H=2, dtype=dtype)
    arguments[3][:, 11:30:6, :, 1:3] = -torch.inf
    wanted = equation(*(x.double() for x in arguments))
    for backend in BACKENDS:
        for result, expected in zip(kda(*arguments, backend=backend), wanted, strict=True):
            assert_within(result, expected, 1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("low", [0.0, -1e-4, -8.0])
def test_equal_keys_and_full_writes(low):
    """The triangular system is as full as it gets: every token erases what the one before it wrote."""
    q, k, v, g, beta = inputs(T=96, K=16, V=8, dtype=torch.float32)
    k = k[:, :1].expand_as(k)
    assert_chunked_follows([q, k, v, torch.full_like(g, low), torch.full_like(beta, 0.999)], 2e-5)


def test_full_write_leaves_exactly_the_last_value():
    q, k, v, g, _ = inputs(T=40)
    k = k[:, :1].expand_as(k)
    for backend in BACKENDS:
        _, S = kda(q, k, v, torch.zeros_like(g), torch.ones(1, 40, 1, dtype=torch.float64), backend=backend)
        recalled = torch.einsum("bhkv,bhk->bhv", S, k[:, 0])
        torch.testing.assert_close(recalled, v[:, -1], atol=1e-5, rtol=0)  # l2norm's eps keeps k a little shorter than 1


def test_exponents_stay_within_half_a_tile():
    """Measured from the tile's middle, no factor of a bounded decay passes e^40: that is what leaves float32 room."""
    g = torch.full((1, 1, 4, TILE, 3), -5.0 * LOG2_E, dtype=torch.float64)
    decay = tile_decay(g, Buffers(g))
    assert decay.steps is None
    assert max(decay.rows.max(), decay.columns.max()) <= math.exp(40.0) * (1 + 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_forgetting_everything_at_once(backend):
    """g = -inf (alpha = 0) is a clean board, and a huge decay hides no small one after it."""
    one = torch.ones(1, 3, 1, 1)
    g = torch.tensor([0.0, -math.inf, -0.1]).view(1, 3, 1, 1)
    o, _ = kda(one, one, one, g, 0.5 * one[..., 0], backend=backend)
    kept = math.exp(-0.1)
    want = torch.tensor([0.5, 0.5, 0.5 * kept + 0.5 * (1 - 0.5 * kept)])
    torch.testing.assert_close(o.flatten(), want, rtol=0, atol=1e-6)
    packed, _ = kda(one, one, one, g, 0.5 * one[..., 0], cu_seqlens=torch.tensor([0, 2, 3]), backend=backend)
    assert bool(packed.isfinite().all())


# ---- finite differences ----


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T, low", [(1, -5.0), (17, -5.0), (17, -30.0)])
def test_finite_differences(backend, T, low):
    arguments = [x.requires_grad_() for x in inputs(T=T, K=2, V=3, low=low)]
    start = torch.randn(1, 1, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: kda(*x[:5], initial_state=x[5], backend=backend), (*arguments, start))


@pytest.mark.parametrize("backend", BACKENDS)
def test_finite_differences_of_packed_documents(backend):
    arguments = tuple(x.requires_grad_() for x in inputs(T=6, K=2, V=2))
    bounds = torch.tensor([0, 1, 4, 6])
    assert torch.autograd.gradcheck(lambda *x: kda(*x, cu_seqlens=bounds, backend=backend), arguments)


def test_second_derivatives():
    arguments = tuple(x.requires_grad_() for x in inputs(T=3, K=2, V=2))
    for backend in BACKENDS:
        assert torch.autograd.gradgradcheck(lambda *x, b=backend: kda(*x, backend=b)[0], arguments)


@pytest.mark.parametrize("q_from", [lambda k: k, lambda k: 2 * k], ids=["q is k", "q is made of k"])
def test_second_derivatives_when_one_input_is_made_of_another(q_from):
    """What k passes on to q is counted once, by autograd, not a second time inside the backward pass."""
    _, k, v, g, beta = inputs(T=20)
    found = []
    for backend in BACKENDS:
        x = k.clone().requires_grad_()
        (first,) = torch.autograd.grad(kda(q_from(x), x, v, g, beta, backend=backend)[0].square().sum(), x, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), x)))
    for a, e in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)


# ---- time: causal, in pieces, document by document ----


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_token_sees_the_future(backend):
    arguments = inputs(T=40, H=2)
    o, _ = kda(*arguments, backend=backend)
    for t in (0, 1, 15, 16, 30, 39):
        changed = [torch.cat([x[:, :t], y[:, t:]], 1) for x, y in zip(arguments, inputs(T=40, H=2, seed=9), strict=True)]
        other, _ = kda(*changed, backend=backend)
        torch.testing.assert_close(other[:, :t], o[:, :t], rtol=0, atol=1e-13)
        assert (other[:, t] - o[:, t]).abs().max() > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_continues_at_every_split(backend):
    arguments = inputs(B=2, T=37, H=2)
    o, S = kda(*arguments, backend=backend)
    for t in range(1, 37):
        first, middle = kda(*(x[:, :t] for x in arguments), backend=backend)
        second, end = kda(*(x[:, t:] for x in arguments), initial_state=middle, backend=backend)
        torch.testing.assert_close(torch.cat([first, second], 1), o, rtol=0, atol=1e-13)
        torch.testing.assert_close(end, S, rtol=0, atol=1e-13)


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(1, 24), min_size=1, max_size=5), seed=st.integers(0, 10**6), backend=st.sampled_from(BACKENDS))
def test_packed_documents_equal_each_alone(lengths, seed, backend):
    T, N = sum(lengths), len(lengths)
    arguments = inputs(T=T, H=2, seed=seed)
    start = torch.randn(N, 2, 4, 3, dtype=torch.float64)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    o, S = kda(*arguments, initial_state=start, cu_seqlens=bounds, backend=backend)
    assert o.shape == (1, T, 2, 3) and S.shape == (N, 2, 4, 3)
    for n, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        alone, end = kda(*(x[:, a:b] for x in arguments), initial_state=start[n : n + 1], backend="recurrent")
        torch.testing.assert_close(o[:, a:b], alone, rtol=0, atol=1e-12)
        torch.testing.assert_close(S[n : n + 1], end, rtol=0, atol=1e-12)


def test_segments_compose_as_affine_maps():
    """K3 report Eq. 17: a segment maps its incoming state to S_zero + M S_in, with M = prod (I - beta k k^T) Diag(alpha)."""
    K, V, bounds = 4, 3, [0, 7, 20, 33]
    q, k, v, g, beta = inputs(T=33, K=K, V=V)
    whole, S_end = kda(q, k, v, g, beta)
    composed_M, composed_S = torch.eye(K, dtype=torch.float64), torch.zeros(K, V, dtype=torch.float64)
    for a, b in zip(bounds[:-1], bounds[1:], strict=True):
        part = [x[:, a:b] for x in (q, k, v, g, beta)]
        outputs, _ = kda(*part, initial_state=composed_S[None, None])
        torch.testing.assert_close(outputs, whole[:, a:b], rtol=0, atol=1e-13)
        _, grown = kda(*part)
        # the map itself: what the segment makes of the identity when it writes nothing
        still = [part[0], part[1], torch.zeros(1, b - a, 1, K, dtype=torch.float64), part[3], part[4]]
        _, M = kda(*still, initial_state=torch.eye(K, dtype=torch.float64)[None, None])
        composed_M, composed_S = M[0, 0] @ composed_M, grown[0, 0] + M[0, 0] @ composed_S
    torch.testing.assert_close(composed_S, S_end[0, 0], rtol=0, atol=1e-13)
    start = torch.randn(1, 1, K, V, dtype=torch.float64)
    _, end = kda(q, k, v, g, beta, initial_state=start)
    torch.testing.assert_close(composed_S + composed_M @ start[0, 0], end[0, 0], rtol=0, atol=1e-13)


def test_position_is_readable_from_the_decay():
    """No positions anywhere: one write, then a constant fade, and the output's size counts the steps since."""
    T = 12
    ones = torch.ones(1, T, 1, 1, dtype=torch.float64)
    beta = torch.zeros(1, T, 1, dtype=torch.float64)
    beta[:, 0] = 1
    o, _ = kda(ones, ones, ones, -0.25 * ones, beta)
    torch.testing.assert_close(-o.flatten().log() / 0.25, torch.arange(T, dtype=torch.float64))
