"""The judge: the recurrence in float64. A contestant's time counts only where its results agree with it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from benchmarks.inputs import Shape, operator_inputs
from minimodel import kda

GRADIENTS = ("q", "k", "v", "g", "beta")
TOLERANCE = {"forward": 1e-4, "decode": 1e-4, "forward_backward": 1e-3}  # relative error of float32 results
BFLOAT16_TOLERANCE = 2e-2  # of results from bfloat16 inputs, whose own rounding is 2e-3


def reference(
    call: str, shape: Shape, *, seed: int = 0, one_decay_a_head: bool = False, device: str = "cpu", bfloat16: bool = False
) -> dict[str, np.ndarray]:
    """What ``call`` must give: o and S, or the gradients of the inputs for the upstream gradient dO.

    ``bfloat16``: q, k, v and dO are rounded to bfloat16 first, as a GPU gets them.
    """
    arrays = operator_inputs(shape, seed=seed, one_decay_a_head=one_decay_a_head)
    x = {name: torch.from_numpy(a).to(device) for name, a in arrays.items()}
    if bfloat16:
        x |= {name: x[name].bfloat16() for name in ("q", "k", "v", "dO")}
    x = {name: a.double() for name, a in x.items()}
    leaves = [x[name].requires_grad_(call == "forward_backward") for name in GRADIENTS]
    q, k, v, g, beta = leaves
    wide = g.unsqueeze(-1).expand_as(q) if one_decay_a_head else g
    o, S = kda(q, k, v, wide, beta, initial_state=x["S"] if call == "decode" else None, backend="recurrent")
    if call != "forward_backward":
        return {"o": o.cpu().numpy(), "S": S.cpu().numpy()}
    return {name: d.cpu().numpy() for name, d in zip(GRADIENTS, torch.autograd.grad(o, leaves, x["dO"]), strict=True)}


def largest_error(results: dict[str, np.ndarray], judged_by: dict[str, np.ndarray]) -> float:
    """The largest relative error, ``|x - r| / |r|`` in the 2-norm, over all results; not finite where a result is not."""
    if set(results) != set(judged_by):
        raise ValueError(f"results must be {sorted(judged_by)}, got {sorted(results)}")
    errors = []
    for name, r in judged_by.items():
        if results[name].shape != r.shape:
            raise ValueError(f"results[{name!r}] must have shape {r.shape}, got {results[name].shape}")
        errors.append(float(np.linalg.norm(results[name].astype(np.float64) - r) / np.linalg.norm(r)))
    return math.nan if any(math.isnan(e) for e in errors) else max(errors)


def load_results(path: str | Path) -> dict[str, np.ndarray]:
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}


def complaint(error: float, tolerance: float) -> str | None:
    """Why a result does not count, or None."""
    if not math.isfinite(error):
        return "wrong: not finite"
    if error > tolerance:
        return f"wrong: relative error {error:.1e}"
    return None
