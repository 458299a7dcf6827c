"""Any text, byte by byte, at any size: the run that ``K3Config.small()`` and ``.base()`` are made for."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch import Tensor

from minimodel.accounting import parameter_budget
from minimodel.config import K3Config
from minimodel.formats import format_bytes, format_count, plural
from minimodel.model import K3ForCausalLM
from minimodel.tasks import text
from minimodel.train.loop import Recipe, train
from minimodel.train.memory import TrainingBytes, training_bytes

PRESETS = ("mini", "small", "base")
HELD_OUT = 16  # windows scored


def train_text(
    preset: str,
    folder: str | Path | None = None,
    *,
    data: str | Path | None = None,
    steps: int = 1000,
    rows: int = 16,
    length: int = 512,
    accumulate: int = 1,
    lr: float = 2e-3,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    recompute: bool = False,
    checkpoint_every: int = 100,
    progress: bool = True,
) -> tuple[K3ForCausalLM, list[dict]]:
    """Train a preset to predict the next byte. Prints what it trains on and what memory it takes before the first step.

    Args:
        preset: "mini", "small" or "base", with a vocabulary of 256 in place of its own.
        folder: of the checkpoint and the log; a run found there is continued.
        data: a file, read as bytes; default Python's own documentation.
        rows, length: a step's windows, and the bytes of each.
        accumulate: passes a step; the rows are cut into so many parts. Gradients and router statistics are pooled over all of them.
        lr: at its highest; the default is chosen by hand.
        device: "cpu", "cuda" or "cuda:N".
        dtype: "bfloat16": weights and activations of the passes; the masters that are updated, KDA's state and the optimizer are float32.
        recompute: keep only every layer's input between the passes and compute the rest again: less memory, a third more work.
    Returns: the model, in float32, and its log; ``held_out_bits`` in it are bits a byte on text that training never draws.

    Raises: ValueError naming the argument; MemoryError if the device has not the room; see :func:`minimodel.train.train`.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be 'float32' or 'bfloat16', got {dtype!r}")
    for name, value in (("rows", rows), ("accumulate", accumulate)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must be a whole number of 64 bits, got {seed}")
    if rows % accumulate:
        raise ValueError(f"accumulate={accumulate} must divide rows={rows}")
    place = _device(device)
    source = text.documentation() if data is None else text.read(data)
    config = getattr(K3Config, preset)().replace(vocab_size=text.VOCABULARY)
    held_out = text.held_out(source, rows=HELD_OUT, length=length)
    print(describe(preset, config, source.name))
    check_memory(config, place, rows=rows // accumulate, length=length, dtype=getattr(torch, dtype), recompute=recompute)
    model = K3ForCausalLM(config, seed=seed).to(place)
    model.model.recompute = recompute

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids = text.training_batch(source, seed, step, rows=rows, length=length)
        return ids, ids

    @torch.no_grad()
    def bits(model: K3ForCausalLM) -> dict[str, float]:
        parts = [part.to(place) for part in held_out.split(rows // accumulate)]  # windows are of one length: every byte counts the same
        return {"held_out_bits": sum(model(x, labels=x).loss.item() * len(x) for x in parts) / len(held_out) / math.log(2)}

    words = f"{source.name}; {rows} windows of {length} bytes, seed {seed}"
    recipe = Recipe(steps=steps, lr=lr, accumulate=accumulate, dtype=None if dtype == "float32" else dtype, data=words)
    every = {"checkpoint_every": checkpoint_every, "evaluate_every": checkpoint_every}
    log = train(model, batch, recipe, folder=folder, evaluate=bits, progress=progress, **every)
    return model, log


def describe(preset: str, config: K3Config, data: str) -> str:
    """What is trained on what; bytes need fewer rows in the two tables than the preset has."""
    ours, whole = parameter_budget(config), parameter_budget(getattr(K3Config, preset)())
    return (
        f"data      {data}\n"
        f"model     {preset} with {config.vocab_size} bytes as vocabulary: {format_count(ours.total)} parameters, "
        f"{format_count(ours.active)} active (with the preset's own vocabulary {format_count(whole.total)}, {format_count(whole.active)})"
    )


def check_memory(
    config: K3Config, device: torch.device, *, rows: int, length: int, dtype: torch.dtype, recompute: bool
) -> TrainingBytes:
    """Print the estimate; MemoryError, one sentence, if the device has less."""
    need = training_bytes(config, rows=rows, length=length, dtype=dtype, recompute=recompute)
    free = free_bytes(device)
    for name, size in need.by_part.items():
        print(f"memory    {name:<42}{format_bytes(size):>9}")
    print(f"memory    {'estimate of the most at one time':<42}{format_bytes(need.total):>9}", end="; ")
    print("how much is free is not known here" if free is None else f"{format_bytes(free)} free on {device}")
    if free is not None and need.total > free:
        less = training_bytes(config, rows=1, length=length, dtype=dtype, recompute=True)
        raise MemoryError(
            f"device: {rows} {plural('row', rows)} of {length} bytes a pass take about {format_bytes(need.total)}, and {device} has "
            f"{format_bytes(free)} free; one row a pass with recompute takes {format_bytes(less.total)}"
            f"{'' if less.total <= free else ', which does not fit either'}"
        )
    return need


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # all of it: the most that can be had
    except (AttributeError, ValueError):
        return None


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    found = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise ValueError(f"device: {name!r} was asked for, and torch {torch.__version__} finds {found} CUDA {plural('device', found)} here")
    return device
