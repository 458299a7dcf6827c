"""A wrong answer whose cause lies in an earlier step: that step is named. And every step has something to say beyond the difference."""
import pytest

from minimodel import checks
from minimodel.checks.called import called
from minimodel.checks.grading import NotYet

NOTEBOOK = """
import torch
from torch import nn
from minimodel.layers import rms_norm

def kda_step(S, q, k, v, g, beta):
    error = v - (k[:, None] @ S).squeeze(1)
    S = g.exp()[..., None] * S {changed}
    S = S + k[..., None] * (beta[:, None] * error)[:, None]
    return (q[:, None] @ S).squeeze(1), S

def one_sequence(*arrays):
    H, K, V = *arrays[0].shape[1:], arrays[2].shape[-1]
    S, row = torch.zeros(H, K, V, dtype=arrays[0].dtype), []
    for q, k, v, g, beta in zip(*arrays):
        o, S = kda_step(S, q * K**-0.5, k, v, g, beta)
        row.append(o)
    return torch.stack(row), S

def kda_recurrent(q, k, v, g, beta):
    parts = [(lambda b: one_sequence(*(x[b] for x in (q, k, v, g, beta))))(b) for b in range(len(q))]
    return torch.stack([o for o, _ in parts]), torch.stack([S for _, S in parts])

class Layer(nn.Module):
    def forward(self, *inputs):
        return kda_recurrent(*inputs)

def gated_norm(o, gate, gain):
    return rms_norm(o, gain, 1e-5) * gate

def l2norm(x):
    return l2norm(x)

def write_strength(x, weight):
    return 2 * l2norm(x @ weight.T)
"""


def notebook(changed=""):
    names = {"__name__": "__main__"}
    exec(compile(NOTEBOOK.replace("{changed}", changed), "cell", "exec"), names)
    return names


def said(step, mine):
    with pytest.raises(NotYet) as verdict:
        step(mine)
    return str(verdict.value)


def test_the_step_that_is_wrong_inside_another_is_named_with_its_slip():
    verdict = said(checks.kda_recurrent, notebook()["kda_recurrent"])
    assert "The cause may be kda_step, which it calls and which fails its own check, checks.kda_step(kda_step)." in verdict
    assert verdict.endswith("The likely slip there: the error v - S^T k was taken before the state faded. Fade first, then compare.")
    assert "cause" not in said(checks.kda_step, notebook()["kda_step"])


def test_what_is_used_comes_first_through_functions_lambdas_and_classes():
    names = notebook()
    for mine in (names["Layer"], lambda: None, names["kda_recurrent"]):
        found = called(mine, checks.STEPS)
        assert list(found) == ([] if mine.__name__ == "<lambda>" else ["kda_step", "kda_recurrent"][: 1 + (mine is names["Layer"])])
    assert found["kda_step"] is names["kda_step"]


def test_the_courses_own_functions_are_not_blamed():
    assert called(notebook()["gated_norm"], checks.STEPS) == {}
    assert "cause" not in said(checks.gated_norm, notebook()["gated_norm"])


def test_a_function_that_calls_itself_ends():
    verdict = said(checks.write_strength, notebook()["write_strength"])
    assert "RecursionError" in verdict and "The cause may be l2norm" in verdict


def test_right_answers_and_things_that_are_no_functions_are_left_alone(capsys):
    class Callable:
        def __call__(self, x):
            return x

    assert called(Callable(), checks.STEPS) == {}
    assert "cause" not in said(checks.l2norm, Callable())


@pytest.mark.parametrize("step", checks.STEPS.values(), ids=checks.STEPS)
def test_some_slip_is_told_with_the_law_that_it_breaks(step):
    verdicts = [said(step, slip.function) for slip in step.slips]
    assert any("Broken: " in verdict and f"The likely slip: {slip.hint}." in verdict
               for verdict, slip in zip(verdicts, step.slips, strict=True))
