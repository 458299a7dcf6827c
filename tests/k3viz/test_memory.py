"""The memory curve: measured bytes are real tensors', the formula meets them, and controls change the picture."""
import pytest
import torch

from k3viz import memory_figure, memory_panel, memory_story
from k3viz.memory.bill import PATTERNS, bill, own_config, pattern_of
from k3viz.memory.panel import SIZES
from k3viz.memory.story import KINDS, LONGEST, MODELS, small_config
from k3viz.theme import format_bytes
from minimodel import K3Config, K3ForCausalLM, cache_bytes, facts, parameter_budget
from minimodel.accounting import weight_bytes, with_mixer

STORY = memory_story(tokens=128)


def test_every_measured_point_lies_on_the_closed_form():
    for curve in STORY.measured:
        assert curve.measured == curve.formula
    assert [c.kind for c in STORY.measured] == list(KINDS)


@pytest.mark.parametrize("kind", ["gqa", "kda"])
def test_measured_bytes_are_those_of_a_cache_of_that_model(kind):
    model = K3ForCausalLM(small_config(kind))
    cache = model.new_cache(1)
    with torch.no_grad():
        model(torch.ones(1, 128, dtype=torch.long), cache=cache)
    curve = next(c for c in STORY.measured if c.kind == kind)
    assert curve.measured[-1] == sum(x.nbytes for slot in cache.layers for x in slot.tensors().values())


def test_sharing_shrinking_forgetting_and_replacing():
    c = {curve.kind: curve for curve in STORY.measured}
    config = small_config("gqa")
    assert c["mha"].per_token == c["gqa"].per_token * config.num_attention_heads // config.num_key_value_groups
    assert c["mla"].per_token < c["gqa"].per_token
    assert c["kda"].per_token * config.num_hidden_layers == c["mla"].per_token  # one layer in four still grows
    window = [b for t, b in zip(c["sliding_window"].tokens, c["sliding_window"].measured, strict=True) if t >= STORY.window]
    assert len(window) > 2 and len(set(window)) == 1


def test_published_curves_are_the_accountings():
    config = {"k3": K3Config.k3(), "kimi_linear": K3Config.kimi_linear_48b()}
    for curve in STORY.published:
        if curve.name in config:
            assert list(curve.bytes) == [cache_bytes(config[curve.name], t).total for t in curve.tokens]
        assert curve.tokens[-1] == STORY.context


def test_all_models_can_be_drawn_and_the_figure_holds_their_bytes():
    story = memory_story(models=tuple(MODELS), tokens=64)
    for scale in ("linear", "log"):
        figure = memory_figure(story=story, scale=scale)
        drawn = {t.name: tuple(t.y) for t in figure.data if t.type == "scatter"}
        assert all(drawn[c.label] == c.bytes for c in story.published)
        assert all(drawn[f"{c.label}, measured"] == c.measured for c in story.measured)


def test_sources_and_labels_follow_from_where_the_sizes_are():
    story = memory_story(models=tuple(MODELS), kinds=(), tokens=64)
    curve = {c.name: c for c in story.published}
    assert (curve["kimi_k2"].source, curve["deepseek_v3"].source) == (facts.KIMI_K2_CONFIG, facts.DEEPSEEK_V3_PAPER)
    assert f"({MODELS['k3_gqa'][3]().num_key_value_groups} groups)" in curve["k3_gqa"].label


def test_break_even_is_where_the_hybrid_stops_being_larger():
    k3 = K3Config.k3()
    full = k3.replace(linear_mixer="mla")
    at = STORY.break_even
    assert cache_bytes(k3, at).total <= cache_bytes(full, at).total
    assert cache_bytes(k3, at - 1).total > cache_bytes(full, at - 1).total


@pytest.mark.parametrize("bad, name", [
    ({"kinds": ["rnn"]}, "kinds"), ({"kinds": "mha"}, "kinds"), ({"models": ["gpt"]}, "models"), ({"tokens": 0}, "tokens"),
    ({"tokens": 64.0}, "tokens"),
    ({"context": 0}, "context"), ({"context": 1 << 30}, "context"), ({"dtype": "int4"}, "dtype"),
])
def test_a_wrong_argument_is_named_in_one_sentence(bad, name):
    with pytest.raises(ValueError) as error:
        memory_story(**bad)
    assert str(error.value).startswith(name) and "\n" not in str(error.value)


