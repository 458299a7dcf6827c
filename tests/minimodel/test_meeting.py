"""Meeting notes: a closed language, answers that an independent reader agrees with, streams that never meet."""

import random
import re
from functools import partial

import pytest
import torch
from torch import nn

import minimodel.train.meeting as training
from minimodel.config import K3Config
from minimodel.model import K3ForCausalLM, ModelOutput
from minimodel.tasks import meeting
from minimodel.tasks.meeting import (
    BLANK,
    PROJECTS,
    SLOTS,
    VOCABULARY,
    decode,
    encode,
    held_out_notes,
    pad_notes,
    question,
    score,
    training_batch,
    write_note,
)
from minimodel.train import train, train_meeting
from minimodel.train.meeting import later_batch, used_memory

SHORTEST = meeting.SENTENCE + meeting.ASKED  # a note of one sentence and one question
ARTICLE = (
    "The Acme planning meeting is Tuesday, in room 4B, with six people attending. The meeting has moved to Thursday. "
    "The meeting is now on ___."
)


# ---- an independent reader: it knows English sentences, nothing of the templates ----


def read(text):
    """(facts at the end, answers of the blanks in order, revealed questions in order) of a note, from its text alone."""
    facts, answers = {}, []
    for sentence in re.findall(r"[^.]+\.", text):
        sentence = sentence.strip().removesuffix(".")
        sentence = re.sub(r", not \S+$", "", sentence.removeprefix("Correction: "))
        named = [p for p in PROJECTS if re.search(rf"\b{p}\b", sentence)]
        project = named[0] if named else None
        assert len(named) <= 1
        bare = sentence
        if project:
            bare = re.sub(rf"^For {project}, | for {project}\b|\b{project} ", "", sentence)
        bare = bare[0].upper() + bare[1:]
        if found := re.fullmatch(r"The (\w+) planning meeting is (\w+), in room (\w+), with (\w+) people attending", bare):
            facts |= {(project, slot): value for slot, value in zip(("client", "day", "room", "attendees"), found.groups(), strict=True)}
            continue
        for slot, pattern in {
            "client": r"The client (?:is|is now|(?:has )?changed to) (\w+)",
            "budget": r"The budget (?:is|is now|(?:has )?changed to) (\$\w+|___)",
            "room": r"The (?:room (?:is|is now|(?:has )?changed to)|meeting (?:is|is now|has moved|moved) (?:in|to) room) (\w+)",
            "attendees": r"The meeting (?:now )?has (\w+) people attending",
            "day": r"The meeting (?:is|is on|is now on|has moved to|moved to) (\w+)",
        }.items():
            if found := re.fullmatch(pattern, bare):
                if found[1] == BLANK:
                    answers.append(facts[project, slot])
                else:
                    facts[project, slot] = found[1]
                break
        else:
            assert not re.match(r"The (client|budget|meeting)", bare) and project is None, f"not understood: {sentence!r}"
    return facts, answers


def blanks(ids, labels):
    return [VOCABULARY[label] for i, label in zip(ids, labels, strict=True) if VOCABULARY[i] == BLANK]


@pytest.mark.parametrize("projects", range(1, 9))
def test_answers_equal_an_independent_reading(projects):
    asked = 0
    for seed in range(25):
        note = write_note(random.Random(seed), projects=projects, length=400, chat=0.3, ask=0.3, final_questions=6)
        facts, answers = read(note.text)
        assert facts == note.facts
        assert answers == blanks(note.ids, note.labels)
        asked += len(answers)
    assert asked > 100


def test_training_batches_are_read_the_same():
    ids, labels = training_batch(0, 17, rows=8, length=256)
    for row, wanted in zip(ids.tolist(), labels.tolist(), strict=True):
        _, answers = read(decode(i for i in row if i))
        assert answers == blanks(row, wanted) and answers
        # wherever something other than a blank is to be predicted, it is the word that stands there
        assert all(label in (-100, i) for i, label in zip(row, wanted, strict=True) if VOCABULARY[i] != BLANK)


