"""The evidence: what the reports publish, each number with its source, and beside it what this course measures. Never in one color.

*Published* numbers come from ``minimodel.facts``. *Measured* ones come from small models that run here, or from the scores stored beside
the trained meeting model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import torch

from minimodel import K3Config, K3ForCausalLM, cache_bytes, facts
from minimodel.accounting import with_mixer
from minimodel.facts import Table
from minimodel.formats import format_count, format_number, format_probability, plural

PUBLISHED, MEASURED = "published", "measured"


@dataclass(frozen=True)
class Row:
    """One number of a facet: what it is of, its value, how it is written, and whether it is published or measured here."""

    label: str
    value: float
    text: str
    kind: str


@dataclass(frozen=True)
class Facet:
    """A claim and its numbers. unit: of all of them, and which way is better. sources: kind -> where its numbers are from."""

    claim: str
    unit: str
    rows: tuple[Row, ...]
    sources: dict[str, str]


@dataclass(frozen=True)
class EvidenceStory:
    """facets: the claims that have numbers. sentence: what they say together."""

    facets: tuple[Facet, ...]
    sentence: str


@dataclass(frozen=True)
class LineageStory:
    """components: each with what it does, its ancestors and its source; timeline: (model, month, what); both from ``facts``."""

    components: Table
    timeline: Table
    sentence: str


@dataclass(frozen=True)
class BenchmarksStory:
    """tables: benchmark -> (model, score) rows, best first, as published. ranks: benchmark -> K3's place, ties sharing the better one."""

    tables: dict[str, Table]
    ranks: dict[str, int]
    source: str
    sentence: str


# ---- published beside measured ----


def evidence_story() -> EvidenceStory:
    """Collect the published claims of story and reports, and measure what small models can show of them."""
    linear, residuals = facts.KimiLinear, facts.AttentionResiduals
    saved, scores = _growth_saved(), _meeting_scores()
    k3, twin = K3Config.k3(), with_mixer(K3Config.k3(), "mla")
    exact = 1 - cache_bytes(k3, 1).per_token / cache_bytes(twin, 1).per_token
    ruler = next(row for row in linear.long_context.rows if row[0] == "RULER")
    sizes = dict(zip(residuals.validation_loss.column("parameters"), residuals.validation_loss.rows, strict=True))
    loss = sizes[436e6]
    facets = (
        Facet("One layer in four grows", "share of the cache's growth saved, against MLA in every layer", (
            _share("Kimi Linear, at most", linear.kv_cache_saving.value, PUBLISHED),
            _share("K3, by its layer counts", exact, PUBLISHED),
            _share("our hybrid, real caches", saved, MEASURED),
        ), {PUBLISHED: f"{linear.kv_cache_saving.source}; K3's released config", MEASURED: "cache.nbytes of two small models, run now"}),
        Facet("It answers faster from long texts", "ms a token at 1M tokens, less is better", (
            Row("MLA in every layer", linear.tpot_twin.value, f"{format_number(linear.tpot_twin.value)} ms", PUBLISHED),
            Row("Kimi Linear", linear.tpot_hybrid.value, f"{format_number(linear.tpot_hybrid.value)} ms", PUBLISHED),
        ), {PUBLISHED: linear.tpot_speedup.source}),
        Facet("And recalls no less: RULER", "points at 128K tokens, more is better", tuple(
            Row(name, score, f"{score:.1f}", PUBLISHED) for name, score in zip(linear.long_context.columns[1:], ruler[1:], strict=True)
        ), {PUBLISHED: linear.long_context.source}),
        Facet("Recall in long notes, our model", "held-out questions answered right", tuple(
            _share(f"{s['projects']} {plural('project', s['projects'])}, {format_count(s['tokens'])} tokens", s["accuracy"], MEASURED)
            for s in scores if (s["projects"], s["tokens"]) in ((1, 1024), (1, 8192), (8, 1024), (8, 8192))
        ), {MEASURED: "minimodel/pretrained/meeting/scores.json"}),
        Facet("Three to one is the best mix", "validation perplexity by KDA:MLA, less is better", tuple(
            Row(mix, value, f"{format_number(value)}", PUBLISHED) for mix, _, value in linear.ratio_ablation.rows
        ), {PUBLISHED: linear.ratio_ablation.source}),
        Facet("Attention Residuals lower the loss", "validation loss at 436M parameters, less is better", tuple(
            Row(name, value, f"{value:.3f}", PUBLISHED) for name, value in zip(residuals.validation_loss.columns[1:], loss[1:], strict=True)
        ), {PUBLISHED: residuals.validation_loss.source}),
    )  # fmt: skip
    published, measured = (sum(row.kind == kind for facet in facets for row in facet.rows) for kind in (PUBLISHED, MEASURED))
    sentence = (
        f"{published} published numbers with their sources and {measured} measured here: the hybrid saves "
        f"{format_probability(linear.kv_cache_saving.value)} of the cache's growth in Kimi Linear's report (at most) and "
        f"{format_probability(saved)} in our small models."
    )
    return EvidenceStory(facets, sentence)


def _share(label: str, value: float, kind: str) -> Row:
    return Row(label, value, format_probability(value), kind)


def _meeting_scores() -> list[dict]:
    stored = resources.files("minimodel").joinpath("pretrained/meeting/scores.json").read_text()
    return sorted(json.loads(stored)["held_out"], key=lambda s: (s["projects"], s["tokens"]))


@lru_cache(maxsize=1)
def _growth_saved() -> float:
    """How much less the hybrid's cache grows from 32 to 64 tokens than that of its twin with MLA in every layer, in real bytes."""
    hybrid = K3Config.meeting()
    grown = []
    for config in (hybrid, with_mixer(hybrid, "mla")):
        model = K3ForCausalLM(config, seed=0).eval()
        cache, sizes = model.new_cache(1), []
        with torch.no_grad():
            for _ in range(2):
                model(torch.ones(1, 32, dtype=torch.long), cache=cache)
                sizes.append(cache.nbytes)
        grown.append(sizes[1] - sizes[0])
    return 1 - grown[0] / grown[1]


# ---- published only ----


def lineage_story() -> LineageStory:
    """K3's components, what each grew from, and the models on the way."""
    components, timeline = facts.lineage(), facts.timeline()
    first, last = timeline.rows[0], timeline.rows[-1]
    sentence = (
        f"{len(components.rows)} components, each with the work it grew from; from {first[0]} ({first[1]}) to {last[0]} ({last[1]}) "
        f"in {len(timeline.rows)} models."
    )
    return LineageStory(components, timeline, sentence)


def benchmarks_story() -> BenchmarksStory:
    """Figure 1 of the K3 report: twelve benchmarks, six models, nothing of ours."""
    tables = facts.benchmarks()
    ranks = {}
    for name, table in tables.items():
        own = dict(table.rows)["Kimi K3"]
        ranks[name] = 1 + sum(score > own for score in table.column("score"))
    first, top = (sum(rank <= n for rank in ranks.values()) for n in (1, 2))
    sentence = f"Published by K3's own report: of {len(tables)} benchmarks Kimi K3 leads {first} and is first or second in {top}."
    return BenchmarksStory(tables, ranks, next(iter(tables.values())).source, sentence)
