"""Muon: one orthogonal update a head, one for the whole matrix, or none."""

from __future__ import annotations

import torch
from torch import Tensor

from minimodel.experiments import measures, probes
from minimodel.experiments.bodies import hybrid
from minimodel.experiments.definition import Arm, Bars, Experiment, Finding, Lines, Measured, Scores
from minimodel.experiments.store import mean
from minimodel.formats import format_number
from minimodel.model import K3ForCausalLM
from minimodel.train import Recipe, train

PROJECTS, LENGTH = 1, 64
OPTIMIZERS = {"per_head_muon": "Per-Head Muon", "muon": "Muon", "adamw": "AdamW"}
RATES = (4e-3, 1.2e-2)  # the grid: every optimizer with both
STRONG = 100.0  # times that the strong head's output counts
BODY = hybrid(3)


def batch(arm: str, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Notes of 1,024 tokens in all."""
    return probes.practice(seed, step, projects=PROJECTS)


def weak_over_strong(optimizer: str, seed: int) -> float:
    """One step of a fresh model in which one head's output counts a hundredfold: the size of the weak heads' update over the strong one's.

    Over the value projections of all KDA layers; 1 means that every head moves alike, however loud another one is.
    """
    model = K3ForCausalLM(BODY, seed=seed)
    layers = [model.model.layers[i].self_attn for i in range(BODY.num_hidden_layers) if BODY.is_kda_layer(i)]
    with torch.no_grad():
        for mixer in layers:
            mixer.o_proj.weight[:, : mixer.head_dim] *= STRONG  # what comes out of head 0
    before = [mixer.v_proj.weight.detach().clone() for mixer in layers]
    train(model, lambda step: batch("", seed, step), Recipe(steps=1, lr=1e-3, weight_decay=0.0, optimizer=optimizer), progress=False)
    sizes = torch.stack(
        [(m.v_proj.weight.detach() - old).unflatten(0, (m.num_heads, -1)).norm(dim=(1, 2)) for m, old in zip(layers, before, strict=True)]
    )
    return float((sizes[:, 1:].mean(1) / sizes[:, 0]).mean())


def measure(model: K3ForCausalLM, arm: str, seed: int, log: list[dict], answers: int) -> Measured:
    scores = {
        "training loss": mean([row["loss"] for row in log]),
        "loss": measures.held_out_loss(model, lambda seed, step: batch(arm, seed, step), max(1, answers // 16)),
        "recall": measures.recall(model, projects=PROJECTS, length=LENGTH, answers=answers),
        "weak heads' update over the strong head's": weak_over_strong(arm.split("-")[0], seed),
    }  # fmt: skip
    return Measured(scores, {})


def best(scores: dict[str, Scores]) -> dict[str, Scores]:
    """Every optimizer at the better of its rates."""
    tried = {name: [s for arm, s in scores.items() if arm.split("-")[0] == name] for name in OPTIMIZERS}
    return {name: min(found, key=lambda s: s["loss"]) for name, found in tried.items() if found}


def finding(scores: dict[str, Scores]) -> Finding:
    found, update = best(scores), "weak heads' update over the strong head's"
    losses = ", ".join(f"{OPTIMIZERS[name]} {format_number(s['loss'])}" for name, s in found.items())
    sizes = ", ".join(f"{OPTIMIZERS[name]} {format_number(s[update])}" for name, s in found.items())
    said = f"Held-out loss at the better rate: {losses}. With one loud head the weak heads' first update, over the loud one's: {sizes}."
    lowest = f"adamw-{RATES[0]:g}"
    if scores.get(lowest) == found["adamw"]:
        said += " AdamW does better at the lowest rate tried, so a lower one might do better still."
    order = found["per_head_muon"]["loss"] <= found["muon"]["loss"] and found["per_head_muon"]["loss"] <= found["adamw"]["loss"]
    return Finding(order and found["per_head_muon"][update] > found["muon"][update], said)


EXPERIMENT = Experiment(
    name="muon",
    question="Does it help to orthogonalize every head's update on its own?",
    claim="Per-head Muon equalizes the update of a strong head and the weak ones, and trains no worse than Muon.",
    setup=(
        f"Four layers of width 64, three KDA to one Gated MLA, dense feed-forwards. {probes.TASK} The update sizes are those of one step "
        f"of a fresh model whose first head's output counts {STRONG:g}-fold in every KDA layer. The report claims better balanced heads "
        "and stability at scale, and prints no losses."
    ),
    arms={
        f"{name}-{lr:g}": Arm(f"{label}, rate {lr:g}", BODY, optimizer=name, lr=lr)
        for lr in RATES for name, label in OPTIMIZERS.items()
    },
    batch=batch, steps=200, lr=RATES[-1], measure=measure, seeds=(0, 1, 2),
    lr_grid=f"every optimizer with each of {', '.join(f'{lr:g}' for lr in RATES)}",
    shows=(
        Bars("training loss", "Training loss, mean of all steps", "less is learned sooner"),
        Bars("loss", "Held-out loss", "less is better"),
        Bars("weak heads' update over the strong head's", "Weak heads' update over the strong head's", "1 is alike"),
        Lines("training loss", "Training loss", "steps", "loss"),
    ),
    finding=finding,
)  # fmt: skip
