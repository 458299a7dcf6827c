"""Products of rows under their decay, without ever forming an exponential that overflows.

    A[i,j] = sum_c k_i[c] k_j[c] exp(G_i[c] - G_j[c])   j < i        P[i,j] = sum_c q_i[c] k_j[c] exp(G_i[c] - G_j[c])   j <= i

with G the running sum of the log-decay inside a chunk. A matrix product needs a factor of i times a factor of j, and the trap is
exp(G_i - G_j) = exp(G_i) * exp(-G_j): over a long chunk the second factor overflows. So a chunk is cut into tiles of 16 tokens, and
every token is measured inside its own tile, from an origin:

    row  exp(G_i - origin_r) k_i      column  exp(origin_s - G_j) k_j      from tile s to a later tile r  exp(origin_r - origin_s)

With the origin in the tile's middle, exponents stay within 8 steps. With K3's bound g >= -5 that is e^40, far inside float32: every
tile, its own block too, is one plain product. This *dense* form serves whenever no sum over half a tile passes -40. Otherwise (Kimi
Linear's gate has no bound) rows are measured from their tile's start and columns from its end, so that no exponent is positive, and
a tile's own block is put together from halves, halves of halves and so on: the boundary between two halves is an origin that suits both.
Such exponents are sums of the very steps they span, never differences of longer sums: behind a step of -100 a step of -0.01 would be lost.

Shapes: a segment holds n chunks of N sequences (batch x heads) and R tiles a chunk; ``pair`` is the axis (k, q), so that one product serves
both. ``g`` is in powers of two (log2 of the decay): torch's exp2 takes a third of exp's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

TILE = 16
LOG2_E = 1.4426950408889634
DENSE_LIMIT = 8 * 5.0 * LOG2_E + 0.1  # half a tile at K3's bound, and rounding


class Buffers:
    """Memory by name, allocated at its first use and reused by every later segment.

    Fresh megabytes cost page faults, and these take longer than the arithmetic that fills them.
    """

    def __init__(self, like: Tensor) -> None:
        self._like, self._held = like, {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """An uninitialized tensor. Only ``shape[0]`` may change from use to use: the last segment is shorter."""
        held = self._held.get(name)
        if held is None or len(held) < shape[0]:
            held = self._held[name] = self._like.new_empty(shape)
        return held if len(held) == shape[0] else held[: shape[0]]


class TileDecay(NamedTuple):
    """One segment's decay, measured inside tiles. ``steps`` (the log-decays themselves) is None in the dense form.

    Sums that meet in one exponent come from the same rounded numbers, so that they cancel: the last token's decay to the end is exactly 1.
    """

    rows: Float[Tensor, "n N R 16 K"]  # 2^(G_i - row origin)
    columns: Float[Tensor, "n N R 16 K"]  # 2^(column origin - G_j)
    head: Float[Tensor, "n N R K"]  # from the tile's start to its row origin
    tail: Float[Tensor, "n N R K"]  # from its column origin to its end
    whole: Float[Tensor, "n N R K"]  # the whole tile's
    steps: Float[Tensor, "n N R 16 K"] | None


def tile_decay(g: Float[Tensor, "n N R 16 K"], new: Buffers) -> TileDecay:
    """Measure a segment's decay; ``g`` finite, in powers of two."""
    running = g.new_ones(TILE, TILE).tril_()
    rows, columns = _each_tile(running - running[TILE // 2 - 1], g, new("decay_rows", *g.shape)), new("decay_columns", *g.shape)
    if g.is_meta or (-DENSE_LIMIT <= rows.amin() and rows.amax() <= DENSE_LIMIT):
        head, tail = g[..., 0, :] - rows[..., 0, :], rows[..., -1, :].clone()
        torch.reciprocal(rows.exp2_(), out=columns)
        return TileDecay(rows, columns, head, tail, head + tail, None)
    _each_tile(running, g, rows)
    nothing, whole = torch.zeros_like(rows[..., -1, :]), rows[..., -1, :].clone()
    _each_tile(1 - running, g, columns)  # the sum of all later steps
    return TileDecay(rows.exp2_(), columns.exp2_(), nothing, nothing, whole, g)


def decayed_products(
    k: Float[Tensor, "n N R 16 K"],
    q: Float[Tensor, "n N R 16 K"],
    rows: Float[Tensor, "n N R pair 16 K"],
    columns: Float[Tensor, "n N R 16 K"],
    decay: TileDecay,
    new: Buffers,
) -> tuple[Float[Tensor, "n N C C"], Float[Tensor, "n N C C"]]:
    """A (strictly lower triangular) and P (lower) of the module's docstring. ``rows`` and ``columns`` carry their tile's decay."""
    n, N, R, _, C = *k.shape[:3], TILE, k.shape[2] * TILE
    A, P = (new(name, n, N, C, C) for name in ("A", "P"))
    own = new("own", n, N, R, 2 * TILE, TILE)
    if decay.steps is None:
        _product(rows.flatten(3, 4), columns.mT, own)
    else:
        own.zero_()
        for factor, block in _halves(decay.steps):
            own += (torch.stack([factor * k, factor * q], 3).flatten(3, 4) @ (factor * k).mT).where(block, 0.0)
    for r in range(R):
        start, stop = r * TILE, (r + 1) * TILE
        A[:, :, start:stop, start:stop], P[:, :, start:stop, start:stop] = own[:, :, r].split(TILE, 2)
        if r:
            earlier = (columns[:, :, :r] * _across(decay, r)).flatten(2, 3)
            A[:, :, start:stop, :start], P[:, :, start:stop, :start] = (rows[:, :, r].flatten(2, 3) @ earlier.mT).split(TILE, 2)
    return A.tril_(-1), P.tril_()  # above the diagonal own blocks may hold infinities, and other blocks nothing yet


def decayed_products_backward(
    dAP: Float[Tensor, "n N R pair 16 C"],
    k: Float[Tensor, "n N R 16 K"],
    q: Float[Tensor, "n N R 16 K"],
    rows: Float[Tensor, "n N R pair 16 K"],
    columns: Float[Tensor, "n N R 16 K"],
    decay: TileDecay,
    drows: Float[Tensor, "n N R pair 16 K"],
    dcolumns: Float[Tensor, "n N R 16 K"],
) -> None:
    """Gradients for (k, q) as rows and for k as column, in place of what ``drows`` and ``dcolumns`` hold.

    These come with what reaches ``rows`` and ``columns`` from elsewhere. ``dAP`` is zero outside its triangles.
    """
    R = rows.shape[2]
    own = torch.stack([dAP[:, :, r, :, :, r * TILE : (r + 1) * TILE].flatten(2, 3) for r in range(R)], 2)
    for r in range(1, R):
        across, mine, d = _across(decay, r), rows[:, :, r].flatten(2, 3), dAP[:, :, r, ..., : r * TILE].flatten(2, 3)
        earlier = (columns[:, :, :r] * across).flatten(2, 3)
        drows[:, :, r] += (d @ earlier).view_as(rows[:, :, r])
        dcolumns[:, :, :r] += (d.mT @ mine).view_as(columns[:, :, :r]).mul_(across)
    if decay.steps is None:
        drows += (own @ columns).view_as(rows)
        dcolumns += own.mT @ rows.flatten(3, 4)
    drows *= decay.rows.unsqueeze(3)
    dcolumns *= decay.columns
    if decay.steps is not None:
        for factor, block in _halves(decay.steps):
            d = own.where(block, 0.0)
            drows += (d @ (factor * k)).view_as(rows) * factor.unsqueeze(3)
            dcolumns += (d.mT @ torch.stack([factor * k, factor * q], 3).flatten(3, 4)) * factor


def sum_from_here_on(x: Float[Tensor, "n N R 16 K"]) -> Float[Tensor, "n N R 16 K"]:
    """Sum over a token and all later ones of its chunk: what turns G's gradient into g's."""
    out = _each_tile(x.new_ones(TILE, TILE).triu_(), x, torch.empty_like(x))
    return out.add_(sum_between(x.sum(-2), x.shape[2]).unsqueeze(-2))


def sum_between(tiles: Float[Tensor, "n N R K"], stop: int) -> Float[Tensor, "n N stop K"]:
    """For each tile before tile ``stop``: the sum over the tiles between the two."""
    return torch.cat([tiles[:, :, 1:stop].flip(2).cumsum(2).flip(2), torch.zeros_like(tiles[:, :, :1])], 2)


def _across(decay: TileDecay, r: int) -> Float[Tensor, "n N r 1 K"]:
    """2^(row origin of r - column origin of s): from each earlier tile s to tile r."""
    between = sum_between(decay.whole, r).add_(decay.tail[:, :, :r]).add_(decay.head[:, :, r, None])
    return between.exp2_().unsqueeze(-2)


def _halves(steps: Float[Tensor, "n N R 16 K"]) -> Iterator[tuple[Tensor, Bool[Tensor, "32 16"]]]:
    """A tile's lower triangle as blocks of 8, 4, 2 and 1 rows, then its diagonal: each token's factor, and where the product counts.

    A block's rows are the second half of some tokens and its columns the first. The factor is the decay between a token and the boundary.
    """
    i = torch.arange(TILE, device=steps.device)
    row, column = i[:, None], i
    for half in (8, 4, 2, 1):
        together = row // (2 * half) == column // (2 * half)
        second = i // half % 2 == 1
        # a row decays from the boundary to its own step, a column from the step after its own to the boundary
        spanned = together & (second[:, None] & second & (column <= row) | ~second[:, None] & ~second & (column > row))
        block = together & second[:, None] & ~second
        yield _each_tile(spanned.to(steps.dtype), steps, torch.empty_like(steps)).exp2_(), block.repeat(2, 1)
    yield torch.ones_like(steps), (row == column).repeat(2, 1)


def _each_tile(matrix: Float[Tensor, "16 16"], x: Float[Tensor, "n N R 16 K"], out: Tensor) -> Float[Tensor, "n N R 16 K"]:
    """One small matrix times every tile."""
    return _product(matrix.expand(*x.shape[:3], TILE, TILE), x, out)


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """``a @ b`` into a contiguous ``out``, [n, N, R, ..]: torch.matmul would expand and copy."""
    torch.bmm(a.flatten(0, 2), b.flatten(0, 2), out=out.flatten(0, 2))
    return out
