"""The experts story: which experts each word of a text visits in a trained model, with what weights, and how the load falls.

Top-k and the shared experts can be changed; the model then really runs that way, though it was not trained for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from minimodel import K3ForCausalLM, record
from minimodel.formats import format_number, format_probability, plural
from minimodel.pretrained import load_pretrained
from minimodel.tasks import meeting
from minimodel.trace import frozen, private_copy

TEXT = " ".join((*meeting.ARTICLE, meeting.question("day")))
LONGEST = 60  # tokens: each has a name in the picture
MOST_EXPERTS = 16  # in the picture


@dataclass(frozen=True, eq=False)
class ExpertsStory:
    """One mixture layer while the model reads a text.

    tokens: T words. layer: 0-based; layers: all that have experts. scores [T, E]: after the sigmoid. bias [E]: chooses, never weighs.
    indices, weights [T, k]: the experts visited and the mixture weights. shared: shared experts that every token visits. token: the one
    looked at. answer: the model's next word and its probability; answer_as_trained: with the trained top-k and shared experts.
    """

    tokens: tuple[str, ...]
    layer: int
    layers: tuple[int, ...]
    scores: np.ndarray
    bias: np.ndarray
    indices: np.ndarray
    weights: np.ndarray
    shared: int
    token: int
    answer: tuple[str, float]
    answer_as_trained: tuple[str, float]

    @property
    def loads(self) -> tuple[int, ...]:
        """Words each expert got."""
        return tuple(np.bincount(self.indices.ravel(), minlength=self.scores.shape[1]).tolist())

    @property
    def even(self) -> float:
        return self.indices.size / self.scores.shape[1]

    @property
    def sentence(self) -> str:
        pairs = sorted(zip(self.indices[self.token], self.weights[self.token], strict=True), key=lambda pair: -pair[1])
        taken = ", ".join(f"E{j + 1} with {format_number(p)}" for j, p in pairs)
        k, E = self.indices.shape[1], self.scores.shape[1]
        also = f"{self.shared} shared {plural('expert', self.shared)}" if self.shared else "no shared expert"
        loads = f"Over {len(self.tokens)} words the loads are {', '.join(map(str, self.loads))} ({format_number(self.even)} would be even)"
        said = f"Layer {self.layer + 1} sends {self.tokens[self.token]!r} to {k} of {E} experts: {taken}; it visits {also}. {loads}."
        said += f" The model's next word: {_said(self.answer)}"
        return said + ("." if self.answer == self.answer_as_trained else f", as trained {_said(self.answer_as_trained)}.")


def experts_story(
    *,
    model: K3ForCausalLM | None = None,
    text: str = TEXT,
    layer: int | None = None,
    token: int = -1,
    top_k: int | None = None,
    shared: bool = True,
) -> ExpertsStory:
    """Let a model read ``text`` and trace where one layer's router sends each word, in float64 on a private copy.

    model: trained on meeting notes, with experts (default: the course's meeting model). layer: 0-based (default: the last with experts).
    token: the word to look at, from the end if negative. top_k: experts a token (default: as trained). shared: with the shared experts.
    Raises ValueError naming the argument.
    """
    model = load_pretrained() if model is None else model
    layers = expert_layers(model)
    layer = layers[-1] if layer is None else layer
    trained = model.config.num_experts_per_token
    run = read(model, text, top_k, shared)
    plain = run if (top_k, shared) in ((None, True), (trained, True)) else read(model, text, None, True)
    return tell(run, plain, layer, token)


@dataclass(frozen=True, eq=False)
class ExpertsRun:
    """One run of a model: (scores, bias, indices, weights) of every layer with experts, and the answer."""

    tokens: tuple[str, ...]
    routed: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]
    shared: int
    answer: tuple[str, float]


def expert_layers(model: K3ForCausalLM) -> tuple[int, ...]:
    """0-based layers with experts. ValueError for a model that this story can't read."""
    meeting.check_reader(model)
    layers = tuple(i for i in range(model.config.num_hidden_layers) if model.config.is_moe_layer(i))
    if not layers or model.config.num_experts > MOST_EXPERTS:
        raise ValueError(f"model must have 1 to {MOST_EXPERTS} experts in some layer, got {model.config.num_experts if layers else 0}")
    return layers


def read(model: K3ForCausalLM, text: str, top_k: int | None, shared: bool) -> ExpertsRun:
    """Run a private copy with another top-k, with or without its shared experts."""
    E = model.config.num_experts
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= E):
        raise ValueError(f"top_k must be a whole number from 1 to {E}, got {top_k!r}")
    if not isinstance(text, str) or not (ids := meeting.encode(text)):
        raise ValueError(f"text must hold at least one word, got {text!r}")
    if len(ids) > LONGEST:
        raise ValueError(f"text: at most {LONGEST} tokens fit in this story, got {len(ids)}")
    reader = private_copy(model)
    blocks = {i: reader.model.layers[i].block_sparse_moe for i in expert_layers(model)}
    for block in blocks.values():
        block.gate.top_k = block.gate.top_k if top_k is None else top_k
        block.shared_experts = block.shared_experts if shared else None
    with torch.no_grad(), record(nn.ModuleList(block.gate for block in blocks.values())) as trace:
        p = reader(torch.tensor([ids])).logits[0, -1].softmax(-1)
    routed = {
        i: tuple(frozen(x) for x in (trace[f"layers.{i}.moe.scores"], block.gate.e_score_correction_bias,
                                      trace[f"layers.{i}.moe.indices"], trace[f"layers.{i}.moe.weights"]))
        for i, block in blocks.items()
    }  # fmt: skip
    return ExpertsRun(tuple(meeting.VOCABULARY[i] for i in ids), routed, model.config.num_shared_experts if shared else 0,
                      (meeting.VOCABULARY[int(p.argmax())], float(p.max())))  # fmt: skip


def tell(run: ExpertsRun, plain: ExpertsRun, layer: int, token: int) -> ExpertsStory:
    """The story of one layer and word of a run; ``plain``: the run as trained."""
    if layer not in tuple(run.routed):
        raise ValueError(f"layer must be one with experts, of {', '.join(map(str, run.routed))}, got {layer!r}")
    T = len(run.tokens)
    if isinstance(token, bool) or not isinstance(token, int) or not -T <= token < T:
        raise ValueError(f"token must be a whole number from {-T} to {T - 1}, got {token!r}")
    scores, bias, indices, weights = run.routed[layer]
    return ExpertsStory(
        run.tokens, layer, tuple(run.routed), scores, bias, indices, weights, run.shared, token % T, run.answer, plain.answer
    )


def _said(answer: tuple[str, float]) -> str:
    return f"{answer[0]!r} ({format_probability(answer[1])})"
