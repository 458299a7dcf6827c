"""Palindrome, MQAR and stack, as in the Kimi Linear paper's Figure 4: two layers, two heads of 128 channels, four rules for the state."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from minimodel.config import K3Config
from minimodel.experiments.bodies import plain
from minimodel.experiments.definition import Arm, Bars, Experiment, Finding, Lines, Measured, Published, Scores, as_wide_as
from minimodel.facts import KimiLinear
from minimodel.formats import format_probability
from minimodel.model import K3ForCausalLM
from minimodel.tasks import mqar, palindrome, scoring, stack

MIXERS = {"kda": "KDA", "gated_delta_net": "Gated DeltaNet", "delta_net": "DeltaNet", "mamba2": "Mamba-2 style"}
ROWS, LETTERS, PAIRS, OPERATIONS, STACKS = 16, 32, 16, 32, 8  # sequences of 65, 64 and 96 tokens
TASKS = {"palindrome": "palindrome", "mqar": "MQAR", "stack": "stack"}
VOCABULARY = {"palindrome": 32, "mqar": 64, "stack": stack.vocab_size(STACKS)}
EVERY = 25  # steps between two points of a learning curve


def batch(arm: str, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Sixteen sequences of the arm's task."""
    task = arm.split("-")[0]
    if task == "palindrome":
        return palindrome.batch(seed, step, rows=ROWS, letters=LETTERS)
    if task == "mqar":
        return mqar.batch(seed, step, rows=ROWS, pairs=PAIRS, vocab_size=VOCABULARY["mqar"])
    return stack.batch(seed, step, rows=ROWS, operations=OPERATIONS, stacks=STACKS)


@cache
def held_out(task: str, rows: int) -> tuple[Tensor, Tensor]:
    if task == "palindrome":
        return palindrome.held_out(0, rows=rows, letters=LETTERS)
    if task == "mqar":
        return mqar.held_out(0, rows=rows, pairs=PAIRS, vocab_size=VOCABULARY["mqar"])
    return stack.held_out(0, rows=rows, operations=OPERATIONS, stacks=STACKS)


def evaluate(model: K3ForCausalLM, arm: str, answers: int) -> Scores:
    """Exact matches on held-out sequences."""
    ids, labels = held_out(arm.split("-")[0], max(2, answers // 16))
    return {"accuracy": scoring.accuracy(model, ids, labels, rows=32)}


def measure(model: K3ForCausalLM, arm: str, seed: int, log: list[dict], answers: int) -> Measured:
    curve = [(row["step"] + 1, row["accuracy"]) for row in log if "accuracy" in row]
    reached = [step for step, y in curve if y >= 0.9]
    scores = {"accuracy": curve[-1][1], "steps to 90 %": float(reached[0])} if reached else {"accuracy": curve[-1][1]}
    return Measured(scores, {TASKS[arm.split("-")[0]]: {"x": [float(x) for x, _ in curve], "y": [y for _, y in curve]}})


def body(mixer: str, task: str) -> K3Config:
    return plain(mixer, layers=2, vocab_size=VOCABULARY[task], heads=2, channels=128)


def finding(scores: dict[str, Scores]) -> Finding:
    parts, agrees = [], True
    for task, said in TASKS.items():
        found = {mixer: scores[f"{task}-{mixer}"]["accuracy"] for mixer in MIXERS if f"{task}-{mixer}" in scores}
        parts.append(f"{said}: " + ", ".join(f"{MIXERS[m]} {format_probability(y)}" for m, y in found.items()))
        agrees &= found.get("kda", 0) >= max(found.values()) - 0.01 and found.get("mamba2", 1) < found.get("kda", 0)
    end = (
        "KDA is first, or within a point of it, and Mamba-2 behind it in all three."
        if agrees
        else "The paper's order is not found in all three."
    )
    return Finding(agrees, f"{'; '.join(parts)}. {end}")


EXPERIMENT = Experiment(
    name="synthetic",
    question="Which rule for a fixed-size state recalls, reverses and tracks best?",
    claim="KDA learns palindrome and MQAR faster than Gated DeltaNet and the stack as fast; Mamba-2 fails all three.",
    setup=(
        "Two layers, two heads of 128 channels, as in the paper, feed-forwards as wide as it takes for the same number of parameters; "
        f"{LETTERS} letters, {PAIRS} pairs, {OPERATIONS} operations on {STACKS} stacks: sequences of 65, 64 and 96 tokens where the paper "
        "has 256 to 2,048, 8 stacks where it has 64 (as many operations a stack as 64 have in 768 tokens), and a few hundred steps where "
        "it has up to 20,000. The paper's rates are 5e-5 to 1e-3, tried for every model."
    ),
    arms={
        f"{task}-{mixer}": Arm(f"{said}: {name}", as_wide_as(body(mixer, task), Arm("", body("kda", task)).parameters))
        for task, said in TASKS.items() for mixer, name in MIXERS.items()
    },
    batch=batch, steps=200, lr=1e-2, measure=measure, evaluate=evaluate, evaluate_every=EVERY,
    shows=(
        Bars("accuracy", "Tokens predicted exactly at the end", "more is better", percent=True),
        *(Lines(said, f"{said} while it is learned", "steps", "exact", percent=True) for said in TASKS.values()),
    ),
    finding=finding,
    published=(Published("lengths; curves only", KimiLinear.synthetic_lengths.value, "tokens", KimiLinear.synthetic_lengths.source),),
)  # fmt: skip
