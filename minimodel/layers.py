"""The small parts: norms, the short convolution, activations, the gated MLP. Functions first, thin modules after."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

__all__ = ["GatedMLP", "RMSNorm", "ShortConv", "l2norm", "rms_norm", "short_conv", "situ_glu", "wide"]

L2_EPS = 1e-6  # of l2norm, here and in the fused decoding step
NOTHING = nullcontext()  # made once: a decoding step counts microseconds


def wide(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """x in the precision that norms, gates, softmaxes and scores are computed in: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Float[Tensor, "... D"], weight: Float[Tensor, "D"] | None = None, eps: float = 1e-5) -> Float[Tensor, "... D"]:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis, in float32 (or float64), returned in x's dtype."""
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


def l2norm(x: Float[Tensor, "... K"], eps: float = L2_EPS) -> Float[Tensor, "... K"]:
    """``x / sqrt(sum(x^2) + eps)``: unit length, with eps added to the *sum* of squares as the released kernels do."""
    y = wide(x)
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def situ_glu(
    gate: Float[Tensor, "... F"], up: Float[Tensor, "... F"], beta: float = 4.0, linear_beta: float | None = 25.0
) -> Float[Tensor, "... F"]:
    """SiTU-GLU (K3 report 2.3): ``beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)``.

    Bounded by beta * linear_beta (100 in K3), equal to SwiGLU to first order at zero. ``linear_beta=None``: no cap on the up
    branch. Computed in float32 (or float64) with one cast at the end.
    """
    if gate.shape != up.shape:
        raise ValueError(f"up must have gate's shape {tuple(gate.shape)}, got {tuple(up.shape)}")
    if not beta > 0 or (linear_beta is not None and not linear_beta > 0):
        raise ValueError(f"beta and linear_beta must be positive (or linear_beta None), got {beta} and {linear_beta}")
    a = wide(gate)
    b = up.to(a.dtype)
    b = b if linear_beta is None else linear_beta * torch.tanh(b / linear_beta)
    return (beta * torch.tanh(a / beta) * torch.sigmoid(a) * b).to(gate.dtype)


def glu(gate: Float[Tensor, "... F"], up: Float[Tensor, "... F"], config) -> Float[Tensor, "... F"]:
    """The config's gated activation: SiTU-GLU for ``hidden_act="situ"``, SwiGLU for "silu"."""
    if config.hidden_act == "situ":
        return situ_glu(gate, up, config.activation_situ_beta, config.activation_situ_linear_beta)
    return F.silu(gate) * up


def short_conv(
    x: Float[Tensor, "B T P"],
    weight: Float[Tensor, "P W"],
    tail: Float[Tensor, "B W-1 P"] | None = None,
    cu_seqlens: Int[Tensor, "bounds"] | None = None,
) -> tuple[Float[Tensor, "B T P"], Float[Tensor, "B W-1 P"]]:
    """Depthwise causal convolution: ``y_t = sum_i weight[:, i] * x_(t-W+1+i)``; the last tap multiplies the current token.

    Args:
        x: raw projections [B, T, P].
        weight: W taps a channel [P, W].
        tail: the W-1 projections before x (zeros by default): what a cache keeps.
        cu_seqlens: document bounds of a packed row: no tap reaches into the document before.

    Returns: y [B, T, P] and the new tail [B, W-1, P].
    """
    W, T = weight.shape[-1], x.shape[1]
    if tail is not None and cu_seqlens is not None:
        raise ValueError("tail continues one sequence and cu_seqlens packs several: give one of them")
    if tail is None:
        tail = x.new_zeros(x.shape[0], W - 1, x.shape[2])
    if tail.dtype != x.dtype:
        raise ValueError(f"tail holds {tail.dtype}, x is {x.dtype}: a cache serves one precision, start a new one")
    padded = torch.cat([tail, x], 1)
    taps = weight.to(x.dtype)
    if cu_seqlens is None:
        return _ShiftedSum.apply(padded, taps), padded[:, T:].clone()  # a view would keep the whole prompt alive in a cache
    # W-1 zero rows before every document, convolved as one row, then taken out again
    document = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1, device=x.device), cu_seqlens.long().diff())
    place = torch.arange(T, device=x.device) + (document + 1) * (W - 1)
    spread = x.new_zeros(x.shape[0], T + (len(cu_seqlens) - 1) * (W - 1), x.shape[2]).index_copy(1, place, x)
    return _ShiftedSum.apply(spread, taps)[:, place - (W - 1)], padded[:, T:].clone()


class _ShiftedSum(torch.autograd.Function):
    """``y_t = sum_i w[:, i] * x_(t+i)`` as W shifted multiply-adds.

    torch's grouped convolution wants time last: it transposes its input, and every later operation then reads the transposed memory.
    Autograd's own gradient of this sum would pad each of the W slices to full length.
    """

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        taps = w.t().contiguous()  # a tap strided over channels makes each multiply-add five times slower
        T = x.shape[1] - len(taps) + 1
        y = x[:, :T] * taps[0]
        for i in range(1, len(taps)):
            y.addcmul_(x[:, i : i + T], taps[i])
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        taps, T, dx = w.t().contiguous(), dy.shape[1], torch.zeros_like(x)
        for i, tap in enumerate(taps):
            dx[:, i : i + T].addcmul_(dy, tap)
        return dx, torch.stack([(dy * x[:, i : i + T]).sum((0, 1)) for i in range(len(taps))], 1)


class RMSNorm(nn.Module):
    """:func:`rms_norm` with a learned gain."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return rms_norm(x, self.weight, self.eps)


class ShortConv(nn.Module):
    """The taps of :func:`short_conv`, stored [P, 1, W] as the released checkpoint does; no bias."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -self.weight.shape[-1] ** -0.5, self.weight.shape[-1] ** -0.5)


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``: the dense layer of K3 and its shared experts."""

    def __init__(self, config, width: int) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = linear(config.hidden_size, width)
        self.up_proj = linear(config.hidden_size, width)
        self.down_proj = linear(width, config.hidden_size)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return self.down_proj(glu(self.gate_proj(x), self.up_proj(x), self.config))


def own_precision(x: Tensor) -> AbstractContextManager:
    """Inside, products keep the precision of what they multiply, whatever ``torch.autocast`` asks for around them."""
    device = x.device.type
    asked = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if asked else NOTHING


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A projection without bias, as everywhere in K3."""
    return nn.Linear(inputs, outputs, bias=False)
