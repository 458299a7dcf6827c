"""Safetensors files, written atomically and read with errors that name the file. Equal input gives equal bytes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

# The format's names, in the order in which its own writer lays tensors out (widest first).
DTYPES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.uint32: "U32", torch.int32: "I32", torch.float32: "F32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint without its data: the name it is stored under, what its header says, where to get it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path | None = None  # to be read from here
    get: Callable[[], Tensor] | None = None  # or to be had from this call

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def entry_of(name: str, value: Tensor) -> Entry:
    """The entry of a tensor in memory. Raises TypeError if it is no tensor, or of a dtype the format does not have."""
    if not isinstance(value, Tensor) or value.dtype not in DTYPES:
        raise TypeError(f"tensors[{name!r}] must be a tensor of a plain dtype, got {getattr(value, 'dtype', type(value).__name__)}")
    if value.is_meta:
        raise ValueError(f"tensors[{name!r}] is on the meta device and has no values to write")
    return Entry(name, value.dtype, tuple(value.shape), get=lambda: value)


def save_safetensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file; an old file at ``path`` stays until the new one is complete.

    Raises: TypeError for a value that is not a plain tensor, or metadata that are not strings.
    """
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata must map strings to strings, got {key!r}: {type(value).__name__}")
    entries = [entry_of(name, t) for name, t in tensors.items()]
    with Staging() as staging:
        write_entries(staging.file(Path(path)), entries, metadata or {})


def load_safetensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of one safetensors file, and its metadata. Raises ValueError if it is missing, truncated or corrupted."""
    path = Path(path)
    tensors = dict(read_entries({e.name: e for e in file_entries(path)}))
    with _open(path) as f:
        return tensors, f.metadata() or {}


def write_entries(path: Path, entries: Iterable[Entry], metadata: Mapping[str, str]) -> None:
    """Write a file, one tensor in memory at a time. The format's own writer orders metadata at random; this one sorts them."""
    entries = sorted(entries, key=lambda e: (list(DTYPES).index(e.dtype), e.name))
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for e in entries:
        header[e.name] = {"dtype": DTYPES[e.dtype], "shape": list(e.shape), "data_offsets": [end, end + e.nbytes]}
        end += e.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for e in entries:
            f.write(e.get().detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        f.flush()
        os.fsync(f.fileno())


def file_entries(path: Path) -> list[Entry]:
    """The entries of one file; reads its header only. Raises ValueError if it is missing, truncated or corrupted."""
    torch_dtype = {wire: dtype for dtype, wire in DTYPES.items()}
    out = []
    with _open(path) as f:
        for name in f.keys():
            piece = f.get_slice(name)
            if piece.get_dtype() not in torch_dtype:
                raise ValueError(f"tensor {name} in {path} has dtype {piece.get_dtype()}, which this reader does not know")
            out.append(Entry(name, torch_dtype[piece.get_dtype()], tuple(piece.get_shape()), file=path))
    return out


def read_entries(entries: Mapping[str, Entry]) -> Iterator[tuple[str, Tensor]]:
    """(key, tensor) pairs, file by file; a file is closed, and its memory map with it, before the next is opened."""
    by_file: dict[Path | None, list[str]] = {}
    for key, e in entries.items():
        by_file.setdefault(e.file, []).append(key)
    for key in by_file.pop(None, []):
        yield key, entries[key].get()
    for path, keys in by_file.items():
        with _open(path) as f:
            for key in keys:
                yield key, f.get_tensor(entries[key].name)


def _open(path: Path) -> safe_open:
    # safetensors itself checks that the header is sound and covers the file to its last byte
    if not path.is_file():
        raise ValueError(f"checkpoint file {path} does not exist")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"checkpoint file {path} is truncated or corrupted ({error})") from None


def check_writable(folder: str | Path, name: str = "folder") -> None:
    """Make a folder and try to write into it, before hours of work go there. Raises ValueError, one sentence that begins with ``name``."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{name}: {folder} can't be written as a folder ({error.strerror or error})") from None


class Staging:
    """Temporary files beside their targets; all take their final names, in order, if the block ends without an error.

    ``before``: files removed just before, which would make a half-renamed set look complete; ``after``: files the new ones replace.
    """

    def __enter__(self) -> Staging:
        self.moves: list[tuple[Path, Path]] = []
        self.before: list[Path] = []
        self.after: list[Path] = []
        return self

    def file(self, target: Path) -> Path:
        """Where to write what shall become ``target``."""
        target.parent.mkdir(parents=True, exist_ok=True)
        self.moves.append((target.with_name(f".{target.name}.{os.getpid()}.tmp"), target))
        return self.moves[-1][0]

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is None:
                for path in self.before:
                    path.unlink(missing_ok=True)
                for temporary, target in self.moves:
                    os.replace(temporary, target)
                for path in self.after:
                    path.unlink(missing_ok=True)
        finally:
            for temporary, _target in self.moves:
                temporary.unlink(missing_ok=True)
