"""Four bits for the routed experts, and for nothing else (K3 report 4.1.4): trained in the grid first, then stored in it.

:func:`train_in_four_bits` rounds in every forward pass and lets gradients through, as K3 does from supervised fine-tuning onward;
:func:`quantize_model` then replaces the weights by their codes: 4.25 bits each, really. Attention, latent projections, shared
experts, router, embeddings and head keep their precision.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from minimodel.latent_moe import RoutedExperts, run_experts
from minimodel.mxfp4 import BLOCK, dequantize_mxfp4, quantize_mxfp4
from minimodel.mxfp8 import fake_quantize_mxfp8

__all__ = ["PackedExperts", "bits_per_weight", "quantize_model", "train_in_four_bits"]

WEIGHTS = ("w1", "w3", "w2")


def train_in_four_bits(model: nn.Module, on: bool = True) -> int:
    """From now on every forward pass rounds the routed experts' weights to MXFP4 and what enters them to MXFP8, straight-through.

    The weights themselves stay in full precision and go on learning. ``on=False`` ends it. Returns how many layers were switched.
    Raises: ValueError if the model has no routed experts, or widths that blocks of 32 do not divide.
    """
    found = _routed_experts(model)
    for _, _, experts in found:
        experts.rounding = on
    return len(found)


def quantize_model(model: nn.Module) -> int:
    """Replace every routed expert's weights, in place, by their MXFP4 codes. Such a model answers and no longer trains.

    Its outputs equal those of ``train_in_four_bits`` bit for bit: one rounding, written two ways. Returns the bytes of codes and scales.
    Raises: ValueError if the model has no routed experts, or widths that blocks of 32 do not divide; nothing is changed then.
    """
    packed = [(parent, name, PackedExperts(experts)) for parent, name, experts in _routed_experts(model)]
    for parent, name, experts in packed:
        setattr(parent, name, experts)
    return sum(b.nbytes for _, _, experts in packed for b in experts.buffers())


class PackedExperts(nn.Module):
    """Routed experts as codes [E, rows, N/2] and scales [E, rows, N/32]; only the experts that tokens go to are unpacked."""

    def __init__(self, experts: RoutedExperts) -> None:
        super().__init__()
        self.config, self.dtype = experts.config, experts.w1.dtype
        for name in WEIGHTS:
            codes, scale = quantize_mxfp4(getattr(experts, name))
            self.register_buffer(f"{name}_packed", codes)
            self.register_buffer(f"{name}_scale", scale)

    def forward(
        self, z: Float[Tensor, "S L"], weights: Float[Tensor, "S k"], indices: Int[Tensor, "S k"]
    ) -> Float[Tensor, "S L"]:
        """The same sum as :class:`RoutedExperts`, with weights unpacked where they are used."""
        return run_experts(self.weight, fake_quantize_mxfp8, z, weights, indices, len(self.w1_packed), self.config)

    def weight(self, name: str, expert: int) -> Float[Tensor, "O I"]:
        """One expert's matrix."""
        codes: UInt8[Tensor, "O half"] = getattr(self, f"{name}_packed")[expert]
        return dequantize_mxfp4(codes, getattr(self, f"{name}_scale")[expert], dtype=self.dtype)


def _routed_experts(model: nn.Module) -> list[tuple[nn.Module, str, RoutedExperts]]:
    """(parent, attribute, experts) of every layer that has them."""
    found = [(parent, name, m) for parent in model.modules() for name, m in parent.named_children() if isinstance(m, RoutedExperts)]
    if not found:
        raise ValueError("model has no routed experts to quantize")
    for _, _, experts in found:
        for name in WEIGHTS:
            if (width := getattr(experts, name).shape[-1]) % BLOCK:
                raise ValueError(f"model: the routed experts' {name} has rows of {width} weights, which blocks of {BLOCK} do not divide")
    return found


@torch.no_grad()
def bits_per_weight(model: nn.Module) -> float:
    """Stored bits a routed-expert weight of a quantized model: 4.25."""
    packed = [m for m in model.modules() if isinstance(m, PackedExperts)]
    if not packed:
        raise ValueError("model has no packed experts: call quantize_model first")
    weights = sum(2 * getattr(m, f"{name}_packed").numel() for m in packed for name in WEIGHTS)
    return 8 * sum(b.nbytes for m in packed for b in m.buffers()) / weights
