"""KDA on a CPU by C kernels: the chunked form of ``chunked.py``, 16 tokens a chunk, with a backward pass of its own.

    native_call.h      what is passed from here
    native_product.c   the one matrix product, with its sums held in registers
    native_tile.c      what the tokens of a tile do to each other
    native_forward.c   one head of one document, tile after tile
    native_backward.c  and back
    native_threads.c   heads and documents, shared out among threads

A tile with g >= -5 is one dense product, as in ``tiles.py``. A tile in which half a tile's decay passes e^-40 is computed token by token,
by the equation itself. Kept for the backward pass: the inputs, each token's error and one state in 64 tokens.
"""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minimodel.delta_rule.native_available import library, team
from minimodel.delta_rule.recurrent import kda_recurrent_backward
from minimodel.layers import own_precision

KEPT_EVERY = 64  # tokens between two states that are kept: GROUP tiles of native_tile.h
WORTH_A_THREAD = 2**20  # multiply-adds; to start a thread takes as long as some 2^19 of them


def kda_native(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    S: Float[Tensor, "N H K V"],
    *,
    scale: float,
    cu_seqlens: Int[Tensor, "bounds"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "N H K V"]]:
    """Same result as ``kda_recurrent`` with ``scale * q``; one state a document (B without ``cu_seqlens``).

    All float32 on the CPU, K and V multiples of 16 up to 256.
    """
    if not torch.is_grad_enabled():  # an autograd.Function is told what its inputs require, not whether anybody records
        q, k, v, g, beta, S = (x.detach() for x in (q, k, v, g, beta, S))
    B, T = k.shape[:2]
    bounds = torch.arange(0, B * T + 1, T) if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous()
    o, S = _NativeKDA.apply(*(x.flatten(0, 1) for x in (q, k, v, g, beta)), S, scale, bounds)
    return o.view(v.shape), S


class _Rows(ctypes.Structure):
    """[tokens, heads, channels], with neighbouring channels."""

    _fields_ = [("at", ctypes.c_void_p), ("token", ctypes.c_int64), ("head", ctypes.c_int64)]


class _Call(ctypes.Structure):
    """``Call`` of native_call.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("documents", "heads", "K", "V")),
        *((name, ctypes.c_void_p) for name in ("bounds", "first_kept")),
        ("scale", ctypes.c_float),
        *((name, _Rows) for name in ("q", "k", "v", "g", "beta")),
        *((name, ctypes.c_void_p) for name in ("S_first", "S_last")),
        ("o", _Rows),
        ("kept", ctypes.c_void_p),
        ("E", _Rows),
        *((name, ctypes.c_int64) for name in ("next", "failed")),
    ]


class _Gradients(ctypes.Structure):
    """``Gradients`` of native_call.h."""

    _fields_ = [
        ("call", _Call),
        *((name, _Rows) for name in ("dO", "dq", "dk", "dv", "dg", "dbeta")),
        *((name, ctypes.c_void_p) for name in ("dS_last", "dS_first")),
    ]


class _NativeKDA(torch.autograd.Function):
    """On tokens of all documents in a row: q, k, g [tokens, H, K], v [tokens, H, V], beta [tokens, H], S [documents, H, K, V]."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, S, scale, bounds):
        inputs = [*(_channels_together(x) for x in (q, k, v, g, beta)), S.contiguous()]
        o, S_last = _new(v), torch.empty_like(inputs[5])
        kept = first_kept = errors = None
        if any(ctx.needs_input_grad):
            states = (bounds.diff() + KEPT_EVERY - 1) // KEPT_EVERY
            first_kept = states.cumsum(0) - states
            kept, errors = _new(v, int(states.sum()), *S.shape[1:]), _new(v)
        call = _call(inputs, S_last, o, kept, errors, scale, bounds, first_kept)
        _run(library().kda_forward, call, call)
        if kept is not None:
            ctx.save_for_backward(q, k, v, g, beta, S, kept, errors, bounds, first_kept)
        ctx.scale = scale
        return o, S_last

    @staticmethod
    def backward(ctx, do, dS):
        *inputs, kept, errors, bounds, first_kept = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the caller wants to differentiate this backward pass too
            with own_precision(do):
                return *_document_by_document(inputs, bounds, ctx.scale, do, dS), None, None
        inputs = [*(_channels_together(x) for x in inputs[:5]), inputs[5].contiguous()]
        grads = [_new(x) for x in inputs]
        do, dS = _channels_together(do), dS.contiguous()
        call = _Gradients(
            _call(inputs, None, None, kept, errors, ctx.scale, bounds, first_kept),
            _rows(do), *map(_rows, grads[:5]), dS.data_ptr(), grads[5].data_ptr(),
        )  # fmt: skip
        _run(library().kda_backward, call, call.call)
        return *grads, None, None


def _new(x: Tensor, *shape: int) -> Tensor:
    """Fresh memory, of x's shape by default."""
    new = x.new_empty(shape or x.shape)
    library().kda_in_large_pages(ctypes.c_void_p(new.data_ptr()), ctypes.c_int64(new.numel()))
    return new


def _channels_together(x: Tensor) -> Tensor:
    """``x``, copied where the channels [tokens, heads, channels] of a head are not neighbours in memory."""
    return x if x.dim() == 2 or x.stride(2) == 1 else x.contiguous()


def _rows(x: Tensor | None) -> _Rows:
    return _Rows(None, 0, 0) if x is None else _Rows(x.data_ptr(), x.stride(0), x.stride(1))


def _call(inputs, S_last, o, kept, errors, scale, bounds, first_kept) -> _Call:
    *tokens, S = inputs
    pointers = [None if x is None else x.data_ptr() for x in (bounds, first_kept, S, S_last, kept)]
    return _Call(
        *S.shape, *pointers[:2], scale, *map(_rows, tokens), *pointers[2:4], _rows(o), pointers[4], _rows(errors), 0, 0
    )  # fmt: skip


def _run(kernel, call: ctypes.Structure, head: _Call) -> None:
    """Call a kernel, which lets other Python threads run, with torch's number of threads and no more than there is work for."""
    sequences, work = head.documents * head.heads, _tokens(head) * head.heads * head.K * head.V
    threads = max(1, min(torch.get_num_threads(), sequences, work // WORTH_A_THREAD))
    if kernel(ctypes.byref(call), ctypes.c_int64(threads), team()):
        raise MemoryError(f"kda: no memory for the work of {threads} threads")


def _tokens(call: _Call) -> int:
    return ctypes.cast(call.bounds, ctypes.POINTER(ctypes.c_int64))[call.documents]


def _document_by_document(inputs: list[Tensor], bounds: Tensor, scale: float, do: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
    """``kda_recurrent_backward`` of each document, [1, tokens, H, ..]."""
    *tokens, S = inputs
    found = []
    for n, (start, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        mine = [*(x[None, start:stop] for x in tokens), S[n : n + 1]]
        found.append(kda_recurrent_backward(mine, scale, do[None, start:stop], dS[n : n + 1]))
    grads = [None if parts[0] is None else torch.cat(parts, 1)[0] for parts in list(zip(*found, strict=True))[:5]]
    states = [one[5] for one in found]
    return *grads, None if states[0] is None else torch.cat(states)
