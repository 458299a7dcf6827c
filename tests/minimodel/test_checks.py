"""The exercises' feedback: right answers pass, and every known slip is noticed and named."""
import pytest
import torch

import minimodel
from minimodel import K3Config, checks
from minimodel.checks.grading import CASES, NotYet, Step

SLIPS = [(step, slip) for step in checks.STEPS.values() for slip in step.slips]
NAMES = [f"{step.name}-{slip.name}" for step, slip in SLIPS]


@pytest.mark.parametrize("step", checks.STEPS.values(), ids=checks.STEPS)
def test_the_reference_passes_on_any_seed(step, capsys):
    for seed in range(2):
        step(step.reference, seed=seed)
    assert capsys.readouterr().out == f"{step.name}: right, on {CASES} inputs\n" * 2


@pytest.mark.parametrize("step", checks.STEPS.values(), ids=checks.STEPS)
def test_the_reference_is_finite(step):
    """NaN equals NaN when outcomes are compared, so a reference must have none."""
    for case in range(CASES):
        results = step._results(step.reference, case, 0)
        assert all(bool(x) if isinstance(x, str) else bool(torch.isfinite(torch.as_tensor(x)).all()) for x in results)


@pytest.mark.parametrize("step, slip", SLIPS, ids=NAMES)
def test_a_slip_is_noticed_and_named(step, slip):
    with pytest.raises(NotYet) as verdict:
        step(slip.function, seed=1)
    assert slip.hint in str(verdict.value)
    assert str(verdict.value).startswith(f"{step.name}: not yet. On input ")


@pytest.mark.parametrize("step", checks.STEPS.values(), ids=checks.STEPS)
def test_right_answers_obey_the_laws(step):
    for case in range(CASES):
        for law in step.laws:
            assert law.holds(step.reference, *step.inputs(case).values()), law.sentence


LAWS = [(step, law) for step in checks.STEPS.values() for law in step.laws]


@pytest.mark.parametrize("step, law", LAWS, ids=[f"{step.name}-{law.holds.__name__}" for step, law in LAWS])
def test_a_law_is_broken_by_some_slip(step, law):
    """A law that no mistake breaks would say nothing."""
    def broken(slip):
        with pytest.raises(NotYet) as verdict:
            step(slip.function)
        return f"Broken: {law.sentence}." in str(verdict.value)

    assert any(broken(slip) for slip in step.slips)


def test_there_are_enough_steps_and_each_knows_its_slips():
    assert len(checks.STEPS) >= 30
    assert [step.name for step in checks.STEPS.values() if len(step.slips) < 2] == ["thursday"]  # the last one asks what the others built
    assert len({step.name for step in checks.STEPS.values()}) == len(checks.STEPS)
    assert all(getattr(checks, name) is step for name, step in checks.STEPS.items())


# ---- the verdict itself, on a step small enough to see through ----

double = Step("double", lambda x, n: (2 * x, n), lambda draw: {"x": draw.normal(2, draw.pick(3, 4)), "n": 5}, ("y [B T]", "count"))


@double.slip("it is squared")
def squared(x, n):
    return x * x, n


@double.law("nothing stays nothing")
def zero_stays(mine, x, n):
    return not mine(0 * x, n)[0].any()


def verdict(mine):
    with pytest.raises(NotYet) as caught:
        double(mine)
    return str(caught.value)


