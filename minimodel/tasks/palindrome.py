"""Palindrome: say a random word backwards (Kimi Linear paper, Figure 4). Exact recall of every token and of its place.

    d a c | c a d          the last three are to be predicted
"""

from __future__ import annotations

import random

import torch
from jaxtyping import Int
from torch import Tensor

Sample = tuple[Int[Tensor, "rows T"], Int[Tensor, "rows T"]]
SEPARATOR = 0


def batch(seed: int, step: int, *, rows: int, letters: int, vocab_size: int = 32) -> Sample:
    """Training sequences of a step, a pure function of (seed, step): ids and labels [rows, 2 * letters + 1]; token 0 separates."""
    return _sequences(random.Random(f"palindrome/train/{seed}/{step}"), rows, letters, vocab_size)


def held_out(seed: int, *, rows: int, letters: int, vocab_size: int = 32) -> Sample:
    """Sequences for scoring, from a stream that training never draws."""
    return _sequences(random.Random(f"palindrome/held-out/{seed}"), rows, letters, vocab_size)


def _sequences(rng: random.Random, rows: int, letters: int, vocab_size: int) -> Sample:
    if letters < 1:
        raise ValueError(f"letters must be at least 1, got {letters}")
    if vocab_size < 3:
        raise ValueError(f"vocab_size must be at least 3 (a separator and two letters), got {vocab_size}")
    words = [[rng.randrange(1, vocab_size) for _ in range(letters)] for _ in range(rows)]
    ids = torch.tensor([[*word, SEPARATOR, *reversed(word)] for word in words])
    labels = ids.clone()
    labels[:, : letters + 1] = -100
    return ids, labels
