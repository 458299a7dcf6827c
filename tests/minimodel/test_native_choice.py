"""When "auto" takes the C kernels, how they are compiled and kept, and what is said when they can't run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minimodel import delta_rule, kda
from minimodel.delta_rule import native, native_available, why_not_native
from minimodel.delta_rule.native_available import LARGEST
from tests.minimodel.test_delta_rule import inputs

SOURCES = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(native.__file__).parent.glob("native_*.[ch]")))
ROOT = Path(__file__).parents[2]
needs_a_compiler = pytest.mark.skipif(why_not_native() is not None, reason=f'backend "native" {why_not_native()}')
EXAMPLE = """
import sys, torch
from minimodel import kda
from minimodel.delta_rule import why_not_native
draw = torch.Generator().manual_seed(0)
q, k, v = torch.nn.functional.normalize(torch.randn(3, 1, 40, 2, 16, generator=draw), dim=-1)
x = [a.requires_grad_() for a in (q, k, v, -torch.rand(1, 40, 2, 16, generator=draw), torch.rand(1, 40, 2, generator=draw))]

def results(backend):
    o, S = kda(*x, backend=backend)
    return [o, S, *torch.autograd.grad(o.square().sum() + S.square().sum(), x)]

def near(a, b):
    return all(torch.allclose(x, y, rtol=0, atol=1e-5) for x, y in zip(results(a), results(b)))
