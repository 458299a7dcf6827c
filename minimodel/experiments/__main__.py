"""``python -m minimodel.experiments list | run NAME | report``: the evidence, from its definition to the page."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from minimodel.experiments import NAMES, Experiment, load_experiment, load_results
from minimodel.experiments.report import page, table
from minimodel.experiments.runner import Outcome, run
from minimodel.experiments.store import STORED, UNIT, Results, UnitResult, is_current, load_unit, merged, save_results
from minimodel.train.loop import Diverged, set_threads

PAGE = Path("docs/evidence.md")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m minimodel.experiments", description="The course's claims as small experiments.")
    commands = p.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name the experiments and what is stored of them")
    one = commands.add_parser("run", help="train what is not trained yet, then show it beside the stored results")
    one.add_argument("name", choices=NAMES)
    one.add_argument("--budget", type=float, metavar="MINUTES", help="stop after so many minutes; the same command goes on later")
    one.add_argument("--arms", type=lambda text: text.split(","), metavar="A,B", help="only these, in this order")
    one.add_argument("--seeds", type=_numbers, metavar="0,1", help="default: all of the experiment's")
    one.add_argument("--runs", type=Path, default=Path("runs/experiments"), help="checkpoints and results (default runs/experiments)")
    one.add_argument("--threads", type=int, help="CPU threads (default torch's choice); results differ a little with their number")
    report = commands.add_parser("report", help=f"write {PAGE} from the stored results")
    report.add_argument("--collect", type=Path, metavar="RUNS", help="first take finished runs from this folder into the package")
    report.add_argument("--page", type=Path, default=PAGE, help=f"default {PAGE}")
    return p


def main(arguments: list[str] | None = None) -> None:
    """What cannot be done ends the program with one sentence."""
    p = parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = p.parse_args(arguments)
    try:
        if options.command == "list":
            show_list()
        elif options.command == "run":
            set_threads(options.threads)
            experiment = load_experiment(options.name)
            command = shlex.join([*p.prog.split(), *arguments])
            outcome = run(experiment, runs=options.runs, arms=options.arms, seeds=options.seeds, minutes=options.budget, command=command)
            show_outcome(experiment, outcome, options.runs)
        else:
            if options.collect and not options.collect.is_dir():
                raise ValueError(f"--collect: {options.collect} is no folder")
            for name in NAMES if options.collect else ():
                collect(load_experiment(name), options.collect)
            for name in NAMES:
                stored(load_experiment(name))  # names what the page leaves out
            options.page.write_text(page(), encoding="utf-8")
            print(f"wrote {options.page}")
    except KeyboardInterrupt:
        raise SystemExit(f"{p.prog}: stopped; the same command goes on from the last checkpoint") from None
    except (ValueError, OSError, Diverged) as error:
        raise SystemExit(f"{p.prog}: {error}") from None


def show_list() -> None:
    for name in NAMES:
        experiment = load_experiment(name)
        results = stored(experiment)
        units = 0 if results is None else len(results.units)
        print(f"{name:10} {experiment.question}\n{'':10} {len(experiment.arms)} arms, {units} stored runs")


def show_outcome(experiment: Experiment, outcome: Outcome, runs: Path) -> None:
    """What ran here, the stored rest, and what is left to run."""
    print()
    if outcome.done:
        print(table(experiment, Results(experiment.name, outcome.done), title=f"run here ({runs / experiment.name})"))
    here = {(u.arm, u.seed) for u in outcome.done}
    results = stored(experiment)
    rest = [] if results is None else [u for u in results.units if (u.arm, u.seed) not in here]
    if rest:
        print(table(experiment, Results(experiment.name, tuple(rest)), title="stored with the course"))
    for arm, seed, steps in outcome.left:
        print(f"left: {experiment.arms[arm].label}, seed {seed}, {steps} of {experiment.steps} steps made; the same command goes on")


def collect(experiment: Experiment, runs: Path) -> None:
    """Take an experiment's finished runs into the package. Runs of an older definition leave it, once there is another."""
    found = [load_unit(path) for path in sorted((runs / experiment.name).glob(f"*/*/{UNIT}"))]
    name_outdated(experiment, found, "not taken")
    old = load_results(experiment.name, STORED) if (STORED / f"{experiment.name}.json").exists() else None
    results = merged(experiment, old, found)
    if results.units:
        name_outdated(experiment, old.units if old else (), "dropped")
        print(f"{save_results(results, STORED)}: {len(results.units)} runs")


def name_outdated(experiment: Experiment, units: Sequence[UnitResult], fate: str) -> None:
    for u in units:
        if not is_current(experiment, u):
            print(f"{experiment.name}: {fate}: {u.arm}, seed {u.seed}, of another definition ({u.fingerprint})")


def stored(experiment: Experiment) -> Results | None:
    """What the package holds of today's definition of an experiment; None where nothing was stored yet."""
    if not (STORED / f"{experiment.name}.json").exists():
        return None
    results = load_results(experiment.name, STORED)
    name_outdated(experiment, results.units, "stored, but not shown")
    return merged(experiment, results, [])


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes whole numbers with commas between them, as in 0,1, got {text!r}") from None


if __name__ == "__main__":
    main()
