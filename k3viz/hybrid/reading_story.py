"""A small hybrid reads a text, token by token: what every layer keeps, what its parts do with the last token, what it would say by then."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from k3viz.hybrid.recorded import TEXT
from minimodel import K3Config, K3ForCausalLM, load_pretrained, record
from minimodel.tasks import meeting
from minimodel.trace import frozen, private_copy

LONGEST = 64  # tokens: the states after every token are kept
SAID = 4  # words kept of every answer


@dataclass(frozen=True, eq=False)
class LayerReading:
    """What one layer did. mixer: "kda" or "mla". kept [T]: bytes in the model's cache after each token.

    states [T, H, K, V] of a KDA layer, cards [T, L] of an MLA layer. At the last token: alpha [H, K] and beta [H], or attention [H, T]
    and gate [H, V]; experts: (number from 1, weight), strongest first, of experts_of (none of a dense layer). What the layer doesn't
    have is None. said: (word, probability), likeliest first, if the output were read behind this layer.
    """

    mixer: str
    kept: np.ndarray
    states: np.ndarray | None
    cards: np.ndarray | None
    alpha: np.ndarray | None
    beta: np.ndarray | None
    attention: np.ndarray | None
    gate: np.ndarray | None
    experts: tuple[tuple[int, float], ...]
    experts_of: int
    said: tuple[tuple[str, float], ...]


@dataclass(frozen=True, eq=False)
class ReadingStory:
    """tokens: of the text. token: the row of the embedding's table that the last one takes; vector [D]: that row. said: as in
    ``LayerReading``, of the embedding alone. The model's own answer is that of its last layer."""

    text: str
    tokens: tuple[str, ...]
    token: int
    vector: np.ndarray
    config: K3Config
    layers: tuple[LayerReading, ...]
    said: tuple[tuple[str, float], ...]

    @property
    def answer(self) -> tuple[str, float]:
        """The model's next word and its probability."""
        return self.layers[-1].said[0]


def reading_story(*, model: K3ForCausalLM | None = None, text: str = TEXT) -> ReadingStory:
    """Let ``model`` (default: the trained meeting model) read ``text``, in float64 on a private copy.

    text: 2 to 64 words of the meeting vocabulary (default: the article's notes and the question for the day). What the cache keeps is
    measured in a second run, with the model as it is. Raises ValueError that names the argument.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"text must hold at least two words, got {text!r}")
    ids = meeting.encode(text)
    if not 2 <= len(ids) <= LONGEST:
        raise ValueError(f"text: this story is for 2 to {LONGEST} words, got {len(ids)}")
    if model is None:
        return _read_by_default(text)
    meeting.check_reader(model)
    return _read(model, text, tuple(ids))


@lru_cache(maxsize=4)
def _read_by_default(text: str) -> ReadingStory:
    return _read(load_pretrained(), text, tuple(meeting.encode(text)))


@torch.no_grad()
def _read(model: K3ForCausalLM, text: str, ids: tuple[int, ...]) -> ReadingStory:
    reader = private_copy(model)
    body, said = reader.model, []

    def ask(depth) -> None:
        out = body.norm(depth.read(body.output_attn_res_proj, body.output_attn_res_norm))
        said.append(_likeliest(reader.lm_head(out)[0, -1].softmax(-1)))

    body.layers[0].register_forward_pre_hook(lambda _layer, args: ask(args[0]))
    for layer in body.layers:
        layer.register_forward_hook(lambda _layer, args, _out: ask(args[0]))
    with record(reader) as trace:
        reader(torch.tensor([ids]))
    trace = dict(trace)  # the answers asked for above are over: the last one recorded is the model's own
    kept = _kept(model, ids)
    layers = tuple(_layer(trace, model.config, i, kept[:, i], said[1 + i]) for i in range(len(body.layers)))
    vector = frozen(body.embed_tokens.weight[ids[-1]])
    return ReadingStory(text, tuple(meeting.VOCABULARY[i] for i in ids), ids[-1], vector, model.config, layers, said[0])


def _kept(model: K3ForCausalLM, ids: tuple[int, ...]) -> np.ndarray:
    """[T, layers]: bytes of every layer's cache after each token, measured."""
    reader = copy.deepcopy(model).eval()
    cache, rows = reader.new_cache(1), []
    for token in ids:
        reader(torch.tensor([[token]]), cache=cache)
        rows.append([sum(x.nbytes for x in slot.tensors().values()) for slot in cache.layers])
    return np.array(rows)


def _layer(trace: dict[str, Tensor], config: K3Config, i: int, kept: np.ndarray, said: tuple[tuple[str, float], ...]) -> LayerReading:
    def found(name: str, last: bool = False) -> np.ndarray | None:
        x = trace.get(f"layers.{i}.{name}")
        if x is None:
            return None
        return frozen(x[0][-1] if last else x[0])

    attention = found("mla.attention")
    experts: tuple[tuple[int, float], ...] = ()
    if (indices := trace.get(f"layers.{i}.moe.indices")) is not None:
        pairs = zip(indices[-1].tolist(), trace[f"layers.{i}.moe.weights"][-1].tolist(), strict=True)
        experts = tuple(sorted(((e + 1, w) for e, w in pairs), key=lambda pair: -pair[1]))
    return LayerReading(
        mixer=config.mixer(i), kept=kept, states=found("kda.state"), cards=found("mla.latent"), alpha=found("kda.alpha", last=True),
        beta=found("kda.beta", last=True), attention=None if attention is None else attention[:, -1], gate=found("mla.gate", last=True),
        experts=experts, experts_of=config.num_experts if experts else 0, said=said,
    )  # fmt: skip


def _likeliest(p: Tensor) -> tuple[tuple[str, float], ...]:
    top = p.topk(SAID)
    return tuple((meeting.VOCABULARY[i], x) for i, x in zip(top.indices.tolist(), top.values.tolist(), strict=True))
