"""The whiteboard scene shows its trace, follows it, and can be read."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations.board import Board
from animations.stage import SMALL
from animations.whiteboard import KDAWhiteboard, story_from_environment
from k3viz import whiteboard_story
from k3viz.theme import format_number
from tests.animations.watch import overlaps, watch

STORIES = {
    "default": {},
    "weak": {"alpha": 0.8, "beta": 0.6},
    "four rows, long words, nothing changed": {
        "facts": [("client", "Globex Ltd"), ("day", "Wednesday"), ("room", "4B"), ("attendees", "six")],
        "update": ("day", "Wednesday"),
    },
}
pytestmark = [pytest.mark.scene, pytest.mark.filterwarnings("ignore:'mode' parameter:DeprecationWarning")]  # manim's own use of Pillow


@pytest.fixture(scope="module", params=STORIES)
def watched(request, tmp_path_factory):
    told = whiteboard_story(**STORIES[request.param])
    scene, frames = watch(type("Told", (KDAWhiteboard,), {"story": told}), tmp_path_factory.mktemp("media"))
    return told, scene, frames


def boards(scene) -> list[Board]:
    """The boards on the stage, from left to right."""
    found = {id(m): m for m in scene.get_mobject_family_members() if isinstance(m, Board)}
    return sorted(found.values(), key=lambda board: board.get_x())


def words(frames) -> set[str]:
    return {text.words for frame in frames for text in frame}


def test_every_number_on_screen_is_in_the_trace(watched):
    told, _, frames = watched
    held = {format_number(x) for frame in told.frames for x in np.concatenate([frame.board, frame.additive_board], axis=None)}
    ink = max(abs(frame.state).max() for frame in told.frames)
    held |= {format_number(x) for x in (told.alpha, told.beta, ink, -ink)}
    shown = {number for text in words(frames) for number in re.findall(r"-?\d+\.\d+", text)}
    assert shown and shown <= held


def test_the_board_ends_with_what_the_trace_ends_with(watched):
    told, scene, _ = watched
    for board, additive in zip(boards(scene), (False, True), strict=True):
        ends = {(row, word): strength for row in told.rows for word, strength in told.says(row, additive=additive)}
        assert set(board.entries) == set(ends)
        for place, strength in ends.items():
            entry = board.entries[place]
            assert entry.word.text == place[1] and entry.number.text == format_number(strength)
            assert entry.bar.width == pytest.approx(strength * board.unit, abs=2e-3)


def test_text_stays_in_the_frame_and_is_large_enough(watched):
    _, _, frames = watched
    for text in (text for frame in frames for text in frame):
        assert abs(text.left) < 0.92 * 64 / 9 and abs(text.right) < 0.92 * 64 / 9 and abs(text.bottom) < 3.68 and abs(text.top) < 3.68, text
        assert text.size > SMALL - 0.01, text


def test_no_text_covers_another(watched):
    _, _, frames = watched
    for frame in frames:
        assert not [(a, b) for a, b in combinations(frame, 2) if overlaps(a, b)]


def test_it_lasts_15_to_45_seconds_and_says_question_and_answer(watched):
    told, scene, frames = watched
    assert 15 <= scene.time <= 45
    assert told.writes[-1].text in {text.words for text in frames[0]}
    end = " ".join(text.words for text in frames[-1])
    assert f"{told.writes[-1].row} says {told.says(told.writes[-1].row)[0][0]}" in end and "rows, as it began" in end


def test_one_note_makes_a_board_with_one_row(tmp_path):
    told = whiteboard_story(facts=[("meeting day", "Tuesday")])
    _, frames = watch(type("Told", (KDAWhiteboard,), {"story": told}), tmp_path, frame_rate=1)
    shown = " ".join(words(frames))
    assert "A board with one row: must it grow?" in shown and "ends with one row, as it began" in shown


def test_a_write_too_faint_to_be_seen_is_refused(tmp_path):
    with pytest.raises(ValueError, match="^story: beta = 0.004 is too small"):
        watch(type("Told", (KDAWhiteboard,), {"story": whiteboard_story(beta=0.004)}), tmp_path, frame_rate=1)


def test_the_environment_changes_the_scene(monkeypatch, tmp_path):
    monkeypatch.setenv("K3_UPDATE", "Friday")
    _, frames = watch(KDAWhiteboard, tmp_path, frame_rate=1)
    shown = " ".join(words(frames))
    assert "Friday" in shown and "Thursday" not in shown
    monkeypatch.setenv("K3_FACTS", "client: Globex; budget: $90k")
    monkeypatch.setenv("K3_UPDATE", "client: Initech")
    told = story_from_environment()
    assert [(w.row, w.word) for w in told.writes] == [("client", "Globex"), ("budget", "$90k"), ("client", "Initech")]


@pytest.mark.parametrize("facts", [[(f"row {i}", str(i)) for i in range(5)], [("client", "The Very Long Company Name of Springfield")]])
def test_a_story_that_does_not_fit_says_so(facts, tmp_path):
    told = whiteboard_story(facts=facts, update=facts[-1])
    with pytest.raises(ValueError, match="facts"):
        watch(type("Told", (KDAWhiteboard,), {"story": told}), tmp_path, frame_rate=1)
