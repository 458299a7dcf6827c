"""HybridCache: what a model keeps between tokens.

KDA layers keep a fixed state and the last W-1 inputs of their convolution. MLA layers keep one latent a token, and grow. ``nbytes`` sums
the live slices of the tensors that are really there; the closed form lives in ``accounting.py`` and a test holds one to the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minimodel.config import K3Config
from minimodel.tensor_files import load_safetensors, save_safetensors


class Rows:
    """One row a token, in storage that doubles when it is full: appending n tokens copies O(n), not O(n^2), numbers.

    ``window`` keeps only the newest rows: the storage then stops growing. ``dropped`` counts those that slid out.
    """

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.dropped = 0
        self._storage: Tensor | None = None
        self._start = self._end = 0

    def append(self, rows: Float[Tensor, "B T ..."]) -> Float[Tensor, "B N ..."]:
        """Add rows along the time axis; returns a view of everything kept *before* the window drops its oldest rows."""
        T = rows.shape[1]
        if self._storage is not None and self._storage.dtype != rows.dtype:
            raise ValueError(f"rows held are {self._storage.dtype}, new ones {rows.dtype}: a cache serves one precision, start a new one")
        live = self._end - self._start
        if self._storage is None or self._end + T > self._storage.shape[1] or not writable(self._storage):
            # a window never needs more than twice its live rows; without one, doubling keeps the copies linear
            capacity = live + T if self._storage is None else max(live + T, 2 * live)
            storage = rows.new_empty(rows.shape[0], capacity, *rows.shape[2:])
            if live:
                storage[:, :live] = self._storage[:, self._start : self._end]
            self._storage, self._start, self._end = storage, 0, live
        self._storage[:, self._end : self._end + T] = rows
        self._end += T
        view = self._storage[:, self._start : self._end]
        if self.window is not None:
            live = min(view.shape[1], self.window)
            self.dropped += view.shape[1] - live
            self._start = self._end - live
            if self._storage.shape[1] > 2 * live:  # a long prompt went through: let its storage go
                self._storage, self._start, self._end = self.live.clone(), 0, live
        return view

    @property
    def live(self) -> Tensor | None:
        return None if self._storage is None else self._storage[:, self._start : self._end]

    def tensors(self) -> dict[str, Tensor]:
        return {} if self._storage is None else {"rows": self.live}

    def load(self, tensors: dict[str, Tensor], seen: int) -> None:
        self._storage, self._start, self._end, self.dropped = None, 0, 0, 0
        if "rows" in tensors:
            self._storage = tensors["rows"].clone()
            self._end = self._storage.shape[1]
            self.dropped = seen - self._end

    @property
    def reserved_nbytes(self) -> int:
        return 0 if self._storage is None else self._storage.nbytes


def writable(x: Tensor) -> bool:
    """Whether ``x`` may be written in place here: what was made in ``torch.inference_mode`` must not be changed outside of it."""
    return torch.is_inference_mode_enabled() or not x.is_inference()


class FixedState:
    """Tensors of fixed size: KDA's state [B, H, K, V], updated in place by decoding, and its convolution tail [B, W-1, 3P]."""

    def __init__(self) -> None:
        self.state: Tensor | None = None
        self.tail: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name in ("state", "tail") if (x := getattr(self, name)) is not None}

    def load(self, tensors: dict[str, Tensor], seen: int) -> None:
        self.state = tensors["state"].clone() if "state" in tensors else None
        self.tail = tensors["tail"].clone() if "tail" in tensors else None

    @property
    def reserved_nbytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in self.tensors().values())


@dataclass(frozen=True)
class CacheSnapshot:
    """An independent copy of a cache's contents; restoring copies again, so that it can be used many times."""

    config: K3Config
    seen: int
    padding: Tensor
    layers: tuple[dict[str, Tensor], ...]

    @property
    def nbytes(self) -> int:
        return self.padding.nbytes + sum(x.nbytes for layer in self.layers for x in layer.values())


