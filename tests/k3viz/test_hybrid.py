"""The hybrid: parts add up to the closed forms, the recorded run is the model's own, controls change story, picture and sentence."""
import math

import pytest
import torch

from k3viz import hybrid_figure, hybrid_panel, hybrid_story
from k3viz.hybrid.figure import PLACES
from k3viz.hybrid.parts import MIXER_PARTS, MOE_PARTS
from k3viz.hybrid.recorded import TEXT
from k3viz.hybrid.story import LENSES, SCALES, with_pattern
from k3viz.theme import DARK, format_bytes, format_count
from minimodel import K3Config, cache_bytes, facts, load_pretrained, parameter_budget, record
from minimodel.accounting import expert_parameters, flops, mixer_parameters
from minimodel.config import LinearAttnConfig
from minimodel.tasks import meeting


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("pattern", ["KKKM", "M", "K", "KM"])
def test_the_parts_add_up_to_the_closed_forms(scale, pattern):
    story = hybrid_story(scale=scale, pattern=pattern, tokens=4096, at=1)
    config = story.config
    assert sum(s.total("parameters") for s in story.steps) == parameter_budget(config).total
    assert sum(s.total("active") for s in story.steps) == parameter_budget(config).active_with_embedding
    assert math.isclose(sum(s.total("flops") for s in story.steps), flops(config, 4096).per_token, rel_tol=1e-12)
    assert sum(s.total("memory") for s in story.steps) == cache_bytes(config, 4096).total


@pytest.mark.parametrize("mixer, layer", [("kda", 2), ("mla", 4)])
def test_the_parts_of_a_layer_are_the_accountings(mixer, layer):
    step = hybrid_story(at=layer).step
    own = [p for p in step.parts if p.name in MIXER_PARTS[mixer]]
    assert sum(p.parameters for p in own) == mixer_parameters(K3Config.k3(), mixer)
    experts = step.part("experts")
    assert experts.parameters == 896 * expert_parameters(K3Config.k3()) and experts.active * 56 == experts.parameters
    assert experts.weight_bytes == experts.parameters * facts.K3.expert_bits.value / 8


def test_tensors_have_the_shapes_of_the_model():
    story = hybrid_story(scale="tiny", at=2)
    model = load_pretrained().model.layers[1]
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    assert {n: s for p in story.step.parts for n, s in p.tensors} == shapes


@pytest.mark.parametrize("scale", ["48B", "2.8T"])
def test_the_default_pattern_is_the_released_one(scale):
    assert hybrid_story(scale=scale).config == SCALES[scale][1]()


def test_a_config_keeps_its_own_pattern_unless_another_is_asked_for():
    config = with_pattern(K3Config.mini(), "KM")
    story = hybrid_story(config=config)
    assert story.config == config and story.pattern == "KM" and story.at == 4
    assert hybrid_panel(config=config).values["pattern"] == "KM"
    assert hybrid_story(config=config, pattern="KKKM").config == K3Config.mini()
    small = K3Config.mini().replace(num_hidden_layers=2, linear_attn_config=LinearAttnConfig(kda_layers=(1,), full_attn_layers=(2,)))
    assert hybrid_panel(config=small).trace.at == 2
    odd = LinearAttnConfig(kda_layers=(2,), full_attn_layers=(1,))
    with pytest.raises(ValueError, match="^config: where there are MLA layers the last layer must be one"):
        hybrid_story(config=small.replace(linear_attn_config=odd))


def test_the_last_layer_is_mla_wherever_there_is_mla():
    config = K3Config.mini()
    assert with_pattern(config, "kkkm") == config
    assert with_pattern(config, "K").linear_attn_config.full_attn_layers == ()
    assert with_pattern(config, "MK").linear_attn_config.full_attn_layers == (1, 3, 5, 7, 9)


def test_the_sentence_tells_the_costs_of_the_part():
    story = hybrid_story(part="latent", tokens=1 << 20)
    kept = cache_bytes(K3Config.k3(), 1 << 20).per_token * (1 << 20) // 24
    assert story.step.part("latent").memory == kept and format_bytes(kept) in story.sentence
    assert "24 of 93 layers grow, 27.6 kB a token" in story.sentence
    budget = parameter_budget(K3Config.k3())
    assert f"{100 * budget.by_component['routed_experts'] / budget.total:.1f} %" in story.sentence


