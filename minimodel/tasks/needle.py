"""Needle in notes: one fact at a chosen depth of a long note that says nothing else about it (in the manner of RULER, arXiv 2404.06654).

Single key: the fact stands among filler. Multi key: the same slot of other projects stands in the note too, and must not be mistaken
for it. Everything is in the words of the meeting task, so that a model trained on meeting notes can be asked.
"""

from __future__ import annotations

import random

from minimodel.tasks.meeting import ASKED, PROJECTS, SENTENCE, SLOTS, STATEMENT, Note, NoteWriter


def held_out(seed: int, count: int, *, length: int, depth: float, keys: int = 1, slot: str = "budget") -> list[Note]:
    """Notes of at most ``length`` tokens that end in one question, about the fact told at ``depth``.

    Args:
        depth: where the fact stands, from 0 (first) to 1 (last before the question).
        keys: projects that have a value of ``slot``; one of them is asked, the others stand anywhere.
        slot: one of the meeting task's slots.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must lie in [0, 1], got {depth}")
    if not 1 <= keys <= len(PROJECTS):
        raise ValueError(f"keys must lie in 1..{len(PROJECTS)}, got {keys}")
    if slot not in SLOTS:
        raise ValueError(f"slot must be one of {', '.join(SLOTS)}, got {slot!r}")
    shortest = SENTENCE * (keys + 1) + ASKED
    if length < shortest:
        raise ValueError(f"length must be at least {shortest} with keys={keys}, got {length}")
    return [_note(random.Random(f"needle/{seed}/{length}/{depth}/{keys}/{slot}/{i}"), length, depth, keys, slot) for i in range(count)]


def _note(rng: random.Random, length: int, depth: float, keys: int, slot: str) -> Note:
    names = rng.sample(PROJECTS, keys)
    needle, others = names[0], sorted((rng.random(), name) for name in names[1:])
    writer = NoteWriter(rng, 1)  # the projects are named below
    end = length - ASKED - SENTENCE  # the last place where a sentence may begin
    told = False
    while (at := len(writer.note.ids)) <= end:
        due = others and others[0][0] * (end - SENTENCE * keys) <= at
        if not told and (at >= depth * (end - SENTENCE * keys) or end - at < SENTENCE * (len(others) + 1)):
            writer.state(needle, slot, STATEMENT)
            told = True
        elif due or (others and end - at < SENTENCE * (len(others) + 1)):
            writer.state(others.pop(0)[1], slot, STATEMENT)
        else:
            writer.filler()
    writer.ask(needle, slot, reveal=False)
    return writer.note
