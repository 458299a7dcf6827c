"""The page docs/evidence.md and the tables on the screen, from stored results: claim, experiment, our numbers, published numbers."""

from __future__ import annotations

from minimodel.experiments import NAMES, load_experiment, load_results
from minimodel.experiments.definition import Bars, Experiment, Finding, Published
from minimodel.experiments.store import STORED, Results, mean, merged
from minimodel.formats import format_digits, format_probability, plural

VERDICTS = {True: "agrees", False: "**does not agree**", None: "open"}


def page() -> str:
    """The whole page."""
    experiments = [load_experiment(name) for name in NAMES]
    found = [(e, merged(e, load_results(e.name), []) if (STORED / f"{e.name}.json").exists() else None) for e in experiments]
    rows = "\n".join(_summary(experiment, results) for experiment, results in found)
    sections = "\n".join(section(experiment, results) for experiment, results in found)
    return f"""# Evidence

What the course claims, tried on models small enough for a CPU. Every number called *ours* was measured by the command beside it; every
*published* number stands with its source and is never mixed with ours. The models here are hundreds to millions of times smaller than those
of the reports, and were trained for about a minute each on one task. Where a result agrees, the mechanism shows at this size. Where it
does not, that is said, and it says nothing against the report. Differences between arms that were run with one seed may be luck of the
draw; where there are several, the smallest and the largest stand in brackets.

This page is written by `python -m minimodel.experiments report` from the results in `minimodel/experiments/results`, and a test holds it to
them. `k3viz.experiment_figure(name="toolbox")` draws them. A run is repeated by its command, which goes on where it was stopped. On the
same processor with the same number of threads it gives the same numbers, times excepted.

| claim | experiment | ours, at this size | published | |
|---|---|---|---|---|
{rows}

{sections}"""


def section(experiment: Experiment, results: Results | None) -> str:
    """One experiment: question, what was run, the numbers, the published ones, and what they say together."""
    head = f"## {experiment.name}\n\n*{experiment.question}* Claim: {experiment.claim}\n\n{experiment.setup}\n"
    if results is None or not results.units:
        return f"{head}\nNot run yet: `python -m minimodel.experiments run {experiment.name}`.\n"
    scores = [bars for bars in experiment.shows if isinstance(bars, Bars)]
    titles = "".join(f" {bars.title}{f' ({bars.better})' if bars.better else ''} |" for bars in scores)
    rows = "\n".join(
        f"| {experiment.arms[arm].label} | {_seeds(results, arm)} |"
        + "".join(f" {cell(bars, results.values(arm, bars.score))} |" for bars in scores)
        for arm in results.arms()
    )
    published = "".join(f"* {fact.label}: {written(fact)} ({fact.source})\n" for fact in experiment.published)
    finding = found(experiment, results)
    return f"""{head}
{_how(experiment, results)}

| arm | seeds |{titles}
|---|---|{"---|" * len(scores)}
{rows}

{_missing(experiment, results)}Ours: {finding.sentence} At this size: {VERDICTS[finding.agrees]}.

{f"Published:{chr(10)}{chr(10)}{published}" if published else "Published: no number that could stand beside these." + chr(10)}"""


def found(experiment: Experiment, results: Results) -> Finding:
    """What the numbers say, once every arm has some."""
    if set(results.arms()) != set(experiment.arms):
        return Finding(None, "Not every arm was run yet.")
    return experiment.finding(results.means())


def table(experiment: Experiment, results: Results, *, title: str) -> str:
    """The same numbers for a terminal."""
    scores = [bars for bars in experiment.shows if isinstance(bars, Bars)]
    head = ["arm", "seeds", *(bars.score for bars in scores)]
    rows = [[experiment.arms[a].label, _seeds(results, a), *(cell(b, results.values(a, b.score)) for b in scores)] for a in results.arms()]
    wide = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(text.ljust(n) for text, n in zip(row, wide, strict=True)).rstrip() for row in [head, *rows]]
    return "\n".join([title, *(f"  {line}" for line in lines), ""])


def cell(bars: Bars, values: list[float]) -> str:
    """Mean and, over several seeds, the smallest and largest."""
    if not values:
        return "-"
    if len(values) == 1:
        return number(bars, values[0])
    return f"{number(bars, mean(values))} ({number(bars, min(values))} to {number(bars, max(values))})"


def number(bars: Bars, value: float) -> str:
    return format_probability(value) if bars.percent else f"{value:,.0f}" if abs(value) >= 1000 else format_digits(value, digits=3)


def written(fact: Published) -> str:
    """A published number as it is printed, with its unit."""
    if fact.unit == "share":
        return format_probability(fact.value)
    return f"{fact.value:,} {fact.unit}" if isinstance(fact.value, (int, float)) else f"{fact.value} {fact.unit}"


def _summary(experiment: Experiment, results: Results | None) -> str:
    finding = Finding(None, "Not run yet.") if results is None else found(experiment, results)
    published = "; ".join(f"{fact.label}: {written(fact)}" for fact in experiment.published) or "none"
    link = f"[{experiment.name}](#{experiment.name})"
    return f"| {experiment.claim} | {link} | {finding.sentence} | {published} | {VERDICTS[finding.agrees]} |"


def _seeds(results: Results, arm: str) -> str:
    return ", ".join(str(seed) for seed in results.seeds(arm))


def _how(experiment: Experiment, results: Results) -> str:
    """What was run, in one paragraph: sizes, steps, rates, machine, time."""
    units = results.units
    sizes, steps, tokens = ({getattr(u, name) for u in units} for name in ("parameters", "steps", "tokens"))
    told = {name: sorted({str(u.run[name]) for u in units}) for name in ("processor", "threads", "versions")}
    minutes = sum(u.run["cpu_seconds"] for u in units) / 60
    rates = ", ".join(f"{rate:g}" for rate in sorted({u.lr for u in units}))
    optimizers = sorted({u.optimizer for u in units})
    trained = " to ".join(f"{n:,}" for n in sorted({min(tokens), max(tokens)}))
    return (
        f"Run: {len(units)} {plural('run', len(units))} of {' or '.join(f'{n:,}' for n in sorted(steps))} steps ({trained} tokens), "
        f"{' to '.join(f'{n:,}' for n in sorted({min(sizes), max(sizes)}))} parameters, {', '.join(optimizers)} at {rates} "
        f"({experiment.lr_grid}); {minutes:.1f} processor minutes in all on {' and '.join(told['processor'])}, "
        f"{' or '.join(told['threads'])} {plural('thread', int(told['threads'][-1]))}; {'; '.join(told['versions'])}. Again: `python -m "
        f"minimodel.experiments run {experiment.name}`."
    )


def _missing(experiment: Experiment, results: Results) -> str:
    left = [arm.label for name, arm in experiment.arms.items() if name not in results.arms()]
    return f"Not run yet: {', '.join(left)}.\n\n" if left else ""
