"""A story like the article's in other words: a seed, or a student's name, gives everybody notes of their own.

    told = story.tell("student-17")
    told.text          # "The Stark planning meeting is Friday, in room ... . The meeting is now in room 3B. The room is"
    told.answer        # "3B"
"""

from __future__ import annotations

import random
import unicodedata
from dataclasses import dataclass

from minimodel.tasks.meeting import UPDATE, NoteWriter, decode, question

SLOTS = ("client", "day", "room")  # what may change


@dataclass(frozen=True)
class Story:
    """Four facts, one of which changes, and the question for it."""

    notes: str  # the four facts
    update: str
    slot: str  # the fact that changes
    question: str  # up to its blank
    before: str  # its first value: what a memory that never erases still holds
    answer: str  # its value now

    @property
    def text(self) -> str:
        """Notes, update and question: what a model reads before it fills the blank."""
        return f"{self.notes} {self.update} {self.question}"


def spelled(seed: int | str, name: str = "seed") -> str:
    """A seed as text, in one spelling (NFC): "ë" may be typed as one character or as two, and is the same student's.

    Raises TypeError for a seed that is neither a whole number nor a string, ValueError for one that is not text; ``name`` is said then.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, str)):
        raise TypeError(f"{name} must be a whole number or a string, got {type(seed).__name__}")
    text = unicodedata.normalize("NFC", str(seed))
    if any("\ud800" <= character <= "\udfff" for character in text):  # what Python makes of bytes that are no UTF-8
        raise ValueError(f"{name} must be text in UTF-8, got {text!a}")
    return text


def tell(seed: int | str = 0) -> Story:
    """The story of a seed: a number, or any words such as a student's name. The same seed tells the same story everywhere.

    Raises TypeError for a seed that is neither, ValueError for one that is not text.
    """
    rng = random.Random(f"meeting/story/{spelled(seed)}")
    slot = rng.choice(SLOTS)
    while True:
        writer = NoteWriter(rng, 1)
        facts, ids = writer.note.facts, writer.note.ids
        writer.opening()
        end, before = len(ids), facts[None, slot]
        writer.state(None, slot, UPDATE)
        told = Story(decode(ids[:end]), decode(ids[end:]), slot, question(slot), before, facts[None, slot])
        # something changes, and is not said in the question's words
        if told.answer != before and not told.update.startswith(told.question):
            return told
