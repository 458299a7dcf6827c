"""Decays: one dial a head against one a channel, and what the learned dials keep."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minimodel.experiments import measures, probes
from minimodel.experiments.bodies import plain
from minimodel.experiments.definition import Arm, Bars, Experiment, Finding, Lines, Measured, Scores, as_wide_as
from minimodel.formats import format_digits, format_probability
from minimodel.model import K3ForCausalLM
from minimodel.tasks import meeting
from minimodel.trace import record

PROJECTS, LENGTH = 1, 64
KDA = plain("kda", layers=1, heads=1, channels=128)  # one head: no other can make up for its dial
SINGLE = as_wide_as(plain("gated_delta_net", layers=1, heads=1, channels=128), Arm("", KDA).parameters)
LONGEST = 1e6  # tokens; a half-life beyond is drawn there
VALUES = {word for values in meeting.SLOTS.values() for word in values}
FILLER = (
    {word for sentence in meeting.FILLER for word in sentence.split()}
    - VALUES
    - {"The", ".", "is", "room", "has", "people", "attending", "to"}
)


def batch(arm: str, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Notes of 1,024 tokens in all."""
    return probes.practice(seed, step, projects=PROJECTS)


def kind_of(word: str) -> str | None:
    """Facts' values, chat, or neither; words that stand in both count as neither."""
    return "value" if word in VALUES else "chat" if word in FILLER else None


@torch.no_grad()
def half_lives(model: K3ForCausalLM, notes: list[meeting.Note]) -> tuple[list[float], dict[str, float]]:
    """Half-life of every channel of every layer, sorted, and the median decay step at each kind of word, as a half-life. In tokens.

    A channel's half-life is that of its mean log-decay over all words; the decay applied *at* a word fades what was there before it.
    """
    ids, labels = meeting.pad_notes(notes)
    with record(model) as trace:
        model(ids)
    steps = torch.stack([trace[name].log() for name in sorted(trace) if name.endswith(".alpha")])  # [layers, B, T, H, K]
    real = ids != 0
    channels = _half_life(steps[:, real].mean(1).flatten()).sort().values
    kinds = {}
    for kind in ("value", "chat"):
        at = torch.tensor([[kind_of(meeting.VOCABULARY[i]) == kind for i in row] for row in ids.tolist()]) & real
        kinds[kind] = float(_half_life(steps[:, at].mean(1).flatten()).median())
    return channels.tolist(), kinds


def _half_life(log_decay: Tensor) -> Tensor:
    return (math.log(2) / -log_decay.double()).clamp(max=LONGEST)


def measure(model: K3ForCausalLM, arm: str, seed: int, log: list[dict], answers: int) -> Measured:
    distance = measures.by_distance(model, projects=PROJECTS, answers=2 * answers)
    channels, kinds = half_lives(model, meeting.held_out_notes(2, max(2, answers // 16), projects=PROJECTS, length=128))
    tenth, half, most = (channels[int(q * (len(channels) - 1))] for q in (0.1, 0.5, 0.9))
    scores = {
        "loss": measures.held_out_loss(model, lambda seed, step: batch(arm, seed, step), max(1, answers // 32)),
        "recall": measures.recall(model, projects=PROJECTS, length=LENGTH, answers=answers),
        "recall at four times the length": measures.recall(model, projects=PROJECTS, length=4 * LENGTH, answers=answers),
        "half-life, shortest tenth": tenth, "half-life, median": half, "half-life, longest tenth": most,
        "half-life at values": kinds["value"], "half-life at chat": kinds["chat"],
    }  # fmt: skip
    picked = [channels[round(i * (len(channels) - 1) / 63)] for i in range(64)]
    return Measured(scores, {"by distance": distance, "half-lives": {"x": [i / 63 for i in range(64)], "y": picked}})


def finding(scores: dict[str, Scores]) -> Finding:
    many, one = scores["kda"], scores["gated_delta_net"]
    longer = "recall at four times the length"
    said = (
        f"Held-out loss {format_digits(many['loss'])} with one dial a channel, {format_digits(one['loss'])} with one dial a head; in notes "
        f"of {4 * LENGTH} tokens {format_probability(many[longer])} and {format_probability(one[longer])} of the blanks are filled. The "
        f"learned dials of KDA spread from half-lives of {many['half-life, shortest tenth']:,.0f} tokens (shortest tenth) to "
        f"{many['half-life, longest tenth']:,.0f} (longest tenth); at words of chat a channel keeps {many['half-life at chat']:,.0f} "
        f"(median), at a fact's value {many['half-life at values']:,.0f}. The single dial: {one['half-life at chat']:,.0f} at chat, "
        f"{one['half-life at values']:,.0f} at values."
    )
    return Finding(many["loss"] < one["loss"] and many[longer] >= one[longer], said)


EXPERIMENT = Experiment(
    name="decays",
    question="Does a head remember better with a dial for every channel than with one dial for all?",
    claim="128 decays keep the essential and drop filler where one decay loses one of the two.",
    setup=(
        "One layer of width 64 with one head of 128 channels, so that no other head can make up for its dials; feed-forwards as wide as "
        f"it takes for the same number of parameters. {probes.TASK} The single dial is Gated DeltaNet's, with its own (Mamba-2's) gate and "
        "start."
    ),
    arms={"kda": Arm("128 dials a head (KDA)", KDA), "gated_delta_net": Arm("one dial a head (Gated DeltaNet)", SINGLE)},
    batch=batch, steps=400, lr=1.2e-2, measure=measure, seeds=(0, 1, 2),
    shows=(
        Bars("loss", "Held-out loss", "less is better"),
        Bars("recall at four times the length", "Blanks filled in notes of 256 tokens", "more is better", percent=True),
        Bars("half-life at values", "Half-life of a channel at words that are values", "tokens, median channel"),
        Bars("half-life at chat", "Half-life of a channel at words of chat", "tokens, median channel"),
        Lines("by distance", "Right answers by distance", "tokens since the fact was told", "right", log_x=True, percent=True),
        Lines("half-lives", "Half-lives of the learned dials, sorted", "share of channels", "tokens", log_y=True),
    ),
    finding=finding,
)  # fmt: skip
