"""The other end of worker.py: start a contestant's process, ask it, and turn whatever goes wrong into one sentence."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.samples import ContestantFailed

ROOT = Path(__file__).resolve().parent.parent


class Process:
    """A contestant in a process of its own. Use it in a ``with`` block; it starts at once."""

    def __init__(self, name: str, *, python: str | Path = sys.executable, threads: int, environment: dict[str, str] | None = None) -> None:
        self.name = name
        counts = {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "MKL", "OPENBLAS")}
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.worker", name], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            env={**os.environ, **counts, **offline, **(environment or {})},
        )  # fmt: skip

    def ask(self, do: str, *, patience: float = 240.0, **arguments: Any) -> Any:
        """The contestant's answer. Raises ContestantFailed with the reason when it has none within ``patience`` seconds."""
        try:
            self._process.stdin.write((json.dumps({"do": do, **arguments}) + "\n").encode())
            self._process.stdin.flush()
            line = self._read_line(patience)
        except BrokenPipeError:
            line = b""
        if not line:
            raise ContestantFailed(self._how_it_ended())
        answer = json.loads(line)
        if "failed" in answer:
            raise ContestantFailed(presentable(answer["failed"]))
        return answer["ok"]

    def _read_line(self, patience: float) -> bytes:
        deadline = time.monotonic() + patience
        line = b""
        descriptor = self._process.stdout.fileno()
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._process.kill()
                raise ContestantFailed(f"no answer within {patience:.0f} s")
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                return b""
            line += piece
        return line

    def _how_it_ended(self) -> str:
        status = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return presentable(f"its process ended with status {status}" + (f": {lines[-1]}" if lines else ""))

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()


def presentable(reason: str) -> str:
    """A reason on one line of the table: no folders of this machine, not longer than a sentence."""
    line = re.sub(r"(?<![\w.])(/[\w.@+-]+)+/(?=[\w.@+-])", "", " ".join(reason.split()))
    return line if len(line) <= 200 else line[:197] + "..."
