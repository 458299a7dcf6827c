"""Colors that can be read, numbers that are written one way, and the machinery that all panels share."""
import gzip
import html
import threading

import plotly.graph_objects as go
import pytest
from ipywidgets import Widget
from plotly.offline import get_plotlyjs

import k3viz
from k3viz import panel as panels
from k3viz.panel import Checks, Choice, Drawing, Panel, Player, Slider
from k3viz.theme import DARK, LIGHT, ROLES, axis, contrast, diverging, layout, literal, shade, text_on, wrapped
from minimodel.formats import format_bytes, format_count, format_digits, format_number, format_probability, plural

READABLE = 4.5  # WCAG AA


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda t: t.name)
def test_text_can_be_read_on_the_page(theme):
    for ink in (theme.ink, theme.muted):
        for paper in (theme.paper, theme.empty):
            assert contrast(ink, paper) >= READABLE


@pytest.mark.parametrize("role", ROLES)
def test_text_can_be_read_on_every_role(role):
    assert contrast(text_on(ROLES[role]), ROLES[role]) >= READABLE


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda t: t.name)
def test_text_can_be_read_on_every_shade_of_a_scale(theme):
    scale = diverging(theme)
    assert [shade(scale, at) for at in (-1, 0, 0.5, 1, 2)] == [scale[i][1] for i in (0, 0, 1, 2, 2)]
    for i in range(101):
        fill = shade(scale, i / 100)
        assert contrast(text_on(fill), fill) >= READABLE


def test_contrast_has_its_known_ends():
    assert contrast("#000000", "#ffffff") == pytest.approx(21) and contrast("#123456", "#123456") == 1


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda t: t.name)
def test_layout_axis_and_scale_are_valid_plotly(theme):
    go.Figure({"data": [{"type": "heatmap", "z": [[0, 1]], "colorscale": diverging(theme)}],
               "layout": layout(theme, height=100, xaxis=axis(theme, title={"text": "x"}))})


@pytest.mark.parametrize("format_, value, text", [
    (format_bytes, 0, "0 B"), (format_bytes, 999, "999 B"), (format_bytes, 999_700, "1.00 MB"), (format_bytes, 28_991_029_248, "29.0 GB"),
    (format_count, 65_536, "65,536"), (format_count, 2_779_484_476_000, "2.78T"), (format_probability, 0.97312, "97.3 %"),
    (format_probability, 0.99999, "> 99.9 %"), (format_probability, 1.0, "100.0 %"), (format_probability, 1e-6, "< 0.1 %"),
    (format_number, -1e-9, "0.00"), (format_number, 0.125, "0.12"), (format_digits, 138.6, "140"), (format_digits, 0.1386, "0.14"),
    (format_digits, 3.14e-7, "3.1·10⁻⁷"), (format_digits, 16_976_058, "1.7·10⁷"), (format_digits, 99_600, "100,000"),
    (format_digits, 0, "0"), (format_digits, 9.96, "10"), (format_digits, -0.05, "-0.050"), (format_digits, float("inf"), "∞"),
    (format_digits, float("nan"), "not a number"),
])
def test_numbers_are_written_for_people(format_, value, text):
    assert format_(value) == text


@pytest.mark.parametrize("n, text", [
    (28_991_029_248, "28.99 GB"), (999_700, "999.7 kB"), (999_960, "1.000 MB"), (9_999_600, "10.00 MB"),
    (99_999_500_000, "100.0 GB"), (0, "0 B"),
])
def test_four_digits_on_request(n, text):
    assert format_bytes(n, digits=4) == text


@pytest.mark.parametrize("n, noun", [(0, "rows"), (1, "row"), (2, "rows")])
def test_one_is_singular(n, noun):
    assert plural("row", n) == noun


def test_public_names_are_there_and_no_others():
    assert set(k3viz.__all__) <= set(dir(k3viz))
    assert all(callable(getattr(k3viz, name)) for name in k3viz.__all__)
    with pytest.raises(AttributeError, match="no attribute 'blackboard'"):
        _ = k3viz.blackboard


# ---- the panel class, with a small subject of its own ----

def draw(values, theme):
    if values["height"] == 13:
        raise ValueError("height must not be 13")
    if values["height"] == 14:
        raise RuntimeError("broken")
    picture = {"data": [{"type": "bar", "x": ["a"], "y": [values["height"]]}], "layout": {"font": {"color": theme.ink}}}
    return Drawing(values["height"], picture, f"The bar is {values['height']} high.")


def small_panel():
    controls = [Slider("height", "Height", 3, 0, 20, 1), Choice("color", "Color", "red", (("red", "red"),))]
    return Panel(name="A bar", controls=controls, draw=draw)


def ask(panel, **values):
    panel.set_state({"values": {**panel.values, **values}, "asked": panel.asked + 1})


def test_plotly_travels_once_for_all_panels():
    one, two = small_panel(), small_panel()
    library = panels.plotly_library()
    assert one.library == two.library == "IPY_MODEL_" + library.model_id
    assert gzip.decompress(library.gz).decode() == get_plotlyjs()


def test_after_close_all_a_new_panel_gets_a_new_library():
    before = panels.plotly_library().model_id
    Widget.close_all()
    assert small_panel().library != "IPY_MODEL_" + before


