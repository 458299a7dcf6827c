"""The peers: other people's delta rules on a CPU, each behind the same five calls. Runs in the peers' environment, without minimodel.

``prepare`` makes one call's inputs, ``forward`` and ``forward_backward`` are what is timed, ``save`` runs one of them and writes what it
gave, ``prepare_decode`` and ``decode`` do the same for one token. Libraries are imported when a contestant is made.
"""

from __future__ import annotations

import ctypes
import importlib.util
from importlib.metadata import version
from pathlib import Path

import numpy as np

from benchmarks.inputs import Shape, operator_inputs

GRADIENTS = ("q", "k", "v", "g", "beta")


class Peer:
    """What all peers share. A subclass says what its rule is and how its library is called."""

    one_decay_a_head = False  # Gated DeltaNet: less work than KDA, and its own reference

    def __init__(self, threads: int, variant: str) -> None:
        self.threads, self.variant = threads, variant

    def describe(self) -> dict:
        return {"version": self.version(), "one_decay_a_head": self.one_decay_a_head}

    def prepare(self, T: int, B: int, H: int, K: int, seed: int) -> None:
        arrays = operator_inputs(Shape(T, B, H, K), seed=seed, one_decay_a_head=self.one_decay_a_head)
        self.inputs = {name: self.from_numpy(x) for name, x in arrays.items()}

    def save(self, call: str, path: str) -> None:
        """Run a call once and write its results as float32 arrays: o and S, or the gradients of the five inputs."""
        results = getattr(self, call)()
        np.savez(path, **{name: self.to_numpy(x) for name, x in results.items()})


class TorchPeer(Peer):
    """A function of torch tensors (q, k, v, g, beta) -> (o, state)."""

    def __init__(self, threads: int, variant: str) -> None:
        super().__init__(threads, variant)
        import torch

        self.torch = torch
        torch.set_num_threads(threads)

    def from_numpy(self, x: np.ndarray):
        return self.torch.from_numpy(x)

    def to_numpy(self, x) -> np.ndarray:
        return x.detach().numpy()

    def forward(self) -> dict:
        x = self.inputs
        with self.torch.no_grad():
            o, S = self.operator(*(x[name] for name in GRADIENTS), None)
        return {"o": o, "S": S}

    def forward_backward(self) -> dict:
        leaves = [self.inputs[name].detach().requires_grad_() for name in GRADIENTS]
        o, _ = self.operator(*leaves, None)
        gradients = self.torch.autograd.grad(o, leaves, self.inputs["dO"])
        return dict(zip(GRADIENTS, gradients, strict=True))

    def prepare_decode(self, B: int, H: int, K: int, seed: int) -> None:
        self.prepare(1, B, H, K, seed)
        self.state = self.inputs["S"]

    def decode(self) -> dict:
        x = self.inputs
        with self.torch.no_grad():
            o, self.state = self.one_token(*(x[name] for name in GRADIENTS), self.state)
        return {"o": o, "S": self.state}


class FlaNaive(TorchPeer):
    """flash-linear-attention's pure-torch KDA. Its file is loaded by itself, since the package around it imports Triton."""

    def __init__(self, threads: int, variant: str) -> None:
        super().__init__(threads, variant)
        (folder,) = importlib.util.find_spec("fla").submodule_search_locations[:1]
        source = importlib.util.spec_from_file_location("fla_naive_kda", Path(folder) / "ops/kda/naive.py")
        self.naive = importlib.util.module_from_spec(source)
        source.loader.exec_module(self.naive)
        self.chunk = int(variant or 64)

    def version(self) -> str:
        return f"fla-core {version('fla-core')}, torch {version('torch')}"

    def operator(self, q, k, v, g, beta, S):
        return self.naive.naive_chunk_kda(q, k, v, g, beta, initial_state=S, output_final_state=True, chunk_size=self.chunk)

    def one_token(self, q, k, v, g, beta, S):
        return self.naive.naive_recurrent_kda(q, k, v, g, beta, initial_state=S, output_final_state=True)


class TransformersKimi(TorchPeer):
    """transformers' Kimi Linear without its optional kernels."""

    def __init__(self, threads: int, variant: str) -> None:
        super().__init__(threads, variant)
        from transformers.models.kimi_linear import modeling_kimi_linear

        self.model, self.chunk = modeling_kimi_linear, int(variant or 64)

    def version(self) -> str:
        return f"transformers {version('transformers')}, torch {version('torch')}"

    def operator(self, q, k, v, g, beta, S):
        run = self.model.chunk_kimi_delta_attention
        return run(q, k, v, g, beta, chunk_size=self.chunk, initial_state=S, output_final_state=True)

    def one_token(self, q, k, v, g, beta, S):
        return self.model.recurrent_kimi_delta_attention(q, k, v, g, beta, S, True)


class TransformersGatedDeltaNet(TorchPeer):
    """transformers' Gated DeltaNet (Qwen3-Next) without its optional kernels: one decay a head, so its tiles need no pairwise decays."""

    one_decay_a_head = True

    def __init__(self, threads: int, variant: str) -> None:
        super().__init__(threads, variant)
        from transformers.models.qwen3_next import modeling_qwen3_next

        self.model = modeling_qwen3_next

    version = TransformersKimi.version

    def operator(self, q, k, v, g, beta, S):
        return self.model.torch_chunk_gated_delta_rule(q, k, v, g, beta, initial_state=S, output_final_state=True)

    def one_token(self, q, k, v, g, beta, S):
        return self.model.torch_recurrent_gated_delta_rule(q, k, v, g, beta, initial_state=S, output_final_state=True)


