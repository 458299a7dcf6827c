"""An experiment's picture shows every stored number once, its spread over seeds, and keeps published numbers apart."""
import dataclasses

import pytest

from k3viz.evidence.experiment_figure import experiment_figure
from k3viz.evidence.experiment_story import BarPicture, LinePicture, experiment_story
from k3viz.theme import DARK, LIGHT, ROLES, contrast
from minimodel.experiments import NAMES, Results, load_experiment
from minimodel.experiments.definition import Bars, Lines
from minimodel.experiments.store import UnitResult, save_results
from tests.k3viz.picture_colors import hexed, texts


def results(name, seeds=(0, 1)):
    """Numbers made up for these tests: a different one for every arm, seed and score."""
    experiment, units = load_experiment(name), []
    for i, arm in enumerate(experiment.arms):
        for seed in seeds:
            bars, lines = ([p for p in experiment.shows if isinstance(p, kind)] for kind in (Bars, Lines))
            scores = {p.score: 0.01 + 0.07 * i + 0.02 * seed + 0.003 * j for j, p in enumerate(bars)}
            curves = {p.curve: {"x": [8.0, 64.0, 192.0], "y": [0.9, 0.5 + 0.1 * seed, 0.05 * i]} for p in lines}
            run = {"command": "c", "versions": "v", "processor": "p", "threads": 1, "seconds": 60.0, "cpu_seconds": 60.0}
            it, mark = experiment.arms[arm], experiment.fingerprint(arm)
            recipe = (experiment.steps, experiment.lr, it.optimizer, it.parameters)
            units.append(UnitResult(arm, seed, *recipe, 1000, mark, scores, curves, run))
    return Results(name, tuple(units))


@pytest.fixture(autouse=True)
def any_finding(monkeypatch):
    """Findings speak of scores that these made-up results don't have."""
    import k3viz.evidence.experiment_story as module
    from minimodel.experiments.definition import Finding

    monkeypatch.setattr(module, "found", lambda experiment, results: Finding(False, "So it is."))


@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_drawn_with_its_spread(name):
    experiment, stored = load_experiment(name), results(name)
    figure = experiment_figure(story=experiment_story(name=name, results=stored))
    bars = [t for t in figure.data if t.type == "bar"]
    shown = [p for p in experiment.shows if isinstance(p, Bars)]
    assert len(bars) == len(shown)
    for trace, picture in zip(bars, shown, strict=True):
        for i, arm in enumerate(experiment.arms):
            one, two = stored.values(arm, picture.score)
            assert trace.x[i] == pytest.approx((one + two) / 2)
            assert trace.error_x.array[i] == pytest.approx((two - one) / 2) == trace.error_x.arrayminus[i]
        assert trace.marker.color == ROLES["measured"]
        assert figure.layout[trace.xaxis.replace("x", "xaxis")].range[0] == 0
    curves = [t for t in figure.data if t.type == "scatter" and t.mode == "lines" and "spread" not in t.name]
    wanted = [c for p in experiment.shows if isinstance(p, Lines) for arm in experiment.arms for c in stored.curves(arm, p.curve)]
    assert len(curves) == len(wanted) / 2
    assert len({(t.line.color, t.line.dash) for t in curves}) == len({t.name for t in curves})


@pytest.mark.parametrize("name", NAMES)
def test_published_numbers_stand_apart_with_their_sources(name):
    story = experiment_story(name=name, results=results(name))
    figure = experiment_figure(story=story)
    said = " ".join(note.text.replace("<br>", " ") for note in figure.layout.annotations)
    for fact in story.published:
        assert fact.text in said and fact.source.split(" (")[0] in said
    stripes = [shape.fillcolor for shape in figure.layout.shapes]
    assert stripes == ([ROLES["published"]] if story.published else [])
    title = figure.layout.title.text.replace("<br>", " ")
    assert "does not agree" in title and "So it is." in title


def test_a_story_is_read_from_a_folder_and_is_frozen(tmp_path):
    save_results(results("muon"), tmp_path)
    story = experiment_story(name="muon", results=tmp_path)
    assert story == experiment_story(name="muon", results=results("muon"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        story.run = ""
    assert {type(p) for p in story.pictures} == {BarPicture, LinePicture}
    with pytest.raises(ValueError, match="no results of the experiment 'twins'"):
        experiment_story(name="twins", results=tmp_path)
    with pytest.raises(ValueError, match="name must be one of toolbox"):
        experiment_story(name="mars")


def test_other_results_give_another_figure():
    one = results("twins")
    units = (dataclasses.replace(one.units[0], scores={**one.units[0].scores, "loss": 0.5}), *one.units[1:])
    draw = [experiment_figure(story=experiment_story(name="twins", results=r)).to_json() for r in (one, one, Results("twins", units))]
    assert draw[0] == draw[1] != draw[2]


def test_one_seed_has_no_spread():
    figure = experiment_figure(story=experiment_story(name="ratio", results=results("ratio", seeds=(0,))))
    assert all(not any(t.error_x.array) for t in figure.data if t.type == "bar")
    assert not [t for t in figure.data if "spread" in t.name]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
@pytest.mark.parametrize("name", NAMES)
def test_figures_can_be_read_and_are_small(name, theme):
    figure = experiment_figure(story=experiment_story(name=name, results=results(name)), theme=theme)
    assert len(figure.to_json()) < 100_000
    seen = list(texts(figure.to_plotly_json(), theme))
    assert len(seen) > 10
    assert {(text, ink, ground) for text, ink, ground in seen if contrast(hexed(ink), hexed(ground)) < 4.5} == set()
