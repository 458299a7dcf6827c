"""Which experts a token visits, and how the load stays even (K3 report 2.3.3, appendices C and D).

The bias steers the *selection* only; the mixture weights come from the unbiased scores. It is set from the scores of one whole
optimizer step and used from the next one on, so that no token sees the future.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from minimodel.layers import wide
from minimodel.trace import Traced

__all__ = ["MarginHistogram", "Router", "balance_loss", "quantile_bias", "route", "sign_bias"]


def route(
    scores: Float[Tensor, "S E"], bias: Float[Tensor, "E"], top_k: int, *, renormalize: bool = True
) -> tuple[Float[Tensor, "S k"], Int[Tensor, "S k"], Float[Tensor, "S"]]:
    """Choose ``top_k`` experts by biased score, weigh them by the unbiased one: ``T = topk(s + b)``, ``p_j = s_j / sum_T s``.

    Args:
        scores: after the sigmoid [tokens, E].
        bias: the balancing bias [E].
        top_k: experts a token.
        renormalize: weights sum to one; for top_k = 1 the weight is the score itself.

    Returns: weights [tokens, k], expert indices [tokens, k], and the cutoff [tokens], the (k+1)-th biased score (with top_k = E the
    smallest one: everything is chosen).
    """
    _check_scores(scores, bias, top_k)
    E = scores.shape[-1]
    best = (scores + bias).topk(min(top_k + 1, E), -1)
    indices = best.indices[:, :top_k]
    weights = scores.gather(-1, indices)
    if renormalize and top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights, indices, best.values[:, -1]


def quantile_bias(
    scores: Float[Tensor, "S E"], bias: Float[Tensor, "E"], top_k: int, estimator: str = "exact", *, bins: int = 1000
) -> Float[Tensor, "E"]:
    """Quantile Balancing: the bias that would have given every expert its share ``q = tokens * top_k / E`` (K3 report Eq. 13-14).

    ``b_j = -[(q+1)-th largest of s_ij - cutoff_i over tokens i]``, then mean-centered. No rate, no loss term. The exact form takes the
    order statistic, never an interpolation; the histogram form counts margins in ``bins`` bins, which pools over micro-batches and devices
    by adding integers (what K3 runs).

    Args: scores after the sigmoid [tokens, E] of a whole optimizer step; the bias used in that step [E].
    Returns: the bias for the next step [E], in the bias's dtype.
    """
    _check_estimator(estimator)
    _check_scores(scores, bias, top_k)
    S, E = scores.shape
    if S == 0:
        raise ValueError("scores must hold at least one token, got 0")
    if estimator == "histogram":
        pooled = MarginHistogram(bias, top_k, bins=bins)
        pooled.add(scores.detach(), route(scores.detach().double(), pooled.bias, top_k)[2])
        return pooled.next_bias().to(bias.dtype)
    margins = scores.double() - route(scores.double(), bias.double(), top_k)[2][:, None]
    rank = min(S * top_k // E, S - 1)  # 0-based: the (q+1)-th largest
    return _centered(-margins.sort(0, descending=True).values[rank]).to(bias.dtype)


class MarginHistogram:
    """Counts of ``r_ij = cutoff_i - s_ij`` an expert, pooled over the micro-batches of one optimizer step (K3 report, App. D)."""

    def __init__(self, bias: Float[Tensor, "E"], top_k: int, *, bins: int = 1000) -> None:
        if bins < 1:
            raise ValueError(f"bins must be at least 1, got {bins}")
        self.bias, self.top_k, self.bins = bias.detach().double().clone(), top_k, bins
        self.low = float(self.bias.min()) - 1  # scores lie in (0, 1), so no margin leaves [b_min - 1, b_max + 1]
        self.width = (float(self.bias.max()) + 1 - self.low) / bins
        self.counts = torch.zeros(len(bias), bins, dtype=torch.long, device=bias.device)
        self.tokens = 0

    def add(self, scores: Float[Tensor, "S E"], cutoff: Float[Tensor, "S"]) -> None:
        """Count a micro-batch: scores after the sigmoid and the cutoffs that :func:`route` gave with this step's bias."""
        margins = cutoff.double()[:, None] - scores.double()
        cells = ((margins - self.low) / self.width).floor().clamp(0, self.bins - 1).long()
        self.counts.scatter_add_(1, cells.T, torch.ones_like(cells.T))
        self.tokens += len(scores)

    def next_bias(self) -> Float[Tensor, "E"]:
        """The bias for the next step [E], float64, from everything counted (K3 report, App. D).

        With ``q = tokens * top_k / E``, expert j's quantile lies in its first bin whose running count reaches ``ceil(q)``; with c counts
        before that bin and h in it, ``b_j = low + (bin + clip((q - c) / h, 0, 1)) * width``, then mean-centered.
        """
        q = self.tokens * self.top_k / len(self.bias)
        total = self.counts.cumsum(1)
        cell = (total < -(-self.tokens * self.top_k // len(self.bias))).sum(1).clamp_max(self.bins - 1)
        inside = self.counts.gather(1, cell[:, None]).squeeze(1)
        before = total.gather(1, cell[:, None]).squeeze(1) - inside
        fraction = ((q - before) / inside.clamp_min(1)).clamp(0, 1)
        return _centered(self.low + (cell + fraction) * self.width)


def sign_bias(loads: Int[Tensor, "E"], bias: Float[Tensor, "E"], rate: float = 1e-3) -> Float[Tensor, "E"]:
    """The loss-free rule that Quantile Balancing replaces: a fixed step up for starved experts, down for busy ones (DeepSeek-V3)."""
    load = loads.to(bias.dtype)
    return bias + rate * torch.sign(load.mean() - load)


def balance_loss(scores: Float[Tensor, "S E"], indices: Int[Tensor, "S k"]) -> Float[Tensor, ""]:
    """The auxiliary loss of older mixtures: E * sum_j (share of tokens sent to j) * (mean normalized score of j). 1 when even."""
    E = scores.shape[-1]
    share = torch.bincount(indices.flatten(), minlength=E).to(scores.dtype) / indices.numel()
    return E * (share * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()


class Router(Traced):
    """Sigmoid scores over all experts, read from the full hidden state in float32, with a balancing bias.

    A training pass (training mode, gradients on) pools margins; :meth:`update_bias`, called once after the optimizer's step, turns
    them into the next bias. In eval mode, under ``no_grad`` and with a cache nothing is pooled, and the bias is frozen.

    Two attributes choose the rule; setting another value raises ValueError. ``estimator``: of :func:`quantile_bias`, "histogram" (what K3
    runs) pools counts, "exact" keeps every score until the update. ``ema``: the share of the old bias that an update keeps, in [0, 1);
    0 is the base rule, more is the report's "further refinement" (App. D).
    """

    def __init__(self, config) -> None:
        super().__init__()
        self.top_k, self.renormalize = config.num_experts_per_token, config.moe_renormalize
        self.scale = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))
        self.estimator, self.ema = "histogram", 0.0
        self.pooling = True  # off while a pass is recomputed: its margins have been counted
        self._pooled: MarginHistogram | list[Tensor] | None = None

    def forward(
        self, x: Float[Tensor, "S D"], valid: Tensor | None = None
    ) -> tuple[Float[Tensor, "S k"], Int[Tensor, "S k"]]:
        """``s = sigmoid(W x)``, then :func:`route` with the balancing bias; weights times ``routed_scaling_factor``.

        Args:
            x: hidden states [tokens, D].
            valid: [tokens], False at padding, which is routed but not pooled. Default: all count.

        Returns: weights [tokens, k] in float32 (or float64), expert indices [tokens, k].
        """
        x = wide(x)
        scores = torch.sigmoid(x @ self.weight.to(x.dtype).T)
        weights, indices, cutoff = route(scores, self.e_score_correction_bias.to(x.dtype), self.top_k, renormalize=self.renormalize)
        if self.pooling and self.training and torch.is_grad_enabled() and self.top_k < scores.shape[1]:
            chosen = slice(None) if valid is None else valid
            self._pool(scores.detach()[chosen], cutoff.detach()[chosen])
        self.emit(scores=scores, indices=indices, weights=weights, cutoff=cutoff)
        return weights * self.scale, indices

    @property
    def estimator(self) -> str:
        return self._estimator

    @estimator.setter
    def estimator(self, name: str) -> None:
        _check_estimator(name)
        self._estimator = name

    @property
    def ema(self) -> float:
        return self._ema

    @ema.setter
    def ema(self, share: float) -> None:
        if not 0 <= share < 1:
            raise ValueError(f"ema must lie in [0, 1), got {share}")
        self._ema = share

    def _pool(self, scores: Tensor, cutoff: Tensor) -> None:
        if self.estimator == "exact":
            self._pooled = [*(self._pooled or []), scores]
        else:
            if self._pooled is None:
                self._pooled = MarginHistogram(self.e_score_correction_bias, self.top_k)
            self._pooled.add(scores, cutoff)

    def forget(self) -> None:
        """Drop what was pooled since the last update, as if those passes had not been."""
        self._pooled = None

    @torch.no_grad()
    def update_bias(self) -> None:
        """Set the bias for the next step from everything pooled since the last call; does nothing when nothing was."""
        if self._pooled is None:
            return
        bias = self.e_score_correction_bias
        if isinstance(self._pooled, MarginHistogram):
            new = self._pooled.next_bias()
        else:
            new = quantile_bias(torch.cat(self._pooled), bias, self.top_k)
        bias.copy_(self.ema * bias + (1 - self.ema) * new.to(bias.dtype))
        self._pooled = None


def _centered(bias: Tensor) -> Tensor:
    return bias - bias.mean()


def _check_estimator(name: str) -> None:
    if name not in ("exact", "histogram"):
        raise ValueError(f"estimator must be 'exact' or 'histogram', got {name!r}")


def _check_scores(scores: Tensor, bias: Tensor, top_k: int) -> None:
    if not scores.is_floating_point():
        raise TypeError(f"scores must be a floating-point tensor, got {scores.dtype}")
    if scores.dim() != 2:
        raise ValueError(f"scores must be [tokens, E], got shape {tuple(scores.shape)}")
    E = scores.shape[1]
    if tuple(bias.shape) != (E,):
        raise ValueError(f"bias must be [E] = ({E},) for scores of shape {tuple(scores.shape)}, got {tuple(bias.shape)}")
    if not 1 <= top_k <= E:
        raise ValueError(f"top_k must lie in 1..E = 1..{E}, got {top_k}")
    if scores.device.type != "meta" and not bool(((scores >= 0) & (scores <= 1)).all()):
        low, high = scores.min().item(), scores.max().item()
        raise ValueError(f"scores are after the sigmoid and must lie in [0, 1], got {low:.4g} to {high:.4g}")
