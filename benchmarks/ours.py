"""minimodel's side of the comparison, behind the same calls as the peers', and the machine's own large matrix product."""

from __future__ import annotations

import time

import numpy as np
import torch

from benchmarks.inputs import Shape, operator_inputs
from benchmarks.worker import QUIET
from minimodel import kda
from minimodel.delta_rule.recurrent import kda_step_

GRADIENTS = ("q", "k", "v", "g", "beta")


class Ours:
    """``kda(...)``, which decodes in place. The variant "unchecked" decodes with the step inside it, without the public entry's checks."""

    def __init__(self, threads: int, variant: str) -> None:
        torch.set_num_threads(threads)
        self.step = {"": self._step, "unchecked": self._unchecked}[variant]

    def describe(self) -> dict:
        return {"version": f"minimodel, torch {torch.__version__}", "one_decay_a_head": False}

    def prepare(self, T: int, B: int, H: int, K: int, seed: int) -> None:
        self.inputs = {name: torch.from_numpy(x) for name, x in operator_inputs(Shape(T, B, H, K), seed=seed).items()}

    def forward(self) -> dict:
        with torch.no_grad():
            o, S = kda(*(self.inputs[name] for name in GRADIENTS))
        return {"o": o, "S": S}

    def forward_backward(self) -> dict:
        leaves = [self.inputs[name].detach().requires_grad_() for name in GRADIENTS]
        o, _ = kda(*leaves)
        return dict(zip(GRADIENTS, torch.autograd.grad(o, leaves, self.inputs["dO"]), strict=True))

    def prepare_decode(self, B: int, H: int, K: int, seed: int) -> None:
        self.prepare(1, B, H, K, seed)
        self.state = self.inputs["S"]

    def decode(self) -> dict:
        with torch.no_grad():
            o, self.state = self.step(*(self.inputs[name] for name in GRADIENTS), self.state)
        return {"o": o, "S": self.state}

    def _step(self, q, k, v, g, beta, S):
        return kda(q, k, v, g, beta, initial_state=S, in_place=True)

    def _unchecked(self, q, k, v, g, beta, S):
        return kda_step_(S, q, k, v, g, beta, q.shape[-1] ** -0.5), S

    def read_context(self, tokens: list[int], segment: int, H: int, K: int, seed: int) -> None:
        """Really read that many tokens (rising), ``segment`` at a time, and keep the state that each context leaves."""
        self.prepare(segment, 1, H, K, seed)
        x, state, seen, self.kept = self.inputs, None, 0, {}
        with torch.no_grad():
            for target in tokens:
                while seen < target:
                    part = [x[name][:, : min(segment, target - seen)] for name in GRADIENTS]
                    _, state = kda(*part, initial_state=state)
                    seen += part[0].shape[1]
                self.kept[target] = state.clone()
        self.inputs = {name: x[name][:, :1] for name in x}

    def decode_after(self, tokens: int, steps: int) -> float:
        """Seconds a step, from the state that ``tokens`` tokens left."""
        self.state = self.kept[tokens].clone()
        time.sleep(QUIET)
        start = time.perf_counter()
        for _ in range(steps):
            self.decode()
        return (time.perf_counter() - start) / steps

    def save(self, call: str, path: str) -> None:
        np.savez(path, **{name: x.detach().numpy() for name, x in getattr(self, call)().items()})

    def gemm(self, n: int) -> float:
        """Seconds of one float32 matrix product [n, n] x [n, n]."""
        if getattr(self, "product", (0,))[0] != n:
            a, b = torch.randn(2, n, n).unbind()
            self.product = (n, a, b, torch.empty(n, n))
        _, a, b, out = self.product
        time.sleep(QUIET)
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        return time.perf_counter() - start
