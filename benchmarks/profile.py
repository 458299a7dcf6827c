"""Where a training step's time goes: torch.profiler's operator times, summed by the part of the model that asked for them.

A forward operator belongs to the innermost named part around it. A backward operator belongs to the part whose forward operator made its
autograd node (both carry the same sequence number). The profiler slows small operators down more than large ones, so these are shares, not
times.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import minimodel.kda  # noqa: F401  the module; the package's attribute of that name is the function
from minimodel.attention_residuals import DepthSources, PseudoQuery
from minimodel.kda import KimiDeltaAttention
from minimodel.latent_moe import StableLatentMoE
from minimodel.layers import GatedMLP, RMSNorm
from minimodel.mla import GatedMLA
from minimodel.muon import PerHeadMuon
from minimodel.routing import Router

PREFIX = "part: "
ENGINE = "autograd::engine::evaluate_function"  # autograd's wrapper around one backward node; it carries the node's sequence number
REST = "the rest (embedding, gradient sums, Python between the parts)"
KDA_MODULE = sys.modules["minimodel.kda"]
# owner, function, part: the function runs inside the part
PARTS = (
    (KDA_MODULE, "kda", "delta rule"),
    (KDA_MODULE, "short_conv", "short convolution"),
    (KDA_MODULE, "l2norm", "norms"),
    (KimiDeltaAttention, "_gates", "decay and write gates"),
    (KimiDeltaAttention, "forward", "KDA: projections, SiLU, output gate"),
    (GatedMLA, "forward", "Gated MLA"),
    (Router, "forward", "router"),
    (StableLatentMoE, "forward", "routed experts and their latent"),
    (GatedMLP, "forward", "dense and shared MLPs"),
    (PseudoQuery, "forward", "Attention Residuals"),
    (DepthSources, "stacked", "Attention Residuals"),
    (RMSNorm, "forward", "norms"),
    (torch.nn.functional, "cross_entropy", "head and loss"),
    (torch.nn.utils, "clip_grad_norm_", "optimizer"),
    (PerHeadMuon, "step", "optimizer"),
)


@contextmanager
def named_parts(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block the functions of PARTS, and the model's head, run in profiler scopes of their parts."""
    with ExitStack() as undo:
        for owner, name, part in (*PARTS, (model.lm_head, "forward", "head and loss")):
            inherited = name not in vars(owner)
            function = getattr(owner, name)
            setattr(owner, name, _inside(function, part))
            undo.callback(*((delattr, owner, name) if inherited else (setattr, owner, name, function)))
        yield


def _inside(function: Callable, part: str) -> Callable:
    @functools.wraps(function)
    def scoped(*arguments, **options):
        with record_function(PREFIX + part):
            return function(*arguments, **options)

    return scoped


def shares(model: torch.nn.Module, step: Callable[[], float]) -> dict[str, float]:
    """Share of one step by part, largest first; they sum to 1. The step runs twice, once to warm up."""
    step()
    with named_parts(model), profile(activities=[ProfilerActivity.CPU]) as record:
        with record_function(PREFIX + REST):
            step()
    return by_part(record.events())


def by_part(events) -> dict[str, float]:
    """Sum the profiler's events by part."""
    maker = {}  # sequence number -> the forward operator that made the node: the last one that carries it
    for e in events:
        if e.sequence_nr >= 0 and not _in_backward(e):
            if e.sequence_nr not in maker or e.time_range.start >= maker[e.sequence_nr].time_range.start:
                maker[e.sequence_nr] = e
    time = defaultdict(float)
    for e in events:
        part = _part_of(e, maker)
        if part is not None:
            time[part] += e.self_cpu_time_total
    total = sum(time.values())
    return {part: t / total for part, t in sorted(time.items(), key=lambda item: -item[1])}


def _part_of(event, maker) -> str | None:
    """The innermost part around an event; from a backward node on, the part of the operator that made it. None: outside the step."""
    while event is not None:
        if event.name.startswith(PREFIX):
            return event.name.removeprefix(PREFIX)
        if event.name.startswith(ENGINE) and event.sequence_nr in maker:
            event = maker[event.sequence_nr]
        else:
            event = event.cpu_parent
    return None


def _in_backward(event) -> bool:
    while event is not None:
        if event.name.startswith(ENGINE):
            return True
        event = event.cpu_parent
    return False
