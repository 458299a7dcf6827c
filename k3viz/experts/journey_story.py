"""Words on their way through Stable LatentMoE at K3's counts: 896 experts, 16 routed, two shared, routed by a seeded, untrained router.

The counts are those of a released config. The layer that really runs has them too, but is narrow: its widths, like the vectors that
stand for the words, were chosen, and nothing in it was trained.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minimodel import K3Config, StableLatentMoE, parameter_budget, record
from minimodel.formats import format_count, format_number, plural
from minimodel.tasks import meeting

TEXT = meeting.ARTICLE[1]
WIDTH, EXPERT_WIDTH, SEED = 64, 16, 0  # channels of the narrow layer, of its experts; chosen
MOST_EXPERTS = 1024


@dataclass(frozen=True, eq=False)
class JourneyStory:
    """One mixture layer and a sentence. tokens: T words, marks left out. experts, top_k, shared, hidden, latent: of the config.

    scores [T, E]: after the sigmoid. indices, weights [T, k]: the experts of each word, largest weight first. summed, normed [T]: root mean
    square of the experts' weighted sum, before and after the norm. total, active: parameters of the config's whole model.
    """

    tokens: tuple[str, ...]
    experts: int
    top_k: int
    shared: int
    hidden: int
    latent: int
    scores: np.ndarray
    indices: np.ndarray
    weights: np.ndarray
    summed: np.ndarray
    normed: np.ndarray
    total: int
    active: int

    def awake(self, words: int) -> int:
        """Experts that at least one of the first ``words`` words visits."""
        return len(np.unique(self.indices[:words]))

    @property
    def sentence(self) -> str:
        T, E = len(self.tokens), format_count(self.experts)
        high, low = (format_number(w) for w in (self.weights[-1, 0], self.weights[-1, -1]))
        return (
            f"A seeded, untrained router sends each word to {self.top_k} of {E} experts; {T} {plural('word', T)} wake {self.awake(T)} of "
            f"them. For {self.tokens[-1]!r} the weights run from {high} to {low}. "
            f"The whole model has {format_count(self.total)} parameters, "
            f"{format_count(self.active)} active."
        )


def journey_story(*, text: str = TEXT, config: K3Config | None = None) -> JourneyStory:
    """Send the words of a text through a narrow, untrained Stable LatentMoE with a config's counts, in float64.

    text: any words; the same word is always the same vector. config: with a latent for its experts (default: K3's). Raises ValueError
    naming the argument.
    """
    config = K3Config.k3() if config is None else config
    if not isinstance(config, K3Config) or config.routed_expert_hidden_size is None or not 2 <= config.num_experts <= MOST_EXPERTS:
        raise ValueError(f"config must be a K3Config with a latent and 2 to {MOST_EXPERTS} experts")
    words = re.findall(r"[\w$]+", text) if isinstance(text, str) else []
    if not words:
        raise ValueError(f"text must hold at least one word, got {text!r}")
    latent = max(1, round(WIDTH * config.routed_expert_hidden_size / config.hidden_size))
    layer = untrained_layer(config.replace(hidden_size=WIDTH, routed_expert_hidden_size=latent, moe_intermediate_size=EXPERT_WIDTH))
    x = torch.stack([_vector(word) for word in words])
    with torch.no_grad(), record(layer.gate) as trace:
        weights, indices = layer.gate(x, None)
        summed = layer.experts(layer.routed_expert_down_proj(x), weights, indices)
        normed = summed if layer.routed_expert_norm is None else layer.routed_expert_norm(summed)
    order = weights.argsort(-1, descending=True)
    budget = parameter_budget(config)
    return JourneyStory(
        tokens=tuple(words), experts=config.num_experts, top_k=config.num_experts_per_token, shared=config.num_shared_experts,
        hidden=config.hidden_size, latent=config.routed_expert_hidden_size, scores=_frozen(trace["scores"]),
        indices=_frozen(indices.gather(-1, order)), weights=_frozen(weights.gather(-1, order)), summed=_frozen(_rms(summed)),
        normed=_frozen(_rms(normed)), total=budget.total, active=budget.active,
    )  # fmt: skip


def untrained_layer(config: K3Config) -> StableLatentMoE:
    """A seeded layer in float64: normal matrices that keep the size of what they read, gains of one, no bias in the router."""
    layer, generator = StableLatentMoE(config).double().eval(), torch.Generator().manual_seed(SEED)
    for parameter in layer.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    return layer


def _vector(word: str) -> Tensor:
    """[WIDTH]: the same numbers for the same word, whatever else is in the text."""
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:7], "big")
    return torch.randn(WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).sqrt()


def _frozen(x: Tensor) -> np.ndarray:
    out = x.numpy().copy()
    out.setflags(write=False)
    return out
