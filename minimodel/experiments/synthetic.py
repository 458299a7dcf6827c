"""Synthetic tasks as in the Kimi Linear paper's Figure 4: two layers, two heads of 128 channels, four rules for the state, a grid of rates.

``palindrome.py``, ``mqar.py`` and ``stack.py`` say what is read; everything else stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import Tensor

from minimodel.experiments.bodies import plain
from minimodel.experiments.definition import Arm, Bars, Experiment, Finding, Lines, Measured, Published, Scores, as_wide_as
from minimodel.facts import KimiLinear
from minimodel.formats import format_probability
from minimodel.model import K3ForCausalLM
from minimodel.tasks import scoring

MIXERS = {"kda": "KDA", "gated_delta_net": "Gated DeltaNet", "delta_net": "DeltaNet", "mamba2": "Mamba-2 style"}
RATES = (3e-3, 1e-2, 3e-2)
ROWS = 8  # sequences of full length a step
STEPS = 500
EVERY = 25  # steps between two points of a learning curve
REACHED, LEARNED = 0.9, "90 %"  # exact: from here on a task counts as learned

Sample = tuple[Tensor, Tensor]


def synthetic(
    name: str,
    *,
    question: str,
    claim: str,
    task: str,
    vocab_size: int,
    batch: Callable[[int, int, int], Sample],
    held_out: Callable[[int], Sample],
    holds: Callable[[Scores, Scores, Scores], bool],
) -> Experiment:
    """One task for all rules and rates.

    Args:
        task: it and its sizes in words. batch: (seed, step, parts) -> ids and labels of ``parts * ROWS`` sequences of 1/parts of the
            length. held_out: rows -> the same, of full length, never trained on.
        holds: scores of KDA, Gated DeltaNet and Mamba-2 at their best rates -> does the claim hold?
    """

    @cache
    def asked(answers: int) -> Sample:
        return held_out(max(2, answers // 16))

    def evaluate(model: K3ForCausalLM, arm: str, answers: int) -> Scores:
        return {"accuracy": scoring.accuracy(model, *asked(answers), rows=16)}

    def finding(scores: dict[str, Scores]) -> Finding:
        found = best(scores)
        numbers = ", ".join(f"{MIXERS[mixer]} {format_probability(s['accuracy'])} ({_reached(s)})" for mixer, s in found.items())
        agrees = holds(*(found[mixer] for mixer in ("kda", "gated_delta_net", "mamba2")))
        return Finding(agrees, f"Exact at the end, every rule at its best rate (after so many steps {LEARNED} were): {numbers}.")

    body = Arm("", _body("kda", vocab_size)).parameters
    return Experiment(
        name=name, question=question, claim=claim,
        setup=(
            "Two layers, two heads of 128 channels, as in the paper, feed-forwards as wide as it takes for the same number of parameters. "
            f"{task} That is the shortest of the paper's lengths, and {STEPS} steps of {ROWS} sequences where it has up to 20,000 steps. "
            "So that few steps are enough, the first three tenths read four times as many sequences of a quarter of the length, the next "
            "two tenths twice as many of half. "
            "The paper's rates are 5e-5 to 1e-3, tried for every model; ours belong to Per-Head Muon."
        ),
        arms={
            f"{mixer}-{lr:g}": Arm(f"{label}, rate {lr:g}", as_wide_as(_body(mixer, vocab_size), body), lr=lr)
            for mixer, label in MIXERS.items() for lr in RATES
        },
        batch=lambda arm, seed, step: batch(seed, step, parts(step)), steps=STEPS, lr=RATES[1],
        measure=measure, evaluate=evaluate, evaluate_every=EVERY,
        lr_grid=f"every rule with each of {', '.join(f'{lr:g}' for lr in RATES)}",
        shows=(
            Bars("accuracy", "Tokens predicted exactly at the end", "more is better", percent=True),
            Bars("steps to 90 %", f"Steps until {LEARNED} are exact", "fewer is sooner; none where never"),
            Lines("exact", "While it is learned", "steps", "exact", percent=True),
        ),
        finding=finding,
        published=(Published("lengths; curves only", KimiLinear.synthetic_lengths.value, "tokens", KimiLinear.synthetic_lengths.source),),
    )  # fmt: skip


def parts(step: int) -> int:
    """Short sequences first: into how many parts the full length is cut at this step."""
    return 4 if step < 0.3 * STEPS else 2 if step < 0.5 * STEPS else 1


def best(scores: dict[str, Scores]) -> dict[str, Scores]:
    """Every rule at the rate that learned most; among those that learned all alike, soonest."""
    tried = {mixer: [s for arm, s in scores.items() if arm.rsplit("-", 1)[0] == mixer] for mixer in MIXERS}
    rank = lambda s: (-round(s["accuracy"], 2), s.get("steps to 90 %", float("inf")), -s["accuracy"])  # noqa: E731
    return {mixer: min(found, key=rank) for mixer, found in tried.items() if found}


def measure(model: K3ForCausalLM, arm: str, seed: int, log: list[dict], answers: int) -> Measured:
    curve = [(row["step"] + 1, row["accuracy"]) for row in log if "accuracy" in row]
    reached = [step for step, y in curve if y >= REACHED]
    scores = {"accuracy": curve[-1][1], "steps to 90 %": float(reached[0])} if reached else {"accuracy": curve[-1][1]}
    return Measured(scores, {"exact": {"x": [float(x) for x, _ in curve], "y": [y for _, y in curve]}})


def sooner(kda: Scores, gated: Scores, mamba: Scores) -> bool:
    """Whether KDA learned the task in fewer steps than Gated DeltaNet (got further, where neither did), and Mamba-2 never did."""
    steps = [s.get("steps to 90 %", float("inf")) for s in (kda, gated)]
    ahead = kda["accuracy"] > gated["accuracy"] if steps[0] == steps[1] == float("inf") else steps[0] < steps[1]
    return ahead and "steps to 90 %" not in mamba


def _reached(s: Scores) -> str:
    return f"{s['steps to 90 %']:g}" if "steps to 90 %" in s else "never"


def _body(mixer: str, vocab_size: int):
    return plain(mixer, layers=2, vocab_size=vocab_size, heads=2, channels=128)
