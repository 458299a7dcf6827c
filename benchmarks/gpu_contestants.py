"""The operator on a CUDA device: ours and flash-linear-attention's Triton kernels behind the same calls. "fla" runs without minimodel.

q, k, v are bfloat16; g, beta and the state float32. Times are taken with CUDA events, after a warm-up that compiles and tunes.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import numpy as np
import torch

from benchmarks.inputs import Shape, operator_inputs

GRADIENTS = ("q", "k", "v", "g", "beta")


class OnGpu:
    """The variants: "ours", "fla" (chunk_kda, and fused_recurrent_kda for a single token)."""

    def __init__(self, variant: str) -> None:
        self.run = {"ours": _ours, "fla": _fla}[variant]()
        self.library = f"fla-core {version('fla-core')}" if variant == "fla" else "minimodel"

    def describe(self) -> dict:
        try:
            triton = f"triton {version('triton')}"
        except PackageNotFoundError:
            triton = "no triton"
        return {"version": f"{self.library}, torch {torch.__version__}, {triton}", "gpu": torch.cuda.get_device_name()}

    def prepare(self, T: int, B: int, H: int, K: int, seed: int) -> None:
        self.inputs = {name: torch.from_numpy(x).cuda() for name, x in operator_inputs(Shape(T, B, H, K), seed=seed).items()}
        self.inputs |= {name: self.inputs[name].bfloat16() for name in ("q", "k", "v", "dO")}

    def forward(self) -> dict:
        with torch.no_grad():
            o, S = self.run(*(self.inputs[name] for name in GRADIENTS), None)
        return {"o": o, "S": S}

    def forward_backward(self) -> dict:
        leaves = [self.inputs[name].detach().requires_grad_() for name in GRADIENTS]
        o, _ = self.run(*leaves, None)
        return dict(zip(GRADIENTS, torch.autograd.grad(o, leaves, self.inputs["dO"]), strict=True))

    def decode(self) -> dict:
        """One token from the prepared state; ours goes on from the state that it left, fla's starts from the same one again."""
        with torch.no_grad():
            o, S = self.run(*(self.inputs[name] for name in GRADIENTS), self.inputs["S"])
        return {"o": o, "S": S}

    def save(self, call: str, path: str) -> None:
        np.savez(path, **{name: x.detach().float().cpu().numpy() for name, x in getattr(self, call)().items()})

    def seconds(self, call: str, repeat: int) -> float:
        """Seconds of one call between two events, averaged over ``repeat`` calls in a row."""
        return _seconds(getattr(self, call), repeat)

    def gemm(self, n: int) -> float:
        """Seconds of one bfloat16 matrix product [n, n] x [n, n]."""
        if getattr(self, "product", (0,))[0] != n:
            self.product = (n, *torch.randn(2, n, n, device="cuda", dtype=torch.bfloat16).unbind())
            torch.mm(*self.product[1:])
        return _seconds(lambda: torch.mm(*self.product[1:]), 5)

    def copy(self, bytes_: int) -> float:
        """Seconds of one copy on the device; it reads and writes that many bytes."""
        source = torch.empty(bytes_, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        target.copy_(source)
        return _seconds(lambda: target.copy_(source), 5)


def _seconds(call, repeat: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeat):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeat


def _ours():
    from minimodel import kda

    def run(q, k, v, g, beta, S):
        if q.shape[1] == 1:  # torch's step in place; the fused kernel starts from the layer's raw projections and is not measured here
            return kda(q, k, v, g, beta, initial_state=S, in_place=True)
        return kda(q, k, v, g, beta, initial_state=S, backend="triton")

    return run


def _fla():
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    def run(q, k, v, g, beta, S):
        if q.shape[1] == 1:
            return fused_recurrent_kda(q, k, v, g, beta, initial_state=S, output_final_state=True)
        # safe_gate: the decays come from the bounded gate, so its dense 16-token tiles may be used
        return chunk_kda(q, k, v, g, beta, initial_state=S, output_final_state=True, safe_gate=True, lower_bound=-5.0)

    return run
