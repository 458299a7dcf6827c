"""Palindrome: say a random word backwards."""

from __future__ import annotations

from minimodel.experiments.synthetic import ROWS, sooner, synthetic
from minimodel.tasks import palindrome

LETTERS, VOCABULARY = 127, 32


EXPERIMENT = synthetic(
    "palindrome",
    question="Which rule for a fixed-size state learns to say a word backwards?",
    claim="KDA learns to reverse a word in fewer steps than Gated DeltaNet; Mamba-2 does not learn it.",
    task=f"{LETTERS} letters of {VOCABULARY - 1}, a separator, the same letters backwards: {2 * LETTERS + 1} tokens.",
    vocab_size=VOCABULARY,
    batch=lambda seed, step, parts: palindrome.batch(seed, step, rows=parts * ROWS, letters=LETTERS // parts, vocab_size=VOCABULARY),
    held_out=lambda rows: palindrome.held_out(0, rows=rows, letters=LETTERS, vocab_size=VOCABULARY),
    holds=sooner,
)