def test_the_latest_value_counts_and_a_corrected_one_does_not():
    facts, answers = read(
        "The budget for Falcon is $80k. For Harbor, the budget is $10k. Correction: the budget for Falcon is $90k, not $80k. "
        "The Harbor budget has changed to $30k. The party is in room 1A. The budget for Falcon is now ___. "
        "For Harbor, the budget is now ___."
    )
    assert facts == {("Falcon", "budget"): "$90k", ("Harbor", "budget"): "$30k"} and answers == ["$90k", "$30k"]


# ---- the language ----


def test_the_article_word_for_word():
    assert decode(encode(ARTICLE)) == ARTICLE
    facts, answers = read(ARTICLE)
    assert answers == ["Thursday"] and facts == {
        (None, "client"): "Acme", (None, "day"): "Thursday", (None, "room"): "4B", (None, "attendees"): "six",
    }  # fmt: skip
    assert question("day") == "The meeting is now on"
    assert decode(encode("The budget for Falcon is $80k.")) == "The budget for Falcon is $80k."


def skeleton(sentence):
    values = {value: slot for slot, options in SLOTS.items() for value in options}
    return " ".join(f"{{{values[w]}}}" if w in values else w for w in re.findall(r"___|\$?\w+|[^\w\s]", sentence))


def test_notes_about_one_project_speak_as_the_article_does():
    said = set()
    for seed in range(60):
        note = write_note(random.Random(seed), projects=1, length=200, final_questions=2)
        assert not set(note.text.replace(".", " ").replace(",", " ").split()) & set(PROJECTS)
        said |= {skeleton(s) for s in re.findall(r"[^.]+\.", note.text)}
    assert {skeleton(s) for s in re.findall(r"[^.]+\.", ARTICLE)} <= said


def test_with_several_projects_every_fact_names_its_project():
    for seed in range(20):
        note = write_note(random.Random(seed), projects=3, length=300, chat=0.0, ask=0.3, final_questions=4)
        for sentence in re.findall(r"[^.]+\.", note.text):
            assert sum(bool(re.search(rf"\b{p}\b", sentence)) for p in PROJECTS) == 1
        assert len({project for project, _ in note.facts}) <= 3


def test_vocabulary_is_closed_and_small():
    assert len(set(VOCABULARY)) == len(VOCABULARY) < 150 and VOCABULARY[0] == "<pad>"
    assert all(decode(encode(word)) == word for word in VOCABULARY[1:])
    assert encode("") == []
    used = set()
    for step in range(30):
        used |= set(training_batch(0, step, rows=8, length=256)[0].unique().tolist())
    assert used == set(range(len(VOCABULARY)))  # no word is without a sentence


@pytest.mark.parametrize("projects, length, final", [(1, SHORTEST, 1), (8, SHORTEST, 1), (1, 60, 2), (8, 512, 8), (4, 4096, 8)])
def test_a_note_keeps_to_its_length(projects, length, final):
    for seed in range(10):
        note = write_note(random.Random(seed), projects=projects, length=length, final_questions=final, chat=0.9, ask=0.5)
        assert 0 < len(note.ids) == len(note.labels) <= length
        assert note.facts and blanks(note.ids, note.labels)


def test_no_sentence_is_longer_than_declared():
    for seed in range(40):
        note = write_note(random.Random(seed), projects=8, length=600, ask=0.5, reveal=1.0, final_questions=8)
        for sentence in re.findall(r"[^.]+\.", note.text):
            assert len(encode(sentence)) <= (meeting.ASKED if BLANK in sentence else meeting.SENTENCE)


@pytest.mark.parametrize("length", [SHORTEST, SHORTEST + 1, 47, 48, 49, 51, 64, 128, 512])
def test_batches_of_any_length(length):
    for step in range(12):
        ids, labels = training_batch(3, step, rows=4, length=length)
        assert ids.shape == labels.shape == (4, length)
        assert bool((labels != -100).any(1).all())


# ---- later training ----


