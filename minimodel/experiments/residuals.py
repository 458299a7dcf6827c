"""Residuals: reading earlier outputs by learned weights, against one blended pile."""

from __future__ import annotations

import torch
from torch import Tensor

from minimodel.experiments import measures, probes
from minimodel.experiments.bodies import hybrid
from minimodel.experiments.definition import Arm, Bars, Curve, Experiment, Finding, Lines, Measured, Published, Scores
from minimodel.experiments.store import mean
from minimodel.facts import AttentionResiduals
from minimodel.formats import format_number, format_probability
from minimodel.model import K3ForCausalLM
from minimodel.trace import record

LAYERS, PROJECTS, LENGTH = 8, 1, 64
PLAIN = hybrid(3, layers=LAYERS)


def batch(arm: str, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Notes of 1,024 tokens in all."""
    return probes.practice(seed, step, projects=PROJECTS)


@torch.no_grad()
def output_sizes(model: K3ForCausalLM, ids: Tensor) -> Curve:
    """Root mean square of what each sublayer adds, from the first mixer to the last feed-forward; x counts sublayers from 1."""
    sizes: list[float] = []
    parts = [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp or layer.block_sparse_moe)]
    hooks = [part.register_forward_hook(lambda _module, _inputs, out: sizes.append(float(out.square().mean().sqrt()))) for part in parts]
    try:
        model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return {"x": [float(i + 1) for i in range(len(sizes))], "y": sizes}


@torch.no_grad()
def depth_reads(model: K3ForCausalLM, ids: Tensor) -> dict[str, float]:
    """Mean weight that the readers of depth give to the embedding, and to the block that is being written (the newest)."""
    with record(model) as trace:
        model(ids)
    reads = [trace[name].mean((0, 1)) for name in trace if name.endswith("_res.weights")]
    reads = [w for w in reads if len(w) > 1]
    return {
        "weight of the embedding": float(sum(w[0] for w in reads) / len(reads)),
        "weight of the newest source": float(sum(w[-1] for w in reads) / len(reads)),
    }


def measure(model: K3ForCausalLM, arm: str, seed: int, log: list[dict], answers: int) -> Measured:
    ids, _ = batch(arm, measures.HELD_OUT, 0)
    sizes = output_sizes(model, ids)
    scores = {
        "training loss": mean([row["loss"] for row in log]),
        "loss": measures.held_out_loss(model, lambda seed, step: batch(arm, seed, step), max(1, answers // 32)),
        "recall": measures.recall(model, projects=PROJECTS, length=LENGTH, answers=answers),
        "last output over first": sizes["y"][-1] / sizes["y"][0], "largest output over smallest": max(sizes["y"]) / min(sizes["y"]),
    }  # fmt: skip
    if model.config.attn_res_block_size is not None:
        scores |= depth_reads(model, ids)
    return Measured(scores, {"output sizes": sizes})


def finding(scores: dict[str, Scores]) -> Finding:
    plain, ones, twos = (scores[arm] for arm in ("plain", "block_1", "block_2"))
    said = (
        f"Held-out loss {format_number(ones['loss'])} with blocks of one layer, {format_number(twos['loss'])} with blocks of two, "
        f"{format_number(plain['loss'])} with plain residuals. Readers give {format_probability(ones['weight of the embedding'])} and "
        f"{format_probability(twos['weight of the embedding'])} of their weight to the embedding. The last sublayer's output is "
        f"{format_number(ones['last output over first'])} and {format_number(twos['last output over first'])} times as large as the "
        f"first's, {format_number(plain['last output over first'])} times with plain residuals."
    )
    return Finding(max(ones["loss"], twos["loss"]) < plain["loss"], said)


LOSSES = AttentionResiduals.validation_loss
SMALLEST = LOSSES.rows[0]
EXPERIMENT = Experiment(
    name="residuals",
    question="Does a layer do better when it chooses what to read from the layers before it?",
    claim="Attention Residuals lower the loss against plain residuals.",
    setup=(
        f"{LAYERS} layers of width 64, three KDA to one Gated MLA, dense feed-forwards. Blocks of one or two layers; a block of one "
        f"sublayer (full Attention Residuals) is not a setting of the released format. {probes.TASK} The paper's smallest model has 194M "
        "parameters."
    ),
    arms={
        "plain": Arm("plain residuals", PLAIN),
        "block_1": Arm("Attention Residuals, blocks of 1 layer", PLAIN.replace(attn_res_block_size=1)),
        "block_2": Arm("Attention Residuals, blocks of 2 layers", PLAIN.replace(attn_res_block_size=2)),
    },
    batch=batch, steps=200, lr=1.2e-2, measure=measure, seeds=(0, 1, 2),
    shows=(
        Bars("training loss", "Training loss, mean of all steps", "less is learned sooner"),
        Bars("loss", "Held-out loss", "less is better"),
        Bars("recall", "Blanks filled with the latest value", "more is better", percent=True),
        Bars("weight of the embedding", "Weight that readers give to the embedding", percent=True),
        Bars("last output over first", "Size of the last sublayer's output over the first's"),
        Lines("output sizes", "Size of each sublayer's output", "sublayer", "root mean square"),
        Lines("training loss", "Training loss", "steps", "loss"),
    ),
    finding=finding,
    published=tuple(
        Published(f"validation loss at {SMALLEST[0] / 1e6:.0f}M parameters, {kind}", value, "loss", LOSSES.source)
        for kind, value in zip(LOSSES.columns[1:], SMALLEST[1:], strict=True)
    ),
)  # fmt: skip
