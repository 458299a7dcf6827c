"""Four bits: rounding a finished model's experts, against training them in the grid, at the same bits."""

from __future__ import annotations

import copy

from torch import Tensor

from minimodel.experiments import measures, probes
from minimodel.experiments.bodies import mixture
from minimodel.experiments.definition import Arm, Bars, Experiment, Finding, Lines, Measured, Published, Scores
from minimodel.facts import K3
from minimodel.formats import format_digits, format_probability
from minimodel.model import K3ForCausalLM
from minimodel.quantization import bits_per_weight, quantize_model, train_in_four_bits

PROJECTS, LENGTH = 1, 64
BODY = mixture(layers=4, experts=8, moe_intermediate_size=64, num_shared_experts=0)  # no shared experts: all rests on the routed ones


def batch(arm: str, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Notes of 1,024 tokens in all."""
    return probes.practice(seed, step, projects=PROJECTS)


def in_the_grid(model: K3ForCausalLM, step: int, steps: int) -> None:
    """The second half of training rounds in every pass, as K3 does from fine-tuning onward."""
    train_in_four_bits(model, on=step >= steps // 2)


def measure(model: K3ForCausalLM, arm: str, seed: int, log: list[dict], answers: int) -> Measured:
    wide, narrow = copy.deepcopy(model), copy.deepcopy(model)
    train_in_four_bits(wide, on=False)
    quantize_model(narrow)
    scores = {}
    for name, reader in (("as trained" if arm == "after" else "unrounded", wide), ("in four bits", narrow)):
        scores[f"loss {name}"] = measures.held_out_loss(reader, lambda seed, step: batch(arm, seed, step), max(1, answers // 8))
        scores[f"recall {name}"] = measures.recall(reader, projects=PROJECTS, length=LENGTH, answers=2 * answers)
    return Measured({**scores, "bits a weight": bits_per_weight(narrow)}, {})


def finding(scores: dict[str, Scores]) -> Finding:
    after, inside = scores["after"], scores["inside"]
    lost = after["loss in four bits"] - after["loss as trained"]
    said = (
        f"In full precision the held-out loss is {format_digits(after['loss as trained'], digits=4)}; rounded afterwards "
        f"{format_digits(after['loss in four bits'], digits=4)}, trained in the grid "
        f"{format_digits(inside['loss in four bits'], digits=4)}, both at {inside['bits a weight']:g} bits a weight. Blanks filled: "
        f"{format_probability(after['recall in four bits'])} and {format_probability(inside['recall in four bits'])}, "
        f"{format_probability(after['recall as trained'])} in full precision."
    )
    return Finding(lost > 0 and inside["loss in four bits"] < after["loss in four bits"], said)


EXPERIMENT = Experiment(
    name="four_bits",
    question="What do four bits a weight cost, rounded afterwards or trained in?",
    claim="Quantization-aware training loses less than rounding afterwards, at the same bits.",
    setup=(
        "Four layers of width 64 with every part of K3, eight experts of which a token visits two, and no shared experts, so that "
        f"everything the last three layers feed forward is in four bits. {probes.TASK} One arm trains in float32 and is rounded at the "
        "end; the other rounds in every pass of the second half of its steps. K3 does so from fine-tuning onward and publishes no "
        "comparison."
    ),
    arms={"after": Arm("rounded afterwards", BODY), "inside": Arm("trained in the grid", BODY, before_step=in_the_grid)},
    batch=batch, steps=300, lr=1.2e-2, measure=measure,
    shows=(
        Bars("loss in four bits", "Held-out loss in four bits", "less is better"),
        Bars("recall in four bits", "Blanks filled with the latest value, in four bits", "more is better", percent=True),
        Lines("training loss", "Training loss", "steps", "loss"),
    ),
    finding=finding,
    published=(Published("bits a routed-expert weight of K3", K3.expert_bits.value, "bits", K3.expert_bits.source),),
)  # fmt: skip
