"""The GPU mode: correctness first, then our Triton backend and flash-linear-attention's kernels against the device's own ceilings.

One call of `python -m benchmarks --gpu` is meant to end within eight minutes, most of which is compiling and tuning of kernels.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.inputs import Shape
from benchmarks.peers import PYTHON, PeerName
from benchmarks.process import Process
from benchmarks.reference import BFLOAT16_TOLERANCE, complaint, largest_error, load_results, reference
from benchmarks.samples import ContestantFailed, summarize, take_turns

OURS = "minimodel kda, triton"
PEERS = (PeerName("gpu:fla", "fla chunk_kda / fused_recurrent_kda", "torch_peers.txt"),)
HEADS = 32  # Kimi Linear's
GEMM, PROBE, COPIED = 8192, 4096, 1 << 30
CHECKED = Shape(256, H=HEADS)  # gradients are compared with float64 autograd of the recurrence at this size
COMPILING = 240.0  # seconds that an import or a first call may take


def ceilings(bench) -> dict:
    """The rates that no kernel can pass: a large bfloat16 matrix product, a copy on the device."""
    with Process("gpu:ours", threads=bench.threads) as process:
        about = process.ask("describe")
        gemm = 2 * GEMM**3 / min(process.ask("gemm", n=GEMM) for _ in range(5))
        copy = 2 * COPIED / min(process.ask("copy", bytes_=COPIED) for _ in range(5))
    rows = [
        {"what": f"bfloat16 matrix product, n = {GEMM}", "rate": gemm / 1e12, "unit": "TFLOP/s"},
        {"what": "copy on the device, read and written", "rate": copy / 1e9, "unit": "GB/s"},
    ]
    return {"rows": rows, "missing": [], "versions": {"GPU": about["gpu"], OURS: about["version"]}}


def operator(bench) -> dict:
    """TFLOP/s by the same count as on a CPU, three times as much for forward and backward, against the matrix product's."""
    T = 2048 if bench.quick else 16384
    shape = Shape(T, H=HEADS)
    cases = [("forward", shape, shape.flops(), 10), ("forward_backward", shape, 3 * shape.flops(), 5)]
    return _compare(bench, cases, ceiling="gemm", scale=1e12)


def decode(bench) -> dict:
    """GB/s of the state, which a step must read and write once, against the copy's."""
    cases = []
    for B in (1,) if bench.quick else (1, 64):
        shape = Shape(1, B=B, H=HEADS)
        cases.append(("decode", shape, 2 * 4 * B * HEADS * shape.K**2, 100))
    return _compare(bench, cases, ceiling="copy", scale=1e9)


SECTIONS = {"gpu_ceilings": ceilings, "gpu_operator": operator, "gpu_decode": decode}


def _compare(bench, cases: list[tuple[str, Shape, int, int]], *, ceiling: str, scale: float) -> dict:
    """``cases``: call, shape, the FLOPs or bytes it must cost, calls a sample."""
    rows, missing, versions = [], [], {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = {OURS: ("gpu:ours", {})} | {p.label: (p.name, {"python": PYTHON}) for p in PEERS if p.label not in bench.missing}
        processes = {who: stack.enter_context(Process(name, threads=bench.threads, **o)) for who, (name, o) in names.items()}
        machine = stack.enter_context(Process("gpu:ours", threads=bench.threads))  # probes and ceilings, whatever happens to the others
        for call, shape, work, repeat in cases:
            bench.say(f"   {call}, T = {shape.T}, B = {shape.B}")
            errors = {}
            for who, process in list(processes.items()):
                try:
                    versions[who] = process.ask("describe", patience=COMPILING)["version"]
                    errors[who] = _error(process, call, CHECKED if call == "forward_backward" else shape, folder)
                    process.ask("prepare", **_sizes(shape))
                    process.ask("seconds", call=call, repeat=1, patience=COMPILING)
                except ContestantFailed as failure:
                    missing.append({"who": who, "where": call, "why": str(failure)})
                    errors.pop(who, None)
                    del processes[who]
            calls = {who: (lambda p, c=call, n=repeat: lambda: p.ask("seconds", call=c, repeat=n))(processes[who]) for who in errors}
            turns = take_turns(calls, lambda: machine.ask("gemm", n=PROBE), **bench.effort)
            best = _ceiling(machine, ceiling)
            missing += [{"who": who, "where": call, "why": why} for who, why in turns.failures.items()]
            for who, samples in turns.samples.items():
                if samples.seconds:
                    s = summarize(samples, min(turns.probes))
                    rows.append({
                        "what": f"{call.replace('_', ' and ')}, T = {shape.T}, B = {shape.B}", "who": who, "best_ms": 1e3 * s.best,
                        "median_ms": 1e3 * s.median, "clean": s.clean, "taken": s.taken, "rate": work / s.best / scale,
                        "share": work / s.best / best, "error": errors[who], "wrong": complaint(errors[who], BFLOAT16_TOLERANCE),
                    })  # fmt: skip
    return {"rows": rows, "missing": missing, "versions": versions}


def _error(process: Process, call: str, shape: Shape, folder: Path) -> float:
    process.ask("prepare", **_sizes(shape))
    process.ask("save", call=call, path=str(folder / "results.npz"), patience=COMPILING)
    return largest_error(load_results(folder / "results.npz"), reference(call, shape, device="cuda", bfloat16=True))


def _ceiling(machine: Process, kind: str) -> float:
    """FLOP/s or bytes/s of the device, now."""
    if kind == "gemm":
        return 2 * GEMM**3 / min(machine.ask("gemm", n=GEMM) for _ in range(5))
    return 2 * COPIED / min(machine.ask("copy", bytes_=COPIED) for _ in range(5))


def _sizes(shape: Shape) -> dict[str, int]:
    return {"T": shape.T, "B": shape.B, "H": shape.H, "K": shape.K, "seed": 0}
