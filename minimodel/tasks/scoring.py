"""The scorer of the synthetic tasks: exact matches of the likeliest token, over the positions that carry a label."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor


@torch.no_grad()
def accuracy(model: torch.nn.Module, ids: Int[Tensor, "B T"], labels: Int[Tensor, "B T"], *, rows: int = 8) -> float:
    """Share of the labeled tokens that ``model`` predicts exactly, ``rows`` sequences at a time.

    ``labels`` [B, T] hold -100 where nothing is asked; the label of token t is predicted at token t-1, as in training.
    Raises: ValueError when nothing is asked or the shapes differ.
    """
    if ids.shape != labels.shape:
        raise ValueError(f"labels must have the shape of ids {tuple(ids.shape)}, got {tuple(labels.shape)}")
    asked = labels[:, 1:] != -100
    if not bool(asked.any()):
        raise ValueError("labels ask nothing: every one of them is -100")
    right = 0
    for start in range(0, len(ids), rows):
        part = slice(start, start + rows)
        said = model(ids[part]).logits[:, :-1].argmax(-1)
        right += int((said == labels[part, 1:])[asked[part]].sum())
    return right / int(asked.sum())
