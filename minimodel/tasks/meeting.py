"""Meeting notes: the task that runs through the whole course.

A note states facts about one to eight projects (client, budget, meeting day, room, attendees), then changes some of them, corrects
some, and chats in between. A question asks for the *latest* value of one slot of one project::

    The Acme planning meeting is Tuesday, in room 4B, with six people attending. The meeting has moved to Thursday.
    The meeting is now on ___.

With one project the sentences stay bare, as above; with several each names its project ("The meeting for Falcon moved to Thursday.",
"The Falcon budget is $80k."). The vocabulary is closed and small, a token is a word, and everything is drawn from a seed.
"""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

SLOTS: dict[str, tuple[str, ...]] = {
    "client": ("Acme", "Globex", "Initech", "Umbrella", "Hooli", "Vandelay", "Soylent", "Wonka", "Stark", "Wayne", "Tyrell", "Cyberdyne"),
    "budget": ("$10k", "$20k", "$30k", "$40k", "$50k", "$60k", "$70k", "$80k", "$90k", "$100k", "$120k", "$150k"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "room": ("1A", "1B", "2A", "2B", "3A", "3B", "4A", "4B", "5A", "5B", "6A", "6B"),
    "attendees": ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
}  # fmt: skip
PROJECTS = ("Falcon", "Harbor", "Juniper", "Comet", "Meadow", "Quartz", "Willow", "Summit")
BLANK = "___"
SENTENCE, ASKED = 18, 10  # no sentence is longer, no question is longer, in tokens

# {v} is a slot's value, {old} a value that is *not* the answer, [p] a project's name. With one project "for [p]" and [p] are left out; with
# several only templates that hold [p] are used. A project's name stands at most three words before the value and before the blank: the
# reach of KDA's short convolution, which lets one layer bind project, slot and value.
OPENING = "The {client} planning meeting is {day} , in room {room} , with {attendees} people attending ."


def _noun(noun: str, *more: str) -> tuple[tuple[str, ...], ...]:
    """Statements, updates, corrections and questions of a slot that has a noun of its own."""
    return (
        (f"The {noun} for [p] is {{v}} .", f"The [p] {noun} is {{v}} ."),
        (f"The {noun} for [p] is now {{v}} .", f"The {noun} for [p] changed to {{v}} .", *more),
        (f"Correction : the {noun} for [p] is {{v}} , not {{old}} .",),
        (f"The {noun} for [p] is {{v}} .", f"The [p] {noun} is now {{v}} ."),
    )


TEMPLATES: dict[str, tuple[tuple[str, ...], ...]] = {
    "client": _noun("client"),
    "budget": _noun("budget"),
    "day": (
        ("The meeting for [p] is on {v} .", "The meeting for [p] is {v} ."),
        ("The meeting for [p] moved to {v} .", "The meeting has moved to {v} .", "The meeting is now on {v} ."),
        ("Correction : the meeting for [p] is on {v} , not {old} .",),
        ("The meeting for [p] is now on {v} .",),
    ),
    "room": _noun("room", "The meeting has moved to room {v} .", "The meeting is now in room {v} ."),
    "attendees": (
        ("The meeting for [p] has {v} people attending .",),
        ("The meeting for [p] now has {v} people attending .",),
        ("Correction : the meeting for [p] has {v} people attending , not {old} .",),
        ("The meeting for [p] now has {v} people attending .",),
    ),
}
STATEMENT, UPDATE, CORRECTION, QUESTION = range(4)
# What the article's notes say, in their order, and what changes then. ARTICLE: both in full; it then asks for the day.
ARTICLE_FACTS = {"client": "Acme", "day": "Tuesday", "room": "4B", "attendees": "six"}
ARTICLE_UPDATE = ("day", "Thursday")
ARTICLE = tuple(
    re.sub(r" ([.,])", r"\1", sentence)
    for sentence in (OPENING.format(**ARTICLE_FACTS), TEMPLATES["day"][UPDATE][1].format(v=ARTICLE_UPDATE[1]))
)
FILLER = (
    "Lunch is at noon .", "Please bring the slides .", "Thanks for the notes .", "The coffee machine is broken .", "Nothing else changed .",
    "The printer is out of paper .", "The weather is nice today .", "See you there .", "Please read the report before the call .",
    # these name a day, a room or a number that belongs to no project
    "The office is closed on {day} .", "Lunch moved to {day} .", "The other team has room {room} .",
    "The party has {attendees} people attending .",
)  # fmt: skip


def _words() -> list[str]:
    templates = [OPENING, *FILLER, *(t for kinds in TEMPLATES.values() for kind in kinds for t in kind)]
    words = {w for t in templates for w in t.split() if w[0] not in "[{"}
    return [*sorted(words), *PROJECTS, *(v for values in SLOTS.values() for v in values)]


VOCABULARY: tuple[str, ...] = ("<pad>", BLANK, *_words())
_ID = {word: i for i, word in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    """Token ids of a text in the closed vocabulary: words, numbers, punctuation and ``___``."""
    ids = []
    for word in re.findall(r"___|\$?\w+|[^\w\s]", text):
        if word not in _ID:
            near = difflib.get_close_matches(word, VOCABULARY, 3, 0.5)
            hint = f"; near it: {', '.join(near)}" if near else ""
            word = word if len(word) <= 40 else word[:40] + "…"
            raise ValueError(f"text: the word {word!r} is not in the meeting vocabulary of {len(VOCABULARY)} words{hint}")
        ids.append(_ID[word])
    return ids


def check_reader(model: object) -> None:
    """ValueError unless ``model`` is a ``K3ForCausalLM`` that reads this vocabulary."""
    from minimodel.model import K3ForCausalLM

    if not isinstance(model, K3ForCausalLM):
        raise ValueError(f"model must be a K3ForCausalLM, got {type(model).__name__}")
    if model.config.vocab_size != len(VOCABULARY):
        raise ValueError(f"model reads {model.config.vocab_size} words, the meeting vocabulary has {len(VOCABULARY)}")


def decode(ids: Iterable[int]) -> str:
    """The text of token ids; punctuation joins the word before it."""
    words = []
    for i in ids:
        if not 0 <= int(i) < len(VOCABULARY):
            raise ValueError(f"ids must lie in 0..{len(VOCABULARY) - 1}, got {int(i)}")
        words.append(VOCABULARY[int(i)])
    return re.sub(r" ([.,:])", r"\1", " ".join(words))


def question(slot: str, project: str | None = None) -> str:
    """The question for a slot, up to its blank: "The meeting is now on", "The budget for Falcon is"."""
    if slot not in SLOTS:
        raise ValueError(f"slot must be one of {', '.join(SLOTS)}, got {slot!r}")
    if project is not None and project not in PROJECTS:
        raise ValueError(f"project must be one of {', '.join(PROJECTS)}, got {project!r}")
    words = _fill(TEMPLATES[slot][QUESTION][-1 if project is None else 0], project)
    return " ".join(words[: words.index("{v}")])


@dataclass
class Note:
    """Tokens of a note, the label of every token (-100: nothing to learn), and the facts that hold at its end."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    facts: dict[tuple[str | None, str], str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return decode(self.ids)

    def say(self, words: list[str], answer_at: int | None = None, answer: str | None = None) -> None:
        """Append a sentence. The word at ``answer_at`` is to be predicted as ``answer``, and if it stands there, so is the rest."""
        for i, word in enumerate(words):
            self.ids.append(_ID[word])
            rest = answer_at is not None and i > answer_at and words[answer_at] == answer
            self.labels.append(_ID[answer] if i == answer_at else _ID[word] if rest else -100)


class NoteWriter:
    """Writes one note, sentence by sentence, and keeps the facts."""

    def __init__(self, rng: random.Random, projects: int) -> None:
        if not 1 <= projects <= 8:
            raise ValueError(f"projects must lie in 1..8, got {projects}")
        self.rng, self.note = rng, Note()
        self.projects: list[str | None] = [None] if projects == 1 else list(rng.sample(PROJECTS, projects))

    def opening(self) -> None:
        """Four facts of the only project in one sentence, the article's first."""
        values = {slot: self._set(None, slot) for slot in ("client", "day", "room", "attendees")}
        self.note.say([values.get(w[1:-1], w) for w in OPENING.split()])

    def state(self, project: str | None, slot: str, kind: int) -> None:
        """A statement, an update or a correction."""
        old = self.note.facts.get((project, slot))
        value = self._set(project, slot)
        wrong = old if old not in (None, value) else self.rng.choice([v for v in SLOTS[slot] if v != value])
        self.note.say([{"{v}": value, "{old}": wrong}.get(w, w) for w in self._sentence(project, slot, kind)])

    def filler(self) -> None:
        self.note.say([self.rng.choice(SLOTS[w[1:-1]]) if w[0] == "{" else w for w in self.rng.choice(FILLER).split()])

    def ask(self, project: str | None, slot: str, *, reveal: bool) -> None:
        """A question with its answer to be predicted; what stands in the text is the answer, or the blank."""
        answer = self.note.facts[project, slot]
        words = self._sentence(project, slot, QUESTION)
        at = words.index("{v}")
        words[at] = answer if reveal else BLANK
        self.note.say(words, at, answer)

    def _set(self, project: str | None, slot: str) -> str:
        value = self.note.facts[project, slot] = self.rng.choice(SLOTS[slot])
        return value

    def _sentence(self, project: str | None, slot: str, kind: int) -> list[str]:
        templates = TEMPLATES[slot][kind]
        return _fill(self.rng.choice(templates if project is None else [t for t in templates if "[p]" in t]), project)


def write_note(
    rng: random.Random, *, projects: int, length: int, chat: float = 0.3, ask: float = 0.0, reveal: float = 0.3, final_questions: int = 1,
    few: float = 0.5, spread: float | None = None,
) -> Note:  # fmt: skip
    """A note of at most ``length`` tokens that ends in questions.

    New facts come in random order, between updates and corrections of those that are known, filler (share ``chat``) and questions (share
    ``ask``).

    Args:
        projects: 1 to 8. length: tokens at most. chat, ask: shares of sentences in [0, 1].
        reveal: how often the answer of a question *inside* the note stands in the text instead of the blank.
        final_questions: blank questions at the end, about facts drawn at random (each at most once).
        few: how often only some of the facts are known.
        spread: None, and all known facts change equally often; else a fact changes in proportion to u^spread with u uniform in [0, 1), so
            that a few change all the time while others grow old.
    """
    if spread is not None and not spread >= 0:
        raise ValueError(f"spread must be at least 0 or None, got {spread}")
    for name, share in (("chat", chat), ("ask", ask), ("reveal", reveal), ("few", few)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name} must lie in [0, 1], got {share}")
    if final_questions < 0:
        raise ValueError(f"final_questions must be at least 0, got {final_questions}")
    room_for_end = ASKED * final_questions
    if length < SENTENCE + room_for_end:
        raise ValueError(f"length must be at least {SENTENCE} + {ASKED} * final_questions = {SENTENCE + room_for_end}, got {length}")
    w = NoteWriter(rng, projects)
    note = w.note
    facts = [(project, slot) for project in w.projects for slot in SLOTS]
    rng.shuffle(facts)
    if rng.random() < few:
        facts = facts[: rng.randint(1, len(facts))]
    heat = {fact: rng.random() ** spread for fact in facts} if spread is not None else {}
    if projects == 1 and rng.random() < 0.5:
        w.opening()
        if spread is not None:
            heat |= {fact: heat.get(fact, rng.random() ** spread) for fact in note.facts}
    while (left := length - room_for_end - len(note.ids)) >= SENTENCE:
        roll = rng.random() if note.facts or left >= 2 * SENTENCE else 1.0  # the last chance is for a fact
        if roll < chat:
            w.filler()
        elif roll < chat + (1 - chat) * ask and note.facts:
            w.ask(*rng.choice(list(note.facts)), reveal=rng.random() < reveal)
        elif facts and (not note.facts or rng.random() < 0.5):
            w.state(*facts.pop(), STATEMENT)
        else:
            known = list(note.facts)
            changes = rng.choice(known) if spread is None else rng.choices(known, [heat[fact] + 1e-6 for fact in known])[0]
            w.state(*changes, CORRECTION if rng.random() < 0.25 else UPDATE)
    for project, slot in rng.sample(list(note.facts), min(final_questions, len(note.facts))):
        w.ask(project, slot, reveal=False)
    return note


def training_batch(
    seed: int, step: int, *, rows: int, length: int, max_projects: int = 8
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Token ids and labels of one training step: a pure function of (seed, step), so that an interrupted run resumes exactly."""
    rng = random.Random(f"meeting/train/{seed}/{step}")
    notes = []
    for _ in range(rows):
        chat, ask = rng.uniform(0.0, 0.8), rng.uniform(0.2, 0.8)
        projects = rng.randint(1, max_projects)
        final = rng.randint(1, max(1, min(length // 24, (length - SENTENCE) // ASKED)))
        notes.append(write_note(rng, projects=projects, length=length, chat=chat, ask=ask, final_questions=final))
    return pad_notes(notes, length)


def held_out_notes(seed: int, count: int, *, projects: int, length: int, final_questions: int = 8) -> list[Note]:
    """Notes for scoring, from a stream of seeds that training never draws. Only the final questions carry labels."""
    return [
        write_note(rng, projects=projects, length=length, final_questions=final_questions)
        for rng in (random.Random(f"meeting/held-out/{seed}/{projects}/{length}/{i}") for i in range(count))
    ]


def pad_notes(notes: list[Note], length: int | None = None) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Ids and labels padded on the right to ``length`` (the longest note by default)."""
    length = max(len(n.ids) for n in notes) if length is None else length
    ids = torch.zeros(len(notes), length, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, note in enumerate(notes):
        ids[row, : len(note.ids)] = torch.tensor(note.ids)
        labels[row, : len(note.labels)] = torch.tensor(note.labels)
    return ids, labels


LONGEST = 1024  # tokens of the longest note in training


def curriculum(step: int, steps: int) -> tuple[int, int]:
    """(note length, projects at most) of a training step: short notes about few projects first.

    Long notes come last. They teach the keys of forty facts to keep out of each other's way: a fact that is not repeated has to
    survive all the writes after it.
    """
    if step < 0.1 * steps:
        return LONGEST // 8, 4
    if step < 0.3 * steps:
        return LONGEST // 4, 8
    return LONGEST // (1 if step >= 0.6 * steps and step % 2 else 2), 8


@dataclass(frozen=True)
class Score:
    """Exact matches among the blanks of held-out notes: the most likely word of the whole vocabulary has to be the answer."""

    right: dict[str, int]
    asked: dict[str, int]

    @property
    def accuracy(self) -> float:
        return sum(self.right.values()) / sum(self.asked.values())

    def by_slot(self) -> dict[str, float]:
        return {slot: self.right[slot] / n for slot, n in self.asked.items() if n}


@torch.no_grad()
def score(model: torch.nn.Module, notes: list[Note], *, rows: int = 8) -> Score:
    """Ask a model every blank of the notes, ``rows`` notes at a time."""
    if not notes:
        raise ValueError("notes must hold at least one note")
    slot_of = {_ID[value]: slot for slot, values in SLOTS.items() for value in values}
    right, asked = dict.fromkeys(SLOTS, 0), dict.fromkeys(SLOTS, 0)
    for start in range(0, len(notes), rows):
        ids, labels = pad_notes(notes[start : start + rows])
        said = model(ids).logits[:, :-1].argmax(-1)
        for answer, guess in zip(labels[:, 1:].flatten().tolist(), said.flatten().tolist(), strict=True):
            if answer in slot_of:
                asked[slot_of[answer]] += 1
                right[slot_of[answer]] += answer == guess
    return Score(right, asked)


def _fill(template: str, project: str | None) -> list[str]:
    """The words of a template with the project's name in, or with "for [p]" and [p] left out."""
    if project is None:
        template = template.replace("for [p] ", "").replace("[p] ", "")
    return [project if w == "[p]" else w for w in template.split()]
