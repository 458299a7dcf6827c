"""The Gated MLA story: one card a token, heads that look the cards up, a gate that decides what leaves the layer.

*By hand*: the notes have chosen vectors and a real ``GatedMLA`` layer has chosen weights, so that what each head looks for can be said
in words. *Learned*: see ``k3viz.mla.learned``; the same trace type, from a trained model. Beside both, by formula and at a released
model's size: what the layer costs in the absorbed form and when keys and values are rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from k3viz.mla.forms import CONTEXT, Forms, count_forms
from minimodel import GatedMLA, K3Config, record
from minimodel.cache import Rows
from minimodel.formats import format_digits, format_number, format_probability, plural
from minimodel.tasks import meeting
from minimodel.trace import frozen

if TYPE_CHECKING:
    from minimodel import K3ForCausalLM

NOTES = (*meeting.ARTICLE_FACTS.items(), meeting.ARTICLE_UPDATE)
ROWS = tuple(dict.fromkeys(row for row, _ in NOTES))
WORDS = tuple(word for _, word in NOTES)
GATES = {"learned": None, "open": torch.inf, "shut": -torch.inf}  # what is put in the place of W_g x
VALUES = 16  # value channels a head, by hand: one +1/-1 pattern a word
ASK, GATE = 12.0, 6.0  # by hand: the score of a card that a head looks for, and how far the gate leans to either side
MATTERS = 0.005  # weaker than this a word would print as 0.00


@dataclass(frozen=True, eq=False)
class MLAStory:
    """Trace of one Gated MLA layer that reads T tokens, H heads, V value channels a head.

    learned: from a trained model; otherwise by hand. place: where the layer stands. slot: what is asked. latent [T, L+R]: the card
    of each token, L = rank latent numbers and R extra ones. attention [H, T, T]: rows are reading tokens. gate [T, H, V], in [0, 1].
    answers: for each token, what the layer (by hand: strengths, 1 = one word in full) or the whole model (learned: probabilities of
    the next word) says there, strongest first. off: largest difference between the absorbed and the rebuilt form's outputs.
    forms: the two forms' costs at a released model's size.
    """

    learned: bool
    place: str
    tokens: tuple[str, ...]
    heads: tuple[str, ...]
    slot: str
    gate_held: str
    rank: int
    latent: np.ndarray
    attention: np.ndarray
    gate: np.ndarray
    answers: tuple[tuple[tuple[str, float], ...], ...]
    off: float
    forms: Forms

    def reads(self, head: int, position: int = -1) -> tuple[str, float]:
        """The card that a head reads most at a position: (token, share)."""
        row = self.attention[head, position]
        return self.tokens[int(row.argmax())], float(row.max())

    def sentence_at(self, position: int) -> str:
        """What happens at one token, with its numbers."""
        position = range(len(self.tokens))[position]
        cards = position + 1
        shown = range(len(self.heads)) if self.learned else [self.heads.index(f"{self.slot} head")]
        read = ", ".join(f"{self.heads[h]} reads {word!r} {format_probability(share)}" for h in shown
                         for word, share in [self.reads(h, position)])  # fmt: skip
        said = f"At {self.tokens[position]!r} there {'is' if cards == 1 else 'are'} {cards} {plural('card', cards)} of "
        return f"{said}{self.latent.shape[1]} numbers: {read}. {self._gate_words(position)} {self._answer_words(position)}"

    @property
    def sentence(self) -> str:
        return self.sentence_at(-1)

    @property
    def forms_sentence(self) -> str:
        """That both forms are the same function here, and what each costs at a released model's size."""
        return f"Absorbed or rebuilt, this layer's outputs differ by {format_digits(self.off)} at most. {self.forms.sentence}"

    def _gate_words(self, position: int) -> str:
        if self.gate_held != "learned":
            alone = ": whatever is answered now comes from the other layers" if self.learned and self.gate_held == "shut" else ""
            return f"The gate is held {self.gate_held}{alone}."
        open_ = self.gate[position].mean(-1)
        if self.learned:
            return f"The gate lets through {', '.join(f'{format_probability(g)} of {h}' for h, g in zip(self.heads, open_, strict=True))}."
        asked = self.heads.index(f"{self.slot} head")
        others = format_probability(np.delete(open_, asked).max(initial=0.0))
        return f"The gate lets through {format_probability(open_[asked])} of it and {others} of the other heads."

    def _answer_words(self, position: int) -> str:
        said = self.answers[position]
        if self.learned:
            last = position == len(self.tokens) - 1
            return f"The model's {'answer' if last else 'next word'}: {said[0][0]} {format_probability(said[0][1])}."
        return f"Out comes {' + '.join(f'{word} {format_number(x)}' for word, x in said)}." if said else "Nothing comes out."


