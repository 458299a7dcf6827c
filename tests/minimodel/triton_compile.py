"""Compile what the Triton backends launch for a GPU that is not there: `python -m tests.minimodel.triton_compile sm_90`.

The host code runs as it is, on small CPU tensors; every launch is recorded instead of made, then compiled for the target with the very
arguments it was given. Prints one JSON line a kernel: registers, spills, shared memory. Not run in the interpreter.
"""
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}  # fmt: skip
POINTERS_AND_NUMBERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", int: "i32", float: "fp32"}


def launches(work):
    """What ``work()`` launches: (kernel, its arguments by name, options), each combination of types and constants once."""
    found = {}

    def record(self, *args, grid, warmup, **kwargs):
        bound = inspect.signature(self.fn).bind(*args, **{name: x for name, x in kwargs.items() if name in self.arg_names})
        options = {name: x for name, x in kwargs.items() if name not in self.arg_names}
        values = {p.name: bound.arguments[p.name] for p in self.params}
        constants = {p.name: values[p.name] for p in self.params if p.is_constexpr}
        types = {n: "constexpr" if n in constants else POINTERS_AND_NUMBERS[getattr(x, "dtype", type(x))] for n, x in values.items()}
        found[str((self.fn.__name__, types, constants))] = (self, types, constants, options)

    run, triton.runtime.jit.JITFunction.run = triton.runtime.jit.JITFunction.run, record
    try:
        work()
    finally:
        triton.runtime.jit.JITFunction.run = run
    return list(found.values())


def resources(compiled):
    """(registers, bytes a thread keeps in memory because registers ran out, bytes of shared memory) of a compiled kernel."""
    if "amdgcn" in compiled.asm:
        count = {name: int(n) for name, n in re.findall(r"\.(\w+):\s+(\d+)\n", compiled.asm["amdgcn"])}
        # scratch memory; scalar registers that run out go to lanes of vector registers, not to memory
        return count["vgpr_count"], max(count["private_segment_fixed_size"], 4 * count["vgpr_spill_count"]), compiled.metadata.shared
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        report = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True)
    (count,) = re.findall(r"REG:(\d+) STACK:(\d+).*LOCAL:(\d+)", report.stdout + report.stderr)
    return int(count[0]), int(count[1]) + int(count[2]), compiled.metadata.shared


def everything(dtype):
    """Each backend once, forward and backward, at K3's head size."""
    from minimodel.delta_rule.triton_chunked import kda_triton
    from minimodel.delta_rule.triton_decode import decode_step
    from minimodel.delta_rule.triton_gate import Gate
    from minimodel.triton_depth_read import depth_read

    H, K, V = 2, 128, 128
    q, k, v, f = (torch.zeros(1, 40, H, n, dtype=dtype, requires_grad=True) for n in (K, K, V, K))
    beta = torch.zeros(1, 40, H, requires_grad=True)
    A_log, dt_bias = torch.zeros(H, requires_grad=True), torch.zeros(H, K, requires_grad=True)
    for gate in (None, Gate(A_log, dt_bias, -5.0), Gate(A_log, dt_bias, None)):
        o, S = kda_triton(q, k, v, f.float() if gate is None else f, beta, None, scale=1.0, gate=gate)
        torch.autograd.backward([o, S], [torch.zeros_like(o), torch.zeros_like(S)])
        with torch.no_grad():
            x, taps, step = torch.zeros(1, 1, H * (2 * K + V), dtype=dtype), torch.zeros(H * (2 * K + V), 4, dtype=dtype), f[:, :1]
            decode_step(x, taps, step, torch.zeros(1, 1, H, dtype=dtype), gate or Gate(A_log, dt_bias, -5.0), None, None)
    sources = torch.zeros(2, 9, 7168, dtype=dtype, requires_grad=True)  # K3: eight blocks and the running sum
    depth_read(sources, torch.zeros(7168, dtype=dtype), torch.zeros(7168, dtype=dtype)).sum().backward()


def main(name):
    target = TARGETS[name]
    torch.version.hip = "ahead of time" if target.backend == "hip" else None  # the host code asks which kind of GPU it serves
    for dtype in (torch.bfloat16, torch.float32):
        for kernel, types, constants, options in launches(lambda dtype=dtype: everything(dtype)):
            aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(types) if types[n].startswith("*")}
            compiled = triton.compile(ASTSource(kernel, types, constants, aligned), target=target, options=options)
            registers, spilled, shared = resources(compiled)
            row = {"kernel": kernel.fn.__name__, "dtype": str(dtype).removeprefix("torch."), "registers": registers, "spilled": spilled,
                   "shared": shared, "warps": compiled.metadata.num_warps}  # fmt: skip
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main(sys.argv[1])
