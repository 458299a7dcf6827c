"""Stack: 64 last-in-first-out stacks at once."""

from __future__ import annotations

from minimodel.experiments.definition import Scores
from minimodel.experiments.synthetic import ROWS, synthetic
from minimodel.tasks import stack

OPERATIONS, STACKS = 85, 64
CLOSE = 0.02  # of exact answers: as good as


def holds(kda: Scores, gated: Scores, mamba: Scores) -> bool:
    return kda["accuracy"] >= gated["accuracy"] - CLOSE and "steps to 90 %" not in mamba


EXPERIMENT = synthetic(
    "stack",
    question="Which rule for a fixed-size state keeps track of 64 stacks?",
    claim="KDA tracks stacks as well as Gated DeltaNet; Mamba-2 does not learn it.",
    task=f"{OPERATIONS} pushes and pops of 32 elements on {STACKS} stacks, as many as the paper has: {3 * OPERATIONS} tokens.",
    vocab_size=stack.vocab_size(STACKS),
    batch=lambda seed, step, parts: stack.batch(seed, step, rows=parts * ROWS, operations=OPERATIONS // parts, stacks=STACKS),
    held_out=lambda rows: stack.held_out(0, rows=rows, operations=OPERATIONS, stacks=STACKS),
    holds=holds,
)
