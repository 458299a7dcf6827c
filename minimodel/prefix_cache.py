"""PrefixCache: a prompt that begins like an earlier one is resumed, not read again (K3 report 5.4.1).

The two kinds of memory need two kinds of entries. An MLA latent belongs to its token, so whole blocks of tokens are stored and
shared. A KDA state is a summary of everything before it and cannot be rewound, so it is stored only at chosen block ends, as a
checkpoint. A hit is the longest prefix whose blocks are all there *and* that ends at a checkpoint. Blocks are named by chained
hashes: a block's name covers every token before it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minimodel.cache import FixedState, HybridCache, Rows

Tokens = Int[Tensor, "1 T"] | Int[Tensor, " T"] | Sequence[int]  # one prompt
Entry = dict[int, dict[str, Tensor]]  # layer -> tensors


class PrefixCache:
    """Prefixes of one model, in at most ``max_bytes``; the least recently used entries go first.

        cache, n = prefix.lookup(ids)              # n tokens need no reading
        logits = model(ids[:, n:], cache=cache).logits
        prefix.insert(ids, cache)

    Entries are copies: a cache that was handed out can be extended freely. They belong to the weights they were computed with:
    after training on, start a new one.
    """

    def __init__(self, model, *, block_tokens: int = 64, max_bytes: int = 256 * 2**20) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
        if max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, got {max_bytes}")
        self.model, self.block_tokens, self.max_bytes = model, block_tokens, max_bytes
        self._entries: OrderedDict[tuple[str, str], Entry] = OrderedDict()  # ("block" | "checkpoint", hash), oldest use first
        self.nbytes = 0
        self.hits = self.misses = 0

    def lookup(self, ids: Tokens) -> tuple[HybridCache, int]:
        """A fresh cache that has read the longest stored prefix of ``ids``, and that prefix's length.

        At least one token is always left to read, since the next token's logits need it.
        """
        ids = self._row(ids)
        names = self._names(ids)
        reach, hit = 0, 0
        for n, name in enumerate(names, 1):
            if ("block", name) not in self._entries:
                break
            reach = n
        for n in range(min(reach, (len(ids) - 1) // self.block_tokens), 0, -1):
            if ("checkpoint", names[n - 1]) in self._entries:
                hit = n
                break
        cache = self.model.new_cache(1)
        self.hits, self.misses = self.hits + (hit > 0), self.misses + (hit == 0)
        if hit == 0:
            return cache, 0
        self._touch(names[:hit])
        tokens = hit * self.block_tokens
        blocks = [self._entries["block", name] for name in names[:hit]]
        checkpoint = self._entries["checkpoint", names[hit - 1]]
        for layer, slot in enumerate(cache.layers):
            if _shareable(slot):
                slot.load({"rows": torch.cat([b[layer]["rows"] for b in blocks], 1)}, tokens)
            else:
                slot.load(checkpoint[layer], tokens)
        cache.seen = tokens
        return cache, tokens

    def insert(self, ids: Tokens, cache: HybridCache) -> None:
        """Store what ``cache``, which has read exactly ``ids``, knows: every whole block, and a checkpoint if it stands at a block end.

        Stop at block ends where a later prompt may branch off (:meth:`read` does): between them there is nothing to resume from.
        """
        ids = self._row(ids)
        cache.check(self.model.config, 1)
        if cache.seen != len(ids):
            raise ValueError(f"cache has read {cache.seen} tokens, ids holds {len(ids)}: insert the cache that has read exactly these")
        if bool(cache.padding.any()):
            raise ValueError("cache began with padding; a prefix starts at its first token")
        names, size = self._names(ids), self.block_tokens
        for n, name in enumerate(names):
            self._put(("block", name), cache, _shareable, slice(n * size, (n + 1) * size))
        if names and len(ids) == len(names) * size:
            self._put(("checkpoint", names[-1]), cache, lambda slot: not _shareable(slot), slice(None))
        self._touch(names)
        self._evict()

    @torch.no_grad()
    def read(self, ids: Tokens) -> tuple[Float[Tensor, "1 vocab"], HybridCache, int]:
        """Read a prompt through the prefix cache and leave a checkpoint at its last block end.

        Returns: logits after the last token, the cache that has read all of ``ids``, and the number of tokens that were not read again.
        """
        row = self._row(ids)
        cache, hit = self.lookup(row)
        end = (len(row) - 1) // self.block_tokens * self.block_tokens
        if end > hit:
            self.model(row[None, hit:end], cache=cache)
            self.insert(row[:end], cache)
        logits = self.model(row[None, max(end, hit) :], cache=cache).logits[:, -1]
        return logits, cache, hit

    def _names(self, ids: Tensor) -> list[str]:
        """Chained hashes of the whole blocks of ``ids``."""
        whole = len(ids) // self.block_tokens * self.block_tokens
        names, chain = [], b""
        for block in ids[:whole].view(-1, self.block_tokens).tolist():
            chain = hashlib.sha256(chain + repr(block).encode()).digest()
            names.append(chain.hex())
        return names

    def _put(self, key: tuple[str, str], cache: HybridCache, belongs: Callable[[Rows | FixedState], bool], rows: slice) -> None:
        """Copy the chosen layers' tensors (only ``rows`` of a row store) under ``key``, unless they are there."""
        if key in self._entries:
            return
        slots = [(layer, slot) for layer, slot in enumerate(cache.layers) if belongs(slot)]
        entry = {
            layer: {name: (x[:, rows] if isinstance(slot, Rows) else x).clone() for name, x in slot.tensors().items()}
            for layer, slot in slots
        }
        self._entries[key] = entry
        self.nbytes += _nbytes(entry)

    def _touch(self, names: list[str]) -> None:
        """Mark a prefix as used; its beginning last, so that eviction takes a chain from its far end."""
        for name in reversed(names):
            for kind in ("checkpoint", "block"):
                if (kind, name) in self._entries:
                    self._entries.move_to_end((kind, name))

    def _evict(self) -> None:
        while self.nbytes > self.max_bytes:
            _, entry = self._entries.popitem(last=False)
            self.nbytes -= _nbytes(entry)

    def _row(self, ids: Tensor | Sequence[int]) -> Int[Tensor, " T"]:
        ids = torch.as_tensor(ids)
        ids = ids[0] if ids.dim() == 2 and ids.shape[0] == 1 else ids
        if ids.dim() != 1 or len(ids) == 0 or ids.is_floating_point():
            raise ValueError(f"ids must be one row of at least one token, [T] or [1, T], got shape {tuple(ids.shape)}")
        return ids


def _shareable(slot) -> bool:
    """Whether a layer's memory can be cut by token: a growing row store without a window."""
    return isinstance(slot, Rows) and slot.window is None


def _nbytes(entry: Entry) -> int:
    return sum(x.nbytes for tensors in entry.values() for x in tensors.values())