"""


def start(code, tmp_path, **environment):
    """A fresh Python that runs EXAMPLE and then ``code``, with a cache folder of its own."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **environment}
    return subprocess.Popen([sys.executable, "-c", EXAMPLE + code], cwd=ROOT, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def output(process):
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return out.strip()


def test_both_languages_mean_the_same_sizes():
    """Nothing in C checks how many states Python made room for, nor how many channels it lets in."""
    tokens, tiles = (int(re.search(rf"^#define {name} (\d+)\b", SOURCES, re.M)[1]) for name in ("C", "GROUP"))
    assert native.KEPT_EVERY == tokens * tiles
    floats = "\n".join(re.findall(r"^.*\bfloat\b.*$", SOURCES, re.M))
    buffers = [int(size) for size in re.findall(r"\w\[(\d+)\]", floats) if int(size) > tokens]  # smaller ones are indices
    assert buffers and set(buffers) == {LARGEST}


# ---- the choice ----


@needs_a_compiler
def test_auto(monkeypatch):
    calls = []
    real = delta_rule.kda_native
    monkeypatch.setattr(delta_rule, "kda_native", lambda *x, **options: calls.append(x[0].shape) or real(*x, **options))
    single = inputs(T=20, K=16, V=32, dtype=torch.float32)
    kda(*single)
    assert len(calls) == 1
    kda(*(x[:, :1] for x in single))  # one token is the recurrence
    kda(*single, backend="chunked"), kda(*single, backend="recurrent")
    kda(*(x.double() for x in single)), kda(*(x.bfloat16() for x in single))
    kda(*single[:4], single[4].double())
    kda(*inputs(T=20, K=16, V=12, dtype=torch.float32)), kda(*inputs(T=20, K=24, V=16, dtype=torch.float32))
    kda(*(x.to("meta") for x in single))
    monkeypatch.setenv("K3_NATIVE", "0")
    kda(*single)
    assert len(calls) == 1


@pytest.mark.bad_input
@pytest.mark.parametrize("change, words", [
    (lambda x: x.double(), 'backend "native" takes float32 only, got float64, float64, float64, float64, float64'),
    (lambda x: x.bfloat16(), 'backend "native" takes float32 only, got bfloat16'),
    (lambda x: x.to("meta"), 'backend "native" needs tensors on the CPU, got meta'),
    (lambda x: x[..., :8] if x.dim() == 4 else x, 'backend "native" takes head sizes that are multiples of 16 up to 256, got 8 and 8'),
    (lambda x: x.repeat(1, 1, 1, 17) if x.dim() == 4 else x, "got 272 and 272"),
])  # fmt: skip
def test_asked_for_by_name_where_it_cannot_run(change, words):
    with pytest.raises(ValueError) as caught:
        kda(*(change(x) for x in inputs(K=16, V=16, dtype=torch.float32)), backend="native")
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.bad_input
@pytest.mark.parametrize("value", ["0", " 0 ", "FALSE "])
def test_turned_off(monkeypatch, value):
    monkeypatch.setenv("K3_NATIVE", value)
    assert why_not_native() == "is turned off by the environment variable K3_NATIVE"
    with pytest.raises(ValueError, match="turned off by the environment variable K3_NATIVE"):
        kda(*inputs(K=16, V=16, dtype=torch.float32), backend="native")


# ---- the compiler and the cache ----


@pytest.mark.slow
@needs_a_compiler
def test_compiled_once_and_kept(tmp_path):
    """Two processes start with an empty cache; a third finds the library, a fourth one that it can't load and makes a new one."""
    code = "print(why_not_native(), near('native', 'chunked'))"
    both = [start(code, tmp_path) for _ in range(2)]
    assert [output(one) for one in both] == ["None True"] * 2
    (kept,) = (tmp_path / "cache/k3-made-small").iterdir()
    made = kept.stat().st_mtime_ns
    watched = "import subprocess; ran = []; real = subprocess.run; subprocess.run = lambda *x, **o: ran.append(x) or real(*x, **o)\n"
    assert output(start(watched + code + "; print(len(ran))", tmp_path)) == "None True\n1"  # it only asks for the processor's features
    assert kept.stat().st_mtime_ns == made
    size = kept.stat().st_size
    kept.write_text("made by another system")
    assert output(start(code, tmp_path)) == "None True"
    assert kept.stat().st_size == size and len(list(kept.parent.iterdir())) == 1


@needs_a_compiler
def test_a_damaged_library_is_made_again(tmp_path):
    """Loaded as they are, the first two would end the process, the last one would fail inside kda()."""
    code = "print(why_not_native(), near('native', 'chunked'))"
    assert output(start(code, tmp_path)) == "None True"
    (kept,) = (tmp_path / "cache/k3-made-small").iterdir()
    whole = kept.read_bytes()
    flipped = whole[: len(whole) // 2] + bytes(64) + whole[len(whole) // 2 + 64 :]
    for damaged in (whole[:4096], flipped):
        kept.write_bytes(damaged)
        assert output(start(code, tmp_path)) == "None True"
        assert kept.read_bytes() == whole and len(list(kept.parent.iterdir())) == 1
    other = tmp_path / "other.c"
    other.write_text("int nothing_of_ours;\n")
    subprocess.run([*shlex.split(os.environ.get("CC", "cc")), "-shared", "-fPIC", str(other), "-o", str(kept)], check=True)
    content = kept.read_bytes()  # whole, and under its own name, but without the kernels
    kept.rename(kept.with_name(native_available._named(kept.name.rsplit("-", 1)[0], content)))
    assert output(start(code, tmp_path)) == "None True" and kept.read_bytes() == whole


@needs_a_compiler
def test_a_cache_folder_that_cannot_be_named(tmp_path):
    code = "import os; os.environ['XDG_CACHE_HOME'] = '~nouser/x'\nprint(why_not_native(), near('native', 'chunked'))"
    assert output(start(code, tmp_path)) == "None True"


@needs_a_compiler
def test_a_cache_that_cannot_be_written(tmp_path):
    """And scratch memory that is not zero at first: a number read before it was written would be 1e38."""
    (tmp_path / "cache").write_text("a file where the folder should be")
    code = "print(why_not_native(), near('native', 'chunked'))"
    assert output(start(code, tmp_path, MALLOC_PERTURB_="1")) == "None True"


@pytest.mark.parametrize("compiler, words", [
    ("/nowhere/cc -m64", "needs a C compiler, and there is no /nowhere/cc (the environment variable CC names another)"),
    ('"', "needs a C compiler, and the environment variable CC can't be read as a command: '\"' (No closing quotation)"),
    ("sh compiler.sh", "could not be compiled with sh: error: this compiler is out of order"),
])  # fmt: skip
def test_without_a_compiler(tmp_path, compiler, words):
    """By name, a clear error; by "auto", the torch form. What failed is not tried again."""
    script = tmp_path / "compiler.sh"
    script.write_text(f"echo called >> {tmp_path / 'calls'}\necho warning >&2\necho error: this compiler is out of order >&2\nexit 1\n")
    code = """
for _ in range(2):
    try:
        kda(*x, backend="native")
    except ValueError as error:
        print(error)
print(all(torch.equal(a, b) for a, b in zip(results("auto"), results("chunked"))))
"""
    said = output(start(code, tmp_path, CC=compiler.replace("compiler.sh", str(script)), K3_NATIVE="1")).splitlines()
    assert said == [f'backend "native" {words}'] * 2 + ["True"]
    assert not (tmp_path / "cache").exists()
    if "sh " in compiler:
        assert len((tmp_path / "calls").read_text().split()) == 3  # once for each way to name the processor


@needs_a_compiler
def test_a_compiler_that_cannot_compile_this(tmp_path):
    """It knows the processor, but fails on the sources."""
    script = tmp_path / "cc.sh"
    script.write_text('case "$*" in *-dM*) echo "#define __FINE__ 1";; *) echo "x.c:1:1: error: no such vector" >&2; exit 1;; esac\n')
    code = "print(why_not_native())"
    assert output(start(code, tmp_path, CC=f"sh {script}")) == "could not be compiled with sh: x.c:1:1: error: no such vector"
