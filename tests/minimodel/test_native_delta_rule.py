"""The delta rule's C kernels: against the float64 recurrence, at its extremes, in every layout, from several threads."""

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from minimodel import kda
from minimodel.delta_rule import native, why_not_native
from tests.minimodel.common import assert_within
from tests.minimodel.test_delta_rule import inputs

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=f'backend "native" {why_not_native()}')


def case(B=1, T=40, H=2, K=32, V=16, *, seed=0, low=-5.0):
    """Float32 inputs and an initial state."""
    start = torch.randn(B, H, K, V, generator=torch.Generator().manual_seed(seed + 1))
    return [*inputs(B, T, H, K, V, seed=seed, dtype=torch.float32, low=low), start]


def run(x, backend="native", **options):
    return kda(*x[:5], initial_state=x[5], backend=backend, **options)


def results_and_gradients(x, backend="native", **options):
    leaves = [a.detach().clone().requires_grad_() for a in x]
    results = run(leaves, backend, **options)
    draw = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(a.shape, generator=draw, dtype=torch.float64).to(a.dtype) for a in results]
    return [*(a.detach() for a in results), *torch.autograd.grad(results, leaves, cotangents)]


def follows_the_recurrence(x, tolerance, **options):
    """Results and all gradients against float64 autograd of the recurrence. A gradient can be tiny (nothing is left to fade), so none is
    measured against less than 0.1."""
    expected = results_and_gradients([a.double() for a in x], "recurrent", **options)
    for a, e in zip(results_and_gradients(x, **options), expected, strict=True):
        assert bool(a.isfinite().all())
        torch.testing.assert_close(a.double(), e, rtol=0, atol=tolerance * max(0.1, float(e.abs().max())))


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- the recurrence, in every shape ----


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 33, 63, 64, 65, 130, 300])
def test_lengths(T):
    """Tiles of 16 tokens and groups of 64: every length around their edges."""
    follows_the_recurrence(case(B=2, T=T), 2e-6)


@pytest.mark.parametrize("K, V", [(16, 16), (16, 32), (48, 16), (32, 80), (80, 112), (128, 128), (256, 240)])
def test_sizes(K, V):
    """Key and value channels that are one vector, several, and not a multiple of the widest product's columns."""
    follows_the_recurrence(case(T=35, K=K, V=V), 4e-6)


def test_scale():
    follows_the_recurrence(case(T=20), 2e-6, scale=1.5)


def test_finite_differences():
    """A second way to the gradients: results at two nearby points along a random direction."""
    x, h = case(T=50), 1e-2
    draw = torch.Generator().manual_seed(2)
    way = [torch.randn(a.shape, generator=draw) * 0.1 for a in x]
    way[3] *= -(x[3] * 0.1)  # keeps g below zero,
    way[4] *= x[4] * (1 - x[4])  # and beta in [0, 1]
    weights = [torch.randn(s, generator=draw) for s in (x[2].shape, x[5].shape)]

    def loss(x):
        return sum((a.double() * w).sum() for a, w in zip(run(x), weights, strict=True))

    leaves = [a.clone().requires_grad_() for a in x]
    slope = sum((a.double() * d).sum() for a, d in zip(torch.autograd.grad(loss(leaves), leaves), way, strict=True))
    ahead, behind = (float(loss([a + s * d for a, d in zip(x, way, strict=True)])) for s in (h, -h))
    assert abs(slope) > 0.1
    assert (ahead - behind) / (2 * h) == pytest.approx(float(slope), rel=1e-3)


# ---- extremes ----


@pytest.mark.parametrize("low", [-0.01, -5.0])
def test_no_decay_and_the_strongest_bounded_one(low):
    x = case(T=150)
    x[3] = torch.full_like(x[3], low)
    follows_the_recurrence(x, 5e-6)


@pytest.mark.parametrize("low", [-30.0, -100.0])
def test_every_tile_too_steep_for_a_product(low):
    follows_the_recurrence(case(T=90, low=low), 2e-6)


