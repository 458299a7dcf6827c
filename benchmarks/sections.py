"""What is measured, section by section. Each returns plain data for the JSON file; report.py turns that into tables.

A section starts its own processes and measures its own matrix-product rate, so that every ratio is between numbers of the same minutes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from benchmarks.inputs import Shape
from benchmarks.peers import ONE_TOKEN, PEERS, PYTHON, PeerName
from benchmarks.process import Process
from benchmarks.reference import TOLERANCE, complaint, largest_error, load_results, reference
from benchmarks.samples import ContestantFailed, Samples, Turns, summarize, take_turns
from benchmarks.targets import OURS, UNCHECKED
from benchmarks.training import TOKENS

PROBE = 1024  # the matrix product before and after every call
GEMM = 2048  # the machine's large-GEMM rate
SAMPLE = 8192  # tokens of a forward sample: short lengths are called several times in a row
GRADIENT_TOKENS = 256  # gradients are compared with float64 autograd of the recurrence at this length
STARTING = 300.0  # seconds that importing a library may take on a busy machine


@dataclass
class Bench:
    """The settings of a run, and what can't be measured in it: peer -> reason."""

    threads: int
    quick: bool
    missing: dict[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = print

    @cached_property
    def effort(self) -> dict:
        return {"least": 2, "most": 3, "budget": 0.5} if self.quick else {"least": 3, "most": 12, "budget": 4.0}

    def available(self, peers: Sequence[PeerName]) -> list[PeerName]:
        """Those whose environment could be made."""
        broken = {peer.requirements for peer in PEERS if peer.label in self.missing}
        return [peer for peer in peers if peer.requirements not in broken]


class Group:
    """The processes of one section and what came out so far."""

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        self.bench, self.stack = bench, stack
        self.peers: set[str] = set()
        self.processes: dict[str, Process] = {}
        self.about: dict[str, dict] = {}
        self.rows: list[dict] = []
        self.missing: list[dict] = []
        self.gemm_rates: list[float] = []
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

    def start(self, names: dict[str, str], peers: Sequence[PeerName] = (), environment: dict[str, str] | None = None) -> None:
        """Start our contestants (label -> name for worker.py; ``environment`` is theirs) and the peers, all at once; then wait for each."""
        self.peers |= {peer.label for peer in peers}
        threads = {"threads": self.bench.threads}
        started = {who: Process(name, environment=environment, **threads) for who, name in names.items()}
        started |= {peer.label: Process(peer.name, python=PYTHON, **threads) for peer in peers}
        for process in started.values():
            self.stack.enter_context(process)
        for who, process in started.items():
            with self.reporting(who, "start"):
                self.about[who] = process.ask("describe", patience=STARTING)
                self.processes[who] = process

    @contextmanager
    def reporting(self, who: str, where: str) -> Iterator[None]:
        """A peer that fails is out of the section and stands in the table with its reason. Without ours there is nothing to compare."""
        try:
            yield
        except ContestantFailed as failure:
            if who not in self.peers:
                raise
            self.processes.pop(who, None)
            self.missing.append({"who": who, "where": where, "why": str(failure)})
            self.bench.say(f"   {who}: {failure}")

    def probe(self) -> float:
        return self.processes[OURS].ask("gemm", n=PROBE)

    def measure_gemm(self) -> float:
        """The best rate of five large products now, in FLOP/s; the section keeps the best of all."""
        seconds = min(self.processes[OURS].ask("gemm", n=GEMM) for _ in range(5))
        self.gemm_rates.append(2 * GEMM**3 / seconds)
        return max(self.gemm_rates)

    def check(self, call: str, shape: Shape, who: str) -> float:
        """Run ``call`` once, which also warms up, and return its largest relative error."""
        path = self.folder / "results.npz"
        self.processes[who].ask("save", call=call, path=str(path))
        about = self.about[who]
        return largest_error(load_results(path), self._judge(call, shape, about["one_decay_a_head"]))

    def _judge(self, call: str, shape: Shape, one_decay_a_head: bool) -> dict:
        key = (call, shape, one_decay_a_head)
        if getattr(self, "_judged", (None,))[0] != key:
            self._judged = (key, reference(call, shape, one_decay_a_head=one_decay_a_head))
        return self._judged[1]

    def take_turns(self, where: str, calls: dict[str, Callable[[], float]]) -> Turns:
        """Samples of everybody in ``calls``; a peer that failed on the way is out of the section."""
        turns = take_turns(calls, self.probe, **self.bench.effort)
        for who, why in turns.failures.items():
            with self.reporting(who, where):
                raise ContestantFailed(why)
        return turns

    def compare(self, call: str, errors: dict[str, float], *, repeat: int = 1, **columns) -> None:
        """Take turns with everybody in ``errors`` and write a row for each."""
        gemm = self.measure_gemm()
        calls = {who: self._call(who, call, repeat) for who in errors}
        turns = self.take_turns(call, calls)
        gemm = max(gemm, self.measure_gemm())
        for who, samples in turns.samples.items():
            if samples.seconds:
                row = {"who": who, **columns, **timing(samples, turns.probes), "gemm_gflops": round(gemm / 1e9, 2)}
                self.rows.append({**row, "error": errors[who], "wrong": complaint(errors[who], TOLERANCE[call])})

    def _call(self, who: str, call: str, repeat: int) -> Callable[[], float]:
        return lambda: self.processes[who].ask("time", call=call, repeat=repeat)

    def result(self) -> dict:
        versions = {who: about["version"] for who, about in self.about.items() if "version" in about}
        return {"rows": self.rows, "missing": self.missing, "versions": versions}


def timing(samples: Samples, probes: list[float]) -> dict:
    s = summarize(samples, min(probes))
    return {"best_ms": round(1e3 * s.best, 5), "median_ms": round(1e3 * s.median, 5), "clean": s.clean, "taken": s.taken}


@contextmanager
def group(bench: Bench) -> Iterator[Group]:
    with ExitStack() as stack:
        yield Group(bench, stack)


def sizes(shape: Shape) -> dict[str, int]:
    return {"T": shape.T, "B": shape.B, "H": shape.H, "K": shape.K, "seed": 0}


# ---- the operator ----
def forward(bench: Bench) -> dict:
    """Outputs and final state. At the longest T only ours and ggml: the others would take minutes."""
    with group(bench) as g:
        g.start({OURS: "ours"}, bench.available(PEERS))
        for T in (512, 2048) if bench.quick else (512, 2048, 8192, 65536):
            bench.say(f"   forward, T = {T}")
            shape, errors = Shape(T), {}
            for who in list(g.processes):
                if T > 8192 and who not in (OURS, "ggml, C"):
                    continue
                with g.reporting(who, f"forward, T = {T}"):
                    g.processes[who].ask("prepare", **sizes(shape))
                    errors[who] = g.check("forward", shape, who)
            g.compare("forward", errors, repeat=max(1, SAMPLE // T), T=T, flops=shape.flops())
        return g.result()


def after_a_pause(bench: Bench) -> dict:
    """Ours alone, one call a sample: its threads sleep, and others' numbers are in the caches, when the clock starts."""
    with group(bench) as g:
        g.start({OURS: "ours"})
        for T in (512, 2048) if bench.quick else (512, 2048, 8192, 65536):
            g.processes[OURS].ask("prepare", **sizes(Shape(T)))
            g.compare("forward", {OURS: g.check("forward", Shape(T), OURS)}, T=T, flops=Shape(T).flops())
        return g.result()


def forward_backward(bench: Bench) -> dict:
    """Outputs, then the gradients of q, k, v, g and beta. Every length in fresh processes, whose first call shows the memory."""
    results = []
    for T in (512,) if bench.quick else (2048, 8192):
        with group(bench) as g:
            bench.say(f"   forward and backward, T = {T}")
            g.start({OURS: "ours"}, [peer for peer in bench.available(PEERS) if peer.differentiable])
            memory, errors = {}, {}
            for who in list(g.processes):
                with g.reporting(who, f"forward and backward, T = {T}"):
                    process = g.processes[who]
                    process.ask("prepare", **sizes(Shape(T)))
                    memory[who] = process.ask("memory", call="forward_backward")
                    small = Shape(GRADIENT_TOKENS)
                    process.ask("prepare", **sizes(small))
                    errors[who] = g.check("forward_backward", small, who)
                    process.ask("prepare", **sizes(Shape(T)))
            # a backward pass costs twice the forward one: two products for each of the forward's
            g.compare("forward_backward", errors, T=T, flops=3 * Shape(T).flops())
            for row in g.rows:
                row["extra_bytes"] = memory[row["who"]]
            results.append(g.result())
    return {
        "rows": [row for r in results for row in r["rows"]],
        "missing": [m for r in results for m in r["missing"]],
        "versions": results[-1]["versions"],
    }


def fresh_process(bench: Bench) -> dict:
    """Ours alone: the first and the second call after the import, and the memory that one call adds. The cache folder is empty, so that the
    first call compiles the C kernels."""
    shape, rows = Shape(512 if bench.quick else 8192), []
    for call in ("forward", "forward_backward"):
        first, second, extra = [], [], []
        for _ in range(1 if bench.quick else 3):
            with group(bench) as g:
                g.start({OURS: "ours"}, environment={"XDG_CACHE_HOME": str(g.folder)})
                process = g.processes[OURS]
                process.ask("prepare", **sizes(shape))
                first.append(process.ask("time", call=call))
                second.append(process.ask("time", call=call))
            with group(bench) as g:
                g.start({OURS: "ours"})
                g.processes[OURS].ask("prepare", **sizes(shape))
                extra.append(g.processes[OURS].ask("memory", call=call))
        rows.append({
            "who": OURS, "call": call, "T": shape.T, "first_ms": round(1e3 * min(first), 3), "second_ms": round(1e3 * min(second), 3),
            "extra_bytes": max(extra),
        })  # fmt: skip
    return {"rows": rows, "missing": [], "versions": {}}


def decode(bench: Bench) -> dict:
    """One token for each of B sessions, each with a state of its own."""
    with group(bench) as g:
        g.start({OURS: "ours", UNCHECKED: "ours:unchecked"}, bench.available(ONE_TOKEN))
        for B in (1, 4) if bench.quick else (1, 4, 16, 64):
            bench.say(f"   decode, B = {B}")
            shape, errors = Shape(1, B=B), {}
            for who in list(g.processes):
                with g.reporting(who, f"decode, B = {B}"):
                    g.processes[who].ask("prepare_decode", B=B, H=shape.H, K=shape.K, seed=0)
                    errors[who] = g.check("decode", shape, who)
            g.compare("decode", errors, repeat=20 if bench.quick else max(20, 400 // B), B=B)
        return g.result()


def context(bench: Bench) -> dict:
    """A decode step after 1k to 1M tokens that were really read."""
    lengths = [1024, 4096] if bench.quick else [1024, 16_384, 131_072, 1_048_576]
    with group(bench) as g:
        bench.say(f"   reading {lengths[-1]} tokens")
        g.start({OURS: "ours"})
        process, size = g.processes[OURS], Shape(1)
        process.ask("read_context", tokens=lengths, segment=8192, H=size.H, K=size.K, seed=0, patience=300.0)
        calls = {str(n): (lambda n=n: process.ask("decode_after", tokens=n, steps=200)) for n in lengths}
        turns = g.take_turns("decode after a context", calls)
        rows = [{"who": OURS, "context": int(n), **timing(s, turns.probes)} for n, s in turns.samples.items()]
        return {"rows": rows, "missing": g.missing, "versions": {}}


# ---- the whole model ----
def training(bench: Bench) -> dict:
    """Tokens a second of a training step: K3Config.mini() and its plain Transformer twin, with the same number of active parameters."""
    with group(bench) as g:
        models = {"minimodel K3Config.mini()": "training:k3", "plain Transformer": "training:transformer"}
        g.start({OURS: "ours", **models})  # ours makes the probes
        rows = []
        for T, B in {256: 1}.items() if bench.quick else TOKENS.items():
            bench.say(f"   training step, T = {T}")
            calls = {}
            for who in models:
                g.processes[who].ask("prepare", T=T, B=B)
                g.processes[who].ask("time", call="step")
                calls[who] = (lambda p: lambda: p.ask("time", call="step"))(g.processes[who])
            turns = g.take_turns("training step", calls)
            for who, samples in turns.samples.items():
                row = {"who": who, "T": T, "B": B, **timing(samples, turns.probes), **g.about[who]}
                rows.append({**row, "tokens_per_second": round(B * T / summarize(samples, min(turns.probes)).best, 1)})
        return {"rows": rows, "missing": g.missing, "versions": {}}


def step_profile(bench: Bench) -> dict:
    """Share of our training step by part."""
    rows = []
    with group(bench) as g:
        g.start({"k3": "training:k3"})
        for T, B in {256: 1}.items() if bench.quick else TOKENS.items():
            bench.say(f"   profile of a training step, T = {T}")
            g.processes["k3"].ask("prepare", T=T, B=B)
            found = g.processes["k3"].ask("profile", patience=300.0)
            rows += [{"T": T, "B": B, "part": part, "share": round(share, 4)} for part, share in found.items()]
    return {"rows": rows, "missing": [], "versions": {}}


SECTIONS = {
    "forward": forward, "after_a_pause": after_a_pause, "forward_backward": forward_backward, "fresh_process": fresh_process,
    "decode": decode, "context": context, "training": training, "step_profile": step_profile,
}  # fmt: skip
