"""Figure and panel of the whiteboard: they draw the story's numbers, and answer when a control moves."""
import gc
import json
import re
import weakref

import numpy as np
import plotly.graph_objects as go
import pytest

from k3viz import whiteboard_figure, whiteboard_panel, whiteboard_story
from k3viz.theme import DARK, LIGHT, ROLES, format_number
from k3viz.whiteboard.story import AUDIBLE
from minimodel import K3Config, K3ForCausalLM


def said(figure, row, board=""):
    """Word -> strength as the bars of one board show it."""
    out = {}
    for trace in figure.data:
        if trace.type == "bar" and trace.yaxis == f"y{board}":
            i = list(trace.y).index(row)
            word, _ = trace.customdata[i].rsplit(" ", 1)
            out[word] = trace.x[i]
    return out


def state(figure, n):
    """The drawn state as a full matrix: rows that are equal are drawn as one."""
    heat = next(t for t in figure.data if t.type == "heatmap" and t.xaxis == f"x{n}")
    return np.repeat(np.array(heat.z, float), np.diff(heat.y), axis=0)


def test_the_figure_draws_the_storys_numbers():
    story = whiteboard_story()
    figure = whiteboard_figure(story=story)
    assert isinstance(figure, go.Figure)
    assert said(figure, "meeting day")["Tuesday"] == pytest.approx(dict(story.says("meeting day"))["Tuesday"], abs=1e-4)
    assert said(figure, "meeting day", "2")["Tuesday"] == pytest.approx(dict(story.says("meeting day", additive=True))["Tuesday"], abs=1e-4)
    np.testing.assert_allclose(state(figure, 3), story.frames[-1].state, atol=1e-4)
    np.testing.assert_allclose(state(figure, 4), story.frames[-1].additive, atol=1e-4)
    assert figure.layout.title.text.replace("<br>", " ") == story.sentence


def test_the_slider_has_a_step_for_every_frame():
    story = whiteboard_story()
    figure = whiteboard_figure(story=story)
    assert len(figure.frames) == len(figure.layout.sliders[0].steps) == len(story.frames)
    assert len({len(f.layout.annotations) for f in figure.frames}) == 1  # plotly keeps a note that a later frame leaves out


def test_a_word_has_the_color_of_its_role():
    figure = whiteboard_figure(story=whiteboard_story(similarity=0.5), slider=False)
    fills = {}
    for bars in (t for t in figure.data if t.type == "bar" and t.yaxis == "y"):
        i = list(bars.y).index("meeting day")
        fills[bars.customdata[i].rsplit(" ", 1)[0]] = bars.marker.color[i]
    assert fills == {"Thursday": ROLES["write"], "Tuesday": ROLES["erase"], "Acme": ROLES["leak"], "$80k": ROLES["leak"]}


def test_a_word_that_prints_as_more_than_nothing_is_named():
    story = whiteboard_story(alpha=0.9, beta=0.992)
    ((_, faint),) = story.says("meeting day")[1:]
    assert AUDIBLE <= faint < 0.01
    notes = [note.text for note in whiteboard_figure(story=story, slider=False).layout.annotations]
    assert f" Tuesday {format_number(faint)}" in notes


@pytest.mark.parametrize("change", [{"update": ("meeting day", "Friday")}, {"alpha": 0.7}, {"beta": 0.5}, {"similarity": 0.5}])
def test_another_input_gives_another_figure(change):
    assert whiteboard_figure(story=whiteboard_story(**change), slider=False) != whiteboard_figure(slider=False)


def test_figures_are_the_same_twice_and_small():
    assert whiteboard_figure().to_json() == whiteboard_figure().to_json()
    assert len(whiteboard_figure().to_json()) < 300_000


@pytest.mark.parametrize("frame", [13, -14, 1.5, True])
def test_a_frame_that_is_not_there(frame):
    with pytest.raises(ValueError, match="^frame must be a whole number from -13 to 12"):
        whiteboard_figure(frame=frame)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_long_words_and_many_rows_can_be_drawn(theme):
    facts = [(f"row {i}", "a rather long answer " * 2) for i in range(16)]
    figure = whiteboard_figure(story=whiteboard_story(facts=facts, update=("row 3", "x"), similarity=0.9), theme=theme, slider=False)
    assert figure.layout.paper_bgcolor == theme.paper


