"""Gated MLA: the traced layer is its equation, forms cost what the code does, controls change picture and sentence."""
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from k3viz import mla_figure, mla_panel, mla_story
from k3viz.mla.forms import NAMES, count_forms
from k3viz.mla.story import NOTES, ROWS, WORDS
from k3viz.theme import DARK
from minimodel import GatedMLA, K3Config, K3ForCausalLM, record
from minimodel.cache import Rows
from minimodel.pretrained import load_pretrained
from minimodel.tasks import meeting

TEXT = "The meeting is on Tuesday. The meeting has moved to Thursday."


@pytest.fixture(scope="module")
def model():
    return load_pretrained()


def drawn(figure, name):
    return next(t for t in figure.data if t.name == name)


# ---- by hand ----

@pytest.mark.parametrize("recency", [0.0, 6.0, 24.0])
def test_attention_by_hand_is_a_softmax_over_matches_and_lateness(recency):
    story, n = mla_story(recency=recency), len(NOTES)
    late = np.array([i / (n - 1) for i in range(n)] + [0.0])
    for h, row in enumerate(ROWS):
        scores = 12.0 * np.array([r == row for r, _ in NOTES] + [False]) + recency * late
        p = np.exp(scores - scores.max())
        np.testing.assert_allclose(story.attention[h, -1], p / p.sum(), atol=1e-5)  # the card's norm adds 1e-6 to its mean square


@pytest.mark.parametrize("slot", ROWS)
def test_what_comes_out_is_the_gated_sum_of_what_heads_read(slot):
    story = mla_story(slot=slot)
    gate = 1 / (1 + np.exp(-6.0 * np.where(np.array(ROWS) == slot, 1, -1)))
    np.testing.assert_allclose(story.gate[-1], np.repeat(gate[:, None], story.gate.shape[-1], 1), atol=1e-12)
    expected = (gate[:, None] * story.attention[:, -1, : len(WORDS)]).sum(0)
    for word, strength in story.answers[-1]:
        assert strength == pytest.approx(expected[WORDS.index(word)], abs=1e-5)
    assert story.answers[-1][0][0] == {"day": "Thursday", "client": "Acme", "room": "4B", "attendees": "six"}[slot]


def test_without_a_preference_for_later_notes_two_days_tie():
    said = dict(mla_story(recency=0).answers[-1])
    assert said["Tuesday"] == pytest.approx(said["Thursday"]) and said["Tuesday"] == pytest.approx(0.5, abs=0.01)
    assert dict(mla_story(slot="client", recency=24).answers[-1])["Thursday"] > 0.9  # too much of it, and every head reads the update


def test_the_gate_held_open_mixes_all_heads_and_held_shut_passes_nothing():
    assert {w for w, x in mla_story(gate="open").answers[-1] if x > 0.9} == {"Acme", "Thursday", "4B", "six"}
    shut = mla_story(gate="shut")
    assert shut.answers[-1] == () and (shut.gate == 0).all() and "Nothing comes out" in shut.sentence


# ---- learned ----

def test_the_learned_story_is_the_models_own_run(model):
    story = mla_story(model=model, text=TEXT)
    ids = torch.tensor([meeting.encode(f"{TEXT} {meeting.question('day')}")])
    with torch.no_grad(), record(model) as trace:
        p = model(ids).logits[0, -1].softmax(-1)
    for name in ("attention", "latent"):
        np.testing.assert_allclose(getattr(story, name), trace[f"layers.3.mla.{name}"][0].numpy(), atol=1e-4)
    np.testing.assert_allclose(story.gate, trace["layers.3.mla.gate"][0].numpy(), atol=1e-4)
    word, probability = story.answers[-1][0]
    assert word == meeting.VOCABULARY[int(p.argmax())] == "Thursday" and probability == pytest.approx(float(p.max()), abs=1e-4)


def test_a_held_gate_is_the_layer_left_out(model):
    story = mla_story(model=model, text=TEXT, gate="shut")
    muted = load_pretrained().double()
    muted.model.layers[3].self_attn.o_proj.weight.data.zero_()
    ids = torch.tensor([meeting.encode(f"{TEXT} {meeting.question('day')}")])
    with torch.no_grad():
        p = muted(ids).logits[0, -1].softmax(-1)
    assert story.answers[-1][0][1] == pytest.approx(float(p.max()), abs=1e-12)
    assert "from the other layers" in story.sentence


@pytest.mark.parametrize("learned", [False, True])
def test_both_forms_give_the_same_output(model, learned):
    story = mla_story(model=model) if learned else mla_story()
    assert story.off < 1e-12


def test_the_story_leaves_the_model_alone(model):
    before = {name: p.clone() for name, p in model.state_dict().items()}
    mla_story(model=model, gate="shut")
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert not model.model.layers[3].self_attn._forward_pre_hooks and model.lm_head.weight.dtype == torch.float32


# ---- the two forms ----

def counted(config, read, tokens):
    """FLOPs that torch counts in one pass of ``tokens`` after ``read`` others, without the projections from and to the hidden state."""
    with torch.device("meta"):
        layer, x = GatedMLA(config), torch.empty(1, read + tokens, config.hidden_size)
        rows = Rows()
        with torch.no_grad():
            if read:
                layer(x[:, :read], cache=rows)
            with record(layer), FlopCounterMode(display=False) as counter:  # watched, the layer multiplies without padding for a kernel
                layer(x[:, read:], cache=rows)
    D, H = config.hidden_size, config.num_attention_heads
    down = config.kv_lora_rank + config.qk_rope_head_dim
    query = D * config.q_lora_rank + config.q_lora_rank * H * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    return counter.get_total_flops() - 2 * tokens * (query + D * down + 2 * D * H * config.v_head_dim)


