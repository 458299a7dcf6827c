"""The peers' environment: `benchmarks/venv`, made here with plain pip, so that nobody has to install them to use the project.

Each requirements file is installed by itself. What can't be installed is missing from the table with the reason pip gave.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.process import presentable

FOLDER = Path(__file__).resolve().parent
VENV = FOLDER / "venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


@dataclass(frozen=True)
class PeerName:
    """A row of the tables: the contestant's name for worker.py, what people read, and the file that installs it."""

    name: str
    label: str
    requirements: str
    differentiable: bool = True


PEERS = (
    PeerName("ggml", "ggml, C", "ggml.txt", differentiable=False),
    PeerName("fla:64", "fla naive_chunk_kda, chunk 64", "torch_peers.txt"),
    PeerName("fla:16", "fla naive_chunk_kda, chunk 16", "torch_peers.txt"),
    PeerName("kimi:64", "transformers Kimi Linear, chunk 64", "torch_peers.txt"),
    PeerName("kimi:16", "transformers Kimi Linear, chunk 16", "torch_peers.txt"),
    PeerName("gdn", "transformers Gated DeltaNet (one decay a head)", "torch_peers.txt"),
    PeerName("mlx", "mlx-lm on MLX's CPU backend", "mlx.txt"),
)

ONE_TOKEN = (  # the same libraries decode with functions of their own
    PeerName("ggml", "ggml, C", "ggml.txt"),
    PeerName("fla", "fla naive_recurrent_kda", "torch_peers.txt"),
    PeerName("kimi", "transformers Kimi Linear, recurrent", "torch_peers.txt"),
    PeerName("gdn", "transformers Gated DeltaNet, recurrent (one decay a head)", "torch_peers.txt"),
    PeerName("mlx", "mlx-lm on MLX's CPU backend", "mlx.txt"),
)


def install(requirements: set[str], *, say: Callable[[str], None] = print) -> dict[str, str]:
    """Install what is not there yet. Returns requirements file -> reason for those that can't be installed."""
    if not requirements:
        return {}
    if not PYTHON.exists():
        say("making the peers' environment, benchmarks/venv")
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    missing = {}
    for name in sorted(requirements):
        text = (FOLDER / name).read_text(encoding="utf-8")
        state = hashlib.sha256(text.encode()).hexdigest()
        stamp = VENV / f"{name}.json"
        if stamp.exists() and json.loads(stamp.read_text())["state"] == state:
            continue
        say(f"installing {name}: {', '.join(line for line in text.splitlines() if line and not line.startswith('#'))}")
        pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "-r", str(FOLDER / name)]
        start = time.perf_counter()
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            missing[name] = why_pip_failed(done.stderr)
            say(f"   not installed: {missing[name]}")
            continue
        say(f"   done in {time.perf_counter() - start:.0f} s")
        part = stamp.with_suffix(".part")
        part.write_text(json.dumps({"state": state}))
        part.replace(stamp)
    return missing


def why_pip_failed(stderr: str) -> str:
    """The last error line that pip printed."""
    errors = [line for line in stderr.splitlines() if "error" in line.lower()]
    return presentable(f"pip could not install it ({errors[-1].strip()})" if errors else "pip could not install it and gave no reason")
