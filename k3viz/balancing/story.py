"""The balancing story on the report's example: eight tokens, four experts, and cut-offs that turn loads 4, 3, 1, 0 into 2, 2, 2, 2.

A token goes where its score lies highest above the expert's cut-off. Quantile Balancing sets every cut-off so that exactly the
expert's share of margins lies above it; a cut-off is the bias of ``minimodel.routing`` with its sign turned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minimodel import quantile_bias, route
from minimodel.facts import K3
from minimodel.formats import format_number

LENGTHS = K3.balancing_example.rows
SCALE = 40.0  # chosen: a published bar of length 40 would be a score of 1
CUTOFFS = {  # how cut-offs are set
    "figure": "as drawn in the report's Figure 5",
    "rule": "Quantile Balancing, one step",
    "none": "none yet",
    "hand": "by hand",
}
TOKENS, EXPERTS = (2, 16), (2, 6)  # what can be drawn
FARTHEST = 100.0  # of a cut-off set by hand


@dataclass(frozen=True, eq=False)
class BalancingStory:
    """One routing step without and one with cut-offs, in the units of ``scores``.

    scores [m, n]: m tokens, n experts. margins [m, n]: score minus the token's (k+1)-th best score, before any cut-off. cutoffs [n]:
    only their differences choose. bias [n]: what is stored, the cut-offs centered, with the sign turned, over ``scale``. before, after
    [m, k]: the experts each token goes to. weights [m, k]: mixture weights of ``after``, from plain scores over ``scale``.
    """

    scores: np.ndarray
    margins: np.ndarray
    cutoffs: np.ndarray
    bias: np.ndarray
    before: np.ndarray
    after: np.ndarray
    weights: np.ndarray
    scale: float
    how: str

    @property
    def top_k(self) -> int:
        return self.after.shape[1]

    @property
    def share(self) -> float:
        """Tokens an expert gets when the load is even."""
        return self.scores.shape[0] * self.top_k / self.scores.shape[1]

    @property
    def loads_before(self) -> tuple[int, ...]:
        return tuple(np.bincount(self.before.ravel(), minlength=self.scores.shape[1]).tolist())

    @property
    def loads_after(self) -> tuple[int, ...]:
        return tuple(np.bincount(self.after.ravel(), minlength=self.scores.shape[1]).tolist())

    @property
    def moved(self) -> tuple[int, ...]:
        """Tokens that go elsewhere than without cut-offs."""
        return tuple(t for t in range(len(self.scores)) if set(self.before[t]) != set(self.after[t]))

    @property
    def above(self) -> tuple[int, ...]:
        """Margins above each cut-off: the expert's share, when Quantile Balancing has set it."""
        return tuple((self.margins > self.cutoffs).sum(0).tolist())

    @property
    def sentence(self) -> str:
        before, after = (", ".join(map(str, loads)) for loads in (self.loads_before, self.loads_after))
        if self.how == "none":
            return f"Every token takes its best score: loads {before}, where {format_amount(self.share)} each would be even."
        cuts = ", ".join(map(format_amount, self.cutoffs))
        said = f"Cut-offs {cuts} turn loads {before} into {after}"
        if self.how == "rule":
            said += f": each leaves {', '.join(map(str, self.above))} margins above it"
        if not self.moved:
            return f"{said}; no token moves."
        moved = ", ".join(f"t{t + 1}" for t in self.moved)
        return f"{said}; {moved} {'moves' if len(self.moved) == 1 else 'move'}. {self.weight_text(self.moved[0])}"

    def weight_text(self, token: int) -> str:
        """What a token weighs its (newest) expert with, and what it would be if the bias counted."""
        new = [i for i, e in enumerate(self.after[token]) if e not in self.before[token]]
        i = new[0] if new else 0
        expert = self.after[token, i]
        plain, weight = self.scores[token, expert] / self.scale, format_number(self.weights[token, i])
        biased = format_number(plain + self.bias[expert])
        score = f"its plain score {format_number(plain)}" + ("" if self.top_k == 1 else " over the sum of those chosen")
        return f"t{token + 1} enters E{expert + 1} with weight {weight}, {score}, not {biased}: cut-offs choose, they never weigh."


