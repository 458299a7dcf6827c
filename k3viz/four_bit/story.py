"""The four-bit story: 32 weights that share one power-of-two scale, rounded afterwards, or trained while they stand on the grid.

The block is a row of a routed expert of a trained model, the only kind of weight that K3 stores in MXFP4. The layer that it forms,
y = w . x, is taken as right as it stands. *Afterwards*: every weight goes to the nearest grid value. *In the grid*: gradient descent
on the output error of the rounded weights, the gradient passed straight through the rounding (``fake_quantize_mxfp4``); the best
step is kept. The inputs are chosen: seeded random numbers, partly driven by two common causes, so that inputs are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from minimodel import K3ForCausalLM, dequantize_mxfp4, fake_quantize_mxfp4, quantize_mxfp4
from minimodel.formats import format_digits, format_probability, plural
from minimodel.mxfp4 import BLOCK, E2M1, RULES
from minimodel.pretrained import load_pretrained
from minimodel.trace import frozen

INPUTS, CAUSES, SEED = 256, 2, 0  # chosen: examples, common causes behind them, and where the random numbers start
RATE = 0.05  # chosen: first step size, as a share of the largest stable one; it falls to zero
STEPS, MOST_STEPS = 60, 1000
ALIKE = 0.9  # chosen
SHOWN = 7  # chosen: a block of which training moves several weights
LARGEST_OUTLIER = 256.0


@dataclass(frozen=True, eq=False)
class FourBitStory:
    """Trace of one block of 32 weights.

    weights [32]: the block with its outlier. place: index of the weight that was made larger. outlier, rule, alike: what was chosen.
    exponent: E of the scale 2^E; byte: its E8M0 code. codes [32]: E2M1 codes 0..15. rounded [32]: nearest grid values. trained
    [steps + 1, 32]: the rounded weights at every step of training in the grid. losses [steps + 1]: their output error, as a share of
    the output's mean square; losses[0] is that of rounding afterwards. stored: bytes of codes and scale.
    """

    weights: np.ndarray
    place: int
    outlier: float
    rule: str
    alike: float
    exponent: int
    byte: int
    codes: np.ndarray
    rounded: np.ndarray
    trained: np.ndarray
    losses: np.ndarray
    stored: int

    @property
    def grid(self) -> np.ndarray:
        """[15] the values that this block can hold, from lowest to highest."""
        return np.array([*(-x for x in E2M1[:0:-1]), *E2M1]) * 2.0**self.exponent

    @property
    def error(self) -> float:
        """RMS rounding error of all weights but the largest, as a share of their RMS: 1 when all of them are lost."""
        others = np.delete(self.weights, self.place)
        size = float(np.sqrt((others**2).mean()))
        return float(np.sqrt(((np.delete(self.rounded, self.place) - others) ** 2).mean())) / size if size else 0.0

    def best(self, step: int = -1) -> int:
        """The step kept when training stops after ``step`` steps: the one with the smallest output error so far."""
        last = range(len(self.losses))[step]
        return int(self.losses[: last + 1].argmin())

    def sentence(self, step: int = -1) -> str:
        """The block and both ways to round it, in two sentences with their numbers."""
        last, zeros = range(len(self.losses))[step], int((self.rounded == 0).sum())
        best = self.best(last)
        largest = format_digits(float(np.abs(self.weights).max()))
        moved = int((self.trained[best] != self.rounded).sum())
        return (
            f"Largest weight {largest}, so the rule {self.rule!r} sets the shared scale to 2^{self.exponent} (byte {self.byte}): "
            f"{zeros} of {len(self.weights)} weights round to 0, all but the largest are off by "
            f"{format_probability(self.error)}. Rounding afterwards costs "
            f"{format_probability(self.losses[0])} of the output, {last} {plural('step', last)} of training in the grid "
            f"{format_probability(self.losses[best])}, with {moved} {plural('weight', moved)} not on the nearest grid value."
        ).replace("^-", "^−")


def four_bit_story(
    *,
    weights: Sequence[float] | None = None,
    model: K3ForCausalLM | None = None,
    block: int = SHOWN,
    outlier: float = 1.0,
    rule: str = "even",
    alike: float = ALIKE,
    steps: int = STEPS,
) -> FourBitStory:
    """Round one block to MXFP4, afterwards and while training.

    weights: 32 numbers of your own; or model, block: the 1-based block of 32 in the down projections of the first routed experts
    (default: the course's meeting model). outlier: how many times larger the largest weight is made, 1 to 256. rule: of the scale, "even"
    or "floor", as in ``quantize_mxfp4``. alike: share of the inputs' variance that comes from common causes, 0 to 1. steps: of training,
    0 to 1000. Raises ValueError that names the argument.
    """
    if weights is not None and model is not None:
        raise ValueError("weights and model can't both be given: the block comes from one of them")
    if weights is not None:
        w = _own(weights)
    else:
        blocks = expert_blocks(load_pretrained() if model is None else model)
        if isinstance(block, bool) or not isinstance(block, int) or not 1 <= block <= len(blocks):
            raise ValueError(f"block must be a whole number from 1 to {len(blocks)}, got {block!r}")
        w = blocks[block - 1]
    return tell(w, outlier, rule, alike, steps)


def tell(w: Tensor, outlier: float, rule: str, alike: float, steps: int) -> FourBitStory:
    """The story of 32 weights."""
    if rule not in tuple(RULES):
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    for name, value, low, high in (("outlier", outlier, 1.0, LARGEST_OUTLIER), ("alike", alike, 0.0, 1.0)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:  # NaN fails every comparison
            raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps <= MOST_STEPS:
        raise ValueError(f"steps must be a whole number from 0 to {MOST_STEPS}, got {steps!r}")
    moments = input_moments(alike)
    w, place = w.clone(), int(w.abs().argmax())
    w[place] *= outlier
    power = w @ moments @ w
    packed, scale = quantize_mxfp4(w, rule=rule)
    trained, losses = train_in_grid(w, moments, rule, steps)
    return FourBitStory(
        weights=frozen(w), place=place, outlier=float(outlier), rule=rule, alike=float(alike), exponent=int(scale[0]) - 127,
        byte=int(scale[0]), codes=frozen(torch.stack([packed & 15, packed >> 4], -1).flatten()),
        rounded=frozen(dequantize_mxfp4(packed, scale, dtype=w.dtype)), trained=frozen(trained), losses=frozen(losses / power),
        stored=packed.nbytes + scale.nbytes,
    )  # fmt: skip


def train_in_grid(target: Tensor, moments: Tensor, rule: str, steps: int) -> tuple[Tensor, Tensor]:
    """(rounded weights [steps + 1, 32], output errors [steps + 1]) of gradient descent on weights that are rounded in every pass.

    The output error of weights w is the mean of ((w - target) . x)^2 over the inputs, (w - target)^T moments (w - target).
    """
    stable = 1 / (2 * float(torch.linalg.eigvalsh(moments)[-1]))
    w, rounded, losses = target.clone(), [], []
    with torch.enable_grad():  # a panel's callback runs without gradients
        for step in range(steps + 1):
            leaf = w.requires_grad_()
            on_grid = fake_quantize_mxfp4(leaf, rule=rule)
            loss = (on_grid - target) @ moments @ (on_grid - target)
            rounded.append(on_grid.detach())
            losses.append(loss.detach())
            (gradient,) = torch.autograd.grad(loss, leaf)
            w = (leaf - RATE * (1 - step / max(steps, 1)) * stable * gradient).detach()
    return torch.stack(rounded), torch.stack(losses)


@cache
def _draws() -> tuple[Tensor, Tensor]:
    """Inputs from common causes, and inputs of their own, [examples, 32] each with variance about 1."""
    generator = torch.Generator().manual_seed(SEED)
    causes, weights, own = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((INPUTS, CAUSES), (CAUSES, BLOCK), (INPUTS, BLOCK))
    )
    return causes @ weights / CAUSES**0.5, own


def input_moments(alike: float) -> Tensor:
    """[32, 32] mean of x x^T over the inputs."""
    common, own = _draws()
    x = alike**0.5 * common + (1 - alike) ** 0.5 * own
    return x.T @ x / len(x)


def expert_blocks(model: K3ForCausalLM) -> Tensor:
    """[blocks, 32] blocks of the down projections of the first layer with routed experts, expert by expert, row by row, float64."""
    if not isinstance(model, K3ForCausalLM):
        raise ValueError(f"model must be a K3ForCausalLM, got {type(model).__name__}")
    moe = next((layer.block_sparse_moe for layer in model.model.layers if layer.block_sparse_moe is not None), None)
    if moe is None:
        raise ValueError("model has no routed experts, whose weights K3 stores in four bits")
    w = moe.experts.w2.detach()
    if w.shape[-1] % BLOCK:
        raise ValueError(f"model: experts of width {w.shape[-1]} don't divide into blocks of {BLOCK}")
    return w.double().reshape(-1, BLOCK)


def _own(weights: Sequence[float]) -> Tensor:
    try:
        w = torch.as_tensor(np.asarray(weights, dtype=np.float64).copy())
    except (TypeError, ValueError):
        raise ValueError(f"weights must be {BLOCK} numbers, got {weights!r}") from None
    if w.shape != (BLOCK,) or not bool(w.isfinite().all()) or not bool(w.any()):
        raise ValueError(f"weights must be {BLOCK} finite numbers that are not all zero, got shape {tuple(w.shape)}")
    return w
