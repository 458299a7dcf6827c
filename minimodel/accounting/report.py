"""The budget and the memory of a model as text, with the published figures beside ours."""

from __future__ import annotations

import math
from collections.abc import Callable

from minimodel import facts
from minimodel.accounting import cache_bytes, parameter_budget, weight_bytes, with_mixer
from minimodel.config import K3Config
from minimodel.formats import format_bytes, format_count, format_number

PRESETS: dict[str, Callable[[], K3Config]] = {
    "k3": K3Config.k3,
    "kimi_linear_48b": K3Config.kimi_linear_48b,
    "base": K3Config.base,
    "small": K3Config.small,
    "mini": K3Config.mini,
    "meeting": K3Config.meeting,
}
LENGTHS = (4096, 131_072, 1_048_576)


def report(name: str) -> str:
    """Budget, memory and, for released models, the published figures beside ours, as text. ``name``: a key of ``PRESETS``."""
    if name not in PRESETS:
        raise ValueError(f"name must be one of {list(PRESETS)}, got {name!r}")
    config = PRESETS[name]()
    budget = parameter_budget(config)
    rows = [[part, f"{n:,}", f"{budget.active_by_component[part]:,}"] for part, n in budget.by_component.items() if n]
    rows += [
        ["sum", f"{budget.total:,}", f"{budget.active_with_embedding:,}"],
        ["  without the embedding", "", f"{budget.active:,}"],
        ["  without either table", "", f"{budget.active_without_tables:,}"],
    ]
    parts = [f"{name}: {config.num_hidden_layers} layers, hidden size {config.hidden_size}"]
    parts.append(_table(["parameters", "all", "one token uses"], rows))

    groups = math.gcd(8, config.num_attention_heads)
    twins = {
        "as it is": config,
        "all MLA": with_mixer(config, "mla"),
        f"all GQA, {groups} kv heads": with_mixer(config, "gqa", num_key_value_groups=groups),
        "all MHA": with_mixer(config, "mha"),
    }
    costs = [[cache_bytes(twin, tokens) for twin in twins.values()] for tokens in LENGTHS]
    rows = [[f"{row[0].tokens:,} tokens", *(format_bytes(cost.total) for cost in row)] for row in costs]
    rows.append(["each further token", *(format_bytes(cost.per_token) for cost in costs[0])])
    rows.append(["fixed", *(format_bytes(cost.fixed) for cost in costs[0])])
    parts.append(_table(["memory of one session", *twins], rows))

    if published := _published(name, config):
        rows = [
            [label, _as_published(ours, fact), _as_published(fact.value, fact), fact.unit, fact.source] for label, ours, fact in published
        ]
        parts.append(_table(["published figures", "ours", "published", "unit", "source"], rows))
    return "\n\n".join(parts)


def _published(name: str, config: K3Config) -> list[tuple[str, int | float, facts.Fact]]:
    """(label, our number, published number) of the released models; empty for models of this course."""
    budget = parameter_budget(config)
    if name == "k3":
        return [
            ("all parameters", budget.total, facts.K3.total_parameters),
            ("active parameters", budget.active, facts.K3.active_parameters),
            ("download", weight_bytes(config), facts.K3.download_bytes),
        ]
    if name == "kimi_linear_48b":
        saving = 1 - cache_bytes(config, 1).per_token / cache_bytes(with_mixer(config, "mla"), 1).per_token
        return [
            ("all parameters", budget.total, facts.KimiLinear.total_parameters),
            ("active parameters", budget.active, facts.KimiLinear.active_parameters),
            ("cache growth saved", saving, facts.KimiLinear.kv_cache_saving),
        ]
    return []


def _as_published(value: int | float, fact: facts.Fact) -> str:
    """Ours and theirs with the digits that were published, at least three."""
    written = {"bytes": format_bytes, "parameters": format_count}.get(fact.unit)
    return written(value, digits=max(3, len(f"{fact.value:.0f}".rstrip("0")))) if written else format_number(value)


def _table(header: list[str], rows: list[list[str]]) -> str:
    """Columns with numbers to the right, words (the first column, units and sources) to the left."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    words = [i == 0 or name in ("unit", "source") for i, name in enumerate(header)]
    lines = [header, ["-" * width for width in widths], *rows]
    cells = [[c.ljust(w) if word else c.rjust(w) for c, w, word in zip(line, widths, words, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in cells)
