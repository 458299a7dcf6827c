"""Steps of notebook 1, the parts around the whiteboard: norms, the short convolution, gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minimodel import layers
from minimodel.checks.grading import Step
from minimodel.delta_rule import bounded_log_decay

# ---- norms ----
l2norm = Step("l2norm", layers.l2norm, lambda draw: {"x": draw.pick(1, 1e-3, 1) * draw.normal(2, 3, draw.pick(3, 8))}, ("y [B T K]",))


@l2norm.slip("the root is missing: divide by the length, not by its square")
def no_root(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6)


@l2norm.slip("the mean of the squares is RMSNorm's. Here it is their sum")
def mean_of_squares(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@l2norm.slip("eps belongs under the root, added to the sum of squares")
def eps_outside(x):
    return x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-6)


@l2norm.slip("eps is missing. It is added to the sum of squares, and it counts where x is small")
def no_eps(x):
    return x / x.square().sum(-1, keepdim=True).sqrt()


@l2norm.slip("the sum runs over time. It runs over the last axis, the channels of one key")
def over_time(x):
    return x * torch.rsqrt(x.square().sum(1, keepdim=True) + 1e-6)


@l2norm.law("a long vector comes out with length 1")
def unit_length(mine, x):
    return torch.allclose(mine(1e3 * x).norm(dim=-1), torch.ones_like(x[..., 0]), atol=1e-4)


rms_norm = Step(
    "rms_norm", layers.rms_norm,
    lambda draw: {"x": draw.pick(1, 1e-3) * draw.normal(2, 3, 8), "gain": draw.normal(8), "eps": draw.pick(1e-5, 1e-6)},
    ("y [B T D]",),
)  # fmt: skip


@rms_norm.slip("the sum of squares is l2norm's. Here it is their mean")
def sum_of_squares(x, gain, eps):
    return gain * x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


@rms_norm.slip("eps belongs under the root")
def eps_outside_the_root(x, gain, eps):
    return gain * x / (x.square().mean(-1, keepdim=True).sqrt() + eps)


@rms_norm.slip("the mean of x is taken off first. That is LayerNorm; RMSNorm leaves it in")
def layer_norm(x, gain, eps):
    return F.layer_norm(x, x.shape[-1:], gain, eps=eps)


@rms_norm.slip("the gain is missing")
def no_gain(x, gain, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@rms_norm.law("with a gain of one, the mean square of a long vector comes out as one")
def mean_square_is_one(mine, x, gain, eps):
    return torch.allclose(mine(1e3 * x, torch.ones_like(gain), eps).square().mean(-1), torch.ones_like(x[..., 0]), atol=1e-4)


# ---- the short convolution ----
short_conv = Step(
    "short_conv", lambda x, weight: layers.short_conv(x, weight)[0],
    lambda draw: {"x": draw.normal(2, draw.pick(7, 2, 5), 3), "weight": draw.normal(3, draw.pick(4, 4, 3))},
    ("y [B T P]",),
)  # fmt: skip


def _taps(padded, weight, T):
    return sum(padded[:, i : i + T] * weight[:, i] for i in range(weight.shape[1]))


@short_conv.slip("the taps are in reverse. The last one multiplies the current token")
def reversed_taps(x, weight):
    return layers.short_conv(x, weight.flip(-1))[0]


@short_conv.slip("the zeros stand behind the sequence, so that it looks ahead. They belong in front")
def looks_ahead(x, weight):
    return _taps(F.pad(x, (0, 0, 0, weight.shape[1] - 1)), weight, x.shape[1])


@short_conv.slip("the zeros stand on both sides, so that it looks ahead. All W-1 belong in front")
def centered(x, weight):
    left = (weight.shape[1] - 1) // 2
    return _taps(F.pad(x, (0, 0, left, weight.shape[1] - 1 - left)), weight, x.shape[1])


@short_conv.slip("the first tokens read the end of the sequence (a roll wraps around). Before the first token there are zeros")
def wraps_around(x, weight):
    W = weight.shape[1]
    return sum(x.roll(W - 1 - i, 1) * weight[:, i] for i in range(W))


@short_conv.law("a token does not see the tokens after it")
def conv_is_causal(mine, x, weight):
    changed = x.clone()
    changed[:, -1] += 1
    return torch.allclose(mine(x, weight)[:, :-1], mine(changed, weight)[:, :-1])


# ---- gates ----
log_decay = Step(
    "log_decay", bounded_log_decay,
    # as many heads as channels in one case: a slope that lies along the wrong axis then raises no error
    lambda draw: {"f": 2 * draw.normal(2, 3, 3, draw.pick(4, 3)), "A_log": draw.normal(3), "dt_bias": draw.normal(3, draw.pick(4, 3))},
    ("g [B T H K]",),
)  # fmt: skip


def _slope(A_log):
    return A_log.exp()[:, None]


@log_decay.slip("this is Kimi Linear's gate, -exp(A_log) softplus(z). K3's is a sigmoid, scaled to lie between -5 and 0")
def softplus_gate(f, A_log, dt_bias):
    return -_slope(A_log) * F.softplus(f + dt_bias)


@log_decay.slip("the bound is put in by a clamp. K3 uses another activation, -5 sigmoid(...), which has a slope everywhere")
def clamped(f, A_log, dt_bias):
    return softplus_gate(f, A_log, dt_bias).clamp_min(-5.0)


@log_decay.slip("A_log is a logarithm: the slope is exp(A_log)")
def slope_not_exponentiated(f, A_log, dt_bias):
    return -5 * torch.sigmoid(A_log[:, None] * (f + dt_bias))


@log_decay.slip("the slope multiplies f alone. The bias comes first: exp(A_log) (f + dt_bias)")
def bias_after_slope(f, A_log, dt_bias):
    return -5 * torch.sigmoid(_slope(A_log) * f + dt_bias)


@log_decay.slip("A_log has one number a head, and it was spread along the channels. Give it a last axis: A_log.exp()[:, None]")
def slope_along_channels(f, A_log, dt_bias):
    return -5 * torch.sigmoid(A_log.exp() * (f + dt_bias))


@log_decay.slip("this is alpha = exp(g), what one step keeps. Asked for is g itself, which is negative")
def retention_instead(f, A_log, dt_bias):
    return bounded_log_decay(f, A_log, dt_bias).exp()


@log_decay.law("g lies between -5 and 0")
def within_bounds(mine, f, A_log, dt_bias):
    g = mine(f, A_log, dt_bias)
    return bool(((g >= -5) & (g <= 0)).all())  # a saturated sigmoid is 0 or 1 in floating point


write_strength = Step(
    "write_strength", lambda x, weight: torch.sigmoid(x @ weight.T),
    lambda draw: {"x": draw.normal(2, 3, 5), "weight": draw.normal(draw.pick(3, 2), 5)}, ("beta [B T H]",),
)  # fmt: skip


@write_strength.slip("a softmax makes the heads compete. Each head has a sigmoid of its own")
def heads_compete(x, weight):
    return (x @ weight.T).softmax(-1)


@write_strength.slip("the sigmoid is missing")
def no_sigmoid(x, weight):
    return x @ weight.T


@write_strength.slip("it is doubled, to (0, 2), as models with negative eigenvalues do. K3 stays in (0, 1)")
def doubled(x, weight):
    return 2 * torch.sigmoid(x @ weight.T)


@write_strength.law("beta lies between 0 and 1")
def beta_between_0_and_1(mine, x, weight):
    beta = mine(x, weight)
    return bool(((beta > 0) & (beta < 1)).all())


# ---- the gated norm behind it ----
gated_norm = Step(
    "gated_norm", lambda o, gate, gain: layers.rms_norm(o, gain, 1e-5) * torch.sigmoid(gate),
    lambda draw: {"o": draw.pick(1, 1e-2) * draw.normal(2, 3, 2, 4), "gate": draw.normal(2, 3, 2, 4), "gain": draw.normal(4)},
    ("y [B T H V]",),
)  # fmt: skip


@gated_norm.slip("the gate came before the norm, which undoes its size. Norm first, then gate")
def gate_before_norm(o, gate, gain):
    return layers.rms_norm(o * torch.sigmoid(gate), gain, 1e-5)


@gated_norm.slip("the norm is missing")
def no_norm(o, gate, gain):
    return gain * o * torch.sigmoid(gate)


@gated_norm.slip("norm and gain are missing: this is the gate alone")
def gate_alone(o, gate, gain):
    return o * torch.sigmoid(gate)


@gated_norm.slip("the norm runs over all heads together. Each head has its own: the mean is over the last axis alone")
def norm_over_all_heads(o, gate, gain):
    return gain * o * torch.rsqrt(o.square().mean((-2, -1), keepdim=True) + 1e-5) * torch.sigmoid(gate)


@gated_norm.slip("the gate is a SiLU. Kimi Linear's ablation tried it, and it was worse; K3's is a sigmoid")
def silu_gate(o, gate, gain):
    return layers.rms_norm(o, gain, 1e-5) * F.silu(gate)


@gated_norm.slip("the gate is a softmax, which makes channels compete. It is a sigmoid: each opens by itself")
def softmax_gate(o, gate, gain):
    return layers.rms_norm(o, gain, 1e-5) * gate.softmax(-1)


@gated_norm.law("how large the reading is does not matter: twice o gives the same result")
def size_of_the_reading(mine, o, gate, gain):
    return torch.allclose(mine(1e3 * o, gate, gain), mine(2e3 * o, gate, gain), atol=1e-4)
