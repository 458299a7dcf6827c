"""Gated MLA: exact recall from one small latent a token, without positions, behind an output gate (K3 report 2.1.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minimodel.cache import Rows
from minimodel.layers import RMSNorm, linear, wide
from minimodel.trace import Traced

LATENT_EPS = 1e-6  # the two latent norms keep their class default in the released code; every other norm uses rms_norm_eps


class GatedMLA(Traced):
    """The exact-recall mixer of every fourth layer.

    With L = kv_lora_rank, and per head nope | extra query-key channels and V value channels::

        q = W_qb RMSNorm(W_qa x)  (or W_q x)     [c | e] = W_kva x       cached a token: RMSNorm(c) and e, L + extra numbers
        [k | v]_h = W_kvb RMSNorm(c)             scores = (q_nope . k_h + q_extra . e) / sqrt(nope + extra)
        y = W_o [sigmoid(W_g x) * softmax(scores) v]

    ``e`` is what other models rotate by position. K3 never does (NoPE): time comes from the KDA layers' decays. So one token's
    query can be *absorbed* into the latent space, ``W_kvb,K^T q_nope``, and decoding never expands the cache.
    """

    def __init__(self, config) -> None:
        super().__init__()
        D, H = config.hidden_size, config.num_attention_heads
        self.num_heads = H
        self.nope, self.extra, self.v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.rank = config.kv_lora_rank
        self.full_rank_query = config.q_lora_rank is None
        if self.full_rank_query:
            self.q_proj = linear(D, H * (self.nope + self.extra))
        else:
            self.q_a_proj = linear(D, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_EPS)
            self.q_b_proj = linear(config.q_lora_rank, H * (self.nope + self.extra))
        self.kv_a_proj_with_mqa = linear(D, self.rank + self.extra)
        self.kv_a_layernorm = RMSNorm(self.rank, LATENT_EPS)
        self.kv_b_proj = linear(self.rank, H * (self.nope + self.v_dim))
        self.g_proj = linear(D, H * self.v_dim) if config.mla_use_output_gate else None
        self.o_proj = linear(H * self.v_dim, D)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        cache: Rows | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        padding: Int[Tensor, "B"] | None = None,
        cu_seqlens: Int[Tensor, "bounds"] | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "B T D"]:
        """Read the whole past. ``padding`` counts each row's left padding, cached tokens included; ``mask`` and ``backend`` are KDA's."""
        q = self.q_proj(x) if self.full_rank_query else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (self.num_heads, self.nope + self.extra)).transpose(1, 2)
        c, e = self.kv_a_proj_with_mqa(x).split([self.rank, self.extra], -1)
        latent = torch.cat([self.kv_a_layernorm(c), e], -1)
        if cache is not None:
            latent = cache.append(latent)
        one_token = x.shape[1] == 1 and cache is not None
        # from the start, unpadded, one document: causality is all there is to mask, and torch's kernel then skips half the work
        causal = latent.shape[1] == x.shape[1] and cu_seqlens is None and (padding is None or not bool((padding > 0).any()))
        allowed = None
        if one_token or self.tracing or not causal:
            allowed = attention_mask(x.shape[1], latent.shape[1], x.device, padding, cu_seqlens)
        o = self._absorbed(q, latent, allowed) if one_token else self._expanded(q, latent, allowed)
        o = o.transpose(1, 2).flatten(2)
        if self.g_proj is not None:
            gate = torch.sigmoid(self.g_proj(x))
            self.emit(gate=gate.unflatten(-1, (self.num_heads, self.v_dim)))
            o = gate * o
        self.emit(latent=latent)
        return self.o_proj(o)

    def _expanded(self, q: Tensor, latent: Tensor, allowed: Tensor | None) -> Tensor:
        """Prefill: every head's keys and values are rebuilt from the latents. ``allowed=None``: plain causal. [B, H, T, V]"""
        c, e = latent.split([self.rank, self.extra], -1)
        k, v = self.kv_b_proj(c).unflatten(-1, (self.num_heads, self.nope + self.v_dim)).transpose(1, 2).split([self.nope, self.v_dim], -1)
        k = torch.cat([k, e.unsqueeze(1).expand(-1, self.num_heads, -1, -1)], -1)
        if self.tracing:
            p = masked_softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, allowed)
            self.emit(attention=p)
            return p.to(v.dtype) @ v
        # the fused kernel wants values as wide as keys; without it, all T x N scores are stored
        v = F.pad(v, (0, max(0, q.shape[-1] - self.v_dim)))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=allowed is None)
        return o[..., : self.v_dim]

    def _absorbed(self, q: Tensor, latent: Tensor, allowed: Tensor) -> Tensor:
        """Decode: queries move into the latent space, all heads read the same latents. [B, H, T, V]"""
        c, e = latent.split([self.rank, self.extra], -1)
        up_k, up_v = self.kv_b_proj.weight.view(self.num_heads, self.nope + self.v_dim, self.rank).split([self.nope, self.v_dim], 1)
        q_nope, q_extra = q.split([self.nope, self.extra], -1)
        q_latent = torch.einsum("bhtn,hnl->bhtl", q_nope, up_k)
        scores = q_latent @ c.unsqueeze(1).transpose(-1, -2) + q_extra @ e.unsqueeze(1).transpose(-1, -2)
        p = masked_softmax(scores * (self.nope + self.extra) ** -0.5, allowed)
        self.emit(attention=p)
        return torch.einsum("bhtl,hvl->bhtv", p.to(c.dtype) @ c.unsqueeze(1), up_v)


def masked_softmax(scores: Float[Tensor, "B H T N"], allowed: Bool[Tensor, "#B 1 T N"]) -> Float[Tensor, "B H T N"]:
    """Softmax over the allowed keys, in float32 (or float64). A row where nothing is allowed is NaN."""
    return wide(scores).masked_fill(~allowed, -torch.inf).softmax(-1)


def attention_mask(
    T: int,
    N: int,
    device: torch.device,
    padding: Int[Tensor, "B"] | None = None,
    cu_seqlens: Int[Tensor, "bounds"] | None = None,
    window: int | None = None,
) -> Bool[Tensor, "#B 1 T N"]:
    """Which of N keys each of the last T tokens may read: itself and earlier ones, no padding, its own document, its window.

    A padding token may read itself, so that no row is empty (its output means nothing).
    """
    query = torch.arange(N - T, N, device=device)[:, None]
    key = torch.arange(N, device=device)
    allowed = (key <= query)[None, None]
    if window is not None:
        allowed = allowed & (key > query - window)
    if padding is not None and bool((padding > 0).any()):
        allowed = (allowed & (key >= padding.view(-1, 1, 1, 1))) | (key == query)
    if cu_seqlens is not None:
        document = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1, device=device), cu_seqlens.long().diff())
        allowed = allowed & (document[:, None] == document)
    return allowed
