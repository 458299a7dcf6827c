"""Where the tests of the Triton kernels run: on a GPU if there is one (marker `gpu`), else in Triton's interpreter on CPU tensors."""
import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[gpu]' (Linux)")

from triton.runtime import interpreter  # noqa: E402

from minimodel.delta_rule.triton_common import INTERPRETED  # noqa: E402

IN_INTERPRETER = pytest.mark.skipif(not INTERPRETED, reason="this run compiles kernels for the GPU; TRITON_INTERPRET=1 interprets them")
ON_GPU = pytest.mark.skipif(INTERPRETED, reason="this run is in Triton's interpreter (TRITON_INTERPRET=1, or there is no GPU)")
DEVICES = [pytest.param("cpu", marks=IN_INTERPRETER, id="interpreter"), pytest.param("cuda", marks=[pytest.mark.gpu, ON_GPU], id="gpu")]


@pytest.fixture
def quick_interpreter(monkeypatch):
    """The interpreter prepares triton.language anew for every call of a helper, which takes most of its time. The launch already has."""
    original = interpreter.InterpretedFunction.__call__

    def call(self, *args, **kwargs):
        return (self.rewrite() if self.fn.__module__.startswith("minimodel.") else lambda *a, **k: original(self, *a, **k))(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


def tolerance(device, dtype=torch.float32):
    """Relative to the largest number: bfloat16 keeps eight bits; float32 products on a GPU are three TF32 products."""
    return 2e-2 if dtype == torch.bfloat16 else 1e-5 if device == "cpu" else 3e-5
