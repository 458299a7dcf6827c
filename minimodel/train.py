"""One training loop: schedule, clipping, balancing, progress, atomic checkpoints, exact resume.

A batch is a pure function of the step, so a run that was killed continues from its last checkpoint with the same losses, bit for bit on a
CPU with the same number of threads. ``python -m minimodel.train --help`` trains the course's models.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from minimodel.config import K3Config
from minimodel.io import from_pretrained, save_pretrained
from minimodel.model import K3ForCausalLM
from minimodel.muon import PerHeadMuon
from minimodel.tasks import meeting
from minimodel.tensor_files import load_safetensors, save_safetensors

__all__ = ["Recipe", "train", "train_meeting"]

Batch = Callable[[int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Recipe:
    """What a run needs to be repeated. Cosine schedule after a short linear warm-up, as K3's pre-training (report 3.3)."""

    steps: int
    lr: float = 1e-2
    warmup: float = 0.01  # share of the steps
    final_lr: float = 0.05  # share of lr at the last step
    weight_decay: float = 0.1
    clip: float = 1.0  # gradient norm
    data: str = ""  # what the batches are, in words: a run is only continued on the same data

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps < 1:
            raise ValueError(f"steps must be an integer of at least 1, got {self.steps!r}")
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        for name in ("warmup", "final_lr"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")

    def lr_at(self, step: int) -> float:
        """Learning rate of 0-based ``step``."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return self.lr * (step + 1) / warm
        progress = (step - warm) / max(1, self.steps - warm)
        return self.lr * (self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * progress)))


def train(
    model: K3ForCausalLM,
    batch: Batch,
    recipe: Recipe,
    *,
    folder: str | Path | None = None,
    checkpoint_every: int = 200,
    evaluate: Callable[[K3ForCausalLM], dict[str, float]] | None = None,
    evaluate_every: int = 0,
    progress: bool = True,
) -> list[dict[str, int | float]]:
    """Train in place with Per-Head Muon; returns one row a step: step, loss, lr, grad_norm, and evaluations where made.

    Args:
        batch: step -> (input_ids [B, T], labels [B, T]); the same step must always give the same batch.
        folder: holds ``checkpoint.safetensors`` and ``log.jsonl``; a run found there with the same recipe and config is continued.
        checkpoint_every: steps between two checkpoints; the last step makes one as well.
        evaluate: model -> scores, called every ``evaluate_every`` steps and at the end.

    Raises: ValueError if ``folder`` holds another run or a damaged checkpoint (the model is then untouched); RuntimeError when the loss or
    its gradient is no longer finite.
    """
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every must be at least 1, got {checkpoint_every}")
    for router in model.routers():
        router.forget()  # what an interrupted step had pooled
    optimizer = PerHeadMuon(model, lr=recipe.lr, weight_decay=recipe.weight_decay)
    folder = None if folder is None else Path(folder)
    first, log = 0, []
    if folder is not None and (folder / "checkpoint.safetensors").exists():
        first, log = _resume(folder, model, optimizer, recipe)
    bar = tqdm(range(first, recipe.steps), initial=first, total=recipe.steps, disable=not progress, desc="training", unit="step")
    for step in bar:
        ids, labels = batch(step)
        row = {"step": step, "lr": recipe.lr_at(step), **_step(model, optimizer, recipe, step, ids, labels)}
        last = step + 1 == recipe.steps
        if evaluate is not None and (last or (evaluate_every and (step + 1) % evaluate_every == 0)):
            model.eval()
            row |= evaluate(model)
        log.append(row)
        bar.set_postfix({name: f"{value:.4g}" for name, value in row.items() if name not in ("step", "lr", "grad_norm")})
        if folder is not None and (last or (step + 1) % checkpoint_every == 0):
            _save(folder, model, optimizer, recipe, step + 1, log)
    model.eval()
    return log


def _step(model, optimizer, recipe: Recipe, step: int, ids: Tensor, labels: Tensor) -> dict[str, float]:
    """Forward, backward, clip, update weights, then the router biases (used from the next step on)."""
    model.train()
    loss = model(ids, labels=labels).loss
    if not bool(torch.isfinite(loss)):
        raise RuntimeError(f"loss is {loss.item()} at step {step}: lower lr={recipe.lr} or look at the batch")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    if not bool(torch.isfinite(norm)):
        raise RuntimeError(f"gradient norm is {norm.item()} at step {step}: lower lr={recipe.lr} or look at the batch")
    for group in optimizer.param_groups:
        group["lr"] = recipe.lr_at(step)
    optimizer.step()
    model.update_router_bias()
    return {"loss": loss.item(), "grad_norm": norm.item()}


def _save(folder: Path, model, optimizer, recipe: Recipe, done: int, log: list[dict]) -> None:
    """Model, optimizer and log in one file, replaced atomically; the log is also written as lines for people."""
    tensors = {f"model.{name}": x for name, x in model.state_dict().items()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"run": _run_id(model, recipe), "done": str(done), "log": json.dumps(log)}
    save_safetensors(folder / "checkpoint.safetensors", tensors, meta)
    lines = folder / "log.jsonl.tmp"
    lines.write_text("".join(json.dumps(row) + "\n" for row in log))
    lines.replace(folder / "log.jsonl")


def _resume(folder: Path, model, optimizer, recipe: Recipe) -> tuple[int, list[dict]]:
    path = folder / "checkpoint.safetensors"
    tensors, meta = load_safetensors(path)
    if meta.get("run") != _run_id(model, recipe):
        raise ValueError(f"folder: {path} belongs to another recipe, config or data; choose another folder or delete it")
    weights = {name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")}
    try:
        done, log = int(meta["done"]), json.loads(meta["log"])
        if len(log) != done or {n: x.shape for n, x in weights.items()} != {n: x.shape for n, x in model.state_dict().items()}:
            raise ValueError
    except (KeyError, ValueError):
        raise ValueError(f"folder: {path} is damaged: its log or its tensors are not those of this run") from None
    model.load_state_dict(weights)
    for name, p in model.named_parameters():
        for full, x in tensors.items():
            kind, _, rest = full.partition(".")
            key, _, owner = rest.partition(".")
            if kind == "optimizer" and owner == name:
                optimizer.state[p][key] = x if x.dim() or x.is_floating_point() else int(x)
    return done, log


def _run_id(model, recipe: Recipe) -> str:
    return json.dumps({"recipe": asdict(recipe), "config": asdict(model.config)}, sort_keys=True)


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
    grow along ``meeting.curriculum``. ``start``: the folder of a trained model to go on from, with long notes only. ``folder``: see :func:`train`.
    Returns the model and its log.
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


def main(arguments: list[str] | None = None) -> None:
    """``python -m minimodel.train meeting --out FOLDER``: train, then save the model beside the run's checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m minimodel.train", description="Train the course's meeting model on a CPU.")
    parser.add_argument("preset", choices=["meeting"])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint, the log and the model; a stopped run continues")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--projects", type=int, default=8, help="projects in a note, at most")
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="folder of a trained model to go on from, with long notes only")
    parser.add_argument("--threads", type=int, help="CPU threads")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    settings = {name: getattr(options, name) for name in ("steps", "projects", "lr", "seed", "start")}
    model, log = train_meeting(options.out, **settings)
    save_pretrained(model, options.out / "model")
    print(f"saved {options.out / 'model'}: {json.dumps(log[-1])}")


if __name__ == "__main__":
    main()
