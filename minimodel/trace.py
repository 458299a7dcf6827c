"""record(model): look inside a running model.

    with record(model) as trace:
        model(ids)
    trace["layers.2.kda.state"]        # [B, T, H, K, V], after every token

Off, it costs one attribute test a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


class Trace(Mapping):
    """Recorded tensors by name. A name written twice (two forward passes) keeps the last value."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def write(self, name: str, value: Tensor) -> None:
        self._tensors[name] = value.detach().clone()

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise KeyError(f"nothing recorded under {name!r}; recorded: {', '.join(sorted(self._tensors))}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Traced(nn.Module):
    """A module that can report what it computes. ``emit`` does nothing unless a recorder is attached."""

    _trace: Trace | None = None
    _trace_name = ""

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_trace"}  # a copy of a module is not being recorded

    @property
    def tracing(self) -> bool:
        return self._trace is not None

    def emit(self, **tensors: Tensor) -> None:
        if self._trace is not None:
            for name, value in tensors.items():
                self._trace.write(f"{self._trace_name}.{name}".removeprefix("."), value)


@contextmanager
def record(model: nn.Module) -> Iterator[Trace]:
    """Record what every traced part of ``model`` computes inside the ``with`` block.

    Names: ``layers.N.kda.{q,k,v,alpha,beta,state,output}``, ``layers.N.mla.{attention,gate,latent}``,
    ``layers.N.moe.{scores,indices,weights,cutoff}``, ``layers.N.{attn_res,mlp_res}.{weights,sources}``, ``output_res.{weights,sources}``,
    ``logits``. A part recorded outside a model leaves its own prefix out.
    One recording at a time on a model.
    """
    traced = [m for m in model.modules() if isinstance(m, Traced)]
    if not traced:
        raise ValueError(f"model: {type(model).__name__} has no traced parts")
    if any(m.tracing for m in traced):
        raise RuntimeError("model is already being recorded: one recording at a time")
    trace = Trace()
    for m in traced:
        m._trace = trace
    try:
        yield trace
    finally:
        for m in traced:
            m._trace = None


def private_copy(model: Model) -> Model:
    """The model in float64 and eval mode, to look into: hooks, held parts and recordings on it meet nobody else's."""
    return copy.deepcopy(model).double().eval()


def frozen(x: Tensor) -> np.ndarray:
    """A read-only numpy copy of a CPU tensor: what a story keeps of a trace."""
    out = x.detach().numpy().copy()
    out.setflags(write=False)
    return out
