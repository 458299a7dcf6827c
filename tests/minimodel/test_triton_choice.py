"""Which backend "auto" takes, and what is said when "triton" is asked for and can't run. Needs neither triton nor a GPU."""

import pytest
import torch

from minimodel import kda
from minimodel.delta_rule import triton_available
from minimodel.delta_rule.triton_available import triton_obstacle, use_triton
from tests.minimodel.test_delta_rule import inputs


class OnGPU:
    """As much of a CUDA tensor as the choice looks at."""

    device = torch.device("cuda")

    def __init__(self, dtype=torch.float32):
        self.dtype = dtype


@pytest.fixture
def compiled(monkeypatch):
    """As in a program that does not run in the interpreter, with triton installed."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton_available, "_installed", lambda: True)


@pytest.mark.bad_input
def test_auto(compiled, monkeypatch):
    assert use_triton("auto", [OnGPU(), OnGPU()], (16, 128))
    assert not use_triton("auto", [torch.zeros(1)])
    assert not use_triton("auto", [OnGPU(torch.float64)]) and not use_triton("auto", [OnGPU(), OnGPU(torch.bfloat16)])
    assert not use_triton("auto", [OnGPU()], (16, 24))
    assert not use_triton("chunked", [OnGPU()]) and not use_triton("recurrent", [OnGPU()])
    monkeypatch.setattr(triton_available, "_installed", lambda: False)
    assert not use_triton("auto", [OnGPU()])


@pytest.mark.bad_input
def test_auto_on_the_cpu_stays_in_torch_even_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not use_triton("auto", [torch.zeros(1)])


@pytest.mark.bad_input
def test_asked_for_by_name_on_the_cpu(compiled):
    with pytest.raises(ValueError) as caught:
        kda(*inputs(K=16, V=16, dtype=torch.float32), backend="triton")
    assert str(caught.value) == 'backend "triton" needs tensors on a CUDA or ROCm device, got cpu'


@pytest.mark.bad_input
def test_asked_for_by_name_without_triton(monkeypatch):
    monkeypatch.setattr(triton_available, "_installed", lambda: False)
    with pytest.raises(ValueError, match="needs the package triton, which is not installed"):
        kda(*inputs(K=16, V=16, dtype=torch.float32), backend="triton")


@pytest.mark.bad_input
def test_float64_anywhere_is_refused_by_name():
    arguments = inputs(K=16, V=16, dtype=torch.float32)
    arguments[3] = arguments[3].double()
    with pytest.raises(ValueError, match='backend "triton"'):
        kda(*arguments, backend="triton")
    assert triton_obstacle([torch.zeros(1, dtype=torch.float64)]) is not None