def test_steep_tiles_among_dense_ones():
    """Forward and backward cross from the one form to the other, at a tile's edge and at a group's."""
    x = case(T=260)
    x[3][:, 20] = x[3][:, 70:80] = x[3][:, 128:192] = -100.0
    x[3][:, 200, 0, 3] = -41.0  # one channel of one head
    follows_the_recurrence(x, 2e-6)


def test_small_steps_behind_huge_ones():
    x = case(T=256)
    x[3] = torch.full_like(x[3], -0.01)
    x[3][:, :24] = x[3][:, 100:120] = -110.0
    follows_the_recurrence(x, 2e-6)


@pytest.mark.parametrize("where", [0, 5, 7, 8, 15])
def test_a_channel_may_forget_everything_at_once(where):
    """g = -inf is alpha = 0, at every place of a tile that its sums treat differently."""
    x = case(T=40)
    x[3][:, where, :, 1:3] = x[3][:, 16 + where] = -torch.inf
    expected = run([a.double() for a in x], "recurrent")
    for a, e in zip(run(x), expected, strict=True):
        assert_within(a, e, 2e-6)
    assert all(bool(a.isfinite().all()) for a in results_and_gradients(x))


@pytest.mark.parametrize("low", [0.0, -1e-4, -5.0, -60.0])
@pytest.mark.parametrize("beta", [0.0, 0.999, 1.0])
def test_equal_keys(low, beta):
    """The triangular system is as full as it gets: every token erases what the one before it wrote."""
    x = case(T=96)
    x[1] = x[1][:, :1].expand_as(x[1])
    x[3], x[4] = torch.full_like(x[3], low), torch.full_like(x[4], beta)
    follows_the_recurrence(x, 2e-5)


def test_large_numbers():
    """Values near the largest float32: nothing is squared or summed that needn't be."""
    x = case(T=40)
    x[2] *= 1e30
    x[5] *= 1e30
    for a, e in zip(run(x), run([a.double() for a in x], "recurrent"), strict=True):
        assert_within(a, e, 2e-6)


# ---- layouts ----


@pytest.mark.parametrize("axes", [(1, 2), (0, 2), (2, 3), (0, 1)])
def test_strided_inputs_and_nothing_written_to_them(axes):
    """Also where channels aren't neighbours, which only a copy can serve."""
    x = case(B=2, T=37, H=3)
    swaps = [axes if a.dim() == 4 else (0, 1) for a in x[:5]]
    strided = [a.transpose(*swap).contiguous().transpose(*swap) for a, swap in zip(x[:5], swaps, strict=True)]
    strided.append(x[5].transpose(2, 3).contiguous().transpose(2, 3))
    assert not strided[0].is_contiguous()
    kept = [a.clone() for a in strided]
    leaves = [a.detach().requires_grad_() for a in strided]
    o, S = run(leaves)
    assert equal(run(x), (o, S)) and equal(strided, kept)
    got = torch.autograd.grad(o.square().sum() + S.square().sum(), leaves)
    plain = [a.clone().requires_grad_() for a in x]
    o, S = run(plain)
    assert equal(got, torch.autograd.grad(o.square().sum() + S.square().sum(), plain))


def test_a_slice_and_an_expanded_input():
    x = case(T=50)
    wide = torch.cat([torch.full_like(x[0], torch.nan), x[0], torch.full_like(x[0], torch.nan)], 2)[:, :, 2:4]
    same = x[1][:, :1, :1].expand_as(x[1])
    assert equal(run([wide, same, *x[2:]]), run([x[0], same.contiguous(), *x[2:]]))