def balancing_story(
    *,
    scores: Sequence[Sequence[float]] = LENGTHS,
    scale: float = SCALE,
    top_k: int = 1,
    how: str = "figure",
    cutoffs: Sequence[float] | None = None,
) -> BalancingStory:
    """Route a few tokens without and with cut-offs, by ``minimodel.route`` and ``minimodel.quantile_bias``.

    scores: tokens x experts, from 0 to ``scale`` (default: the report's Figure 5, a bar of ``scale`` standing for a score of 1).
    top_k: experts a token. how: "figure", the (share + 1)-th largest score of each expert, the lines of the report's figure; "rule", one
    step of Quantile Balancing from no bias, which takes margins instead of scores; "none"; or "hand", which takes ``cutoffs``. Raises
    ValueError naming the argument.
    """
    table = _table(scores, scale)
    m, n = table.shape
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k < n:
        raise ValueError(f"top_k must be a whole number from 1 to {n - 1}, one less than there are experts, got {top_k!r}")
    if how not in tuple(CUTOFFS):
        raise ValueError(f"how must be one of {', '.join(CUTOFFS)}, got {how!r}")
    if (cutoffs is not None) != (how == "hand"):
        raise ValueError(f"cutoffs go with how='hand' and only with it, got cutoffs={cutoffs!r} and how={how!r}")
    s, none = torch.tensor(table) / scale, torch.zeros(n, dtype=torch.float64)
    _, before, cut = route(s, none, top_k)
    if how == "rule":
        level = _next_largest(s - cut[:, None], top_k).mean()  # the rule centers its bias; this puts the lines back among the margins
        cuts = (level - quantile_bias(s, none, top_k)) * scale
    elif how == "figure":
        cuts = _next_largest(torch.tensor(table), top_k)
    else:
        cuts = none if how == "none" else _by_hand(cutoffs, n)
    weights, after, _ = route(s, -cuts / scale, top_k)
    arrays = {"scores": table, "margins": ((s - cut[:, None]) * scale).numpy().round(9), "cutoffs": cuts.numpy().round(9),
              "bias": ((cuts.mean() - cuts) / scale).numpy(), "before": before.numpy(), "after": after.numpy(),
              "weights": weights.numpy()}  # fmt: skip
    for x in arrays.values():
        x.setflags(write=False)
    return BalancingStory(**arrays, scale=float(scale), how=how)


def _next_largest(x: torch.Tensor, top_k: int) -> torch.Tensor:
    """Of each column the largest value that leaves an even share of values above it."""
    return x.sort(0, descending=True).values[min(len(x) * top_k // x.shape[1], len(x) - 1)]


def _table(scores: Sequence[Sequence[float]], scale: float) -> np.ndarray:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
        raise ValueError(f"scale must be a positive number, got {scale!r}")
    try:
        table = np.array(scores, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError("scores must be rows of numbers, all of the same length") from None
    if table.ndim != 2 or not TOKENS[0] <= len(table) <= TOKENS[1] or not EXPERTS[0] <= table.shape[1] <= EXPERTS[1]:
        sizes = f"{TOKENS[0]} to {TOKENS[1]} tokens by {EXPERTS[0]} to {EXPERTS[1]} experts"
        raise ValueError(f"scores must be {sizes}, got shape {table.shape}")
    if not ((table >= 0) & (table <= scale)).all():
        raise ValueError(f"scores must lie in [0, {scale:g}] (scale), got {table.min():g} to {table.max():g}")
    return table


def _by_hand(cutoffs: Sequence[float], n: int) -> torch.Tensor:
    cuts = tuple(cutoffs)
    if len(cuts) != n or any(isinstance(c, bool) or not isinstance(c, (int, float)) or not abs(c) <= FARTHEST for c in cuts):
        raise ValueError(f"cutoffs must be {n} numbers from {-FARTHEST:g} to {FARTHEST:g}, got {cutoffs!r}")
    return torch.tensor(cuts, dtype=torch.float64)


def format_amount(x: float) -> str:
    """A length or a cut-off: whole numbers without decimals, a real minus sign."""
    return (f"{x:.0f}" if float(x).is_integer() else format_number(x)).replace("-", "−")