# ---- the panel ----

def test_the_panel_starts_at_its_arguments():
    panel = whiteboard_panel(alpha=0.8, beta=0.5, similarity=0.25, update=("meeting day", "Friday"))
    assert {k: panel.values[k] for k in ("alpha", "beta", "similarity", "update")} == {
        "alpha": 0.8, "beta": 0.5, "similarity": 0.25, "update": "meeting day: Friday"}
    assert panel.trace.alpha == 0.8
    assert said(panel.figure, "meeting day")["Friday"] == pytest.approx(0.5, abs=1e-4)


def test_moving_a_control_changes_picture_and_sentence():
    panel = whiteboard_panel()
    panel.set({"update": "meeting day: Friday"})
    assert "Friday" in panel.describe()
    assert said(panel.figure, "meeting day")["Friday"] == pytest.approx(0.9, abs=1e-4)
    panel.set({"beta": 0.5})
    assert said(panel.figure, "meeting day")["Friday"] == pytest.approx(0.5, abs=1e-4)
    panel.set({"frame": 0})
    assert panel.describe() == panel.trace.frames[0].sentence
    assert sum(abs(x) for x in said(panel.figure, "meeting day").values()) == 0


def from_the_page(panel, **values):
    """What the browser does when a control moves."""
    panel.set_state({"values": {**panel.values, **values}, "asked": panel.asked + 1})


def test_the_page_gets_an_answer_to_every_question():
    panel = whiteboard_panel()
    from_the_page(panel, alpha=0.6)
    assert panel.answered == panel.asked == 1
    assert panel.trace.alpha == 0.6 and panel.problem == ""


def test_an_impossible_wish_becomes_a_sentence_and_the_picture_stays():
    panel = whiteboard_panel()
    before = panel.picture
    for wish in ({"update": " "}, {"alpha": 7}, {"frame": -1}, {"nonsense": 1}):
        from_the_page(panel, **wish)
        assert panel.problem and "\n" not in panel.problem and "Traceback" not in panel.problem
        assert panel.picture == before and panel.answered == panel.asked
        panel.values = {name: value for name, value in whiteboard_panel().values.items()}
    from_the_page(panel, update="meeting day: Friday")
    assert panel.problem == "" and panel.picture != before


@pytest.mark.parametrize("wish", [{"update": " "}, {"alpha": 7}, {"nonsense": 1}])
def test_after_an_impossible_wish_code_goes_on_from_what_is_drawn(wish, tmp_path):
    panel = whiteboard_panel()
    drawn, sentence = panel.figure, panel.describe()
    from_the_page(panel, **wish)
    assert panel.figure == drawn
    assert sentence in panel.to_html(tmp_path / "board.html").read_text(encoding="utf-8")
    assert panel._repr_mimebundle_()[0]["application/vnd.plotly.v1+json"]["data"] == json.loads(drawn.to_json())["data"]
    panel.set({"alpha": 0.7})
    assert (panel.trace.alpha, panel.values["update"], panel.problem) == (0.7, "meeting day: Thursday", "")
    assert "nonsense" not in panel.values


def test_the_panel_keeps_few_stories_alive():
    panel, told = whiteboard_panel(), []
    for alpha in (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0):
        panel.set({"alpha": alpha})
        told.append(weakref.ref(panel.trace))
    gc.collect()
    assert sum(story() is not None for story in told) <= 5  # each holds megabytes


def test_a_dark_page_gets_a_dark_picture_with_the_same_numbers():
    panel = whiteboard_panel()
    bars = [t["x"] for t in panel.picture["data"] if t["type"] == "bar"]
    panel.set_state({"dark": True})
    assert panel.picture["layout"]["font"]["color"] == DARK.ink
    assert [t["x"] for t in panel.picture["data"] if t["type"] == "bar"] == bars


