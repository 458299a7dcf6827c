"""Taking turns and reading the samples: the statistics of a machine that others use too.

Before and after every call a probe runs, a matrix product of known size. A sample is *clean* when both probes beside it took at most
``CLEAN`` times the fastest probe of the section: then the machine was ours alone around that call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

CLEAN = 1.15  # a probe that took longer than this times the fastest one saw somebody else's work


@dataclass
class Samples:
    """Seconds of each call of one contestant, and of the probes before and after it."""

    seconds: list[float] = field(default_factory=list)
    probes: list[tuple[float, float]] = field(default_factory=list)

    def add(self, seconds: float, before: float, after: float) -> None:
        self.seconds.append(seconds)
        self.probes.append((before, after))


class ContestantFailed(Exception):
    """A contestant can't do this; the message is the reason that stands in the table."""


@dataclass
class Turns:
    """What taking turns gave: samples by name, the reason where a contestant failed, the seconds of all probes."""

    samples: dict[str, Samples]
    failures: dict[str, str]
    probes: list[float]


@dataclass(frozen=True)
class Summary:
    """What is kept of a contestant's samples, in seconds."""

    best: float
    median: float  # of the clean samples; of all where none is clean
    clean: int
    taken: int


def summarize(samples: Samples, fastest_probe: float) -> Summary:
    """Minimum of all samples, median of the clean ones. ``clean == 0`` says that the median is of all: a busy machine."""
    if not samples.seconds:
        raise ValueError("samples must hold at least one call")
    limit = CLEAN * fastest_probe
    clean = [s for s, (before, after) in zip(samples.seconds, samples.probes, strict=True) if before <= limit and after <= limit]
    return Summary(min(samples.seconds), statistics.median(clean or samples.seconds), len(clean), len(samples.seconds))


def take_turns(
    calls: dict[str, Callable[[], float]],
    probe: Callable[[], float],
    *,
    least: int = 3,
    most: int = 12,
    budget: float = 8.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Turns:
    """A B C A B C ...: every call is asked for one sample in turn, until it has ``most``, or ``budget`` seconds were spent on ``least``.

    A slow one stops with fewer than ``least`` after twice the budget.

    Args:
        calls: name -> a function that makes one call and returns its seconds. One that raises ``ContestantFailed`` is asked no more.
        probe: makes one matrix product and returns its seconds.
        clock: for tests.

    Returns: samples, failures and probes.
    """
    if not 1 <= least <= most:
        raise ValueError(f"least and most must satisfy 1 <= least <= most, got least={least}, most={most}")
    turns = Turns({name: Samples() for name in calls}, {}, [probe()])
    spent = dict.fromkeys(calls, 0.0)
    waiting = list(calls)
    while waiting:
        for name in list(waiting):
            start = clock()
            try:
                seconds = calls[name]()
            except ContestantFailed as failure:
                turns.failures[name] = str(failure)
                waiting.remove(name)
                continue
            spent[name] += clock() - start
            turns.probes.append(probe())
            turns.samples[name].add(seconds, turns.probes[-2], turns.probes[-1])
            taken = len(turns.samples[name].seconds)
            if taken >= most or spent[name] >= (budget if taken >= least else 2 * budget):
                waiting.remove(name)
    return turns
