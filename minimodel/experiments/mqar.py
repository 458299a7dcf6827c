"""MQAR, multi-query associative recall: pairs are told, then every key is asked."""

from __future__ import annotations

from minimodel.experiments.synthetic import ROWS, sooner, synthetic
from minimodel.tasks import mqar

PAIRS, VOCABULARY = 64, 128


EXPERIMENT = synthetic(
    "mqar",
    question="Which rule for a fixed-size state recalls the most pairs?",
    claim="KDA learns to recall pairs in fewer steps than Gated DeltaNet; Mamba-2 does not learn it.",
    task=f"{PAIRS} pairs of {VOCABULARY // 2} keys and as many values, then every key again with its value: {4 * PAIRS} tokens.",
    vocab_size=VOCABULARY,
    batch=lambda seed, step, parts: mqar.batch(seed, step, rows=parts * ROWS, pairs=PAIRS // parts, vocab_size=VOCABULARY),
    held_out=lambda rows: mqar.held_out(0, rows=rows, pairs=PAIRS, vocab_size=VOCABULARY),
    holds=sooner,
)
