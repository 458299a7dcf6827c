"""Four bits: the grid by search, the output error over the inputs themselves, gradient descent done twice, and a panel that answers."""
import math

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from k3viz import four_bit_figure, four_bit_panel, four_bit_story
from k3viz.four_bit.story import RATE, _draws, expert_blocks, input_moments, tell
from k3viz.theme import DARK
from minimodel import K3Config, K3ForCausalLM, dequantize_mxfp4, quantize_mxfp4
from minimodel.pretrained import load_pretrained

MODEL = load_pretrained()
STORY = four_bit_story(model=MODEL)
OWN = [(-1) ** i * (i + 1) / 10 for i in range(32)]


def line(figure, name):
    return next(t for t in figure.data if t.name == name)


# ---- the story ----

@pytest.mark.parametrize("outlier", [1.0, 8.0, 256.0])
def test_every_weight_goes_to_the_nearest_grid_value(outlier):
    story = four_bit_story(model=MODEL, outlier=outlier, steps=0)
    assert len(story.grid) == 15 and story.grid[7] == 0
    distance = np.abs(story.weights[:, None] - story.grid)
    np.testing.assert_allclose(np.abs(story.weights - story.rounded), distance.min(1), atol=1e-15)
    assert set(story.rounded) <= set(story.grid)


def test_the_scale_is_a_power_of_two_that_fits_the_largest_weight():
    for outlier in (1.0, 1.5, 3.0, 50.0):
        story = four_bit_story(model=MODEL, outlier=outlier, steps=0)
        assert story.byte == story.exponent + 127
        assert 3.5 <= np.abs(story.weights).max() / 2.0**story.exponent < 7  # the "even" rule


def test_the_block_is_the_models_and_only_the_largest_weight_grows():
    block = MODEL.model.layers[1].block_sparse_moe.experts.w2.detach().double().reshape(-1, 32)[6].numpy()
    np.testing.assert_array_equal(STORY.weights, block)
    grown = four_bit_story(model=MODEL, outlier=4.0).weights
    assert grown[STORY.place] == 4 * block[STORY.place] and np.abs(block).argmax() == STORY.place
    np.testing.assert_array_equal(np.delete(grown, STORY.place), np.delete(block, STORY.place))


def test_an_outlier_wipes_out_the_others():
    lost = [four_bit_story(model=MODEL, outlier=x, steps=0) for x in (1.0, 16.0, 64.0)]
    assert lost[0].error < 0.2 < lost[1].error <= lost[2].error and lost[2].error == pytest.approx(1)
    assert (np.delete(lost[2].rounded, lost[2].place) == 0).all()


def test_losses_are_mean_squares_over_the_inputs():
    common, own = _draws()
    x = (STORY.alike**0.5 * common + (1 - STORY.alike) ** 0.5 * own).numpy()
    y = x @ STORY.weights
    for step in (0, 13, len(STORY.losses) - 1):
        assert STORY.losses[step] == pytest.approx(((x @ STORY.trained[step] - y) ** 2).mean() / (y**2).mean(), rel=1e-9)


def test_training_is_gradient_descent_with_the_rounding_passed_through():
    """The same descent without autograd: the gradient of (w - t)^T M (w - t) at the rounded weights, applied to the weights behind them."""
    target = torch.tensor(STORY.weights)
    moments, steps = input_moments(STORY.alike), len(STORY.losses) - 1
    w, stable = target.clone(), 1 / (2 * float(torch.linalg.eigvalsh(moments)[-1]))
    for step in range(steps + 1):
        rounded = dequantize_mxfp4(*quantize_mxfp4(w), dtype=torch.float64)
        np.testing.assert_array_equal(STORY.trained[step], rounded.numpy())
        w = w - RATE * (1 - step / steps) * stable * 2 * (moments @ (rounded - target))


def test_trained_weights_stand_on_a_grid_too():
    w = torch.tensor(STORY.trained[STORY.best()])
    np.testing.assert_array_equal(dequantize_mxfp4(*quantize_mxfp4(w), dtype=torch.float64).numpy(), w.numpy())


def test_training_in_the_grid_loses_less_where_inputs_are_alike():
    np.testing.assert_array_equal(STORY.trained[0], STORY.rounded)
    gains = {}
    for alike in (0.0, 0.9):
        stories = [tell(w, 1.0, "even", alike, 30) for w in expert_blocks(MODEL)[:8]]
        gains[alike] = np.exp(np.mean([np.log(s.losses[s.best()] / s.losses[0]) for s in stories]))
    assert gains[0.9] < 0.5 < 0.8 < gains[0.0] <= 1


def test_what_is_kept_never_gets_worse():
    kept = [STORY.losses[STORY.best(step)] for step in range(len(STORY.losses))]
    assert kept == sorted(kept, reverse=True)


