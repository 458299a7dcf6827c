"""What the Triton kernels of the delta rule share: the cut into chunks, the layout, the precision of a product, and one table of sizes.

A chunk is C = 32 tokens: two of K3's 16-token tiles. Batch rows and packed documents are the same thing here: documents that lie one
after the other in a flat row of tokens, cut into chunks that never cross a document's end. Tensors of the caller keep his layout
[tokens, H, ...]; what the kernels hand to each other lies chunk by chunk, [chunks, H, C, ...], with zero rows after a document's end.
A row index is an int64 from the first step on: tokens x heads x channels passes 2^31 long before memory is full.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minimodel.delta_rule.triton_available import interpreted

TILE = tl.constexpr(16)
CHUNK = 32  # tokens: two tiles
DENSE = tl.constexpr(40.5)  # exponents of a dense tile stay within this; 8 steps of K3's bound -5 are 40
FORGOTTEN = tl.constexpr(-110.0)  # exp underflows to zero before this: nothing changes, and -inf makes no NaN
INTERPRETED = interpreted()


@triton.jit
def dot(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """``a @ b`` with both rounded to OPERAND, summed in float32."""
    return tl.dot(a.to(OPERAND), b.to(OPERAND), input_precision=PRECISION)


@triton.jit
def load_tokens(x, chunk, head, H, rows, columns, chunk_start, chunk_end, WIDTH: tl.constexpr):
    """[rows, columns] of one head from [tokens, H, WIDTH], in float32; zero beyond the end of the document."""
    t = tl.load(chunk_start + chunk) + rows
    live = t < tl.load(chunk_end + chunk)
    return tl.load(x + (t[:, None] * H + head) * WIDTH + columns[None, :], mask=live[:, None], other=0.0).to(tl.float32)


@triton.jit
def store_tokens(x, value, chunk, head, H, rows, columns, chunk_start, chunk_end, WIDTH: tl.constexpr):
    """The opposite of :func:`load_tokens`: rows beyond the end of the document are not written."""
    t = tl.load(chunk_start + chunk) + rows
    live = t < tl.load(chunk_end + chunk)
    tl.store(x + (t[:, None] * H + head) * WIDTH + columns[None, :], value, mask=live[:, None])


@triton.jit
def block(x, chunk, head, H, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers [rows, columns] into one head's matrix of [chunks, H, HEIGHT, WIDTH]. ``chunk`` is int64, so every offset is."""
    return x + ((chunk * H + head) * HEIGHT + rows[:, None]) * WIDTH + columns[None, :]


@dataclass(frozen=True)
class Chunks:
    """Where chunks lie in the flat row of tokens. ``start``, ``end``: first token and document end [chunks]; ``first``: a document's first
    chunk [documents + 1]."""

    start: Tensor
    end: Tensor
    first: Tensor

    @classmethod
    def of(cls, bounds: Tensor) -> Chunks:
        """``bounds``: 0 = c_0 < ... < c_N, the documents' ends in the flat row."""
        bounds = bounds.long()
        counts = (bounds.diff() + CHUNK - 1) // CHUNK
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        document = torch.repeat_interleave(torch.arange(len(counts), device=bounds.device), counts)
        index = torch.arange(len(document), device=bounds.device) - first[document]
        return cls(bounds[document] + index * CHUNK, bounds[document + 1], first)

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Numbers:
    """How products are formed for inputs of one dtype on one kind of device.

    float32 on NVIDIA takes three TF32 products a product ("tf32x3", about float32's accuracy): plain float32 has no matrix unit there, and
    compiled for it the state kernels keep hundreds of bytes a thread in memory. AMD's matrix units do float32 as it is. bfloat16 is
    multiplied as it is and summed in float32. The interpreter multiplies bfloat16's bits as integers, so there all is float32.
    """

    operand: tl.dtype  # what goes into a product
    stored: torch.dtype  # the same, for tensors between kernels
    precision: str  # of products of float32
    columns: int  # of V that one program takes

    @classmethod
    def of(cls, dtype: torch.dtype) -> Numbers:
        precision = "ieee" if INTERPRETED or torch.version.hip else "tf32x3"
        if dtype == torch.bfloat16 and not INTERPRETED:
            return cls(tl.bfloat16, torch.bfloat16, precision, 32)
        return cls(tl.float32, torch.float32, precision, 16)