def test_packed_documents_are_those_alone():
    """Bit for bit: a document's numbers don't depend on what stands around it."""
    lengths = [1, 70, 16, 2, 64, 33]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    x = case(T=sum(lengths))
    x[5] = torch.randn(len(lengths), 2, 32, 16, generator=torch.Generator().manual_seed(5))
    leaves = [a.clone().requires_grad_() for a in x]
    o, S = run(leaves, cu_seqlens=bounds)
    got = torch.autograd.grad(o.square().sum() + S.square().sum(), leaves)
    alone = [[*(a[:, i:j].clone().requires_grad_() for a in x[:5]), x[5][n : n + 1].clone().requires_grad_()]
             for n, (i, j) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))]  # fmt: skip
    outputs = [run(a) for a in alone]
    assert torch.equal(o, torch.cat([a for a, _ in outputs], 1)) and torch.equal(S, torch.cat([a for _, a in outputs]))
    wanted = [torch.autograd.grad(a.square().sum() + b.square().sum(), c) for (a, b), c in zip(outputs, alone, strict=True)]
    for n, (a, parts) in enumerate(zip(got, zip(*wanted, strict=True), strict=True)):
        assert torch.equal(a, torch.cat(parts, 0 if n == 5 else 1))
    assert equal(run(x, cu_seqlens=bounds.int()), (o, S))


def test_a_state_continues():
    x = case(B=2, T=70)
    o, S = run(x)
    for t in (1, 15, 16, 40, 64, 69):
        first, middle = run([*(a[:, :t] for a in x[:5]), x[5]])
        second, end = run([*(a[:, t:] for a in x[:5]), middle])
        assert_within(torch.cat([first, second], 1), o, 2e-6)
        assert_within(end, S, 2e-6)


@pytest.mark.parametrize("axes", [(2, 3), (0, 1)])
def test_written_in_place(axes):
    x = case(B=2, T=20)
    o, S = run(x)
    x[5] = x[5].transpose(*axes).contiguous().transpose(*axes)
    o_, S_ = run(x, in_place=True)
    assert S_ is x[5] and torch.equal(o, o_) and torch.equal(S, S_)


# ---- autograd ----


@pytest.mark.parametrize("wanted", range(6))
def test_gradient_of_one_input_only(wanted):
    x = case(T=18)
    x[wanted].requires_grad_()
    o, S = run(x)
    (o.square().sum() + S.square().sum()).backward()
    assert x[wanted].grad.abs().sum() > 0 and all(a.grad is None for n, a in enumerate(x) if n != wanted)


@pytest.mark.parametrize("result", [0, 1])
def test_gradient_from_one_result_only(result):
    x = [a.requires_grad_() for a in case(T=50)]
    got = torch.autograd.grad(run(x)[result].square().sum(), x, allow_unused=True)
    wide = [a.detach().double().requires_grad_() for a in x]
    expected = torch.autograd.grad(run(wide, "recurrent")[result].square().sum(), wide, allow_unused=True, materialize_grads=True)
    for a, e in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=0, atol=2e-6 * max(0.1, float(e.abs().max())))


@pytest.mark.parametrize("packed", [False, True])
def test_second_derivatives(packed):
    options = {"cu_seqlens": torch.tensor([0, 1, 20, 25])} if packed else {}
    x = case(B=1 if packed else 2, T=25, K=16)
    if packed:
        x[5] = x[5].repeat(3, 1, 1, 1)
    found = []
    for dtype, backend in ((torch.float64, "recurrent"), (torch.float32, "native")):
        leaves = [a.to(dtype).requires_grad_() for a in x]
        o, S = run(leaves, backend, **options)
        first = torch.autograd.grad(o.square().sum() + S.square().sum(), leaves, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(a.square().sum() for a in first), leaves)])
    for a, e in zip(found[1], found[0], strict=True):
        assert_within(a, e, 1e-5)


def test_second_derivatives_where_k_is_also_q():
    """What k passes on to q is counted once, by autograd."""
    _, k, v, g, beta, S = case(T=20)
    found = []
    for dtype, backend in ((torch.float64, "recurrent"), (torch.float32, "native")):
        x = k.to(dtype).requires_grad_()
        o, _ = run([x, x, *(a.to(dtype) for a in (v, g, beta, S))], backend)
        (first,) = torch.autograd.grad(o.square().sum(), x, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), x)))
    for a, e in zip(found[1], found[0], strict=True):
        assert_within(a, e, 1e-5)


