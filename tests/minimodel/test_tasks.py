"""The synthetic tasks: independent readers agree with every label, training and held-out streams never meet, the scorer counts exactly."""

import re

import pytest
import torch
from torch import nn

from minimodel.model import ModelOutput
from minimodel.tasks import meeting, mqar, needle, palindrome, stack
from minimodel.tasks.scoring import accuracy

IDS = torch.zeros(1, 4, dtype=torch.long)
TASKS = {
    "mqar": (mqar, {"pairs": 6, "updates": 3}),
    "palindrome": (palindrome, {"letters": 7}),
    "stack": (stack, {"operations": 20, "stacks": 3, "elements": 5}),
}


class Says(nn.Module):
    """A model that says ``answer(ids)`` [B, T] at every position."""

    def __init__(self, answer, words):
        super().__init__()
        self.answer, self.words = answer, words

    def forward(self, ids):
        return ModelOutput(logits=nn.functional.one_hot(self.answer(ids), self.words).float(), loss=None, cache=None)


def read_mqar(ids, labels):
    """The last told value of every key, read from the tokens alone: a key asked is one that stands in the last 2 * pairs tokens."""
    told, pairs = {}, 6
    for t in range(0, len(ids), 2):
        key, value = ids[t], ids[t + 1]
        if t < len(ids) - 2 * pairs:
            told[key] = value
            assert labels[t] == labels[t + 1] == -100
        else:
            assert labels[t] == -100
            assert labels[t + 1] == value == told.pop(key)  # every key is asked once
    assert not told


def read_palindrome(ids, labels):
    middle = ids.index(palindrome.SEPARATOR)
    assert labels[middle + 1 :] == ids[:middle][::-1] == ids[middle + 1 :]
    assert set(labels[: middle + 1]) == {-100}


def read_stack(ids, labels):
    held, pops = {}, 0
    for t in range(0, len(ids), 3):
        operation, s, element = ids[t : t + 3]
        assert 2 <= s < 5 <= element < stack.vocab_size(3, 5)
        if operation == stack.PUSH:
            held.setdefault(s, []).append(element)
            assert labels[t : t + 3] == [-100] * 3
        else:
            assert operation == stack.POP
            assert labels[t : t + 3] == [-100, -100, held[s].pop()]
            pops += 1
    assert pops


@pytest.mark.parametrize(("name", "reader"), [("mqar", read_mqar), ("palindrome", read_palindrome), ("stack", read_stack)])
def test_an_independent_reader_finds_the_same_answers(name, reader):
    task, settings = TASKS[name]
    for ids, labels in (task.batch(3, 5, rows=20, **settings), task.held_out(3, rows=20, **settings)):
        for row, asked in zip(ids.tolist(), labels.tolist(), strict=True):
            reader(row, asked)


@pytest.mark.parametrize("name", TASKS)
def test_batches_are_pure_functions_of_seed_and_step_and_never_meet_the_held_out_stream(name):
    task, settings = TASKS[name]
    rows = lambda pair: {tuple(r) for r in pair[0].tolist()}  # noqa: E731
    first = task.batch(0, 0, rows=8, **settings)
    again = task.batch(0, 0, rows=8, **settings)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not rows(first) & (rows(task.batch(0, 1, rows=8, **settings)) | rows(task.batch(1, 0, rows=8, **settings)))
    assert not rows(first) & rows(task.held_out(0, rows=50, **settings))


def test_mqar_updates_count_the_last_value():
    ids, _ = mqar.batch(0, 0, rows=50, pairs=4, updates=4)
    changed = [row for row in ids.tolist() if any(row[2 * i + 1] != row[row.index(row[2 * i], 8) + 1] for i in range(4))]
    assert ids.shape == (50, 24) and len(changed) > 40  # nearly every row holds a key whose first value no longer counts


@pytest.mark.parametrize("keys", [1, 4])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_needle_stands_at_its_depth_and_is_the_answer(depth, keys):
    for note in needle.held_out(0, 12, length=256, depth=depth, keys=keys):
        project = re.search(r"The (?:budget for (\w+)|(\w+) budget) is(?: now)? ___", note.text)
        project = project.group(1) or project.group(2)
        told = {a or b: (value, at.start()) for at in re.finditer(r"The (?:budget for (\w+)|(\w+) budget) is (\$\w+)", note.text)
                for a, b, value in [at.groups()]}  # fmt: skip
        assert len(told) == keys and len(note.ids) <= 256
        labels = [x for x in note.labels if x != -100]
        assert labels == [meeting.encode(told[project][0])[0]]
        words_before = len(meeting.encode(note.text[: told[project][1]]))
        assert abs(words_before / 256 - depth) < (0.2 if keys == 1 else 0.45)


def test_needles_can_be_scored_like_meeting_notes():
    notes = needle.held_out(1, 3, length=128, depth=0.3, keys=2, slot="room")
    answers = {tuple(note.ids): note.labels for note in notes}

    def next_label(ids):
        said = torch.zeros_like(ids)
        for b, row in enumerate(ids.tolist()):
            labels = next(labels for note, labels in answers.items() if list(note) == row[: len(note)])
            said[b, : len(labels) - 1] = torch.tensor(labels[1:]).clamp_min(0)
        return said

    result = meeting.score(Says(next_label, len(meeting.VOCABULARY)), notes)
    assert result.accuracy == 1.0 and result.asked["room"] == 3


def test_accuracy_counts_labeled_tokens_only():
    ids = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1], [1, 1, 1, 1]])
    labels = torch.tensor([[-100, -100, 3, 4], [-100, 3, -100, -100], [-100, -100, -100, 1]])
    plus_one = Says(lambda x: x + 1, 6)
    assert accuracy(plus_one, ids, labels, rows=2) == 2 / 4  # 3 after 2 and 4 after 3 are right; 3 after 4, 1 after 1 are not


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mqar.batch(0, 0, rows=1, pairs=0), "pairs must lie in 1..64"),
        (lambda: mqar.batch(0, 0, rows=1, pairs=4, updates=5), "updates must lie in 0..pairs=4, got 5"),
        (lambda: palindrome.batch(0, 0, rows=1, letters=0), "letters must be at least 1, got 0"),
        (lambda: palindrome.held_out(0, rows=1, letters=3, vocab_size=2), "vocab_size must be at least 3"),
        (lambda: stack.batch(0, 0, rows=1, operations=1), "operations must be at least 2"),
        (lambda: stack.held_out(0, rows=1, operations=4, stacks=0), "stacks must be at least 1, got 0"),
        (lambda: needle.held_out(0, 1, length=256, depth=1.5), "depth must lie in"),
        (lambda: needle.held_out(0, 1, length=20, depth=0.5), "length must be at least 46 with keys=1, got 20"),
        (lambda: needle.held_out(0, 1, length=256, depth=0.5, keys=9), "keys must lie in 1..8, got 9"),
        (lambda: needle.held_out(0, 1, length=256, depth=0.5, slot="hat"), "slot must be one of"),
        (lambda: accuracy(nn.Identity(), IDS, torch.full((1, 4), -100)), "labels ask nothing"),
        (lambda: accuracy(nn.Identity(), IDS, torch.zeros(1, 5, dtype=torch.long)), "labels must have the shape"),
    ],
)
def test_impossible_settings_are_named(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
