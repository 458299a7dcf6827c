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

from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from minimodel.baselines.additive import additive_chunked, additive_recurrent
from minimodel.cache import FixedState
from minimodel.delta_rule import kda, mamba_dt_bias, softplus_log_decay
from minimodel.delta_rule.recurrent import kda_recurrent
from minimodel.layers import RMSNorm, ShortConv, l2norm, linear, short_conv
from minimodel.trace import Traced


class LinearAttention(Traced):
    """Linear attention with KDA's block (Katharopoulos et al. 2020, here without the normalizer): the state only ever grows.

    Subclasses set ``erases`` (the delta rule, strength ``beta = sigmoid(W_b x)``) and ``fades`` (one decay a head,
    ``g = -exp(A_log) softplus(W_a x + dt_bias)`` as in Mamba-2).
    """

    erases = False
    fades = False

    def __init__(self, config, layer_idx: int = 0) -> None:
        super().__init__()
        lin = config.linear_attn_config
        D, H, K = config.hidden_size, lin.num_heads, lin.head_dim
        self.num_heads, self.head_dim, self.layer_idx = H, K, layer_idx
        self.q_proj, self.k_proj, self.v_proj = (linear(D, H * K) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConv(H * K, lin.short_conv_kernel_size) for _ in range(3))
        if self.erases:
            self.b_proj = linear(D, H)
        if self.fades:
            self.a_proj = linear(D, H)
            self.A_log, self.dt_bias = nn.Parameter(torch.zeros(H)), nn.Parameter(torch.zeros(H))
        if lin.use_full_rank_gate:
            self.g_proj = linear(D, H * K)
        else:
            self.g_a_proj, self.g_b_proj = linear(D, K), linear(K, H * K)
        self.o_norm = RMSNorm(K, config.rms_norm_eps)
        self.o_proj = linear(H * K, D)

    def reset_parameters(self, std: float) -> None:
        """Mamba-2's start: A = exp(A_log) uniform in [1, 16], steps dt log-uniform in [0.001, 0.1]."""
        if self.fades:
            with torch.no_grad():
                self.A_log.uniform_(1.0, 16.0).log_()
                self.dt_bias.copy_(mamba_dt_bias(self.dt_bias.shape))

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        cache: FixedState | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        cu_seqlens: Int[Tensor, "bounds"] | None = None,
        padding: Int[Tensor, "B"] | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "B T D"]:
        """Mix along time. ``mask`` is False at left padding; ``cache`` is read and replaced; ``padding`` is softmax attention's."""
        H, K = self.num_heads, self.head_dim
        if mask is not None:
            x = x * mask.unsqueeze(-1).to(x.dtype)  # padding then writes nothing: its key is zero
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        taps = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]).squeeze(1)
        qkv, tail = short_conv(qkv, taps, None if cache is None else cache.tail, cu_seqlens)
        q, k, v = (part.unflatten(-1, (H, K)) for part in F.silu(qkv).chunk(3, -1))
        q, k = l2norm(q), l2norm(k)
        g, write = self._gates(x)
        o, S = self._mix(q, k, v, g, write, None if cache is None else cache.state, cu_seqlens, backend)
        if cache is not None:
            cache.state, cache.tail = S, tail
        gate = self.g_proj(x) if hasattr(self, "g_proj") else self.g_b_proj(self.g_a_proj(x))
        return self.o_proj((self.o_norm(o) * torch.sigmoid(gate).unflatten(-1, (H, K))).flatten(2))

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log-decay and write strength, one a head: [B, T, H] each, in float32 (or float64)."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        g, write = x.new_zeros(*x.shape[:2], self.num_heads, dtype=dtype), None
        if self.fades:
            f = self.a_proj(x).unsqueeze(-1)
            g = softplus_log_decay(f, self.A_log, self.dt_bias.unsqueeze(-1)).squeeze(-1)
            write = -g / self.A_log.to(dtype).exp()  # Mamba-2 writes with its step size dt = softplus(...)
        if self.erases:
            write = torch.sigmoid(self.b_proj(x).to(dtype))
        return g, torch.ones_like(g) if write is None else write

    def _mix(self, q, k, v, g, write, state, cu_seqlens, backend) -> tuple[Tensor, Tensor]:
        """The state's rule over time. Outputs [B, T, H, V] in q's dtype and the final state [B, H, K, V]."""
        if self.erases and not self.tracing:
            return kda(q, k, v, self._per_channel(g), write, initial_state=state, cu_seqlens=cu_seqlens, backend=backend)
        inputs = [q.to(g.dtype) * self.head_dim**-0.5, k.to(g.dtype), v.to(g.dtype), g, write]
        S = g.new_zeros(q.shape[0], self.num_heads, self.head_dim, self.head_dim) if state is None else state
        bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        documents = [self._document([x[:, a:b] for x in inputs], S, backend) for a, b in pairwise(bounds)]
        outputs, finals, states = zip(*documents, strict=True)
        o = torch.cat(outputs, 1)
        if self.tracing:
            self.emit(q=q, k=k, v=v, alpha=g.exp(), beta=write, state=torch.cat(states, 1), output=o)
        return o.to(q.dtype), torch.cat(finals)

    def _document(self, inputs: list[Tensor], S: Tensor, backend: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """One document from state S; the state after every token as well while a recorder is attached."""
        q, k, v, g, write = inputs
        if self.erases:
            return kda_recurrent(q, k, v, self._per_channel(g), write, S, keep_states=True)
        if self.tracing or backend == "recurrent" or q.shape[1] == 1:
            return additive_recurrent(q, k, v, g, write, S, keep_states=self.tracing)
        return *additive_chunked(q, k, v, g, write, S), None

    def _per_channel(self, g: Tensor) -> Tensor:
        return g.unsqueeze(-1).expand(*g.shape, self.head_dim)


class Mamba2(LinearAttention):
    """One decay a head, writes by addition (Dao and Gu 2024)."""

    fades = True


class DeltaNet(LinearAttention):
    """Erases what its key held before it writes, never fades (Yang et al. 2024)."""

    erases = True


class GatedDeltaNet(LinearAttention):
    """Erases before it writes, and one decay a head (Yang, Kautz and Hatamizadeh 2025): KDA with a single dial."""

    erases = fades = True
