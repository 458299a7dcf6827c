"""`make test`: set up what is missing, then every test in four parts, with the time of each. Standard library only.

`python .ci/test.py scenes browser` runs these parts only.
"""
import os
import subprocess
import sys
import time

import setup

# two workers: the suite is planned for two cores. loadscope keeps the cells of one notebook, and one module's tests, together.
PARALLEL = ["-n", "2", "--dist", "loadscope"]
PARTS = {
    "unit tests": ["tests", *PARALLEL, "-m", "not scene and not browser"],
    "notebooks": ["notebooks", *PARALLEL, "--nbval", "-p", "no:cacheprovider"],
    "scenes": ["tests", *PARALLEL, "-m", "scene"],
    "browser": ["tests/browser", "-m", "browser"],
}


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
    print()
    setup.say("What took how long")
    for name, status, seconds in rows:
        print(f"   {name:<12}{seconds:>6.0f} s   {'ok' if status == 0 else f'FAILED (pytest status {status})'}")
    print(f"   {'total':<12}{time.time() - start:>6.0f} s", flush=True)
    sys.exit(any(status for _, status, _ in rows))


if __name__ == "__main__":
    main(sys.argv[1:])
