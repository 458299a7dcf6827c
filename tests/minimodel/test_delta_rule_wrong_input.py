"""The KDA operator, given what it can't take: one clear sentence each."""

import math

import pytest
import torch

from minimodel import kda
from tests.minimodel.test_delta_rule import NAMES, inputs

GOOD = dict(zip(NAMES, inputs(B=2, T=5, H=2), strict=True))


@pytest.mark.bad_input
@pytest.mark.parametrize("changes, error, words", [
    ({"q": GOOD["q"][0]}, ValueError, "q must be [B, T, H, K]"),
    ({"q": GOOD["q"][:, :0]}, ValueError, "q must be [B, T, H, K] with B, T, H, K >= 1, got shape (2, 0, 2, 4)"),
    ({name: x[:0] for name, x in GOOD.items()}, ValueError, "got shape (0, 5, 2, 4)"),
    ({"k": GOOD["k"][:, :4]}, ValueError, "k must have shape (2, 5, 2, 4) to match q (2, 5, 2, 4), got (2, 4, 2, 4)"),
    ({"v": GOOD["v"][:, :, :1]}, ValueError, "v must be [B, T, H, V] = (2, 5, 2, V)"),
    ({"g": GOOD["g"][..., 0]}, ValueError, "g must have shape (2, 5, 2, 4) to match q (2, 5, 2, 4), got (2, 5, 2)"),
    ({"beta": GOOD["g"]}, ValueError, "beta must have shape (2, 5, 2)"),
    ({"q": GOOD["q"].long()}, TypeError, "q must be a floating-point tensor, got torch.int64"),
    ({"beta": 0.5}, TypeError, "beta must be a floating-point tensor, got float"),
    ({"k": GOOD["k"].to("meta")}, ValueError, "k is on meta, q on cpu"),
    ({"g": -GOOD["g"]}, ValueError, "g must be a log-decay <= 0"),
    ({"g": GOOD["g"] * torch.nan}, ValueError, "g must be a log-decay <= 0, got nan"),
    ({"beta": GOOD["beta"] + 1}, ValueError, "beta must lie in [0, 1]"),
    ({"beta": -GOOD["beta"]}, ValueError, "beta must lie in [0, 1]"),
    ({"initial_state": torch.zeros(2, 2, 3, 4)}, ValueError, "initial_state must have shape (2, 2, 4, 3)"),
    ({"initial_state": torch.zeros(2, 2, 4, 3).long()}, TypeError, "initial_state must be a floating-point tensor, got torch.int64"),
    ({"initial_state": 0}, TypeError, "initial_state must be a floating-point tensor, got int"),
    ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, "cu_seqlens needs one packed row (B = 1), got B = 2"),
    ({"backend": "fast"}, ValueError, "backend must be one of"),
    ({"chunk_size": 24}, ValueError, "chunk_size must be a positive multiple of 16, got 24"),
    ({"chunk_size": 0}, ValueError, "chunk_size must be a positive multiple of 16, got 0"),
    ({"chunk_size": 32.0}, TypeError, "chunk_size must be an integer, got 32.0"),
    ({"scale": torch.tensor(0.5)}, TypeError, "scale must be a number, got Tensor"),
    ({"scale": "0.5"}, TypeError, "scale must be a number, got str"),
    ({"scale": math.nan}, ValueError, "scale must be finite, got nan"),
])  # fmt: skip
def test_wrong_arguments(changes, error, words):
    with pytest.raises(error) as caught:
        kda(**{**GOOD, **changes})
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.bad_input
@pytest.mark.parametrize("bounds, error, words", [
    ([0, 5], TypeError, "cu_seqlens must be a 1-D integer tensor of at least 2 boundaries, got list"),
    (torch.tensor([0.0, 5.0]), TypeError, "cu_seqlens must be a 1-D integer tensor"),
    (torch.tensor([[0, 5]]), ValueError, "cu_seqlens must be a 1-D integer tensor"),
    (torch.tensor([0]), ValueError, "at least 2 boundaries, got [0]"),
    (torch.tensor([0, 4]), ValueError, "cu_seqlens must rise from 0 to T = 5, got [0, 4]"),
    (torch.tensor([1, 5]), ValueError, "cu_seqlens must rise from 0 to T = 5, got [1, 5]"),
    (torch.tensor([0, 3, 3, 5]), ValueError, "cu_seqlens must rise from 0 to T = 5, got [0, 3, 3, 5]"),
    (torch.tensor([0, 4, 3, 5]), ValueError, "cu_seqlens must rise from 0 to T = 5, got [0, 4, 3, 5]"),
    (torch.tensor([0, 4, 3, 5], dtype=torch.uint8), ValueError, "cu_seqlens must rise from 0 to T = 5, got [0, 4, 3, 5]"),
])  # fmt: skip
def test_wrong_document_bounds(bounds, error, words):
    with pytest.raises(error) as caught:
        kda(*inputs(), cu_seqlens=bounds)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_named(name, value):
    named = dict(zip(("q", "k", "v", "g", "beta"), inputs(T=3), strict=True))
    named[name] = named[name].clone()
    named[name][0, 1, 0, 0] = value
    with pytest.raises(ValueError, match=f"{name} must be finite, got 1 values"):
        kda(**named)
