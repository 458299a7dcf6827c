"""Balancing: five ways to keep experts evenly loaded while a router learns."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from minimodel.config import K3Config
from minimodel.experiments import measures, probes
from minimodel.experiments.bodies import mixture
from minimodel.experiments.definition import Arm, Bars, Experiment, Finding, Lines, Measured, Scores
from minimodel.experiments.store import mean
from minimodel.formats import format_number, format_probability
from minimodel.model import K3ForCausalLM, ModelOutput
from minimodel.routing import Router, balance_loss, sign_bias

EXPERTS, LAYERS = 16, 3
RATES, COEFFICIENT = {"sign_slow": 1e-3, "sign_fast": 1e-2}, 1e-2  # of the sign rule (DeepSeek-V3's first), of the auxiliary loss
EVEN = 1.5  # fullest expert over the mean: balanced below this


class WatchedRouter(Router):
    """A router that remembers the loads of its last training pass. ``rule``: what sets its bias."""

    def __init__(self, config: K3Config, rule: str) -> None:
        super().__init__(config)
        self.rule, self.loads, self.penalty = rule, torch.zeros(config.num_experts, dtype=torch.long), None
        self.estimator = rule if rule in ("exact", "histogram") else "histogram"

    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        weights, indices = super().forward(x, valid)
        if self.training:
            self.loads = torch.bincount(indices.flatten(), minlength=len(self.weight))
            if self.rule == "loss":
                self.penalty = balance_loss(torch.sigmoid(x.float() @ self.weight.T), indices)
        return weights, indices

    @torch.no_grad()
    def update_bias(self) -> None:
        if self.rule in ("exact", "histogram"):
            super().update_bias()
        elif self.rule in RATES:
            self.e_score_correction_bias.copy_(sign_bias(self.loads, self.e_score_correction_bias, RATES[self.rule]))
        self.forget()


class Penalized(K3ForCausalLM):
    """Adds the routers' auxiliary losses to the training loss; held-out losses are without them."""

    def forward(self, *args, **kwargs) -> ModelOutput:
        out = super().forward(*args, **kwargs)
        if not self.training or out.loss is None:
            return out
        return replace(out, loss=out.loss + COEFFICIENT * sum(router.penalty for router in self.routers()))


def build(config: K3Config, *, seed: int, rule: str) -> K3ForCausalLM:
    """The same model with watched routers; same seed, same weights, whatever the rule."""
    model = (Penalized if rule == "loss" else K3ForCausalLM)(config, seed=seed)
    for layer in model.model.layers:
        if layer.block_sparse_moe is not None:
            router = WatchedRouter(config, rule)
            router.load_state_dict(layer.block_sparse_moe.gate.state_dict())
            layer.block_sparse_moe.gate = router
    return model


def batch(arm: str, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """1,024 tokens of text; every next word is to be predicted, and no padding is routed."""
    return probes.stream(seed, step)


def evaluate(model: K3ForCausalLM, arm: str, answers: int) -> Scores:
    """Of the last training pass, the mean over layers: fullest expert over the even share, and the share of experts nobody went to."""
    loads = torch.stack([router.loads for router in model.routers()]).double()
    return {"max over mean": float((loads.amax(1) / loads.mean(1)).mean()), "dead": float((loads == 0).double().mean())}


def measure(model: K3ForCausalLM, arm: str, seed: int, log: list[dict], answers: int) -> Measured:
    over = [row["max over mean"] for row in log]
    tenth = max(1, len(log) // 10)
    late = [i for i, y in enumerate(over) if y >= EVEN]
    scores = {
        "loss": measures.held_out_loss(model, lambda seed, step: batch(arm, seed, step), max(1, answers // 16)),
        "max over mean, all steps": mean(over), "max over mean, last tenth": mean(over[-tenth:]),
        "dead experts, last tenth": mean([row["dead"] for row in log[-tenth:]]),
        "steps until it stays even": float(late[-1] + 1 if late else 0), "steps that are not even": float(len(late)),
    }  # fmt: skip
    size = -(-len(over) // 60)
    thinned = [(i + size, mean(over[i : i + size])) for i in range(0, len(over), size)]
    return Measured(scores, {"load": {"x": [float(x) for x, _ in thinned], "y": [y for _, y in thinned]}})


def finding(scores: dict[str, Scores]) -> Finding:
    quantile = scores["histogram"]
    others = {arm: s for arm, s in scores.items() if arm not in ("exact", "histogram")}
    even = min(s["max over mean, all steps"] for s in others.values())
    best = min(s["loss"] for s in others.values())
    spread = max(s["loss"] for s in scores.values()) - min(s["loss"] for s in scores.values())
    said = (
        f"Over all steps the fullest expert has {format_number(quantile['max over mean, all steps'])} times its share with the quantile "
        f"rule (histogram), {format_number(scores['exact']['max over mean, all steps'])} (exact), at best {format_number(even)} with the "
        f"others, and {format_number(scores['none']['max over mean, all steps'])} with nothing. Dead experts at the end: "
        f"{format_probability(quantile['dead experts, last tenth'])} against "
        f"{format_probability(scores['none']['dead experts, last tenth'])} with nothing. Held-out losses lie within "
        f"{format_number(spread)} of each other."
    )
    return Finding(quantile["max over mean, all steps"] < even and quantile["loss"] < best + 0.5 * spread + 1e-9, said)


RULES = {
    "histogram": "quantile rule, histogram (K3)", "exact": "quantile rule, exact", "sign_slow": f"sign rule, rate {RATES['sign_slow']:g}",
    "sign_fast": f"sign rule, rate {RATES['sign_fast']:g}", "loss": f"auxiliary loss, {COEFFICIENT:g}", "none": "nothing",
}  # fmt: skip
BODY = mixture(layers=LAYERS, experts=EXPERTS)
EXPERIMENT = Experiment(
    name="balancing",
    question="What keeps experts evenly loaded without a cost to the loss?",
    claim="Quantile Balancing balances a trained router at once, without a rate to tune and without an auxiliary loss.",
    setup=(
        f"Three layers of width 64 with every part of K3; {EXPERTS} experts of which a token visits two, in the last two layers. Notes "
        "about one to four projects as one text, every next word to be predicted. Loads are those of each training step (1,024 tokens, "
        f"128 an expert when even); balanced is called a step whose fullest expert has less than {EVEN} times its share. The report "
        "publishes no comparison in numbers."
    ),
    arms={rule: Arm(label, BODY, build=partial(build, rule=rule)) for rule, label in RULES.items()},
    batch=batch, steps=200, lr=1.2e-2, measure=measure, evaluate=evaluate, evaluate_every=1, seeds=(0, 1, 2),
    shows=(
        Bars("max over mean, all steps", "Fullest expert over its even share, all steps", "1 is even"),
        Bars("steps that are not even", f"Steps whose fullest expert has {EVEN} times its share or more", "less is better"),
        Bars("dead experts, last tenth", "Experts nobody goes to, last tenth of the steps", "less is better", percent=True),
        Bars("loss", "Held-out loss", "less is better"),
        Lines("load", "Fullest expert over its even share", "steps", "times"),
    ),
    finding=finding,
)  # fmt: skip
