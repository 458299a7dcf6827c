"""Results on disk: one JSON a run where it ran, one JSON an experiment in the package."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from textwrap import shorten

import torch

from minimodel.experiments.definition import Curve, Experiment, Scores
from minimodel.tensor_files import Staging

STORED = Path(__file__).parent / "results"
UNIT = "result.json"


@dataclass(frozen=True)
class UnitResult:
    """What one (arm, seed) gave. run: how it came about (command, versions, processor, threads, seconds), which no repetition repeats."""

    arm: str
    seed: int
    steps: int
    lr: float
    optimizer: str
    parameters: int
    tokens: int  # that it was trained on
    fingerprint: str
    scores: Scores
    curves: dict[str, Curve]
    run: dict[str, str | float | int]


@dataclass(frozen=True)
class Results:
    """All stored runs of one experiment, in the order of its arms and seeds."""

    name: str
    units: tuple[UnitResult, ...]

    def arms(self) -> list[str]:
        return list(dict.fromkeys(u.arm for u in self.units))

    def seeds(self, arm: str) -> list[int]:
        return [u.seed for u in self.units if u.arm == arm]

    def values(self, arm: str, score: str) -> list[float]:
        """One value a seed; empty where the arm has no such score."""
        return [u.scores[score] for u in self.units if u.arm == arm and score in u.scores]

    def curves(self, arm: str, curve: str) -> list[Curve]:
        return [u.curves[curve] for u in self.units if u.arm == arm and curve in u.curves]

    def means(self) -> dict[str, Scores]:
        """Every score of every arm, averaged over its seeds."""
        names = {arm: dict.fromkeys(name for u in self.units if u.arm == arm for name in u.scores) for arm in self.arms()}
        return {arm: {name: mean(self.values(arm, name)) for name in scores} for arm, scores in names.items()}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def load_results(name: str, folder: Path | None = None) -> Results:
    """The results in the package (or in another folder). Raises ValueError where there are none, or the file is damaged."""
    path = (STORED if folder is None else folder) / f"{name}.json"
    if not path.exists():
        raise ValueError(f"name: no results of the experiment {name!r} are stored at {path}")
    units = tuple(_unit(path, entry, f"entry {i}: ") for i, entry in enumerate(_json(path, list)))
    for i, unit in enumerate(units):
        if (unit.arm, unit.seed) in [(u.arm, u.seed) for u in units[:i]]:
            raise _damaged(path, f"entry {i}: {unit.arm}, seed {unit.seed} is there twice")
    return Results(name, units)


def load_unit(path: Path) -> UnitResult:
    """One run's result. Raises ValueError for a file that is damaged."""
    return _unit(path, _json(path, dict))


def save_unit(path: Path, unit: UnitResult) -> None:
    """Replaced atomically. Raises ValueError for a number that is not finite: a result is written only when it can be read again."""
    _write(path, json.dumps(_rounded(asdict(unit)), indent=1, allow_nan=False) + "\n")


def save_results(results: Results, folder: Path = STORED) -> Path:
    """One line a run, so that a change of one run is a change of one line. Returns the file."""
    path = folder / f"{results.name}.json"
    lines = ",\n".join(json.dumps(asdict(unit), allow_nan=False) for unit in results.units)
    _write(path, f"[\n{lines}\n]\n")
    return path


def is_current(experiment: Experiment, unit: UnitResult) -> bool:
    """Whether a run is of this definition of the experiment, and of one of its arms."""
    return unit.arm in experiment.arms and unit.fingerprint == experiment.fingerprint(unit.arm)


def merged(experiment: Experiment, old: Results | None, new: list[UnitResult]) -> Results:
    """New runs take the place of old ones of the same arm and seed; runs of another definition are dropped."""
    by_key = {(u.arm, u.seed): u for u in [*(old.units if old else ()), *new] if is_current(experiment, u)}
    arms = list(experiment.arms)
    return Results(experiment.name, tuple(sorted(by_key.values(), key=lambda u: (arms.index(u.arm), u.seed))))


def surroundings(command: str) -> dict[str, str | int]:
    """What a run depends on besides its definition: command, versions, processor, threads."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, k3-made-small {metadata.version('k3-made-small')}"
    return {"command": command, "versions": versions, "processor": _processor(), "threads": torch.get_num_threads()}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def _json(path: Path, kind: type) -> list | dict:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, kind):
            raise ValueError(f"it holds no {kind.__name__}")
    except (OSError, ValueError) as error:  # json's and unicode's errors are ValueErrors
        raise _damaged(path, error) from None
    return data


def _unit(path: Path, entry: object, where: str = "") -> UnitResult:
    """A run as it was read. Raises ValueError for fields that are missing or unknown, and for one that is not what it should be."""
    names = {f.name for f in fields(UnitResult)}
    if not isinstance(entry, dict) or entry.keys() != names:
        raise _damaged(path, f"{where}it does not have the fields {sorted(names)}")
    for name, (is_fine, words) in FIELDS.items():
        if not is_fine(entry[name]):
            raise _damaged(path, f"{where}{name} must be {words}, got {shorten(json.dumps(entry[name]), 60, placeholder=' ...')}")
    return UnitResult(**entry)


def _damaged(path: Path, what: object) -> ValueError:
    return ValueError(f"result file {path} is damaged ({what}): delete it to measure again")


def _whole(least: int) -> Callable[[object], bool]:
    return lambda x: type(x) is int and x >= least


def _number(x: object) -> bool:
    return type(x) in (int, float) and abs(x) < math.inf  # not a bool, nor NaN


def _text(x: object) -> bool:
    return isinstance(x, str) and bool(x)


def _curve(x: object) -> bool:
    if not isinstance(x, dict) or x.keys() != {"x", "y"} or not all(isinstance(values, list) for values in x.values()):
        return False
    return len(x["x"]) == len(x["y"]) > 0 and all(_number(value) for values in x.values() for value in values)


def _each(is_fine: Callable[[object], bool], least: int = 0) -> Callable[[object], bool]:
    return lambda x: isinstance(x, dict) and len(x) >= least and all(is_fine(value) for value in x.values())


def _run(x: object) -> bool:
    texts, numbers = ("command", "versions", "processor"), ("threads", "seconds", "cpu_seconds")
    return isinstance(x, dict) and all(isinstance(x.get(name), str) for name in texts) and all(_number(x.get(name)) for name in numbers)


FIELDS = {
    "arm": (_text, "a name"), "seed": (_whole(0), "a whole number from 0"), "steps": (_whole(1), "a whole number from 1"),
    "lr": (lambda x: _number(x) and x > 0, "a positive number"), "optimizer": (_text, "a name"),
    "parameters": (_whole(1), "a whole number from 1"), "tokens": (_whole(1), "a whole number from 1"), "fingerprint": (_text, "a name"),
    "scores": (_each(_number, 1), "finite numbers by name"), "curves": (_each(_curve), "curves, each with as many finite x as y"),
    "run": (_run, "command, versions and processor with the numbers threads, seconds and cpu_seconds"),
}  # fmt: skip


def _rounded(x):
    """Numbers to six significant digits: what is read and drawn, without the noise."""
    if isinstance(x, dict):
        return {name: _rounded(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_rounded(value) for value in x]
    rough = isinstance(x, float) and math.isfinite(x) and not x.is_integer()  # counts and bytes stay exact
    return float(f"{x:.6g}") if rough else x


def _write(path: Path, text: str) -> None:
    with Staging() as staging:
        staging.file(path).write_text(text, encoding="utf-8")
