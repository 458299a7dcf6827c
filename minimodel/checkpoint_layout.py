"""What the released checkpoint calls our tensors, and whether a checkpoint fits a model: names, shapes, dtypes, before any copy."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minimodel.mxfp4 import BLOCK
from minimodel.tensor_files import Entry, entry_of, file_entries, read_entries

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TEXT_PREFIX = "language_model."  # the full checkpoint holds the vision parts beside it
VISION = ("vision_tower.", "mm_projector.")  # skipped: this is the text model


@dataclass(frozen=True)
class Layout:
    """How a checkpoint spells what our modules hold. A loaded model remembers its checkpoint's, so that saving gives it back.

    Attributes:
        prefix: before every tensor name, "" or "language_model.".
        a_log_shape: stored shape of A_log, zeros after the last head; None for [H]. K3 stores its 96 heads as (128,).
        packed_experts: routed experts as MXFP4 (``weight_packed``, ``weight_scale``) instead of ``weight``.
        config: text of the ``config.json`` that was read.
    """

    prefix: str = ""
    a_log_shape: tuple[int, ...] | None = None
    packed_experts: bool = False
    config: str | None = field(default=None, repr=False)


RELEASED_K3 = Layout(TEXT_PREFIX, (128,), packed_experts=True)


@dataclass(frozen=True)
class Slot:
    """Where a released tensor lives in our state dict: all of ``key``, or its row ``expert``."""

    key: str
    expert: int | None
    shape: tuple[int, ...]


def slots_of(state: Mapping[str, Tensor]) -> dict[str, Slot]:
    """Released name (without prefix) -> slot. Stacked experts become one name an expert; a tied table appears once."""
    out: dict[str, Slot] = {}
    seen = set()
    for key, t in state.items():
        stacked = re.fullmatch(r"(.*\.experts)\.(w[123])", key)
        if id(t) in seen:
            continue
        seen.add(id(t))
        if stacked is None:
            out[key] = Slot(key, None, tuple(t.shape))
        else:
            for e in range(t.shape[0]):
                out[f"{stacked[1]}.{e}.{stacked[2]}.weight"] = Slot(key, e, tuple(t.shape[1:]))
    return out


def find(source: Mapping[str, Tensor | np.ndarray] | str | Path) -> tuple[dict[str, Entry], str]:
    """Every tensor of a checkpoint by its stored name, no data read, and what to call the checkpoint in an error."""
    if isinstance(source, Mapping):
        # arrays are welcome too; anything else is entry_of's error
        arrays = {name: torch.as_tensor(value) if hasattr(value, "__array__") else value for name, value in source.items()}
        return {name: entry_of(name, value) for name, value in arrays.items()}, "tensors"
    if not isinstance(source, str | Path):
        raise TypeError(f"tensors_or_folder must map names to tensors or be a path, got {type(source).__name__}")
    source = Path(source)
    if not source.is_dir():
        return {e.name: e for e in file_entries(source)}, str(source)
    if (source / INDEX).exists():
        return _find_sharded(source), str(source)
    if not (source / SINGLE).exists():
        raise ValueError(f"folder {source} holds neither {SINGLE} nor {INDEX}")
    return {e.name: e for e in file_entries(source / SINGLE)}, str(source)


def _find_sharded(folder: Path) -> dict[str, Entry]:
    index = folder / INDEX
    try:
        listed = json.loads(index.read_text())["weight_map"]
        sound = all(isinstance(file, str) and Path(file).name == file for file in listed.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"checkpoint index {index} is truncated or corrupted ({error!r})") from None
    if not sound or not listed:
        raise ValueError(f"checkpoint index {index} must map tensor names to files in its own folder")
    shards = sorted(set(listed.values()))
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"folder {folder} lacks {len(missing)} of {len(shards)} shards: {_some(missing)}")
    out: dict[str, Entry] = {}
    for name in shards:
        for e in file_entries(folder / name):
            if listed.get(e.name) != name:
                raise ValueError(f"tensor {e.name} is in {name}, but {index} says {listed.get(e.name, 'nothing about it')}")
            out[e.name] = e
    lost = [name for name in listed if name not in out]
    if lost:
        raise ValueError(f"checkpoint index {index} promises {len(lost)} tensors that its shards lack: {_some(lost)}")
    return out


def match(slots: Mapping[str, Slot], found: Mapping[str, Entry], where: str) -> tuple[Layout, dict[str, Entry]]:
    """The checkpoint's layout, and its entries by name without the prefix: every name, shape and dtype fits the model."""
    found = {name: e for name, e in found.items() if not name.startswith(VISION)}
    prefix = TEXT_PREFIX if any(name.startswith(TEXT_PREFIX) for name in found) else ""
    entries = {name.removeprefix(prefix): e for name, e in found.items() if name.startswith(prefix)}
    expected: set[str] = set()
    problems: list[str] = []
    packed, a_log_shape = False, None
    for name, slot in slots.items():
        parts: dict[str, tuple[int, torch.dtype | None]] = {name: (1, None)}
        if slot.expert is not None and (name + "_packed" in entries or name + "_scale" in entries):
            parts, packed = {name + "_packed": (2, torch.uint8), name + "_scale": (BLOCK, torch.uint8)}, True
            if slot.shape[-1] % BLOCK:
                problems.append(f"{name} is packed in {where}, but the model's rows of {slot.shape[-1]} are not multiples of {BLOCK}")
        expected.update(parts)
        for part, (ratio, dtype) in parts.items():
            e = entries.get(part)
            if e is None:
                continue
            need = (*slot.shape[:-1], slot.shape[-1] // ratio) if slot.shape else ()
            file = e.file or where
            if _is_padded_a_log(slot, e) and a_log_shape in (None, e.shape):
                a_log_shape = e.shape
            elif e.shape != need:
                problems.append(f"{e.name} in {file} has shape {list(e.shape)}, the model needs {list(need)}")
            if e.dtype != dtype if dtype else not e.dtype.is_floating_point:
                problems.append(f"{e.name} in {file} has dtype {e.dtype}, the model needs {dtype or 'floating point'}")
    missing = [name for name in sorted(expected) if name not in entries]
    unknown = [name for name in sorted(found) if not name.startswith(prefix) or name.removeprefix(prefix) not in expected]
    if missing:
        problems.append(f"{len(missing)} tensors are missing: {_some(missing)}")
    if unknown:
        problems.append(f"{len(unknown)} tensors are unknown: {_some(unknown)}")
    if problems:
        raise ValueError(f"checkpoint {where} does not fit the model: " + "; ".join(problems[:3]))
    return Layout(prefix, a_log_shape, packed), entries


def _is_padded_a_log(slot: Slot, e: Entry) -> bool:
    """[H] in our modules; released files pad it to a multiple of 128, or write [1, 1, H, 1]."""
    one_axis = math.prod(e.shape) == max(e.shape, default=0)
    return slot.key.endswith(".A_log") and e.shape != slot.shape and one_axis and max(e.shape, default=0) >= slot.shape[0]


def check_values(slots: Mapping[str, Slot], entries: Mapping[str, Entry], where: str) -> None:
    """What headers do not tell and copying would trip over: padding that is not zero, scales that are NaN."""
    padded = {n: e for n, e in entries.items() if n in slots and _is_padded_a_log(slots[n], e)}
    scales = {n: e for n, e in entries.items() if n not in slots and n.endswith("_scale")}
    for name, t in read_entries(padded | scales):
        e = entries[name]
        if name in scales and bool((t == 255).any()):
            raise ValueError(f"{e.name} in {e.file or where} holds an MXFP4 scale byte of 255, which means NaN")
        if name in padded and bool(t.flatten()[slots[name].shape[0] :].any()):
            raise ValueError(f"{e.name} in {e.file or where} must be zero after its {slots[name].shape[0]} heads")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
