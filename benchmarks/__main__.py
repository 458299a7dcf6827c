"""`python -m benchmarks`: measure, print the tables, write JSON. `make bench` is the full run on a CPU."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import gpu, peers, report, store
from benchmarks.samples import ContestantFailed
from benchmarks.sections import SECTIONS, Bench
from minimodel.delta_rule import why_not_native

ROOT = Path(__file__).resolve().parent.parent
WORKING = ROOT / "runs" / "bench"  # runs in progress, and quick ones; git ignores it
RESULTS = ROOT / "benchmarks" / "results"  # complete runs
PAGE = ROOT / "docs" / "performance.md"


def measure(document: dict, path: Path, sections: dict[str, Callable[[], dict]], say: Callable[[str], None]) -> None:
    """Run the sections that ``document`` does not hold yet, and write the file after each."""
    for number, (name, section) in enumerate(sections.items(), 1):
        if name in document["sections"]:
            continue
        say(f"[{number}/{len(sections)}] {name}")
        start = time.perf_counter()
        found = section()
        document["sections"][name] = {**found, "seconds": round(time.perf_counter() - start, 1)}
        store.write(path, document)
        for table in report.TABLES[name](document["sections"][name]):
            say(report.as_text(table))
    document["finished"] = store.now()
    store.write(path, document)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short lengths and few samples: a look, not a measurement")
    parser.add_argument("--gpu", action="store_true", help="measure on a CUDA device against flash-linear-attention's Triton kernels")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of everybody (torch's own choice)")
    parser.add_argument("--no-peers", action="store_true", help="ours only; installs nothing")
    parser.add_argument("--fresh", action="store_true", help="don't continue a run that was stopped")
    sections = [*SECTIONS, *gpu.SECTIONS]
    parser.add_argument("--only", nargs="+", metavar="SECTION", choices=sections, help="these sections only; not published")
    options = parser.parse_args(arguments)
    if options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    if options.gpu and not torch.cuda.is_available():
        print("There is no CUDA device on this machine, so nothing was measured on a GPU.")
        return 1
    kind = "gpu" if options.gpu else "cpu"
    available = gpu.SECTIONS if options.gpu else SECTIONS
    unknown = set(options.only or ()) - set(available)
    if unknown:
        parser.error(f"not a section of a run on a {kind}: {', '.join(sorted(unknown))}; those are: {', '.join(available)}")

    def say(text: str) -> None:
        print(text, flush=True)

    missing = find_peers(kind, options.no_peers, say)
    bench = Bench(options.threads, options.quick, missing, say)
    model, here = ROOT / "minimodel", ROOT / "benchmarks"
    sources = [*model.rglob("*.py"), *model.rglob("*.[ch]"), *here.glob("*.py"), *here.glob("*.txt")]
    why_not = why_not_native()
    chosen = f'chunked, in torch, for "native" {why_not}' if why_not else "native, the C kernels"
    runs = {} if options.gpu else {'kda(backend="auto")': chosen}
    versions = {"torch": torch.__version__, **runs}
    document = store.new(kind, threads=options.threads, quick=options.quick, versions=versions, sources=sources, missing=missing)
    name = "-".join([kind, *(["quick"] if options.quick else []), *sorted(options.only or [])])
    path = WORKING / f"{name}.json"
    if not options.fresh:
        document, why = store.continued(path, document)
        say(why)
    try:
        measure(document, path, {n: (lambda s=s: s(bench)) for n, s in available.items() if not options.only or n in options.only}, say)
    except ContestantFailed as failure:
        say(f"stopped, because our own part failed: {failure}\nFinished sections are kept; the same command goes on from there.")
        return 1
    except KeyboardInterrupt:
        say("stopped. Finished sections are kept; the same command goes on from there.")
        return 130
    for table in report.tables(document):
        if table.title in (report.TARGETS, report.MISSING):
            say(report.as_text(table))
    say(f"\n{path.relative_to(ROOT)} holds all of it")
    if not (options.quick or options.only or options.no_peers):
        store.write(RESULTS / f"{kind}.json", document)
        report.write_page(PAGE, kind, store.read(RESULTS / f"{kind}.json"))
        say(f"published: benchmarks/results/{kind}.json and docs/performance.md")
    return 0


def find_peers(kind: str, skip: bool, say: Callable[[str], None]) -> dict[str, str]:
    """Install the peers of this kind of run; what is missing, and why."""
    wanted = gpu.PEERS if kind == "gpu" else peers.PEERS
    if skip:
        return {peer.label: "left out by --no-peers" for peer in wanted}
    if os.name == "nt":
        return {peer.label: "the peers' environment was only tried on Linux and macOS" for peer in wanted}
    reasons = peers.install({peer.requirements for peer in wanted}, say=say)
    return {peer.label: reasons[peer.requirements] for peer in wanted if peer.requirements in reasons}


if __name__ == "__main__":
    sys.exit(main())
