"""The memory curve: measured bytes are real tensors', the formula meets them, and controls change the picture."""
import pytest
import torch

from k3viz import memory_figure, memory_panel, memory_story
from k3viz.memory.story import KINDS, LONGEST, MODELS, small_config
from minimodel import K3Config, K3ForCausalLM, cache_bytes, facts

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
    window = [b for t, b in zip(c["sliding_window"].tokens, c["sliding_window"].measured) if t >= STORY.window]
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
        drawn = {t.name: tuple(t.y) for t in figure.data}
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
    ({"kinds": ["rnn"]}, "kinds"), ({"kinds": "mha"}, "kinds"), ({"models": ["gpt"]}, "models"), ({"tokens": 0}, "tokens"), ({"tokens": 64.0}, "tokens"),
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
    assert {t.name for t in panel.figure.data if t.xaxis == "x2"} == {"Kimi K3"}
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
