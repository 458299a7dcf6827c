"""The whiteboard story's numbers are minimodel's, and its arguments matter."""
import math

import numpy as np
import pytest
import torch

from k3viz import whiteboard_story
from k3viz.whiteboard import learned
from k3viz.whiteboard import story as story_module
from k3viz.whiteboard.learned import learned_story
from k3viz.whiteboard.story import CHANNELS, PHASES, position, row_keys, word_values
from minimodel import K3Config, K3ForCausalLM, kda, record
from minimodel.tasks import meeting

STORY = whiteboard_story()


@pytest.fixture(scope="module")
def model():
    return K3ForCausalLM(K3Config.meeting(), seed=1)


def test_the_board_ends_as_it_began_with_three_rows_and_thursday_in_one():
    assert STORY.rows == ("client", "budget", "meeting day")
    word, strength = STORY.says("meeting day")[0]
    assert word == "Thursday" and strength == pytest.approx(STORY.beta)
    assert dict(STORY.says("meeting day"))["Tuesday"] == pytest.approx(STORY.beta * STORY.alpha * (1 - STORY.beta))


def test_adding_leaves_tuesday_and_thursday_in_the_row():
    assert [word for word, _ in STORY.says("meeting day", additive=True)] == ["Thursday", "Tuesday"]
    assert dict(STORY.says("meeting day", additive=True))["Tuesday"] == pytest.approx(STORY.beta * STORY.alpha)


@pytest.mark.parametrize("alpha, beta, similarity", [(0.95, 0.9, 0.0), (1.0, 1.0, 0.0), (0.7, 0.4, 0.6)])
def test_the_sub_steps_arrive_at_the_operators_own_states(alpha, beta, similarity):
    story = whiteboard_story(alpha=alpha, beta=beta, similarity=similarity)
    k = torch.tensor(np.stack([story.keys[story.rows.index(w.row)] for w in story.writes]))[None, :, None]
    v = torch.tensor(np.stack([story.values[story.words.index(w.word)] for w in story.writes]))[None, :, None]
    g, b = torch.full_like(k, math.log(alpha)), torch.full(k.shape[:3], beta, dtype=torch.float64)
    for t in range(len(story.writes)):
        _, state = kda(k[:, : t + 1], k[:, : t + 1], v[:, : t + 1], g[:, : t + 1], b[:, : t + 1], backend="chunked")
        np.testing.assert_allclose(story.frames[3 * (t + 1)].state, state[0, 0].numpy(), atol=1e-12)


def test_each_sub_step_is_its_factor_of_the_equation():
    story = whiteboard_story(alpha=0.8, beta=0.6, similarity=0.3)
    before, fade, erase, write = (f.state for f in story.frames[-4:])
    k, v = story.keys[2], story.values[story.words.index("Thursday")]
    np.testing.assert_allclose(fade, 0.8 * before, atol=1e-14)
    np.testing.assert_allclose(erase, (np.eye(CHANNELS) - 0.6 * np.outer(k, k)) @ fade, atol=1e-14)
    np.testing.assert_allclose(write, erase + 0.6 * np.outer(k, v), atol=1e-14)
    assert [f.phase for f in story.frames[-3:]] == list(PHASES)


def test_the_fade_sentence_says_what_the_boards_show(monkeypatch):
    assert STORY.frame(1).sentence == "Fade: the board is empty, so there is nothing to fade."
    assert STORY.frame(4).sentence == "Fade: everything on the board keeps 0.95 of its strength."
    substeps = story_module.delta_substeps
    monkeypatch.setattr(story_module, "delta_substeps", lambda S, k, v, g, beta: substeps(S, k, v, g + math.log(0.5), beta))
    assert whiteboard_story(alpha=0.8).frame(4).sentence == "Fade: everything on the board keeps 0.40 of its strength."


@pytest.mark.parametrize("similarity", [0.0, 0.5, 1.0])
def test_keys_have_length_one_and_the_cosine_asked_for(similarity):
    gram = row_keys(5, similarity) @ row_keys(5, similarity).T
    np.testing.assert_allclose(gram, np.full((5, 5), similarity) + (1 - similarity) * np.eye(5), atol=1e-12)