@pytest.mark.parametrize("kind", ["dense", "cold", "old"])
def test_later_notes_hold_2048_tokens_and_the_latest_value_answers(kind):
    for step in range(4):
        ids, labels = later_batch(kind, 2, step)
        assert ids.shape == labels.shape and ids.numel() == 2 * meeting.LONGEST and bool((labels != -100).any(1).all())
        assert torch.equal(ids, later_batch(kind, 2, step)[0]) and not torch.equal(ids, later_batch(kind, 3, step)[0])


def test_where_changes_are_uneven_some_facts_grow_old():
    def oldest(spread):
        """Words since the fact that changed longest ago did, in a middling note."""
        ages = []
        for seed in range(40):
            note = write_note(random.Random(seed), projects=2, length=1000, chat=0.2, few=0.0, spread=spread, final_questions=0)
            text = note.text.replace(".", " .").split()
            said = {(p, s): max(i for i, w in enumerate(text) if w == v) for (p, s), v in note.facts.items() if v in text}
            ages.append(len(text) - min(said.values()))
        return sorted(ages)[20]

    assert oldest(6.0) > 1.2 * oldest(None) and 0.7 < oldest(0.0) / oldest(None) < 1.4  # u^0 = 1: all alike


@pytest.mark.bad_input
def test_later_notes_name_what_is_wrong():
    with pytest.raises(ValueError, match="^kind must be one of dense, cold, old, got 'hot'"):
        later_batch("hot", 0, 0)
    with pytest.raises(ValueError, match="^spread must be at least 0 or None, got -1.0"):
        write_note(random.Random(0), projects=1, length=64, spread=-1.0)
    with pytest.raises(ValueError, match="^notes must be one of curriculum, dense, cold, old, got 'warm'"):
        train_meeting(steps=1, notes="warm")
    with pytest.raises(ValueError, match="^notes='cold' is about up to 8 projects, got projects=1"):
        train_meeting(steps=1, notes="cold")


# ---- a memory that is not empty ----


def test_a_used_memory_is_noise_in_training_only_and_the_same_for_the_same_seed():
    model, noise = K3ForCausalLM(K3Config.meeting(), seed=0), torch.Generator()
    ids, _ = later_batch("old", 0, 1)
    ids = ids[:, :64]

    def logits(residue, past, seed):
        noise.manual_seed(seed)
        with torch.no_grad(), used_memory(model, residue, past, noise):
            return model(ids).logits

    model.eval()
    assert torch.equal(logits(0.2, 3.0, 0), logits(0.0, 0.0, 0))
    model.train()
    clean = logits(0.0, 0.0, 0)
    for kind in ((0.2, 0.0), (0.0, 3.0), (0.2, 3.0)):
        used = logits(*kind, 0)
        assert not torch.allclose(used, clean, atol=1e-3)
        assert torch.equal(used, logits(*kind, 0)) and not torch.equal(used, logits(*kind, 1))
        assert torch.equal(logits(0.0, 0.0, 0), clean)  # nothing stays behind


def test_noise_has_the_size_that_was_asked_for():
    model, noise = K3ForCausalLM(K3Config.meeting(), seed=0), torch.Generator().manual_seed(0)
    mixer, seen = model.model.layers[0].self_attn, []
    with used_memory(model.train(), 0.2, 0.0, noise):
        mixer.register_forward_pre_hook(lambda *call: seen.append(call[2]["cache"].state), with_kwargs=True)
        with torch.no_grad():
            model(torch.ones(64, 2, dtype=torch.long))
    sizes = seen[0].flatten(1).std(1)
    assert sizes.max() <= 0.2 * 1.02 and 0.08 < sizes.mean() < 0.12 and sizes.min() < 0.02