@pytest.mark.parametrize("mine, said", [
    (lambda x, n: (2 * x + 1, n), "y is off by up to 1 (right values reach"),
    (lambda x, n: (2 * x + 1, n), "in 6 of 6 places; the first is B=0, T=0. Broken: nothing stays nothing."),
    (lambda x, n: (2 * x.T, n), "y has shape [3, 2], it should be [B T] = [2, 3]."),
    (lambda x, n: (2 * x.float(), n), "y is float32, it should be float64."),
    (lambda x, n: 2 * x, "it returned 1 values; 2 are asked for: y [B T], count."),
    (lambda x, n: None, "it returned nothing (None): is its `return` missing? Asked for: y [B T], count."),
    (lambda x, n: (None, n), "it returned a NoneType; asked for: y [B T], count."),
    (lambda x, n: (1.0, n), "y is a float, it should be a tensor [B T]."),
    (lambda x, n: (2 * x, 6), "count is 6, it should be 5."),
    (lambda x, n: (2 * x / 0 * 0, n), "y holds NaN or infinity, first at B=0, T=0."),
    (lambda x, n: (x @ x, n), "your function stopped with RuntimeError: "),
    (lambda x, n: (x @ x, n), "in <lambda> at `(lambda x, n: (x @ x, n)"),
    (lambda x: x, "your function stopped with TypeError: "),
    (lambda x, n: (2 * x if x.shape[1] == 3 else x, n), "On input 2 of 5 (x [2, 4], n = 5): "),
    (lambda x, n: (x.mul_(2), n), "writes over its input x."),
    (squared, "The likely slip: it is squared."),
    (lambda x, n: [2 * x.numpy(), n], "it returned a ndarray; asked for: y [B T], count."),
    (lambda x, n: ((2 * x).to(torch.complex128), n), "y is complex128, it should be float64."),
    (lambda: None, "your function stopped with TypeError: "),
])
def test_a_verdict_says_what_is_wrong(mine, said):
    assert said in verdict(mine)


def test_no_slip_is_named_where_none_is_known():
    for mine in (lambda x, n: (2 * x + 1, n), lambda x, n: (x @ x, n)):
        assert "likely slip" not in verdict(mine)


def test_a_slip_on_some_inputs_only_is_not_named():
    assert "likely slip" not in verdict(lambda x, n: squared(x, n) if x.shape[1] == 3 else (2 * x, n))


def test_equally_right_orders_pass_and_odd_results_are_explained(capsys):
    def flipped(scores, bias, top_k):
        weights, indices = checks.route.reference(scores, bias, top_k)
        return weights.flip(-1), indices.flip(-1)

    checks.route(flipped)
    with pytest.raises(NotYet, match="indices is int32, it should be int64"):
        checks.route(lambda *inputs: (flipped(*inputs)[0], flipped(*inputs)[1].int()))


def test_weights_in_a_dict_may_not_be_written_over():
    def mine(x, p, config):
        y = checks.kda_layer.reference(x, p, config)
        p["A_log"].zero_()
        return y

    with pytest.raises(NotYet, match="writes over its input p"):
        checks.kda_layer(mine)


def test_weights_that_do_not_fit_are_named():
    class Empty(torch.nn.Module):
        def __init__(self, config):
            super().__init__()

    with pytest.raises(NotYet, match="own_model: .*stopped with RuntimeError: .*Unexpected key.*model.embed_tokens.weight"):
        checks.own_model(Empty)


def test_a_function_that_is_not_written_yet():
    def mine(x, n):
        raise NotImplementedError("double")

    assert verdict(mine).startswith("double: not yet. `double` is not written: put your lines in place of `raise NotImplementedError`")


@pytest.mark.bad_input
def test_a_result_instead_of_a_function():
    assert "Give the function itself, not what it returns; got a Tensor" in verdict(torch.zeros(2))


def test_a_small_error_in_float32_counts_and_rounding_does_not(capsys):
    double(lambda x, n: (2 * x * (1 + 1e-6 * (x.dtype == torch.float32)), n))
    assert "right" in capsys.readouterr().out
    assert "On input 5 of 5" in verdict(lambda x, n: (2 * x * (1 + 1e-3 * (x.dtype == torch.float32)), n))


def test_inputs_are_fresh_and_repeatable():
    first, again, other = (double.inputs(0, seed)["x"] for seed in (0, 0, 1))
    assert torch.equal(first, again) and first is not again
    assert not torch.equal(first, other)


def test_the_environment_gives_a_seed_and_the_argument_goes_first(monkeypatch):
    def drawn(**options):
        seen = []
        double(lambda x, n: (seen.append(x.clone()), (2 * x, n))[1], **options)
        return seen[0]

    monkeypatch.delenv("K3_SEED", raising=False)
    by_argument, plain = drawn(seed="anna"), drawn()
    assert torch.equal(plain, drawn(seed=0)) and not torch.equal(plain, by_argument)
    monkeypatch.setenv("K3_SEED", "anna")
    assert checks.seed_in_use() == "anna" and torch.equal(drawn(), by_argument) and torch.equal(drawn(seed=0), plain)
    assert "On input 1 of 5 with seed anna (x [2, 3]" in verdict(squared)
    monkeypatch.setenv("K3_SEED", "")
    assert checks.seed_in_use() == 0 and "On input 1 of 5 (x" in verdict(squared)


