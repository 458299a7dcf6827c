"""KDA on a GPU: the chunked form of ``chunked.py`` as Triton kernels, with a backward pass of its own.

    forward                                              backward
    triton_gate     G, the running sum of log-decays     the same three again: nothing of them is kept
    triton_tiles    A, P, M of each chunk
    triton_prepare  W, U, q_in, k_out                    triton_states          dX and the state's gradient, back through time
    triton_states   X and the states, through time       triton_chunk_backward  dv, dbeta, dA, dP; the chunk decay's part
    triton_outputs  O                                    triton_tiles_backward  dq, dk, dG
                                                         triton_gate            dg, or the gate's gradients

Kept for the backward pass: the inputs and one state a chunk, as in ``chunked.py``. The state is float32 while it is carried and is stored
in the inputs' dtype where products read it. Sizes were chosen so that no kernel spills registers at K = V = 128 (a test compiles them
for four GPUs); nothing was tuned by running.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minimodel.delta_rule.triton_chunk_backward import decay_backward, writes_backward
from minimodel.delta_rule.triton_common import Chunks, Numbers
from minimodel.delta_rule.triton_gate import Gate, cumulative_decay, cumulative_decay_backward
from minimodel.delta_rule.triton_outputs import outputs
from minimodel.delta_rule.triton_prepare import prepare
from minimodel.delta_rule.triton_states import states, states_backward
from minimodel.delta_rule.triton_tiles import tiles
from minimodel.delta_rule.triton_tiles_backward import tiles_backward


def kda_triton(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    S: Float[Tensor, "N H K V"] | None,
    *,
    scale: float,
    cu_seqlens: Int[Tensor, "bounds"] | None = None,
    gate: Gate | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "N H K V"]]:
    """Same result as ``kda_recurrent``; ``q`` comes unscaled. With ``gate``, ``g`` is the raw projection f and the gate is applied here.

    q, k, v: float32 or bfloat16, K and V powers of two of at least 16. One state a document (B without ``cu_seqlens``), float32. Can be
    differentiated once.
    """
    B, T, H, K = k.shape
    bounds = torch.arange(0, B * T + 1, T, device=k.device) if cu_seqlens is None else cu_seqlens
    if S is None:
        S = torch.zeros(len(bounds) - 1, H, K, v.shape[-1], dtype=torch.float32, device=k.device)
    flat = [x.flatten(0, 1).contiguous() for x in (q, k, v, g, beta)]
    A_log, dt_bias, lower_bound = (None, None, None) if gate is None else gate
    o, S = _TritonKDA.apply(*flat, S.float().contiguous(), A_log, dt_bias, lower_bound, scale, bounds)
    return o.view(v.shape), S


class _TritonKDA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, S_first, A_log, dt_bias, lower_bound, scale, bounds):
        with torch.cuda.device_of(q):
            gate = None if A_log is None else Gate(A_log, dt_bias, lower_bound)
            chunks, numbers = Chunks.of(bounds), Numbers.of(k.dtype)
            G = cumulative_decay(g, gate, chunks)
            _, P, M = tiles(q, k, beta, G, scale, chunks, numbers)
            W, U, q_in, k_out = prepare(q, k, v, G, M, scale, chunks, numbers)
            X, S, S_last = states(W, U, k_out, G, S_first, chunks, numbers)
            O = outputs(q_in, S, P, X, v, chunks, numbers)
        ctx.save_for_backward(q, k, v, g, beta, S, A_log, dt_bias)
        ctx.rest = lower_bound, scale, chunks, numbers
        return O, S_last

    @staticmethod
    def backward(ctx, dO, dS_last):
        if torch.is_grad_enabled():  # create_graph: what follows would silently leave no graph
            raise RuntimeError('backend "triton" can be differentiated once; for second derivatives ask for backend "chunked"')
        q, k, v, g, beta, S, A_log, dt_bias = ctx.saved_tensors
        lower_bound, scale, chunks, numbers = ctx.rest
        dO = dO.contiguous()
        with torch.cuda.device_of(q):
            gate = None if A_log is None else Gate(A_log, dt_bias, lower_bound)
            G = cumulative_decay(g, gate, chunks)
            A, P, M = tiles(q, k, beta, G, scale, chunks, numbers)
            W, _, q_in, k_out = prepare(q, k, v, G, M, scale, chunks, numbers)
            dX, dS, dS_first = states_backward(dO, P, W, q_in, k_out, G, dS_last.contiguous(), chunks, numbers)
            dv, dbeta, dA, dP, X = writes_backward(k, v, beta, G, A, M, S, dO, dX, chunks, numbers)
            dq, dk, dG = decay_backward(q, k, G, S, dS, dO, dv, X, scale, chunks, numbers)
            dq, dk = tiles_backward(q, k, G, dA, dP, dq, dk, dG, scale, chunks, numbers)
            dg, dA_log, ddt_bias = cumulative_decay_backward(g, gate, dG, chunks)
        return dq, dk, dv, dg, dbeta, dS_first, dA_log, ddt_bias, None, None, None