def test_code_that_sets_an_impossible_value_raises():
    panel = whiteboard_panel()
    with pytest.raises(ValueError, match="^alpha can't be 2"):
        panel.set({"alpha": 2})
    with pytest.raises(ValueError, match="no control 'gamma'"):
        panel.set({"gamma": 2})
    with pytest.raises(ValueError, match="^update: unknown row"):
        whiteboard_panel(update=("weather", "rain"))


def test_learned_mode_shows_the_models_states_and_can_go_back():
    model = K3ForCausalLM(K3Config.meeting(), seed=1)
    panel = whiteboard_panel(model=model, text="The meeting is on Tuesday. The meeting has moved to Thursday.")
    assert panel.trace.tokens[-2] == "Thursday"
    assert "alpha" in panel.hidden and "text" not in panel.hidden
    last = panel.values["frame"]
    panel.set({"text": "The meeting is on Friday."})
    assert panel.trace.tokens[-2] == "Friday" and panel.values["frame"] < last  # the position follows the shorter text
    layer, head = panel.trace.heads[0]
    panel.set({"head": f"{layer + 1}.{head + 1}"})
    assert panel.trace.head == (layer, head)
    panel.set({"mode": "by hand"})
    assert panel.trace.rows == whiteboard_story().rows
    from_the_page(panel, mode="learned", text="The meeting is on Someday.")
    assert "Someday" in panel.problem


def test_notes_of_ones_own_become_rows_and_words():
    panel = whiteboard_panel()
    panel.set({"notes": "cat: Minka;  dog: Rex; cat: Mika", "update": "dog: Bello"})
    assert panel.trace.rows == ("cat", "dog") and panel.trace.words == ("Minka", "Rex", "Mika", "Bello")
    told = whiteboard_story(facts=[("cat", "Minka"), ("dog", "Rex"), ("cat", "Mika")], update=("dog", "Bello"))
    np.testing.assert_array_equal(panel.trace.frames[-1].state, told.frames[-1].state)
    assert said(panel.figure, "dog")["Bello"] == pytest.approx(0.9, abs=1e-4)


@pytest.mark.parametrize("wish, word", [
    ({"notes": "no colon"}, "facts"), ({"notes": ""}, "facts"), ({"notes": "a:"}, "facts"), ({"notes": "x: " + "y" * 500}, "facts"),
    ({"update": "weather: rain"}, "update: unknown row 'weather'"), ({"update": "client: A; client: B"}, "update: write one change"),
])
def test_notes_that_cannot_be_read_are_answered_in_a_sentence(wish, word):
    with pytest.raises(ValueError) as error:
        whiteboard_panel().set(wish)
    assert str(error.value).startswith(word) and len(str(error.value)) < 250


@pytest.mark.parametrize("facts", [[("a:b", "c")], [("a", "b; c")]])
def test_notes_that_the_panel_could_not_show_are_refused(facts):
    with pytest.raises(ValueError, match="^facts: in this panel"):
        whiteboard_panel(facts=facts, update=(facts[0][0], "x"))


def test_without_a_model_the_learned_board_is_the_courses_own():
    panel = whiteboard_panel()
    assert "head" in panel.hidden
    panel.set({"mode": "learned"})
    assert panel.trace.answers["day"][-1].max() > 0.99 and "notes" in panel.hidden


def test_the_page_holds_figure_and_sentence_and_needs_no_network(tmp_path):
    panel = whiteboard_panel()
    page = panel.to_html(tmp_path / "board.html").read_text(encoding="utf-8")
    assert panel.describe() in page
    assert not re.search(r"<(?:script|link)[^>]+(?:src|href)=.https?:", page)
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ValueError, match="^path: there is no folder"):
        panel.to_html(tmp_path / "missing" / "board.html")


def test_the_notebook_output_says_in_words_what_it_shows():
    data, _ = whiteboard_panel()._repr_mimebundle_()
    assert data["text/plain"].startswith("Write: the row meeting day")
    assert "application/vnd.jupyter.widget-view+json" in data
    assert json.loads(json.dumps(data["application/vnd.plotly.v1+json"]))["data"]