def test_inference_mode_no_grad_and_autocast():
    x = case(T=50)
    plain = run(x)
    with torch.inference_mode():
        assert equal(run(x), plain)
    recorded = [a.clone().requires_grad_() for a in x]
    with torch.no_grad():
        o, S = run(recorded)
    assert equal((o, S), plain) and not o.requires_grad
    gradients = results_and_gradients(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert equal(results_and_gradients(x), gradients)


def test_what_is_kept_for_the_backward_pass():
    """The inputs, the errors and a state in 64 tokens; without gradients nothing."""
    for T in (64, 65, 300):
        x = [a.requires_grad_() for a in case(T=T)]
        o, S = run(x)
        kept = [a for a in S.grad_fn.saved_tensors if a.is_floating_point() and all(a.data_ptr() != b.data_ptr() for b in x)]
        assert [a.numel() for a in kept] == [-(-T // 64) * 2 * 32 * 16, T * 2 * 16]
        for a in (o, S, *torch.autograd.grad(o.sum() + S.sum(), x)):
            assert a.untyped_storage().nbytes() == a.nbytes


@pytest.mark.parametrize("low", [-5.0, -60.0])
def test_every_result_is_written(low):
    """Here torch fills fresh memory with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        assert all(bool(a.isfinite().all()) for a in results_and_gradients(case(B=2, T=70, low=low)))
    finally:
        torch.use_deterministic_algorithms(False)


# ---- threads ----


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(native, "WORTH_A_THREAD", 1)
    x = case(B=5, T=70, H=7)
    wanted = results_and_gradients(x)
    try:
        for threads in (2, 3, 16):
            torch.set_num_threads(threads)
            assert equal(results_and_gradients(x), wanted)
    finally:
        torch.set_num_threads(1)


def test_several_python_threads_at_once():
    cases = [case(B=2, T=100, seed=seed) for seed in range(4)]
    wanted = [results_and_gradients(x) for x in cases]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: results_and_gradients(cases[n % 4]), range(24)))
    assert all(equal(x, wanted[n % 4]) for n, x in enumerate(found))


def test_threads_of_its_own_where_openmp_offers_none(monkeypatch):
    monkeypatch.setattr(native, "WORTH_A_THREAD", 1)
    x = case(B=2, T=70, H=3)
    try:
        torch.set_num_threads(3)
        wanted = results_and_gradients(x)
        monkeypatch.setattr(native, "team", lambda: ctypes.c_void_p(None))
        assert equal(results_and_gradients(x), wanted)
    finally:
        torch.set_num_threads(1)


@pytest.mark.skipif(sys.platform != "linux", reason="only torch's OpenMP for Linux offers GOMP_parallel; elsewhere own threads start")
def test_on_linux_they_are_those_of_torch():
    assert native.team().value


def test_a_forked_process_does_not_wait_for_threads_that_it_lacks():
    program = """
import os, torch
from minimodel.delta_rule import kda, native
native.WORTH_A_THREAD = 1
torch.set_num_threads(2)
x = [torch.full((1, 64, 4, 16), n) for n in (0.1, 0.2, 0.3, -1.0)] + [torch.full((1, 64, 4), 0.5)]
o, _ = kda(*x, backend="native")
if not (child := os.fork()):
    again, _ = kda(*x, backend="native")
    os._exit(0 if (again == o).all() else 3)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=300)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are no threads of torch to wait for")
def test_nor_does_one_that_is_the_first_to_load_the_kernels():
    """Torch's threads were started before the fork, the package was imported after it: only the system knows."""
    program = """
import os, torch
torch.set_num_threads(2)
x = torch.rand(400, 400)
x @ x, torch.exp(x)
if not (child := os.fork()):
    from minimodel.delta_rule import kda, native
    native.WORTH_A_THREAD = 1
    x = [torch.full((1, 64, 4, 16), n) for n in (0.1, 0.2, 0.3, -1.0)] + [torch.full((1, 64, 4), 0.5)]
    kda(*x, backend="native")
    os._exit(0 if native.team().value is None else 3)
from minimodel.delta_rule import native
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or (4 if native.team().value is None else 0))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=300)
