"""The KDA operator: one entry, several backends that agree. ``chunkwise.py`` has the table of letters that all files here share."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minimodel.delta_rule.chunked import TILE, kda_chunked
from minimodel.delta_rule.chunkwise import kda_chunkwise
from minimodel.delta_rule.gates import bounded_log_decay, mamba_dt_bias, softplus_log_decay
from minimodel.delta_rule.native import kda_native
from minimodel.delta_rule.native_available import use_native, why_not_native
from minimodel.delta_rule.recurrent import kda_recurrent, kda_step, kda_step_
from minimodel.delta_rule.triton_available import use_triton

__all__ = [
    "bounded_log_decay", "kda", "kda_chunkwise", "kda_recurrent", "kda_step", "kda_step_", "mamba_dt_bias", "softplus_log_decay",
    "why_not_native",
]  # fmt: skip

BACKENDS = ("auto", "recurrent", "chunked", "native", "triton")


def kda(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    *,
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    cu_seqlens: Int[Tensor, "bounds"] | None = None,
    backend: str = "auto",
    chunk_size: int = 32,
    in_place: bool = False,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "N H K V"]]:
    """Kimi Delta Attention (K3 report Eq. 1): every token fades, erases and writes a K x V memory, then reads it.

    ``S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_(t-1) + beta_t k_t v_t^T``,  ``o_t = S_t^T (scale * q_t)``

    Args:
        q, k: queries and keys [B, T, H, K], already activated and normalized.
        v: values [B, T, H, V].
        g: log-decay <= 0 of each key channel [B, T, H, K].
        beta: write strength in [0, 1] [B, T, H].
        scale: of the queries; K**-0.5 by default.
        initial_state: [B, H, K, V]; zeros by default. With ``cu_seqlens`` one state a document.
        cu_seqlens: document boundaries 0 = c_0 < c_1 < ... < c_N = T of a packed row (B = 1): no memory crosses them.
        backend: "recurrent" (the equation), "chunked" (matrix products), "native" (the same in C, compiled at first use: float32 on the
            CPU, K and V multiples of 16 up to 256), "triton" (as GPU kernels: q, k, v in float32 or bfloat16, K and V powers of two of at
            least 16, first derivatives), or "auto": recurrent for one token, else triton on a GPU and native on the CPU where they can
            run, else chunked. ``why_not_native()`` says what keeps the C kernels from running.
        chunk_size: tokens in a chunk of the chunked backend, a multiple of 16. The others have sizes of their own.
        in_place: write the final state over ``initial_state`` and return that (decoding); only where no gradient is recorded.

    Returns: outputs [B, T, H, V] in q's dtype; final state [B, H, K, V] ([N, H, K, V] with ``cu_seqlens``), float32, or
    float64 when any input is float64.

    Raises: ValueError or TypeError naming the argument.
    """
    with torch.no_grad():
        _check(q, k, v, g, beta, initial_state, cu_seqlens)
    _check_options(scale, backend, chunk_size)
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, g, beta, initial_state))
    H, K = k.shape[2:]
    dtype = torch.float64 if torch.float64 in {x.dtype for x in (q, k, v, g, beta)} else torch.float32
    if in_place:
        _check_in_place(initial_state, dtype, recorded)
    scale = K**-0.5 if scale is None else scale
    same = [q, k, v, *(x for x in (g, beta) if x.dtype == torch.float64)]  # the kernels take g and beta in any precision but that one
    if (backend == "triton" or k.shape[1] > 1) and use_triton(backend, same, (K, v.shape[-1])):
        from minimodel.delta_rule.triton_chunked import kda_triton  # only here: importing Triton takes a while

        o, S = kda_triton(q, k, v, g, beta, initial_state, scale=scale, cu_seqlens=cu_seqlens)
        return o, initial_state.copy_(S) if in_place else S
    S = initial_state
    if S is None:
        documents = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
        S = torch.zeros(documents, H, K, v.shape[-1], dtype=dtype, device=k.device)
    S = S.to(dtype)
    if (backend == "native" or k.shape[1] > 1) and use_native(backend, [q, k, v, g, beta], (K, v.shape[-1])):
        o, S = kda_native(q, k, v, g, beta, S, scale=scale, cu_seqlens=cu_seqlens)
        return o, initial_state.copy_(S) if in_place else S

    def run(inputs: list[Tensor], S: Tensor) -> tuple[Tensor, Tensor]:
        steps = inputs[0].shape[1]
        if backend == "chunked" or (backend == "auto" and steps > 1):
            return kda_chunked(*inputs, S, scale=scale, chunk_size=chunk_size)
        inputs = [x if x.dtype == dtype else x.to(dtype) for x in inputs]  # the test is cheaper than a call that does nothing
        if steps == 1 and not recorded:
            S = S if in_place and S.is_contiguous() else S.clone(memory_format=torch.contiguous_format)
            return kda_step_(S, *inputs, scale), S
        return kda_recurrent(inputs[0] * scale, *inputs[1:], S)[:2]

    o, S = run([q, k, v, g, beta], S) if cu_seqlens is None else _by_length(run, [q, k, v, g, beta], S, cu_seqlens)
    if in_place and S is not initial_state:
        S = initial_state.copy_(S)
    return o.to(q.dtype), S


def _by_length(run: Callable, packed: list[Tensor], S: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """``run`` on the documents of a packed row. Those of like length, to a factor of two, are one padded batch: never twice the tokens."""
    lengths = cu_seqlens.diff()
    sizes = torch.tensor([n.bit_length() for n in lengths.tolist()], device=lengths.device)
    tokens, documents, outputs, states = [], [], [], []
    for size in sizes.unique():
        here = (sizes == size).nonzero().squeeze(1)
        steps = torch.arange(int(lengths[here].max()), device=lengths.device)
        there = steps < lengths[here, None]
        positions = torch.where(there, cu_seqlens[here, None] + steps, 0)
        # zero rows do nothing: no decay, no write
        o, end = run([torch.where(there.view(*there.shape, *([1] * (x.dim() - 2))), x[0, positions], 0.0) for x in packed], S[here])
        tokens.append(positions[there])
        documents.append(here)
        outputs.append(o[there])
        states.append(end)
    return torch.cat(outputs)[torch.cat(tokens).argsort()].unsqueeze(0), torch.cat(states)[torch.cat(documents).argsort()]


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> None:
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if state is not None:
        named["initial_state"] = state
    for name, x in named.items():
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be a floating-point tensor, got {got}")
    device = q.device
    for name, x in named.items():
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}: put all inputs on one device")
    if q.dim() != 4 or 0 in q.shape:
        raise ValueError(f"q must be [B, T, H, K] with B, T, H, K >= 1, got shape {tuple(q.shape)}")
    B, T, H, K = q.shape
    if v.dim() != 4 or v.shape[:3] != (B, T, H) or v.shape[3] == 0:
        raise ValueError(f"v must be [B, T, H, V] = ({B}, {T}, {H}, V) to match q, got shape {tuple(v.shape)}")
    for name, x, shape in (("k", k, (B, T, H, K)), ("g", g, (B, T, H, K)), ("beta", beta, (B, T, H))):
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {shape} to match q {tuple(q.shape)}, got {tuple(x.shape)}")
    documents = B
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T)
        if cu_seqlens.device != device:
            raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, q on {device}: put all inputs on one device")
        documents = len(cu_seqlens) - 1
    if state is not None and state.shape != (documents, H, K, v.shape[3]):
        raise ValueError(
            f"initial_state must have shape {(documents, H, K, v.shape[3])} for q {tuple(q.shape)} and v {tuple(v.shape)}, "
            f"got {tuple(state.shape)}"
        )
    if q.device.type == "meta":
        return
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not math.isfinite(x.sum().item()):  # one pass, nothing stored; a finite sum has finite terms, but a sum may overflow
            if bad := int((~x.isfinite()).sum()):
                raise ValueError(f"{name} must be finite, got {bad} values that are NaN or infinite")
    if not (high := g.amax().item()) <= 0:  # NaN is not <= 0
        raise ValueError(f"g must be a log-decay <= 0, got {high:.4g}")
    low, high = (x.item() for x in torch.aminmax(beta))
    if not (low >= 0 and high <= 1):
        raise ValueError(f"beta must lie in [0, 1], got {low:.4g} to {high:.4g}")


def _check_options(scale: float | None, backend: str, chunk_size: int) -> None:
    if scale is not None and not isinstance(scale, Real):  # a tensor among them: its gradient would be lost
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if not isinstance(chunk_size, int):
        raise TypeError(f"chunk_size must be an integer, got {chunk_size!r}")
    if chunk_size < TILE or chunk_size % TILE:
        raise ValueError(f"chunk_size must be a positive multiple of {TILE}, got {chunk_size}")


def _check_in_place(state: Tensor | None, dtype: torch.dtype, recorded: bool) -> None:
    if state is None or state.dtype != dtype:
        raise ValueError(f"in_place writes over initial_state, which must be {dtype}, got {state if state is None else state.dtype}")
    if recorded:
        raise ValueError("in_place writes over initial_state, which a recorded gradient would need: use torch.no_grad()")


def check_cu_seqlens(cu_seqlens: Tensor, B: int, T: int) -> None:
    """One sentence when document boundaries don't describe a packed row [1, T]."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens must be a 1-D integer tensor of at least 2 boundaries, got {got}")
    if B != 1:
        raise ValueError(f"cu_seqlens needs one packed row (B = 1), got B = {B}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must be a 1-D integer tensor of at least 2 boundaries, got {cu_seqlens.tolist()}")
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != T or bool((cu_seqlens.long().diff() <= 0).any()):
        raise ValueError(f"cu_seqlens must rise from 0 to T = {T}, got {cu_seqlens.tolist()}")
