"""Nothing that a learner's function does ends the grading, changes what comes after it, or goes unread."""

import pytest
import torch

from minimodel import checks
from minimodel.checks.grading import CASES, NotYet, Step

double = Step("double", lambda x, n: (2 * x, n), lambda draw: {"x": draw.normal(2, draw.pick(3, 4)), "n": 5}, ("y [B T]", "count"))
pytestmark = pytest.mark.bad_input


def said(step, mine, **options):
    with pytest.raises(NotYet) as verdict:
        step(mine, **options)
    return str(verdict.value)


def stop_with(error):
    def mine(*inputs):
        raise error

    return mine


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize("error, words", [
    (SystemExit(), "SystemExit, in mine"), (SystemExit(0), "SystemExit: 0, in mine"), (GeneratorExit(), "GeneratorExit, in mine"),
    (Speechless(), "Speechless, in mine"),
])  # fmt: skip
def test_whatever_stops_a_function_is_a_verdict(error, words):
    assert f"your function stopped with {words}" in said(double, stop_with(error))


@pytest.mark.parametrize("error, words", [(SystemExit(), "SystemExit."), (Speechless(), "Speechless.")])
def test_whatever_stops_an_answer_is_a_verdict(error, words, capsys):
    checks.check(stop_with(error), lambda answer: answer(), "Look again.")
    assert capsys.readouterr().out == f"Not yet: with this answer the check stops with {words} Look again.\n"


def test_a_law_that_is_left_by_exit_is_broken():
    def mine(x):
        return 2 * x if x.abs().max() < 50 else stop_with(SystemExit())()

    step = Step("same", lambda x: x, lambda draw: {"x": draw.normal(2)}, ("y [B]",))
    step.law("large stays large")(lambda mine, x: bool(mine(1000 + x).min() > 50))
    assert "Broken: large stays large." in said(step, mine)


def test_a_person_can_stop_a_check():
    with pytest.raises(KeyboardInterrupt):
        double(stop_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        checks.check(stop_with(KeyboardInterrupt()), lambda answer: answer(), "")


def test_a_function_is_called_once_a_case(capsys):
    calls = []

    def mine(x, n):
        calls.append(n)
        if len(calls) > CASES:
            raise ValueError("called too often")
        return 2 * x, n

    double(mine)
    assert len(calls) == CASES and "right" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("change, words", [
    (lambda y: y.to("meta"), "y is a strided tensor on meta, it should be a strided one on cpu."),
    (lambda y: y.to_sparse(), "y is a sparse_coo tensor on cpu, it should be a strided one on cpu."),
    (lambda y: torch.nested.nested_tensor([y]), "its results cannot be read: "),
])  # fmt: skip
def test_results_that_cannot_be_read_are_a_verdict(change, words):
    assert words in said(double, lambda x, n: (change(2 * x), n))


def test_results_of_another_kind_are_told_before_they_are_put_in_order():
    def mine(*inputs):
        weights, indices = checks.route.reference(*inputs)
        return weights.to(torch.complex128), indices.to(torch.complex128)

    assert "weights is complex128, it should be float64." in said(checks.route, mine)


@pytest.mark.parametrize("name", ["latent_moe", "kda_layer", "mla_layer", "depth_stack"])
def test_a_container_that_was_emptied_is_noticed(name):
    step = getattr(checks, name)
    container = {"depth_stack": "readers"}.get(name, "p")

    def mine(*inputs):
        result = step.reference(*inputs)
        next(x for x, key in zip(inputs, step.inputs(0), strict=True) if key == container).clear()
        return result

    assert f"writes over its input {container}." in said(step, mine)


def test_an_input_that_is_written_over_in_one_case_only_is_noticed():
    assert "writes over its input x." in said(double, lambda x, n: ((x.mul_(2) if x.shape[1] == 4 else 2 * x), n))


def test_settings_of_torch_are_as_before():
    def mine(x, n):
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        return 2 * x, n

    before = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        double(mine)
        checks.check(mine, lambda answer: answer(torch.ones(1), 1), "")
        assert (torch.get_default_dtype(), torch.is_grad_enabled()) == before == (torch.float32, True)
    finally:
        torch.set_default_dtype(before[0])
        torch.set_grad_enabled(before[1])


def test_a_seed_is_text_in_one_spelling(monkeypatch):
    composed, typed_in_two = (double.inputs(0, seed)["x"] for seed in ("Zo\u00eb", "Zoe\u0308"))
    assert torch.equal(composed, typed_in_two)
    monkeypatch.setenv("K3_SEED", "\udcff")
    with pytest.raises(ValueError, match=r"^K3_SEED must be text in UTF-8, got '\\udcff'$"):
        double(double.reference)
