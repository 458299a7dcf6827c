"""What the toolbox models do with a text: bytes, answers, attention, and which tokens reach the answer. Cached, since models are pure."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from minimodel import K3Config, K3ForCausalLM, record
from minimodel.tasks import meeting
from minimodel.toolbox import load_toolbox

_lock = threading.Lock()  # one recording at a time on a model, and callbacks come from several threads


@dataclass(frozen=True, eq=False)
class Look:
    """heads [H, T], influence [T]: see ``ToolboxStory``; layer is 0-based."""

    layer: int
    heads: np.ndarray
    influence: np.ndarray


@lru_cache(maxsize=8)
def trained(technique: str) -> K3ForCausalLM:
    """The committed model, in float32, since its bytes are measured."""
    return load_toolbox(technique).requires_grad_(False)


@lru_cache(maxsize=64)
def cut_to_window(model: K3ForCausalLM, window: int) -> K3ForCausalLM:
    """The same weights with another window; other techniques are returned as they are."""
    if "sliding_window" not in (model.config.linear_mixer, model.config.full_mixer) or model.config.sliding_window == window:
        return model
    with torch.device("meta"):
        other = K3ForCausalLM(model.config.replace(sliding_window=window))
    other.load_state_dict(model.state_dict(), assign=True)  # the same tensors, not copies
    return other.eval().requires_grad_(False)


@lru_cache(maxsize=16)
def _of_size(config: K3Config) -> K3ForCausalLM:
    return K3ForCausalLM(config).eval()


@lru_cache(maxsize=512)
def kept_bytes(model: K3ForCausalLM | K3Config, ids: tuple[int, ...]) -> int:
    """Bytes in the cache after ``ids``, added up over its tensors. A config stands for any model of that size: weights don't matter."""
    if not ids:
        return 0
    model = model if isinstance(model, K3ForCausalLM) else _of_size(model)
    cache = model.new_cache(1)
    with torch.inference_mode(), _lock:
        model(torch.tensor([ids]), cache=cache)
    return cache.nbytes


@lru_cache(maxsize=64)
def states_after(model: K3ForCausalLM, ids: tuple[int, ...]) -> np.ndarray:
    """[layers, H, K, V]: the states of a model with KDA in every layer after ``ids``; before the first token they are zero."""
    lin = model.config.linear_attn_config
    if not ids:
        return _frozen(torch.zeros(model.config.num_hidden_layers, lin.num_heads, lin.head_dim, lin.head_dim))
    cache = model.new_cache(1)
    with torch.inference_mode(), _lock:
        model(torch.tensor([ids]), cache=cache)
    return _frozen(torch.stack([slot.state[0] for slot in cache.layers]))


@lru_cache(maxsize=512)
def answer_of(model: K3ForCausalLM, ids: tuple[int, ...], question: tuple[int, ...]) -> tuple[tuple[str, float], ...]:
    """(word, probability) of the whole vocabulary for the blank after ``question``, likeliest first; probabilities to six digits."""
    with torch.inference_mode(), _lock:
        p = model(torch.tensor([[*ids, *question]])).logits[0, -1].softmax(-1)
    return tuple((meeting.VOCABULARY[i], round(float(p[i]), 6)) for i in p.argsort(descending=True, stable=True).tolist()[:8])


@lru_cache(maxsize=128)
def looked_at(model: K3ForCausalLM, ids: tuple[int, ...], layer: int | None) -> Look:
    """How the last token reads the others in one layer, and how much each token counts for the answer through all layers.

    layer: None for the one where the words of the answer get most weight.
    """
    embedded: list[Tensor] = []
    hook = model.model.embed_tokens.register_forward_hook(lambda _m, _i, out: embedded.append(out.requires_grad_()) or embedded[0])
    try:
        with torch.enable_grad(), _lock, record(model) as trace:
            logits = model(torch.tensor([ids])).logits[0, -1]
            best = int(logits.argmax())
            (gradient,) = torch.autograd.grad(logits.log_softmax(-1)[best], embedded[0])
    finally:
        hook.remove()
    influence = gradient[0].norm(dim=-1)
    weights = [_weights(model.config, trace, i) for i in range(model.config.num_hidden_layers)]
    if layer is None:
        named = torch.tensor([i == best for i in ids])
        found = [float(w.nan_to_num().abs()[:, named].max()) if bool(named.any()) else 0.0 for w in weights]
        layer = int(np.argmax(found))
    return Look(layer, _frozen(weights[layer]), _frozen(influence / influence.sum().clamp_min(1e-30)))


def _weights(config: K3Config, trace, layer: int) -> Tensor:
    """[H, T] of the last token: attention, or for a state the share that each token's value has in what is read, with its sign."""
    name = f"layers.{layer}"
    if config.mixer(layer) != "kda":
        p = trace[f"{name}.{'mla' if config.mixer(layer) == 'mla' else 'mixer'}.attention"][0, :, -1]
        if config.mixer(layer) == "sliding_window":
            p = p.clone()
            p[:, : max(0, p.shape[1] - config.sliding_window)] = torch.nan  # not there to be read
        return p
    w = state_weights(*(trace[f"{name}.kda.{x}"][0].double() for x in ("q", "k", "alpha", "beta")))
    return w / w.abs().sum(-1, keepdim=True).clamp_min(1e-30)


def state_weights(q: Tensor, k: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """How much of each token's value the last query reads out of the state: o_T = sum_s w_s v_s, by K3 report Eq. 1 unrolled.

    q, k, alpha [T, H, K], beta [T, H]; returns w [H, T], q unscaled. Going back in time, the query itself is erased and faded.
    """
    r, out = q[-1], []
    for t in reversed(range(len(q))):
        out.append(beta[t] * (k[t] * r).sum(-1))
        r = alpha[t] * (r - (beta[t] * (k[t] * r).sum(-1))[:, None] * k[t])
    return torch.stack(out[::-1], -1)


@lru_cache(maxsize=64)
def rebuild_error(model: K3ForCausalLM, numbers: int) -> float:
    """Relative error of keys and values rebuilt from ``numbers`` numbers a token: the best any linear map can do, over held-out notes."""
    kept = squares = 0.0
    for s in _spectrum(model):
        kept, squares = kept + float(s[:numbers].square().sum()), squares + float(s.square().sum())
    return round(max(0.0, 1 - kept / squares) ** 0.5, 6)


@lru_cache(maxsize=4)
def _spectrum(model: K3ForCausalLM) -> list[Tensor]:
    """Singular values of every layer's cached rows [tokens, numbers], in float64."""
    notes = meeting.held_out_notes(1, 8, projects=1, length=64, final_questions=1)
    rows: list[list[Tensor]] = [[] for _ in model.model.layers]
    with torch.no_grad(), _lock:
        for note in notes:
            cache = model.new_cache(1)
            model(torch.tensor([note.ids]), cache=cache)
            for layer, slot in zip(rows, cache.layers, strict=True):
                layer.append(slot.live[0].flatten(1).double())
    return [torch.linalg.svdvals(torch.cat(layer)) for layer in rows]


def _frozen(x: Tensor) -> np.ndarray:
    out = np.round(x.detach().double().numpy(), 6)
    out.setflags(write=False)
    return out
