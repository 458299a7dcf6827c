"""Published and measured numbers stand side by side and are never taken for each other."""
import json
from importlib import resources

import pytest
import torch

from k3viz import benchmarks_figure, benchmarks_story, evidence_figure, evidence_story, lineage_figure, lineage_story
from k3viz.evidence.story import MEASURED, PUBLISHED
from k3viz.theme import DARK, LIGHT, ROLES, contrast
from minimodel import K3Config, K3ForCausalLM, facts
from tests.k3viz.picture_colors import hexed, texts

STORY = evidence_story()
FIGURES = [evidence_figure, lineage_figure, benchmarks_figure]


def rows(kind):
    return [(facet, row) for facet in STORY.facets for row in facet.rows if row.kind == kind]


def test_every_published_number_is_a_fact_and_names_its_source():
    known = {getattr(fact, "value", None) for group in (facts.KimiLinear, facts.AttentionResiduals) for fact in vars(group).values()}
    tables = [t for group in (facts.KimiLinear, facts.AttentionResiduals) for t in vars(group).values() if isinstance(t, facts.Table)]
    known |= {value for table in tables for row in table.rows for value in row}
    counted = "K3, by its layer counts"
    for facet, row in rows(PUBLISHED):
        assert row.value in known or row.label == counted
        assert "arXiv" in facet.sources[PUBLISHED]
    k3 = K3Config.k3()
    (value,) = [row.value for _, row in rows(PUBLISHED) if row.label == counted]
    assert value == pytest.approx(1 - len(k3.linear_attn_config.full_attn_layers) / k3.num_hidden_layers)


def test_the_measured_saving_is_that_of_real_caches():
    """By another road: the bytes of every tensor, at other lengths."""
    grown = []
    for config in (K3Config.meeting(), K3Config.meeting().replace(linear_mixer="mla")):
        model = K3ForCausalLM(config)
        sizes = []
        for tokens in (10, 50):
            cache = model.new_cache(1)
            with torch.no_grad():
                model(torch.ones(1, tokens, dtype=torch.long), cache=cache)
            sizes.append(sum(x.nbytes for slot in cache.layers for x in slot.tensors().values()))
        grown.append(sizes[1] - sizes[0])
    (measured,) = [row.value for facet, row in rows(MEASURED) if "real caches" in row.label]
    assert measured == pytest.approx(1 - grown[0] / grown[1])


def test_the_scores_are_those_stored_with_the_model():
    stored = json.loads(resources.files("minimodel").joinpath("pretrained/meeting/scores.json").read_text())["held_out"]
    shown = [row.value for facet, row in rows(MEASURED) if "scores.json" in facet.sources[MEASURED]]
    assert len(shown) == 4 and set(shown) <= {score["accuracy"] for score in stored}


def test_the_two_kinds_differ_in_color_and_in_a_second_channel():
    assert ROLES[PUBLISHED] != ROLES[MEASURED]
    bars = [t for t in evidence_figure(story=STORY).data if t.type == "bar"]
    assert {(t.name, t.marker.color, t.marker.pattern.shape) for t in bars} == {
        (PUBLISHED, ROLES[PUBLISHED], "/"), (MEASURED, ROLES[MEASURED], "")}


def test_the_figure_draws_every_number_of_the_story():
    drawn = [(t.name, label, value) for t in evidence_figure(story=STORY).data for label, value in zip(t.y, t.x, strict=True)]
    assert sorted(drawn) == sorted((row.kind, row.label, row.value) for facet in STORY.facets for row in facet.rows)


def test_bars_start_at_zero_and_cut_axes_say_so():
    figure = evidence_figure(story=STORY)
    said = " ".join(note.text for note in figure.layout.annotations)
    dots = [t for t in figure.data if t.type == "scatter"]
    assert said.count("the axis is cut") == len(dots) > 0
    for bar in (t for t in figure.data if t.type == "bar"):
        assert figure.layout[bar.xaxis.replace("x", "xaxis")].range[0] == 0


def test_benchmarks_are_the_reports_table_and_ranks_follow_from_it():
    story = benchmarks_story()
    figure = benchmarks_figure(story=story)
    assert len(figure.data) == len(facts.benchmarks()) == len(story.ranks)
    for bars, (name, table) in zip(figure.data, facts.benchmarks().items(), strict=True):
        assert tuple(bars.x) == table.column("score")
        better = [score for model, score in table.rows if score > dict(table.rows)["Kimi K3"]]
        assert story.ranks[name] == len(better) + 1
        assert [model for model, fill in zip(bars.y, bars.marker.color, strict=True) if fill == ROLES[PUBLISHED]] == ["<b>Kimi K3</b>"]
    assert f"leads {sum(rank == 1 for rank in story.ranks.values())}" in story.sentence


def test_every_component_stands_beside_its_ancestors_and_source():
    story = lineage_story()
    text = " ".join(note.text.replace("<br>", " ") for note in lineage_figure(story=story).layout.annotations)
    for name, does, ancestors, source in story.components.rows:
        assert f"<b>{name}</b>: {does}" in text and ancestors in text and source in text
    assert str(len(story.components.rows)) in story.sentence
    (way,) = lineage_figure(story=story).data
    assert [said.split("</b>")[0][3:] for said in way.text] == list(story.timeline.column("model"))


@pytest.mark.parametrize("draw", FIGURES)
def test_another_story_gives_another_figure(draw):
    import dataclasses

    story = {evidence_figure: STORY, lineage_figure: lineage_story(), benchmarks_figure: benchmarks_story()}[draw]
    assert draw(story=dataclasses.replace(story, sentence="Something else.")) != draw(story=story)


@pytest.mark.parametrize("draw", FIGURES)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_figures_can_be_read_are_small_and_the_same_twice(draw, theme):
    figure = draw(theme=theme)
    assert figure.to_json() == draw(theme=theme).to_json() and len(figure.to_json()) < 100_000
    seen = list(texts(figure.to_plotly_json(), theme))
    assert len(seen) > 20
    assert {(text, ink, ground) for text, ink, ground in seen if contrast(hexed(ink), hexed(ground)) < 4.5} == set()
