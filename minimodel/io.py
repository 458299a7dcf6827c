"""Checkpoints in the released layout: ``config.json`` beside safetensors whose names are those of the published Kimi K3.

A checkpoint is read in two passes. The first reads headers and checks every name, shape and dtype; the second copies, shard by
shard, one tensor at a time. So nothing is half-loaded, and a model never needs twice its size in memory. Writing goes to temporary
files that take their final names when all of them are complete.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minimodel.checkpoint_layout import INDEX, RELEASED_K3, SINGLE, Layout, Slot, check_values, find, match, slots_of
from minimodel.config import OURS, K3Config
from minimodel.model import K3ForCausalLM
from minimodel.mxfp4 import BLOCK, dequantize_mxfp4, quantize_mxfp4
from minimodel.tensor_files import Entry, Staging, load_safetensors, read_entries, save_safetensors, write_entries

__all__ = ["RELEASED_K3", "Layout", "from_pretrained", "load_released", "load_safetensors", "save_pretrained", "save_safetensors"]

CONFIG = "config.json"
FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias")  # never stored narrower, whatever dtype is asked for
PACKED_FORMAT = "mxfp4-pack-quantized"


def load_released(model: K3ForCausalLM, tensors_or_folder: Mapping[str, Tensor | np.ndarray] | str | Path) -> None:
    """Copy released weights into ``model``, in place and in the model's dtypes.

    Args:
        model: receives the values; nothing changes in it unless the whole checkpoint fits.
        tensors_or_folder: tensors or arrays by released name, with or without the ``language_model.`` prefix, or a folder (single file or
            shards with an index), or one safetensors file. MXFP4-packed experts are dequantized, padded A_log is cut to its heads.
    Raises: ValueError, one sentence, for a missing, truncated or corrupted file, a missing shard, missing or unknown tensor names,
        a wrong shape or dtype, padding of A_log that is not zero, an MXFP4 scale that is NaN, a model on the meta device.
    """
    state = model.state_dict(keep_vars=True)
    on_meta = [key for key, t in state.items() if t.is_meta]
    if on_meta:
        raise ValueError(f"model has no storage ({on_meta[0]} is on the meta device); from_pretrained builds one that has")
    found, where = find(tensors_or_folder)
    slots = slots_of(state)
    layout, entries = match(slots, found, where)
    check_values(slots, entries, where)
    _fill(state, slots, entries)
    model.checkpoint_layout = layout


def from_pretrained(folder: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> K3ForCausalLM:
    """Build the model that ``folder/config.json`` describes and read its weights, shard by shard. Returned in eval mode.

    Args:
        folder: with ``config.json`` and ``model.safetensors``, or shards and ``model.safetensors.index.json``.
        dtype: of the weights; default as stored (packed experts: the embedding's). A_log, dt_bias and the router's bias stay at least
            float32.
        device: where the weights go.
    Raises: ValueError as ``load_released``, and for a missing or unusable ``config.json``.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"folder {folder} does not exist")
    config = K3Config.from_hf(folder)
    with torch.device("meta"):
        model = K3ForCausalLM(config)
    found, where = find(folder)
    slots = slots_of(model.state_dict(keep_vars=True))
    layout, entries = match(slots, found, where)
    check_values(slots, entries, where)

    dtypes: dict[str, torch.dtype] = {}
    for name, slot in slots.items():
        stored = entries[name if name in entries else "model.embed_tokens.weight"].dtype
        wanted = stored if dtype is None else torch.promote_types(dtype, torch.float32) if slot.key.endswith(FLOAT32) else dtype
        dtypes[slot.key] = torch.promote_types(wanted, dtypes.get(slot.key, wanted))
    meta = model.state_dict()
    state = {key: torch.empty(meta[key].shape, dtype=kind, device=device) for key, kind in dtypes.items()}
    _fill(state, slots, entries)
    model.load_state_dict({key: state[key] if key in state else state["model.embed_tokens.weight"] for key in meta}, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.checkpoint_layout = replace(layout, config=(folder / CONFIG).read_text())
    return model.eval()


def save_pretrained(
    model: K3ForCausalLM,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    layout: Layout | None = None,
    quantize_experts: bool = False,
) -> None:
    """Write ``config.json`` and the weights under their released names; loading and saving again gives the same bytes.

    Args:
        model: any K3ForCausalLM with storage.
        folder: made if missing; a checkpoint already in it stays whole until the new one is completely written.
        dtype: of the stored weights; default the model's. A_log, dt_bias and the router's bias keep theirs.
        max_shard_bytes: above this many bytes of tensors the checkpoint is split into shards with an index.
        layout: default the one the model was loaded from, or plain weights; ``RELEASED_K3`` is the published model's.
        quantize_experts: round the routed experts to MXFP4 (rule "even") and store them packed. The model itself is not changed.
    Raises: ValueError if a packed layout would have to round the experts and ``quantize_experts`` does not say so, if their rows are
        not multiples of 32, if ``layout.a_log_shape`` is too small for the heads, or for a bad ``dtype`` or ``max_shard_bytes``.
    """
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be a positive integer, got {max_shard_bytes!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point dtype, got {dtype}")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder {folder} is a file")
    layout = layout or getattr(model, "checkpoint_layout", Layout())
    if quantize_experts and not layout.packed_experts:
        layout = replace(layout, packed_experts=True, config=None)
    shards: list[list[Entry]] = [[]]
    room = max_shard_bytes
    for e in _released_entries(model, layout, dtype, quantize_experts):
        if e.nbytes > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(e)
        room -= e.nbytes
    names = [SINGLE] if len(shards) == 1 else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    with Staging() as staging:
        staging.file(folder / CONFIG).write_text(_config_text(model.config, layout))
        for name, shard in zip(names, shards, strict=True):
            write_entries(staging.file(folder / name), shard, {"format": "pt"})
        staging.before = [folder / INDEX]
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(e.nbytes for shard in shards for e in shard)},
                "weight_map": {e.name: name for name, shard in zip(names, shards, strict=True) for e in shard},
            }
            staging.file(folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
            staging.before.append(folder / SINGLE)
        old = [p for p in folder.iterdir() if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", p.name)]
        staging.after = [p for p in old if p.name not in names]


@torch.no_grad()
def _fill(state: Mapping[str, Tensor], slots: Mapping[str, Slot], entries: Mapping[str, Entry]) -> None:
    """Copy every tensor into its slot. The two halves of a packed expert may lie in different shards; the first one waits."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, t in read_entries(entries):
        if name not in slots:
            name, _, half = name.rpartition("_")
            pair = waiting.setdefault(name, {})
            pair[half] = t
            if len(pair) < 2:
                continue
            t = dequantize_mxfp4(**waiting.pop(name))
        slot = slots[name]
        target = state[slot.key] if slot.expert is None else state[slot.key][slot.expert]
        target.copy_(t if t.shape == target.shape else t.flatten()[: len(target)])  # only A_log may be stored longer


def _released_entries(model: K3ForCausalLM, layout: Layout, dtype: torch.dtype | None, quantize: bool) -> list[Entry]:
    """What to write, in the model's order; values are made one by one while writing."""
    state = model.state_dict()
    on_meta = [key for key, t in state.items() if t.is_meta]
    if on_meta:
        raise ValueError(f"model has no storage to save ({on_meta[0]} is on the meta device)")
    out: list[Entry] = []

    @lru_cache(maxsize=1)
    def pack(name: str) -> tuple[Tensor, Tensor]:
        w = weight(slots[name])
        packed, scale = quantize_mxfp4(w)
        if not quantize and not torch.equal(dequantize_mxfp4(packed, scale, dtype=w.dtype), w):
            raise ValueError(f"{name} is not on the MXFP4 grid: round the experts with quantize_experts=True, or pass layout=Layout()")
        return packed, scale

    def weight(slot: Slot) -> Tensor:
        return state[slot.key] if slot.expert is None else state[slot.key][slot.expert]

    slots = slots_of(model.state_dict(keep_vars=True))
    for name, slot in slots.items():
        stored = layout.prefix + name
        if slot.expert is not None and layout.packed_experts:
            rows, columns = slot.shape
            if columns % BLOCK:
                raise ValueError(f"{name} {list(slot.shape)} cannot be packed: MXFP4 needs rows that are multiples of {BLOCK}")
            out.append(Entry(stored + "_packed", torch.uint8, (rows, columns // 2), get=lambda n=name: pack(n)[0]))
            out.append(Entry(stored + "_scale", torch.uint8, (rows, columns // BLOCK), get=lambda n=name: pack(n)[1]))
            continue
        kind = weight(slot).dtype if dtype is None or slot.key.endswith(FLOAT32) else dtype
        shape = slot.shape
        if slot.key.endswith(".A_log") and layout.a_log_shape is not None:
            shape = layout.a_log_shape
            if math.prod(shape) < slot.shape[0]:
                raise ValueError(f"layout.a_log_shape={shape} has no room for the {slot.shape[0]} heads of {name}")
        out.append(Entry(stored, kind, shape, get=lambda s=slot, k=kind, shape=shape: _padded(weight(s).to(k), shape)))
    return out


def _padded(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``t`` in ``shape``, with zeros after its last entry where ``shape`` is larger (A_log only)."""
    if tuple(t.shape) == shape:
        return t
    return torch.cat([t, t.new_zeros(math.prod(shape) - t.numel())]).view(shape)


def _config_text(config: K3Config, layout: Layout) -> str:
    """The config.json that was read, if it still describes the model; otherwise a new one of the same kind."""
    if layout.config is not None and K3Config.from_hf(json.loads(layout.config)) == config:
        return layout.config
    hf: dict[str, Any] = config.to_hf()
    if K3Config.from_hf(hf) != config:  # a control experiment: the released keys do not say what stands in the slots
        hf["ours"] = {name: getattr(config, name) for name in OURS}
    if layout.packed_experts:
        weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": BLOCK, "scale_dtype": "torch.uint8"}
        groups = {"group_0": {"format": PACKED_FORMAT, "targets": ["Linear"], "weights": weights}}
        hf["quantization_config"] = {"quant_method": "compressed-tensors", "format": PACKED_FORMAT, "config_groups": groups}
    if layout.prefix:
        hf = {"model_type": "kimi_k3", "text_config": hf}
    return json.dumps(hf, indent=2, sort_keys=True) + "\n"
