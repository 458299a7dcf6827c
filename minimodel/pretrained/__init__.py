"""The course's trained checkpoints: each with its loss curve, its scores and the command that made it."""

from __future__ import annotations

from pathlib import Path

from minimodel.io import from_pretrained
from minimodel.model import K3ForCausalLM

__all__ = ["load_pretrained"]

FOLDER = Path(__file__).parent


def load_pretrained(name: str = "meeting") -> K3ForCausalLM:
    """A trained model of the course, on the CPU, in eval mode. Raises ValueError for a name that has no checkpoint."""
    names = sorted(p.parent.name for p in FOLDER.glob("*/model.safetensors"))
    if name not in names:
        raise ValueError(f"name must be one of {', '.join(names) or '(no checkpoint is installed)'}, got {name!r}")
    return from_pretrained(FOLDER / name)
