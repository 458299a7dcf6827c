"""The dials: ink is the operator's own state, the clock is a search done twice, and controls change story, picture and sentence."""
import base64
import math

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from k3viz import decay_figure, decay_panel, decay_story
from k3viz.decay.learned import read_heads
from k3viz.decay.story import GATES, LONGEST, READING, SHIFT, TEXT, look_alike
from k3viz.theme import DARK
from minimodel import K3Config, K3ForCausalLM, kda, record
from minimodel.pretrained import load_pretrained
from minimodel.tasks import meeting

STORY = decay_story()
MODEL = load_pretrained()
LEARNED = decay_story(model=MODEL)


def levels(figure, n):
    """The drawn percentages of one map [rows, words]."""
    z = next(t for t in figure.data if t.type == "heatmap" and t.xaxis == f"x{n}").z
    return np.frombuffer(base64.b64decode(z["bdata"]), np.uint8).reshape([int(x) for x in z["shape"].split(",")])


def line(figure, name):
    return next(t for t in figure.data if t.name == name)


# ---- the story ----

def test_decays_are_the_gates_own_equations():
    np.testing.assert_allclose(STORY.g, -5 / (1 + np.exp(-STORY.z)), rtol=1e-12)
    soft = decay_story(gate="softplus")
    np.testing.assert_allclose(soft.g, -np.log1p(np.exp(soft.z)), rtol=1e-12)
    np.testing.assert_allclose(STORY.half_lives(0), math.log(0.5) / np.log(STORY.alpha[0]), rtol=1e-9)


def test_the_dials_by_hand_start_where_k3_starts():
    alpha = STORY.alpha[0]
    assert alpha.shape == (128,) and (np.diff(alpha) < 0).all()
    assert alpha.max() == pytest.approx(0.995, abs=1e-3) and alpha.min() == pytest.approx(0.62, abs=5e-3)


