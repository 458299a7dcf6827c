"""How a step is graded: the learner's function and ours read the same fresh inputs, and a difference is explained in words.

A *slip* is a small wrong variant of the reference, the mistake people make. Where a learner's outputs equal a slip's on every input, that
slip is named. A *law* is something every right answer obeys (a length, a sum, causality); the broken ones are named too. Where the function
calls an earlier step that does not pass its own check, that step is named.
"""

from __future__ import annotations

import os
import textwrap
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minimodel.checks.called import called
from minimodel.checks.held import attempt, message, named
from minimodel.tasks import story

Seed = int | str  # a number, or a word such as a student's name
CASES = 5  # inputs a step is tried on
OURS = (str(Path(__file__).resolve().parents[1]), str(Path(torch.__file__).resolve().parent))
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}  # of the largest right value, or of 1 where that is smaller


class NotYet(AssertionError):
    """The verdict on a step that is not right yet: one paragraph. Notebooks show it without the stack of calls that led to it."""

    def __init__(self, *sentences: str) -> None:
        super().__init__(" ".join(sentences))
        self.sentences = sentences

    def _render_traceback_(self) -> list[str]:
        return [line for sentence in self.sentences for line in textwrap.wrap(sentence, 95)]  # IPython asks for this


def seed_in_use() -> Seed:
    """The seed of checks that are called without one: the environment variable ``K3_SEED``, or 0 where it is not set.

    Raises ValueError where it is not text.
    """
    seed = os.environ.get("K3_SEED")
    return story.spelled(seed, "K3_SEED") if seed else 0


