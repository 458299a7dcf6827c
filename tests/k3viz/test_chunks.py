"""Chunks: the matrix form equals the token loop where its numbers fit, breaks where they don't, and the picture says so."""
import math

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from k3viz import chunks_figure, chunks_panel, chunks_story
from k3viz.chunks.story import LONGEST, NUMBERS, TEXT, TILE, largest_exponent, read_tiles, tell
from k3viz.theme import DARK
from minimodel import K3Config, K3ForCausalLM, kda, record
from minimodel.pretrained import load_pretrained
from minimodel.tasks import meeting

MODEL = load_pretrained()
TILES = read_tiles(MODEL, TEXT)
STORY = chunks_story(model=MODEL)
TOKENS = len(STORY.tokens)


def line(figure, name):
    return next(t for t in figure.data if t.name == name)


# ---- the story ----

@pytest.mark.parametrize("chunk", [1, 3, 4, 16, 17, 64, 128])
@pytest.mark.parametrize("place", list(TILES))
def test_chunks_equal_the_token_loop(chunk, place):
    story = tell(TILES[place], chunk, None, 0.0, "float64")
    assert max(story.errors.max(), story.pair_errors.max()) < 1e-13
    assert sum(b - a for a, b in story.bounds) == TOKENS


def test_the_reference_is_what_the_model_computes():
    layer, h = STORY.place
    reader = load_pretrained().double()
    with torch.no_grad(), record(reader) as trace:
        reader(torch.tensor([meeting.encode(TEXT)]))
    np.testing.assert_allclose(STORY.reference, trace[f"layers.{layer}.kda.output"][0, :, h].numpy(), atol=1e-12)


def test_the_story_agrees_with_the_chunked_operator():
    tile = TILES[STORY.place]
    q, k, v, beta, g = (x[None, :, None] for x in (tile.q, tile.k, tile.v, tile.beta, torch.tensor(STORY.g)))
    outputs, _ = kda(q, k, v, g, beta, scale=1.0, backend="chunked", chunk_size=16)
    story = tell(tile, 16, None, 0.0, "float64")
    np.testing.assert_allclose(story.outputs, outputs[0, :, 0].numpy(), atol=1e-12)


def test_matrices_are_the_equations_entry_by_entry():
    """L and P written as sums over channels, and the inverse by forward substitution."""
    tile, story = TILES[STORY.place], tell(TILES[STORY.place], 8, None, 0.0, "float64")
    for (start, stop), L, inverse, P in zip(story.bounds[:2], story.L, story.inverse, story.P, strict=False):
        q, k, g, beta = (x[start:stop].numpy() for x in (tile.q, tile.k, torch.tensor(story.g), tile.beta))
        C = stop - start
        for i in range(C):
            for j in range(C):
                between = np.exp(g[j + 1 : i + 1].sum(0))  # what is left at i of a write at j
                assert L[i, j] == pytest.approx(beta[i] * (k[i] * k[j] * between).sum() if j < i else 0, abs=1e-14)
                assert P[i, j] == pytest.approx((q[i] * k[j] * between).sum() if j <= i else 0, abs=1e-14)
        T = np.eye(C)
        for i in range(C):
            T[i] -= L[i, :i] @ T[:i]
        np.testing.assert_allclose(inverse, T, atol=1e-14)


@pytest.mark.parametrize("numbers", NUMBERS)
def test_outputs_break_where_the_reciprocal_does_not_fit(numbers):
    for chunk in (4, 16, 32, 64):
        story = tell(TILES[STORY.place], chunk, None, 0.0, numbers)
        assert np.isnan(story.errors).any() == (story.reach.max() > story.limit)
        assert np.isfinite(story.pair_errors).all()


def test_k3s_tile_is_the_largest_that_is_safe_at_the_bound():
    """With every step at -5: 16 words reach e^80, 17 still fit float32, 18 do not."""
    for chunk, safe in ((16, True), (17, True), (18, False)):
        story = tell(TILES[STORY.place], chunk, "bounded", 16.0, "float32")
        assert story.reach.max() == pytest.approx(5 * chunk, rel=0.01)
        assert np.isfinite(story.errors).all() == safe