def mla_story(
    *,
    slot: str = "day",
    gate: str = "learned",
    recency: float = 6.0,
    notes: Sequence[tuple[str, str]] = NOTES,
    model: K3ForCausalLM | None = None,
    text: str | None = None,
    config: K3Config | None = None,
    context: int = CONTEXT,
    at_once: int = 1,
) -> MLAStory:
    """Let a Gated MLA layer read the meeting notes and answer a question, in float64: by hand, or learned when ``model`` is given.

    slot: what is asked, one of client, day, room, attendees (learned: budget too). gate: "learned" (as the layer computes it), or held
    "open" or "shut". recency: by hand, how much a head prefers later notes, 0 to 24; the layer has no positions of its own. notes: by
    hand, (row, word) pairs in the order in which they came, 2 to 15; slot is one of their rows, and each row has a head. model, text: a
    trained ``K3ForCausalLM`` and the notes that it reads before the question (default: the article's). config: sizes for the cost of
    the two forms (default: K3's); context, at_once: cards kept and tokens read in one pass, for that cost.
    Raises ValueError that names the argument.
    """
    if gate not in tuple(GATES):
        raise ValueError(f"gate must be one of {', '.join(GATES)}, got {gate!r}")
    forms = count_forms(config, context, at_once)
    if model is not None:
        from k3viz.mla.learned import learned_trace

        return MLAStory(forms=forms, **learned_trace(model, text, slot, gate))
    if text is not None:
        raise ValueError("text needs a model to read it: give model=... as well")
    if not isinstance(notes, (tuple, list)):
        raise ValueError(f"notes must be a list of (row, word) pairs, got {notes!r}")
    notes = tuple(tuple(note) if isinstance(note, (tuple, list)) else (note,) for note in notes)
    if not 2 <= len(notes) < VALUES or any(len(n) != 2 or not all(isinstance(x, str) and x.strip() for x in n) for n in notes):
        raise ValueError(f"notes must be 2 to {VALUES - 1} (row, word) pairs of texts that are not empty, got {notes!r}")
    rows = tuple(dict.fromkeys(row for row, _ in notes))
    if slot not in rows:
        raise ValueError(f"slot must be one of {', '.join(rows)}, got {slot!r}")
    if isinstance(recency, bool) or not isinstance(recency, (int, float)) or not 0 <= recency <= 24:
        raise ValueError(f"recency must lie in [0, 24], got {recency!r}")
    return MLAStory(forms=forms, **_by_hand(notes, slot, gate, float(recency)))


# ---- the layer, watched ----


@contextmanager
def held_gate(layer: GatedMLA, gate: str) -> Iterator[None]:
    """Inside the block the layer's output gate is held open or shut, or left as it is ("learned")."""
    value = GATES[gate]
    if value is None:
        yield
        return
    hook = layer.g_proj.register_forward_hook(lambda _module, _inputs, out: torch.full_like(out, value))
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def forms_differ(layer: GatedMLA, x: Tensor) -> float:
    """Largest difference between the layer's two forms at the last token of x [1, T, D]: decoding is absorbed, prefill rebuilds."""
    rows = Rows()
    if x.shape[1] > 1:
        layer(x[:, :-1], cache=rows)
    return float((layer(x[:, -1:], cache=rows) - layer(x)[:, -1:]).abs().max())


# ---- by hand ----


