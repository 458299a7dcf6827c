"""The published numbers are complete, carry their sources, and agree with each other and with the released configs."""

import inspect

import pytest

from minimodel import facts
from minimodel.config import K3Config

GROUPS = [
    facts.K3, facts.K2, facts.KimiLinear, facts.DeepSeekV2, facts.AttentionResiduals, facts.Serving, facts.Standing,
]  # fmt: skip
ENTRIES = {f"{group.__name__}.{name}": entry for group in GROUPS for name, entry in vars(group).items() if not name.startswith("_")}
FACTS = {name: entry for name, entry in ENTRIES.items() if isinstance(entry, facts.Fact)}
TABLES = {name: entry for name, entry in ENTRIES.items() if isinstance(entry, facts.Table)}


def test_groups_are_all_here():
    public = {
        value for value in vars(facts).values()
        if inspect.isclass(value) and value.__module__ == facts.__name__ and value not in (facts.Fact, facts.Table)
    }  # fmt: skip
    assert public == set(GROUPS)
    assert len(FACTS) + len(TABLES) == len(ENTRIES)


@pytest.mark.parametrize("name", FACTS)
def test_every_fact_has_a_source(name):
    assert len(FACTS[name].source) > 10
    assert FACTS[name].value not in (None, "")


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_rectangular_and_has_a_source(name):
    table = TABLES[name]
    assert len(table.source) > 10 and table.rows and len(set(table.columns)) == len(table.columns)
    assert {len(row) for row in table.rows} == {len(table.columns)}


def test_config_and_table_1_agree():
    k3 = K3Config.k3()
    assert k3.num_experts == facts.K3.routed_experts.value
    assert k3.num_experts_per_token == facts.K3.active_experts.value
    assert k3.num_shared_experts == facts.K3.shared_experts.value
    assert k3.num_experts / k3.num_experts_per_token == facts.K3.sparsity.value
    assert k3.max_position_embeddings == facts.K3.context.value
    assert -(-k3.num_hidden_layers // k3.attn_res_block_size) == facts.K3.attn_res_blocks.value


def test_k2_dimensions_and_table_1_agree():
    k2 = facts.kimi_k2_dimensions()
    pairs = [
        (k2.num_hidden_layers, facts.K2.layers), (k2.hidden_size, facts.K2.hidden_size), (k2.num_attention_heads, facts.K2.heads),
        (k2.num_experts, facts.K2.routed_experts), (k2.num_experts_per_token, facts.K2.active_experts),
        (k2.num_shared_experts, facts.K2.shared_experts), (k2.moe_intermediate_size, facts.K2.expert_width),
    ]  # fmt: skip
    assert [ours for ours, _ in pairs] == [fact.value for _, fact in pairs]


def test_published_ratios_follow_from_published_numbers():
    linear, serving = facts.KimiLinear, facts.Serving
    assert round(facts.K3.total_parameters.value / linear.total_parameters.value) == facts.K3.times_testbed.value
    assert linear.tpot_twin.value / linear.tpot_hybrid.value == pytest.approx(linear.tpot_speedup.value, abs=0.1)
    block = serving.hash_block.value
    assert serving.resumed_at.value == serving.matching_prefix.value // block * block
    assert serving.physical_block.value == 12 * block


def test_same_number_in_two_tables():
    linear = facts.KimiLinear
    ruler = linear.long_context.rows[linear.long_context.column("benchmark").index("RULER")]
    assert ruler[linear.long_context.columns.index("Kimi Linear")] == linear.ruler_128k.value
    assert ruler[linear.long_context.columns.index("MLA")] == linear.ruler_128k_twin.value
    assert linear.ratio_ablation.rows[0][1:] == linear.component_ablation.rows[0][1:]
    residuals = facts.AttentionResiduals
    sizes = dict(zip(residuals.validation_loss.column("parameters"), residuals.validation_loss.rows, strict=True))
    ablation = dict(residuals.ablation.rows)
    assert sizes[436e6][1] == ablation["plain residuals"] and sizes[436e6][3] == ablation["full"]


def test_averages_of_the_long_context_table():
    table = facts.KimiLinear.long_context
    *rows, average = table.rows
    for column in range(1, len(table.columns)):
        assert sum(row[column] for row in rows) / len(rows) == pytest.approx(average[column], abs=0.06)


def test_benchmarks_are_sorted_and_hold_k3():
    tables = facts.benchmarks()
    assert len(tables) == 12
    for table in tables.values():
        scores = table.column("score")
        assert list(scores) == sorted(scores, reverse=True)
        assert "Kimi K3" in table.column("model")
    assert tables["GDPval-AA v2 (Elo)"].unit == "Elo"


def test_lineage_and_timeline():
    table = facts.lineage()
    assert table.columns == ("component", "what it does", "ancestors", "source")
    assert {"Kimi Delta Attention", "Gated MLA", "Attention Residuals", "Stable LatentMoE", "Quantile Balancing", "Per-Head Muon"} <= set(
        table.column("component")
    )
    assert all(all(row) and len(row) == 4 for row in table.rows)
    months = facts.timeline().column("month")
    assert list(months) == sorted(months) and facts.timeline().column("model")[-1] == "Kimi K3"


@pytest.mark.bad_input
def test_unknown_column():
    with pytest.raises(ValueError, match="'speed'"):
        facts.KimiLinear.long_context.column("speed")