def test_weights_of_your_own_and_the_other_rule():
    story = four_bit_story(weights=OWN)
    np.testing.assert_array_equal(story.weights, OWN)
    assert story.stored == 17
    floor = four_bit_story(weights=[3.75, *OWN[:31]], rule="floor", steps=0)
    assert floor.exponent == four_bit_story(weights=[3.75, *OWN[:31]], steps=0).exponent - 1 and floor.rounded[0] == 3.0  # clipped


# ---- figure ----

def test_the_figure_draws_the_storys_numbers():
    figure = four_bit_figure(story=STORY)
    np.testing.assert_allclose(line(figure, "weight").x, STORY.weights, rtol=1e-4)
    np.testing.assert_allclose(line(figure, "nearest grid value").x, STORY.rounded, rtol=1e-4)
    best = STORY.trained[STORY.best()]
    moved = np.flatnonzero(best != STORY.rounded)
    trained = line(figure, "trained in the grid")
    assert [y - 1 for y in trained.y] == moved.tolist() and len(moved) > 0
    np.testing.assert_allclose(trained.x, best[moved], rtol=1e-4)
    np.testing.assert_allclose(line(figure, "at this step").y, 100 * STORY.losses, rtol=1e-4)
    np.testing.assert_array_equal(figure.layout.xaxis.tickvals, STORY.grid)
    assert figure.layout.title.text.replace("<br>", " ") == STORY.sentence()


@pytest.mark.parametrize("change", [{"block": 3}, {"outlier": 4.0}, {"alike": 0.2}, {"steps": 5}, {"weights": OWN, "model": None}])
def test_another_input_gives_another_story_and_figure(change):
    story = four_bit_story(**{"model": MODEL, **change})
    assert story.sentence() != STORY.sentence()
    assert four_bit_figure(story=story).to_json() != four_bit_figure(story=STORY).to_json()


def test_figures_are_the_same_twice_and_small():
    assert four_bit_figure().to_json() == four_bit_figure().to_json()
    assert len(four_bit_figure(theme=DARK).to_json()) < 30_000


# ---- wrong input ----

@pytest.mark.parametrize("bad, said", [
    ({"block": 0}, "^block must be"), ({"block": 10**6}, "^block must be"), ({"block": 1.0}, "^block must be"),
    ({"outlier": 0.5}, "^outlier"), ({"outlier": math.nan}, "^outlier"), ({"rule": "ceil"}, "^rule must be one of even, floor"),
    ({"alike": 1.5}, "^alike"),
    ({"alike": True}, "^alike"), ({"steps": -1}, "^steps"), ({"steps": 1.5}, "^steps"), ({"weights": OWN}, "^weights and model"),
    ({"model": K3ForCausalLM(K3Config.meeting().replace(first_k_dense_replace=4))}, "^model has no routed experts"),
    ({"model": K3ForCausalLM(K3Config.meeting().replace(moe_intermediate_size=40))}, "^model: experts of width 40"),
])
def test_a_wrong_argument_is_named_in_one_sentence(bad, said):
    with pytest.raises(ValueError, match=said) as error:
        four_bit_story(**{"model": MODEL, **bad})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("weights", [[1.0] * 31, [0.0] * 32, [math.nan] * 32, "abc", [[1.0] * 32]])
def test_weights_that_are_no_block(weights):
    with pytest.raises(ValueError, match="^weights must be 32"):
        four_bit_story(weights=weights)


@pytest.mark.parametrize("step", [61, -62, 1.5, True])
def test_a_step_that_is_not_there(step):
    with pytest.raises(ValueError, match="^step must be a whole number from -61 to 60"):
        four_bit_figure(story=STORY, step=step)


# ---- panel ----

def test_every_control_changes_picture_and_sentence():
    panel = four_bit_panel()
    assert isinstance(panel.figure, go.Figure) and panel.describe() == STORY.sentence()
    for values in ({"block": 3}, {"outlier": 6}, {"alike": 0.5}, {"step": 2}, {"block": 5, "outlier": 0}):
        picture, sentence = panel.picture, panel.describe()
        panel.set(values)
        assert panel.picture != picture and panel.describe() != sentence


def test_the_rule_matters_for_a_block_that_would_clip():
    panel = four_bit_panel(weights=[3.75, *OWN[:31]])
    assert "block" not in panel.values
    before = panel.trace.exponent
    panel.set({"rule": "floor"})
    assert panel.trace.exponent == before - 1


def test_an_impossible_wish_is_a_sentence_and_the_picture_stays():
    panel = four_bit_panel()
    before = panel.picture
    for wish in ({"block": 49}, {"rule": "ceil"}, {"alike": 2}, {"step": 61}):
        panel.set_state({"values": {**panel.values, **wish}, "asked": panel.asked + 1})
        assert panel.problem and panel.picture == before and panel.answered == panel.asked
        panel.values = dict(panel._drawn)