def test_the_past_is_what_the_other_note_left_times_a_number():
    model, noise = K3ForCausalLM(K3Config.meeting(), seed=0).train(), torch.Generator().manual_seed(0)
    mixer, seen = model.model.layers[0].self_attn, []
    ids = later_batch("old", 0, 1)[0][:, :64]
    cache = model.new_cache(len(ids))
    with torch.no_grad():
        model(ids, cache=cache)
    left = cache.layers[0].state.roll(1, 0)
    with torch.no_grad(), used_memory(model, 0.0, 3.0, noise):
        mixer.register_forward_pre_hook(lambda *call: seen.append(call[2]["cache"].state.clone()), with_kwargs=True)
        for _ in range(20):
            model(ids)
    factors = torch.stack([(used * left).sum((1, 2, 3)) / (left * left).sum((1, 2, 3)) for used in seen])
    for used, factor in zip(seen, factors, strict=True):
        torch.testing.assert_close(used, factor.view(-1, 1, 1, 1) * left, atol=1e-6, rtol=1e-5)
    assert 0 <= factors.min() < 0.4 and 2.6 < factors.max() <= 3 and len(factors.unique()) == factors.numel()


def test_training_on_a_used_memory_goes_on_as_if_it_had_not_been_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "train", lambda *a, **k: train(*a, **{**k, "checkpoint_every": 1, "evaluate": None}))
    run = partial(train_meeting, steps=3, projects=8, notes="old", residue=0.2, past=3.0, progress=False)

    def killed(kind, seed, step):
        if step == 2:
            raise KeyboardInterrupt
        return later_batch(kind, seed, step)

    _, whole = run(tmp_path / "whole")
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(training, "later_batch", killed)
        run(tmp_path / "killed")
    _, again = run(tmp_path / "killed")
    assert [row["loss"] for row in again] == [row["loss"] for row in whole]
    with pytest.raises(ValueError, match="belongs to another recipe"):
        train_meeting(tmp_path / "killed", steps=3, projects=8, notes="old", progress=False)
    with pytest.raises(ValueError, match="^residue must be a finite number of at least 0, got -1"):
        train_meeting(steps=1, residue=-1.0)
    with pytest.raises(ValueError, match="^past must be a finite number of at least 0, got inf"):
        train_meeting(steps=1, past=float("inf"))


# ---- determinism ----


