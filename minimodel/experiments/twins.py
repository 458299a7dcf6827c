"""The twins: MLA in every layer against three KDA layers to one MLA, with the same data, size and recipe."""

from __future__ import annotations

from torch import Tensor

from minimodel.experiments import measures, probes
from minimodel.experiments.bodies import hybrid
from minimodel.experiments.definition import Arm, Bars, Experiment, Finding, Lines, Measured, Published, Scores, as_wide_as
from minimodel.facts import KimiLinear
from minimodel.formats import format_number, format_probability
from minimodel.model import K3ForCausalLM

PROJECTS, LENGTH = 2, 64
TOKENS = (128, 256, 512, 1024)  # at which a cache is weighed
CONTEXTS = (256, 4096)  # tokens behind which one more is timed
HYBRID = hybrid(3)
TWIN = as_wide_as(hybrid(0), Arm("", HYBRID).parameters)


def batch(arm: str, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Notes of 1,024 tokens in all."""
    return probes.practice(seed, step, projects=PROJECTS)


def measure(model: K3ForCausalLM, arm: str, seed: int, log: list[dict], answers: int) -> Measured:
    grown = measures.cache_growth(model, TOKENS)
    distance = measures.by_distance(model, projects=PROJECTS, answers=2 * answers)
    short, long = (measures.decode_ms(model, n) for n in CONTEXTS)
    scores = {
        "loss": measures.held_out_loss(model, lambda seed, step: batch(arm, seed, step), max(1, answers // 32)),
        "recall": measures.recall(model, projects=PROJECTS, length=LENGTH, answers=answers),
        "recall at four times the length": measures.recall(model, projects=PROJECTS, length=4 * LENGTH, answers=answers),
        "bytes a further token": (grown["y"][-1] - grown["y"][-2]) / (TOKENS[-1] - TOKENS[-2]),
        "bytes at 1,024 tokens": grown["y"][-1],
        f"ms a token behind {CONTEXTS[0]}": short, f"ms a token behind {CONTEXTS[1]:,}": long, "slow-down": long / short,
    }  # fmt: skip
    return Measured(scores, {"by distance": distance, "bytes": grown})


def finding(scores: dict[str, Scores]) -> Finding:
    mla, mixed = scores["mla"], scores["hybrid"]
    saved = 1 - mixed["bytes a further token"] / mla["bytes a further token"]
    said = (
        f"The hybrid's held-out loss is {format_number(mixed['loss'])} against {format_number(mla['loss'])} and it fills "
        f"{format_probability(mixed['recall'])} of the blanks against {format_probability(mla['recall'])}; its cache grows by "
        f"{format_probability(saved)} less a token. Behind {CONTEXTS[1]:,} tokens a token takes {format_number(mixed['slow-down'])} times "
        f"what it takes behind {CONTEXTS[0]}, in the twin {format_number(mla['slow-down'])} times."
    )
    return Finding(mixed["loss"] <= mla["loss"] and mixed["recall"] >= mla["recall"] and saved > 0.7, said)


RULER = next(row for row in KimiLinear.long_context.rows if row[0] == "RULER")
EXPERIMENT = Experiment(
    name="twins",
    question="Does a model with three fixed-size memories to one growing one do as well as its twin with four growing ones?",
    claim="With the same data, size and recipe the 3:1 hybrid loses nothing against full attention, and its cache grows by 3/4 less.",
    setup=(
        "Four layers of width 64, dense feed-forwards, no Attention Residuals; the twin's feed-forward is wider, so that both have about "
        "the same number of parameters. Neither has positions: the twin, without KDA layers, knows the order of words from causality "
        f"alone, and that is a handicap on notes whose facts change. {probes.TASK} Half of the notes have two. Kimi Linear compared 48B "
        "models on 1.4T tokens."
    ),
    arms={"hybrid": Arm("3 KDA : 1 MLA", HYBRID), "mla": Arm("MLA in every layer", TWIN)},
    batch=batch, steps=400, lr=1.2e-2, measure=measure, seeds=(0, 1, 2),
    shows=(
        Bars("recall", "Blanks filled with the latest value", "more is better", percent=True),
        Bars("loss", "Held-out loss", "less is better"),
        Bars("bytes a further token", "Bytes that one more token adds to the cache", "less is better"),
        Bars("slow-down", f"Time of a token behind {CONTEXTS[1]:,} others over that behind {CONTEXTS[0]}", "less is better"),
        Lines("by distance", "Right answers by distance", "tokens since the fact was told", "right", log_x=True, percent=True),
    ),
    finding=finding,
    published=(
        Published("RULER at 128K, MLA in every layer", RULER[1], "points", KimiLinear.long_context.source),
        Published("RULER at 128K, 3:1 hybrid", RULER[4], "points", KimiLinear.long_context.source),
        Published("cache saved, at most", KimiLinear.kv_cache_saving.value, "share", KimiLinear.kv_cache_saving.source),
        Published("time a token at 1M tokens, MLA", KimiLinear.tpot_twin.value, "ms", KimiLinear.tpot_twin.source),
        Published("time a token at 1M tokens, hybrid", KimiLinear.tpot_hybrid.value, "ms", KimiLinear.tpot_hybrid.source),
    ),
)  # fmt: skip
