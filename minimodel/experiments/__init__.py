"""The evidence: what the course claims, as small experiments that anybody can run again.

    python -m minimodel.experiments list
    python -m minimodel.experiments run toolbox --budget 3     # trains for three minutes, shows the stored results of the rest
    python -m minimodel.experiments report                     # docs/evidence.md from the stored results

One file an experiment: its question, its arms, task, recipe and measurements. ``runner.py`` trains one (arm, seed) at a time, ``store.py``
keeps the results, ``report.py`` writes the page.
"""

from __future__ import annotations

from importlib import import_module

from minimodel.experiments.definition import Arm, Experiment
from minimodel.experiments.store import Results, load_results

__all__ = ["NAMES", "Arm", "Experiment", "Results", "load_experiment", "load_results"]

NAMES = ("toolbox", "twins", "ratio", "palindrome", "mqar", "stack", "decays", "position", "residuals", "balancing", "muon", "four_bits")


def load_experiment(name: str) -> Experiment:
    """The definition of one experiment. Raises ValueError for an unknown name."""
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    return import_module(f"minimodel.experiments.{name}").EXPERIMENT