@pytest.mark.parametrize("story", [STORY, LEARNED], ids=["by hand", "learned"])
@pytest.mark.parametrize("one", [False, True], ids=["128 dials", "one"])
def test_ink_is_what_the_operator_holds(story, one):
    """With random values for the words, kda's state is the ink times these values."""
    T, K = story.g.shape
    v = torch.randn(1, T, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    g = torch.full((T, K), -math.log(2) / story.one_half_life, dtype=torch.float64) if one else torch.tensor(story.g)
    k = torch.tensor(story.k)[None, :, None]
    _, state = kda(k, k, v, g[None, :, None], torch.tensor(story.beta)[None, :, None], backend="recurrent")
    ink = (story.one_ink if one else story.ink)[-1]
    np.testing.assert_allclose(ink @ v[0, :, 0].numpy(), state[0, 0].numpy(), atol=1e-12)


def test_a_fact_by_hand_fades_as_the_closed_form_says():
    """The last fact is erased by nobody: nothing written later shares a channel with it."""
    s = max(t for t, fact in enumerate(STORY.facts) if fact)
    after = STORY.g[s + 1 :].sum(0)
    assert STORY.kept(-1)[s] == pytest.approx(float((STORY.k[s] ** 2 * np.exp(after)).sum()), rel=1e-12)
    assert (STORY.kept(s)[s + 1 :] == 0).all()


def test_128_dials_keep_facts_and_drop_filler_where_one_dial_can_not():
    facts, others = STORY.kept_by_kind(-1)
    assert facts > 2 * others
    for half_life in (0.5, 2, 8, 32, 128, 1024):
        one_facts, one_others = decay_story(one_half_life=half_life).kept_by_kind(-1, one=True)
        assert one_facts < one_others  # the facts came first, so one speed always keeps more of what came after


def test_learned_dials_keys_and_states_are_the_models():
    layer, h = LEARNED.place
    reader = load_pretrained().double()
    with torch.no_grad(), record(reader) as trace:
        reader(torch.tensor([meeting.encode(TEXT)]))
    alpha, k, v, state = (trace[f"layers.{layer}.kda.{x}"][0, :, h].numpy() for x in ("alpha", "k", "v", "state"))
    order = LEARNED.channels
    np.testing.assert_allclose(LEARNED.alpha, alpha[:, order], atol=1e-12)
    np.testing.assert_array_equal(LEARNED.k, k[:, order])
    np.testing.assert_allclose(LEARNED.ink[-1] @ v, state[-1][order], atol=1e-9)


def test_the_model_keeps_facts_apart_from_other_words():
    facts, others = LEARNED.kept_by_kind(-1)
    assert facts > 3 * others
    for place, head in read_heads(MODEL, TEXT).items():
        other = decay_story(model=MODEL, head=place)
        assert facts - others >= np.subtract(*other.kept_by_kind(-1)) - 1e-12 and head.place == place


def test_a_correction_is_seen_in_the_ink():
    """The head that keeps facts wipes off Tuesday when Thursday comes."""
    before = decay_story(model=MODEL, text=meeting.ARTICLE[0], head=(0, 1))
    after = decay_story(model=MODEL, text=" ".join(meeting.ARTICLE), head=(0, 1))
    day = before.tokens.index("Tuesday")
    assert after.kept(-1)[day] < before.kept(-1)[day]


# ---- the clock ----

@pytest.mark.parametrize("one", [False, True])
def test_the_clock_equals_a_search_through_all_ages(one):
    g = np.array([-math.log(2) / STORY.one_half_life]) if one else STORY.mean_g
    every = np.arange(1, 3001)
    faded = np.exp(np.outer(every, g))
    youngest, oldest = STORY.clock(np.array([1, 7, 60, 300, 900]), one=one)
    for age, young, old in zip((1, 7, 60, 300, 900), youngest, oldest, strict=True):
        same = every[(np.abs(faded - faded[age - 1]) <= READING + 1e-12).all(1)]
        assert young == same.min()
        assert old == same.max() if np.isfinite(old) else same.max() == every[-1]


def test_128_dials_tell_longer_ages_than_one():
    assert np.isfinite(STORY.clock(np.array([500]))[1]).all()
    assert not np.isfinite(STORY.clock(np.array([500]), one=True)[1]).any()


def test_channels_that_never_fade_tell_nothing():
    youngest, oldest = look_alike(np.zeros(4), np.array([5, 50]))
    assert youngest.tolist() == [1, 1] and np.isinf(oldest).all()


# ---- figure ----

def test_the_figure_draws_the_storys_numbers():
    figure = decay_figure(story=STORY, follow=10)
    dials = line(figure, "dials")
    np.testing.assert_allclose(dials.x, STORY.z[-1], atol=1e-3)
    np.testing.assert_allclose(dials.y, STORY.half_lives(-1), rtol=1e-3)
    assert line(figure, "followed dial").x[0] == pytest.approx(STORY.z[-1, 9], abs=1e-3)
    for n, ink in (("4", STORY.ink), ("5", STORY.one_ink)):
        pooled = np.abs(ink[-1]).reshape(64, 2, -1).max(1) / np.abs(STORY.k).max()
        np.testing.assert_allclose(levels(figure, n), 100 * pooled, atol=0.51)
    ages = np.array(line(figure, "one dial, youngest").x)
    np.testing.assert_array_equal(line(figure, "128 dials, youngest").y, STORY.clock(ages)[0])
    assert figure.layout.title.text.replace("<br>", " ") == STORY.sentence()


def test_words_to_come_are_blank():
    assert (levels(decay_figure(story=STORY, now=4), "4")[:, 5:] == 0).all()


@pytest.mark.parametrize("change", [
    {"gate": "softplus"}, {"shift": 1.0}, {"one_half_life": 32.0}, {"text": "The meeting is on Friday."}, {"model": MODEL},
])
def test_another_input_gives_another_story_and_figure(change):
    story = decay_story(**change)
    assert story.sentence() != STORY.sentence()
    assert decay_figure(story=story).to_json() != decay_figure(story=STORY).to_json()


def test_figures_are_the_same_twice_and_small():
    assert decay_figure().to_json() == decay_figure().to_json()
    assert len(decay_figure(story=LEARNED).to_json()) < 100_000


@pytest.mark.parametrize("shift", [-SHIFT, SHIFT])
@pytest.mark.parametrize("gate", GATES)
def test_extreme_dials_can_be_drawn(gate, shift):
    for model in (None, MODEL):
        figure = decay_figure(story=decay_story(model=model, gate=gate, shift=shift), theme=DARK)
        assert np.isfinite(np.array(line(figure, "dials").y)).all()


def test_a_text_without_facts_and_a_single_word():
    assert "facts" not in decay_story(text="Lunch is at noon.").sentence()
    assert "After 1 word," in decay_story(text="Acme").sentence()


# ---- wrong input ----

@pytest.mark.parametrize("bad, said", [
    ({"text": " "}, "^text must hold"), ({"text": 7}, "^text must hold"), ({"text": "The zebra"}, "^text: the word 'zebra'"),
    ({"text": "Acme " * (LONGEST + 1)}, f"^text: this story is for 1 to {LONGEST} words, got {LONGEST + 1}"),
    ({"text": "\u2603"}, "^text"), ({"gate": "relu"}, "^gate must be one of bounded, softplus, got 'relu'"), ({"shift": 99}, "^shift"),
    ({"shift": math.nan}, "^shift"), ({"one_half_life": 0}, "^one_half_life"), ({"one_half_life": "8"}, "^one_half_life"),
    ({"head": (0, 0)}, "^head needs a model"), ({"head": (3, 0), "model": MODEL}, "^head must be"),
    ({"model": K3ForCausalLM(K3Config.meeting().replace(linear_mixer="mla"))}, "^model has no KDA layer"),
    ({"model": K3ForCausalLM(K3Config.meeting().replace(vocab_size=64))}, "^model reads 64 words"),
])
def test_a_wrong_argument_is_named_in_one_sentence(bad, said):
    with pytest.raises(ValueError, match=said) as error:
        decay_story(**bad)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bad", [{"now": 99}, {"now": True}, {"age": 0}, {"age": 5000}, {"follow": 0}, {"follow": 129}, {"follow": 1.5}])
def test_a_wrong_place_in_the_figure_is_named(bad):
    with pytest.raises(ValueError, match=f"^{next(iter(bad))} must be a whole number from"):
        decay_figure(story=STORY, **bad)


# ---- panel ----

def ask(panel, **values):
    panel.set_state({"values": {**panel.values, **values}, "asked": panel.asked + 1})


def test_the_panel_starts_by_hand_and_shows_the_model_on_request():
    panel = decay_panel()
    assert panel.trace.place is None and isinstance(panel.figure, go.Figure) and panel.describe() == panel.trace.sentence()
    panel.set({"look": "auto"})
    assert panel.trace.place == LEARNED.place and panel.describe() == LEARNED.sentence()
    panel.set({"look": "2.1"})
    assert panel.trace.place == (1, 0)


@pytest.mark.parametrize("values", [
    {"shift": 2.0}, {"gate": "softplus"}, {"one": 9}, {"age": 3}, {"now": 5}, {"text": "Lunch is at noon."},
])
def test_every_control_changes_picture_and_sentence(values):
    panel = decay_panel()
    picture, sentence = panel.picture, panel.describe()
    panel.set(values)
    assert panel.picture != picture and panel.describe() != sentence


def test_following_a_dial_names_it():
    panel = decay_panel()
    panel.set({"follow": 7})
    assert any("dial 7 (channel 7)" in note.text for note in panel.figure.layout.annotations)


def test_an_impossible_note_is_a_sentence_and_the_picture_stays():
    panel = decay_panel()
    before = panel.picture
    for text in ("", "Acme " * 500, "zebra", "\u0000\u2603"):
        ask(panel, text=text)
        assert panel.problem.startswith("text") and panel.picture == before and panel.answered == panel.asked
    ask(panel, text="The meeting is on Friday.")
    assert panel.problem == "" and panel.trace.tokens[4] == "Friday" and panel.values["now"] == 5


def test_a_panel_with_a_model_starts_there():
    panel = decay_panel(model=K3ForCausalLM(K3Config.meeting(), seed=1), text="The meeting is on Friday.", shift=1.0)
    assert panel.trace.place is not None and panel.trace.shift == 1.0
    own = K3ForCausalLM(K3Config.meeting().replace(linear_attn_config=softplus_gate()), seed=1)
    assert decay_panel(model=own).trace.gate == "softplus"


def softplus_gate():
    from dataclasses import replace

    return replace(K3Config.meeting().linear_attn_config, gate_lower_bound=None)
