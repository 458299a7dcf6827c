"""Who is chosen, with what weight, and how the load is made even."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimodel import quantile_bias, route
from minimodel.routing import MarginHistogram, Router, balance_loss, sign_bias
from tests.minimodel.common import assert_within, golden, tiny_config

# The report's Figure 5 (m = 8 tokens, n = 4 experts, k = 1): bar lengths, as spec'd from the drawing; scores are bars / 40.
FIGURE_5 = torch.tensor(
    [[32, 12, 5, 4], [16, 31, 7, 8], [14, 21, 5, 20], [32, 14, 7, 6], [21, 12, 5, 20], [18, 31, 13, 4], [22, 10, 21, 2], [16, 8, 21, 12]],
    dtype=torch.float64,
) / 40  # fmt: skip


def loads(scores, bias, top_k=1):
    return torch.bincount(route(scores, bias, top_k)[1].flatten(), minlength=scores.shape[1]).tolist()


def draw_scores(S, E, seed, spread=1.0):
    draw = torch.Generator().manual_seed(seed)
    skew = torch.randn(E, generator=draw, dtype=torch.float64)
    return torch.sigmoid(spread * skew + torch.randn(S, E, generator=draw, dtype=torch.float64))


# ---- choosing ----


def test_golden_choice_and_weights():
    """A router of the released tiny K3, from its own recorded input. The order inside the top-k is not defined there."""
    z = golden("kimi_k3_tiny")
    scores = torch.sigmoid(z["full/layer3.ffn/input"].flatten(0, 1) @ z["weights/model.layers.3.block_sparse_moe.gate.weight"].T)
    bias = z["weights/model.layers.3.block_sparse_moe.gate.e_score_correction_bias"]
    assert not torch.equal(route(scores, 0 * bias, 2)[1], route(scores, bias, 2)[1])  # the golden bias matters
    weights, indices, _ = route(scores, bias, 2)
    order, theirs = indices.argsort(1), z["full/layer3.gate/out0"].argsort(1)
    assert torch.equal(indices.gather(1, order), z["full/layer3.gate/out0"].gather(1, theirs))
    assert_within(weights.gather(1, order), z["full/layer3.gate/out1"].gather(1, theirs), 2e-6)


@settings(max_examples=60)
@given(S=st.integers(1, 12), E=st.integers(1, 8), data=st.data(), renormalize=st.booleans(), seed=st.integers(0, 10**6))
def test_route_row_by_row(S, E, data, renormalize, seed):
    k = data.draw(st.integers(1, E))
    scores = draw_scores(S, E, seed)
    bias = torch.randn(E, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    weights, indices, cutoff = route(scores, bias, k, renormalize=renormalize)
    for s, w, chosen, c in zip(scores.tolist(), weights.tolist(), indices.tolist(), cutoff.tolist(), strict=True):
        biased = sorted(((x + b, j) for j, (x, b) in enumerate(zip(s, bias.tolist(), strict=True))), reverse=True)
        assert chosen == [j for _, j in biased[:k]]
        assert c == biased[min(k, E - 1)][0]
        total = sum(s[j] for j in chosen) if renormalize and k > 1 else 1.0
        assert all(math.isclose(a, s[j] / total, rel_tol=1e-12) for a, j in zip(w, chosen, strict=True))


def test_bias_steers_the_choice_but_not_the_weights():
    scores = torch.tensor([[0.9, 0.8, 0.1]])
    weights, indices, cutoff = route(scores, torch.tensor([0.0, 0.0, 5.0]), 2)
    assert indices.tolist() == [[2, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.1, 0.9]]))
    torch.testing.assert_close(cutoff, torch.tensor([0.8]))


def test_one_expert_a_token_is_not_renormalized():
    weights, _, _ = route(torch.tensor([[0.3, 0.2]]), torch.zeros(2), 1)
    assert weights.tolist() == [[pytest.approx(0.3)]]


def test_weights_finite_differences():
    scores = draw_scores(4, 5, 0).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: route(s, torch.zeros(5, dtype=torch.float64), 3)[0], (scores,))


# ---- Quantile Balancing ----


def test_figure_5():
    """Loads 4, 3, 1, 0 become 2, 2, 2, 2 in one step; the new bias is a fixed point."""
    zero = torch.zeros(4, dtype=torch.float64)
    assert loads(FIGURE_5, zero) == [4, 3, 1, 0]
    exact = quantile_bias(FIGURE_5, zero, 1)
    torch.testing.assert_close(exact * 40, torch.tensor([-2.75, -2.75, 3.25, 2.25], dtype=torch.float64))
    assert loads(FIGURE_5, exact) == [2, 2, 2, 2]
    torch.testing.assert_close(quantile_bias(FIGURE_5, exact, 1), exact)
    assert route(FIGURE_5, exact, 1)[1].flatten().tolist() == [0, 1, 3, 0, 3, 1, 2, 2]  # tokens 3, 5 and 7 moved
    histogram = quantile_bias(FIGURE_5, zero, 1, "histogram", bins=1000)
    torch.testing.assert_close(histogram * 40, torch.tensor([-10.30, -5.26, 7.78, 7.78], dtype=torch.float64), atol=0.005, rtol=0)
    assert loads(FIGURE_5, histogram) == [2, 2, 2, 2]


@settings(max_examples=60)
@given(S=st.integers(1, 30), E=st.integers(2, 8), data=st.data(), seed=st.integers(0, 10**6))
def test_exact_rule_by_brute_force(S, E, data, seed):
    """b_j = -(the (floor(q)+1)-th largest margin of j), q = S k / E; never interpolated; then centered."""
    k = data.draw(st.integers(1, E - 1))
    scores = draw_scores(S, E, seed)
    old = 0.1 * torch.randn(E, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    raw = []
    for j in range(E):
        margins = []
        for i in range(S):
            biased = sorted((float(scores[i, n] + old[n]) for n in range(E)), reverse=True)
            margins.append(float(scores[i, j]) - biased[k])
        raw.append(-sorted(margins, reverse=True)[S * k // E])
    mean = sum(raw) / E
    actual = quantile_bias(scores, old, k)
    torch.testing.assert_close(actual, torch.tensor([b - mean for b in raw], dtype=torch.float64), rtol=0, atol=1e-12)


@settings(max_examples=60)
@given(S=st.integers(2, 60), E=st.integers(2, 8), data=st.data(), seed=st.integers(0, 10**6), bins=st.sampled_from([50, 1000]))
def test_histogram_lies_within_one_bin(S, E, data, seed, bins):
    """Before centering, each bias is within one bin width of the ceil(q)-th smallest r = cutoff - score."""
    k = data.draw(st.integers(1, E - 1))
    scores = draw_scores(S, E, seed)
    old = 0.1 * torch.randn(E, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    pooled = MarginHistogram(old, k, bins=bins)
    pooled.add(scores, route(scores, pooled.bias, k)[2])
    assert int(pooled.counts.sum()) == S * E
    width = (float(old.max()) - float(old.min()) + 2) / bins
    margins = (route(scores, old, k)[2][:, None] - scores).sort(0).values[math.ceil(S * k / E) - 1]
    difference = pooled.next_bias().double() - (margins - margins.mean())
    # centering moves all biases together, by at most one more width
    assert float(difference.max() - difference.min()) <= 2 * width + 1e-6
    assert float(difference.abs().max()) <= 2 * width + 1e-6


def test_histogram_against_a_plain_count():
    """The report's rule bin by bin: first bin with cum >= ceil(q), then the fraction inside it."""
    scores, old, k, B = draw_scores(37, 5, 3), torch.tensor([0.2, -0.1, 0.0, 0.3, -0.4], dtype=torch.float64), 2, 40
    low, w, q = float(old.min()) - 1, (float(old.max() - old.min()) + 2) / B, 37 * 2 / 5
    r = route(scores, old, k)[2][:, None] - scores
    raw = []
    for j in range(5):
        counts = [0] * B
        for x in r[:, j].tolist():
            counts[min(max(math.floor((x - low) / w), 0), B - 1)] += 1
        total = list(itertools.accumulate(counts))
        b = next(i for i, n in enumerate(total) if n >= math.ceil(q))
        before = total[b] - counts[b]
        raw.append(low + (b + min(max((q - before) / counts[b], 0), 1)) * w)
    expected = torch.tensor([b - sum(raw) / 5 for b in raw], dtype=torch.float64)
    torch.testing.assert_close(quantile_bias(scores, old, k, "histogram", bins=B), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("estimator", ["exact", "histogram"])
def test_a_skewed_router_is_even_after_a_few_steps(estimator):
    scores = draw_scores(2048, 32, 0, spread=3.0)
    bias = torch.zeros(32, dtype=torch.float64)
    violations = []
    for _ in range(6):
        load = torch.tensor(loads(scores, bias, 4)) / (2048 * 4 / 32)
        violations.append(float(load.max()) - 1)
        bias = quantile_bias(scores, bias, 4, estimator)
    assert violations[0] > 2 and violations[-1] < 0.25
    slow = torch.zeros(32, dtype=torch.float64)
    for _ in range(6):
        slow = sign_bias(torch.tensor(loads(scores, slow, 4)), slow)
    assert max(loads(scores, slow, 4)) / 256 - 1 > 2  # the rule that it replaces has hardly begun


def test_the_bias_is_centered_and_keeps_its_dtype():
    for dtype in (torch.float32, torch.float64):
        scores, old = draw_scores(20, 4, 1).to(dtype), torch.zeros(4, dtype=dtype)
        for estimator in ("exact", "histogram"):
            bias = quantile_bias(scores, old, 1, estimator)
            assert bias.dtype == dtype and abs(float(bias.sum())) < 1e-6


def test_every_expert_chosen_needs_no_balance():
    scores = draw_scores(10, 4, 0)
    assert loads(scores, torch.zeros(4, dtype=torch.float64), 4) == [10] * 4
    assert bool(torch.isfinite(quantile_bias(scores, torch.zeros(4, dtype=torch.float64), 4)).all())


# ---- the router: when the bias moves ----


def router(estimator="histogram", seed=0):
    m = Router(tiny_config())
    with torch.no_grad():
        m.weight.copy_(torch.randn(m.weight.shape, generator=torch.Generator().manual_seed(seed)))
    m.estimator = estimator
    return m


def hidden(S, seed=0):
    return torch.randn(S, 20, generator=torch.Generator().manual_seed(seed)) + 0.3


@pytest.mark.parametrize("estimator", ["exact", "histogram"])
def test_bias_is_used_from_the_next_step_only(estimator):
    m, x = router(estimator), hidden(50)
    before = m(x)
    assert not m.e_score_correction_bias.any()
    scores = torch.sigmoid(x @ m.weight.T)
    assert all(torch.equal(a, b) for a, b in zip(m(x), before, strict=True))  # a second micro-batch of the same step
    m.update_bias()
    expected = quantile_bias(torch.cat([scores, scores]), torch.zeros(6), 2, estimator)
    torch.testing.assert_close(m.e_score_correction_bias, expected.detach())
    assert not torch.equal(m(x)[1], before[1])


@pytest.mark.parametrize("estimator", ["exact", "histogram"])
def test_micro_batches_are_pooled_not_averaged(estimator):
    whole, parts = router(estimator), router(estimator)
    x = torch.cat([hidden(20, 1), hidden(44, 2) + 0.5])
    whole(x)
    whole.update_bias()
    for part in x.split([20, 44]):
        parts(part)
    parts.update_bias()
    torch.testing.assert_close(parts.e_score_correction_bias, whole.e_score_correction_bias)
    scores = torch.sigmoid(x @ whole.weight.detach().T)
    average = (quantile_bias(scores[:20], torch.zeros(6), 2) + quantile_bias(scores[20:], torch.zeros(6), 2)) / 2
    assert (average - whole.e_score_correction_bias).abs().max() > 0.01


def test_frozen_in_eval_and_without_tokens():
    m = router().eval()
    m(hidden(50))
    m.update_bias()
    assert not m.e_score_correction_bias.any()
    m.train()
    m.update_bias()  # nothing was pooled since
    assert not m.e_score_correction_bias.any()


def test_one_step_pools_only_its_own_tokens():
    once, twice = router(), router()
    twice(hidden(50, 7))
    twice.update_bias()
    twice.e_score_correction_bias.zero_()
    for m in (once, twice):
        m(hidden(50, 8))
        m.update_bias()
    assert torch.equal(once.e_score_correction_bias, twice.e_score_correction_bias)


def test_ema():
    plain, smooth = router(), router()
    smooth.ema = 0.75
    for m in (plain, smooth):
        m(hidden(50))
        m.update_bias()
    torch.testing.assert_close(smooth.e_score_correction_bias, 0.25 * plain.e_score_correction_bias)


@pytest.mark.parametrize("name, value, says", [
    ("estimator", "median", "estimator must be 'exact' or 'histogram', got 'median'"), ("ema", 1.0, r"ema must lie in \[0, 1\), got 1.0"),
    ("ema", float("nan"), "ema must lie"),
])
def test_an_unknown_rule_is_refused_where_it_is_set(name, value, says):
    m = router()
    before = getattr(m, name)
    with pytest.raises(ValueError, match=says):
        setattr(m, name, value)
    assert getattr(m, name) == before


def test_padding_is_not_counted():
    m, alone = router(), router()
    x, valid = hidden(50), torch.arange(50) >= 20
    m(x, valid)
    alone(x[20:])
    for r in (m, alone):
        r.update_bias()
    assert torch.equal(m.e_score_correction_bias, alone.e_score_correction_bias)


def test_no_gradient_flows_through_the_bias():
    m, x = router("exact"), hidden(30).requires_grad_()
    m(x)
    m.update_bias()
    assert not m.e_score_correction_bias.requires_grad and "e_score_correction_bias" not in dict(m.named_parameters())
    m(x)[0].sum().backward()


def test_scores_are_float32_in_a_bfloat16_model():
    m = router().to(torch.bfloat16)
    weights, _ = m(hidden(5).bfloat16())
    assert weights.dtype == torch.float32
    assert_within(weights.sum(1), torch.ones(5), 1e-6)


# ---- what it replaces ----


def test_sign_rule():
    bias = sign_bias(torch.tensor([4, 3, 1, 0]), torch.zeros(4), rate=0.01)
    torch.testing.assert_close(bias, torch.tensor([-0.01, -0.01, 0.01, 0.01]))
    assert sign_bias(torch.tensor([2, 2]), torch.ones(2)).tolist() == [1.0, 1.0]


def test_auxiliary_loss():
    even, indices = torch.full((4, 2), 0.5), torch.tensor([[0], [1], [0], [1]])
    assert float(balance_loss(even, indices)) == pytest.approx(1.0)
    crowded = torch.tensor([[0.9, 0.1]] * 4)
    assert float(balance_loss(crowded, torch.zeros(4, 1, dtype=torch.long))) == pytest.approx(2 * 0.9)
    scores = draw_scores(6, 3, 0).requires_grad_()
    chosen = route(scores.detach(), torch.zeros(3, dtype=torch.float64), 2)[1]
    assert torch.autograd.gradcheck(lambda s: balance_loss(s, chosen), (scores,))


# ---- wrong input ----


@pytest.mark.bad_input
@pytest.mark.parametrize("scores, bias, k, words", [
    (torch.zeros(3), torch.zeros(3), 1, "scores must be [tokens, E], got shape (3,)"),
    (torch.zeros(2, 3), torch.zeros(2), 1, "bias must be [E] = (3,) for scores of shape (2, 3), got (2,)"),
    (torch.zeros(2, 3), torch.zeros(3), 4, "top_k must lie in 1..E = 1..3, got 4"),
    (torch.zeros(2, 3), torch.zeros(3), 0, "top_k must lie in 1..E = 1..3, got 0"),
    (torch.full((2, 3), torch.nan), torch.zeros(3), 1, "scores are after the sigmoid and must lie in [0, 1], got nan to nan"),
])  # fmt: skip
@pytest.mark.parametrize("function", [route, quantile_bias])
def test_wrong_arguments(function, scores, bias, k, words):
    with pytest.raises(ValueError) as caught:
        function(scores, bias, k)
    assert str(caught.value) == words


@pytest.mark.bad_input
def test_wrong_options():
    scores, bias = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(3)
    with pytest.raises(ValueError, match="estimator must be 'exact' or 'histogram', got 'mean'"):
        quantile_bias(scores, bias, 1, "mean")
    with pytest.raises(ValueError, match="bins must be at least 1, got 0"):
        quantile_bias(scores, bias, 1, "histogram", bins=0)
    for estimator in ("exact", "histogram"):
        with pytest.raises(ValueError, match="scores must hold at least one token, got 0"):
            quantile_bias(scores[:0], bias, 1, estimator)
    with pytest.raises(TypeError, match="scores must be a floating-point tensor, got torch.int64"):
        route(scores.long(), bias, 1)
    with pytest.raises(ValueError, match=r"scores are after the sigmoid and must lie in \[0, 1\], got 3 to 3"):
        quantile_bias(3 * torch.ones(4, 3), bias, 1)
