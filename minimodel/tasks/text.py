"""Text as bytes: any file becomes a stream of 256 symbols, cut into windows. No tokenizer, no special symbols.

The last twentieth of the bytes is held out: training never draws a window from it.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

VOCABULARY = 256


@dataclass(frozen=True)
class ByteText:
    """A text's bytes, and in ``name`` what they are: name, size and the start of their SHA-256."""

    name: str
    content: UInt8[Tensor, "bytes"]

    @property
    def split(self) -> int:
        """Where the held-out part starts."""
        return len(self.content) - len(self.content) // 20


def read(path: str | Path) -> ByteText:
    """The bytes of a file, mapped into memory and not copied. Raises ValueError for a file that is missing or empty."""
    path = Path(path)
    if not path.is_file() or not path.stat().st_size:
        raise ValueError(f"data: {path} is {'empty' if path.is_file() else 'not a file'}")
    with open(path, "rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    content = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    return ByteText(_named(path.name, len(content), digest), content)


def documentation() -> ByteText:
    """The language reference that ``help()`` reads: about 700 kB of English and Python, in ``pydoc_data/topics.py`` of every Python.

    Its words differ a little from one Python version to the next. Raises ValueError where the file was left out.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("data: this Python comes without pydoc_data/topics.py; name a text file") from None
    content = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    name = _named("Python's own documentation (pydoc_data/topics.py)", len(content), hashlib.sha256(content).hexdigest())
    return ByteText(name, torch.frombuffer(bytearray(content), dtype=torch.uint8))


def _named(name: str, size: int, digest: str) -> str:
    return f"{name}, {size:,} bytes, sha256 {digest[:12]}"


def training_batch(text: ByteText, seed: int, step: int, *, rows: int, length: int) -> Int[Tensor, "rows length"]:
    """Windows of one step, a pure function of (text, seed, step); any byte of the training part may start one."""
    _check_length(text, length)
    rng = random.Random(f"text/train/{seed}/{step}")
    return _windows(text, [rng.randrange(text.split - length + 1) for _ in range(rows)], length)


def held_out(text: ByteText, *, rows: int, length: int) -> Int[Tensor, "rows length"]:
    """At most ``rows`` windows, evenly spread over the held-out part; fewer where it is too short for so many."""
    _check_length(text, length)
    rows = min(rows, (len(text.content) - text.split) // length)
    room = len(text.content) - text.split - length
    return _windows(text, [text.split + room * i // max(1, rows - 1) for i in range(rows)], length)


def _windows(text: ByteText, starts: list[int], length: int) -> Tensor:
    return torch.stack([text.content[i : i + length] for i in starts]).long()


def _check_length(text: ByteText, length: int) -> None:
    if length < 2 or len(text.content) // 20 < length:
        raise ValueError(
            f"length must lie in 2..{len(text.content) // 20}, a twentieth of the {len(text.content):,} bytes of data, got {length}"
        )
