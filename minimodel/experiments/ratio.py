"""The ratio: how many KDA layers to one MLA layer, from none to all."""

from __future__ import annotations

from torch import Tensor

from minimodel.experiments import measures, probes
from minimodel.experiments.bodies import hybrid, plain
from minimodel.experiments.definition import Arm, Bars, Experiment, Finding, Lines, Measured, Published, Scores, as_wide_as
from minimodel.experiments.store import mean
from minimodel.facts import KimiLinear
from minimodel.formats import format_number
from minimodel.model import K3ForCausalLM

LAYERS, PROJECTS, LENGTH = 8, 1, 64
MIXES = {
    "0_to_1": ("0:1", hybrid(0, layers=LAYERS)), "1_to_1": ("1:1", hybrid(1, layers=LAYERS)), "3_to_1": ("3:1", hybrid(3, layers=LAYERS)),
    "7_to_1": ("7:1", hybrid(7, layers=LAYERS)), "all_kda": ("all KDA", plain("kda", layers=LAYERS)),
}  # fmt: skip
SIZE = Arm(*MIXES["3_to_1"]).parameters


def batch(arm: str, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Notes of 1,024 tokens in all."""
    return probes.practice(seed, step, projects=PROJECTS)


def measure(model: K3ForCausalLM, arm: str, seed: int, log: list[dict], answers: int) -> Measured:
    scores = {
        "training loss": mean([row["loss"] for row in log]),
        "loss": measures.held_out_loss(model, lambda seed, step: batch(arm, seed, step), max(1, answers // 32)),
        "recall": measures.recall(model, projects=PROJECTS, length=LENGTH, answers=answers),
        "recall at four times the length": measures.recall(model, projects=PROJECTS, length=4 * LENGTH, answers=answers),
        "bytes at 1,024 tokens": measures.cache_growth(model, (1024,))["y"][0],
    }
    return Measured(scores, {"by distance": measures.by_distance(model, projects=PROJECTS, answers=answers)})


def finding(scores: dict[str, Scores]) -> Finding:
    order = sorted(scores, key=lambda arm: scores[arm]["loss"])
    losses = ", ".join(f"{MIXES[arm][0]} {format_number(scores[arm]['loss'])}" for arm in order)
    said = f"Held-out loss, best first: {losses}."
    return Finding(order[0] == "3_to_1", said if order[0] == "3_to_1" else f"{said} At this size 3:1 is not the best mix.")


EXPERIMENT = Experiment(
    name="ratio",
    question="How many KDA layers can share one layer of full attention?",
    claim="Three KDA layers to one MLA layer is the best mix.",
    setup=(
        f"{LAYERS} layers of width 64, dense feed-forwards as wide as it takes for about the same number of parameters. {probes.TASK} The "
        "paper's models have 16 layers; its 15:1 needs as many, so it is left out."
    ),
    arms={arm: Arm(mix, as_wide_as(config, SIZE)) for arm, (mix, config) in MIXES.items()},
    batch=batch, steps=200, lr=1.2e-2, measure=measure,
    shows=(
        Bars("training loss", "Training loss, mean of all steps", "less is learned sooner"),
        Bars("loss", "Held-out loss by KDA:MLA", "less is better"),
        Bars("recall", "Blanks filled with the latest value", "more is better", percent=True),
        Lines("by distance", "Right answers by distance", "tokens since the fact was told", "right", log_x=True, percent=True),
    ),
    finding=finding,
    published=tuple(
        Published(f"validation perplexity, {mix}", value, "perplexity", KimiLinear.ratio_ablation.source)
        for mix, _, value in KimiLinear.ratio_ablation.rows
    ),
)  # fmt: skip
