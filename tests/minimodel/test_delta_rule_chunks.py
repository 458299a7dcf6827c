"""The chunked delta rule's own parts: segments, tiles, the triangular inverse, what it keeps, and decoding in place."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from minimodel import kda
from minimodel.delta_rule import chunked
from minimodel.delta_rule.tiles import LOG2_E, TILE, Buffers, tile_decay
from minimodel.delta_rule.triangular import unit_lower_inverse
from tests.minimodel.common import assert_within, tiny_model, tokens
from tests.minimodel.test_delta_rule import equation, gradients, inputs


def against_the_equation(arguments, tolerance, **options):
    """Results and all gradients of the chunked form, in the arguments' precision, against the equation in float64; nothing infinite.

    A gradient can be tiny (nothing is left to fade), so none is measured against less than 0.1.
    """
    expected = gradients(lambda *x: equation(*x), [x.double() for x in arguments])
    leaves = [x.clone().requires_grad_() for x in arguments]
    results = kda(*leaves[:5], initial_state=leaves[5] if len(leaves) > 5 else None, backend="chunked", **options)
    draw = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in results]
    for a, e in zip([*results, *torch.autograd.grad(results, leaves, cotangents)], expected, strict=True):
        assert bool(a.isfinite().all())
        torch.testing.assert_close(a.detach().double(), e, rtol=0, atol=tolerance * max(0.1, float(e.abs().max())))


# ---- segments ----


@pytest.mark.parametrize("T", [31, 32, 33, 64, 95, 150])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_segments_meet_without_a_seam(monkeypatch, T, chunks):
    """Segments of 1, 2 and 3 chunks, the last one shorter or padded: every chunk is at some segment's edge."""
    B, H, K, V, C = 2, 2, 6, 5, 32
    monkeypatch.setattr(chunked, "SEGMENT", chunks * B * H * C * K)
    start = torch.randn(B, H, K, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    against_the_equation([*inputs(B, T, H, K, V), start], 1e-11, chunk_size=C)


def test_a_segment_too_wild_for_dense_tiles_leaves_the_others_dense(monkeypatch):
    """Each segment is looked at by itself; the backward pass decides as the forward pass did."""
    monkeypatch.setattr(chunked, "SEGMENT", 1)  # one chunk a segment
    forms = []
    real = chunked.tile_decay
    monkeypatch.setattr(chunked, "tile_decay", lambda g, new: forms.append((found := real(g, new)).steps is None) or found)
    arguments = inputs(T=96, K=4, V=3)
    arguments[3][:, 40] = -60.0
    against_the_equation(arguments, 1e-11, chunk_size=32)
    assert forms == [True, False, True, True, False, True]


def test_what_a_forward_pass_holds_does_not_grow_with_time(monkeypatch):
    """Without gradients, a pass over four times the tokens works in the same memory; with them, it keeps O(T (K + V)) numbers."""
    monkeypatch.setattr(chunked, "SEGMENT", 2 * 32 * 8)
    made = []
    monkeypatch.setattr(chunked, "Buffers", lambda like: made.append(Buffers(like)) or made[-1])
    for T in (64, 256, 1024):
        with torch.no_grad():  # whatever the inputs themselves require
            kda(*(x.requires_grad_() for x in inputs(T=T, K=8, V=8)), backend="chunked", chunk_size=32)
    sizes = [sum(x.numel() for x in buffers._held.values()) for buffers in made]
    assert sizes[0] == sizes[1] == sizes[2] > 0
    assert all({"E", "states"} <= buffers._held.keys() for buffers in made)  # errors and states are reused too, not kept
    for T in (64, 256):
        arguments = [x.requires_grad_() for x in inputs(T=T, K=8, V=8)]
        o, _ = kda(*arguments, backend="chunked", chunk_size=32)
        kept = [x for x in o.grad_fn.saved_tensors if all(x.data_ptr() != y.data_ptr() for y in arguments)]
        states, errors = (T // 32 + 1) * 8 * 8, T * 8
        assert sum(x.numel() for x in kept) == states + errors + 8 * 8  # and the state it began with


def test_results_keep_no_work_memory_alive():
    arguments = [x.requires_grad_() for x in inputs(T=200, K=8, V=8)]
    o, S = kda(*arguments, backend="chunked")
    grads = torch.autograd.grad(o.sum() + S.sum(), arguments)
    for x in (o, S, *grads):
        assert x.untyped_storage().nbytes() == x.nbytes


@pytest.mark.parametrize("low", [-5.0, -60.0])
def test_no_number_is_read_before_it_was_written(low):
    """Here torch fills fresh memory with NaN. A buffer that is read too early would let one through."""
    arguments = [x.requires_grad_() for x in inputs(B=2, T=70, H=2, low=low)]
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        o, S = kda(*arguments, backend="chunked")
        grads = torch.autograd.grad(o.sum() + S.sum(), arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(bool(x.isfinite().all()) for x in (o, S, *grads))


def test_threads_do_not_share_buffers():
    """Two panels may compute at once."""
    cases = [inputs(B=2, T=100, H=2, K=8, V=8, seed=seed) for seed in range(4)]
    wanted = [kda(*case, backend="chunked") for case in cases]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: kda(*cases[n % 4], backend="chunked"), range(40)))
    for n, (o, S) in enumerate(found):
        assert torch.equal(o, wanted[n % 4][0]) and torch.equal(S, wanted[n % 4][1])


def test_one_long_document_among_short_ones_costs_no_padding(monkeypatch):
    """Documents are batched with those of like length: all batches together hold less than twice the tokens."""
    shapes = []
    real = chunked._ChunkedKDA.apply
    monkeypatch.setattr(chunked._ChunkedKDA, "apply", lambda *x: shapes.append(x[0].shape[:2]) or real(*x))
    lengths = [1, 100, 1, 2, 3, 7, 4, 100, 65, 1]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    arguments = [x.requires_grad_() for x in inputs(T=sum(lengths))]
    start = torch.randn(len(lengths), 1, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    o, S = kda(*arguments, initial_state=start, cu_seqlens=bounds, backend="chunked")
    assert sum(b * t for b, t in shapes) < 2 * sum(lengths)
    alone = [kda(*(x[:, a:b] for x in arguments), initial_state=start[n : n + 1], backend="recurrent")
             for n, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))]  # fmt: skip
    torch.testing.assert_close(o, torch.cat([x for x, _ in alone], 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(S, torch.cat([x for _, x in alone]), rtol=0, atol=1e-12)
    got = torch.autograd.grad(o.square().sum() + S.square().sum(), arguments)
    wanted = torch.autograd.grad(sum(x.square().sum() + y.square().sum() for x, y in alone), arguments)
    for a, e in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-11)


# ---- float32 at the extremes, at every chunk size ----


@pytest.mark.parametrize("chunk_size", [16, 32, 48, 64, 128, 256])
def test_strongest_bounded_decay_at_every_chunk_size(chunk_size):
    q, k, v, _, beta = inputs(T=150, K=16, V=8, dtype=torch.float32)
    against_the_equation([q, k, v, torch.full_like(q, -5.0), beta], 1e-5, chunk_size=chunk_size)


@pytest.mark.parametrize("chunk_size", [16, 32, 64, 256])
def test_small_steps_behind_huge_ones(chunk_size):
    """Some tokens forget all, the others hardly anything: an exponent that were a difference of running sums would lose the small steps,
    all the more the longer the chunk (2e-4 when it was one)."""
    q, k, v, g, beta = inputs(T=256, K=16, V=8, dtype=torch.float32)
    g = torch.full_like(g, -0.01)
    g[:, :24] = g[:, 100:120] = -110.0
    against_the_equation([q, k, v, g, beta], 2e-6, chunk_size=chunk_size)


@pytest.mark.parametrize("low", [-0.1, -1.0, -5.0])
@pytest.mark.parametrize("chunk_size", [16, 64, 128])
def test_chunks_round_little_more_than_steps(chunk_size, low):
    """Exponents are sums of up to 16 log-decays; what meets in one is taken from the same sums, so that most rounding cancels."""
    arguments = inputs(T=256, K=32, V=32, dtype=torch.float32, low=low)
    expected = kda(*(x.double() for x in arguments), backend="recurrent")
    for actual, wanted in zip(kda(*arguments, backend="chunked", chunk_size=chunk_size), expected, strict=True):
        assert_within(actual, wanted, 1.5e-6)


@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
@pytest.mark.parametrize("low", [0.0, -1e-4])
def test_alike_keys_written_in_full(chunk_size, low):
    """The triangular system is all ones. An inverse by repeated squaring loses three digits here."""
    q, k, v, g, beta = inputs(T=128, K=16, V=8, dtype=torch.float32)
    k = k[:, :1].expand_as(k).contiguous()
    against_the_equation([q, k, v, torch.full_like(g, low), torch.ones_like(beta)], 2e-5, chunk_size=chunk_size)


@pytest.mark.parametrize("C", [16, 32, 80])
def test_unit_lower_inverse(C):
    draw = torch.Generator().manual_seed(C)
    L = torch.randn(2, 3, C, C, generator=draw, dtype=torch.float64).tril(-1) / 4
    eye = torch.eye(C, dtype=torch.float64)
    torch.testing.assert_close(unit_lower_inverse(L, torch.empty_like(L)), torch.linalg.inv(eye + L), rtol=1e-10, atol=1e-10)
    full = torch.ones(1, 1, C, C).tril(-1)
    assert_within(unit_lower_inverse(full, torch.empty_like(full)), torch.linalg.inv(eye + full.double()), 1e-6)


def test_the_last_token_decays_by_exactly_nothing_to_the_end():
    """Row and column sums cancel in the exponent: what a chunk's last token writes is not touched by rounding."""
    g = -5.0 * LOG2_E * torch.rand(2, 3, 4, TILE, 5, generator=torch.Generator().manual_seed(0))
    for wild in (1.0, 20.0):
        decay = tile_decay(g * wild, Buffers(g))
        assert (decay.steps is None) == (wild == 1.0)
        to_the_end = decay.columns[..., -1, :].log2() + decay.tail
        assert float(to_the_end.abs().max()) <= 1e-5 if wild == 1.0 else float(to_the_end.abs().max()) == 0.0


def test_bfloat16_gradients_come_back_in_bfloat16():
    arguments = [x.requires_grad_() for x in inputs(T=40, H=2, dtype=torch.bfloat16)]
    wide = [x.detach().double().requires_grad_() for x in arguments]
    grads = torch.autograd.grad(kda(*arguments)[0].float().square().sum(), arguments)
    expected = torch.autograd.grad(kda(*wide, backend="recurrent")[0].square().sum(), wide)
    for a, e in zip(grads, expected, strict=True):
        assert a.dtype == torch.bfloat16
        assert_within(a, e, 2e-2)


def test_a_finite_input_whose_sum_overflows_is_let_through():
    q, k, v, g, beta = inputs(T=3, dtype=torch.float32)
    v = torch.full_like(v, 1e38)
    assert not bool(v.sum().isfinite())
    assert bool(kda(q, k, v, g, beta)[0].isfinite().all())


# ---- decoding ----


def test_decoding_in_place_is_the_same_step():
    arguments = inputs(B=3, T=9, H=2)
    start = torch.randn(3, 2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, end = kda(*arguments, initial_state=start)
    S, outputs = start.clone(), []
    for t in range(9):
        o, returned = kda(*(x[:, t : t + 1] for x in arguments), initial_state=S, in_place=True)
        assert returned is S
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=0, atol=1e-13)
    torch.testing.assert_close(S, end, rtol=0, atol=1e-13)
    S = start.clone()
    o, returned = kda(*arguments, initial_state=S, in_place=True)  # longer passes too
    assert returned is S and torch.equal(o, whole) and torch.equal(S, end)


def test_a_step_leaves_its_initial_state_alone():
    arguments, start = inputs(T=1), torch.ones(1, 1, 4, 3, dtype=torch.float64)
    for backend in ("auto", "recurrent", "chunked"):
        _, S = kda(*arguments, initial_state=start, backend=backend)
        assert bool((start == 1).all()) and not torch.equal(S, start)


@pytest.mark.parametrize("T", [1, 20])
@pytest.mark.parametrize("axes", [(-1, -2), (0, 1)])
def test_states_of_any_layout(T, axes):
    """A state that is a transposed view, as other libraries store it, is read right and, in place, written right."""
    arguments = inputs(B=2, T=T, H=3)
    start = torch.randn(2, 3, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    start = start.transpose(*axes).contiguous().transpose(*axes)
    o, S = kda(*arguments, initial_state=start.contiguous())
    o_, S_ = kda(*arguments, initial_state=start)
    assert torch.equal(o, o_) and torch.equal(S, S_)
    o_, S_ = kda(*arguments, initial_state=start, in_place=True)
    assert S_ is start and torch.equal(o, o_) and torch.equal(S, start)


@pytest.mark.bad_input
@pytest.mark.parametrize("state, words", [
    (None, "in_place writes over initial_state, which must be torch.float64, got None"),
    (torch.zeros(1, 1, 4, 3), "in_place writes over initial_state, which must be torch.float64, got torch.float32"),
    (torch.zeros(1, 1, 4, 3, dtype=torch.float64, requires_grad=True), "a recorded gradient would need: use torch.no_grad()"),
])  # fmt: skip
def test_in_place_needs_a_state_to_write_to(state, words):
    with pytest.raises(ValueError) as caught:
        kda(*inputs(T=1), initial_state=state, in_place=True)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_decoding_moves_no_state_and_touches_no_snapshot():
    model, ids = tiny_model(), tokens(2, 12)
    cache = model.new_cache(2)
    model(ids[:, :8], cache=cache)
    snapshot = cache.snapshot()
    saved = [{name: x.clone() for name, x in layer.items()} for layer in snapshot.layers]
    slots = [slot for slot in cache.layers if hasattr(slot, "state")]
    places = [slot.state.data_ptr() for slot in slots]
    first = [model(ids[:, t : t + 1], cache=cache).logits for t in range(8, 12)]
    assert slots and places == [slot.state.data_ptr() for slot in slots]
    for layer, before in zip(snapshot.layers, saved, strict=True):
        assert all(torch.equal(layer[name], before[name]) for name in before)
    cache.restore(snapshot)
    again = [model(ids[:, t : t + 1], cache=cache).logits for t in range(8, 12)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
