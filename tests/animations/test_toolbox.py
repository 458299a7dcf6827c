"""The toolbox scenes show what their models measure and answer, follow the notes, and can be read."""

from __future__ import annotations

import re

import pytest

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations import gated_mla, toolbox, whiteboard
from animations.notes import notes_from_environment, notes_text, told_from_environment, toolbox_slots
from k3viz import toolbox_story
from k3viz.theme import format_bytes, format_probability
from k3viz.toolbox.story import TEXT
from minimodel.accounting import row_numbers
from tests.animations.watch import faults, watch, words

pytestmark = [pytest.mark.scene, pytest.mark.filterwarnings("ignore:'mode' parameter:DeprecationWarning")]  # manim's own use of Pillow
SCENES = ("Toolbox", "ShareGQA", "ShrinkMLA", "ForgetSlidingWindow", "ReplaceLinear")


@pytest.fixture(scope="module", params=SCENES)
def watched(request, tmp_path_factory):
    scene, frames = watch(getattr(toolbox, request.param), tmp_path_factory.mktemp("media"))
    return request.param, scene, frames


def numbers_of(story) -> set[str]:
    """Every number with a unit that a scene may show of a story: bytes, growth, probabilities."""
    found = {format_probability(p) for row in story.heads for p in row if p == p}
    for k in story.kept:
        found |= {format_bytes(k.bytes), format_bytes(k.per_token), format_probability(k.answer[0][1])}
        found.add(format_bytes(k.bytes + story.asked * k.per_token))  # with the question read too
    return found


def test_every_number_with_a_unit_is_in_a_trace(watched):
    name, _, frames = watched
    technique = getattr(toolbox, name).technique
    first = toolbox_story(technique=technique)
    told = [first.again(slot=slot, read=end, chat=0) for slot in toolbox_slots() for _, end in first.notes]
    told += [first.again(slot=slot, chat=chat) for slot in toolbox_slots() for chat in range(1, 15)]
    far = toolbox_story(slot="day", chat=6)
    told += [far.again(read=end) for _, end in far.notes]
    held = set().union(*(numbers_of(story) for story in told)) | {format_probability(first.rebuilt)}
    seen = set(re.findall(r"[<>]? ?\d[\d.,]* (?:B|kB|MB|GB|%)", words(frames)))
    assert seen and {x.strip() for x in seen} - {"0 %", "100 %"} <= held


def test_text_can_be_read_in_every_frame(watched):
    assert not faults(watched[2])


def test_it_lasts_10_to_45_seconds_and_ends_with_its_result(watched):
    name, scene, frames = watched
    assert 10 <= scene.time <= 45
    end, first = " ".join(text.words for text in frames[-1]), toolbox_story()
    says = {
        "Toolbox": [f"adds {format_bytes(first.of('mha').per_token)} if all is kept", "forget and replace add nothing"],
        "ShareGQA": [f"{format_bytes(first.of('gqa').bytes)} instead of {format_bytes(first.of('mha').bytes)}", "the answer is Thursday"],
        "ShrinkMLA": [f"{row_numbers(first.config('mha'), 'mha')} numbers become a card of {row_numbers(first.config('mla'), 'mla')}"],
        "ForgetSlidingWindow": [f"stops the growth at {format_bytes(first.of('sliding_window').bytes)}", "to the stack after 80 tokens"],
        "ReplaceLinear": ["Thursday replaced Tuesday", f"{format_bytes(first.of('kda').bytes)} now"],
    }
    assert all(part in end for part in says[name]), end


def test_the_tray_ends_with_what_the_window_holds(tmp_path):
    story = toolbox_story()
    _, frames = watch(toolbox.ForgetSlidingWindow, tmp_path, frame_rate=1)
    shown = words(frames)
    far = story.again(slot="client", chat=11)
    assert f"It guesses {far.of('sliding_window').answer[0][0]}" in shown and f"Acme: {far.distance()}" in shown
    assert "with Globex in the note, the same" in shown and "Acme: 25" in shown and len(story.tray()) == 4


def test_other_notes_change_the_scene(tmp_path):
    told = toolbox_story(text=notes_text({"client": "Cyberdyne", "day": "Wednesday", "attendees": "twelve"}, "day", "Saturday"))
    _, frames = watch(type("Told", (toolbox.ReplaceLinear,), {"story": told}), tmp_path, frame_rate=1)
    shown = words(frames).replace("\n", " ")
    assert "Saturday replaced Wednesday" in shown and "Thursday" not in shown and not faults(frames)


@pytest.mark.parametrize("facts, update, says", [
    ("client Globex", "", "^K3_FACTS: write each note as row: word, .* got 'client Globex'$"),
    (" ; ", "", "^K3_FACTS: write at least one note"),
    ("", "day:", "^K3_UPDATE: write each note as row: word, .* got 'day:'$"),
    ("", "day: Friday; room: 2A", "^K3_UPDATE: write one correction, got 2$"),
])
def test_notes_that_cannot_be_read_name_their_variable(facts, update, says, monkeypatch):
    monkeypatch.setenv("K3_FACTS", facts)
    monkeypatch.setenv("K3_UPDATE", update)
    for tell in (told_from_environment, whiteboard.story_from_environment, gated_mla.story_from_environment):
        with pytest.raises(ValueError, match=says):
            tell()


def test_a_correction_without_a_row_goes_to_the_last_note(monkeypatch):
    monkeypatch.setenv("K3_UPDATE", "Friday")
    assert notes_from_environment("day") == ((), ("day", "Friday"))
    monkeypatch.setenv("K3_FACTS", "client: Globex; room: 2A")
    assert notes_from_environment("day") == ((("client", "Globex"), ("room", "2A")), ("room", "Friday"))


def test_the_environment_tells_other_notes(monkeypatch):
    assert told_from_environment().settings == toolbox_story().settings
    monkeypatch.setenv("K3_UPDATE", "Friday")
    assert told_from_environment().tokens == toolbox_story(text=TEXT.replace("Thursday", "Friday")).tokens
    monkeypatch.setenv("K3_FACTS", "client: Globex; meeting day: Monday")
    monkeypatch.setenv("K3_UPDATE", "room: 2A")
    story = told_from_environment()
    assert story.slot == "room" and story.of("kda").answer[0][0] == "2A"
    assert {"Globex", "Monday", "4B", "six"} < set(story.tokens)
    monkeypatch.setenv("K3_FACTS", "budget: $90k")
    with pytest.raises(ValueError, match=r"^K3_FACTS, K3_UPDATE: these notes have the rows client, day, room, attendees, got 'budget'$"):
        told_from_environment()


def test_each_slot_has_a_sentence_for_its_change():
    for row, word in (("client", "Globex"), ("day", "Friday"), ("room", "2A"), ("attendees", "ten")):
        story = toolbox_story(text=notes_text({}, row, word), slot=row)
        assert story.tokens[story.fact] == word and story.of("kda").answer[0][0] == word


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"text": "The meeting is Tuesday."}, "its last note must change the day"), ({"window": 2}, "window: 2 tokens are too few")],
)
def test_notes_that_can_not_be_told_are_refused(settings, says, tmp_path):
    told = toolbox_story(**settings)
    with pytest.raises(ValueError, match=says):
        watch(type("Told", (toolbox.ForgetSlidingWindow,), {"story": told}), tmp_path, frame_rate=1)
