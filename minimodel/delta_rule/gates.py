"""The forget gates: from a raw projection to the log-decay g <= 0 of every channel.

``alpha = exp(g)`` is what one step keeps of a channel. K3 bounds g from below, Kimi Linear does not.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from minimodel.layers import wide


def bounded_log_decay(
    f: Float[Tensor, "B T H K"], A_log: Float[Tensor, "H"], dt_bias: Float[Tensor, "H K"], lower_bound: float = -5.0
) -> Float[Tensor, "B T H K"]:
    """K3's gate: ``g = lower_bound * sigmoid(exp(A_log) * (f + dt_bias))``, in (lower_bound, 0) (K3 report Eq. 5-6).

    The bound is an activation, not a clamp, and it is fixed, not learned. It holds per step: a 16-token tile decays by
    at most e^-80, whose reciprocal still fits float32, so that every tile is a dense product.

    Args:
        f: raw projection [B, T, H, K]; the bias is added here.
        A_log: log of the gate's slope, one a head [H].
        dt_bias: one bias a head and channel [H, K].
        lower_bound: the most negative log-decay of one step, in [-5, 0).

    Returns: log-decay [B, T, H, K] in float32 (float64 for float64 input).
    """
    z, A = _biased(f, A_log, dt_bias)
    if not -5.0 <= lower_bound < 0.0:
        raise ValueError(f"lower_bound must lie in [-5, 0), got {lower_bound}")
    return lower_bound * torch.sigmoid(A * z)


def softplus_log_decay(
    f: Float[Tensor, "B T H K"], A_log: Float[Tensor, "H"], dt_bias: Float[Tensor, "H K"]
) -> Float[Tensor, "B T H K"]:
    """Kimi Linear's gate: ``g = -exp(A_log) * softplus(f + dt_bias)``, unbounded below (Kimi Linear report; Mamba-2).

    Arguments and result as :func:`bounded_log_decay`.
    """
    z, A = _biased(f, A_log, dt_bias)
    return -A * F.softplus(z)


def _biased(f: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """``f + dt_bias`` and ``exp(A_log)`` in the gate's precision, shaped to broadcast over [B, T, H, K]."""
    if not f.is_floating_point():
        raise TypeError(f"f must be a floating-point tensor, got {f.dtype}")
    if f.dim() != 4:
        raise ValueError(f"f must be [B, T, H, K], got shape {tuple(f.shape)}")
    H, K = f.shape[-2:]
    if tuple(A_log.shape) != (H,):
        raise ValueError(f"A_log must be [H] = ({H},) for f of shape {tuple(f.shape)}, got {tuple(A_log.shape)}")
    if tuple(dt_bias.shape) != (H, K):
        raise ValueError(f"dt_bias must be [H, K] = ({H}, {K}) for f of shape {tuple(f.shape)}, got {tuple(dt_bias.shape)}")
    f = wide(f)
    return f + dt_bias.to(f.dtype), A_log.to(f.dtype).exp()[:, None]


def mamba_dt_bias(shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
    """Initial ``dt_bias``: the inverse softplus of a step size drawn log-uniformly from [1e-3, 1e-1] (Mamba-2, Kimi Linear).

    With K3's gate and A_log = 0 the channels start with one-step retentions from 0.995 down to 0.62.
    """
    dt = torch.exp(torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1), generator=generator)).clamp_min(1e-4)
    return dt + torch.log(-torch.expm1(-dt))
