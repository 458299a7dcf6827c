"""Notes that ask one thing: how far back a fact may lie, and whether a value that was replaced comes back."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from minimodel.tasks import meeting
from minimodel.tasks.meeting import CORRECTION, SLOTS, STATEMENT, UPDATE, Note, NoteWriter

TASK = "Notes of 64 and 256 tokens in turn about one project: facts, changes, corrections, chat, and questions in between."
DISTANCES = (8, 16, 32, 48, 64, 96, 128, 192)  # tokens from a fact to its question, about


def practice(seed: int, step: int, *, projects: int = 1, lengths: tuple[int, ...] = (64, 256)) -> tuple[Tensor, Tensor]:
    """Training notes of one step, 1,024 tokens, a pure function of (seed, step): facts and changes, often asked about at once, some chat.

    Denser in questions than ``meeting.training_batch``, so that a few hundred steps are enough to learn from. lengths: taken in turn.
    """
    rng, length = random.Random(f"experiments/practice/{seed}/{step}/{projects}"), lengths[step % len(lengths)]
    return meeting.pad_notes([_practice_note(rng, rng.randint(1, projects), length) for _ in range(1024 // length)], length)


def stream(seed: int, step: int, *, rows: int = 8, length: int = 128) -> tuple[Tensor, Tensor]:
    """The same notes as a text without gaps: every next word is to be predicted, in a blank the answer. A pure function of (seed, step)."""
    rng = random.Random(f"experiments/stream/{seed}/{step}")
    ids, labels = [], []
    for _ in range(rows):
        note = Note()
        while len(note.ids) < length:
            more = _practice_note(rng, rng.randint(1, 4), 64)
            note.ids += more.ids
            note.labels += [word if label == -100 else label for word, label in zip(more.ids, more.labels, strict=True)]
        ids.append(note.ids[:length])
        labels.append(note.labels[:length])
    return torch.tensor(ids), torch.tensor(labels)


def _practice_note(rng: random.Random, projects: int, length: int) -> Note:
    w = NoteWriter(rng, projects)
    if projects == 1 and rng.random() < 0.5:
        w.opening()
    while len(w.note.ids) <= length - meeting.SENTENCE - 2 * meeting.ASKED:  # room for a change, its question and the last one
        roll, known = rng.random(), list(w.note.facts)
        if roll < 0.15:
            w.filler()
        elif roll < 0.4 and known:
            w.ask(*rng.choice(known), reveal=False)
        else:
            project, slot = rng.choice(w.projects), rng.choice(tuple(SLOTS))
            new, wrong = (project, slot) not in w.note.facts, rng.random() < 0.15
            w.state(project, slot, STATEMENT if new else CORRECTION if wrong else UPDATE)
            if rng.random() < 0.5:
                w.ask(project, slot, reveal=False)
    if w.note.facts:
        w.ask(*rng.choice(list(w.note.facts)), reveal=False)
    return w.note


def told_at(seed: int, count: int, *, distance: int, projects: int, chat: float = 0.6) -> list[Note]:
    """Notes that state one fact, go on for about ``distance`` tokens about other things, and ask for it.

    chat: share of filler in between; the rest are facts of other slots and projects.
    """
    notes = []
    for i in range(count):
        rng = random.Random(f"probe/distance/{seed}/{distance}/{projects}/{i}")
        w = NoteWriter(rng, projects)
        others = [(p, s) for p in w.projects for s in SLOTS]
        project, slot = rng.choice(others)
        others.remove((project, slot))
        w.state(project, slot, STATEMENT)
        while len(w.note.ids) < distance:
            if rng.random() < chat:
                w.filler()
            else:
                other = rng.choice(others)
                w.state(*other, UPDATE if other in w.note.facts else STATEMENT)
        notes.append(_asked(w, project, slot))
    return notes


def replaced(seed: int, count: int, *, updates: int, projects: int = 1) -> tuple[list[Note], list[set[int]]]:
    """Notes that state a day and change it ``updates`` times, chat in between; and the days of each that no longer hold."""
    notes, stale = [], []
    for i in range(count):
        rng = random.Random(f"probe/updates/{seed}/{updates}/{projects}/{i}")
        w = NoteWriter(rng, projects)
        project, days = rng.choice(w.projects), []
        for n in range(updates + 1):
            w.state(project, "day", UPDATE if n else STATEMENT)
            days.append(meeting.encode(w.note.facts[project, "day"])[0])
            w.filler()
        notes.append(_asked(w, project, "day"))
        stale.append(set(days) - {days[-1]})
    return notes, stale


@torch.no_grad()
def answers(model: torch.nn.Module, notes: list[Note], *, rows: int = 32) -> list[tuple[int, int]]:
    """(said, right) of the blank that ends each note: the likeliest word of the whole vocabulary, and the latest value."""
    out = []
    for start in range(0, len(notes), rows):
        ids, labels = meeting.pad_notes(notes[start : start + rows])
        said = model(ids).logits.argmax(-1)
        for row, note in enumerate(notes[start : start + rows]):
            blank = max(i for i, label in enumerate(note.labels) if label != -100)
            out.append((int(said[row, blank - 1]), int(labels[row, blank])))
    return out


def right(pairs: list[tuple[int, int]]) -> float:
    """Share of the blanks filled with the latest value."""
    return sum(a == b for a, b in pairs) / len(pairs)


def ends(notes: list[Note]) -> Tensor:
    """Tokens of each note, to say how far back its fact really lies."""
    return torch.tensor([len(note.ids) for note in notes])


def _asked(w: NoteWriter, project: str | None, slot: str) -> Note:
    """The note with its question; only the blank counts, and nothing is said after it."""
    w.note.labels = [-100] * len(w.note.ids)
    w.ask(project, slot, reveal=False)
    blank = max(i for i, label in enumerate(w.note.labels) if label != -100)
    del w.note.ids[blank + 1 :], w.note.labels[blank + 1 :]
    return w.note
