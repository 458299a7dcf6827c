"""The toolbox: share, shrink, forget, replace. Seven kinds of attention in the same small body, trained on the same notes."""

from __future__ import annotations

from torch import Tensor

from minimodel.experiments import measures, probes
from minimodel.experiments.bodies import plain
from minimodel.experiments.definition import Arm, Bars, Experiment, Finding, Lines, Measured, Published, Scores, as_wide_as
from minimodel.facts import DeepSeekV2
from minimodel.formats import format_probability
from minimodel.model import K3ForCausalLM
from minimodel.tasks import meeting

LAYERS, WINDOW, PROJECTS = 4, 21, 1
REACH = LAYERS * (WINDOW - 1)  # tokens that a stack of window layers can look back
LENGTH = 64  # of the training notes
TOKENS = (64, 128, 256, 512, 1024)  # at which a cache is weighed
KDA = plain("kda", layers=LAYERS)
LABELS = {
    "kda": "replace (KDA)", "sliding_window": f"forget (window of {WINDOW})", "mla": "shrink (MLA)", "gqa": "share (GQA)",
    "mha": "keep everything (MHA)", "linear_attention": "add only (linear attention)", "delta_net": "erase, never fade (DeltaNet)",
}  # fmt: skip


def batch(arm: str, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Notes of 1,024 tokens in all."""
    return probes.practice(seed, step, projects=PROJECTS)


def measure(model: K3ForCausalLM, arm: str, seed: int, log: list[dict], answers: int) -> Measured:
    distance = measures.by_distance(model, projects=PROJECTS, answers=2 * answers)
    fresh, stale = measures.by_updates(model, answers=answers)
    grown = measures.cache_growth(model, TOKENS)
    layer, stack = measures.reach(model)
    near, far = ([y for x, y in zip(distance["x"], distance["y"], strict=True) if (x <= REACH) == inside] for inside in (True, False))
    notes = meeting.held_out_notes(1, max(1, answers // 4), projects=PROJECTS, length=LENGTH, final_questions=4)
    held_out = meeting.score(model, notes, rows=32)
    scores = {
        "recall": held_out.accuracy, **{f"recall of {slot}": x for slot, x in held_out.by_slot().items()},
        "within reach": sum(near) / len(near), "beyond reach": sum(far) / len(far),
        "right after updates": fresh["y"][-1], "stale after updates": stale["y"][-1],
        "reach of the first layer": float(layer), "reach of the stack": float(stack),
        "bytes at 1,024 tokens": grown["y"][-1], "bytes a further token": (grown["y"][-1] - grown["y"][-2]) / (TOKENS[-1] - TOKENS[-2]),
    }  # fmt: skip
    return Measured(scores, {"by distance": distance, "right by updates": fresh, "stale by updates": stale, "bytes": grown})


def finding(scores: dict[str, Scores]) -> Finding:
    """Two claims: the window forgets beyond its reach where others don't, and adding brings old values back where erasing doesn't."""
    window, kda, additive = (scores[arm] for arm in ("sliding_window", "kda", "linear_attention"))
    forgets = window["beyond reach"] < 0.5 * kda["beyond reach"] and window["reach of the stack"] == REACH
    erases = kda["stale after updates"] < additive["stale after updates"]
    far = {arm: format_probability(s["beyond reach"]) for arm, s in scores.items()}
    old = {arm: format_probability(s["stale after updates"]) for arm, s in scores.items()}
    said = (
        f"In the window model a word changes nothing beyond {window['reach of the first layer']:.0f} tokens in the first layer and beyond "
        f"{window['reach of the stack']:.0f} in the stack. Facts older than {REACH} tokens are answered right in {far['sliding_window']} "
        f"of the cases with the window, {far['kda']} with KDA, {far['mla']} with MLA. After four updates an old day comes back in "
        f"{old['linear_attention']} of the answers where memory only adds, in {old['kda']} with KDA and {old['delta_net']} with DeltaNet; "
        f"also in {old['mla']} with MLA, which here has neither positions nor KDA layers to tell it what came last."
    )
    return Finding(forgets and erases, said)


EXPERIMENT = Experiment(
    name="toolbox",
    question="Four ways to keep notes, and three to compare with: which facts are still there when the question comes?",
    claim="A sliding window loses what lies beyond layers x (w - 1) tokens and the others keep it; a memory that only adds confuses "
    "Tuesday and Thursday where the delta rule does not.",
    setup=(
        f"{LAYERS} layers of width 64, four heads of 32 channels, one kind of attention in all of them, feed-forwards as wide as it takes "
        f"for about the same number of parameters; no positions. {probes.TASK} By distance: one fact, then other facts and chat, then the "
        "question."
    ),
    arms={
        mixer: Arm(label, as_wide_as(plain(mixer, layers=LAYERS, sliding_window=WINDOW, num_key_value_groups=1), Arm("", KDA).parameters))
        for mixer, label in LABELS.items()
    },
    batch=batch, steps=400, lr=1.2e-2, measure=measure, seeds=(0, 1, 2),
    shows=(
        Bars("recall", "Blanks filled with the latest value", "more is better", percent=True),
        Bars("beyond reach", f"Right about facts older than {REACH} tokens", "more is better", percent=True),
        Bars("stale after updates", "Old days told after four updates", "less is better", percent=True),
        Bars("bytes at 1,024 tokens", "Bytes of the cache at 1,024 tokens", "less is better"),
        Lines("by distance", "Right answers by distance", "tokens since the fact was told", "right", log_x=True, percent=True),
        Lines("bytes", "Bytes of the cache", "tokens", "bytes"),
        Lines("right by updates", "Right answers by updates", "updates of the day", "right", percent=True),
        Lines("stale by updates", "Old days told, by updates", "updates of the day", "told", percent=True),
    ),
    finding=finding,
    published=(
        Published("cache saved, DeepSeek-V2 against 67B", DeepSeekV2.kv_cache_saving.value, "share", DeepSeekV2.kv_cache_saving.source),
        Published("numbers a token and layer, MHA", DeepSeekV2.numbers_before.value, "numbers", DeepSeekV2.numbers_before.source),
        Published("numbers a token and layer, MLA", DeepSeekV2.numbers_after.value, "numbers", DeepSeekV2.numbers_after.source),
    ),
)  # fmt: skip
