"""The toolbox: bytes are real tensors', answers the models' own, the window's reach exact; controls change story, picture and sentence."""
import html

import numpy as np
import pytest
import torch

from k3viz import toolbox_figure, toolbox_panel, toolbox_story
from k3viz.theme import DARK, format_bytes, format_probability
from k3viz.toolbox.reading import cut_to_window, rebuild_error, state_weights, trained
from k3viz.toolbox.story import CHAT, SLOTS, TEXT, ToolboxStory, notes_of, text_length
from minimodel import K3ForCausalLM, cache_bytes, record
from minimodel.tasks import meeting
from minimodel.toolbox import TECHNIQUES, WINDOW, load_toolbox, toolbox_config

STORY = toolbox_story()
IDS = meeting.encode(TEXT)


def words(story):
    return [" ".join(story.tokens[a:b]) for a, b in story.notes]


# ---- what is kept ----

def test_the_articles_five_notes_and_a_window_of_four_of_them():
    assert words(STORY) == ["The Acme", "planning meeting is Tuesday ,", "in room 4B ,", "with six people attending .",
                            "The meeting has moved to Thursday ."]
    assert sum(b - a for a, b in STORY.notes[1:]) == WINDOW == STORY.window
    assert list(STORY.tray()) == words(STORY)[1:]  # client: Acme has slid out, the other four remain
    before = toolbox_story(read=16)
    assert list(before.tray()) == words(STORY)[:4]  # and before the update all four original ones were there


def test_notes_cover_any_text():
    for text in ("Acme", "Correction: the room is 4B, not 3A. Lunch is at noon", "Monday Tuesday Wednesday", "The client is Acme"):
        notes = notes_of(meeting.encode(text))
        assert notes[0][0] == 0 and notes[-1][1] == text_length(text)
        assert all(a[1] == b[0] and a[0] < a[1] for a, b in zip(notes, notes[1:], strict=False))


@pytest.mark.parametrize("settings", [{}, {"window": 5}, {"groups": 4}, {"latent": 8}, {"chat": 3, "read": 30}, {"read": 0}])
def test_bytes_are_those_of_real_caches_and_of_the_closed_form(settings):
    story = toolbox_story(**settings)
    ids = [meeting.VOCABULARY.index(t) for t in story.tokens[: story.read]]
    for k in story.kept:
        config = story.config(k.technique)
        cache = (model := K3ForCausalLM(config, seed=1)).new_cache(1)
        with torch.no_grad():
            for piece in filter(None, (ids[:5], ids[5:6], ids[6:])):  # in pieces, where the story reads at once
                model(torch.tensor([piece]), cache=cache)
        assert k.bytes == cache.nbytes
        if ids:
            assert k.bytes == cache_bytes(config, len(ids), dtype=torch.float32).total
            assert k.per_token == cache_bytes(config, len(ids) + 1, dtype=torch.float32).total - k.bytes
        if k.technique != "kda":
            assert 4 * sum(k.numbers) * config.num_hidden_layers == k.bytes


def test_sharing_divides_and_shrinking_makes_smaller():
    mha, gqa, mla = (STORY.of(t).bytes for t in ("mha", "gqa", "mla"))
    assert mha == 4 * gqa and mla < gqa
    assert toolbox_story(groups=4).of("gqa").bytes == mha


# ---- answers ----

def test_all_techniques_fill_the_articles_blank_with_thursday():
    for k in STORY.kept:
        assert k.answer[0][0] == "Thursday", k.technique


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("slot", SLOTS)
def test_answers_are_the_models_own(technique, slot):
    story = toolbox_story(slot=slot, technique=technique, read=16)
    model = load_toolbox(technique)
    cache = model.new_cache(1)
    with torch.no_grad():  # notes first, then the question from the cache: another way than the story's
        model(torch.tensor([IDS[:16]]), cache=cache)
        p = model(torch.tensor([meeting.encode(meeting.question(slot))]), cache=cache).logits[0, -1].softmax(-1)
    for word, said in story.of(technique).answer:
        assert float(p[meeting.encode(word)[0]]) == pytest.approx(said, abs=2e-4)
    word, said = story.of(technique).answer[0]
    assert f"{word} {format_probability(said)}" in story.sentence


def test_sizes_that_were_not_trained_change_bytes_and_not_the_answer_and_say_so():
    for technique, change in (("gqa", {"groups": 2}), ("mla", {"latent": 8})):
        story, plain = toolbox_story(technique=technique, **change), toolbox_story(technique=technique)
        assert story.of(technique).bytes != plain.of(technique).bytes
        assert story.of(technique).answer == plain.of(technique).answer
        assert not story.of(technique).as_trained and "that of the trained one" in story.sentence
        assert [k.technique for k in story.kept if not k.as_trained] == [technique]


# ---- what can be read ----

def test_one_layer_can_no_longer_read_the_client_and_the_stack_can():
    story = toolbox_story(slot="client")
    acme = story.tokens.index("Acme")
    assert story.fact == acme and story.distance() == len(story.tokens) - 1 - acme >= story.window
    for layer in range(1, 5):
        assert np.isnan(toolbox_story(slot="client", layer=layer).heads[:, acme]).all()
    assert story.influence[acme] > 0
    assert "no longer reads it" in story.sentence and "which is still enough" in story.sentence


