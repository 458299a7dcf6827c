"""The toolbox story: the meeting notes, token by token, through five small trained models that differ in their attention only.

Every model really reads the notes: what its cache holds is added up from its tensors, and the blank is filled by its own probabilities. The
window can be moved on the trained weights; another number of shared copies or another latent size changes the bytes (measured on a model
of that size), while the answer stays that of the trained size, and the story says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from k3viz.toolbox.reading import answer_of, cut_to_window, kept_bytes, looked_at, rebuild_error, states_after, trained
from minimodel import K3Config, K3ForCausalLM, cache_bytes, facts
from minimodel.accounting import row_numbers
from minimodel.formats import format_bytes, format_count, format_probability, plural
from minimodel.tasks import meeting
from minimodel.toolbox import GROUPS, LATENT, LENGTH, TECHNIQUES, WINDOW, toolbox_config

LABELS = {"mha": "MHA", "gqa": "GQA", "mla": "MLA", "sliding_window": "window", "kda": "KDA"}
IDEAS = {"mha": "keep all", "gqa": "share", "mla": "shrink", "sliding_window": "forget", "kda": "replace"}
TEXT = " ".join(meeting.ARTICLE)
CHAT = tuple(s for s in meeting.FILLER if "{" not in s)  # sentences that say nothing about the meeting
SLOTS = ("day", "room", "client", "attendees")
LONGEST, MOST_CHAT, WIDEST = 64, 14, 64  # tokens of the text, sentences of chat after it, tokens of a window
MOST_LATENT = 64  # the models' hidden size: more numbers could say no more
SHOWN = 3  # words of an answer


@dataclass(frozen=True)
class Kept:
    """What one technique has after the notes. numbers: of each token read, in one layer (0: none of its own any more).

    reachable: whether a token can still reach the newest one, through all layers together. bytes: ``cache.nbytes``, all layers.
    per_token: bytes that the next token adds (0 for a full window and a fixed state). answer: (word, probability), likeliest first.
    as_trained: whether the answering model has the chosen size. guess: whether nothing that names the fact can have reached the answer.
    """

    technique: str
    numbers: tuple[int, ...]
    reachable: tuple[bool, ...]
    bytes: int
    per_token: int
    answer: tuple[tuple[str, float], ...]
    as_trained: bool
    guess: bool


@dataclass(frozen=True, eq=False)
class ToolboxStory:
    """The moment after ``read`` of the text's tokens, and the question asked from there.

    tokens: of text, chat and question (the last ``asked`` of them); those from ``read`` up to the question are not read yet. notes: (first,
    last + 1) of each note in the text. kept: one a technique. technique, layer: looked into. heads [H, read + asked]: how much each token
    counts for each head of that layer when the blank is filled (signed shares for KDA's state, attention for the others; NaN where a
    window can't read). influence [read + asked]: each token's share in the answer through all layers, by gradient. rebuilt: error of the
    MHA model's keys and values rebuilt from as many numbers as MLA keeps. fact: where the text last names a value of the slot. states
    [layers, H, K, V]: what KDA's model remembers of the tokens read. settings: the arguments that this story was told with.
    """

    tokens: tuple[str, ...]
    asked: int
    read: int
    notes: tuple[tuple[int, int], ...]
    slot: str
    window: int
    groups: int
    latent: int
    kept: tuple[Kept, ...]
    technique: str
    layer: int
    heads: np.ndarray
    influence: np.ndarray
    rebuilt: float
    fact: int | None
    states: np.ndarray
    settings: Mapping[str, Any]

    def again(self, **changes: Any) -> ToolboxStory:
        """The same story with some of ``toolbox_story``'s arguments changed."""
        return toolbox_story(**{**self.settings, **changes})

    @property
    def text_tokens(self) -> int:
        return len(self.tokens) - self.asked

    @property
    def layers(self) -> int:
        return toolbox_config("mha").num_hidden_layers

    @property
    def labels(self) -> tuple[str, ...]:
        """One label a number of tokens read."""
        return ("nothing read", *self.tokens[: self.text_tokens])

    def of(self, technique: str) -> Kept:
        return next(k for k in self.kept if k.technique == technique)

    def distance(self) -> int | None:
        """Tokens from the fact to the last one of the question, where the blank is filled; None if the fact has not been read."""
        return None if self.fact is None else self.read + self.asked - 1 - self.fact

    def tray(self) -> tuple[str, ...]:
        """The notes that lie in the window in full."""
        first = max(0, self.read - self.window)
        return tuple(" ".join(self.tokens[a:b]) for a, b in self.notes if a >= first and b <= self.read)

    @property
    def sentence(self) -> str:
        """What the technique looked into keeps and answers, with its numbers."""
        k, mha = self.of(self.technique), self.of("mha")
        said = getattr(self, f"_{self.technique}")(k, mha)
        words = ", ".join(f"{w} {format_probability(p)}" for w, p in k.answer[:2])
        named = "" if self.fact is not None else " (the notes read so far name none)"
        said += f" Asked for the {self.slot}{named}, it {'guesses' if k.guess else 'says'} {words}."
        if self.technique == "sliding_window" and self.window != WINDOW:
            said += f" (The weights were trained with a window of {WINDOW}.)"
        if (longer := self.read + self.asked) > LENGTH:
            said += f" ({longer} tokens are more than the {LENGTH} of its training.)"
        return said if k.as_trained else f"{said} (Bytes are those of the chosen size, the answer that of the trained one.)"

    def _mha(self, k: Kept, _: Kept) -> str:
        return f"Keep all: every head of every layer keeps its own copy, {format_bytes(k.bytes)} after {self._read()}."

    def _gqa(self, k: Kept, mha: Kept) -> str:
        heads = toolbox_config("gqa").num_attention_heads
        return (
            f"Share: {heads} heads read {self.groups} shared {'copy' if self.groups == 1 else 'copies'}, {format_bytes(k.bytes)} after "
            f"{self._read()} where MHA keeps {format_bytes(mha.bytes)}."
        )

    def _mla(self, k: Kept, _: Kept) -> str:
        before, after = row_numbers(toolbox_config("mha"), "mha"), row_numbers(toolbox_config("mla", latent=self.latent), "mla")
        big = facts.DeepSeekV2
        times = big.numbers_before.value / big.numbers_after.value
        return (
            f"Shrink: a token's {before} numbers become a card of {after} in each layer, {format_bytes(k.bytes)} after {self._read()} "
            f"(MHA's own numbers could be rebuilt from {after} with an error of {format_probability(self.rebuilt)}; DeepSeek-V2, "
            f"published: {format_count(big.numbers_before.value)} to {big.numbers_after.value}, {times:.0f}x)."
        )

    def _sliding_window(self, k: Kept, _: Kept) -> str:
        reach = self.layers * (self.window - 1)
        held = f"{len(self.tray())} of {self._notes_read()} {plural('note', self._notes_read())}"
        said = f"Forget: the window of {self.window} tokens holds {held}, {format_bytes(k.bytes)}."
        if (d := self.distance()) is None:
            return said
        word, one = self.tokens[self.fact], "still reads it" if d < self.window else "no longer reads it"
        stack = "which is still enough" if d <= reach else "which is not enough either"
        return (
            f"{said} {word} stands {d} {plural('token', d)} before the blank: a layer, which looks {self.window - 1} back, {one}; "
            f"{self.layers} layers in a stack reach {reach}, {stack}."
        )

    def _kda(self, k: Kept, _: Kept) -> str:
        one = cache_bytes(toolbox_config("kda"), 1, dtype=torch.float32).fixed
        even = {t: -(-one // cache_bytes(self.config(t), 1, dtype=torch.float32).per_token) for t in ("mha", "mla")}
        return (
            f"Replace: a new value takes the old one's place in a state of {format_bytes(k.bytes)}, the same after any number of tokens; "
            f"less than MHA from {even['mha']} tokens on, less than MLA from {even['mla']}."
        )

    def config(self, technique: str) -> K3Config:
        """The technique's model at the chosen size."""
        return sized(technique, groups=self.groups, latent=self.latent, window=self.window)

    def _read(self) -> str:
        return f"{self.read} {plural('token', self.read)}"

    def _notes_read(self) -> int:
        return sum(b <= self.read for _, b in self.notes)


def toolbox_story(
    *,
    text: str = TEXT,
    slot: str = "day",
    technique: str = "sliding_window",
    read: int | None = None,
    window: int = WINDOW,
    groups: int = GROUPS,
    latent: int = LATENT,
    layer: int | None = None,
    chat: int = 0,
    models: Mapping[str, K3ForCausalLM] | None = None,
) -> ToolboxStory:
    """Read the notes with every technique and ask for one fact.

    text: words of the meeting vocabulary, at most 64 tokens. slot: "day", "room", "client" or "attendees". technique, layer (1-based;
    default: where the answer gets most weight): looked into. read: tokens read before the question (default: all). window: tokens, 2 to
    64. groups: copies that GQA keeps: 1, 2, 4. latent: 4 to 64 numbers. chat: sentences between the text and the question, 0 to 14.
    models: technique -> a model of your own in place of the trained one. Raises ValueError that names the argument.
    """
    settings = {"text": text, "slot": slot, "technique": technique, "read": read, "window": window, "groups": groups, "latent": latent,
                "layer": layer, "chat": chat, "models": models}  # fmt: skip
    for name, value, low, high in (("window", window, 2, WIDEST), ("latent", latent, 4, MOST_LATENT), ("chat", chat, 0, MOST_CHAT)):
        _whole(name, value, low, high)
    for name, value, known in (("slot", slot, SLOTS), ("technique", technique, TECHNIQUES), ("groups", groups, (1, 2, 4))):
        if value not in known or isinstance(value, bool):
            raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {value!r}")
    ids = _encoded(text, chat)
    read = len(ids) if read is None else read
    _whole("read", read, 0, len(ids))
    readers = {t: _own(models, t) or trained(t) for t in TECHNIQUES}
    if layer is not None:
        _whole("layer", layer, 1, toolbox_config(technique).num_hidden_layers)

    question = meeting.encode(meeting.question(slot))
    before = tuple(ids[:read])
    values = {meeting.encode(v)[0] for v in meeting.SLOTS[slot]}
    fact = max((i for i in range(read) if ids[i] in values), default=None)
    kept = []
    for t, model in readers.items():
        config = sized(t, groups=groups, latent=latent, window=window)
        reader = cut_to_window(model, window)
        held = kept_bytes(reader if reader.config == config else config, before)
        inside = [t != "sliding_window" or i >= read - window for i in range(read)]
        reach = config.num_hidden_layers * (window - 1)
        kept.append(Kept(
            technique=t, numbers=tuple(row_numbers(config, t) * here for here in inside), bytes=held,
            reachable=tuple(t != "sliding_window" or read - 1 - i <= reach for i in range(read)),
            per_token=_growth(config, read), answer=answer_of(reader, before, tuple(question))[:SHOWN], as_trained=reader.config == config,
            guess=fact is None or (t == "sliding_window" and read + len(question) - 1 - fact > reach),
        ))  # fmt: skip
    reader = cut_to_window(readers[technique], window)
    look = looked_at(reader, (*before, *question), None if layer is None else layer - 1)
    return ToolboxStory(
        tokens=tuple(meeting.VOCABULARY[i] for i in (*ids, *question)), asked=len(question), read=read, notes=notes_of(ids), slot=slot,
        window=window, groups=groups, latent=latent, kept=tuple(kept), technique=technique, layer=look.layer + 1, heads=look.heads,
        influence=look.influence, rebuilt=rebuild_error(readers["mha"], row_numbers(toolbox_config("mla", latent=latent), "mla")),
        fact=fact, states=states_after(readers["kda"], before), settings=settings,
    )  # fmt: skip


def sized(technique: str, *, groups: int, latent: int, window: int) -> K3Config:
    """``toolbox_config`` with the one size that the technique has; the others stay as trained, since they mean nothing to it."""
    own = {"gqa": {"groups": groups}, "mla": {"latent": latent}, "sliding_window": {"window": window}}
    return toolbox_config(technique, **own.get(technique, {}))


def notes_of(ids: list[int]) -> tuple[tuple[int, int], ...]:
    """(first, last + 1) of each note: a note ends at a comma or full stop, and after a value if the clause goes on to name another."""
    values = {meeting.encode(v)[0] for words in meeting.SLOTS.values() for v in words}
    marks = {meeting.encode(mark)[0] for mark in ",."}
    ends, named = [], None  # named: the clause's last value so far
    for i, token in enumerate(ids):
        if token in values:
            if named is not None:
                ends.append(named + 1)
            named = i
        if token in marks or i + 1 == len(ids):
            ends.append(i + 1)
            named = None
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _growth(config: K3Config, read: int) -> int:
    """Bytes that one more token adds to a float32 cache of ``read`` tokens."""
    now, after = (cache_bytes(config, max(1, n), dtype=torch.float32) for n in (read, read + 1))
    return after.total - now.total


def text_length(text: str, chat: int = 0) -> int:
    """Tokens of a text and the chat after it. ValueError as in ``toolbox_story``."""
    return len(_encoded(text, chat))


def _encoded(text: str, chat: int) -> list[int]:
    if not isinstance(text, str) or not text.strip():
        raise ValueError("text must hold at least one word")
    if len(text) > 1000:
        raise ValueError(f"text: at most {LONGEST} words fit in this story")
    ids = meeting.encode(text)
    if not 0 < len(ids) <= LONGEST:
        raise ValueError(f"text: 1 to {LONGEST} words and marks fit in this story, got {len(ids)}")
    return ids + [i for n in range(chat) for i in meeting.encode(CHAT[n % len(CHAT)])]


def _whole(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high}, got {value!r}")


def _own(models: Mapping[str, K3ForCausalLM] | None, technique: str) -> K3ForCausalLM | None:
    """The reader's own model of a technique, if there is one that fits."""
    if models is None:
        return None
    if not isinstance(models, Mapping):
        raise ValueError(f"models must be a dict of technique to model, got {type(models).__name__}")
    unknown = [t for t in models if t not in TECHNIQUES]
    if unknown:
        raise ValueError(f"models: unknown technique {unknown[0]!r}; techniques are {', '.join(TECHNIQUES)}")
    model = models.get(technique)
    if model is not None and not isinstance(model, K3ForCausalLM):
        raise ValueError(f"models: the model for {technique!r} must be a K3ForCausalLM, got {type(model).__name__}")
    if model is not None and cut_to_window(model, WINDOW).config != toolbox_config(technique):
        raise ValueError(f"models: the model for {technique!r} must have the config of minimodel.toolbox.toolbox_config({technique!r})")
    return model
