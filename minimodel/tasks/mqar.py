"""MQAR, multi-query associative recall: pairs are told once, then every key is asked (Arora et al., Zoology, arXiv 2312.04927).

    a 4   c 9   b 7   |   c 9   a 4   b 7          the second 9, 4 and 7 are to be predicted

The Kimi Linear paper (Figure 4) trains two layers on it. With ``updates`` some keys are told twice and the later value counts: a memory
that only adds keeps both.
"""

from __future__ import annotations

import random

import torch
from jaxtyping import Int
from torch import Tensor

Sample = tuple[Int[Tensor, "rows T"], Int[Tensor, "rows T"]]


def batch(seed: int, step: int, *, rows: int, pairs: int, updates: int = 0, vocab_size: int = 128) -> Sample:
    """Training sequences of a step, a pure function of (seed, step): ids and labels [rows, 4 * pairs + 2 * updates].

    Args:
        pairs: keys of a sequence; all of them are asked. updates: how many keys are told a second value.
        vocab_size: half of the tokens are keys, half are values.
    """
    return _sequences(random.Random(f"mqar/train/{seed}/{step}"), rows, pairs, updates, vocab_size)


def held_out(seed: int, *, rows: int, pairs: int, updates: int = 0, vocab_size: int = 128) -> Sample:
    """Sequences for scoring, from a stream that training never draws."""
    return _sequences(random.Random(f"mqar/held-out/{seed}"), rows, pairs, updates, vocab_size)


def _sequences(rng: random.Random, rows: int, pairs: int, updates: int, vocab_size: int) -> Sample:
    keys = vocab_size // 2
    if not 1 <= pairs <= keys:
        raise ValueError(f"pairs must lie in 1..{keys} with vocab_size={vocab_size}, got {pairs}")
    if not 0 <= updates <= pairs:
        raise ValueError(f"updates must lie in 0..pairs={pairs}, got {updates}")
    ids, labels = [], []
    for _ in range(rows):
        asked = rng.sample(range(keys), pairs)
        told = [*asked, *rng.sample(asked, updates)]
        value, text = {}, []
        for key in told:
            value[key] = rng.randrange(keys, vocab_size)
            text += [key, value[key]]
        quiet = [-100] * len(text)
        rng.shuffle(asked)
        for key in asked:
            text += [key, value[key]]
            quiet += [-100, value[key]]
        ids.append(text)
        labels.append(quiet)
    return torch.tensor(ids), torch.tensor(labels)
