"""Trains one (arm, seed) after the other. Stopped or killed at any moment, the same call goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from minimodel.experiments.definition import Curve, Experiment
from minimodel.experiments.store import UNIT, UnitResult, load_unit, mean, save_unit, surroundings
from minimodel.model import K3ForCausalLM
from minimodel.tensor_files import Staging, check_writable
from minimodel.train import train

POINTS = 40  # of a stored training curve
CHECKPOINT_EVERY = 50  # steps


@dataclass(frozen=True)
class Outcome:
    """done: finished runs, old and new. left: (arm, seed, steps made) of those that are not."""

    done: tuple[UnitResult, ...]
    left: tuple[tuple[str, int, int], ...]


def run(
    experiment: Experiment,
    *,
    runs: Path = Path("runs/experiments"),
    arms: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    minutes: int | float | None = None,
    command: str = "",
    progress: bool = True,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Run an experiment's units, first seeds of all arms first.

    Args:
        runs: holds a folder a unit, ``runs/NAME/ARM/seed-N``, with its checkpoint and, when done, ``result.json``.
        arms, seeds: which units; default all.
        minutes: wall-clock budget; a unit that is not done then is saved and left.
        command: written into the results.

    Raises: ValueError for an unknown arm, a negative seed or budget, and a folder that can't be written, holds something
    else or is damaged.
    """
    arms = list(experiment.arms) if arms is None else list(arms)
    seeds = list(experiment.seeds) if seeds is None else list(seeds)
    for arm in arms:
        if arm not in experiment.arms:
            raise ValueError(f"arms: {experiment.name} has {', '.join(experiment.arms)}, got {arm!r}")
    if not seeds or min(seeds) < 0 or max(seeds) >= 2**32:
        raise ValueError(f"seeds must be whole numbers from 0 to {2**32 - 1}, got {seeds}")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes must be positive, got {minutes}")
    check_writable(runs, "runs")
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    done, left = [], []
    units = [(arm, seed) for seed in seeds for arm in arms]
    for i, (arm, seed) in enumerate(units):
        folder = runs / experiment.name / arm / f"seed-{seed}"
        say(f"{experiment.name}: {experiment.arms[arm].label}, seed {seed} ({i + 1} of {len(units)})")
        result = run_unit(experiment, arm, seed, folder, deadline=deadline, command=command, progress=progress)
        if isinstance(result, UnitResult):
            done.append(result)
        else:
            left.append((arm, seed, result))
    return Outcome(tuple(done), tuple(left))


def run_unit(
    experiment: Experiment, arm: str, seed: int, folder: Path, *, deadline: float | None = None, command: str = "", progress: bool = True
) -> UnitResult | int:
    """Train and measure one arm with one seed, or go on with it. Returns its result, or the steps made if the time is up."""
    path = folder / UNIT
    if path.exists():
        result = load_unit(path)
        if (result.arm, result.seed, result.fingerprint) != (arm, seed, experiment.fingerprint(arm)):
            raise ValueError(
                f"folder: {path} belongs to another definition of {experiment.name}, {arm}, seed {seed}; choose another or delete it"
            )
        return result
    clock = _Clock(folder / "clock.json")
    if deadline is not None and time.monotonic() >= deadline:
        return clock.steps
    it = experiment.arms[arm]
    model = it.build(it.config, seed=seed)
    recipe = experiment.recipe(arm, seed)
    read = 0

    def batch(step: int) -> tuple[Tensor, Tensor]:
        nonlocal read
        if it.before_step is not None:
            it.before_step(model, step, recipe.steps)
        ids, labels = experiment.batch(arm, seed, step)
        read = ids.numel()
        clock.tick(step)
        return ids, labels

    def evaluate(model: K3ForCausalLM) -> dict[str, float]:
        return experiment.evaluate(model, arm, experiment.answers)

    log = train(
        model, batch, recipe, folder=folder, checkpoint_every=CHECKPOINT_EVERY, progress=progress,
        evaluate=None if experiment.evaluate is None else evaluate, evaluate_every=experiment.evaluate_every,
        stop=None if deadline is None else lambda: time.monotonic() >= deadline,
    )  # fmt: skip
    clock.tick(len(log), save=True)
    if len(log) < recipe.steps:
        return len(log)
    measured = experiment.measure(model, arm, seed, log, experiment.answers)
    clock.tick(len(log), save=True)
    result = UnitResult(
        arm=arm, seed=seed, steps=recipe.steps, lr=recipe.lr, optimizer=recipe.optimizer,
        parameters=it.parameters, tokens=recipe.steps * (read or experiment.batch(arm, seed, 0)[0].numel()),
        fingerprint=experiment.fingerprint(arm), scores=measured.scores, curves={"training loss": loss_curve(log), **measured.curves},
        run={**surroundings(command), **clock.spent()},
    )  # fmt: skip
    save_unit(path, result)
    return load_unit(path)  # what is shown is what was written


def loss_curve(log: list[dict], points: int = POINTS) -> Curve:
    """The training loss, averaged over equal stretches of steps; x is the last step of a stretch, counted from 1."""
    size = -(-len(log) // points)
    parts = [log[i : i + size] for i in range(0, len(log), size)]
    return {"x": [float(part[-1]["step"] + 1) for part in parts], "y": [mean([row["loss"] for row in part]) for part in parts]}


class _Clock:
    """Seconds spent on a unit over all its sessions. After a kill at most the last few seconds are missing."""

    def __init__(self, path: Path) -> None:
        self.path, self.steps, self._before = path, 0, {"seconds": 0.0, "cpu_seconds": 0.0}
        if path.exists():
            try:
                data = json.loads(path.read_text())
                self.steps, self._before = int(data["steps"]), {name: float(data[name]) for name in self._before}
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"folder: {path} is damaged: delete it, and the run's time is counted from now on") from None
        self._started, self._saved = (time.monotonic(), time.process_time()), time.monotonic()

    def spent(self) -> dict[str, float]:
        now = (time.monotonic(), time.process_time())
        return {name: round(old + b - a, 1) for (name, old), a, b in zip(self._before.items(), self._started, now, strict=True)}

    def tick(self, steps: int, *, save: bool = False) -> None:
        if save or time.monotonic() - self._saved > 5:
            self.steps, self._saved = steps, time.monotonic()
            with Staging() as staging:
                staging.file(self.path).write_text(json.dumps({"steps": steps, **self.spent()}))
