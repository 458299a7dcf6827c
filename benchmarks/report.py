"""From the results file to what people read: tables in the terminal, and the same tables between markers in docs/performance.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.targets import OURS, Target, targets
from minimodel.formats import format_bytes, format_count, format_probability

BEGIN, END = "<!-- results of {kind}: written by the benchmark, do not edit -->", "<!-- end of the results of {kind} -->"
NOTHING_YET = {
    "cpu": "There is no complete run on a CPU yet: `make bench` writes its tables here.",
    "gpu": "**GPU numbers are missing.** No GPU was available; `python -m benchmarks --gpu` on a machine with one writes them here.",
}


TARGETS, MISSING = "Targets", "What could not be measured"


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


def tables(document: dict) -> list[Table]:
    """Everything that a results file holds, in reading order. Sections that were not run are left out."""
    made = []
    if document["kind"] == "cpu" and (found := targets(document)):
        made.append(_targets_table(found))
    for name, section in document["sections"].items():
        made += TABLES[name](section)
    reasons = [(who, "everything", why) for who, why in document["missing"].items()]
    reasons += [(m["who"], m["where"], m["why"]) for section in document["sections"].values() for m in section["missing"]]
    if reasons:
        made.append(Table(MISSING, ("who", "where", "why"), reasons))
    return made


def _targets_table(found: list[Target]) -> Table:
    rows = [(t.what, t.wanted, t.measured, "yes" if t.holds else "no") for t in found]
    return Table(TARGETS, ("target", "wanted", "measured", "holds"), rows)


# ---- one table a section ----
def _comparison(title: str, column: str, label: Callable[[dict], str], *, with_limit: bool = True) -> Callable[[dict], list[Table]]:
    """Ours, peers and limit, grouped by ``column``: how many times longer than ours each takes."""

    def make(section: dict) -> list[Table]:
        rows = []
        for value in dict.fromkeys(row[column] for row in section["rows"]):
            of_it = [row for row in section["rows"] if row[column] == value]
            ours = next((row for row in of_it if row["who"] == OURS), None)
            for row in sorted(of_it, key=lambda row: row["best_ms"]):
                share = _share(row) if with_limit else ""
                rows.append((label(row), row["who"], *_times(row), share, _ratio(row, ours), row["wrong"] or ""))
            if with_limit and ours is not None:
                limit = {"best_ms": limit_ms(ours)}
                rows.append((label(ours), "limit: matrix products", milliseconds(limit["best_ms"]), "", "100 %", _ratio(limit, ours), ""))
        header = ["", "who", "best ms", "median ms", "of the limit", "time / ours", "note"]
        kept = [i for i in range(len(header)) if header[i] != "of the limit" or with_limit]
        return [Table(title, tuple(header[i] for i in kept), [tuple(row[i] for i in kept) for row in rows], _gemm_note(section))]

    return make


def limit_ms(row: dict) -> float:
    """The time that the row's FLOPs would take at the rate of the machine's own large matrix product."""
    return row["flops"] / row["gemm_gflops"] / 1e6


def _share(row: dict) -> str:
    return format_probability(limit_ms(row) / row["best_ms"])


def _ratio(row: dict, ours: dict | None) -> str:
    return "" if ours is None else f"{row['best_ms'] / ours['best_ms']:.3g}"


def _times(row: dict) -> tuple[str, str]:
    mark = "" if row["clean"] else " (busy)"
    return milliseconds(row["best_ms"]), milliseconds(row["median_ms"]) + mark


def _gemm_note(section: dict) -> str:
    rates = sorted({row["gemm_gflops"] for row in section["rows"] if "gemm_gflops" in row})
    if not rates:
        return ""
    taken = [row["taken"] for row in section["rows"]]
    return (f"Large float32 matrix product in the same minutes: {rates[0]:.0f} to {rates[-1]:.0f} GFLOP/s. Samples a row: {min(taken)} to "
            f"{max(taken)}. \"busy\": no sample was clean, the median is of all.")  # fmt: skip


def milliseconds(ms: float) -> str:
    """Three significant digits, never in powers of ten: 0.0417, 36.4, 1,240."""
    if ms <= 0:
        raise ValueError(f"ms must be positive, got {ms}")
    rounded = float(f"{ms:.3g}")
    return f"{rounded:,.{max(0, 2 - math.floor(math.log10(rounded)))}f}"


def _backward(section: dict) -> list[Table]:
    (table,) = _comparison("Forward and backward: gradients of q, k, v, g and beta", "T", lambda row: f"T = {row['T']}")(section)
    rows = [(f"T = {row['T']}", row["who"], format_bytes(row["extra_bytes"])) for row in section["rows"]]
    return [table, Table("Memory that a first forward and backward call adds, at its peak", ("", "who", "bytes"), rows)]


def _fresh(section: dict) -> list[Table]:
    rows = [
        (r["call"].replace("_", " and "), f"T = {r['T']}", *(milliseconds(r[name]) for name in ("first_ms", "second_ms")),
         format_bytes(r["extra_bytes"]))
        for r in section["rows"]
    ]  # fmt: skip
    return [Table("Ours in a fresh process", ("call", "", "first call, ms", "second call, ms", "peak extra memory"), rows)]


def _context(section: dict) -> list[Table]:
    rows = [(f"{row['context']:,}", *_times(row)) for row in section["rows"]]
    return [Table("A decode step of ours after a context that was really read", ("tokens read", "best ms", "median ms"), rows)]


def _training(section: dict) -> list[Table]:
    rows = []
    for row in section["rows"]:
        other = next(r for r in section["rows"] if r["T"] == row["T"] and r["who"].startswith("plain"))
        rows.append((
            f"T = {row['T']}, batch {row['B']}", row["who"], format_count(row["active"]), format_count(round(row["tokens_per_second"])),
            *_times(row), f"{row['tokens_per_second'] / other['tokens_per_second']:.2f}",
        ))  # fmt: skip
    header = ("", "model", "active parameters", "tokens/s", "best ms a step", "median ms", "speed / Transformer's")
    return [Table("A whole training step", header, rows)]


def _profile(section: dict) -> list[Table]:
    lengths = list(dict.fromkeys(row["T"] for row in section["rows"]))
    share = {(row["T"], row["part"]): row["share"] for row in section["rows"]}
    parts = sorted({part for _, part in share}, key=lambda part: -share.get((lengths[0], part), 0.0))
    rows = [(part, *(format_probability(share.get((T, part), 0.0)) for T in lengths)) for part in parts]
    return [Table("Where our training step's time goes", ("part", *(f"T = {T}" for T in lengths)), rows)]


def _ceilings(section: dict) -> list[Table]:
    rows = [(row["what"], f"{row['rate']:.4g} {row['unit']}") for row in section["rows"]]
    return [Table("The GPU's own ceilings", ("", "measured"), rows)]


def _gpu(title: str, unit: str) -> Callable[[dict], list[Table]]:
    def make(section: dict) -> list[Table]:
        rows = [
            (row["what"], row["who"], *_times(row), f"{row['rate']:.4g}", format_probability(row["share"]), row["wrong"] or "")
            for row in section["rows"]
        ]
        return [Table(title, ("", "who", "best ms", "median ms", unit, "of the ceiling", "note"), rows)]

    return make


TABLES: dict[str, Callable[[dict], list[Table]]] = {
    "forward": _comparison("Forward", "T", lambda row: f"T = {row['T']}"),
    "after_a_pause": _comparison("Forward: one call of ours after a pause", "T", lambda row: f"T = {row['T']}"),
    "forward_backward": _backward,
    "fresh_process": _fresh,
    "decode": _comparison("Decode: one token for B sessions", "B", lambda row: f"B = {row['B']}", with_limit=False),
    "context": _context,
    "training": _training,
    "step_profile": _profile,
    "gpu_ceilings": _ceilings,
    "gpu_operator": _gpu("The operator on the GPU", "TFLOP/s"),
    "gpu_decode": _gpu("A decode step on the GPU", "GB/s"),
}


# ---- as text, as a page ----
def as_text(table: Table) -> str:
    lines = [table.header, *table.rows]
    widths = [max(len(row[i]) for row in lines) for i in range(len(table.header))]
    body = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in lines]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join(["", table.title, body[0], rule, *body[1:], *([table.note] if table.note else [])])


def as_markdown(table: Table) -> str:
    rows = [table.header, tuple("---" for _ in table.header), *table.rows]
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([f"### {table.title}", "", *body, *(["", table.note] if table.note else [])])


def conditions(document: dict) -> str:
    """On what and when: one line of plain facts."""
    m = document["machine"]
    versions = dict(document["versions"])
    for section in document["sections"].values():
        versions |= section["versions"]
    memory = f", {format_bytes(m['memory_bytes'])} of memory" if m["memory_bytes"] else ""
    where = f"{m['cpu']}, {m['cores']} cores{memory}, {m['system']}, Python {m['python']}"
    what = "; ".join(f"{name}: {version}" for name, version in versions.items())
    return f"Measured {document['started']} to {document['finished']} on {where}, with {document['threads']} threads. Versions: {what}."


def page_block(kind: str, document: dict | None) -> str:
    """What stands between the markers of docs/performance.md."""
    body = [NOTHING_YET[kind]] if document is None else [conditions(document), *(as_markdown(t) for t in tables(document))]
    return "\n\n".join([BEGIN.format(kind=kind), *body, END.format(kind=kind)])


def write_page(page: Path, kind: str, document: dict | None) -> None:
    """Replace the block of ``kind``. Raises ValueError when the page has no such markers."""
    text = page.read_text(encoding="utf-8")
    begin, end = BEGIN.format(kind=kind), END.format(kind=kind)
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{page.name} must have the markers of {kind!r} exactly once")
    before, rest = text.split(begin)
    part = page.with_suffix(".part")
    part.write_text(before + page_block(kind, document) + rest.split(end)[1], encoding="utf-8")
    part.replace(page)
