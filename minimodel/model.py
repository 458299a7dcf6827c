"""The whole model: a stack of mixers and feed-forwards that read each other through Attention Residuals.

Module names are the released checkpoint's tensor names (routed experts are stacked; ``io.py`` splits them).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minimodel.attention_residuals import DepthSources, PseudoQuery
from minimodel.cache import HybridCache
from minimodel.config import K3Config
from minimodel.delta_rule import BACKENDS, check_cu_seqlens
from minimodel.kda import KimiDeltaAttention
from minimodel.latent_moe import RoutedExperts, StableLatentMoE
from minimodel.layers import GatedMLP, RMSNorm, linear, wide
from minimodel.mla import GatedMLA
from minimodel.routing import Router
from minimodel.trace import Traced


@dataclass(frozen=True)
class ModelOutput:
    logits: Float[Tensor, "B T vocab"]
    loss: Float[Tensor, ""] | None
    cache: HybridCache | None


def build_mixer(config: K3Config, layer: int) -> nn.Module:
    """The sequence mixer of 0-based ``layer``: KDA or Gated MLA, or a baseline named by the config."""
    name = config.mixer(layer)
    if name == "kda":
        return KimiDeltaAttention(config)
    if name == "mla":
        return GatedMLA(config)
    from minimodel.baselines import build_baseline

    return build_baseline(name, config)


class K3Block(nn.Module):
    """One layer: a mixer along time, then a feed-forward, each reading depth through its own Attention Residual."""

    def __init__(self, config: K3Config, layer: int) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        depth = config.attn_res_block_size is not None
        self.self_attn = build_mixer(config, layer)
        moe = config.is_moe_layer(layer)
        self.block_sparse_moe = StableLatentMoE(config) if moe else None
        self.mlp = None if moe else GatedMLP(config, config.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(D, eps), RMSNorm(D, eps)
        self.self_attention_res_proj, self.mlp_res_proj = (PseudoQuery(D) if depth else None for _ in range(2))
        self.self_attention_res_norm, self.mlp_res_norm = (RMSNorm(D, eps) if depth else None for _ in range(2))

    def forward(self, depth: DepthSources, *, mask: Bool[Tensor, "B T"] | None, **mixing) -> None:
        """Read, transform, write, twice. ``mixing`` goes to the mixer: cache slot, document bounds, padding, backend."""
        h = self.input_layernorm(depth.read(self.self_attention_res_proj, self.self_attention_res_norm))
        depth.write(self.self_attn(h, mask=mask, **mixing))
        h = self.post_attention_layernorm(depth.read(self.mlp_res_proj, self.mlp_res_norm))
        depth.write(self.mlp(h) if self.mlp is not None else self.block_sparse_moe(h, mask))

    def recomputed(self, depth: DepthSources, **arguments) -> DepthSources:
        """The same, keeping none of its activations: the backward pass runs the layer again from its sources. Returns the new ones."""

        def run(depth: DepthSources) -> DepthSources:
            depth = depth.copy()  # the second run has to start where the first one did
            self(depth, **arguments)
            return depth

        # nothing in a layer is random; its router's margins are counted in the first run
        return checkpoint(run, depth, use_reentrant=False, preserve_rng_state=False, context_fn=self._first_and_second_run)

    def _first_and_second_run(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), self._not_pooling()

    @contextmanager
    def _not_pooling(self) -> Iterator[None]:
        routers = [m for m in self.modules() if isinstance(m, Router)]
        for router in routers:
            router.pooling = False
        try:
            yield
        finally:
            for router in routers:
                router.pooling = True


class K3Model(nn.Module):
    """Embedding, layers, and one last read over depth before the final norm.

    ``recompute``: set True to train with less memory: layers keep their inputs only and are computed again in the backward pass.
    """

    recompute = False

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.config = config
        # a weight of our own: nn.Embedding's first draw, on the meta device, would import torch's compiler, which takes seconds
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(K3Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        depth = config.attn_res_block_size is not None
        self.output_attn_res_proj = PseudoQuery(config.hidden_size) if depth else None
        self.output_attn_res_norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if depth else None
        self._name_traces()

    def _name_traces(self) -> None:
        named = {"output_res": self.output_attn_res_proj}
        for i, block in enumerate(self.layers):
            mixer = self.config.mixer(i)
            named[f"layers.{i}.{mixer if mixer in ('kda', 'mla') else 'mixer'}"] = block.self_attn
            named[f"layers.{i}.attn_res"], named[f"layers.{i}.mlp_res"] = block.self_attention_res_proj, block.mlp_res_proj
            named[f"layers.{i}.moe"] = block.block_sparse_moe and block.block_sparse_moe.gate
        for name, part in named.items():
            if part is not None:
                part._trace_name = name

    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        *,
        cache: HybridCache | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        padding: Int[Tensor, "B"] | None = None,
        cu_seqlens: Int[Tensor, "bounds"] | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "B T D"]:
        """The final norm's output [B, T, D]: what the head turns into logits.

        Checks nothing: :class:`K3ForCausalLM` does, and opens the cache.

        Args:
            input_ids: tokens [B, T].
            cache: read and extended in place, inside ``cache.extending``.
            mask: [B, T], False at left padding. None: no padding.
            padding: [B], how many tokens of each row are padding, also those that the cache has read.
            cu_seqlens, backend: see :meth:`K3ForCausalLM.forward`.
        """
        block = self.config.attn_res_block_size
        depth = DepthSources(self.embed_tokens(input_ids), None if block is None else 2 * block)
        for i, layer in enumerate(self.layers):
            slot = None if cache is None else cache.layers[i]
            arguments = {"mask": mask, "cache": slot, "padding": padding, "cu_seqlens": cu_seqlens, "backend": backend}
            if self.recompute and slot is None and torch.is_grad_enabled():
                depth = layer.recomputed(depth, **arguments)
            else:
                layer(depth, **arguments)
        return self.norm(depth.read(self.output_attn_res_proj, self.output_attn_res_norm))


class K3ForCausalLM(Traced):
    """A K3 that predicts the next token.

    ``K3ForCausalLM(config, seed=0)`` initializes deterministically: normal weights of std ``initializer_range``, zero
    pseudo-queries, A_log = 0 with the Mamba-style decay bias. On ``device="meta"`` nothing is drawn.
    """

    def __init__(self, config: K3Config, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay where they are
            self.model = K3Model(config)
            self.lm_head = linear(config.hidden_size, config.vocab_size)
            if config.tie_word_embeddings:
                self.lm_head.weight = self.model.embed_tokens.weight
            if self.lm_head.weight.device.type != "meta":
                torch.manual_seed(seed)
                self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        std = self.config.initializer_range
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding, Router)):
                nn.init.normal_(module.weight, std=std)
            elif isinstance(module, RoutedExperts):
                for w in (module.w1, module.w3, module.w2):
                    nn.init.normal_(w, std=std)
            elif hasattr(module, "reset_parameters") and module is not self:
                module.reset_parameters()

    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        labels: Int[Tensor, "B T"] | None = None,
        cache: HybridCache | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Int[Tensor, "bounds"] | None = None,
        backend: str = "auto",
    ) -> ModelOutput:
        """Next-token logits.

        Args:
            input_ids: tokens [B, T].
            labels: [B, T], -100 where there is nothing to learn; the logits at t-1 are compared with the label at t.
            cache: read and extended in place; a pass with a cache is inference and keeps no gradients.
            attention_mask: [B, T] zeros at left padding. With a cache: only in its first call, later calls remember it.
            cu_seqlens: document bounds of one packed row; nothing leaks across them. Not with a cache.
            backend: the delta rule's backend, see :func:`minimodel.kda`.
        """
        self._check(input_ids, labels, cache, attention_mask, cu_seqlens, backend)
        mask = None if attention_mask is None or bool((attention_mask != 0).all()) else attention_mask != 0
        padding = None if mask is None else (~mask).sum(1)
        with nullcontext() if cache is None else cache.extending(input_ids.shape[1]):
            if cache is not None:
                cache.padding = cache.padding if mask is None else padding
                padding = cache.padding
            hidden = self.model(input_ids, cache=cache, mask=mask, padding=padding, cu_seqlens=cu_seqlens, backend=backend)
            logits = self.lm_head(hidden)
        self.emit(logits=logits)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(wide(logits)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return ModelOutput(logits, loss, cache)

    def new_cache(self, batch_size: int = 1) -> HybridCache:
        """An empty cache for ``batch_size`` sequences."""
        return HybridCache(self.config, batch_size, self.lm_head.weight.device)

    def routers(self) -> list[Router]:
        return [m for m in self.modules() if isinstance(m, Router)]

    def update_router_bias(self) -> None:
        """Quantile Balancing's step, once after the optimizer's: every router's bias from the scores pooled since the last call."""
        for router in self.routers():
            router.update_bias()

    def _check(self, input_ids, labels, cache, attention_mask, cu_seqlens, backend) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
        if not isinstance(input_ids, Tensor) or input_ids.is_floating_point() or input_ids.is_complex():
            raise TypeError(f"input_ids must be an integer tensor, got {getattr(input_ids, 'dtype', type(input_ids).__name__)}")
        if input_ids.dim() != 2 or 0 in input_ids.shape:
            raise ValueError(f"input_ids must be [B, T] with B, T >= 1, got shape {tuple(input_ids.shape)}")
        if input_ids.device.type != "meta" and (int(input_ids.min()) < 0 or int(input_ids.max()) >= self.config.vocab_size):
            raise ValueError(
                f"input_ids must lie in 0..{self.config.vocab_size - 1} (vocab_size), got {int(input_ids.min())}..{int(input_ids.max())}"
            )
        if labels is not None:
            self._check_labels(input_ids, labels)
        if cache is not None:
            cache.check(self.config, input_ids.shape[0])
            if cu_seqlens is not None:
                raise ValueError("cu_seqlens packs documents for training; it cannot be combined with a cache")
        if attention_mask is not None:
            if not isinstance(attention_mask, Tensor):
                raise TypeError(f"attention_mask must be a tensor, got {type(attention_mask).__name__}")
            if attention_mask.shape != input_ids.shape:
                raise ValueError(f"attention_mask must have input_ids' shape {tuple(input_ids.shape)}, got {tuple(attention_mask.shape)}")
            on = attention_mask != 0
            if bool((~on).all(1).any()):
                raise ValueError(f"attention_mask masks every token of row {int((~on).all(1).nonzero()[0])}")
            if bool((on[:, :-1] & ~on[:, 1:]).any()):
                raise ValueError("attention_mask must be left padding: zeros, then ones")
            if cache is not None and cache.seen and not bool(on.all()):
                raise ValueError(f"attention_mask with padding is for a cache's first call; this cache has seen {cache.seen} tokens")
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, *input_ids.shape)

    def _check_labels(self, input_ids: Tensor, labels: Tensor) -> None:
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
            raise TypeError(f"labels must be an integer tensor, got {getattr(labels, 'dtype', type(labels).__name__)}")
        if labels.shape != input_ids.shape:
            raise ValueError(f"labels must have input_ids' shape {tuple(input_ids.shape)}, got {tuple(labels.shape)}")
        if labels.device.type == "meta":
            return
        asked = labels[:, 1:]
        asked = asked[asked != -100]
        if asked.numel() == 0:
            raise ValueError("labels hold nothing to learn: after the first token every label is -100")
        if int(asked.min()) < 0 or int(asked.max()) >= self.config.vocab_size:
            raise ValueError(
                f"labels must be -100 or lie in 0..{self.config.vocab_size - 1} (vocab_size), got {int(asked.min())}..{int(asked.max())}"
            )
