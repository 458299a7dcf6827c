"""The prefix cache's session shows its trace, follows it, and can be read."""

from __future__ import annotations

import pytest

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations.serving import PrefixCache, Request, story_from_environment
from k3viz import serving_story
from k3viz.theme import format_bytes, format_count, format_digits, format_number, format_probability
from minimodel.facts import Serving
from tests.animations.watch import faults, numbers, watch, words

pytestmark = [pytest.mark.scene, pytest.mark.filterwarnings("ignore:'mode' parameter:DeprecationWarning")]  # manim's own use of Pillow


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    return watch(PrefixCache, tmp_path_factory.mktemp("media"))


def test_every_number_is_in_the_trace(watched):
    story = serving_story()
    held = {format_number(b(i)) for i in range(8) for b in (story.bill, lambda i: story.bill(i, cached=False))}
    held |= {format_number(p.value) for p in (Serving.input_price, Serving.cached_price, Serving.output_price)}
    held |= {format_probability(story.hit_rate()).split()[0], format_bytes(story.kept_bytes()).split()[0]}
    held.add(format_digits(story.off).split("·")[0])
    assert numbers(watched[1]) and numbers(watched[1]) <= held
    shown, second = words(watched[1]).replace("\n", " "), story.turns[1]
    assert all(format_count(n) in shown for n in (story.turns[0].prompt, second.prompt, second.hit, second.read, story.turns[-1].stored))


def test_the_bars_are_as_long_as_the_turns(watched):
    scene, _ = watched
    found = {id(m): m for m in scene.get_mobject_family_members() if isinstance(m, Request)}
    requests = sorted(found.values(), key=lambda r: -r.y)
    for request, turn in zip(requests, serving_story().turns, strict=True):
        for bar, tokens in zip(request.bars, (turn.hit, turn.read, turn.output), strict=True):
            assert bar.width == pytest.approx(tokens * request.unit, abs=2e-3)
        assert len(request.marks) == len(turn.checkpoints)


def test_it_can_be_read_and_ends_with_its_result(watched):
    scene, frames = watched
    story, end = serving_story(), " ".join(text.words for text in watched[1][-1])
    assert not faults(frames) and 10 <= scene.time <= 45
    assert f"${format_number(story.bill())} instead of ${format_number(story.bill(cached=False))}" in end


def test_a_shorter_session_costs_less(tmp_path, monkeypatch):
    monkeypatch.setenv("K3_TURNS", "3")
    story = story_from_environment()
    assert len(story.turns) == 3
    _, frames = watch(PrefixCache, tmp_path, frame_rate=1)
    shown = words(frames)
    assert "turn 3" in shown and "turn 4" not in shown and f"${format_number(story.bill())} instead of" in shown


def test_what_can_not_be_drawn_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="^story: this scene draws up to 8 turns that nothing breaks, got 8 turns, broken by clock$"):
        watch(type("Told", (PrefixCache,), {"story": serving_story(broken="clock")}), tmp_path, frame_rate=1)
    monkeypatch.setenv("K3_TURNS", "9")
    with pytest.raises(ValueError, match="^K3_TURNS must be a whole number of requests from 2 to 8, got '9'$"):
        story_from_environment()
