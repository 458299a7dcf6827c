"""What every contestant gets: the same seeded inputs, in numpy, and the cost of the work in closed form. Imported in all environments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CHUNK = 64  # the chunk that the cost is counted with, for everybody, whatever a contestant does


@dataclass(frozen=True)
class Shape:
    """Size of one call of the operator. The defaults are those of the targets."""

    T: int
    B: int = 1
    H: int = 4
    K: int = 128

    def flops(self) -> int:
        return self.B * self.T * self.H * delta_rule_flops(self.K)


def delta_rule_flops(d: int, chunk: int = CHUNK) -> int:
    """FLOPs of one token in one head with d key and value channels: 6d^2 + 3Cd + C^2 (Kimi Linear report, Eq. 13), 126,976 for d = 128."""
    return 6 * d * d + 3 * chunk * d + chunk * chunk


def operator_inputs(shape: Shape, *, seed: int = 0, one_decay_a_head: bool = False) -> dict[str, np.ndarray]:
    """Activated inputs of the operator in float32: q, k [B, T, H, K], v [B, T, H, K], g [B, T, H, K], beta [B, T, H],
    dO like v, and the state S [B, H, K, K] that a decode step starts from.

    Decays as K3's gate makes them, ``g = -5 sigmoid(f + bias)`` with f ~ N(0, 1). The biases are chosen by hand: uniform in [-7, 2] over
    heads and channels, from the slowest channel of a fresh K3 (alpha 0.995) to nearly the floor of the gate (alpha 0.012). With
    ``one_decay_a_head`` g is [B, T, H], for peers whose rule has no more.
    """
    rng = np.random.default_rng(seed)
    size, heads = (shape.B, shape.T, shape.H, shape.K), (shape.B, shape.T, shape.H)
    q, k = (_unit(rng.standard_normal(size, dtype=np.float32)) for _ in range(2))
    v = rng.standard_normal(size, dtype=np.float32)
    beta = _sigmoid(rng.standard_normal(heads, dtype=np.float32))
    bias = rng.uniform(-7.0, 2.0, (shape.H, shape.K)).astype(np.float32)
    if one_decay_a_head:
        g = -5.0 * _sigmoid(rng.standard_normal(heads, dtype=np.float32) + bias[:, 0])
    else:
        g = -5.0 * _sigmoid(rng.standard_normal(size, dtype=np.float32) + bias)
    dO = rng.standard_normal(size, dtype=np.float32)
    S = rng.standard_normal((shape.B, shape.H, shape.K, shape.K), dtype=np.float32)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "dO": dO, "S": S}


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))
