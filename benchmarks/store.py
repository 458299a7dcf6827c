"""The results file: one JSON, written atomically after every section, continued where a run was stopped.

A run is continued only where nothing that matters has changed since: the code, the versions, the machine, the threads, the settings.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

SCHEMA = 1
FIELDS = {"schema", "kind", "fingerprint", "started", "finished", "machine", "threads", "quick", "versions", "missing", "sections"}


def new(kind: str, *, threads: int, quick: bool, versions: dict[str, str], sources: Iterable[Path], missing: dict[str, str]) -> dict:
    """An empty document of a run that starts now."""
    document = {
        "schema": SCHEMA, "kind": kind, "fingerprint": "", "started": now(), "finished": None, "machine": machine(),
        "threads": threads, "quick": quick, "versions": versions, "missing": missing, "sections": {},
    }  # fmt: skip
    document["fingerprint"] = fingerprint(document, sources)
    return document


def fingerprint(document: dict, sources: Iterable[Path]) -> str:
    """A hash of all that the numbers depend on."""
    digest = hashlib.sha256()
    settings = {name: document[name] for name in ("schema", "kind", "machine", "threads", "quick", "versions", "missing")}
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for path in sorted(sources):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def continued(path: Path, document: dict) -> tuple[dict, str]:
    """The document to go on with, and a sentence that says why: a stopped run with the same fingerprint, else ``document``."""
    if not path.exists():
        return document, "a new run"
    try:
        found = read(path)
    except ValueError as error:
        return document, f"a new run: {error}"
    if found["finished"] is not None:
        return document, "a new run: the last one was complete"
    if found["fingerprint"] != document["fingerprint"]:
        return document, "a new run: code, versions, machine or settings have changed since the last one"
    return found, f"continuing the run of {found['started']}; done: {', '.join(found['sections']) or 'nothing yet'}"


def read(path: Path) -> dict:
    """A checked results file. Raises ValueError when it is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} is not JSON ({error})") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"{path.name} has no schema {SCHEMA}")
    if set(document) != FIELDS:
        raise ValueError(f"{path.name} must have the fields {sorted(FIELDS)}, got {sorted(document)}")
    for name, section in document["sections"].items():
        if not {"rows", "missing", "versions", "seconds"} <= set(section):
            raise ValueError(f"{path.name}: section {name!r} must have rows, missing, versions and seconds, got {sorted(section)}")
    return document


def write(path: Path, document: dict) -> None:
    """Atomic: a reader sees the old file or the new one. NaN and infinity are written as null, which every JSON reader knows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(_plain(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def _plain(x):
    if isinstance(x, float) and not math.isfinite(x):
        return None
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    return [_plain(value) for value in x] if isinstance(x, list) else x


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def machine() -> dict[str, str | int]:
    """What the numbers were measured on: CPU, cores, memory, system, Python."""
    model = platform.processor() or platform.machine()
    memory = 0
    if Path("/proc/cpuinfo").exists():
        names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": model, "cores": os.cpu_count() or 1, "memory_bytes": memory, "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version()}  # fmt: skip