def test_without_the_bound_a_tile_of_16_breaks():
    story = chunks_story(model=MODEL, gate="softplus", shift=8.0)
    assert story.chunk == TILE and story.reach.max() > story.limit
    assert np.isnan(story.errors).all() and "are not numbers" in story.sentence and story.pair_errors.max() < 1e-6


def test_limits_and_work():
    assert largest_exponent("float32") == pytest.approx(math.log(3.4028235e38))
    assert largest_exponent("float16") == pytest.approx(math.log(65504))
    d, C = 128, 16
    assert STORY.work == 6 * TOKENS * d * d + 3 * TOKENS * C * d + TOKENS * C * C  # Kimi Linear report Eq. 13
    assert STORY.loop_work == 6 * TOKENS * d * d


def test_the_default_head_forgets_most():
    forgotten = {place: -tell(tile, 16, None, 0.0, "float32").g.sum(0).min() for place, tile in TILES.items()}
    assert forgotten[STORY.place] == max(forgotten.values())


# ---- figure ----

def test_the_figure_draws_the_storys_numbers():
    figure = chunks_figure(story=STORY, show=1)
    for n, matrix in (("x", STORY.L[1]), ("x2", STORY.inverse[1]), ("x3", STORY.P[1])):
        z = np.array(next(t for t in figure.data if t.type == "heatmap" and t.xaxis == n).z, float)
        lower = np.tril(np.ones_like(matrix, dtype=bool))
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(z[lower], np.clip(np.log10(np.abs(matrix[lower])), -4, 0), atol=0.006)
        assert np.isnan(z[~lower]).all()
    np.testing.assert_allclose([y for y in line(figure, "this head").y if y is not None], STORY.reach, atol=1e-3)
    np.testing.assert_allclose(line(figure, "matrix products with 1/Γ").y, np.maximum(STORY.errors, 1e-17), rtol=0.01)
    assert len(line(figure, "not a number").x) == 0
    assert figure.layout.title.text.replace("<br>", " ") == STORY.sentence


def test_what_is_not_a_number_is_drawn_as_such():
    story = chunks_story(model=MODEL, chunk=32)
    figure = chunks_figure(story=story)
    marked = [t for t in figure.data if t.name == "not a number"]
    assert len([t for t in marked if t.type == "heatmap"]) == 3
    drawn = np.array(next(t for t in marked if t.type == "heatmap" and t.xaxis == "x").z, float)
    np.testing.assert_array_equal(drawn == 1, np.tril(~np.isfinite(story.L[-1])))
    assert len(line(figure, "matrix products with 1/Γ").x) == TOKENS
    assert list(next(t for t in marked if t.type == "scatter").x) == [i + 1 for i in range(TOKENS) if np.isnan(story.errors[i])]


@pytest.mark.parametrize("change", [{"chunk": 8}, {"gate": "softplus"}, {"shift": 2.0}, {"numbers": "bfloat16"}, {"head": (0, 1)},
                                    {"text": "The meeting is on Friday. Lunch is at noon."}])
def test_another_input_gives_another_story_and_figure(change):
    story = chunks_story(model=MODEL, **change)
    assert story.sentence != STORY.sentence
    assert chunks_figure(story=story).to_json() != chunks_figure(story=STORY).to_json()


def test_figures_are_the_same_twice_and_small():
    assert chunks_figure().to_json() == chunks_figure().to_json()
    assert len(chunks_figure(story=tell(TILES[0, 1], 64, None, 0.0, "float32"), theme=DARK).to_json()) < 150_000


@pytest.mark.parametrize("shift", [-16.0, 16.0])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_extremes_can_be_drawn(numbers, shift):
    for chunk in (2, 128):
        story = tell(TILES[STORY.place], chunk, "softplus", shift, numbers)
        assert len(chunks_figure(story=story, show=0).data) >= 7