@lru_cache(maxsize=128)
def _by_hand(notes: tuple[tuple[str, str], ...], slot: str, gate: str, recency: float) -> dict:
    rows, words = tuple(dict.fromkeys(row for row, _ in notes)), tuple(word for _, word in notes)
    layer, x, patterns = _layer_by_hand(len(rows), recency), _tokens_by_hand(notes, rows, slot), _patterns(len(words))
    with torch.no_grad(), held_gate(layer, gate), record(layer) as trace:
        y = layer(x)
        attention, opened, latent = (trace[name][0] for name in ("attention", "gate", "latent"))
    off = forms_differ(layer, x)
    said = (y[0, :, len(rows) : len(rows) + VALUES] @ patterns.T / VALUES).tolist()
    answers = tuple(
        tuple(sorted(((w, s) for w, s in zip(words, row, strict=True) if abs(s) >= MATTERS), key=lambda pair: -pair[1])) for row in said
    )
    return dict(
        learned=False, place="chosen weights", tokens=(*(f"{row}: {word}" for row, word in notes), f"{slot}?"),
        heads=tuple(f"{row} head" for row in rows), slot=slot, gate_held=gate, rank=layer.rank, latent=frozen(latent),
        attention=frozen(attention), gate=frozen(opened), answers=answers, off=off,
    )  # fmt: skip


def _patterns(words: int) -> Tensor:
    """[words, VALUES]: orthogonal patterns of +1 and -1, rows of a Hadamard matrix."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < VALUES:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h[1 : 1 + words]


def _tokens_by_hand(notes: tuple[tuple[str, str], ...], rows: tuple[str, ...], slot: str) -> Tensor:
    """[1, T, D]: each note as [its row | its word | how late it came | nothing asked | 1], then the question."""
    R, last = len(rows), len(notes) - 1
    x = torch.zeros(1, len(notes) + 1, 2 * R + VALUES + 2, dtype=torch.float64)
    for i, ((row, _), pattern) in enumerate(zip(notes, _patterns(len(notes)), strict=True)):
        x[0, i, rows.index(row)] = 1
        x[0, i, R : R + VALUES] = pattern
        x[0, i, R + VALUES] = i / last
    x[0, -1, R + VALUES + 1 + rows.index(slot)] = 1
    x[..., -1] = 1
    return x


def _layer_by_hand(R: int, recency: float) -> GatedMLA:
    """A GatedMLA whose head h looks for row h of R. A card is [sqrt(R) x row | word] and, as its extra number, how late the note came."""
    V = VALUES
    D, late, asked, one = 2 * R + V + 2, R + V, R + V + 1, 2 * R + V + 1
    layer = GatedMLA(K3Config.meeting().replace(
        hidden_size=D, num_attention_heads=R, q_lora_rank=None, kv_lora_rank=R + V, qk_nope_head_dim=R, qk_rope_head_dim=1, v_head_dim=V,
    )).double().eval()  # fmt: skip
    q, down, up, gate, out = (
        torch.zeros_like(p.weight) for p in (layer.q_proj, layer.kv_a_proj_with_mqa, layer.kv_b_proj, layer.g_proj, layer.o_proj)
    )
    scale = (R + 1) ** 0.5  # undoes the layer's 1/sqrt(nope + extra)
    down[:R, :R] = R**0.5 * torch.eye(R)  # a card's R + V numbers have a mean square of 1: its norm changes nothing
    down[R : R + V, R : R + V] = torch.eye(V)
    down[R + V, late] = 1
    for h in range(R):
        q[h * (R + 1) + h, one] = ASK * scale
        q[h * (R + 1) + R, one] = recency * scale
        up[h * (R + V) : h * (R + V) + R, :R] = R**-0.5 * torch.eye(R)
        up[h * (R + V) + R : (h + 1) * (R + V), R:] = torch.eye(V)
        gate[h * V : (h + 1) * V, one] = -GATE
        gate[h * V : (h + 1) * V, asked + h] = 2 * GATE
        out[R : R + V, h * V : (h + 1) * V] = torch.eye(V)
    weights = {"q_proj": q, "kv_a_proj_with_mqa": down, "kv_b_proj": up, "g_proj": gate, "o_proj": out}
    layer.load_state_dict({f"{name}.weight": w for name, w in weights.items()} | {"kv_a_layernorm.weight": torch.ones(R + V)})
    return layer.requires_grad_(False)
