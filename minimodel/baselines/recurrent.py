"""KDA's relatives: the same block (projections, short convolutions, output gate, norm, cache), another rule for the state.

====================  ===============================================================  ==========================
mixer                 one step                                                         forgets
====================  ===============================================================  ==========================
LinearAttention       ``S + k v^T``                                                    nothing
Mamba2                ``a S + dt k v^T``                                               all channels of a head alike
DeltaNet              ``(I - beta k k^T) S + beta k v^T``                              what this key held
GatedDeltaNet         ``(I - beta k k^T) a S + beta k v^T``                            both of the above
KDA                   ``(I - beta k k^T) Diag(alpha) S + beta k v^T``                  every channel at its own rate
====================  ===============================================================  ==========================

The published models differ in more than the rule (feature maps, normalizers, skips). Here everything else is KDA's, unit-length keys
included, so that a comparison tests the rule alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minimodel.baselines.additive import additive_chunked, additive_recurrent
from minimodel.delta_rule import mamba_dt_bias, softplus_log_decay
from minimodel.kda import KimiDeltaAttention, by_document
from minimodel.layers import linear, wide


class LinearAttention(KimiDeltaAttention):
    """Linear attention in KDA's block (Katharopoulos et al. 2020, here without the normalizer): the state only ever grows.

    Subclasses set ``erases`` (the delta rule, strength ``beta = sigmoid(W_b x)``) and ``fades`` (one decay a head,
    ``g = -exp(A_log) softplus(W_a x + dt_bias)`` as in Mamba-2).
    """

    erases = False
    fades = False

    def _build_gates(self, D: int) -> None:
        H = self.num_heads
        if self.erases:
            self.b_proj = linear(D, H)
        if self.fades:
            self.a_proj = linear(D, H)
            self.A_log, self.dt_bias = nn.Parameter(torch.zeros(H)), nn.Parameter(torch.zeros(H))

    def reset_parameters(self) -> None:
        """Mamba-2's start: A = exp(A_log) uniform in [1, 16], steps dt log-uniform in [0.001, 0.1]."""
        if self.fades:
            with torch.no_grad():
                self.A_log.uniform_(1.0, 16.0).log_()
                self.dt_bias.copy_(mamba_dt_bias(self.dt_bias.shape))

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log-decay and write strength, one a head: [B, T, H] each, in float32 (or float64)."""
        g, write = wide(x.new_zeros(*x.shape[:2], self.num_heads)), None
        if self.fades:
            f = self.a_proj(x).unsqueeze(-1)
            g = softplus_log_decay(f, self.A_log, self.dt_bias.unsqueeze(-1)).squeeze(-1)
            write = -g / self.A_log.to(g.dtype).exp()  # Mamba-2 writes with its step size dt = softplus(...)
        if self.erases:
            write = torch.sigmoid(self.b_proj(x).to(g.dtype))
        return g, torch.ones_like(g) if write is None else write

    def _mix(self, q, k, v, g, write, state, cu_seqlens, backend) -> tuple[Tensor, Tensor]:
        """With the delta rule: KDA's own, all channels of a head fading alike. Without: writes by addition."""
        per_channel = g.unsqueeze(-1).expand(*g.shape, self.head_dim)
        if self.erases:
            return super()._mix(q, k, v, per_channel, write, state, cu_seqlens, backend)
        inputs = [q.to(g.dtype) * self.head_dim**-0.5, k.to(g.dtype), v.to(g.dtype), g, write]
        S = g.new_zeros(q.shape[0], self.num_heads, self.head_dim, self.head_dim) if state is None else state

        def run(*x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
            if self.tracing or backend == "recurrent" or x[0].shape[1] == 1:
                return additive_recurrent(*x, S, keep_states=self.tracing)
            return *additive_chunked(*x, S), None

        o, S_end, states = by_document(run, inputs, cu_seqlens)
        if self.tracing:
            self.emit(q=q, k=k, v=v, alpha=per_channel.exp(), beta=write, state=states, output=o)
        return o.to(q.dtype), S_end


class Mamba2(LinearAttention):
    """One decay a head, writes by addition (Dao and Gu 2024)."""

    fades = True


class DeltaNet(LinearAttention):
    """Erases what its key held before it writes, never fades (Yang et al. 2024)."""

    erases = True


class GatedDeltaNet(LinearAttention):
    """Erases before it writes, and one decay a head (Yang, Kautz and Hatamizadeh 2025): KDA with a single dial."""

    erases = fades = True
