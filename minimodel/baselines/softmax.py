"""Softmax attention that keeps keys and values: every head its own, a shared copy for a group of heads, or the newest tokens only."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minimodel.cache import Rows
from minimodel.layers import linear
from minimodel.mla import attention_mask, masked_softmax
from minimodel.trace import Traced


def softmax_attention(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G N K"],
    v: Float[Tensor, "B G N V"],
    allowed: Bool[Tensor, "#B 1 T N"],
) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H T N"]]:
    """``softmax(q k^T / sqrt(K)) v`` over the allowed keys; query head h reads key head floor(h G / H).

    Args:
        q: queries of H heads [B, H, T, K].
        k, v: keys [B, G, N, K] and values [B, G, N, V] of G heads; H is a multiple of G.
        allowed: True where a query may read a key, at least once in every row.

    Returns: outputs [B, H, T, V] and the attention weights [B, H, T, N] (float32, or float64 for float64 inputs).
    """
    H, G = q.shape[1], k.shape[1]
    if H % G:
        raise ValueError(f"q has {H} heads, k has {G}: the heads of q must be a multiple of the heads of k")
    k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
    p = masked_softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, allowed)
    return p.to(v.dtype) @ v, p


class MultiHeadAttention(Traced):
    """Every head keeps its own keys and values of every token (Vaswani et al. 2017), without positions like the rest of the model.

    Per head, with K = qk_nope_head_dim for queries, keys and values: ``y = W_o softmax_attention(W_q x, W_k x, W_v x)``.
    The cache gains 2 H K numbers a token.
    """

    def __init__(self, config, *, kv_heads: int | None = None, window: int | None = None) -> None:
        super().__init__()
        D, H, K = config.hidden_size, config.num_attention_heads, config.qk_nope_head_dim
        G = H if kv_heads is None else kv_heads
        if G < 1 or H % G:
            raise ValueError(f"kv_heads={G} must divide num_attention_heads={H}")
        self.num_heads, self.kv_heads, self.head_dim = H, G, K
        self.window = window
        self.q_proj, self.k_proj, self.v_proj = linear(D, H * K), linear(D, G * K), linear(D, G * K)
        self.o_proj = linear(H * K, D)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        cache: Rows | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        cu_seqlens: Int[Tensor, "bounds"] | None = None,
        padding: Int[Tensor, "B"] | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "B T D"]:
        """Read the allowed past. ``padding`` counts each row's left padding, cached tokens included; ``mask`` and ``backend`` are KDA's."""
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        rows = torch.stack([self.k_proj(x), self.v_proj(x)], 2).unflatten(-1, (self.kv_heads, self.head_dim))  # [B, T, 2, G, K]
        if cache is not None:
            if padding is not None:
                padding = (padding - cache.dropped).clamp_min(0)  # rows that slid out of the window took their padding along
            rows = cache.append(rows)
        k, v = rows.transpose(1, 3).unbind(2)
        allowed = attention_mask(x.shape[1], rows.shape[1], x.device, padding, cu_seqlens, self.window)
        o, p = softmax_attention(q, k, v, allowed)
        self.emit(attention=p)
        return self.o_proj(o.transpose(1, 2).flatten(2))


class GroupedQueryAttention(MultiHeadAttention):
    """Groups of heads share one copy of keys and values (Ainslie et al. 2023): num_key_value_groups copies instead of one a head."""

    def __init__(self, config) -> None:
        super().__init__(config, kv_heads=config.num_key_value_groups)


class SlidingWindowAttention(MultiHeadAttention):
    """A token reads itself and the sliding_window - 1 tokens before it; older keys and values are dropped (Mistral 7B, 2023)."""

    def __init__(self, config) -> None:
        super().__init__(config, window=config.sliding_window)
