"""Triton: the forget gate and the running sum of the log-decay inside a chunk, in one pass over the raw projection.

    z = f + dt_bias          g = lower_bound * sigmoid(exp(A_log) z)      ("bounded", K3 report Eq. 5-6)
                             g = -exp(A_log) * softplus(z)                ("softplus", Kimi Linear)
                             g = f                                        ("given")
    G_i = sum_(j <= i) g_j   over the rows of one chunk

The gradient runs the other way: dg_j = sum_(i >= j) dG_i, then through the gate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minimodel.delta_rule.triton_common import CHUNK, FORGOTTEN, Chunks, block, load_tokens, store_tokens


class Gate(NamedTuple):
    """The parameters of a gate that the kernels apply to a raw projection f. ``lower_bound`` None: Kimi Linear's softplus gate."""

    A_log: Tensor  # [H]
    dt_bias: Tensor  # [H, K]
    lower_bound: float | None

    @property
    def kind(self) -> str:
        return "softplus" if self.lower_bound is None else "bounded"


@triton.jit
def log_decay(f, A_log, dt_bias, head, channels, lower_bound, K: tl.constexpr, GATE: tl.constexpr):
    """g of the module's docstring and dg/dz, both like f."""
    if GATE == "given":
        g, slope = f, tl.full(f.shape, 1.0, tl.float32)
    else:
        A = tl.exp(tl.load(A_log + head).to(tl.float32))
        z = f + tl.load(dt_bias + head * K + channels).to(tl.float32)
        if GATE == "bounded":
            s = tl.sigmoid(A * z)
            g, slope = lower_bound * s, lower_bound * A * s * (1 - s)
        else:
            g = -A * (tl.maximum(z, 0.0) + tl.log(1 + tl.exp(-tl.abs(z))))
            slope = -A * tl.sigmoid(z)
    return g, slope


@triton.jit
def cumulative_decay_kernel(f, A_log, dt_bias, G, chunk_start, chunk_end, H, lower_bound,
                            C: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr):  # fmt: skip
    """f [tokens, H, K] -> G [chunks, H, C, K] float32. One program a chunk and head."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, channels = tl.arange(0, C), tl.arange(0, K)
    raw = load_tokens(f, chunk, head, H, rows, channels, chunk_start, chunk_end, K)  # [C, K]
    g, _ = log_decay(raw, A_log, dt_bias, head, channels[None, :], lower_bound, K, GATE)
    live = tl.load(chunk_start + chunk) + rows < tl.load(chunk_end + chunk)
    g = tl.where(live[:, None], tl.maximum(g, FORGOTTEN), 0.0)  # rows beyond the end do not fade
    tl.store(block(G, chunk, head, H, rows, channels, C, K), tl.cumsum(g, 0))


@triton.jit
def cumulative_decay_backward_kernel(f, A_log, dt_bias, dG, df, dA_log, ddt_bias, chunk_start, chunk_end, H, lower_bound,
                                     C: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr):  # fmt: skip
    """dG [chunks, H, C, K] -> df [tokens, H, K]; each chunk's part of dA_log [chunks, H] and ddt_bias [chunks, H, K]."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, channels = tl.arange(0, C), tl.arange(0, K)
    raw = load_tokens(f, chunk, head, H, rows, channels, chunk_start, chunk_end, K)
    g, slope = log_decay(raw, A_log, dt_bias, head, channels[None, :], lower_bound, K, GATE)
    live = tl.load(chunk_start + chunk) + rows < tl.load(chunk_end + chunk)
    dg = tl.cumsum(tl.load(block(dG, chunk, head, H, rows, channels, C, K)), 0, reverse=True)
    dg = tl.where(live[:, None] & (g >= FORGOTTEN), dg, 0.0)
    store_tokens(df, dg * slope, chunk, head, H, rows, channels, chunk_start, chunk_end, K)
    if GATE != "given":
        through_z = dg * slope
        z = raw + tl.load(dt_bias + head * K + channels[None, :]).to(tl.float32)
        through_A = through_z * z if GATE == "bounded" else dg * g
        tl.store(dA_log + chunk * H + head, tl.sum(tl.sum(through_A, 1), 0))
        tl.store(ddt_bias + (chunk * H + head) * K + channels, tl.sum(through_z, 0))


def cumulative_decay(f: Tensor, gate: Gate | None, chunks: Chunks) -> Tensor:
    """G [chunks, H, C, K] in float32 from f [tokens, H, K]: a log-decay, or with ``gate`` its raw projection."""
    _, H, K = f.shape
    G = torch.empty(len(chunks), H, CHUNK, K, dtype=torch.float32, device=f.device)
    parameters = (f, f, 0.0) if gate is None else (gate.A_log, gate.dt_bias, gate.lower_bound or 0.0)
    kind = "given" if gate is None else gate.kind
    cumulative_decay_kernel[len(chunks), H](
        f, *parameters[:2], G, chunks.start, chunks.end, H, parameters[2], CHUNK, K, kind, num_warps=8
    )
    return G


def cumulative_decay_backward(f: Tensor, gate: Gate | None, dG: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """df [tokens, H, K], dA_log [H], ddt_bias [H, K]; the last two None without a gate. A chunk's sums are added in a fixed order."""
    _, H, K = f.shape
    df = torch.empty_like(f)
    if gate is None:
        cumulative_decay_backward_kernel[len(chunks), H](
            f, f, f, dG, df, df, df, chunks.start, chunks.end, H, 0.0, CHUNK, K, "given", num_warps=8
        )
        return df, None, None
    dA_log, ddt_bias = dG.new_empty(len(chunks), H), dG.new_empty(len(chunks), H, K)
    cumulative_decay_backward_kernel[len(chunks), H](
        f, gate.A_log, gate.dt_bias, dG, df, dA_log, ddt_bias, chunks.start, chunks.end, H, gate.lower_bound or 0.0, CHUNK, K, gate.kind,
        num_warps=8,
    )  # fmt: skip
    return df, dA_log.sum(0).to(gate.A_log.dtype), ddt_bias.sum(0).to(gate.dt_bias.dtype)