class MlxLm(Peer):
    """mlx-lm's delta rule on MLX's CPU backend: the recurrence, step by step; its fused kernels need an Apple GPU."""

    def __init__(self, threads: int, variant: str) -> None:
        super().__init__(threads, variant)
        import mlx.core
        from mlx_lm.models.gated_delta import gated_delta_ops

        self.mx, self.rule = mlx.core, gated_delta_ops
        self.mx.set_default_device(self.mx.cpu)

    def version(self) -> str:
        return f"mlx-lm {version('mlx-lm')}, mlx {version('mlx')}"

    def from_numpy(self, x: np.ndarray):
        return self.mx.array(x)

    def to_numpy(self, x) -> np.ndarray:
        return np.array(x)

    def _run(self, q, k, v, g, beta, S=None):
        return self.rule(q * q.shape[-1] ** -0.5, k, v, self.mx.exp(g), beta, S)

    def forward(self) -> dict:
        o, S = self._run(*(self.inputs[name] for name in GRADIENTS))
        self.mx.eval(o, S)
        return {"o": o, "S": S.swapaxes(-1, -2)}

    def forward_backward(self) -> dict:
        leaves = [self.inputs[name] for name in GRADIENTS]
        _, gradients = self.mx.vjp(lambda *x: [self._run(*x)[0]], leaves, [self.inputs["dO"]])
        self.mx.eval(*gradients)
        return dict(zip(GRADIENTS, gradients, strict=True))

    def prepare_decode(self, B: int, H: int, K: int, seed: int) -> None:
        self.prepare(1, B, H, K, seed)
        self.state = self.inputs["S"].swapaxes(-1, -2)

    def decode(self) -> dict:
        o, self.state = self._run(*(self.inputs[name] for name in GRADIENTS), self.state)
        self.mx.eval(o, self.state)
        return {"o": o, "S": self.state.swapaxes(-1, -2)}


class Ggml(Peer):
    """ggml's GATED_DELTA_NET operator in C, the one that llama.cpp runs, compiled on this machine for its own instruction set."""

    def __init__(self, threads: int, variant: str) -> None:
        super().__init__(threads, variant)
        import ggml

        self.g = ggml
        self.backend = ggml.ggml_backend_cpu_init()
        ggml.ggml_backend_cpu_set_n_threads(self.backend, threads)
        self.context = None

    def version(self) -> str:
        return f"ggml-python {version('ggml-python')}"

    def prepare(self, T: int, B: int, H: int, K: int, seed: int) -> None:
        self._build(Shape(T, B, H, K), seed, from_zero=True)

    def prepare_decode(self, B: int, H: int, K: int, seed: int) -> None:
        self._build(Shape(1, B, H, K), seed, from_zero=False)

    def _build(self, shape: Shape, seed: int, *, from_zero: bool) -> None:
        """A graph of one node. ggml writes sizes fastest first and keeps the state transposed."""
        x = operator_inputs(shape, seed=seed)
        x["S"] = np.zeros_like(x["S"]) if from_zero else np.ascontiguousarray(x["S"].swapaxes(-1, -2))
        T, B, H, K = shape.T, shape.B, shape.H, shape.K
        if self.context is not None:
            self.g.ggml_free(self.context)
        # the inputs, the output (like v, and a state), and room for what describes them
        bytes_ = sum(array.nbytes for array in x.values()) + x["S"].nbytes + (1 << 20)
        self.context = self.g.ggml_init(self.g.ggml_init_params(bytes_, None, False))
        row = (K, H, T, B)
        sizes = {"q": row, "k": row, "v": row, "g": row, "beta": (1, H, T, B), "S": (K, K, H, B)}
        leaves = {name: self._leaf(x[name], size) for name, size in sizes.items()}
        self.node = self.g.ggml_gated_delta_net(self.context, *leaves.values(), 1)
        self.graph = self.g.ggml_new_graph(self.context)
        self.g.ggml_build_forward_expand(self.graph, self.node)
        self.shape = (B, T, H, K)

    def _leaf(self, x: np.ndarray, size: tuple[int, ...]):
        tensor = self.g.ggml_new_tensor_4d(self.context, self.g.GGML_TYPE_F32, *size)
        ctypes.memmove(self.g.ggml_get_data(tensor), x.ctypes.data, x.nbytes)
        return tensor

    def forward(self) -> None:
        status = self.g.ggml_backend_graph_compute(self.backend, self.graph)
        if status != 0:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")

    decode = forward  # the new state is not copied to where the next call would read it: a little less work than everybody else's

    def save(self, call: str, path: str) -> None:
        getattr(self, call)()
        B, T, H, K = self.shape
        written, kept = B * T * H * K, B * H * K * K
        pointer = ctypes.cast(self.g.ggml_get_data(self.node), ctypes.POINTER(ctypes.c_float))
        flat = np.ctypeslib.as_array(pointer, (written + kept,))
        np.savez(path, o=flat[:written].reshape(self.shape), S=flat[written:].reshape(B, H, K, K).swapaxes(-1, -2))


FAMILIES = {"fla": FlaNaive, "kimi": TransformersKimi, "gdn": TransformersGatedDeltaNet, "mlx": MlxLm, "ggml": Ggml}