def test_a_wrong_scale_is_named():
    with pytest.raises(ValueError, match="^scale must be one of linear, log"):
        memory_figure(story=STORY, scale="cubic")


def test_the_panel_answers_to_its_controls():
    panel = memory_panel(tokens=64)
    k3 = next(c for c in panel.trace.published if c.name == "k3")
    panel.set({"dtype": "float8"})
    half = next(c for c in panel.trace.published if c.name == "k3")
    assert 2 * half.per_token == k3.per_token
    panel.set({"context": 17, "models": ["k3"], "kinds": ["mha", "kda"], "scale": "log"})
    assert panel.trace.context == 1 << 17
    assert {t.name for t in panel.figure.data if t.type == "scatter" and t.xaxis == "x2"} == {"Kimi K3"}
    assert panel.figure.layout.yaxis2.type == "log"
    assert "131,072 tokens" in panel.describe()


@pytest.mark.parametrize("context, shown", [
    (64, 64), (65_536, 65_536), (LONGEST, LONGEST), (3000, 2048), (3100, 4096), (LONGEST - 1, LONGEST),
])
def test_the_panel_starts_at_the_context_asked_for(context, shown):
    assert memory_panel(tokens=64, context=context).trace.context == shown


def test_a_panel_with_nothing_chosen_says_so():
    panel = memory_panel(tokens=64)
    panel.set({"models": [], "kinds": []})
    assert "Choose at least one" in panel.describe()


# ---- the bill ----

K3 = K3Config.k3()
OWN = own_config(base=K3, pattern="window:gqa", layers=61, heads=64, groups=4, latent=256, window=1000)


def curve(story, name):
    return next(c for c in story.published if c.name == name)


def test_the_bill_of_k3_is_its_released_files_and_caches():
    story = memory_story(models=("k3",), kinds=(), memory=2256e9)
    paid = curve(story, "k3").bill
    assert paid.weights == weight_bytes(K3) == pytest.approx(facts.K3.download_bytes.value, rel=0.01)
    assert paid.session == cache_bytes(K3, story.context).total
    assert paid.weights + paid.sessions * paid.session <= 2256e9 < paid.weights + (paid.sessions + 1) * paid.session


@pytest.mark.parametrize("batch", [1, 7])
def test_what_a_new_token_moves_is_counted_part_by_part(batch):
    config = K3Config.kimi_linear_48b()
    paid = bill(config, context=4096, dtype="bfloat16", batch=batch, memory=80e9, weights="bfloat16")
    parts = parameter_budget(config).by_component
    untouched = (1 - config.num_experts_per_token / config.num_experts) ** batch
    read = sum(count for name, count in parts.items() if name not in ("embedding", "routed_experts"))
    read += parts["routed_experts"] * (1 - untouched)
    cache = cache_bytes(config, 4096)
    assert paid.moved == pytest.approx(2 * read / batch + cache.total + cache.fixed, rel=1e-12)


def test_a_lone_token_reads_the_active_parameters():
    budget = parameter_budget(K3)
    paid = bill(K3, context=64, dtype="bfloat16", batch=1, memory=1e12, weights="float8")
    cache = cache_bytes(K3, 64)
    assert paid.moved == pytest.approx(budget.active + cache.total + cache.fixed, rel=1e-9)


