"""One training loop: schedule, clipping, balancing, progress, atomic checkpoints, exact resume.

A batch is a pure function of the step, so a run that was killed continues from its last checkpoint with the same losses, bit for bit on a
CPU with the same number of threads.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from minimodel.formats import format_count
from minimodel.model import K3ForCausalLM
from minimodel.muon import PerHeadMuon, parameter_groups
from minimodel.tensor_files import check_writable, load_safetensors, save_safetensors
from minimodel.train.precision import MasterWeights

Batch = Callable[[int], tuple[Tensor, Tensor]]
CHECKPOINT = "checkpoint.safetensors"
OPTIMIZERS = ("per_head_muon", "muon", "adamw")
THREADS = 1024  # at most: far more than help, and fewer than a system refuses


class Diverged(RuntimeError):
    """The loss, its gradient or what a pass computes is no longer finite."""


@dataclass(frozen=True)
class Recipe:
    """What a run needs to be repeated. Cosine schedule after a short linear warm-up, as K3's pre-training (report 3.3)."""

    steps: int
    lr: float = 1e-2
    warmup: float = 0.01  # share of the steps
    final_lr: float = 0.05  # share of lr at the last step
    weight_decay: float = 0.1
    clip: float = 1.0  # gradient norm
    accumulate: int = 1  # passes a step: the batch's rows are cut into so many equal parts, and their gradients summed
    dtype: str | None = None  # "bfloat16": of weights and activations in a pass, see precision.py; None: the model's own
    optimizer: str = "per_head_muon"  # as K3; for comparison "muon" (whole matrices) or "adamw" (no orthogonal updates)
    data: str = ""  # what the batches are, in words: a run is only continued on the same data

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {getattr(self, name)!r}")
        if self.dtype not in (None, "bfloat16"):
            raise ValueError(f"dtype must be 'bfloat16' or None (the model's own), got {self.dtype!r}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {OPTIMIZERS}, got {self.optimizer!r}")
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if self.lr > 1e35:
            raise ValueError(f"lr must be at most 1e35, or a step of the optimizer is too large for float32, got {self.lr}")
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
    stop: Callable[[], bool] | None = None,
    progress: bool = True,
) -> list[dict[str, int | float]]:
    """Train in place, on the model's device; one row a step: step, loss, lr, grad_norm, and evaluations where made.

    Args:
        batch: step -> (input_ids [B, T], labels [B, T]); the same step must always give the same batch.
        folder: holds ``checkpoint.safetensors`` and ``log.jsonl``; a run found there with the same recipe and config is continued.
        checkpoint_every: steps between two checkpoints; the last step makes one as well.
        evaluate: model -> scores, called every ``evaluate_every`` steps and at the end.
        stop: asked after every step; when it says True the run is saved and left. Its log is then shorter than ``recipe.steps``.

    Raises: ValueError if ``folder`` can't be written, holds another run or a damaged checkpoint (the model is then untouched); Diverged, a
    RuntimeError, when the loss or its gradient is no longer finite, or a later pass refuses what it is given.
    """
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every must be at least 1, got {checkpoint_every}")
    for router in model.routers():
        router.forget()  # what an interrupted step had pooled
    folder = None if folder is None else Path(folder)
    if folder is not None:
        check_writable(folder)
    with MasterWeights(model, recipe.dtype and getattr(torch, recipe.dtype)) as masters:
        optimizer = _optimizer(masters, recipe)
        first, log = 0, []
        if folder is not None and (folder / CHECKPOINT).exists():
            first, log = _resume(folder, masters, optimizer, recipe)
        bar = tqdm(range(first, recipe.steps), initial=first, total=recipe.steps, disable=not progress, desc="training", unit="step")
        for step in bar:
            started = time.perf_counter()
            ids, labels = batch(step)
            with _told(f"step {step}", recipe, log):
                row = {"step": step, "lr": recipe.lr_at(step), **_step(masters, optimizer, recipe, step, ids, labels)}
            speed = ids.numel() / (time.perf_counter() - started)  # shown, not logged: a log holds what a repeated run would repeat
            last = step + 1 == recipe.steps
            if evaluate is not None and (last or (evaluate_every and (step + 1) % evaluate_every == 0)):
                model.eval()
                with _told(f"the evaluation after step {step}", recipe, [*log, row]):
                    row |= evaluate(model)
            log.append(row)
            shown = {name: f"{value:.4g}" for name, value in row.items() if name not in ("step", "lr", "grad_norm")}
            bar.set_postfix({**shown, "tokens/s": format_count(speed)})
            stopped = stop is not None and not last and stop()
            if folder is not None and (last or stopped or (step + 1) % checkpoint_every == 0):
                _save(folder, masters, optimizer, recipe, step + 1, log)
            if stopped:
                break
    model.eval()
    return log


