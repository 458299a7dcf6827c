"""`make test`: set up what is missing, then every test in five parts, with the time of each. Standard library only.

`python .ci/test.py scenes browser` runs these parts only.
"""
import os
import subprocess
import sys
import time

import setup

# Two workers: the suite is planned for two cores. loadscope keeps the cells of one notebook, and the tests of one module, together.
PARALLEL = ["-n", "2", "--dist", "loadscope"]
PARTS = {
    "unit tests": ["tests", "--ignore=tests/animations", "--ignore=tests/browser", "--ignore=tests/site", *PARALLEL],
    "notebooks": ["notebooks", "--nbval", *PARALLEL],  # the exercises' solutions too; a conftest leaves the starters out
    "scenes": ["tests/animations", *PARALLEL],
    "browser": ["tests/browser", "-rP"],  # its measured times are printed
    "docs": ["tests/site"],
}
NO_TEST_RAN = 5  # pytest's exit status


def run_part(name):
    setup.say(f"Running: {name}")
    start = time.time()
    threads = {"OMP_NUM_THREADS": "1", **os.environ}  # the workers would otherwise fight for the cores
    status = subprocess.run([str(setup.PYTHON), "-m", "pytest", *PARTS[name]], cwd=setup.ROOT, env=threads).returncode
    return status, time.time() - start


def main(names):
    unknown = set(names) - set(PARTS)
    if unknown:
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; the parts are: {', '.join(PARTS)}")
    start = time.time()
    setup.main("test")
    rows = [("set-up", 0, time.time() - start)]
    for name in names or PARTS:
        rows.append((name, *run_part(name)))
        if rows[-1][1] == NO_TEST_RAN and name == "scenes" and not setup.can_build_manim():
            rows[-1] = ("scenes", 0, rows[-1][2])  # the set-up has said what is missing, pytest has said what it skipped
    print()
    setup.say("What took how long")
    for name, status, seconds in rows:
        print(f"   {name:<12}{seconds:>6.0f} s   {'ok' if status == 0 else f'FAILED (pytest status {status})'}")
    print(f"   {'total':<12}{time.time() - start:>6.0f} s", flush=True)
    sys.exit(any(status for _, status, _ in rows))


if __name__ == "__main__":
    main(sys.argv[1:])
