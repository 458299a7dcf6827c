"""Depth weights: the story's are the model's own, a chosen query reaches what it was solved for, and controls change the picture."""
import numpy as np
import pytest
import torch

from k3viz import residuals_figure, residuals_panel, residuals_story
from k3viz.residuals.story import ARTICLE_WEIGHTS, TEXT, _source_names, block_sizes, read, solved_query, with_block
from k3viz.theme import DARK
from minimodel import K3Config, K3ForCausalLM, attention_residual, record
from minimodel.pretrained import load_pretrained
from minimodel.tasks import meeting

MODEL = load_pretrained()
STORY = residuals_story(model=MODEL)


def other_model():
    """Another model of the same sizes, with queries that are not zero."""
    model = K3ForCausalLM(K3Config.meeting(), seed=3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "res_proj" in name:
                weight.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return model


def test_the_weights_are_the_softmax_of_the_models_own_queries():
    model = load_pretrained().double()
    with torch.no_grad(), record(model) as trace:
        logits = model(torch.tensor([meeting.encode(TEXT)])).logits
    layer = model.model.layers[3]
    values = trace["layers.3.mlp_res.sources"][0].numpy()
    keys = values / np.sqrt((values**2).mean(-1, keepdims=True) + model.config.rms_norm_eps) * layer.mlp_res_norm.weight.detach().numpy()
    e = np.exp(keys @ layer.mlp_res_proj.weight[0].detach().numpy())
    row = STORY.readers.index("layer 4 feed-forward")
    np.testing.assert_allclose(STORY.weights[row, :, : e.shape[-1]], e / e.sum(-1, keepdims=True), atol=1e-12)
    lengths = np.sqrt((values**2).sum(-1))
    np.testing.assert_allclose(STORY.plain_share[row, :, : e.shape[-1]], lengths / lengths.sum(-1, keepdims=True), atol=1e-12)
    p = logits[0, -1].softmax(-1)
    assert STORY.answer == (meeting.VOCABULARY[int(p.argmax())], pytest.approx(float(p.max()), abs=1e-12))


def test_every_reader_has_its_row_and_no_source_before_its_time():
    L, b = MODEL.config.num_hidden_layers, MODEL.config.attn_res_block_size
    assert len(STORY.readers) == 2 * L and len(STORY.sources) == L // b + 1
    for r, row in enumerate(STORY.weights):
        sublayers = r + 1  # written before this reader
        blocks = -(-sublayers // (2 * b))
        assert (~np.isnan(row)).sum(-1).tolist() == [1 + blocks] * len(STORY.tokens)
        assert STORY.partial[r] == (sublayers % (2 * b) != 0)
    np.testing.assert_allclose(np.nansum(STORY.weights, -1), 1)
    np.testing.assert_allclose(np.nansum(STORY.learned_share, -1), 1)


def test_sources_are_named_by_their_layers():
    k3 = K3Config.k3()
    names = _source_names(k3.attn_res_block_size, k3.num_hidden_layers)
    assert len(names) == 9 and names[:2] == ("embedding", "layers 1–12") and names[-1] == "layers 85–93"
    assert _source_names(1, 2) == ("embedding", "layer 1", "layer 2")


def test_a_solved_query_reaches_the_articles_weights_through_the_real_mix():
    generator = torch.Generator().manual_seed(0)
    sources = torch.randn(3, 32, generator=generator).double() * torch.tensor([[1.0], [9.0], [40.0]])
    gain = torch.rand(32, generator=generator).double() + 0.5
    query = solved_query(sources, gain, ARTICLE_WEIGHTS, 1e-5)
    expected = (torch.tensor(ARTICLE_WEIGHTS, dtype=torch.float64)[:, None] * sources).sum(0)
    torch.testing.assert_close(attention_residual(sources, query, gain), expected, rtol=1e-9, atol=1e-9)


def test_a_chosen_query_holds_at_its_word_only_and_changes_what_comes_after():
    chosen = residuals_story(model=MODEL, query="chosen", token=-1, reader=-1)
    np.testing.assert_allclose(chosen.row, ARTICLE_WEIGHTS, atol=1e-9)
    assert np.abs(chosen.weights[-1, :-1] - ARTICLE_WEIGHTS).max() > 0.1
    np.testing.assert_array_equal(chosen.weights[:-1], STORY.weights[:-1])  # earlier readers don't know
    assert chosen.answer != STORY.answer == chosen.learned_answer
    early = residuals_story(model=MODEL, query="chosen", reader=0)
    assert np.nanmax(np.abs(early.weights[1:] - STORY.weights[1:])) > 1e-3  # later readers see other outputs
    assert "chosen" in chosen.sentence and "0.60 / 0.10 / 0.30" in chosen.sentence


def test_zero_queries_average_and_length_zero_averages_one_reader():
    zero = residuals_story(model=MODEL, query="zero")
    there = ~np.isnan(zero.weights)
    np.testing.assert_allclose(zero.weights[there], np.broadcast_to(1 / there.sum(-1, keepdims=True), there.shape)[there], atol=1e-12)
    one = residuals_story(model=MODEL, length=0.0, reader=4)
    np.testing.assert_allclose(one.weights[4], 1 / 3, atol=1e-12)
    np.testing.assert_array_equal(one.weights[:4], STORY.weights[:4])


def test_the_plain_answer_is_that_of_a_model_without_depth_queries():
    config = MODEL.config.replace(attn_res_block_size=None)
    plain = K3ForCausalLM(config).double()
    weights = {name: w for name, w in MODEL.state_dict().items() if "res_proj" not in name and "res_norm" not in name}
    plain.load_state_dict(weights)
    with torch.no_grad():
        p = plain(torch.tensor([meeting.encode(TEXT)])).logits[0, -1].softmax(-1)
    assert STORY.plain_answer == (meeting.VOCABULARY[int(p.argmax())], pytest.approx(float(p.max()), abs=1e-12))
    assert STORY.plain_answer[0] in STORY.sentence


def test_the_model_given_is_left_as_it_was():
    before = {name: w.clone() for name, w in MODEL.state_dict().items()}
    residuals_story(model=MODEL, query="zero", block=1)
    assert all(torch.equal(before[name], w) for name, w in MODEL.state_dict().items())


def test_another_block_size_gives_other_sources():
    story = residuals_story(model=MODEL, block=1)
    assert len(story.sources) == MODEL.config.num_hidden_layers + 1 and "run with 1" in story.sentence
    np.testing.assert_allclose(story.weights[0], read(with_block(MODEL, 1), TEXT).weights[0])
    assert block_sizes(MODEL) == (1, 2, 4)


@pytest.mark.parametrize("change", [
    {"text": "The meeting is on Friday."}, {"model": other_model()}, {"token": 3}, {"reader": 2}, {"block": 4}, {"query": "chosen"},
    {"query": "zero"}, {"length": 0.5},
])
def test_another_input_gives_another_story_and_figure(change):
    story = residuals_story(**{"model": MODEL, **change})
    assert story.sentence != STORY.sentence
    assert residuals_figure(story=story).to_json() != residuals_figure(story=STORY).to_json()


@pytest.mark.parametrize("bad, name", [
    ({"text": " "}, "text"), ({"text": "🙂"}, "text"), ({"text": "The meeting is on Someday."}, "text"), ({"text": "The " * 61}, "text"),
    ({"text": 3}, "text"), ({"token": 99}, "token"), ({"token": 1.5}, "token"),
    ({"reader": 8}, "reader"), ({"block": 0}, "block"), ({"block": 5}, "block"),
    ({"query": "mine"}, "query"), ({"length": -1.0}, "length"), ({"length": float("nan")}, "length"),
    ({"query": "chosen", "asked": (0.5, 0, 0.5)}, "asked"), ({"query": "chosen", "asked": ()}, "asked"),
    ({"model": K3ForCausalLM(K3Config.meeting().replace(attn_res_block_size=None))}, "model"),
    ({"model": K3ForCausalLM(K3Config.meeting().replace(vocab_size=50))}, "model"),
])
def test_a_wrong_argument_is_named_in_one_sentence(bad, name):
    with pytest.raises(ValueError) as error:
        residuals_story(**{"model": MODEL, **bad})
    assert str(error.value).startswith(name) and "\n" not in str(error.value)


# ---- figure ----

def heat(figure, n=""):
    return np.array(next(t for t in figure.data if t.type == "heatmap" and t.xaxis == f"x{n}").z, float)


@pytest.mark.parametrize("story", [STORY, residuals_story(model=MODEL, block=1, token=3, reader=5)], ids=["trained", "block of one"])
def test_the_figure_draws_the_storys_numbers(story):
    figure = residuals_figure(story=story)
    np.testing.assert_allclose(heat(figure), story.weights[:, story.token], atol=1e-4)
    np.testing.assert_allclose(heat(figure, 2), story.plain_share[:, story.token], atol=1e-4)
    np.testing.assert_allclose(heat(figure, 4), story.weights[story.reader].T[: len(story.row)], atol=1e-4)
    bars = {t.name: t.x for t in figure.data if t.type == "bar"}
    np.testing.assert_allclose(bars["plain sum"], story.plain_share[story.reader, story.token, : len(story.row)], atol=1e-4)
    assert sum(s.line.dash == "dot" for s in figure.layout.shapes) == sum(story.partial)


def test_figures_are_the_same_twice_small_and_follow_the_theme():
    again = residuals_figure(story=residuals_story(model=MODEL))
    assert again.to_json() == residuals_figure(story=STORY).to_json() and len(again.to_json()) < 60_000
    assert residuals_figure(story=STORY, theme=DARK).layout.paper_bgcolor == DARK.paper


# ---- panel ----

PANEL = residuals_panel(model=MODEL)


def test_the_panel_answers_to_its_controls():
    panel = residuals_panel(model=MODEL)
    assert panel.trace.answer == STORY.answer and panel.describe() == STORY.sentence
    assert {"asked_0", "asked_1"} <= set(panel.hidden)
    panel.set({"query": "chosen"})
    np.testing.assert_allclose(heat(panel.figure)[-1], ARTICLE_WEIGHTS, atol=1e-4)
    assert panel.hidden == ["asked_3", "asked_4"]
    panel.set({"asked_0": 0.1, "asked_2": 0.8})
    np.testing.assert_allclose(panel.trace.row, (0.1, 0.1, 0.8), atol=1e-9)
    panel.set({"length": 0.0})
    np.testing.assert_allclose(panel.trace.row, 1 / 3, atol=1e-9)
    panel.set({"query": "zero"})
    assert "length" in panel.hidden
    panel.set({"query": "learned", "block": "1", "reader": 2, "length": 1.0, "token": 4})
    assert panel.trace.sources[-1] == "layer 4" and panel.trace.token == 4


def test_a_shorter_text_moves_the_word_and_its_labels():
    panel = residuals_panel(model=MODEL)
    panel.set({"text": "The meeting is on Friday."})
    assert panel.trace.tokens[-2] == "Friday" and panel.values["token"] == len(panel.trace.tokens) - 1
    player = next(c for c in panel.controls if c["name"] == "token")
    assert tuple(player["labels"]) == panel.trace.tokens


@pytest.mark.parametrize("wish", [
    {"text": ""}, {"text": "Friday " * 500}, {"text": "Ƭhe ∑"}, {"block": "3"}, {"reader": 99}, {"query": "x"},
])
def test_an_impossible_wish_becomes_a_sentence(wish):
    before = PANEL.picture
    PANEL.set_state({"values": {**PANEL.values, **wish}, "asked": PANEL.asked + 1})
    assert PANEL.problem and "\n" not in PANEL.problem and "failed" not in PANEL.problem and PANEL.picture == before
    PANEL.set({})


def test_the_panel_starts_at_its_arguments():
    panel = residuals_panel(model=MODEL, text="The meeting is on Friday.", query="chosen", block=1)
    assert (panel.values["block"], panel.values["query"], panel.trace.tokens[-2]) == ("1", "chosen", "Friday")
    with pytest.raises(ValueError, match="^query must be one of"):
        residuals_panel(model=MODEL, query="wish")