def test_limits_that_would_be_written_over_each_other_are_not_both_named():
    def named(**change):
        notes = chunks_figure(story=chunks_story(model=MODEL, **change)).layout.annotations
        return [word for word in NUMBERS if any(word in note.text.replace("<b>", "").split("<br>")[:-1] for note in notes)]

    assert named() == ["float16", "bfloat16", "float32"]
    far = named(chunk=64, gate="softplus", shift=16.0)  # on this scale the smallest limits lie on top of each other
    assert "float32" in far and "float16" not in far
    chosen = named(chunk=64, gate="softplus", shift=16.0, numbers="float16")  # the chosen one is named, at its neighbors' cost
    assert "float16" in chosen and not {"bfloat16", "float32"} & set(chosen)


# ---- wrong input ----

@pytest.mark.parametrize("bad, said", [
    ({"text": ""}, "^text must hold"), ({"text": "Acme"}, "^text: this story is for 2 to"),
    ({"text": "The zebra"}, "^text: the word 'zebra'"),
    ({"text": "Acme " * (LONGEST + 1)}, "^text: this story"), ({"chunk": 0}, "^chunk must be"), ({"chunk": 16.0}, "^chunk must be"),
    ({"chunk": True}, "^chunk must be"), ({"gate": "relu"}, "^gate must be one of"), ({"shift": math.inf}, "^shift must be"),
    ({"shift": math.nan}, "^shift must be"), ({"numbers": "int4"}, "^numbers must be one of float16"), ({"head": (3, 0)}, "^head must be"),
    ({"model": K3ForCausalLM(K3Config.meeting().replace(linear_mixer="mla"))}, "^model has no KDA layer"),
    ({"model": K3ForCausalLM(K3Config.meeting().replace(vocab_size=64))}, "^model reads 64 words"),
])
def test_a_wrong_argument_is_named_in_one_sentence(bad, said):
    with pytest.raises(ValueError, match=said) as error:
        chunks_story(**{"model": MODEL, **bad})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("show", [4, -5, 1.5, True])
def test_a_chunk_that_is_not_there(show):
    with pytest.raises(ValueError, match="^show must be a whole number from -4 to 3"):
        chunks_figure(story=STORY, show=show)


# ---- panel ----

def test_the_panel_starts_at_its_arguments():
    panel = chunks_panel(model=MODEL, chunk=8, gate="softplus", shift=3.0, numbers="float64")
    assert (panel.trace.chunk, panel.trace.gate, panel.trace.shift, panel.trace.numbers) == (8, "softplus", 3.0, "float64")
    with pytest.raises(ValueError, match="^chunk must be one of 4, 8, 16, 32, 64 in this panel, got 17"):
        chunks_panel(chunk=17)


def test_every_control_changes_the_picture():
    panel = chunks_panel()
    assert isinstance(panel.figure, go.Figure) and panel.describe() == STORY.sentence
    for values in ({"chunk": 3}, {"gate": "softplus"}, {"shift": 5}, {"numbers": "float64"}, {"head": "1.2"}, {"show": 0}):
        picture, sentence = panel.picture, panel.describe()
        panel.set(values)
        assert panel.picture != picture and (panel.describe() != sentence or "show" in values)


def test_larger_chunks_are_fewer_and_the_one_shown_follows():
    panel = chunks_panel()
    panel.set({"show": 3})
    panel.set({"chunk": 4})
    assert panel.values["show"] == 0 and panel.controls[-1]["labels"] == ("words 1 to 64",)


def test_an_impossible_wish_is_a_sentence_and_the_picture_stays():
    panel = chunks_panel()
    before = panel.picture
    for wish in ({"chunk": 9}, {"numbers": "int8"}, {"shift": 99}):
        panel.set_state({"values": {**panel.values, **wish}, "asked": panel.asked + 1})
        assert panel.problem and panel.picture == before and panel.answered == panel.asked
        panel.values = dict(panel._drawn)
