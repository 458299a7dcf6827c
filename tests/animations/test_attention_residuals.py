"""The residuals scene shows its trace, follows it, and can be read."""

from __future__ import annotations

import pytest

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations.attention_residuals import AttentionResiduals, sentence_of, story_from_environment
from animations.charts import Edges
from k3viz import residuals_story
from k3viz.theme import format_number, format_probability
from tests.animations.watch import faults, numbers, watch, words

pytestmark = pytest.mark.scene


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("K3_UPDATE", "Friday")
        told = story_from_environment()
    return told, *watch(type("Told", (AttentionResiduals,), {"story": told}), tmp_path_factory.mktemp("media"))


def test_every_number_on_screen_is_in_the_trace(watched):
    told, _, frames = watched
    plain = {format_probability(x).split()[0] for x in told.plain_row}
    rows = {format_number(x) for x in (*told.row, *told.learned_row)}
    answers = {format_probability(p).strip("<> ").split()[0] for _, p in (told.answer, told.learned_answer)}
    assert plain | rows <= numbers(frames) <= plain | rows | answers
    assert [format_number(x) for x in told.row] == ["0.60", "0.10", "0.30"] and "Chosen, not learned" in words(frames)


def test_edges_end_as_thick_as_the_learned_weights(watched):
    told, scene, _ = watched
    edges = next(m for m in scene.get_mobject_family_members() if isinstance(m, Edges))
    for line, weight in zip(edges, told.learned_row, strict=True):
        assert line.get_stroke_width() == pytest.approx(100 * edges.thickest * weight)


def test_it_follows_the_story_and_can_be_read(watched):
    told, scene, frames = watched
    assert told.learned_answer[0] == "Friday" in words(frames) and "Thursday" not in words(frames)
    assert "Not one blended pile" in words(frames[-1:])
    assert not faults(frames)
    assert 10 <= scene.time <= 45


def test_a_learned_query_stands_alone(tmp_path):
    told = residuals_story(reader=4)
    _, frames = watch(type("Told", (AttentionResiduals,), {"story": told}), tmp_path, frame_rate=1)
    assert "Chosen" not in words(frames) and "layers 3–4, so far" in words(frames)
    assert {format_number(x) for x in told.row} <= numbers(frames)
    assert not faults(frames)


@pytest.mark.parametrize(("token", "sentence"), [(-1, "The meeting is now on ___."), (18, "The meeting has moved to Thursday.")])
def test_the_sentence_is_the_one_of_the_word(token, sentence):
    assert sentence_of(residuals_story(token=token)) == sentence


def test_an_unknown_day_is_refused(monkeypatch):
    monkeypatch.setenv("K3_UPDATE", "Someday")
    with pytest.raises(ValueError, match="^K3_UPDATE must be a day"):
        story_from_environment()
