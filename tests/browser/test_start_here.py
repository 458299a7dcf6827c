"""The first notebook as a learner meets it: opened, run, and its whiteboard panel moved by keyboard."""
import nbformat
import pytest

from tests.browser.lab import ROOT, open_lab

pytestmark = [pytest.mark.browser, pytest.mark.slow]
NOTEBOOK = "00_start_here.ipynb"
PICTURES = ("image/png", "application/vnd.plotly.v1+json")


def test_run_all_then_each_slider_changes_the_figure(chromium):
    with open_lab(NOTEBOOK, chromium=chromium) as lab:
        lab.run_all()
        assert lab.errors() == []
        panel = lab.cell("whiteboard_panel()")
        figure = panel.locator(".js-plotly-plot")
        figure.wait_for()
        sliders = lab.sliders(panel)
        assert sliders.count() >= 4  # the step, alpha, beta, key similarity
        for slider in sliders.all():
            value = slider.input_value()
            before, after = lab.press(slider, "ArrowRight" if value == slider.get_attribute("min") else "ArrowLeft", figure)
            assert slider.input_value() != value
            assert before["data"] != after["data"]
        assert lab.errors() == []
        assert lab.console == []
        assert lab.external == []


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "untrusted"])
def test_the_stored_notebook_shows_its_pictures_before_it_is_run(chromium, trusted):
    cells = [cell for cell in nbformat.read(ROOT / "notebooks" / NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    drawn = [number for number, cell in enumerate(cells) if any(kind in out.get("data", {}) for out in cell.outputs for kind in PICTURES)]
    assert drawn
    with open_lab(NOTEBOOK, trusted=trusted, chromium=chromium) as lab:
        for number in drawn:
            lab.wait_for_picture(lab.output(number))
        assert lab.errors() == []
        assert lab.console == []
        assert lab.external == []
