"""The twins keep what the closed form says, column by column, and can be read."""

from __future__ import annotations

import pytest

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations.twins import TALL, Column, SameConversationTwice, story_from_environment, twins_story
from k3viz.theme import format_bytes, format_count
from minimodel import K3Config, cache_bytes
from minimodel.accounting import with_mixer
from tests.animations.watch import faults, numbers, watch, words

pytestmark = [pytest.mark.scene, pytest.mark.filterwarnings("ignore:'mode' parameter:DeprecationWarning")]  # manim's own use of Pillow
HYBRID = K3Config.kimi_linear_48b()
TWIN = with_mixer(HYBRID, "mla")


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    return watch(SameConversationTwice, tmp_path_factory.mktemp("media"))


def test_every_size_is_the_closed_forms(watched):
    held, even = set(), next(c for c in twins_story().published if c.name == "kimi_linear").bill.break_even
    for tokens in (256, even, 4096, 65_536, 1_048_576):
        hybrid, twin = cache_bytes(HYBRID, tokens), cache_bytes(TWIN, tokens)
        held |= {format_bytes(n).split()[0] for n in (twin.total, hybrid.total, hybrid.fixed, hybrid.per_token * tokens)}
        held |= {format_count(tokens).rstrip("M"), f"{100 * (1 - hybrid.total / twin.total):.1f}"}
    assert numbers(watched[1]) <= held


def test_at_break_even_both_keep_the_same():
    even = next(c for c in twins_story().published if c.name == "kimi_linear").bill.break_even
    assert cache_bytes(HYBRID, even).total <= cache_bytes(TWIN, even).total
    assert cache_bytes(HYBRID, even - 1).total > cache_bytes(TWIN, even - 1).total


def test_the_columns_end_as_high_as_their_bytes(watched):
    scene, _ = watched
    columns = [m for m in scene.get_mobject_family_members() if isinstance(m, Column)]
    twin, board, book = sorted({id(c): c for c in columns}.values(), key=lambda c: c.x)
    full = cache_bytes(TWIN, 1_048_576).total
    hybrid = cache_bytes(HYBRID, 1_048_576)
    assert twin.bar.height == pytest.approx(TALL)
    assert book.bar.height == pytest.approx(TALL * hybrid.per_token * hybrid.tokens / full)
    assert board.bar.height == pytest.approx(TALL * hybrid.fixed / full, rel=0.01)


def test_it_can_be_read_and_ends_with_its_result(watched):
    scene, frames = watched
    assert not faults(frames) and 10 <= scene.time <= 45
    end = " ".join(text.words for text in frames[-1])
    assert f"The whiteboard's never moves: {format_bytes(cache_bytes(HYBRID, 1).fixed)}" in end


def test_a_shorter_conversation_ends_lower(tmp_path, monkeypatch):
    monkeypatch.setenv("K3_CONTEXT", "131072")
    assert story_from_environment().context == 131_072
    _, frames = watch(SameConversationTwice, tmp_path, frame_rate=1)
    shown = words(frames)
    assert "131,072 tokens read" in shown and format_bytes(cache_bytes(TWIN, 131_072).total) in shown and "1.05M" not in shown


@pytest.mark.parametrize("text", ["long", "100", "-5"])
def test_a_conversation_that_is_none_is_refused(text, monkeypatch):
    monkeypatch.setenv("K3_CONTEXT", text)
    with pytest.raises(ValueError, match=f"^K3_CONTEXT must be a whole number of tokens above 4096, got '{text}'$"):
        story_from_environment()