def test_a_batch_is_a_function_of_seed_and_step():
    a, b = (training_batch(1, 5, rows=3, length=128) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    random.seed(0)
    torch.manual_seed(0)
    assert torch.equal(training_batch(1, 5, rows=3, length=128)[0], a[0])
    for other in ((2, 5), (1, 6)):
        assert not torch.equal(training_batch(*other, rows=3, length=128)[0], a[0])
    notes = held_out_notes(0, 3, projects=2, length=128)
    assert [n.text for n in notes] == [n.text for n in held_out_notes(0, 3, projects=2, length=128)]
    assert len({n.text for n in notes}) == 3
    shorter = held_out_notes(0, 2, projects=2, length=128)
    assert [n.text for n in shorter] == [n.text for n in notes[:2]]  # a longer set starts with the shorter one


def test_held_out_seeds_are_never_drawn_by_training(monkeypatch):
    drawn = []

    class Watched(random.Random):
        def __init__(self, seed):
            drawn.append(seed)
            super().__init__(seed)

    monkeypatch.setattr(random, "Random", Watched)
    for seed in range(3):
        for step in range(5):
            training_batch(seed, step, rows=1, length=64)
            for kind in ("dense", "cold", "old"):
                later_batch(kind, seed, step)
    training = set(drawn)
    drawn.clear()
    for seed in range(3):
        held_out_notes(seed, 5, projects=2, length=128)
    assert len(training) == 60 and len(set(drawn)) == 15 and not training & set(drawn)
    assert all(str(s).startswith("meeting/train/") for s in training) and all(str(s).startswith("meeting/held-out/") for s in drawn)


def test_held_out_notes_are_not_among_the_training_notes():
    held_out = {n.text for n in held_out_notes(0, 200, projects=1, length=64, final_questions=1)}
    batches = [training_batch(0, step, rows=4, length=64, max_projects=1)[0] for step in range(100)]
    trained = {decode(i for i in row if i) for ids in batches for row in ids.tolist()}
    assert len(held_out) > 150 and not held_out & trained


def test_only_the_final_questions_of_held_out_notes_count():
    for note in held_out_notes(0, 10, projects=4, length=256):
        assert 1 <= sum(label != -100 for label in note.labels) <= 8
        assert note.text.endswith(".") and blanks(note.ids, note.labels)


# ---- scoring ----


class Oracle(nn.Module):
    """Knows the answers; for the slots named in ``wrong`` it says the blank instead."""

    def __init__(self, notes, wrong=()):
        super().__init__()
        self.labels = {tuple(note.ids): note.labels for note in notes}
        self.wrong = [encode(v)[0] for slot in wrong for v in SLOTS[slot]]

    def forward(self, ids):
        logits = torch.zeros(*ids.shape, len(VOCABULARY))
        for b, row in enumerate(ids.tolist()):
            for t, label in enumerate(self.labels[tuple(i for i in row if i)]):
                if label != -100:
                    logits[b, t - 1, encode(BLANK)[0] if label in self.wrong else label] = 1.0
        return ModelOutput(logits, None, None)


def test_score_counts_exact_answers_by_slot():
    notes = held_out_notes(0, 12, projects=3, length=256)
    asked = [answer for n in notes for answer in blanks(n.ids, n.labels)]
    perfect = score(Oracle(notes), notes, rows=5)
    assert perfect.accuracy == 1.0 and sum(perfect.asked.values()) == len(asked)
    assert perfect.by_slot() == dict.fromkeys(SLOTS, 1.0)
    days = sum(answer in SLOTS["day"] for answer in asked)
    one_slot_wrong = score(Oracle(notes, wrong=["day"]), notes)
    assert one_slot_wrong.by_slot() == {**dict.fromkeys(SLOTS, 1.0), "day": 0.0}
    assert one_slot_wrong.accuracy == pytest.approx(1 - days / len(asked))


def test_padding_is_on_the_right_and_asks_nothing():
    notes = held_out_notes(0, 3, projects=1, length=100, final_questions=2)
    ids, labels = pad_notes(notes, 120)
    for note, i, label in zip(notes, ids.tolist(), labels.tolist(), strict=True):
        assert i == note.ids + [0] * (120 - len(note.ids)) and label == note.labels + [-100] * (120 - len(note.ids))
    assert pad_notes(notes)[0].shape[1] == max(len(n.ids) for n in notes)


# ---- wrong input ----


@pytest.mark.bad_input
@pytest.mark.parametrize("call, words", [
    (lambda: encode("The meeting has moved to Thrusday."), "text: the word 'Thrusday' is not in the meeting vocabulary"),
    (lambda: encode("thursday"), "near it: Thursday"),
    (lambda: decode([len(VOCABULARY)]), f"ids must lie in 0..{len(VOCABULARY) - 1}, got {len(VOCABULARY)}"),
    (lambda: decode([-1]), "got -1"),
    (lambda: question("time"), "slot must be one of client, budget, day, room, attendees, got 'time'"),
    (lambda: question("day", "Acme"), "project must be one of Falcon"),
    (lambda: write_note(random.Random(0), projects=0, length=100), "projects must lie in 1..8, got 0"),
    (lambda: write_note(random.Random(0), projects=9, length=100), "projects must lie in 1..8, got 9"),
    (lambda: write_note(random.Random(0), projects=1, length=SHORTEST - 1), f"* final_questions = {SHORTEST}, got {SHORTEST - 1}"),
    (lambda: write_note(random.Random(0), projects=1, length=100, chat=1.5), "chat must lie in [0, 1], got 1.5"),
    (lambda: write_note(random.Random(0), projects=1, length=100, reveal=float("nan")), "reveal must lie in [0, 1], got nan"),
    (lambda: write_note(random.Random(0), projects=1, length=100, final_questions=-1), "final_questions must be at least 0, got -1"),
    (lambda: training_batch(0, 0, rows=1, length=20), f"length must be at least {meeting.SENTENCE} + {meeting.ASKED} * final_questions ="),
    (lambda: score(nn.Identity(), []), "notes must hold at least one note"),
])  # fmt: skip
def test_wrong_arguments(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    assert words in str(caught.value) and "\n" not in str(caught.value)