def set_threads(threads: int | None) -> None:
    """CPU threads of torch, as a command was asked for; None leaves torch's choice. Raises ValueError."""
    if threads is not None:
        if not 1 <= threads <= THREADS:
            raise ValueError(f"--threads must lie in 1..{THREADS}, got {threads}")
        torch.set_num_threads(threads)


@contextmanager
def _told(what: str, recipe: Recipe, log: list[dict]) -> Iterator[None]:
    """Weights that ran away can make a pass refuse its own numbers before there is a loss. What is wrong at the first step is not that."""
    try:
        yield
    except ValueError as error:
        if not log:
            raise
        loss = f"{log[-1]['loss']:.4g}"
        raise Diverged(f"{what} failed after a loss of {loss} ({error}): lower lr={recipe.lr} or look at the batch") from error


def _optimizer(masters: MasterWeights, recipe: Recipe) -> PerHeadMuon:
    groups = parameter_groups(masters.model, weight_decay=recipe.weight_decay)
    for group in groups:
        group["params"] = [(name, masters.by_name[name]) for name, _ in group["params"]]
        if recipe.optimizer == "muon":
            group["heads"] = 1
        elif recipe.optimizer == "adamw":
            group["method"], group["heads"] = "adamw", 1
    # Newton-Schulz in the passes' precision, as is usual on GPUs; by default in the parameters' own
    return PerHeadMuon(groups, lr=recipe.lr, weight_decay=recipe.weight_decay, dtype=recipe.dtype and getattr(torch, recipe.dtype))


def _step(masters: MasterWeights, optimizer, recipe: Recipe, step: int, ids: Tensor, labels: Tensor) -> dict[str, float]:
    """Forward and backward of every part, clip, update weights, then the router biases (used from the next step on)."""
    model, parameters = masters.model, list(masters.by_name.values())
    if len(ids) % recipe.accumulate:
        raise ValueError(f"accumulate={recipe.accumulate} must divide the batch's {len(ids)} rows")
    model.train()
    optimizer.zero_grad(set_to_none=True)
    device, asked, total = parameters[0].device, _asked(labels), 0.0
    for x, y in zip(ids.chunk(recipe.accumulate), labels.chunk(recipe.accumulate), strict=True):
        loss = model(x.to(device), labels=y.to(device)).loss
        share = _asked(y) / asked  # the mean over a part's labels, weighed to give the mean over all
        value = loss.item()
        if not math.isfinite(value):
            raise Diverged(f"loss is {value} at step {step}: lower lr={recipe.lr} or look at the batch")
        (loss * share).backward()
        total += value * share
    norm = torch.nn.utils.clip_grad_norm_(parameters, recipe.clip)
    if not bool(torch.isfinite(norm)):
        raise Diverged(f"gradient norm is {norm.item()} at step {step}: lower lr={recipe.lr} or look at the batch")
    for group in optimizer.param_groups:
        group["lr"] = recipe.lr_at(step)
    optimizer.step()
    masters.round()
    model.update_router_bias()
    return {"loss": total, "grad_norm": norm.item()}


def _asked(labels: Tensor) -> int:
    """Labels that count: the first column predicts nothing."""
    return int((labels[:, 1:] != -100).sum())


def _save(folder: Path, masters: MasterWeights, optimizer, recipe: Recipe, done: int, log: list[dict]) -> None:
    """Model, optimizer and log in one file, replaced atomically; the log is also written as lines for people."""
    tensors = {f"model.{name}": x for name, x in masters.state().items()}
    for name, p in masters.by_name.items():
        for key, value in optimizer.state.get(p, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"run": _run_id(masters.model, recipe), "done": str(done), "log": json.dumps(log)}
    save_safetensors(folder / CHECKPOINT, tensors, meta)
    _write_lines(folder, log)


def _write_lines(folder: Path, log: list[dict]) -> None:
    lines = folder / "log.jsonl.tmp"
    lines.write_text("".join(json.dumps(row) + "\n" for row in log))
    lines.replace(folder / "log.jsonl")


def _resume(folder: Path, masters: MasterWeights, optimizer, recipe: Recipe) -> tuple[int, list[dict]]:
    path, model = folder / CHECKPOINT, masters.model
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
    masters.load(weights)
    for full, x in tensors.items():
        kind, _, rest = full.partition(".")
        key, _, name = rest.partition(".")
        if kind == "optimizer":
            p = masters.by_name[name]
            optimizer.state[p][key] = x.to(p.device) if x.dim() or x.is_floating_point() else int(x)
    for half in folder.glob(f".{CHECKPOINT}.*.tmp"):
        half.unlink()  # what a killed process was writing
    _write_lines(folder, log)  # it may have been killed between the two files
    return done, log


def _run_id(model: K3ForCausalLM, recipe: Recipe) -> str:
    settings = asdict(recipe)
    if recipe.optimizer == "per_head_muon":
        del settings["optimizer"]  # runs from before there was a choice go on
    return json.dumps({"recipe": settings, "config": asdict(model.config)}, sort_keys=True)
