"""Triton: one decoding step of the layer, from the projections to the operator's output, in one kernel.

    q, k = l2norm(silu(conv(.)))     v = silu(conv(.))     beta = sigmoid(b)     alpha = exp(gate(f))
    S = Diag(alpha) S                       fade
    S = S + beta k (v - S^T k)^T            erase and write, against the already faded state
    o = S^T (scale q)

At one token nothing is worth a matrix product: the step reads the state once and writes it once, and that is its time. Columns of V do
not meet, so a program takes BV of them; what concerns all columns (q, k, alpha) each of a head's programs computes again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from minimodel.delta_rule.triton_gate import Gate, log_decay
from minimodel.layers import L2_EPS

EPS = tl.constexpr(L2_EPS)


@triton.jit
def convolved(x, taps, tail, new_tail, batch, channels, P, W: tl.constexpr):
    """silu of the short convolution at the current token, for some of the P channels, in float32; the tail moves on by one token."""
    now = tl.load(x + batch * P + channels)
    y = now.to(tl.float32) * tl.load(taps + channels * W + W - 1).to(tl.float32)  # the last tap multiplies the current token
    for i in tl.static_range(W - 1):
        past = tl.load(tail + (batch * (W - 1) + i) * P + channels)
        y += past.to(tl.float32) * tl.load(taps + channels * W + i).to(tl.float32)
        if i > 0:
            tl.store(new_tail + (batch * (W - 1) + i - 1) * P + channels, past)
    if W > 1:
        tl.store(new_tail + (batch * (W - 1) + W - 2) * P + channels, now)
    return y * tl.sigmoid(y)


@triton.jit
def decode_kernel(x, taps, tail, new_tail, f, A_log, dt_bias, b, S, o, H, lower_bound, scale,
                  K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, W: tl.constexpr, GATE: tl.constexpr):  # fmt: skip
    """x [B, P], P = H (K + K + V): projections of q, k, v. taps [P, W], tail [B, W-1, P], f [B, H, K], b [B, H], S [B, H, K, V] in place
    -> o [B, H, V]. One program a batch row, head and BV columns."""
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    channels = tl.arange(0, K)
    columns = tl.program_id(0) * BV + tl.arange(0, BV)
    P = H * (2 * K + V)
    q = convolved(x, taps, tail, new_tail, batch, head * K + channels, P, W)  # [K]
    k = convolved(x, taps, tail, new_tail, batch, (H + head) * K + channels, P, W)
    v = convolved(x, taps, tail, new_tail, batch, 2 * H * K + head * V + columns, P, W)  # [BV]
    q = q * tl.rsqrt(tl.sum(q * q, 0) + EPS) * scale
    k = k * tl.rsqrt(tl.sum(k * k, 0) + EPS)
    beta = tl.sigmoid(tl.load(b + batch * H + head).to(tl.float32))
    raw = tl.load(f + (batch * H + head) * K + channels).to(tl.float32)
    g, _ = log_decay(raw, A_log, dt_bias, head, channels, lower_bound, K, GATE)

    place = S + ((batch * H + head) * K + channels[:, None]) * V + columns[None, :]
    state = tl.exp(g)[:, None] * tl.load(place)  # [K, BV]
    recalled = tl.sum(k[:, None] * state, 0)
    state += k[:, None] * (beta * (v - recalled))[None, :]
    tl.store(place, state)
    tl.store(o + (batch * H + head) * V + columns, tl.sum(q[:, None] * state, 0))


def decode_step(
    x: Float[Tensor, "B 1 P"],
    taps: Float[Tensor, "P W"],
    f: Float[Tensor, "B 1 H K"],
    b: Float[Tensor, "B 1 H"],
    gate: Gate,
    state: Float[Tensor, "B H K V"] | None,
    tail: Float[Tensor, "B W-1 P"] | None,
) -> tuple[Float[Tensor, "B 1 H V"], Float[Tensor, "B H K V"], Float[Tensor, "B W-1 P"]]:
    """One token: the operator's output, the state (written in place; zeros if None), the new tail.

    x: raw projections of q, k and v side by side, P = H (2 K + V); f, b: raw projections of the gate and the write strength.
    """
    (B, _, P), (H, K), W = x.shape, f.shape[2:], taps.shape[1]
    V = P // H - 2 * K
    if state is None:
        state = torch.zeros(B, H, K, V, dtype=torch.float32, device=x.device)
    if tail is None:
        tail = x.new_zeros(B, W - 1, P)
    if tail.dtype != x.dtype:
        raise ValueError(f"tail holds {tail.dtype}, x is {x.dtype}: a cache serves one precision, start a new one")
    new_tail, o, BV = torch.empty_like(tail), x.new_empty(B, 1, H, V), min(V, 32)
    with torch.cuda.device_of(x):
        decode_kernel[V // BV, H, B](
            x.contiguous(), taps.contiguous(), tail.contiguous(), new_tail, f.contiguous(), gate.A_log, gate.dt_bias.contiguous(),
            b.contiguous(), state, o, H, gate.lower_bound or 0.0, K**-0.5, K, V, BV, W, gate.kind, num_warps=8,
        )  # fmt: skip
    return o, state, new_tail
