"""A plain Transformer to compare a K3 with: causal softmax attention (torch's SDPA), SwiGLU, RMSNorm, residual stream, no positions.

Same width, depth and vocabulary as a K3Config, and as many active parameters: the width of SwiGLU is what is left to choose.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from minimodel import K3Config, parameter_budget


class Attention(nn.Module):
    """``W_o softmax(q k^T / sqrt(d)) v``, causal."""

    def __init__(self, D: int, H: int) -> None:
        super().__init__()
        self.H = H
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        q, k, v = (part.unflatten(-1, (self.H, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """``W_down (silu(W_gate x) * W_up x)``."""

    def __init__(self, D: int, width: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(D, 2 * width, bias=False), nn.Linear(width, D, bias=False)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Transformer(nn.Module):
    """Pre-norm layers; ``forward`` gives the mean next-token loss, as training needs it."""

    def __init__(self, vocab: int, D: int, layers: int, H: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, D)
        self.attention = nn.ModuleList(Attention(D, H) for _ in range(layers))
        self.feed_forward = nn.ModuleList(SwiGLU(D, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(D, eps=1e-5) for _ in range(2 * layers + 1))
        self.head = nn.Linear(D, vocab, bias=False)

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
        x = self.embed(ids)
        for i, (mix, feed) in enumerate(zip(self.attention, self.feed_forward, strict=True)):
            x = x + mix(self.norms[2 * i](x))
            x = x + feed(self.norms[2 * i + 1](x))
        logits = self.head(self.norms[-1](x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def swiglu_width(config: K3Config) -> int:
    """The width at which the Transformer has as many active parameters as ``K3ForCausalLM(config)``, to the nearest whole channel."""
    D, L = config.hidden_size, config.num_hidden_layers
    fixed = config.vocab_size * D + L * 4 * D * D + (2 * L + 1) * D  # head, attention, norms
    width = round((parameter_budget(config).active - fixed) / (3 * D * L))
    if width < 1:
        active = parameter_budget(config).active
        raise ValueError(f"config has {active} active parameters, fewer than attention of its width and depth alone")
    return width


def active_parameters(model: Transformer) -> int:
    """All parameters but the embedding, whose rows are looked up; counted as ``parameter_budget(config).active`` does."""
    return sum(p.numel() for p in model.parameters()) - model.embed.weight.numel()


def twin(config: K3Config, *, seed: int = 0) -> Transformer:
    """The plain Transformer of the same width, depth, vocabulary and active parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(
            config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads, swiglu_width(config)
        )
