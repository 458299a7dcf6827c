"""Experts at a released model's size: loads, dead experts and messages between ranks, counted on a seeded router that is not trained.

Sizes come from a config; tokens, directions and popularity are drawn from a seed. A dead expert gets no token of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from minimodel import K3Config, parameter_budget, quantile_bias, route
from minimodel.formats import format_bytes, format_count, format_probability, plural

TOKENS, WIDTH = 512, 32  # tokens of a batch, channels of the seeded router; chosen
SKEWS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)  # spread of the experts' popularity, in logits
RANKS = 16  # chosen
BYTES = 2  # a number in bfloat16
MOST_EXPERTS = 1024


@dataclass(frozen=True, eq=False)
class ExpertsAtScale:
    """One batch through one mixture layer. loads [E]: tokens an expert. balanced [E]: the same after one step of Quantile Balancing.

    skew: index into SKEWS. dead, entropy: share of dead experts, and the mean entropy of a token's scores over its largest value, at
    each of SKEWS. crossing: token-expert pairs a token that leave their rank. latent, hidden: width of a message with and without
    the latent. total, active: parameters of the whole model with these choices.
    """

    loads: np.ndarray
    balanced: np.ndarray
    skew: int
    dead: tuple[float, ...]
    entropy: tuple[float, ...]
    top_k: int
    shared: int
    ranks: int
    crossing: float
    latent: int
    hidden: int
    total: int
    active: int

    @property
    def even(self) -> float:
        return TOKENS * self.top_k / len(self.loads)

    @property
    def message_bytes(self) -> tuple[float, float]:
        """Bytes a token and layer between ranks, there and back: with the latent, and on the full width."""
        return tuple(2 * BYTES * self.crossing * width for width in (self.latent, self.hidden))

    @property
    def sentence(self) -> str:
        with_latent, without = map(format_bytes, self.message_bytes)
        after = format_probability(float((self.balanced == 0).mean()))
        dead, entropy = format_probability(self.dead[self.skew]), format_probability(self.entropy[self.skew])
        return (
            f"{self.top_k} of {format_count(len(self.loads))} experts a token: {dead} of the experts are dead while the router's entropy "
            f"is still {entropy} of its maximum; one step of Quantile Balancing leaves {after}. On {self.ranks} "
            f"{plural('rank', self.ranks)} a token's messages take {with_latent} a layer with a latent of {format_count(self.latent)}, "
            f"{without} on the full {format_count(self.hidden)} channels. A whole model with these choices has "
            f"{format_count(self.total)} parameters, {format_count(self.active)} active."
        )


def experts_at_scale(
    *,
    config: K3Config | None = None,
    top_k: int | None = None,
    latent: int | None = None,
    shared: int | None = None,
    ranks: int | None = None,
    skew: int = 3,
) -> ExpertsAtScale:
    """Route one seeded batch at a config's size.

    config: its experts, top-k, widths (default: K3's). top_k, latent, shared: replace the config's. ranks: that the experts and tokens are
    dealt to evenly, in order (default: 16, at most one an expert). skew: index into ``SKEWS``. Raises ValueError naming the argument.
    """
    if config is not None and not isinstance(config, K3Config):
        raise ValueError(f"config must be a K3Config, got {type(config).__name__}")
    config = K3Config.k3() if config is None else config
    E, D = config.num_experts, config.hidden_size
    if not 2 <= E <= MOST_EXPERTS or not any(config.is_moe_layer(i) for i in range(config.num_hidden_layers)):
        raise ValueError(f"config must have 2 to {MOST_EXPERTS} experts in some layer, got {E}")
    top_k = config.num_experts_per_token if top_k is None else top_k
    latent = (config.routed_expert_hidden_size or D) if latent is None else latent
    shared = config.num_shared_experts if shared is None else shared
    ranks = min(RANKS, E) if ranks is None else ranks
    for name, value, low, high in (("top_k", top_k, 1, E - 1), ("latent", latent, 1, D), ("shared", shared, 0, 16), ("ranks", ranks, 1, E),
                                   ("skew", skew, 0, len(SKEWS) - 1)):  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{name} must be a whole number from {low} to {high}, got {value!r}")
    chosen = [_ranked(E, s)[:, :top_k] for s in SKEWS]
    loads = [_loads(indices, E) for indices in chosen]
    budget = parameter_budget(
        config.replace(num_experts_per_token=top_k, num_shared_experts=shared, routed_expert_hidden_size=None if latent == D else latent)
    )
    return ExpertsAtScale(
        loads=loads[skew], balanced=_balanced(E, top_k, SKEWS[skew]), skew=skew, dead=tuple(float((x == 0).mean()) for x in loads),
        entropy=tuple(_entropy(E, s) for s in SKEWS), top_k=top_k, shared=shared, ranks=ranks,
        crossing=_crossing(chosen[skew], E, ranks), latent=latent, hidden=D, total=budget.total,
        active=budget.active,
    )  # fmt: skip


@lru_cache(maxsize=2 * len(SKEWS))
def seeded_scores(E: int, skew: float) -> Tensor:
    """Scores [tokens, E] of the seeded router, after the sigmoid; a spread of ``skew`` logits makes some experts favorites."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    directions = torch.randn(WIDTH, E, generator=generator, dtype=torch.float64) / WIDTH**0.5
    return torch.sigmoid(x @ directions + skew * torch.randn(E, generator=generator, dtype=torch.float64))


@lru_cache(maxsize=64)
def _entropy(E: int, skew: float) -> float:
    """The mean entropy of a token's scores, as a share of its largest value. Load does not enter it."""
    p = seeded_scores(E, skew) / seeded_scores(E, skew).sum(-1, keepdim=True)
    return float(-(p * p.log()).sum(-1).mean() / np.log(E))


@lru_cache(maxsize=2 * len(SKEWS))
def _ranked(E: int, skew: float) -> np.ndarray:
    """Each token's experts [tokens, E - 1], best first: without a bias, any top-k is the start of this row."""
    return route(seeded_scores(E, skew), torch.zeros(E, dtype=torch.float64), E - 1)[1].numpy()


@lru_cache(maxsize=64)
def _balanced(E: int, top_k: int, skew: float) -> np.ndarray:
    """Loads with the bias that one step of Quantile Balancing sets."""
    scores = seeded_scores(E, skew)
    bias = quantile_bias(scores, torch.zeros(E, dtype=torch.float64), top_k)
    return _loads(route(scores, bias, top_k)[1].numpy(), E)


def _loads(indices: np.ndarray, E: int) -> np.ndarray:
    loads = np.bincount(indices.ravel(), minlength=E)
    loads.setflags(write=False)
    return loads


def _crossing(indices: np.ndarray, E: int, ranks: int) -> float:
    """Token-expert pairs a token whose two ends are on different ranks."""
    home = np.arange(len(indices))[:, None] * ranks // len(indices)
    return float((indices * ranks // E != home).sum() / len(indices))
