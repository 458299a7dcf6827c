"""Position: is the distance to a word readable from a state that was never told any positions?"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from minimodel.experiments import probes
from minimodel.experiments.bodies import plain
from minimodel.experiments.definition import Arm, Bars, Curve, Experiment, Finding, Lines, Measured, Published, Scores, as_wide_as
from minimodel.facts import KimiLinear
from minimodel.formats import format_number
from minimodel.model import K3ForCausalLM
from minimodel.tasks import meeting

PROJECTS, LENGTH = 1, 64
FURTHEST = 48  # tokens between the fact and the end of a probe's note
RIDGE = 1e-3  # of the features' mean square
LABELS = {
    "kda": "KDA", "mamba2": "one decay, no erasing (Mamba-2 style)", "delta_net": "erasing, no decay (DeltaNet)",
    "linear_attention": "adding only",
}  # fmt: skip
MARKER = meeting.encode("The client is Acme.")


def batch(arm: str, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Notes of 1,024 tokens in all."""
    return probes.practice(seed, step, projects=PROJECTS)


def probe_notes(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Chat with one fact in it: ids [count, 64] and how many tokens before the end the fact's value stands."""
    rows, distances = [], []
    for i in range(count):
        rng = random.Random(f"position/{seed}/{i}")
        w = meeting.NoteWriter(rng, 1)
        while len(w.note.ids) < LENGTH:
            w.filler()
        distance = rng.randint(2, FURTHEST)
        at = LENGTH - 1 - distance  # of the value, the last word but one of the marker
        row = w.note.ids[:LENGTH]
        row[at - len(MARKER) + 2 : at + 2] = MARKER
        rows.append(row)
        distances.append(distance)
    return torch.tensor(rows), torch.tensor(distances, dtype=torch.float64)


@torch.no_grad()
def states(model: K3ForCausalLM, ids: Tensor) -> Float[Tensor, "B features"]:
    """The states of all heads of the first layer after the last word, flat."""
    cache = model.new_cache(len(ids))
    model(ids, cache=cache)
    return cache.layers[0].state.flatten(1).double()


@dataclass(frozen=True)
class Probe:
    """A ridge regression from states to distances."""

    weight: Tensor
    center: Tensor
    offset: float

    @classmethod
    def fit(cls, x: Float[Tensor, "N F"], y: Float[Tensor, "N"]) -> Probe:
        """In its dual form: fewer notes than features."""
        center, offset = x.mean(0), float(y.mean())
        z = x - center
        kernel = z @ z.T
        ridge = RIDGE * kernel.diagonal().mean() * torch.eye(len(z), dtype=z.dtype)
        return cls(z.T @ torch.linalg.solve(kernel + ridge, y - offset), center, offset)

    def __call__(self, x: Float[Tensor, "N F"]) -> Float[Tensor, "N"]:
        return (x - self.center) @ self.weight + self.offset


def explained(y: Tensor, predicted: Tensor) -> float:
    """R^2: 1 is exact, 0 no better than always saying the mean."""
    return float(1 - (y - predicted).square().sum() / (y - y.mean()).square().sum())


def measure(model: K3ForCausalLM, arm: str, seed: int, log: list[dict], answers: int) -> Measured:
    train, test = probe_notes(0, 4 * answers), probe_notes(1, 2 * answers)
    fresh = K3ForCausalLM(model.config, seed=seed)
    found = {}
    for name, reader in (("trained", model), ("untrained", fresh)):
        probe = Probe.fit(states(reader, train[0]), train[1])
        found[name] = probe(states(reader, test[0]))
    scores = {f"R2, {name}": max(-1.0, explained(test[1], y)) for name, y in found.items()}
    scores["mean error in tokens, trained"] = float((test[1] - found["trained"]).abs().mean())
    return Measured(scores, {"read from the state": _by_distance(test[1], found["trained"])})


def _by_distance(y: Tensor, predicted: Tensor, bins: int = 8) -> Curve:
    """Mean of what is read in each stretch of true distances."""
    edges = torch.linspace(1, FURTHEST + 1, bins + 1, dtype=y.dtype)
    inside = [(y >= low) & (y < high) for low, high in zip(edges, edges[1:], strict=False)]
    return {"x": [float(y[at].mean()) for at in inside if at.any()], "y": [float(predicted[at].mean()) for at in inside if at.any()]}


def finding(scores: dict[str, Scores]) -> Finding:
    r2 = {arm: s["R2, trained"] for arm, s in scores.items()}
    others = ", ".join(f"{LABELS[arm]}: {format_number(x)}" for arm, x in r2.items() if arm != "kda")
    said = (
        f"A linear probe reads the distance from KDA's first state with R² {format_number(r2['kda'])} (mean error "
        f"{scores['kda']['mean error in tokens, trained']:.1f} of up to {FURTHEST} tokens), before training with R² "
        f"{format_number(scores['kda']['R2, untrained'])}. The others: {others}."
    )
    without = max(r2[arm] for arm in ("delta_net", "linear_attention") if arm in r2)  # states that never fade
    if without > 0.5:
        said += f" A state that never fades gives it away as well (R² up to {format_number(without)}): decay is not the only clock."
    return Finding(r2["kda"] > 0.5 and r2["kda"] == max(r2.values()), said)


RULER = next(row for row in KimiLinear.long_context.rows if row[0] == "RULER")
RULER = next(row for row in KimiLinear.long_context.rows if row[0] == "RULER")
EXPERIMENT = Experiment(
    name="position",
    question="A model without positions: how does it know how long ago something was said?",
    claim="Position is readable from the decay.",
    setup=(
        f"Two layers of width 64, four heads of 32 channels, no positions anywhere. {probes.TASK} Then one fact is put 2 to {FURTHEST} "
        "tokens before the end of chat, and a ridge regression reads the distance from the first layer's state (4,096 numbers). The notes "
        "it is fitted on and those it is scored on are different."
    ),
    arms={
        mixer: Arm(label, as_wide_as(plain(mixer, layers=2), Arm("", plain("kda", layers=2)).parameters))
        for mixer, label in LABELS.items()
    },
    batch=batch, steps=250, lr=1.2e-2, measure=measure, seeds=(0, 1, 2),
    shows=(
        Bars("R2, trained", "Distance read from the state, R²", "1 is exact, 0 is a guess"),
        Bars("R2, untrained", "The same before training", "1 is exact, 0 is a guess"),
        Lines("read from the state", "Distance read against the true one", "tokens since the fact was told", "tokens, as read"),
    ),
    finding=finding,
    published=(
        Published("RULER at 128K without positions", RULER[4], "points", KimiLinear.long_context.source),
        Published("RULER at 128K with RoPE in the MLA layers", RULER[3], "points", KimiLinear.long_context.source),
    ),
)  # fmt: skip
