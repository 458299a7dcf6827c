"""Every panel of k3viz as a learner meets it: in JupyterLab, moved by keyboard, timed inside the page; and stored, and as a page of its own.

The panels are discovered, so a new one is covered as soon as it is registered. Times and sizes are printed beside their targets (they hold
for two idle cores) and asserted only against a limit that means "hangs": `pytest -rP` shows them.
"""
import statistics
import time

import nbformat
import pytest
from playwright.sync_api import sync_playwright

import k3viz
from tests.browser.lab import FLAGS, Traffic, open_lab
from tests.browser.panel_view import PanelView

pytestmark = [pytest.mark.browser, pytest.mark.slow]
PANELS = sorted(name for name in k3viz.__all__ if name.endswith("_panel"))
HANG = 20_000  # ms
PRESSES = 3  # a control


def notebook_of(panels, folder):
    """A notebook with one cell a panel, as in the course."""
    cells = [nbformat.v4.new_code_cell("import k3viz")]
    cells += [nbformat.v4.new_code_cell(f"panel = k3viz.{name}()\npanel") for name in panels]
    path = folder / "panels.ipynb"
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)
    return path


def keys_for(control):
    """Keys that move a control away from where it is, one after the other."""
    kind = control.evaluate("node => node.type")
    if kind == "range":
        value, low, high = (control.evaluate(f"node => Number(node.{name})") for name in ("value", "min", "max"))
        return ["ArrowLeft" if value > low else "ArrowRight"] * PRESSES if value - low >= high - value else ["ArrowRight"] * PRESSES
    if kind == "select-one":
        at, last = control.evaluate("node => node.selectedIndex"), control.evaluate("node => node.length - 1")
        return ["ArrowDown"] if at < last else ["ArrowUp"]
    return ["Space", "Space"] if kind == "checkbox" else []


def test_every_panel_renders_and_answers_the_keyboard(chromium, tmp_path):
    with open_lab(notebook_of(PANELS, tmp_path), chromium=chromium, width=1280) as lab:
        lab.run_all()
        assert lab.errors() == []
        print(f"{'panel':<18}{'presses':>8}{'median ms':>11}{'p95 ms':>8}   (target: p95 150 ms on two idle cores)")
        unreadable = {}
        for number, name in enumerate(PANELS, 1):
            view = PanelView(lab, lab.output(number))
            assert any(character.isdigit() for character in view.sentence()), name
            unreadable[name] = view.unreadable()
            times, moved = [], set()
            for control in view.controls():
                for key in keys_for(control):
                    if not control.is_visible():  # a choice may hide others
                        break
                    changed, ms = view.press(control, key)
                    if changed:
                        moved.add(control.evaluate("node => node.labels[0].textContent"))
                        times.append(ms)
            assert moved, f"no control of {name} changes what is seen"
            assert view.problem() == "", name
            assert max(times) < HANG, f"{name}: {max(times):.0f} ms from key to paint"
            p95 = statistics.quantiles(times, n=20, method="inclusive")[-1] if len(times) > 1 else times[0]
            print(f"{name:<18}{len(times):>8}{statistics.median(times):>11.0f}{p95:>8.0f}   {len(moved)} controls")
        assert lab.errors() == [] and lab.console == [] and lab.external == []
        assert {name: found for name, found in unreadable.items() if found} == {}