def test_word_patterns_are_orthogonal_signs():
    v = word_values(64)
    assert set(v.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(v @ v.T, CHANNELS * torch.eye(64, dtype=torch.float64))


def test_another_word_changes_states_readings_and_sentences():
    friday = whiteboard_story(update=("meeting day", "Friday"))
    assert friday.says("meeting day")[0][0] == "Friday"
    assert "Friday" in friday.sentence and "Thursday" not in friday.sentence


def test_the_story_is_the_same_twice_and_cannot_be_changed():
    again = whiteboard_story()
    assert all(np.array_equal(a.state, b.state) and a.sentence == b.sentence for a, b in zip(STORY.frames, again.frames, strict=True))
    with pytest.raises(ValueError):
        STORY.frames[-1].state[0, 0] = 1.0


@pytest.mark.parametrize("bad, name", [
    ({"alpha": 0}, "alpha"), ({"alpha": float("nan")}, "alpha"), ({"alpha": 1.01}, "alpha"), ({"beta": "0.5"}, "beta"),
    ({"beta": float("inf")}, "beta"), ({"similarity": -0.1}, "similarity"), ({"facts": ()}, "facts"), ({"facts": "Acme"}, "facts"),
    ({"facts": [("client",)]}, "facts"), ({"update": ("weather", "rain")}, "update"), ({"update": ("meeting day", " ")}, "update"),
    ({"facts": [(f"row {i}", "x") for i in range(17)], "update": ("row 1", "y")}, "facts"), ({"text": "The meeting"}, "text"),
])
def test_a_wrong_argument_is_named_in_one_sentence(bad, name):
    with pytest.raises(ValueError) as error:
        whiteboard_story(**bad)
    assert str(error.value).startswith(name) and "\n" not in str(error.value)


# ---- learned ----

def test_learned_states_are_the_models_own(model):
    story = whiteboard_story(model=model, text="The meeting is on Tuesday. The meeting has moved to Thursday.")
    layer, head = story.head
    ids = torch.tensor([meeting.encode(story.text)])
    with torch.no_grad(), record(model) as trace:
        model(ids)
    np.testing.assert_allclose(story.states[1:], trace[f"layers.{layer}.kda.state"][0, :, head].numpy(), atol=1e-6)
    np.testing.assert_allclose(story.beta, trace[f"layers.{layer}.kda.beta"][0, :, head].numpy(), atol=1e-6)
    for t in range(len(story.tokens)):
        np.testing.assert_allclose(story.frame(3 * (t + 1)).state, story.states[t + 1], atol=1e-14)


def test_learned_answers_are_the_models_probabilities_for_the_blank(model):
    text = "The meeting is on Tuesday."
    story = whiteboard_story(model=model, text=text)
    assert story.rows == ("day",)
    with torch.no_grad():
        logits = model(torch.tensor([meeting.encode(f"{text} {meeting.question('day')}")])).logits[0, -1]
    expected = logits.softmax(-1)[[meeting.encode(day)[0] for day in meeting.SLOTS["day"]]]
    np.testing.assert_allclose(story.answers["day"][-1], expected, atol=1e-6)


def test_the_head_on_show_is_the_one_that_erases_most_at_the_last_value(model):
    text = "The meeting is on Tuesday. The meeting has moved to Thursday."
    chosen = learned_story(model=model, text=text)
    last = chosen.tokens.index("Thursday")

    def share(head):
        faded, erased = (learned_story(model=model, text=text, head=head).frame(position(last, phase)).state for phase in ("fade", "erase"))
        return np.linalg.norm(erased - faded) / np.linalg.norm(faded)

    shares = {head: share(head) for head in chosen.heads}
    assert len(set(shares.values())) == len(shares) > 1
    assert chosen.head == max(shares, key=shares.get)


def test_labels_name_the_frames_and_need_no_states(model, monkeypatch):
    told = learned_story(model=model, text="The meeting is on Tuesday.")
    frames = [told.frame(i) for i in told.frames]
    assert told.labels == ("start", *(f"{told.tokens[f.token]} · {f.phase}" for f in frames[1:]))
    assert STORY.labels[:2] == ("start", "client: Acme · fade") and len(STORY.labels) == len(STORY.frames)
    monkeypatch.setattr(learned, "delta_substeps", None)
    assert len(told.labels) == len(frames)


@pytest.mark.parametrize("phase", PHASES)
def test_positions_are_those_of_the_frames(phase):
    for step in range(len(STORY.writes)):
        assert (STORY.frame(position(step, phase)).step, STORY.frame(position(step, phase)).phase) == (step, phase)


def test_one_row_is_not_called_rows():
    assert whiteboard_story(facts=[("meeting day", "Tuesday")]).frame(0).sentence == "The board is empty: 1 row, nothing written yet."


def test_the_model_reads_the_articles_sentences(model):
    assert whiteboard_story(model=model).text == " ".join(meeting.ARTICLE) == (
        "The Acme planning meeting is Tuesday, in room 4B, with six people attending. The meeting has moved to Thursday."
    )


def test_reading_leaves_the_model_as_it_was(model):
    before = {name: p.clone() for name, p in model.state_dict().items()}
    whiteboard_story(model=model, text="The meeting is on Tuesday.")
    assert next(model.parameters()).dtype == torch.float32
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())


@pytest.mark.parametrize("text, word", [("", "text"), ("The meeting is on Someday.", "text"), ("The " * 121, "text")])
def test_a_text_that_cannot_be_read_is_named(model, text, word):
    with pytest.raises(ValueError) as error:
        whiteboard_story(model=model, text=text)
    assert str(error.value).startswith(word) and "\n" not in str(error.value)


def test_a_model_without_a_whiteboard_is_refused():
    no_kda = K3ForCausalLM(K3Config.meeting().replace(linear_mixer="mla"))
    with pytest.raises(ValueError, match="no KDA layer"):
        whiteboard_story(model=no_kda)