@pytest.mark.parametrize("config", [K3Config.meeting(), K3Config.k3()], ids=["meeting", "k3"])
def test_the_formula_counts_what_the_layer_does(config):
    assert counted(config, 63, 1) == count_forms(config, 64, 1).flops("absorbed")
    assert counted(config, 32, 32) == count_forms(config, 64, 32).flops("rebuilt")


def test_numbers_kept_are_those_of_real_caches():
    forms = mla_story().forms
    assert (forms.numbers("absorbed"), forms.numbers("kept")) == (576, 96 * 256 + 64)
    assert mla_story().latent.shape[1] == 21


@pytest.mark.parametrize("context", [100, 4096, 131_072])
def test_break_even_is_where_rebuilding_becomes_cheaper(context):
    forms = count_forms(None, context, 1)
    T = forms.break_even
    assert forms.flops("rebuilt", T) < forms.flops("absorbed", T)
    assert forms.flops("rebuilt", T - 1) >= forms.flops("absorbed", T - 1)


# ---- figure and panel ----

def test_the_figure_draws_the_storys_numbers(model):
    for story in (mla_story(), mla_story(model=model, text=TEXT)):
        figure = mla_figure(story=story)
        np.testing.assert_allclose(np.array(drawn(figure, "attention").z, float), 100 * story.attention[:, -1], atol=0.006)
        np.testing.assert_allclose(np.array(drawn(figure, "cards").z, float), story.latent.T, atol=0.006)
        np.testing.assert_allclose(np.array(drawn(figure, "gate").z, float), 100 * story.gate[-1], atol=0.06)
        for form, name in NAMES.items():
            assert drawn(figure, f"{name}, now").y == (story.forms.flops(form),)


def test_cards_that_are_not_read_yet_are_left_out():
    cards = drawn(mla_figure(position=1), "cards").z
    assert all(x is None for row in cards for x in row[2:]) and all(x is not None for row in cards for x in row[:2])
    with pytest.raises(ValueError, match="^position must be a whole number from -6 to 5, got 6"):
        mla_figure(position=6)


@pytest.mark.parametrize("change", [{"slot": "room"}, {"recency": 0}, {"gate": "open"}, {"at_once": 512}, {"context": 1000},
                                    {"config": K3Config.mini()}])
def test_another_input_gives_another_figure(change):
    assert mla_figure(story=mla_story(**change)) != mla_figure()
    assert mla_figure().to_json() == mla_figure().to_json()


def test_the_panel_answers_to_its_controls(model):
    panel = mla_panel()
    assert len(panel.controls[0]["labels"]) == len(panel.trace.tokens) and panel.values["position"] == 5
    assert "Thursday 0.99" in panel.describe() and panel.hidden == ["text"]
    panel.set({"slot": "room"})
    assert "Out comes 4B 1.00" in panel.describe()
    panel.set({"position": 1, "slot": "day"})
    assert "day head reads 'day: Tuesday'" in panel.describe() and "Out comes Tuesday 0.01" in panel.describe()  # nobody has asked yet
    assert drawn(panel.figure, "cards").z[0][2] is None
    panel.set({"at_once": 9, "position": 5})
    assert panel.trace.forms.at_once == 512 and "512 tokens" in panel.describe()
    panel.set({"mode": "learned"})
    assert panel.values["position"] == len(panel.trace.tokens) - 1 and panel.hidden == ["recency"]
    panel.set({"text": TEXT, "slot": "day"})
    assert "The model's answer: Thursday" in panel.describe()
    panel.set({"text": TEXT.replace("Thursday", "Friday")})
    assert "Friday" in panel.describe()
    assert len(panel.figure.to_json()) < 100_000


def test_a_dark_page_gets_a_dark_picture():
    panel = mla_panel()
    panel.set_state({"dark": True})
    assert panel.picture["layout"]["font"]["color"] == DARK.ink


@pytest.mark.parametrize("text", ["", " ", "Hello Thursday.", "é ☃", "The " * 65])
def test_a_text_that_cannot_be_read_becomes_a_sentence(text):
    panel = mla_panel(model=K3ForCausalLM(K3Config.meeting(), seed=1))
    before = panel.picture
    panel.set_state({"values": {**panel.values, "text": text}, "asked": panel.asked + 1})
    assert panel.problem.startswith("text") and "\n" not in panel.problem and panel.picture == before


@pytest.mark.parametrize("bad, name", [
    ({"slot": "weather"}, "slot"), ({"slot": "budget"}, "slot"), ({"gate": "ajar"}, "gate"), ({"recency": -1}, "recency"),
    ({"recency": float("nan")}, "recency"), ({"text": TEXT}, "text"), ({"context": 0}, "context"), ({"at_once": 1.5}, "at_once"),
    ({"model": K3ForCausalLM(K3Config.meeting().replace(vocab_size=99))}, "model"),
    ({"model": K3ForCausalLM(K3Config.meeting().replace(full_mixer="kda"))}, "model"),
])
def test_a_wrong_argument_is_named_in_one_sentence(bad, name):
    with pytest.raises(ValueError) as error:
        mla_story(**bad)
    assert str(error.value).startswith(name) and "\n" not in str(error.value)