def test_a_model_of_ones_own_is_counted_by_the_same_closed_form():
    story = memory_story(models=(), kinds=(), config=OWN, batch=3, context=10_000)
    yours = curve(story, "own")
    assert list(yours.bytes) == [3 * cache_bytes(OWN, t).total for t in yours.tokens]
    assert 1000 in yours.tokens  # the window's knee is drawn where it is
    assert [OWN.mixer(i) for i in (0, 4, 5, 60)] == ["sliding_window", "sliding_window", "gqa", "gqa"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_break_even_is_the_first_length_at_which_the_mix_keeps_no_more(pattern):
    config = own_config(base=K3, pattern=pattern, layers=20, heads=16, groups=8, latent=64, window=300)
    at = bill(config, context=64, dtype="bfloat16", batch=1, memory=1e12, weights="bfloat16").break_even
    assert pattern_of(config) == pattern
    if at is None:
        assert len({config.mixer(i) for i in range(20)}) == 1
        return
    twin = with_mixer(config, config.full_mixer)
    assert cache_bytes(config, at).total <= cache_bytes(twin, at).total
    assert at == 1 or cache_bytes(config, at - 1).total > cache_bytes(twin, at - 1).total


def test_your_own_model_answers_to_its_controls():
    panel = memory_panel(tokens=64)
    assert set(SIZES) - {"heads"} - set(panel.hidden) == {"groups"}  # all GQA: no latent, no window
    gqa = curve(panel.trace, "own")
    assert gqa.bytes == curve(memory_story(models=("k3_gqa",), kinds=()), "k3_gqa").bytes
    panel.set({"groups": "4"})
    assert 2 * curve(panel.trace, "own").per_token == gqa.per_token
    panel.set({"pattern": "3:1", "latent": "256", "layers": 40})
    assert curve(panel.trace, "own").per_token == 10 * (256 + 64) * 2
    panel.set({"pattern": "window", "window": "128"})
    assert curve(panel.trace, "own").per_token == 0 and curve(panel.trace, "own").bytes[-1] == 40 * 128 * 2 * 96 * 128 * 2
    panel.set({"models": ["k3"]})
    assert {"pattern", "layers", *SIZES} <= set(panel.hidden)


def test_batch_memory_and_weights_change_the_bill():
    panel = memory_panel(tokens=64, models=("k3",), config=K3)
    sentence, paid = panel.describe(), curve(panel.trace, "k3").bill
    assert curve(panel.trace, "own").bill == paid  # K3's own sizes, untouched
    panel.set({"batch": 5})
    assert panel.trace.batch == 32 and curve(panel.trace, "k3").bill.moved < paid.moved
    assert curve(panel.trace, "k3").bytes[-1] == 32 * paid.session
    panel.set({"memory": "640"})
    assert curve(panel.trace, "k3").bill.sessions == 0 and "640 GB of GPU memory can't hold the" in panel.describe() != sentence
    panel.set({"weights": "bfloat16"})
    assert curve(panel.trace, "k3").bill.weights == 2 * parameter_budget(K3).total


def test_with_nothing_chosen_each_wish_is_said_once():
    panel = memory_panel(tokens=64)
    panel.set({"models": [], "kinds": []})
    assert panel.describe() == "Choose at least one published model. Choose at least one small model."


def test_the_table_shows_the_bill():
    story = memory_story(models=("k3", "kimi_linear"), kinds=(), config=OWN)
    (table,) = [t for t in memory_figure(story=story).data if t.type == "table"]
    columns = dict(zip((h[3:-4] for h in table.header["values"]), map(tuple, table.cells["values"]), strict=True))
    assert columns["model"] == ("Kimi Linear 48B", "Kimi K3", "Yours")
    assert columns["moved per new token"] == tuple(format_bytes(c.bill.moved) for c in story.published)
    assert columns["sessions that fit"][1] == str(curve(story, "k3").bill.sessions)


@pytest.mark.parametrize("bad, name", [
    ({"batch": 0}, "batch"), ({"weights": "int2"}, "weights"), ({"memory": -1}, "memory"), ({"config": 3}, "config"),
])
def test_a_wrong_part_of_the_bill_is_named(bad, name):
    with pytest.raises(ValueError, match=f"^{name}"):
        memory_story(kinds=(), **bad)


@pytest.mark.parametrize("bad, name", [({"memory": 0}, "memory"), ({"config": K3.replace(full_mixer="mha")}, "config")])
def test_a_panel_names_what_it_cannot_start_with(bad, name):
    with pytest.raises(ValueError, match=f"^{name}"):
        memory_panel(tokens=64, **bad)
