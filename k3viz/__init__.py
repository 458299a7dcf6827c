"""k3viz: see every mechanism. For each subject X: ``X_story`` (computed trace), ``X_figure`` (plotly), ``X_panel`` (live).

All names are keyword-only functions that work without arguments, and load only what they need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_SUBJECTS = (
    "balancing", "chunks", "decay", "experts", "four_bit", "hybrid", "memory", "mla", "muon", "residuals", "serving", "toolbox",
    "whiteboard",
)
_HOMES = {f"{subject}_{part}": f"k3viz.{subject}.{part}" for subject in _SUBJECTS for part in ("story", "figure", "panel")}
_HOMES |= {f"{name}_story": "k3viz.evidence.story" for name in ("evidence", "lineage", "benchmarks")}
_HOMES |= {
    "evidence_figure": "k3viz.evidence.figure", "lineage_figure": "k3viz.evidence.lineage_figure",
    "benchmarks_figure": "k3viz.evidence.benchmarks_figure", "experiment_figure": "k3viz.evidence.experiment_figure",
    "experiment_story": "k3viz.evidence.experiment_story",
}  # fmt: skip

__all__ = [
    "balancing_figure", "balancing_panel", "balancing_story", "benchmarks_figure", "benchmarks_story", "chunks_figure",
    "chunks_panel", "chunks_story", "decay_figure", "decay_panel", "decay_story", "evidence_figure", "evidence_story",
    "experiment_figure", "experiment_story", "experts_figure", "experts_panel", "experts_story", "four_bit_figure",
    "four_bit_panel", "four_bit_story", "hybrid_figure", "hybrid_panel", "hybrid_story", "lineage_figure", "lineage_story",
    "memory_figure", "memory_panel", "memory_story", "mla_figure", "mla_panel", "mla_story", "muon_figure", "muon_panel",
    "muon_story", "residuals_figure", "residuals_panel",
    "residuals_story", "serving_figure", "serving_panel", "serving_story", "toolbox_figure", "toolbox_panel", "toolbox_story",
    "whiteboard_figure", "whiteboard_panel", "whiteboard_story",
]  # fmt: skip

if TYPE_CHECKING:
    from k3viz.balancing.figure import balancing_figure
    from k3viz.balancing.panel import balancing_panel
    from k3viz.balancing.story import balancing_story
    from k3viz.chunks.figure import chunks_figure
    from k3viz.chunks.panel import chunks_panel
    from k3viz.chunks.story import chunks_story
    from k3viz.decay.figure import decay_figure
    from k3viz.decay.panel import decay_panel
    from k3viz.decay.story import decay_story
    from k3viz.evidence.benchmarks_figure import benchmarks_figure
    from k3viz.evidence.experiment_figure import experiment_figure
    from k3viz.evidence.experiment_story import experiment_story
    from k3viz.evidence.figure import evidence_figure
    from k3viz.evidence.lineage_figure import lineage_figure
    from k3viz.evidence.story import benchmarks_story, evidence_story, lineage_story
    from k3viz.experts.figure import experts_figure
    from k3viz.experts.panel import experts_panel
    from k3viz.experts.story import experts_story
    from k3viz.four_bit.figure import four_bit_figure
    from k3viz.four_bit.panel import four_bit_panel
    from k3viz.four_bit.story import four_bit_story
    from k3viz.hybrid.figure import hybrid_figure
    from k3viz.hybrid.panel import hybrid_panel
    from k3viz.hybrid.story import hybrid_story
    from k3viz.memory.figure import memory_figure
    from k3viz.memory.panel import memory_panel
    from k3viz.memory.story import memory_story
    from k3viz.mla.figure import mla_figure
    from k3viz.mla.panel import mla_panel
    from k3viz.mla.story import mla_story
    from k3viz.muon.figure import muon_figure
    from k3viz.muon.panel import muon_panel
    from k3viz.muon.story import muon_story
    from k3viz.residuals.figure import residuals_figure
    from k3viz.residuals.panel import residuals_panel
    from k3viz.residuals.story import residuals_story
    from k3viz.serving.figure import serving_figure
    from k3viz.serving.panel import serving_panel
    from k3viz.serving.story import serving_story
    from k3viz.toolbox.figure import toolbox_figure
    from k3viz.toolbox.panel import toolbox_panel
    from k3viz.toolbox.story import toolbox_story
    from k3viz.whiteboard.figure import whiteboard_figure
    from k3viz.whiteboard.panel import whiteboard_panel
    from k3viz.whiteboard.story import whiteboard_story


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'k3viz' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
