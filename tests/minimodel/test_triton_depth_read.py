"""The fused read of Attention Residuals against the plain one in float64: result and gradients."""

import pytest
import torch

from minimodel import attention_residual
from tests.minimodel.common import assert_within
from tests.minimodel.triton_devices import DEVICES, quick_interpreter, tolerance  # noqa: F401

from minimodel.triton_depth_read import GROUP, depth_read  # isort: skip  after the check that triton is there

pytestmark = [pytest.mark.usefixtures("quick_interpreter"), pytest.mark.parametrize("device", DEVICES)]


def check(device, lead, N, D, dtype=torch.float32, size=1.0):
    draw = torch.Generator().manual_seed(0)
    sources, query, gain, dh = (torch.randn(s, generator=draw, dtype=torch.float64) for s in ((*lead, N, D), (D,), (D,), (*lead, D)))
    leaves = [x.to(dtype).to(device).requires_grad_() for x in (sources, size * query / D**0.5, gain)]
    exact = [x.detach().cpu().double().requires_grad_() for x in leaves]
    h, expected = depth_read(*leaves), attention_residual(*exact)
    assert h.dtype == dtype
    assert_within(h.cpu(), expected, tolerance(device, dtype))
    actual = torch.autograd.grad(h, leaves, dh.to(h))
    for a, e in zip(actual, torch.autograd.grad(expected, exact, dh), strict=True):
        assert_within(a.cpu(), e, 5 * tolerance(device, dtype))


@pytest.mark.parametrize("lead, N, D", [((2, 3), 9, 48), ((1,), 2, 16), ((), 3, 7), ((2,), 5, 700)])
def test_shapes(device, lead, N, D):
    check(device, lead, N, D)


def test_more_tokens_than_one_program_adds_up(device):
    check(device, (GROUP + 3,), 3, 20)


def test_one_source_is_the_source(device):
    sources, query = torch.randn(2, 1, 20, device=device), torch.randn(20, device=device)
    torch.testing.assert_close(depth_read(sources, query, query), sources[:, 0])


def test_bfloat16_and_large_scores(device):
    check(device, (4,), 4, 64, torch.bfloat16)
    check(device, (4,), 4, 64, size=30.0)