def logits_with(model, ids, place, word):
    changed = [*ids[:place], meeting.encode(word)[0], *ids[place + 1 :]]
    with torch.no_grad():
        return model(torch.tensor([changed])).logits[0, -1]


@pytest.mark.parametrize("window", [3, 6])
def test_the_stack_reads_layers_times_window_minus_one_back_and_not_a_token_further(window):
    story = toolbox_story(slot="client", window=window, technique="sliding_window")
    ids = [meeting.VOCABULARY.index(t) for t in story.tokens]
    model, reach, last = cut_to_window(load_toolbox("sliding_window"), window), 4 * (window - 1), len(ids) - 1
    for place in range(0, len(ids) - 1, 2 if window == 6 else 1):
        same = torch.equal(logits_with(model, ids, place, "Globex"), logits_with(model, ids, place, "Hooli"))
        assert same == (last - place > reach)
        assert (story.influence[place] == 0) == (last - place > reach) or story.influence[place] < 1e-5


def test_a_long_chat_takes_the_client_out_of_reach_and_what_is_said_is_a_guess():
    story = toolbox_story(slot="client", chat=14)
    assert story.influence[story.fact] == 0 and "not enough either" in story.sentence
    assert [k.technique for k in story.kept if k.guess] == ["sliding_window"] and "it guesses" in story.sentence
    other = toolbox_story(slot="client", chat=14, text=TEXT.replace("Acme", "Globex"))  # the guess doesn't know the client
    assert other.of("sliding_window").answer == story.of("sliding_window").answer
    assert other.of("mha").answer != story.of("mha").answer
    assert not story.of("sliding_window").reachable[story.fact] and story.of("mha").reachable[story.fact]
    assert " ".join(story.tokens).count(CHAT[0].split()[0]) >= 1


def test_what_the_notes_do_not_say_is_guessed():
    story = toolbox_story(text="The meeting has moved to Thursday.", slot="room")
    assert all(k.guess for k in story.kept) and "name none" in story.sentence


def test_a_moved_window_keeps_the_trained_weights():
    model = trained("sliding_window")
    other = cut_to_window(model, 9)
    assert other.config == model.config.replace(sliding_window=9) and cut_to_window(trained("mha"), 9) is trained("mha")
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("technique", ["mha", "gqa", "mla", "sliding_window"])
def test_heads_are_the_recorded_attention(technique):
    story = toolbox_story(technique=technique, layer=2)
    ids = torch.tensor([[meeting.VOCABULARY.index(t) for t in story.tokens]])
    with torch.no_grad(), record(model := load_toolbox(technique)) as trace:
        model(ids)
    p = trace[f"layers.1.{'mla' if technique == 'mla' else 'mixer'}.attention"][0, :, -1]
    read = ~np.isnan(story.heads)
    assert np.allclose(story.heads[read], p.numpy()[read], atol=1e-5)
    assert np.allclose(np.nansum(story.heads, 1), 1, atol=1e-4) and np.allclose(story.influence.sum(), 1, atol=1e-4)


def test_the_states_weights_give_what_the_layer_reads():
    model = load_toolbox("kda").double()
    with torch.no_grad(), record(model) as trace:
        model(torch.tensor([IDS]))
    for layer in range(4):
        q, k, v, alpha, beta, o = (trace[f"layers.{layer}.kda.{x}"][0] for x in ("q", "k", "v", "alpha", "beta", "output"))
        w = state_weights(q, k, alpha, beta) * q.shape[-1] ** -0.5
        assert torch.allclose(torch.einsum("ht,thv->hv", w, v), o[-1], atol=1e-12)


def test_a_value_that_was_erased_counts_for_nothing():
    key = torch.nn.functional.normalize(torch.ones(3, 1, 4, dtype=torch.float64), dim=-1)
    one = torch.ones(3, 1, dtype=torch.float64)
    w = state_weights(key, key, torch.full((3, 1, 4), 0.9, dtype=torch.float64), one)
    assert torch.allclose(w, torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64))  # the same key written three times in full
    w = state_weights(key, key, torch.full((3, 1, 4), 0.9, dtype=torch.float64), 0.5 * one)
    assert torch.allclose(w, 0.5 * torch.tensor([[0.45**2, 0.45, 1.0]], dtype=torch.float64))


def test_more_numbers_rebuild_better_and_64_lose_nothing():
    errors = [rebuild_error(trained("mha"), n) for n in (8, 24, 48, 64)]
    assert errors == sorted(errors, reverse=True) and errors[0] > 0.1 and errors[-1] < 1e-5  # keys and values come from 64 channels


