"""Whether the C kernels can serve a call: they are compiled at their first use, and kept for later processes.

The system's C compiler makes one small library for this very processor, in about a second. It goes to the user's cache folder, under a
name that holds two hashes. One is of the sources, the compiler and the processor's instruction set: nothing stale is ever loaded, and
machines that share a home folder don't disturb each other. The other is of the library itself: a damaged one would end the process when it
is loaded, so it is made again. Where that folder can't be written, each process compiles for itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp
from threading import Lock

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
FILES = ("native_product.c", "native_tile.c", "native_forward.c", "native_backward.c", "native_threads.c")
HEADERS = ("native_call.h", "native_tile.h")
FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-shared")
FOR_THIS_PROCESSOR = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler knows
NAMES = ("kda_forward", "kda_backward", "kda_in_large_pages")  # what Python calls
LARGEST = 256  # key and value channels
FORKED_WITHOUT_EXEC = 0x40  # PF_FORKNOEXEC in Linux's include/linux/sched.h; the flags are the ninth field of /proc/PID/stat
_lock = Lock()


def why_not_native() -> str | None:
    """What keeps the C kernels from running on this machine, as the end of a sentence; None if nothing does.

    Compiles them at the first call of a process, unless an earlier process has. ``K3_NATIVE=0`` in the environment turns them off.
    """
    if os.environ.get("K3_NATIVE", "1").strip().lower() in ("0", "false", "no", "off"):
        return "is turned off by the environment variable K3_NATIVE"
    if os.name != "posix":
        return "needs Linux or macOS"
    with _lock:
        return _library()[1]


def native_obstacle(tensors: list[Tensor], sizes: tuple[int, ...]) -> str | None:
    """What keeps the kernels from serving these inputs, as the end of a sentence; None if nothing does.

    ``tensors`` are float32 on the CPU, ``sizes`` (K and V) multiples of 16 up to 256.
    """
    if tensors[0].device.type != "cpu":
        return f"needs tensors on the CPU, got {tensors[0].device}"
    if any(x.dtype != torch.float32 for x in tensors):
        return f"takes float32 only, got {', '.join(str(x.dtype).removeprefix('torch.') for x in tensors)}"
    if any(n % 16 or n > LARGEST for n in sizes):
        return f"takes head sizes that are multiples of 16 up to {LARGEST}, got {' and '.join(map(str, sizes))}"
    return why_not_native()


def use_native(backend: str, tensors: list[Tensor], sizes: tuple[int, ...]) -> bool:
    """``backend`` "native": yes, or ValueError with the reason. "auto": where the kernels can serve the inputs."""
    if backend not in ("auto", "native"):
        return False
    obstacle = native_obstacle(tensors, sizes)
    if backend == "native" and obstacle:
        raise ValueError(f'backend "native" {obstacle}')
    return obstacle is None


def library() -> ctypes.CDLL:
    """The compiled kernels. Only after ``why_not_native`` found nothing."""
    found, reason = _library()
    if found is None:
        raise RuntimeError(f'backend "native" {reason}')
    return found


def team() -> ctypes.c_void_p:
    """Address of the function by which torch's OpenMP runs a function on its threads; NULL where there is none.

    A forked process has none either: it inherits OpenMP's books, but not the threads in them, and would wait for those forever. That torch
    was used before the fork can't be seen from here, so on Linux every process that was forked and started no program since counts as one,
    even where this module was first imported after the fork. It then starts threads of its own, which is only slower.
    """
    return ctypes.c_void_p(None if os.getpid() != _loaded_by or _forked() else _gomp_parallel())


_loaded_by = os.getpid()


@cache  # asked for each process: a fork after the first answer is seen by _loaded_by
def _forked() -> bool:
    """Whether Linux says so; False on other systems, which offer no GOMP_parallel either."""
    try:
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()  # the name before may hold anything
        return bool(int(fields[6]) & FORKED_WITHOUT_EXEC)
    except (OSError, ValueError, IndexError):
        return False


@cache
def _gomp_parallel() -> int | None:
    for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):  # a name is looked for in what this library needs, too
        try:
            return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):  # another OpenMP, or none
            continue
    return None


@cache  # what failed is not tried again in this process
def _library() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError as error:
        return None, f"needs a C compiler, and the environment variable CC can't be read as a command: {os.environ['CC']!r} ({error})"
    try:
        flags, features = _processor(compiler)
        command, sources = [*compiler, *FLAGS, *flags], [(FOLDER / name).read_text(encoding="utf-8") for name in HEADERS + FILES]
        made_of = hashlib.sha256("\0".join([*command, features, *sources]).encode()).hexdigest()
        return _load(f"kda-{made_of[:24]}", command), None
    except FileNotFoundError:
        return None, f"needs a C compiler, and there is no {compiler[0]} (the environment variable CC names another)"
    except subprocess.CalledProcessError as error:
        said = next((line for line in error.stderr.splitlines() if "error" in line), f"status {error.returncode}")
        return None, f"could not be compiled with {compiler[0]}: {said}"
    except (OSError, ValueError) as error:
        return None, f"could not be compiled or loaded: {error}"


def _processor(compiler: list[str]) -> tuple[tuple[str, ...], str]:
    """The flags for this processor, and what the compiler then defines: its own version and the instruction set."""
    for flags in FOR_THIS_PROCESSOR:
        asked = [*compiler, *flags, "-dM", "-E", "-x", "c", os.devnull]
        answer = subprocess.run(asked, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if answer.returncode == 0:
            return flags, answer.stdout
    raise subprocess.CalledProcessError(answer.returncode, asked, answer.stdout, answer.stderr)


def _load(name: str, command: list[str]) -> ctypes.CDLL:
    folder = _cache_folder()
    for kept in sorted(folder.glob(f"{name}-*.so")) if folder else ():
        try:
            if kept.name == _named(name, kept.read_bytes()):
                return _opened(kept)
            kept.unlink()  # damaged: loading it could end the process
        except OSError:
            pass  # made for another C library, or not to be read: it is made again
    with TemporaryDirectory(prefix="k3-native-") as scratch:
        made = Path(scratch) / name
        subprocess.run([*command, *(str(FOLDER / file) for file in FILES), "-o", str(made), "-lpthread"],
                       check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)  # fmt: skip
        kept = folder and folder / _named(name, made.read_bytes())
        return _opened(kept if kept and _keep(made, kept) else made)  # a loaded library outlives its file


def _named(name: str, content: bytes) -> str:
    return f"{name}-{hashlib.sha256(content).hexdigest()[:24]}.so"


def _opened(path: Path) -> ctypes.CDLL:
    """A library that can be loaded and has all the names. Raises OSError otherwise."""
    library = ctypes.CDLL(str(path))
    for name in NAMES:
        if not hasattr(library, name):
            raise OSError(f"{path.name} has no {name}")
    return library


def _cache_folder() -> Path | None:
    """None where there is none: no home folder, or a name that can't be one."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "k3-made-small"
    except RuntimeError:
        return None


def _keep(made: Path, kept: Path) -> bool:
    """Put the library into the cache folder, whole or not at all; several processes may do so at once. False where it can't be written."""
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, part = mkstemp(dir=kept.parent, suffix=".part")
    except OSError:
        return False
    try:
        with open(handle, "wb") as file:
            file.write(made.read_bytes())
            file.flush()
            os.fsync(file.fileno())  # or a machine that goes down now could keep the name without the bytes
        os.replace(part, kept)
        return True
    except OSError:
        Path(part).unlink(missing_ok=True)
        return False
