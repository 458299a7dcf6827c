"""The process that is measured: `python -m benchmarks.worker NAME`. It reads one JSON request a line and answers each with one JSON line.

A request is ``{"do": METHOD, ...arguments}`` of the contestant; the answer is ``{"ok": RESULT}`` or ``{"failed": REASON}``. It runs in
whichever environment the contestant needs, so this file imports the standard library only.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
import traceback

QUIET = 0.01  # seconds before a clock starts: OpenMP's threads of the last process that ran spin for a few milliseconds after their work


def contestant(name: str, threads: int):
    """The contestant of that name, its libraries imported. ``name`` is FAMILY or FAMILY:VARIANT."""
    family, _, variant = name.partition(":")
    if family == "ours":
        from benchmarks.ours import Ours

        return Ours(threads, variant)
    if family == "gpu":
        from benchmarks.gpu_contestants import OnGpu

        return OnGpu(variant)
    if family == "training":
        from benchmarks.training import Training

        return Training(threads, variant)
    from benchmarks import contestants

    if family not in contestants.FAMILIES:
        raise ValueError(f"name must start with ours, gpu, training or one of {sorted(contestants.FAMILIES)}, got {name!r}")
    return contestants.FAMILIES[family](threads, variant)


def serve(name: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    threads = int(os.environ["OMP_NUM_THREADS"])
    runs, broken = None, None
    try:  # at once, so that the libraries of several contestants are imported side by side
        runs = contestant(name, threads)
    except Exception as error:
        broken = _why(error)
    for line in sys.stdin:
        try:
            answer = {"failed": broken} if broken else {"ok": run(runs, **json.loads(line))}
        except Exception as error:  # reported to the table, whatever it is
            answer = {"failed": _why(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _why(error: Exception) -> str:
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def run(runs, do: str, **arguments):
    """One request. "time" and "memory" measure a call of the contestant that takes no arguments."""
    if do == "time":
        return timed(getattr(runs, arguments["call"]), arguments.get("repeat", 1))
    if do == "memory":
        return peak_extra_bytes(getattr(runs, arguments["call"]))
    return getattr(runs, do)(**arguments)


def timed(call, repeat: int) -> float:
    """Seconds of one call, averaged over ``repeat`` calls in a row."""
    gc.collect()
    gc.disable()
    time.sleep(QUIET)
    try:
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        return (time.perf_counter() - start) / repeat
    finally:
        gc.enable()


def peak_extra_bytes(call) -> int:
    """Growth of this process's resident memory while ``call`` runs, at its peak: inputs are there before, results count."""
    gc.collect()
    try:
        with open("/proc/self/clear_refs", "w") as marker:
            marker.write("5")  # forget the peak so far
    except OSError:
        pass  # then the peak since the start counts, which is never smaller
    before = _resident("VmRSS")
    result = call()
    extra = _resident("VmHWM") - before
    del result
    return extra


def _resident(field: str) -> int:
    """Bytes of this process in memory, now (VmRSS) or at its peak (VmHWM). Only Linux tells both; elsewhere it is the peak."""
    if not os.path.exists("/proc/self/status"):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


if __name__ == "__main__":
    serve(sys.argv[1])