class HybridCache:
    """One slot a layer, for ``batch_size`` sequences that advance together.

    ``seen`` counts the tokens read so far, padding included; ``padding`` [B] counts each row's left padding.
    """

    def __init__(self, config: K3Config, batch_size: int, device: torch.device | str = "cpu") -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.config, self.batch_size = config, batch_size
        self.layers = [_slot(config, layer) for layer in range(config.num_hidden_layers)]
        self.seen = 0
        self.padding = torch.zeros(batch_size, dtype=torch.long, device=device)
        self._half_written = False

    @contextmanager
    def extending(self, tokens: int) -> Iterator[None]:
        """Around a pass that writes ``tokens`` into every layer. If it fails on the way, layers disagree, and the cache says so
        from then on."""
        self.require_whole()
        self._half_written = True
        with torch.no_grad():  # slots are written in place, which autograd would only refuse later
            yield
        self.seen += tokens
        self._half_written = False

    def require_whole(self) -> None:
        """Raises ValueError after a pass that was interrupted, until a snapshot is restored: some layers have read more than others."""
        if self._half_written:
            raise ValueError("cache was left half written by a pass that was interrupted: restore a snapshot, or start a new cache")

    def check(self, config: K3Config, batch_size: int, what: str = "input_ids") -> None:
        """Refuse to work with another model's config or another batch."""
        if config != self.config:
            mine, other = self.config.to_hf(), config.to_hf()
            differing = [f"{key} {mine[key]} and {other[key]}" for key in mine if mine[key] != other[key]] or ["the mixers"]
            raise ValueError(f"cache belongs to a model with another config: {'; '.join(differing[:3])}")
        if batch_size != self.batch_size:
            raise ValueError(f"cache holds batch_size {self.batch_size}, {what} has {batch_size}")

    @property
    def nbytes(self) -> int:
        """Bytes of the live slices, summed over the real tensors."""
        return sum(x.nbytes for slot in self.layers for x in slot.tensors().values())

    @property
    def reserved_nbytes(self) -> int:
        """Bytes allocated: at most twice ``nbytes``."""
        return sum(slot.reserved_nbytes for slot in self.layers)

    def snapshot(self) -> CacheSnapshot:
        """A copy of everything the cache holds, for :meth:`restore`. Raises ValueError for a cache that is left half written."""
        self.require_whole()
        layers = tuple({name: x.clone() for name, x in slot.tensors().items()} for slot in self.layers)
        return CacheSnapshot(self.config, self.seen, self.padding.clone(), layers)

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Go back to a snapshot of this cache, or of another one of the same model and batch."""
        self.check(snapshot.config, len(snapshot.padding), "snapshot")
        self.seen, self.padding, self._half_written = snapshot.seen, snapshot.padding.clone(), False
        for slot, tensors in zip(self.layers, snapshot.layers, strict=True):
            slot.load(tensors, self.seen)

    def reorder(self, rows: Int[Tensor, "N"]) -> None:
        """Keep the given batch rows, in this order (repeats allowed): for beams, or to drop finished sequences."""
        if rows.numel() == 0 or int(rows.min()) < 0 or int(rows.max()) >= self.batch_size:
            raise ValueError(f"rows must index the batch of {self.batch_size}, got {rows.tolist()}")
        self.batch_size, self.padding = len(rows), self.padding[rows]
        for slot in self.layers:
            slot.load({name: x[rows] for name, x in slot.tensors().items()}, self.seen)

    def save(self, path: str | Path) -> None:
        """Write the session to one safetensors file (replaced atomically), to be continued after :meth:`load`."""
        self.require_whole()
        tensors = {f"layers.{i}.{name}": x for i, slot in enumerate(self.layers) for name, x in slot.tensors().items()}
        save_safetensors(path, {"padding": self.padding, **tensors}, {"seen": str(self.seen), "config": json.dumps(asdict(self.config))})

    @classmethod
    def load(cls, path: str | Path, model) -> HybridCache:
        """Read a session that ``model`` (same config) wrote. Raises ValueError for a damaged file or another model's session."""
        tensors, meta = load_safetensors(path)
        if "seen" not in meta or "padding" not in tensors:
            raise ValueError(f"path: {path} does not hold a session")
        if json.loads(meta["config"]) != json.loads(json.dumps(asdict(model.config))):
            raise ValueError(f"path: {path} is the session of a model with another config")
        cache = model.new_cache(len(tensors["padding"]))
        device = cache.padding.device
        cache.seen, cache.padding = int(meta["seen"]), tensors["padding"].to(device)
        for i, slot in enumerate(cache.layers):
            prefix = f"layers.{i}."
            slot.load({n.removeprefix(prefix): x.to(device) for n, x in tensors.items() if n.startswith(prefix)}, cache.seen)
        return cache


def _slot(config: K3Config, layer: int) -> Rows | FixedState:
    mixer = config.mixer(layer)
    if mixer in ("mla", "mha", "gqa"):
        return Rows()
    if mixer == "sliding_window":
        return Rows(window=config.sliding_window)
    return FixedState()
