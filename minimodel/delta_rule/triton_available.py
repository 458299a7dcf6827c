"""Whether the Triton kernels can serve a call. Asked without importing Triton, which takes a second and does not exist everywhere."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter. Triton asks the same when a kernel is defined, and not again."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def triton_obstacle(tensors: list[Tensor], powers_of_two: tuple[int, ...] = ()) -> str | None:
    """What keeps the kernels from serving these inputs, as the end of a sentence; None if nothing does.

    ``tensors`` have one dtype, float32 or bfloat16, and lie on a GPU (CUDA, or ROCm, which torch calls cuda as well); in Triton's
    interpreter, anywhere. ``powers_of_two``: head sizes; Triton's tiles are powers of two, its matrix products at least 16 wide.
    """
    if not _installed():
        return "needs the package triton, which is not installed (pip install -e '.[gpu]', Linux)"
    if tensors[0].device.type != "cuda" and not interpreted():
        return f"needs tensors on a CUDA or ROCm device, got {tensors[0].device}"
    if tensors[0].dtype not in DTYPES or any(x.dtype != tensors[0].dtype for x in tensors):
        return f"takes float32 or bfloat16, one for all, got {', '.join(str(x.dtype).removeprefix('torch.') for x in tensors)}"
    if any(n < 16 or n & (n - 1) for n in powers_of_two):
        return f"takes head sizes that are powers of two of at least 16, got {' and '.join(map(str, powers_of_two))}"
    return None


def use_triton(backend: str, tensors: list[Tensor], powers_of_two: tuple[int, ...] = ()) -> bool:
    """``backend`` "triton": yes, or ValueError with the reason. "auto": on a GPU, where the kernels can serve the inputs."""
    if backend not in ("auto", "triton") or (backend == "auto" and tensors[0].device.type != "cuda"):
        return False
    obstacle = triton_obstacle(tensors, powers_of_two)
    if backend == "triton" and obstacle:
        raise ValueError(f'backend "triton" {obstacle}')
    return obstacle is None
