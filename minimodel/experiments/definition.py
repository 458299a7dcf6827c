"""What an experiment is: data, not code. The runner, the page and the figures read it; nothing here trains."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields

from torch import Tensor

from minimodel.accounting import parameter_budget
from minimodel.config import K3Config, LinearAttnConfig
from minimodel.model import K3ForCausalLM
from minimodel.train import Recipe

Scores = dict[str, float]
Curve = dict[str, list[float]]  # {"x": [...], "y": [...]}


@dataclass(frozen=True)
class Arm:
    """One of the things that are compared: a config, and whatever else differs from the other arms."""

    label: str
    config: K3Config
    build: Callable[..., K3ForCausalLM] = K3ForCausalLM  # (config, seed=...) -> the model before its first step
    before_step: Callable[[K3ForCausalLM, int, int], None] | None = None  # (model, step, steps)
    optimizer: str = "per_head_muon"
    lr: float | None = None  # another rate than the experiment's, where a grid is searched

    @property
    def parameters(self) -> int:
        return parameter_budget(self.config).total


@dataclass(frozen=True)
class Measured:
    """What is measured of a trained model: numbers, and curves to draw. Every value is finite."""

    scores: Scores
    curves: dict[str, Curve]


@dataclass(frozen=True)
class Bars:
    """A picture of one score of every arm. percent: a share, written as such. better: which way, for the reader."""

    score: str
    title: str
    better: str = ""
    percent: bool = False


@dataclass(frozen=True)
class Lines:
    """A picture of one curve of every arm that has it."""

    curve: str
    title: str
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    percent: bool = False


@dataclass(frozen=True)
class Published:
    """One published number beside ours: what it is of, how it is written, and where it is printed."""

    label: str
    value: float | int | str
    unit: str
    source: str


@dataclass(frozen=True)
class Finding:
    """What the stored numbers say. agrees: with the claim, at this size; None where that is left open."""

    agrees: bool | None
    sentence: str


@dataclass(frozen=True)
class Experiment:
    """One question to small models. All arms see the same batches in the same order and, unless they say otherwise, one recipe.

    Args:
        claim: the sentence of the course that this supports, or not.
        setup: task and sizes in words, with what was made smaller than in the papers.
        batch: (arm, seed, step) -> ids and labels, a pure function; most tasks ignore the arm.
        measure: (model, arm, seed, log, answers) -> what is reported of the trained model.
        evaluate: (model, arm, answers) -> numbers logged every ``evaluate_every`` steps, given back to ``measure`` in the log.
        answers: held-out questions a measurement asks; tests ask few.
        shows: pictures, in order; the first bars are the headline of the page.
        finding: (scores by arm, each averaged over seeds) -> what they say.
    """

    name: str
    question: str
    claim: str
    setup: str
    arms: dict[str, Arm]
    batch: Callable[[str, int, int], tuple[Tensor, Tensor]]
    steps: int
    lr: float
    measure: Callable[[K3ForCausalLM, str, int, list[dict], int], Measured]
    shows: tuple[Bars | Lines, ...]
    finding: Callable[[dict[str, Scores]], Finding]
    published: tuple[Published, ...] = ()
    seeds: tuple[int, ...] = (0,)
    evaluate: Callable[[K3ForCausalLM, str, int], Scores] | None = None
    evaluate_every: int = 0
    answers: int = 512
    version: int = 1  # raised when task or measurements change in a way that config and recipe don't show
    lr_grid: str = "one rate for all arms, chosen in short trials before these runs"

    def recipe(self, arm: str, seed: int) -> Recipe:
        """The recipe of one run; its ``data`` names the run, so that a folder is never continued with another."""
        a = self.arms[arm]
        data = f"experiment {self.name}, arm {arm}, seed {seed}"
        return Recipe(steps=self.steps, lr=a.lr or self.lr, optimizer=a.optimizer, data=data)

    def fingerprint(self, arm: str) -> str:
        """A short hash of what was trained and how: a result is only shown beside others of the same definition.

        Config fields at their defaults are left out, so that a new field does not disown old results.
        """
        config = self.arms[arm].config
        settings = [_changed(self.recipe(arm, 0)), _changed(config), _changed(config.linear_attn_config), self.version]
        settings[1].pop("linear_attn_config")  # counted by its own fields
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _changed(settings: Recipe | K3Config | LinearAttnConfig) -> dict[str, object]:
    """The fields that are not at their defaults."""
    return {f.name: getattr(settings, f.name) for f in fields(settings) if f.default is MISSING or getattr(settings, f.name) != f.default}


def as_wide_as(config: K3Config, parameters: int) -> K3Config:
    """``config`` with the dense feed-forward width that brings its parameters closest to ``parameters``: same size, another mixer.

    Raises ValueError if even the narrowest is more than 5 % off.
    """
    one, two = (parameter_budget(config.replace(intermediate_size=n)).total for n in (1, 2))
    width = max(1, round(1 + (parameters - one) / (two - one)))
    made = config.replace(intermediate_size=width)
    if abs(parameter_budget(made).total / parameters - 1) > 0.05:
        raise ValueError(f"parameters={parameters} cannot be reached by intermediate_size: the closest is {parameter_budget(made).total}")
    return made
