"""Generation: one prefill, then one token at a time from the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minimodel.cache import HybridCache

Prompt = Int[Tensor, "_"] | Sequence[int]


def generate(
    model,
    input_ids: Int[Tensor, "B T"] | Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | Sequence[int] | None = None,
    seed: int | None = None,
    stream: bool = False,
    cache: HybridCache | None = None,
) -> Int[Tensor, "B total"] | list[Tensor] | Iterator[Int[Tensor, "B"]]:
    """Continue every prompt.

    Args:
        model: a ``K3ForCausalLM``.
        input_ids: [B, T], or a list of prompts of different lengths (padded on the left and masked; each row gives the tokens it would give
            alone).
        max_new_tokens: at most this many.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it and sampled.
        top_k, top_p: sample among the k likeliest tokens; among the fewest whose probabilities reach p.
        stop: token ids that end a row; the stop token is kept. Generation ends when every row has stopped.
        seed: of the sampling; the same seed gives the same tokens.
        stream: yield each step's tokens [B] as they come (-1 in rows that have stopped) instead of returning all.
        cache: continue a session: ``input_ids`` then holds only what the cache has not read. It is extended in place, by everything but the
            last token given out.

    Returns: prompts and continuations [B, T+N]; rows that stopped early are filled with their stop token. For a list of prompts, a
    list of 1-D tensors without padding or filling.
    """
    _check_sampling(max_new_tokens, temperature, top_k, top_p)
    ragged = not isinstance(input_ids, Tensor)
    ids, mask = _left_pad(input_ids, model.config.pad_token_id or 0) if ragged else (input_ids, None)
    if ids.dim() != 2 or 0 in ids.shape:
        raise ValueError(f"input_ids must be [B, T] with B, T >= 1, got shape {tuple(ids.shape)}")
    device = model.lm_head.weight.device
    ids = ids.to(device)
    stops = torch.tensor([] if stop is None else [stop] if isinstance(stop, int) else list(stop), dtype=torch.long, device=device)
    if cache is None:
        cache = model.new_cache(ids.shape[0])
    tokens = _tokens(model, ids, mask, cache, max_new_tokens, temperature, top_k, top_p, stops, seed)
    if stream:
        return tokens
    new = torch.stack(list(tokens), 1)
    if ragged:
        return [torch.cat([torch.as_tensor(p, device=device), row[row >= 0]]) for p, row in zip(input_ids, new, strict=True)]
    for t in range(1, new.shape[1]):
        new[:, t] = torch.where(new[:, t] < 0, new[:, t - 1], new[:, t])
    return torch.cat([ids, new], 1)


def _tokens(model, ids, mask, cache, max_new_tokens, temperature, top_k, top_p, stops, seed) -> Iterator[Tensor]:
    """The loop. A pass with a cache is inference whatever the model's mode: it keeps no gradients and pools no router scores."""
    generator = None if seed is None else torch.Generator(ids.device).manual_seed(seed)
    done = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        logits = model(ids, cache=cache, attention_mask=mask).logits[:, -1]
        ids, mask = pick(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator).unsqueeze(1), None
        yield torch.where(done, -1, ids[:, 0])
        done = done | torch.isin(ids[:, 0], stops)
        if bool(done.all()):
            return


def pick(
    logits: Float[Tensor, "B vocab"],
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "B"]:
    """One token a row: the likeliest (temperature 0), or a draw from the tempered, truncated distribution."""
    if temperature == 0:
        return logits.argmax(-1)
    p = (logits.double() / temperature).softmax(-1)
    ranked, order = torch.sort(p, dim=-1, descending=True, stable=True)
    if top_k is not None:
        ranked[:, top_k:] = 0
        ranked /= ranked.sum(-1, keepdim=True)  # top_p then counts among what top_k left
    if top_p is not None:
        ranked = ranked.masked_fill(ranked.cumsum(-1) - ranked >= top_p, 0)  # the likeliest token always stays
    return order.gather(-1, torch.multinomial(ranked, 1, generator=generator)).squeeze(-1)


def _left_pad(prompts: Sequence[Prompt], pad: int) -> tuple[Tensor, Tensor | None]:
    if len(prompts) == 0 or any(len(p) == 0 for p in prompts):
        raise ValueError(f"input_ids must hold at least one prompt and no empty one, got lengths {[len(p) for p in prompts]}")
    longest = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.as_tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def _check_sampling(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or a positive number, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
