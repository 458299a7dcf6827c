"""Stable LatentMoE: many small experts behind a narrow latent, two shared ones on the full width (K3 report 2.3, Eq. 11-13)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from minimodel.layers import GatedMLP, RMSNorm, glu, linear
from minimodel.mxfp4 import fake_quantize_mxfp4
from minimodel.mxfp8 import fake_quantize_mxfp8
from minimodel.routing import Router


class RoutedExperts(nn.Module):
    """E gated MLPs, stored stacked: w1 (gate) and w3 (up) [E, F, L], w2 (down) [E, L, F], in the released checkpoint's letters."""

    def __init__(self, config, width: int) -> None:
        super().__init__()
        E, F = config.num_experts, config.moe_intermediate_size
        self.config = config
        self.w1 = nn.Parameter(torch.empty(E, F, width))
        self.w3 = nn.Parameter(torch.empty(E, F, width))
        self.w2 = nn.Parameter(torch.empty(E, width, F))
        self.rounding = False  # see quantization.train_in_four_bits

    def forward(
        self, z: Float[Tensor, "S L"], weights: Float[Tensor, "S k"], indices: Int[Tensor, "S k"]
    ) -> Float[Tensor, "S L"]:
        """``u = sum_j p_j E_j(z)``."""
        stacks = {name: getattr(self, name) for name in ("w1", "w3", "w2")}
        if self.rounding:
            stacks = {name: fake_quantize_mxfp4(w) for name, w in stacks.items()}
        rounded = fake_quantize_mxfp8 if self.rounding else None
        each = {name: w.unbind() for name, w in stacks.items()}  # the gradient of w[e] would be as large as w, once an expert
        return run_experts(lambda name, e: each[name][e], rounded, z, weights, indices, len(self.w1), self.config)


def run_experts(
    weight: Callable[[str, int], Tensor],
    rounded: Callable[[Tensor], Tensor] | None,
    z: Float[Tensor, "S L"],
    weights: Float[Tensor, "S k"],
    indices: Int[Tensor, "S k"],
    experts: int,
    config,
) -> Float[Tensor, "S L"]:
    """``u = sum_j p_j E_j(z)``: tokens are sorted by expert, each expert runs once on its own rows, idle ones not at all.

    Args:
        weight: (name, expert) to that expert's matrix. rounded: what becomes of activations that enter a matrix.
    """
    S, k = indices.shape
    order = indices.flatten().argsort(stable=True)
    loads = torch.bincount(indices.flatten(), minlength=experts).tolist()
    w1, w3, w2 = (partial(weight, name) for name in ("w1", "w3", "w2"))
    rows = z[order // k] if rounded is None else rounded(z[order // k])
    hidden = glu(_grouped(rows, w1, loads), _grouped(rows, w3, loads), config)
    out = _grouped(hidden if rounded is None else rounded(hidden), w2, loads)
    out = torch.empty_like(out).index_copy(0, order, out).view(S, k, -1)
    return (out * weights.to(out.dtype).unsqueeze(-1)).sum(1)


def _grouped(rows: Float[Tensor, "N I"], matrix: Callable[[int], Tensor], loads: list[int]) -> Float[Tensor, "N O"]:
    """Rows sorted by expert times each expert's own matrix [O, I]."""
    return torch.cat([part @ matrix(e).T for e, part in enumerate(rows.split(loads)) if loads[e]])


class StableLatentMoE(nn.Module):
    """``y = sum_shared E(x) + W_up RMSNorm( sum_j p_j E_j(W_down x) )``.

    The router reads the full x, routed experts the latent (half of D in K3), shared experts the full x, fused into one MLP of
    twice the width. "Stable" names three additions: this norm after the weighted sum, the bounded SiTU activation, Quantile
    Balancing. Without ``routed_expert_hidden_size`` there is no latent and no norm (Kimi Linear).
    """

    def __init__(self, config) -> None:
        super().__init__()
        D, L = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Router(config)
        self.experts = RoutedExperts(config, L or D)
        latent, shared = L is not None, config.num_shared_experts * config.moe_intermediate_size
        self.routed_expert_down_proj = linear(D, L) if latent else None
        self.routed_expert_norm = RMSNorm(L, config.rms_norm_eps) if latent and config.latent_moe_use_norm else None
        self.routed_expert_up_proj = linear(L, D) if latent else None
        self.shared_experts = GatedMLP(config, shared) if shared else None

    def forward(self, x: Float[Tensor, "B T D"], mask: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, "B T D"]:
        """The equation above for every token of x [B, T, D] by itself. mask [B, T]: False at padding, which the balancing leaves out."""
        flat = x.flatten(0, -2)
        weights, indices = self.gate(flat, None if mask is None else mask.flatten())
        z = flat if self.routed_expert_down_proj is None else self.routed_expert_down_proj(flat)
        u = self.experts(z, weights, indices)
        if self.routed_expert_norm is not None:
            u = self.routed_expert_norm(u)
        y = (u if self.routed_expert_up_proj is None else self.routed_expert_up_proj(u)).view_as(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)
