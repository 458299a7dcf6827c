"""The KDA layer on the Triton kernels: the fused decoding step and training, against the layer in plain torch."""

from dataclasses import replace

import pytest
import torch

from minimodel.cache import FixedState
from tests.minimodel.common import assert_within, tiny_config, tiny_model
from tests.minimodel.triton_devices import DEVICES, quick_interpreter, tolerance  # noqa: F401

pytestmark = [pytest.mark.usefixtures("quick_interpreter"), pytest.mark.parametrize("device", DEVICES)]
SOFTPLUS = {"gate_lower_bound": None, "use_full_rank_gate": False}


def layer(dtype=torch.float32, **changes):
    lin = replace(tiny_config().linear_attn_config, head_dim=16, **changes)
    return tiny_model(linear_attn_config=lin).model.layers[0].self_attn.to(dtype)


def hidden(B, T):
    return torch.randn(B, T, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("changes", [{}, SOFTPLUS, {"short_conv_kernel_size": 1}], ids=["k3", "kimi linear", "no taps"])
def test_decoding_step_by_step(device, changes):
    """Each token: what comes out, and what the cache keeps, is what plain torch in float64 gives."""
    exact, m, x = layer(torch.float64, **changes), layer(**changes).to(device), hidden(2, 6)
    ours, theirs = FixedState(), FixedState()
    with torch.no_grad():
        for t in range(6):
            y = m(x[:, t : t + 1].float().to(device), cache=ours, backend="triton")
            expected = exact(x[:, t : t + 1], cache=theirs)
            for a, e in ((y, expected), (ours.state, theirs.state), (ours.tail, theirs.tail)):
                if e.numel():
                    assert_within(a.cpu(), e, 5 * tolerance(device))


def test_decoding_after_a_prompt_and_in_bfloat16(device):
    m, x = layer(torch.bfloat16).to(device), hidden(2, 12)
    ours, theirs = FixedState(), FixedState()
    with torch.no_grad():
        first = m(x[:, :10].bfloat16().to(device), cache=ours, backend="triton")
        parts = [first, *(m(x[:, t : t + 1].bfloat16().to(device), cache=ours, backend="triton") for t in (10, 11))]
        expected = layer(torch.float64)(x, cache=theirs)
    assert ours.state.dtype == torch.float32 and ours.tail.dtype == torch.bfloat16
    assert_within(torch.cat(parts, 1).cpu(), expected, 0.05)
    assert_within(ours.state.cpu(), theirs.state, 0.05)


def test_training_reaches_every_parameter(device):
    exact, m, x = layer(torch.float64), layer().to(device), hidden(2, 20)
    exact(x).square().sum().backward()
    m(x.float().to(device), backend="triton").square().sum().backward()
    for (name, a), (_, e) in zip(m.named_parameters(), exact.named_parameters(), strict=True):
        assert a.grad is not None, name
        assert_within(a.grad.cpu(), e.grad, 5e-5)


def test_a_recorded_layer_is_the_recurrence(device):
    from minimodel import record

    m, x = layer().to(device), hidden(1, 3).float().to(device)
    with record(m) as trace:
        m(x, backend="triton")
    assert trace["layers.0.kda.state"].shape == (1, 3, 2, 16, 16)
