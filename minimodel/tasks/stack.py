"""Stack: many last-in-first-out stacks at once (Kimi Linear paper, Figure 4: 64 of them). State tracking by erase and write.

    push s7 x   push s2 y   push s7 z   pop s7 z   pop s7 x          the tokens after "pop s7" are to be predicted
"""

from __future__ import annotations

import random

import torch
from jaxtyping import Int
from torch import Tensor

Sample = tuple[Int[Tensor, "rows T"], Int[Tensor, "rows T"]]
PUSH, POP = 0, 1


def vocab_size(stacks: int = 64, elements: int = 32) -> int:
    """Tokens of the task: push, pop, one a stack, one an element."""
    return 2 + stacks + elements


def batch(seed: int, step: int, *, rows: int, operations: int, stacks: int = 64, elements: int = 32) -> Sample:
    """Training sequences of a step, a pure function of (seed, step): ids and labels [rows, 3 * operations].

    An operation is three tokens: push or pop, the stack, the element. Half of the operations pop, where there is something to pop.
    """
    return _sequences(random.Random(f"stack/train/{seed}/{step}"), rows, operations, stacks, elements)


def held_out(seed: int, *, rows: int, operations: int, stacks: int = 64, elements: int = 32) -> Sample:
    """Sequences for scoring, from a stream that training never draws."""
    return _sequences(random.Random(f"stack/held-out/{seed}"), rows, operations, stacks, elements)


def _sequences(rng: random.Random, rows: int, operations: int, stacks: int, elements: int) -> Sample:
    if operations < 2:
        raise ValueError(f"operations must be at least 2 (a push and a pop), got {operations}")
    for name, count in (("stacks", stacks), ("elements", elements)):
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    ids, labels = [], []
    for _ in range(rows):
        held: list[list[int]] = [[] for _ in range(stacks)]
        text, asked = [], []
        for i in range(operations):
            full = [s for s in range(stacks) if held[s]]
            last_chance = i == operations - 1 and POP not in text[::3]  # every sequence asks something
            if full and (last_chance or rng.random() < 0.5):
                s = rng.choice(full)
                element = held[s].pop()
                text += [POP, 2 + s, element]
                asked += [-100, -100, element]
            else:
                s, element = rng.randrange(stacks), 2 + stacks + rng.randrange(elements)
                held[s].append(element)
                text += [PUSH, 2 + s, element]
                asked += [-100, -100, -100]
        ids.append(text)
        labels.append(asked)
    return torch.tensor(ids), torch.tensor(labels)
