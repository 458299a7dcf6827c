"""Kimi Delta Attention, the layer: projections, short convolutions, gates, the operator, a gated norm (K3 report 2.1.1)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from minimodel.cache import FixedState, writable
from minimodel.delta_rule import bounded_log_decay, kda, kda_recurrent, kda_step_, mamba_dt_bias, softplus_log_decay
from minimodel.delta_rule.triton_available import use_triton
from minimodel.layers import RMSNorm, ShortConv, l2norm, linear, short_conv, wide
from minimodel.trace import Traced


class KimiDeltaAttention(Traced):
    """The fixed-memory mixer of three layers in four.

    Per head, with K = V = head_dim (128 in K3) and P = H * head_dim::

        q, k = l2norm(silu(conv(W_q x))), l2norm(silu(conv(W_k x)))        v = silu(conv(W_v x))
        beta = sigmoid(W_b x)        g = bounded_log_decay(W_fb W_fa x)    (softplus gate if gate_lower_bound is None)
        o, S = kda(q, k, v, g, beta)
        y = W_o [sigmoid(W_g x) * RMSNorm(o)]                               gates read the *normed* layer input x
    """

    def __init__(self, config) -> None:
        super().__init__()
        lin = config.linear_attn_config
        D, H, K = config.hidden_size, lin.num_heads, lin.head_dim
        self.num_heads, self.head_dim, self.lower_bound = H, K, lin.gate_lower_bound
        self.q_proj, self.k_proj, self.v_proj = (linear(D, H * K) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConv(H * K, lin.short_conv_kernel_size) for _ in range(3))
        self._build_gates(D)
        self.full_rank_gate = lin.use_full_rank_gate
        if self.full_rank_gate:
            self.g_proj = linear(D, H * K)
        else:
            self.g_a_proj, self.g_b_proj = linear(D, K), linear(K, H * K)
        self.o_norm = RMSNorm(K, config.rms_norm_eps)  # one gain, shared by all heads
        self.o_proj = linear(H * K, D)

    def _build_gates(self, D: int) -> None:
        H, K = self.num_heads, self.head_dim
        self.f_a_proj, self.f_b_proj = linear(D, K), linear(K, H * K)
        self.b_proj = linear(D, H)
        self.A_log = nn.Parameter(torch.zeros(H))
        self.dt_bias = nn.Parameter(torch.zeros(H * K))

    def reset_parameters(self) -> None:
        """A_log = 0 and the Mamba-style bias for K3's gate; A_log = log U(1, 16) for Kimi Linear's (their reports)."""
        with torch.no_grad():
            if self.lower_bound is None:
                self.A_log.uniform_(1.0, 16.0).log_()
            else:
                self.A_log.zero_()
            self.dt_bias.copy_(mamba_dt_bias(self.dt_bias.shape))

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        cache: FixedState | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        padding: Int[Tensor, "B"] | None = None,
        cu_seqlens: Int[Tensor, "bounds"] | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "B T D"]:
        """Mix along time.

        Every mixer takes the same arguments: ``cache``, its slot, is read and replaced; ``mask`` is False at left padding (``padding``
        counts the same per row, for mixers that look back); ``cu_seqlens`` bounds documents; ``backend`` is the operator's.
        """
        H, K = self.num_heads, self.head_dim
        if mask is not None:
            x = x * mask.unsqueeze(-1).to(x.dtype)  # padding then writes nothing: its key is zero
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        taps = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]).squeeze(1)
        state, tail = (None, None) if cache is None else (cache.state, cache.tail)
        if state is not None and cu_seqlens is None and len(state) != len(x):  # kernels would read beyond its end
            raise ValueError(f"cache holds {len(state)} sequences, x has {len(x)}")
        if self._fused(qkv, backend):
            o, S, tail = self._mix_fused(x, qkv, taps, state, tail, cu_seqlens)
        else:
            qkv, tail = short_conv(qkv, taps, tail, cu_seqlens)
            q, k, v = (part.unflatten(-1, (H, K)) for part in F.silu(qkv).chunk(3, -1))
            g, beta = self._gates(x)
            o, S = self._mix(l2norm(q), l2norm(k), v, g, beta, state, cu_seqlens, backend)
        if cache is not None:
            cache.state, cache.tail = S, tail
        gate = self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        y = self.o_norm(o) * torch.sigmoid(gate).unflatten(-1, (H, K))
        return self.o_proj(y.flatten(2))

    def _gates(self, x: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T H"]]:
        """Log-decay g of every channel and write strength beta of every head."""
        beta = torch.sigmoid(self.b_proj(x).to(self.A_log.dtype))
        f = self.f_b_proj(self.f_a_proj(x)).unflatten(-1, (self.num_heads, self.head_dim))
        bias = self.dt_bias.view(self.num_heads, self.head_dim)
        if self.lower_bound is None:
            return softplus_log_decay(f, self.A_log, bias), beta
        return bounded_log_decay(f, self.A_log, bias, self.lower_bound), beta

    def _mix(self, q, k, v, g, beta, state, cu_seqlens, backend) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "N H K V"]]:
        """The state's rule over time: outputs and the final state."""
        if not self.tracing:
            # decoding: a cache's state is updated where it lies
            written = state is not None and not torch.is_grad_enabled() and writable(state)
            if written and q.shape[1] == 1 and backend == "auto" and cu_seqlens is None and state.is_contiguous():
                # one token: the checks of ``kda`` would take a third of the time, and what this layer computed is in range
                inputs = [a if a.dtype == state.dtype else a.to(state.dtype) for a in (q, k, v, g, beta)]
                return kda_step_(state, *inputs, q.shape[-1] ** -0.5).to(q.dtype), state
            return kda(q, k, v, g, beta, initial_state=state, cu_seqlens=cu_seqlens, backend=backend, in_place=written)
        dtype = wide(q).dtype
        inputs = [a.to(dtype) for a in (q * q.shape[-1] ** -0.5, k, v, g, beta)]
        S = inputs[1].new_zeros(len(q), self.num_heads, self.head_dim, self.head_dim) if state is None else state
        o, S, states = by_document(lambda *x: kda_recurrent(*x, S, keep_states=True), inputs, cu_seqlens)
        self.emit(q=q, k=k, v=v, alpha=g.exp(), beta=beta, state=states, output=o)  # a recorder sees the state after every token
        return o.to(q.dtype), S

    def _fused(self, qkv: Tensor, backend: str) -> bool:
        """Whether Triton kernels take the gate too, and in decoding all from the projections on. Not for another rule of the state."""
        own = type(self)._gates is KimiDeltaAttention._gates and type(self)._mix is KimiDeltaAttention._mix
        return own and not self.tracing and use_triton(backend, [qkv], (self.head_dim,))

    def _mix_fused(self, x, qkv, taps, state, tail, cu_seqlens) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, final state and convolution tail as ``_mix`` and ``short_conv`` give them, from raw projections."""
        from minimodel.delta_rule.triton_chunked import kda_triton  # only here: importing Triton takes a while
        from minimodel.delta_rule.triton_decode import decode_step
        from minimodel.delta_rule.triton_gate import Gate

        H, K = self.num_heads, self.head_dim
        gate = Gate(self.A_log, self.dt_bias.view(H, K), self.lower_bound)
        f, b = self.f_b_proj(self.f_a_proj(x)).unflatten(-1, (H, K)), self.b_proj(x)
        in_place = state is None or (state.dtype == torch.float32 and state.is_contiguous())
        if x.shape[1] == 1 and cu_seqlens is None and in_place and not torch.is_grad_enabled():
            return decode_step(qkv, taps, f, b, gate, state, tail)
        qkv, tail = short_conv(qkv, taps, tail, cu_seqlens)
        q, k, v = (part.unflatten(-1, (H, K)) for part in F.silu(qkv).chunk(3, -1))
        beta = torch.sigmoid(b.to(self.A_log.dtype))
        o, S = kda_triton(l2norm(q), l2norm(k), v, f, beta, state, scale=K**-0.5, cu_seqlens=cu_seqlens, gate=gate)
        return o, S, tail


def by_document(run: Callable[..., tuple[Tensor, Tensor, Tensor | None]], inputs: list[Tensor], cu_seqlens: Tensor | None):
    """``run`` on every document of a packed row by itself: outputs joined along time, one final state a document, all states if kept."""
    bounds = [0, inputs[0].shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, finals, states = zip(*(run(*(x[:, a:b] for x in inputs)) for a, b in pairwise(bounds)), strict=True)
    return torch.cat(outputs, 1), torch.cat(finals), None if states[0] is None else torch.cat(states, 1)