class Draw:
    """Random inputs of one case, the same for the same (step, seed, case). The last case is in float32, the others in float64."""

    def __init__(self, step: str, seed: Seed, case: int) -> None:
        self.seed, self.case = seed, case
        self.dtype = torch.float32 if case == CASES - 1 else torch.float64
        self._random = torch.Generator().manual_seed(zlib.crc32(f"{step}/{story.spelled(seed)}/{case}".encode()))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random, dtype=torch.float64).to(self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return (low + (high - low) * torch.rand(shape, generator=self._random, dtype=torch.float64)).to(self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers from low to high - 1."""
        return torch.randint(low, high, shape, generator=self._random)

    def unit(self, *shape: int) -> Tensor:
        """Vectors of length 1 along the last axis."""
        x = self.normal(*shape)
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)

    def pick(self, *options: Any) -> Any:
        """One option a case, in turn: shapes are chosen, only numbers are drawn."""
        return options[self.case % len(options)]


@dataclass(frozen=True)
class Slip:
    """A wrong variant of a step, and what to say to a learner whose outputs equal its outputs."""

    name: str
    hint: str
    function: Callable


@dataclass(frozen=True)
class Law:
    """What every right answer obeys; ``holds(mine, *inputs)`` tries it on the learner's function."""

    sentence: str
    holds: Callable[..., bool]


class Step:
    """One graded step: call it with your function. It prints a verdict, or raises :class:`NotYet`.

    Args:
        name: of the function to write.
        reference: the right function.
        inputs: from a :class:`Draw` to the named inputs of one case, in the order in which the function takes them.
        outputs: name and axes of each result, "o [B T H V]".
        run: how a function is tried, ``run(function, *inputs)``; by default it is called.
        alike: brings results to a form that can be compared, where several are equally right (an order, for instance).
    """

    def __init__(
        self,
        name: str,
        reference: Callable,
        inputs: Callable[[Draw], dict[str, Any]],
        outputs: tuple[str, ...],
        *,
        run: Callable = lambda function, *inputs: function(*inputs),
        alike: Callable[[tuple], tuple] = lambda results: results,
    ) -> None:
        self.name, self.reference, self._inputs, self.outputs = name, reference, inputs, outputs
        self._run, self._alike = run, alike
        self.slips: list[Slip] = []
        self.laws: list[Law] = []
        self.__doc__ = f"Grade your ``{name}``: returns {', '.join(outputs)}."

    def __repr__(self) -> str:
        return f"<step {self.name}: call it with your function>"

    def slip(self, hint: str) -> Callable[[Callable], Callable]:
        """Decorator: this wrong variant, and what to say about it."""

        def add(function: Callable) -> Callable:
            self.slips.append(Slip(function.__name__, hint, function))
            return function

        return add

    def law(self, sentence: str) -> Callable[[Callable], Callable]:
        """Decorator: ``holds(mine, *inputs) -> bool``, tried on the input where the values first go wrong."""

        def add(holds: Callable[..., bool]) -> Callable[..., bool]:
            self.laws.append(Law(sentence, holds))
            return holds

        return add

    def inputs(self, case: int, seed: Seed = 0) -> dict[str, Any]:
        """The named inputs of one case, drawn anew."""
        return self._inputs(Draw(self.name, seed, case))

    def __call__(self, mine: Callable, *, seed: Seed | None = None) -> None:
        """Compare ``mine`` with the reference on five inputs. Another ``seed`` draws other ones; by default it is :func:`seed_in_use`."""
        verdict = self._verdict(mine, seed_in_use() if seed is None else seed)
        if verdict is not None:
            raise verdict
        print(f"{self.name}: right, on {CASES} inputs")

    def _verdict(self, mine: Callable, seed: Seed, *, look_inside: bool = True) -> NotYet | None:
        """What is wrong with ``mine``; None if it is right."""
        if not callable(mine):
            return NotYet(f"{self.name}: not yet. Give the function itself, not what it returns; got a {type(mine).__name__}.")
        given = [self.inputs(case, seed) for case in range(CASES)]
        theirs = [self._try(mine, inputs) for inputs in given]
        right = [self._results(self.reference, case, seed) for case in range(CASES)]
        wrong = next((case for case in range(CASES) if self._difference(theirs[case], right[case])), None)
        if wrong is None:
            changed = self._changed_input(given, seed)
            if changed is None:
                return None
            return NotYet(
                f"{self.name}: not yet. The results are right, but your function writes over its input {changed}. "
                "Make a new tensor: whoever called may still need the old one."
            )
        error = theirs[wrong] if isinstance(theirs[wrong], BaseException) else None
        if isinstance(error, NotImplementedError):
            missing = f"`{message(error)}`" if message(error) else "A function that it calls"  # nbgrader's stub does not say which
            return NotYet(
                f"{self.name}: not yet. {missing} is not written: put your lines in place of `raise NotImplementedError`, "
                "run that cell, then this one again."
            )
        parts = [f"{self.name}: not yet.", f"{self._where(wrong, seed)} {self._difference(theirs[wrong], right[wrong])}"]
        nothing = error or _is_nothing(theirs[wrong])  # laws would say the same again
        broken = [] if nothing else [law.sentence for law in self.laws if not self._obeys(law, mine, wrong, seed)]
        parts += [f"Broken: {sentence}." for sentence in broken]
        slip = self._slip_of(theirs, seed)
        if slip is not None:
            parts.append(f"The likely slip: {slip.hint}.")
        verdict = NotYet(*parts, *(self._wrong_part(mine, seed) if look_inside else ()))
        verdict.__cause__ = error
        return verdict

    def _wrong_part(self, mine: Callable, seed: Seed) -> list[str]:
        """On the first function among those that ``mine`` calls which fails its own check: sentences that say so."""
        from minimodel.checks import STEPS  # here, because the steps are made of this module

        for name, function in called(mine, STEPS).items():
            verdict = STEPS[name]._verdict(function, seed, look_inside=False)
            if verdict is not None:
                said = [sentence.replace("The likely slip:", "The likely slip there:") for sentence in verdict.sentences[2:]]
                return [f"The cause may be {name}, which it calls and which fails its own check, checks.{name}({name}).", *said]
        return []

    def _results(self, function: Callable, case: int, seed: Seed) -> tuple:
        return self._called(function, self.inputs(case, seed))

    def _called(self, function: Callable, inputs: dict[str, Any]) -> tuple:
        results = self._run(function, *inputs.values())
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)

    def _try(self, function: Callable, inputs: dict[str, Any]) -> tuple | BaseException:
        """What a function gives: its results, or the error that stopped it."""
        results, error = attempt(self._called, function, inputs)
        return results if error is None else error

    def _obeys(self, law: Law, mine: Callable, case: int, seed: Seed) -> bool:
        holds, error = attempt(lambda: bool(law.holds(mine, *self.inputs(case, seed).values())))
        return error is None and holds  # it ran on the inputs as they were, so an error comes from the law's own

    def _changed_input(self, given: list[dict[str, Any]], seed: Seed) -> str | None:
        """The name of an input that is no longer what it was before a learner's function had it."""
        for case, inputs in enumerate(given):
            for name, fresh in self.inputs(case, seed).items():
                if not _unchanged(inputs[name], fresh):
                    return name
        return None

    def _slip_of(self, theirs: list[tuple | BaseException], seed: Seed) -> Slip | None:
        """The slip whose outcome is theirs on every case; an error matches an error, but something must have run."""
        if all(isinstance(outcome, BaseException) for outcome in theirs):
            return None
        for slip in self.slips:
            if not any(self._difference(theirs[case], self._try(slip.function, self.inputs(case, seed))) for case in range(CASES)):
                return slip
        return None

    def _where(self, case: int, seed: Seed) -> str:
        sizes = [f"{name} {_size(value)}" for name, value in self.inputs(case, seed).items()]
        drawn = "" if str(seed) == "0" else f" with seed {seed}"  # who reads the verdict can have the same inputs again
        return f"On input {case + 1} of {CASES}{drawn} ({', '.join(sizes)}):"

    def _difference(self, got: tuple | BaseException, want: tuple | BaseException) -> str | None:
        """What is different, in a sentence; None if nothing is."""
        if isinstance(got, BaseException) or isinstance(want, BaseException):
            if isinstance(got, BaseException):
                return None if isinstance(want, BaseException) else f"your function stopped with {_told(got)}"
            return "your function returned where it should have stopped."
        if _is_nothing(got):
            return f"it returned nothing (None): is its `return` missing? Asked for: {', '.join(self.outputs)}."
        if len(got) != len(self.outputs):
            return f"it returned {len(got)} values; {len(self.outputs)} are asked for: {', '.join(self.outputs)}."
        for x in got:
            if not isinstance(x, (Tensor, int, float, str)):
                return f"it returned a {type(x).__name__}; asked for: {', '.join(self.outputs)}."
        if len(want) != len(got):
            return "the number of results differs."
        problem, error = attempt(self._first_problem, got, want)
        return problem if error is None else f"its results cannot be read: {named(error)}. Asked for: {', '.join(self.outputs)}."

    def _first_problem(self, got: tuple, want: tuple) -> str | None:
        """Kinds before values: only what is of the right kind can be brought to the form in which values are compared."""
        for compare in (_kind_difference, _value_difference):
            for described, mine, right in zip(self.outputs, got, want, strict=True):
                problem = compare(described, mine, right)
                if problem:
                    return problem
            got, want = self._alike(got), self._alike(want)
        return None


def _is_nothing(results: tuple | BaseException) -> bool:
    return isinstance(results, tuple) and len(results) == 1 and results[0] is None


def _unchanged(given: Any, fresh: Any) -> bool:
    """Whether an input, and all that it holds, is as it was drawn."""
    if isinstance(fresh, Tensor):
        kept = isinstance(given, Tensor) and all(getattr(given, a) == getattr(fresh, a) for a in ("layout", "device", "dtype", "shape"))
        return kept and torch.equal(given.detach(), fresh.detach())
    if type(given) is not type(fresh):
        return False
    if isinstance(fresh, dict):
        return given.keys() == fresh.keys() and all(_unchanged(given[key], value) for key, value in fresh.items())
    if isinstance(fresh, (list, tuple)):
        return len(given) == len(fresh) and all(map(_unchanged, given, fresh))
    return not isinstance(fresh, (int, float, str)) or given == fresh  # a function or a config is drawn anew: nothing to compare


def _kind_difference(described: str, mine: Any, right: Any) -> str | None:
    """Whether it is a tensor, with numbers that can be read, of the right shape and type."""
    name, _, axes = described.partition(" ")
    if not isinstance(right, Tensor):
        return f"{name} is a tensor, it should be {_said(right)}, a plain {type(right).__name__}." if isinstance(mine, Tensor) else None
    if not isinstance(mine, Tensor):
        return f"{name} is a {type(mine).__name__}, it should be a tensor {axes}."
    if mine.device != right.device or mine.layout != right.layout:
        return f"{name} is a {_said(mine.layout)} tensor on {mine.device}, it should be a {_said(right.layout)} one on {right.device}."
    if mine.shape != right.shape:
        return f"{name} has shape {list(mine.shape)}, it should be {axes} = {list(right.shape)}."
    if mine.dtype != right.dtype:
        return f"{name} is {_said(mine.dtype)}, it should be {_said(right.dtype)}."
    return None


def _value_difference(described: str, mine: Any, right: Any) -> str | None:
    name, _, axes = described.partition(" ")
    if not isinstance(right, Tensor):
        return None if mine == right else f"{name} is {_said(mine)}, it should be {_said(right)}."
    mine, right = mine.detach(), right.detach()
    if not mine.is_floating_point():
        off = mine != right
        return f"{name} differs in {int(off.sum())} of {off.numel()} places; the first is {_place(off, axes)}." if bool(off.any()) else None
    if bool((~torch.isfinite(mine) & torch.isfinite(right)).any()):
        return f"{name} holds NaN or infinity, first at {_place(~torch.isfinite(mine), axes)}."
    same = (mine == right) | (mine.isnan() & right.isnan())  # a slip may give infinity or NaN; no reference does, which a test looks after
    error = torch.where(same, 0.0, (mine - right).abs())
    largest = float(right.abs().nan_to_num(0, 0).max()) if right.numel() else 0.0
    off = ~(error <= TOLERANCE.get(right.dtype, 1e-2) * max(1.0, largest))
    if not bool(off.any()):
        return None
    return (
        f"{name} is off by up to {float(error.nan_to_num(torch.inf).max()):.3g} (right values reach {largest:.3g}), "
        f"in {int(off.sum())} of {off.numel()} places; the first is {_place(off, axes)}."
    )


def _place(off: Tensor, axes: str) -> str:
    """The first marked place, with the letters of its axes: "B=0, T=3"."""
    where = [int(i) for i in off.nonzero()[0]]
    letters = axes.strip("[]").split()
    return ", ".join(f"{a}={i}" for a, i in zip(letters, where, strict=True)) if len(letters) == len(where) else str(where)


def _size(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(list(value.shape)) if value.dim() else f"= {value.item():.4g}"
    return f"= {value!r}" if isinstance(value, (int, float, str)) else f"({type(value).__name__})"


def _said(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value).removeprefix("torch.")


def _told(error: BaseException) -> str:
    """The error, and the learner's line that raised it."""
    said = textwrap.shorten(named(error), 300, placeholder=" ...")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(OURS)]
    at = f", in {frames[-1].name} at `{frames[-1].line}`" if frames and frames[-1].line else ""
    return f"{said.rstrip('. ')}{at}."
