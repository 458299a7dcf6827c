"""Every kernel compiles for four GPUs, at K = V = 128, in bfloat16 and float32, without spilling registers, within the shared memory.

The compiler does not hold a kernel to the device's shared memory, so the limits stand here (the vendors' figures for one block). That a
kernel compiles says nothing about how fast it is.
"""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[gpu]' (Linux)")

SHARED_MEMORY = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}  # bytes
KERNELS = {
    "cumulative_decay_kernel", "tiles_kernel", "prepare_kernel", "states_kernel", "outputs_kernel",
    "states_backward_kernel", "writes_backward_kernel", "decay_backward_kernel", "tiles_backward_kernel",
    "cumulative_decay_backward_kernel", "decode_kernel", "read_kernel", "read_weights_backward_kernel", "read_sources_backward_kernel",
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]


SOURCE = "\n".join(p.read_text() for p in [*(ROOT / "minimodel/delta_rule").glob("triton_*.py"), ROOT / "minimodel/triton_depth_read.py"])


def test_the_list_of_kernels_is_complete():
    assert set(re.findall(r"^def (\w+_kernel)\(", SOURCE, flags=re.M)) == KERNELS


def test_offsets_are_64_bit():
    """Tokens x heads x channels passes 2^31: each kernel counts chunks, documents, tokens or batch rows from an int64 program id."""
    from_int64 = r"^    (?:chunk|document|token|batch|group), \w+ = tl\.program_id\(\d\)\.to\(tl\.int64\), "
    assert len(re.findall(from_int64, SOURCE, flags=re.M)) == len(KERNELS)
    assert not re.search(r"(?:chunk|document|token|batch|group) = tl\.program_id", SOURCE)


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED_MEMORY)
def test_ahead_of_time(target, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path)}  # compiled now, not found from an earlier run
    command = [sys.executable, "-m", "tests.minimodel.triton_compile", target]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["kernel"], row["dtype"]) for row in rows} == {(name, dtype) for name in KERNELS for dtype in ("bfloat16", "float32")}
    assert [row for row in rows if row["spilled"]] == []
    assert [row for row in rows if row["shared"] > SHARED_MEMORY[target]] == []
