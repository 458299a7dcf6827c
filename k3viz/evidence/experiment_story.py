"""One experiment's stored results, ready to draw: what was measured over seeds, and the published numbers, kept apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minimodel.experiments import Results, load_experiment, load_results
from minimodel.experiments.definition import Bars, Experiment, Lines
from minimodel.experiments.report import VERDICTS, cell, found, number, written
from minimodel.experiments.store import mean
from minimodel.formats import plural


@dataclass(frozen=True)
class Bar:
    """One arm's score: its mean, smallest and largest over the seeds; text: the mean as it is written, spread: all three."""

    arm: str
    label: str
    value: float
    low: float
    high: float
    text: str
    spread: str


@dataclass(frozen=True)
class Line:
    """One arm's curve: mean, smallest and largest over the seeds at every x."""

    arm: str
    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class BarPicture:
    title: str
    better: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class LinePicture:
    title: str
    x: str
    y: str
    log_x: bool
    log_y: bool
    percent: bool
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class PublishedNumber:
    label: str
    text: str
    source: str


@dataclass(frozen=True)
class ExperimentStory:
    """pictures: what was measured here. published: what the reports print, never mixed with it. run: how much was run, and on what."""

    name: str
    question: str
    claim: str
    pictures: tuple[BarPicture | LinePicture, ...]
    published: tuple[PublishedNumber, ...]
    run: str
    verdict: str  # "agrees", "does not agree" or "open", at this size
    sentence: str


def experiment_story(*, name: str = "toolbox", results: str | Path | Results | None = None) -> ExperimentStory:
    """An experiment of ``python -m minimodel.experiments list``.

    results: a folder with NAME.json, or results already loaded; default what is stored with the course. Raises ValueError for an unknown
    name, and where nothing is stored.
    """
    experiment = load_experiment(name)
    if not isinstance(results, Results):
        results = load_results(name, None if results is None else Path(results))
    pictures = [
        _bars(experiment, results, show) if isinstance(show, Bars) else _lines(experiment, results, show) for show in experiment.shows
    ]
    finding = found(experiment, results)
    units, seeds = results.units, {u.seed for u in results.units}
    run = (
        f"{len(units)} {plural('run', len(units))} of {units[0].steps:,} steps, {min(u.parameters for u in units):,} parameters, "
        f"{len(seeds)} {plural('seed', len(seeds))}, {sum(u.run['cpu_seconds'] for u in units) / 60:.1f} processor minutes"
    )
    return ExperimentStory(
        name, experiment.question, experiment.claim, tuple(p for p in pictures if p is not None),
        tuple(PublishedNumber(fact.label, written(fact), fact.source) for fact in experiment.published),
        run, VERDICTS[finding.agrees].strip("*"), finding.sentence,
    )  # fmt: skip


def _bars(experiment: Experiment, results: Results, show: Bars) -> BarPicture | None:
    bars = []
    for arm in results.arms():
        values = results.values(arm, show.score)
        if values:
            middle = mean(values)
            bars.append(Bar(arm, experiment.arms[arm].label, middle, min(values), max(values), number(show, middle), cell(show, values)))
    return BarPicture(show.title, show.better, tuple(bars)) if bars else None


def _lines(experiment: Experiment, results: Results, show: Lines) -> LinePicture | None:
    lines = []
    for arm in results.arms():
        curves = results.curves(arm, show.curve)
        if curves:
            columns = list(zip(*(curve["y"] for curve in curves), strict=True))
            x = tuple(map(mean, zip(*(curve["x"] for curve in curves), strict=True)))
            lines.append(Line(arm, experiment.arms[arm].label, x, *(tuple(map(f, columns)) for f in (mean, min, max))))
    return LinePicture(show.title, show.x, show.y, show.log_x, show.log_y, show.percent, tuple(lines)) if lines else None
