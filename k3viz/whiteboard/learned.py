"""The whiteboard story as a trained model lives it: its own states, decays, write strengths, and its answer after every word."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from k3viz.whiteboard.story import PHASES, additive_substeps, delta_substeps, step_labels
from minimodel import K3Config, K3ForCausalLM, record
from minimodel.formats import format_number, format_probability
from minimodel.tasks import meeting
from minimodel.trace import frozen, private_copy

TEXT = " ".join(meeting.ARTICLE)
LONGEST = 120  # tokens: a story for reading, not a benchmark


@dataclass(frozen=True, eq=False)
class LearnedFrame:
    """One sub-step inside one head. token: index into ``tokens``, -1 before the first. phase: "start", "fade", "erase" or "write".

    state [K, V]: the head's state. additive [K, V]: where the same keys, values, decays and write strengths would have led
    without the erase. board: slot -> (word, probability) pairs, most likely first, as the whole model answers after the last
    word that it has read in full.
    """

    token: int
    phase: str
    state: np.ndarray
    additive: np.ndarray
    board: dict[str, list[tuple[str, float]]]
    sentence: str


@dataclass(frozen=True, eq=False)
class LearnedWhiteboard:
    """Trace of one head of a model that reads a text of T tokens, and of the model's answers.

    text, tokens: what it reads. head: (layer, head), 0-based. q, k [T, K], v [T, V], alpha [T, K], beta [T]: what the head computed.
    states, additive [T+1, K, V]: its state before the first token and after each one, and the same without the erase.
    answers: slot -> [T+1, words]: probability of each word of ``words[slot]`` for the blank of the slot's question.
    """

    text: str
    tokens: tuple[str, ...]
    head: tuple[int, int]
    heads: tuple[tuple[int, int], ...]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray
    states: np.ndarray
    additive: np.ndarray
    words: dict[str, tuple[str, ...]]
    answers: dict[str, np.ndarray]

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(self.answers)

    @property
    def frames(self) -> range:
        """Positions of the sub-steps: 0 is the start, then fade, erase and write of each token."""
        return range(1 + len(PHASES) * len(self.tokens))

    @property
    def labels(self) -> tuple[str, ...]:
        """One short label a frame: "start", "Thursday · erase", ..."""
        return step_labels(self.tokens)

    def frame(self, position: int) -> LearnedFrame:
        """One sub-step, computed when it is asked for. Positions count from the end if negative."""
        position = self.frames[position]
        if position == 0:
            return LearnedFrame(-1, "start", self.states[0], self.additive[0], self.board(0), self._start_sentence())
        t, p = divmod(position - 1, len(PHASES))
        token = [torch.tensor(x) for x in (self.k[t], self.v[t], np.log(self.alpha[t]), self.beta[t])]
        kda_states = delta_substeps(torch.from_numpy(self.states[t].copy()), *token)
        sums = additive_substeps(torch.from_numpy(self.additive[t].copy()), *token)
        read = t + (PHASES[p] == "write")
        sentence = self._sentence(t, p, torch.from_numpy(self.states[t].copy()), kda_states)
        return LearnedFrame(t, PHASES[p], kda_states[p].numpy(), sums[p].numpy(), self.board(read), sentence)

    def board(self, read: int) -> dict[str, list[tuple[str, float]]]:
        """Slot -> (word, probability), most likely first, after the model has read ``read`` tokens."""
        pairs = {slot: zip(self.words[slot], p[read].tolist(), strict=True) for slot, p in self.answers.items()}
        return {slot: sorted(answers, key=lambda pair: -pair[1]) for slot, answers in pairs.items()}

    @property
    def sentence(self) -> str:
        return self.frame(-1).sentence

    def _start_sentence(self) -> str:
        return f"The model has read nothing; the state of layer {self.head[0] + 1}, head {self.head[1] + 1} is zero."

    def _sentence(self, t: int, p: int, before: Tensor, after: tuple[Tensor, Tensor, Tensor]) -> str:
        word, beta = self.tokens[t], format_number(self.beta[t])
        faded, erased, written = (float(s.norm()) for s in after)
        if PHASES[p] == "fade":
            low, high = format_number(self.alpha[t].min()), format_number(self.alpha[t].max())
            return f"Fade at {word!r}: the {self.alpha.shape[1]} channels of this head keep between {low} and {high} of what they hold."
        if PHASES[p] == "erase":
            gone = float((after[1] - after[0]).norm()) / faded if faded else 0.0
            return f"Erase at {word!r}: write strength {beta} takes away what this key held, {format_probability(gone)} of the board's ink."
        said = "; ".join(f"{slot}: {pairs[0][0]} {format_probability(pairs[0][1])}" for slot, pairs in self.board(t + 1).items())
        return f"Write at {word!r} with strength {beta}. Asked now, the model says {said}."


def learned_story(*, model: K3ForCausalLM, text: str | None = None, head: tuple[int, int] | None = None) -> LearnedWhiteboard:
    """Let ``model`` read ``text`` and trace one KDA head, in float64 on a private copy of the model.

    model: trained on meeting notes (``minimodel.tasks.meeting``). text: words of that vocabulary (default: the notes and the
    update). head: (layer, head), 0-based (default: the head whose erase is strongest at the text's last value).
    Raises ValueError for an empty text, an unknown word, a text of more than 120 tokens, a model of another vocabulary, or a head
    that the model doesn't have.
    """
    return tell(read(model, text), head)


@dataclass(frozen=True, eq=False)
class Run:
    """What a model did with a text, whichever head is looked into. trace: of the recorder; answers: as in ``LearnedWhiteboard``."""

    text: str
    ids: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    trace: dict[str, Tensor]
    answers: dict[str, np.ndarray]


def read(model: K3ForCausalLM, text: str | None) -> Run:
    """Run a private copy of the model in float64. ValueError as in ``learned_story``."""
    text = TEXT if text is None else text
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"text must hold at least one word, got {text!r}")
    ids = meeting.encode(text)
    if len(ids) > LONGEST:
        raise ValueError(f"text: at most {LONGEST} tokens fit in this story, got {len(ids)}")
    meeting.check_reader(model)
    heads = kda_heads(model.config)
    if not heads:
        raise ValueError("model has no KDA layer, so it keeps no whiteboard")
    reader = private_copy(model)
    with torch.no_grad(), record(reader) as trace:
        reader(torch.tensor([ids]))
    return Run(text, tuple(ids), heads, dict(trace), _answers(reader, ids, _slots_in(ids)))


def tell(run: Run, head: tuple[int, int] | None) -> LearnedWhiteboard:
    """The story of one head of a run: another head costs no run of the model."""
    trace, heads, ids = run.trace, run.heads, list(run.ids)
    if head is not None and tuple(head) not in heads:
        raise ValueError(f"head must be a (layer, head) pair of a KDA layer, one of {', '.join(map(str, heads))}, got {head!r}")
    chosen = tuple(head) if head is not None else _busiest_eraser(trace, heads, ids)
    layer, h = chosen
    q, k, v, alpha, beta, states = (trace[f"layers.{layer}.kda.{x}"][0, :, h] for x in ("q", "k", "v", "alpha", "beta", "state"))
    states = torch.cat((torch.zeros_like(states[:1]), states))
    return LearnedWhiteboard(
        text=run.text, tokens=tuple(meeting.VOCABULARY[i] for i in ids), head=chosen, heads=heads, q=frozen(q), k=frozen(k), v=frozen(v),
        alpha=frozen(alpha), beta=frozen(beta), states=frozen(states), additive=frozen(_additive_states(k, v, alpha, beta)),
        words={slot: meeting.SLOTS[slot] for slot in run.answers}, answers=run.answers,
    )  # fmt: skip


def kda_heads(config: K3Config) -> tuple[tuple[int, int], ...]:
    """(layer, head) of every KDA head, 0-based."""
    layers = [layer for layer in range(config.num_hidden_layers) if config.mixer(layer) == "kda"]
    return tuple((layer, h) for layer in layers for h in range(config.linear_attn_config.num_heads))


def _additive_states(k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    states = [torch.zeros(k.shape[1], v.shape[1], dtype=k.dtype)]
    for t in range(len(k)):
        states.append(additive_substeps(states[-1], k[t], v[t], alpha[t].log(), beta[t])[2])
    return torch.stack(states)


def _busiest_eraser(trace, heads: tuple[tuple[int, int], ...], ids: list[int]) -> tuple[int, int]:
    """The head that erases the largest share of its board when the last value of the text comes in."""
    values = {meeting.encode(word)[0] for words in meeting.SLOTS.values() for word in words}
    t = max((i for i, token in enumerate(ids) if token in values), default=len(ids) - 1)

    def share(head: tuple[int, int]) -> float:
        k, alpha, beta, states = (trace[f"layers.{head[0]}.kda.{x}"][0, :, head[1]] for x in ("k", "alpha", "beta", "state"))
        faded = alpha[t][:, None] * (states[t - 1] if t else torch.zeros_like(states[0]))
        return float(beta[t] * (k[t] @ faded).norm() / (faded.norm() + 1e-30))

    return max(heads, key=share)


def _slots_in(ids: list[int]) -> tuple[str, ...]:
    """The slots whose values the text mentions; the day if it mentions none."""
    said = {meeting.VOCABULARY[i] for i in ids}
    return tuple(slot for slot, words in meeting.SLOTS.items() if said & set(words)) or ("day",)


def _answers(reader: K3ForCausalLM, ids: list[int], slots: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Slot -> [T+1, words]: probabilities for the blank of each slot's question, asked after every prefix of the text.

    One row a slot. The text is read once; after each word the questions are asked from there, and the cache is put back.
    """
    project = next((w for i in ids if (w := meeting.VOCABULARY[i]) in meeting.PROJECTS), None)
    asked = [meeting.encode(meeting.question(slot, project)) for slot in slots]
    words = [[meeting.encode(word)[0] for word in meeting.SLOTS[slot]] for slot in slots]
    questions = torch.zeros(len(slots), max(map(len, asked)), dtype=torch.long)  # shorter ones padded on the right, read no further
    for row, question in zip(questions, asked, strict=True):
        row[: len(question)] = torch.tensor(question)
    cache, answers = reader.new_cache(len(slots)), {slot: [] for slot in slots}
    with torch.no_grad():
        for t in range(len(ids) + 1):
            if t:
                reader(torch.full((len(slots), 1), ids[t - 1]), cache=cache)
            here = cache.snapshot()
            p = reader(questions, cache=cache).logits.softmax(-1)
            cache.restore(here)
            for i, slot in enumerate(slots):
                answers[slot].append(p[i, len(asked[i]) - 1, words[i]])
    return {slot: frozen(torch.stack(rows)) for slot, rows in answers.items()}