def test_the_rebuild_error_is_that_of_a_projection():
    model = load_toolbox("mha")
    kept = total = 0.0
    caches = [[] for _ in range(4)]
    for note in meeting.held_out_notes(1, 8, projects=1, length=64, final_questions=1):
        cache = model.new_cache(1)
        with torch.no_grad():
            model(torch.tensor([note.ids]), cache=cache)
        for rows, slot in zip(caches, cache.layers, strict=True):
            rows.append(slot.tensors()["rows"][0].flatten(1).double())
    for rows in caches:
        x = torch.cat(rows)
        _, basis = torch.linalg.eigh(x.T @ x)
        best = basis[:, -10:]  # the ten directions that hold most
        kept, total = kept + float((x - x @ best @ best.T).square().sum()), total + float(x.square().sum())
    assert rebuild_error(trained("mha"), 10) == pytest.approx((kept / total) ** 0.5, abs=1e-5)


# ---- figure and panel ----

@pytest.mark.parametrize("settings", [{}, {"read": 0}, {"technique": "kda", "read": 3}, {"chat": 14, "slot": "room"}, {"text": "Acme"},
                                      {"technique": "mla", "latent": 4}, {"technique": "gqa", "groups": 2}, {"technique": "mha"}])
def test_the_figure_holds_the_storys_numbers(settings):
    story = toolbox_story(**settings)
    figure = toolbox_figure(story=story, theme=DARK)
    drawn = {t.name: t for t in figure.data}
    notes = html.unescape(" ".join(a.text for a in figure.layout.annotations))  # "> 99.9 %" may be written "&gt; 99.9 %"
    for k in story.kept:
        assert f"<b>{format_bytes(k.bytes)}</b>" in notes and f"{k.answer[0][0]} {format_probability(k.answer[0][1])}" in notes
    if story.read:
        bars = drawn["MHA, kept"]
        assert len(bars.y) == story.read and max(bars.y) == pytest.approx(0.8)
    likeliest = drawn["likeliest"]
    assert list(likeliest.x) == pytest.approx([k.answer[0][1] for k in story.kept], abs=1e-4)
    rows = drawn["weights"].z
    assert len(rows) == len(story.heads) + 1 and len(rows[0]) == len(story.tokens)


@pytest.mark.parametrize("technique, far", [("mha", 1_048_576), ("kda", 65_536), ("sliding_window", 2048)])
def test_the_longest_context_is_the_configs(technique, far, monkeypatch):
    monkeypatch.setattr(ToolboxStory, "config", lambda self, name: toolbox_config(name).replace(max_position_embeddings=far))
    config = STORY.config(technique)
    notes = " ".join(a.text for a in toolbox_figure(story=STORY.again(technique=technique)).layout.annotations).replace("<br>", " ")
    assert f"At {far:,} tokens it would keep {format_bytes(cache_bytes(config, far, dtype=torch.float32).total)} (by the formula)." in notes


def test_the_window_row_shows_what_slid_out():
    carried = next(t for t in toolbox_figure(story=STORY).data if t.name == "window, carried on")
    assert [i for i, h in enumerate(carried.y) if h] == [0, 1]


def test_the_panel_answers_to_its_controls():
    panel = toolbox_panel()
    start = panel.picture
    assert panel.trace.read == len(IDS)
    panel.set({"read": 16})
    assert panel.trace.of("mha").answer[0][0] == "Tuesday" and panel.picture != start
    panel.set({"technique": "gqa", "groups": "2", "slot": "room", "layer": "3"})
    assert panel.trace.layer == 3 and panel.describe().startswith("Share: 4 heads read 2 shared copies")
    panel.set({"text": "The client is Acme.", "chat": 1, "technique": "sliding_window", "slot": "client", "window": 2})
    assert panel.trace.read <= text_length("The client is Acme.", 1) and panel.trace.window == 2


@pytest.mark.parametrize("typed", ["", "?" * 5000, "Hello world", "ünï", "Acme " * 65])
def test_an_impossible_text_is_one_sentence(typed):
    panel = toolbox_panel()
    before = panel.picture
    panel.set_state({"values": {**panel.values, "text": typed}, "asked": 1})
    assert panel.problem.startswith("text") and "\n" not in panel.problem and len(panel.problem) < 200 and panel.picture == before


def test_a_model_of_ones_own_answers():
    own = K3ForCausalLM(toolbox_config("kda"), seed=3).eval()
    story = toolbox_story(models={"kda": own})
    assert story.of("kda").answer != STORY.of("kda").answer and story.of("mha").answer == STORY.of("mha").answer


@pytest.mark.parametrize("bad, name", [
    ({"slot": "budget"}, "slot"), ({"technique": "rnn"}, "technique"), ({"window": 1}, "window"), ({"window": 2.0}, "window"),
    ({"groups": 3}, "groups"), ({"latent": 65}, "latent"), ({"read": 24}, "read"), ({"read": True}, "read"), ({"layer": 5}, "layer"),
    ({"chat": -1}, "chat"), ({"text": 7}, "text"), ({"models": {"rnn": None}}, "models"),
    ({"models": {"gqa": K3ForCausalLM(toolbox_config("mha"))}}, "models"),
])
def test_a_wrong_argument_is_named_in_one_sentence(bad, name):
    with pytest.raises(ValueError) as error:
        toolbox_story(**bad)
    assert str(error.value).startswith(name) and "\n" not in str(error.value)


def test_two_builds_are_equal():
    assert toolbox_panel().picture == toolbox_panel().picture
