"""Results on disk: one JSON a run where it ran, one JSON an experiment in the package."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path

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
    return Results(name, tuple(_unit(path, entry) for entry in _json(path, list)))


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


def merged(experiment: Experiment, old: Results | None, new: list[UnitResult]) -> Results:
    """New runs take the place of old ones of the same arm and seed; runs of another definition are dropped."""
    by_key = {(u.arm, u.seed): u for u in [*(old.units if old else ()), *new]}
    arms = list(experiment.arms)
    kept = [u for u in by_key.values() if u.arm in arms and u.fingerprint == experiment.fingerprint(u.arm)]
    return Results(experiment.name, tuple(sorted(kept, key=lambda u: (arms.index(u.arm), u.seed))))


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
        raise ValueError(f"result file {path} is damaged ({error}): delete it to measure again") from None
    return data


def _unit(path: Path, entry: object) -> UnitResult:
    names = {f.name for f in fields(UnitResult)}
    if not isinstance(entry, dict) or entry.keys() != names or not isinstance(entry["scores"], dict):
        raise ValueError(f"result file {path} is damaged (an entry does not have the fields {sorted(names)}): delete it to measure again")
    return UnitResult(**entry)


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