def test_the_recorded_run_is_that_of_the_trained_model():
    model = load_pretrained().double()
    with torch.no_grad(), record(model) as trace:
        model(torch.tensor([meeting.encode(TEXT)]))
    story = hybrid_story(scale="tiny", at=3, part="router")
    assert story.ran == "trained"
    for e, w in zip(trace["layers.2.moe.indices"][-1].tolist(), trace["layers.2.moe.weights"][-1].tolist(), strict=True):
        assert f"{e + 1} ({w:.2f})" in story.sentence
    assert f"{trace['layers.2.kda.alpha'][0, -1].mean():.2f}" in hybrid_story(scale="tiny", at=3, part="decay").sentence
    p = trace["logits"][0, -1].softmax(-1)
    assert meeting.VOCABULARY[int(p.argmax())] in hybrid_story(scale="tiny", at=5).sentence


def test_another_pattern_runs_untrained_and_says_so():
    story = hybrid_story(scale="tiny", pattern="MK", at=1, part="attention")
    assert story.ran == "not trained" and "not trained" in story.sentence
    assert hybrid_story(scale="48B").ran == ""


def test_a_model_of_ones_own_is_followed():
    model = load_pretrained()
    story = hybrid_story(model=model, at=5)
    assert story.ran == "this model" and "Thursday" in story.sentence
    assert hybrid_story(config=K3Config.mini(), at=10).label == "this model"


@pytest.mark.parametrize("scale", SCALES)
def test_every_step_can_be_drawn_and_its_boxes_hold_its_costs(scale):
    last = SCALES[scale][1]().num_hidden_layers + 1
    for at in (0, 1, 2, 4, last):
        for lens in LENSES:
            story = hybrid_story(scale=scale, at=at, lens=lens)
            figure = hybrid_figure(story=story, theme=DARK)
            written = [a.text for a in figure.layout.annotations]
            for p in story.step.parts:
                cost = getattr(p, LENSES[lens][0])
                said = format_bytes(cost) if lens == "memory" else format_count(cost)
                assert any(text.endswith(f"<br>{said}") for text in written)
            bars = [t for t in figure.data if t.type == "bar" and t.orientation != "h"]
            for i, step in enumerate(story.steps):
                assert math.isclose(sum(t.y[i] for t in bars), story.cost(step))
            whole = next(t for t in figure.data if t.name == "whole model")
            assert math.isclose(sum(whole.x), 1)


def test_every_part_has_a_place():
    names = {name for group in (*MIXER_PARTS.values(), MOE_PARTS) for name in group}
    assert names <= set(PLACES)


def test_the_panel_answers_to_its_controls():
    panel = hybrid_panel()
    start = panel.picture
    panel.set({"pattern": "KM"})
    assert panel.trace.per_token == cache_bytes(with_pattern(K3Config.k3(), "KM"), 1).per_token and panel.picture != start
    panel.set({"scale": "tiny", "lens": "memory", "tokens": 10})
    assert panel.trace.tokens == 1024 and panel.trace.step.number == 4
    panel.set({"at": 99})  # the story is shorter than the one before
    assert panel.trace.at == 5 and "Thursday" not in panel.describe() or "not trained" in panel.describe()
    panel.set({"at": 2, "part": "experts", "scale": "48B"})
    assert panel.trace.part == "experts" and "routed experts" in panel.describe()


def test_a_part_that_a_step_does_not_have_is_said():
    panel = hybrid_panel(part="attention")
    panel.set({"at": 2})
    assert panel.describe().startswith("This step has no such part (attention to the past)")


@pytest.mark.parametrize("typed", ["", "  ", "KKX", "K" * 94, "ünï", "<b>", "K" * 5000])
def test_an_impossible_pattern_is_one_short_sentence(typed):
    panel = hybrid_panel()
    before = panel.picture
    panel.set_state({"values": {**panel.values, "pattern": typed}, "asked": 1})
    assert panel.problem.startswith("pattern must be 1 to 93 letters") and len(panel.problem) < 150
    assert panel.picture == before


@pytest.mark.parametrize("bad, name", [
    ({"scale": "7B"}, "scale"), ({"lens": "price"}, "lens"), ({"tokens": 0}, "tokens"), ({"at": 95}, "at"), ({"at": True}, "at"),
    ({"part": "beta"}, "part"), ({"pattern": 3}, "pattern"), ({"config": K3Config.mini().replace(full_mixer="gqa")}, "config"),
])
def test_a_wrong_argument_is_named_in_one_sentence(bad, name):
    with pytest.raises(ValueError) as error:
        hybrid_story(**bad)
    assert str(error.value).startswith(name) and "\n" not in str(error.value)


def test_two_builds_are_equal():
    assert hybrid_panel(scale="tiny").picture == hybrid_panel(scale="tiny").picture
