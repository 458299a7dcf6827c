"""The course's meeting model, trained on a CPU."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from minimodel.config import K3Config
from minimodel.io import from_pretrained
from minimodel.model import K3ForCausalLM
from minimodel.tasks import meeting
from minimodel.train.loop import Recipe, train


def train_meeting(
    folder: str | Path | None = None,
    *,
    steps: int = 100,
    projects: int = 1,
    lr: float = 8e-3,
    seed: int = 0,
    start: str | Path | None = None,
    progress: bool = True,
) -> tuple[K3ForCausalLM, list[dict]]:
    """The course's meeting model, 2,048 tokens a step.

    One project is learned from notes of 128 tokens in about a hundred steps at lr 1.5e-2. With more, notes and their number of projects
    grow along ``meeting.curriculum``. ``start``: the folder of a trained model to go on from, with long notes only. ``folder``: see
    :func:`train`. Returns the model and its log.
    """
    if not 1 <= projects <= 8:
        raise ValueError(f"projects must lie in 1..8, got {projects}")
    data = f"meeting notes, seed {seed}, up to {projects} projects" + (", long" if start else "")
    model = from_pretrained(start) if start else K3ForCausalLM(K3Config.meeting(), seed=seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        length, most = (128, 1) if projects == 1 else (meeting.LONGEST, 8) if start else meeting.curriculum(step, steps)
        return meeting.training_batch(seed, step, rows=2048 // length, length=length, max_projects=min(most, projects))

    length = 128 if projects == 1 else 512

    def scores(model: K3ForCausalLM) -> dict[str, float]:
        held_out = {n: meeting.held_out_notes(1, 16, projects=n, length=length) for n in {1, projects}}
        return {f"accuracy_{n}": meeting.score(model, notes).accuracy for n, notes in sorted(held_out.items())}

    every = 200 if projects > 1 else 25
    recipe = Recipe(steps=steps, lr=lr, data=data)
    log = train(model, batch, recipe, folder=folder, evaluate=scores, evaluate_every=every, progress=progress)
    return model, log