def test_errors_are_sentences_not_tracebacks():
    panel = small_panel()
    ask(panel, height=13)
    assert panel.problem == "height must not be 13" and panel.describe() == "The bar is 3 high."
    ask(panel, height=14)
    assert panel.problem == "This panel failed: RuntimeError: broken"
    ask(panel, height=5)
    assert panel.problem == "" and panel.describe() == "The bar is 5 high." and panel.answered == panel.asked == 3


def test_a_question_from_another_thread_is_answered():
    panel = small_panel()
    for height in (6, 7):
        thread = threading.Thread(target=ask, args=(panel,), kwargs={"height": height})
        thread.start()
        thread.join()
    assert panel.problem == "" and panel.trace == 7


def test_what_takes_long_is_drawn_ahead_once_the_page_shows_something():
    drawn = []

    def remembered(values, theme):
        drawn.append((values["height"], theme.name))
        return draw(values, theme)

    panel = Panel(name="A bar", controls=[Slider("height", "Height", 3, 0, 20, 1)], draw=remembered, ahead=[{"height": 13}, {"height": 9}])
    assert drawn == [(3, "light")]  # nothing for a notebook that no page shows
    panel.set_state({"shown": 1})
    panel.set_state({"shown": 2})  # a second view of the same panel
    assert drawn == [(3, "light"), (13, "light"), (9, "light")]
    assert (panel.describe(), panel.problem, panel.values) == ("The bar is 3 high.", "", {"height": 3})


def counting_panel():
    """A player over as many steps as the slider says."""
    def told(values, theme):
        n = values["count"]
        at = min(values["at"], n - 1)
        return Drawing(at, {"data": [], "layout": {}}, f"Step {at + 1} of {n}.", frame=at, labels=tuple(f"step {i + 1}" for i in range(n)))
    return Panel(name="Steps", controls=[Player("at", "Step", 2, ("a", "b", "c")), Slider("count", "Steps", 3, 1, 9, 1)], draw=told)


def test_a_player_at_its_end_stays_at_the_end():
    for moved in (lambda panel, **values: ask(panel, **values), lambda panel, **values: panel.set(values)):
        panel = counting_panel()
        moved(panel, count=7)
        assert panel.describe() == "Step 7 of 7." and panel.values == {"at": 6, "count": 7}
        moved(panel, at=3)
        moved(panel, count=9)
        assert panel.describe() == "Step 4 of 9."  # it was moved away from the end
        moved(panel, count=2)
        moved(panel, count=8)
        assert panel.describe() == "Step 8 of 8." and panel.values["at"] == 7
        panel.set_state({"dark": True})
        assert panel.values["at"] == 7 and panel.figure is not None
    panel.set({"at": 7, "count": 9})
    assert panel.describe() == "Step 8 of 9."  # asked for by name


def test_a_whole_step_takes_whole_steps_only():
    whole, any_number = Slider("n", "N", 4, 2, 10, 2), Slider("x", "X", 0.3, 0.0, 1.0, 0.25)
    assert [whole.accepts(x) for x in (2, 4.0, 10, 3, 4.5, 12)] == [True, True, True, False, False, False] and any_number.accepts(0.3)
    with pytest.raises(ValueError, match="^height can't be 2.5 in this panel: Height goes from 0 to 20 in steps of 1$"):
        small_panel().set({"height": 2.5})


def test_boxes_take_their_options_only():
    boxes = Checks("some", "Some", (), (("a", "A"), ("b", "B")))
    assert boxes.accepts(["a"]) and boxes.accepts(()) and not any(boxes.accepts(x) for x in (["c"], "a", [["a"]], [{}], None))


@pytest.mark.parametrize("text", ["p < 0.1 %, q > 99.9 %", "<Acme> & Co", "a < b"])
def test_texts_reach_plotly_as_they_are(text):
    assert html.unescape(literal(text)) == text and "<" not in literal(text)
    assert html.unescape(wrapped(text, 6).replace("<br>", " ")) == text


def test_controls_that_cannot_start_are_refused():
    with pytest.raises(ValueError, match="^height can't be 30"):
        Panel(name="x", controls=[Slider("height", "Height", 30, 0, 20, 1)], draw=draw)


@pytest.mark.parametrize("make", [k3viz.whiteboard_panel, lambda: k3viz.memory_panel(tokens=64)], ids=["whiteboard", "memory"])
def test_every_control_has_a_label_of_its_own(make):
    labels = [c["label"] for c in make().controls]
    assert all(labels) and len(set(labels)) == len(labels)


@pytest.mark.parametrize("make", [k3viz.whiteboard_panel, lambda: k3viz.memory_panel(tokens=64)], ids=["whiteboard", "memory"])
def test_every_panel_has_what_people_who_write_code_need(make, tmp_path):
    panel = make()
    assert isinstance(panel.figure, go.Figure) and panel.trace is not None
    assert len(panel.describe()) > 20 and any(c.isdigit() for c in panel.describe())
    assert panel.to_html(tmp_path / "panel.html").stat().st_size > 1_000_000  # plotly.js is inside


def test_a_player_may_point_anywhere_from_the_start():
    assert Player("frame", "Step", 0, ("a",)).accepts(99) and not Player("frame", "Step", 0, ("a",)).accepts(-1)
