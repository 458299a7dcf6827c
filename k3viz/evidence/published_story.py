"""Two published stories, nothing of ours: Kimi Linear against its twin, and the sizes of the models on the way to K3."""

from __future__ import annotations

from dataclasses import dataclass

from minimodel import facts
from minimodel.formats import format_count, format_number, format_probability

TWIN, HYBRID = "twin", "Kimi Linear"


@dataclass(frozen=True)
class Contest:
    """One outcome: what was compared, in which unit, the values of the twin and of the hybrid and how they are written, its source."""

    claim: str
    unit: str
    values: tuple[float, float]
    texts: tuple[str, str]
    said: str
    source: str


@dataclass(frozen=True)
class TwinsStory:
    """contests: the outcomes; setting: what both models share; average: (twin, hybrid) over the long-context tests, and how many."""

    contests: tuple[Contest, ...]
    setting: str
    average: tuple[float, float]
    tests: int
    sentence: str


@dataclass(frozen=True)
class Size:
    """A model on the way: its name, its month, its parameters in all and those active for a token."""

    name: str
    month: str
    total: float
    active: float


@dataclass(frozen=True)
class SizesStory:
    """models: in order of time; testbed: index of the small one; times: how many times larger the last one is, rounded; source."""

    models: tuple[Size, ...]
    testbed: int
    times: int
    source: str
    sentence: str


def twins_story() -> TwinsStory:
    """Kimi Linear's report: the hybrid against a model that differs in its layers only."""
    linear = facts.KimiLinear
    scores = {name: (twin, hybrid) for name, twin, *_, hybrid in linear.long_context.rows}
    (mmlu,) = (dict(zip(linear.mmlu_pro.columns, row, strict=True)) for row in linear.mmlu_pro.rows)
    saved, speedup = linear.kv_cache_saving, linear.tpot_speedup
    batch1 = format_number(linear.batch1_decode_speedup_1m.value).rstrip("0")
    contests = (
        Contest("Cache that grows", "share of the twin's", (1.0, 1 - saved.value), ("100 %", f"{100 * (1 - saved.value):.0f} %"),
                f"The notes that grow with every word: up to {format_probability(saved.value)} less.", saved.source),
        Contest("A word at 1M tokens", "larger batches", (linear.tpot_twin.value, linear.tpot_hybrid.value),
                tuple(f"{format_number(x)} ms" for x in (linear.tpot_twin.value, linear.tpot_hybrid.value)),
                f"{speedup.value} times as fast, mostly by larger batches in the freed memory; a single reply {batch1} times.",
                speedup.source),
        Contest("Speed at 128K tokens", "times the twin's", (1.0, linear.decode_speedup_128k.value),
                ("1", f"{linear.decode_speedup_128k.value}"),
                f"At 128K tokens it writes {linear.decode_speedup_128k.value} times as fast.", linear.decode_speedup_128k.source),
        Contest("RULER at 128K tokens", "points, more is better", scores["RULER"], tuple(f"{x:.1f}" for x in scores["RULER"]),
                "And it recalls more from long texts, not less.", linear.long_context.source),
        Contest("MMLU-Pro, short tasks", "points, more is better", (mmlu["MLA"], mmlu["Kimi Linear"]),
                tuple(f"{x:.1f}" for x in (mmlu["MLA"], mmlu["Kimi Linear"])), "Short tasks did not suffer.", linear.mmlu_pro.source),
    )  # fmt: skip
    average = scores.pop("average")
    size, tokens = (format_count(fact.value, digits=2) for fact in (linear.total_parameters, linear.training_tokens))
    setting = f"{size} parameters, {tokens} tokens"
    sentence = (
        f"Published for Kimi Linear against its twin with MLA in every layer ({setting} both): up to {format_probability(saved.value)} "
        f"less cache, up to {speedup.value} times as fast at 1M tokens, {average[1]} against {average[0]} points on average "
        f"over {len(scores)} long-context tests."
    )
    return TwinsStory(contests, setting, average, len(scores), sentence)


def sizes_story() -> SizesStory:
    """K2, the testbed and K3: parameters from the reports, months from the timeline."""
    months = {model: month for model, month, _ in facts.timeline().rows}
    groups = (("Kimi K2", facts.K2), ("Kimi Linear", facts.KimiLinear), ("Kimi K3", facts.K3))
    models = tuple(Size(name, months[name], group.total_parameters.value, group.active_parameters.value) for name, group in groups)
    small, large = models[1], models[-1]
    times = facts.K3.times_testbed.value
    sentence = (
        f"{small.name} ({small.month}, {format_count(small.total, digits=2)} parameters) tried the design that {large.name} ({large.month},"
        f" {format_count(large.total)}) carries at {times} times the size."
    )
    return SizesStory(models, 1, times, f"{facts.K3_REPORT}, Table 1; {facts.KIMI_LINEAR_PAPER}", sentence)
