"""Three ways to keep a router even, on the same stream of tokens: Quantile Balancing, the sign rule, an auxiliary loss.

The router is seeded, not trained: random directions and a popularity per expert that makes some of them favorites. The two bias rules
leave its scores alone. The auxiliary loss has no bias: it pulls the scores themselves away from what the task wants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from minimodel import quantile_bias, route
from minimodel.formats import format_number, plural
from minimodel.routing import balance_loss, sign_bias

EXPERTS, TOKENS, WIDTH, STEPS = 16, 384, 16, 40  # tokens of one optimizer step; all chosen
LEARNING_RATE = 8.0  # of the auxiliary loss's gradient descent; chosen
RULES = {"quantile": "Quantile Balancing", "sign": "sign rule", "loss": "auxiliary loss"}


@dataclass(frozen=True, eq=False)
class RuleRun:
    """One rule over all steps. loads [steps, E]: tokens an expert; violation [steps]: fullest expert over the even share, minus one;
    moved [steps]: mean distance of the scores from those the task wants, before that step's update."""

    rule: str
    loads: np.ndarray
    violation: np.ndarray
    moved: np.ndarray


@dataclass(frozen=True, eq=False)
class BalancingRace:
    """The three rules on one stream. step: the one looked at, 0 before any update. rate: of the sign rule; coefficient: of the loss."""

    runs: dict[str, RuleRun]
    top_k: int
    skew: float
    rate: float
    coefficient: float
    step: int

    @property
    def even(self) -> float:
        return TOKENS * self.top_k / EXPERTS

    @property
    def sentence(self) -> str:
        over = {rule: format_number(run.violation[self.step]) for rule, run in self.runs.items()}
        start, moved = format_number(self.runs["quantile"].violation[0]), format_number(self.runs["loss"].moved[self.step])
        updates = "Before any update" if self.step == 0 else f"After {self.step} {plural('update', self.step)}"
        return (
            f"{updates} the fullest expert is over its even share by {over['quantile']} of it with Quantile Balancing, {over['sign']} with "
            f"the sign rule, {over['loss']} with the auxiliary loss ({start} at the start). The loss has moved the router's scores by "
            f"{moved} on average, the two biases by nothing: they choose experts and never weigh them."
        )


def balancing_race(*, top_k: int = 2, skew: float = 1.0, rate: float = 0.01, coefficient: float = 1.0, step: int = 8) -> BalancingRace:
    """Run the three rules for 40 optimizer steps on the same seeded tokens.

    top_k: experts a token, 1 to 8 of 16. skew: spread of the experts' popularity, in logits, 0 to 3. rate: step of the sign rule, up to
    1. coefficient: of the auxiliary loss, up to 10. step: 0 to 39. Raises ValueError naming the argument.
    """
    for name, value, low, high in (("top_k", top_k, 1, 8), ("step", step, 0, STEPS - 1)):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{name} must be a whole number from {low} to {high}, got {value!r}")
    for name, value, high in (("skew", skew, 3), ("rate", rate, 1), ("coefficient", coefficient, 10)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= high:
            raise ValueError(f"{name} must lie in [0, {high}], got {value!r}")
    runs = {
        "quantile": run_quantile(top_k, skew),
        "sign": run_sign(top_k, skew, rate),
        "loss": run_loss(top_k, skew, coefficient),
    }
    return BalancingRace(runs, top_k, float(skew), float(rate), float(coefficient), step)


def run_quantile(top_k: int, skew: float) -> RuleRun:
    """The bias is set anew from each step's margins; nothing to tune."""
    return _run_bias("quantile", top_k, skew, lambda scores, loads, bias: quantile_bias(scores, bias, top_k))


def run_sign(top_k: int, skew: float, rate: float) -> RuleRun:
    """The bias walks by ``rate`` a step, up or down."""
    return _run_bias("sign", top_k, skew, lambda scores, loads, bias: sign_bias(loads, bias, rate))


def run_loss(top_k: int, skew: float, coefficient: float) -> RuleRun:
    """Gradient descent on (distance from the wanted scores)^2 + coefficient * balance loss; the router's weights and offsets learn."""
    directions, popularity = router(skew)
    weight, offset = directions.clone().requires_grad_(), popularity.clone().requires_grad_()
    none, loads, moved = torch.zeros(EXPERTS, dtype=torch.float64), [], []
    for step, wanted in enumerate(wanted_scores(skew)):
        with torch.enable_grad():
            scores = torch.sigmoid(batch(step) @ weight + offset)
            indices = route(scores.detach(), none, top_k)[1]
            loss = (scores - wanted).square().mean() + coefficient * balance_loss(scores, indices)
            gradients = torch.autograd.grad(loss, (weight, offset))
        loads.append(torch.bincount(indices.flatten(), minlength=EXPERTS))
        moved.append(float((scores - wanted).detach().abs().mean()))
        with torch.no_grad():
            for parameter, gradient in zip((weight, offset), gradients, strict=True):
                parameter -= LEARNING_RATE * gradient
    return _summed("loss", loads, moved, top_k)


def router(skew: float) -> tuple[Tensor, Tensor]:
    """Directions [width, E] and popularity [E] of the seeded router, in logits."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(WIDTH, EXPERTS, dtype=torch.float64, generator=generator) / WIDTH**0.5
    return directions, skew * torch.randn(EXPERTS, dtype=torch.float64, generator=generator)


@lru_cache(maxsize=STEPS)
def batch(step: int) -> Tensor:
    """The tokens of one step [tokens, width], the same for every rule."""
    return torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 + step))


@lru_cache(maxsize=4)
def wanted_scores(skew: float) -> tuple[Tensor, ...]:
    """The seeded router's scores [tokens, E] at every step: what the task wants, and what the bias rules leave alone."""
    directions, popularity = router(skew)
    return tuple(torch.sigmoid(batch(step) @ directions + popularity) for step in range(STEPS))


def _run_bias(rule: str, top_k: int, skew: float, update: Callable[[Tensor, Tensor, Tensor], Tensor]) -> RuleRun:
    bias, loads = torch.zeros(EXPERTS, dtype=torch.float64), []
    for scores in wanted_scores(skew):
        indices = route(scores, bias, top_k)[1]
        loads.append(torch.bincount(indices.flatten(), minlength=EXPERTS))
        bias = update(scores, loads[-1], bias)
    return _summed(rule, loads, [0.0] * STEPS, top_k)


def _summed(rule: str, loads: list[Tensor], moved: list[float], top_k: int) -> RuleRun:
    table = torch.stack(loads).numpy()
    arrays = table, table.max(1) / (TOKENS * top_k / EXPERTS) - 1, np.array(moved)
    for x in arrays:
        x.setflags(write=False)  # runs are kept and shared
    return RuleRun(rule, *arrays)