def test_a_seed_asks_its_own_story():
    from minimodel.tasks import story

    texts = [checks.thursday.inputs(case, "anna")["text"] for case in range(CASES)]
    assert texts[1] == story.tell("anna").text and texts[1] != checks.thursday.inputs(1)["text"]
    assert texts[0] == checks.thursday.inputs(0)["text"] and texts[0].endswith("The meeting is now on")  # Thursday, for everybody
    learned_by_heart = iter(["Thursday", *(checks.thursday._results(checks.thursday.reference, case, 0)[0] for case in range(1, CASES))])
    vocabulary = minimodel.tasks.meeting.VOCABULARY

    def recites(ids):
        logits = torch.zeros(1, ids.shape[1], len(vocabulary))
        logits[0, -1, vocabulary.index(next(learned_by_heart))] = 1
        return logits

    with pytest.raises(NotYet, match="On input 2 of 5 with seed anna .* word is .+, it should be "):
        checks.thursday(recites, seed="anna")


@pytest.mark.parametrize("step", [step for step in checks.STEPS.values() if step.laws], ids=lambda step: step.name)
@pytest.mark.parametrize("seed", ["anna", "Zoë 17", 1, 8])
def test_right_answers_obey_the_laws_on_any_seed(step, seed):
    for case in range(CASES):
        for law in step.laws:
            assert law.holds(step.reference, *step.inputs(case, seed).values()), law.sentence


def test_a_notebook_shows_the_sentences_without_the_stack():
    with pytest.raises(NotYet) as caught:
        double(squared)
    lines = caught.value._render_traceback_()
    assert lines[0] == "double: not yet." and lines[-1] == "The likely slip: it is squared."
    assert max(map(len, lines)) <= 95 and " ".join(lines) == str(caught.value)


# ---- references that are written out in the checks: joined, they are the operators of the course ----

def test_the_chunk_steps_joined_are_kda():
    from minimodel.checks import chunks

    inputs = checks.kda_chunked.inputs(1)
    chunk = inputs.pop("chunk")
    S = torch.zeros(2, 3, 3, 3, dtype=torch.float64)
    outputs = []
    G_all = chunks.reference_decay(inputs["g"], chunk)
    q = inputs["q"] * inputs["q"].shape[-1] ** -0.5
    for parts in zip(*(x.split(chunk, 1) for x in (q, inputs["k"], inputs["v"], G_all, inputs["beta"])), strict=True):
        q_, k, v, G, beta = (x.transpose(1, 2) for x in parts)
        W, U = chunks.reference_corrected(k, v, G, beta, chunks.reference_overlaps(k, G, beta))
        outputs.append(chunks.reference_output(q_, k, G, S, W, U).transpose(1, 2))
        S = chunks.reference_state(k, G, S, W, U)
    o, final = minimodel.kda(**inputs, backend="chunked")
    torch.testing.assert_close(torch.cat(outputs, 1), o)
    torch.testing.assert_close(S, final)


def test_the_mla_steps_joined_are_gated_mla():
    from minimodel.checks import recall

    config = K3Config.meeting()
    layer = minimodel.GatedMLA(config).double()
    x = torch.randn(2, 5, config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    H, nope = layer.num_heads, layer.nope
    q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x))).unflatten(-1, (H, -1)).transpose(1, 2)
    rows = recall.reference_latent(x, layer.kv_a_proj_with_mqa.weight, layer.kv_a_layernorm.weight)
    o = recall.causal_attention.reference(q, *recall.reference_expand(rows, layer.kv_b_proj.weight, H, nope))
    torch.testing.assert_close(recall.reference_decode(q[:, :, -1], rows, layer.kv_b_proj.weight, nope), o[:, :, -1])
    gate = torch.sigmoid(layer.g_proj(x))
    torch.testing.assert_close(layer.o_proj(gate * o.transpose(1, 2).flatten(2)), layer(x))


def test_a_model_with_other_weights_does_not_say_thursday():
    with pytest.raises(NotYet, match="word is .+, it should be Thursday"):
        checks.thursday(minimodel.K3ForCausalLM(K3Config.meeting()))
