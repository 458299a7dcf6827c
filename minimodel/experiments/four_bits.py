"""Four bits: rounding a finished model's experts, against training them in the grid, at the same bits."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from minimodel.experiments.bodies import mixture
from minimodel.experiments.definition import Arm, Bars, Experiment, Finding, Lines, Measured, Published, Scores
from minimodel.facts import K3
from minimodel.formats import format_digits, format_probability
from minimodel.model import K3ForCausalLM
from minimodel.quantization import bits_per_weight, quantize_model, train_in_four_bits

NAMES, ROWS = 48, 512  # first words, second words and answers of the facts; facts a step
TABLE = torch.randint(2 * NAMES, 3 * NAMES, (NAMES, NAMES), generator=torch.Generator().manual_seed(0))  # answer to every pair of words
BODY = mixture(
    layers=2, experts=8, vocab_size=3 * NAMES, first_k_dense_replace=0, num_shared_experts=0
)  # every feed-forward is one of routed experts, so whatever is known by heart is in four bits


def facts(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Three words a fact, ids and labels [N, 3]: two names and the answer, which is to be predicted."""
    ids = torch.stack([first, NAMES + second, TABLE[first, second]], 1)
    labels = ids.clone()
    labels[:, :2] = -100
    return ids, labels


def batch(arm: str, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Facts drawn at random."""
    generator = torch.Generator().manual_seed(10**6 * seed + step)
    return facts(*torch.randint(0, NAMES, (2, ROWS), generator=generator))


def in_the_grid(model: K3ForCausalLM, step: int, steps: int) -> None:
    """The second half of training rounds in every pass, as K3 does from fine-tuning onward."""
    train_in_four_bits(model, on=step >= steps // 2)


@torch.no_grad()
def known(model: K3ForCausalLM) -> tuple[float, float]:
    """Loss over all facts, and the share that is known by heart."""
    ids, labels = facts(*torch.cartesian_prod(torch.arange(NAMES), torch.arange(NAMES)).T)
    out = model(ids, labels=labels)
    return out.loss.item(), float((out.logits[:, 1].argmax(-1) == ids[:, 2]).double().mean())


def measure(model: K3ForCausalLM, arm: str, seed: int, log: list[dict], answers: int) -> Measured:
    wide, narrow = copy.deepcopy(model), copy.deepcopy(model)
    train_in_four_bits(wide, on=False)
    quantize_model(narrow)
    scores = {}
    for name, reader in (("in full precision", wide), ("in four bits", narrow)):
        scores[f"loss {name}"], scores[f"known {name}"] = known(reader)
    return Measured({**scores, "bits a weight": bits_per_weight(narrow)}, {})


def finding(scores: dict[str, Scores]) -> Finding:
    after, inside = scores["after"], scores["inside"]
    loss = {name: format_digits(x, digits=3) for name, x in after.items() if name.startswith("loss")}
    said = (
        f"Trained in full precision the loss is {loss['loss in full precision']}, and {loss['loss in four bits']} once its experts are "
        f"rounded. Trained in the grid it is {format_digits(inside['loss in four bits'], digits=3)} in four bits. Known by heart in four "
        f"bits: {format_probability(after['known in four bits'])} and {format_probability(inside['known in four bits'])}, both at "
        f"{inside['bits a weight']:g} bits a weight."
    )
    lost = after["loss in four bits"] - after["loss in full precision"]
    return Finding(lost > 0 and inside["loss in four bits"] < after["loss in four bits"], said)


EXPERIMENT = Experiment(
    name="four_bits",
    question="What do four bits a weight cost, rounded afterwards or trained in?",
    claim="Quantization-aware training loses less than rounding afterwards, at the same bits.",
    setup=(
        f"A table of {NAMES * NAMES:,} random facts (two words, one answer) to be known by heart; asked are the same facts. Two layers of "
        "width 64 with every part of K3 but without shared experts or a dense layer, so that every feed-forward is in four bits: eight "
        "experts of which a token visits two. One arm trains in float32 and is rounded at the end; the other rounds in every pass of the "
        "second half of its steps. K3 does so from fine-tuning onward and publishes no comparison."
    ),
    arms={"after": Arm("rounded afterwards", BODY), "inside": Arm("trained in the grid", BODY, before_step=in_the_grid)},
    batch=batch, steps=200, lr=1.2e-2, measure=measure, seeds=(0, 1, 2), version=2,
    shows=(
        Bars("loss in four bits", "Loss over all facts, in four bits", "less is better"),
        Bars("loss in full precision", "The same in full precision", "less is better"),
        Bars("known in four bits", "Facts known by heart, in four bits", "more is better", percent=True),
        Lines("training loss", "Training loss", "steps", "loss"),
    ),
    finding=finding,
    published=(Published("bits a routed-expert weight of K3", K3.expert_bits.value, "bits", K3.expert_bits.source),),
)  # fmt: skip
