"""The site as a reader meets it: in Chromium, from files, without network."""
import json
import re

import pytest
from playwright.sync_api import sync_playwright

from tests.browser.lab import FLAGS

pytestmark = pytest.mark.browser
# A figure is drawn when plotly has given it its layout
DRAWN = "() => [...document.querySelectorAll('.k3-plot')].every(node => node._fullLayout && node.querySelector('.main-svg'))"


class Reader:
    """A browser page without network. ``asked`` and ``errors`` collect what should stay empty."""

    def __init__(self, browser, site, **options):
        self.site, self.asked, self.errors = site, [], []
        self.context = browser.new_context(offline=True, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        at_home = ("file:", "data:", "blob:")
        self.page.on("request", lambda request: None if request.url.startswith(at_home) else self.asked.append(request.url))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def open(self, name):
        path, mark, rest = name.partition("?")
        self.page.goto((self.site / path).as_uri() + mark + rest)
        self.page.wait_for_function(DRAWN)
        return self.page

    def untroubled(self):
        return self.asked == [] and self.errors == []


@pytest.fixture(scope="module")
def browser(chromium):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def reader(browser, site):
    reader = Reader(browser, site, viewport={"width": 1280, "height": 900})
    yield reader
    reader.context.close()


def test_every_page_opens_whole_and_loads_nothing_from_elsewhere(reader, site):
    names = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html")) if "_modules" not in path.parts]
    assert len(names) > 40
    wide = []
    for name in names:
        page = reader.open(name)
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 900})
            if page.evaluate("document.documentElement.scrollWidth") > width:
                wide.append((name, width))
    assert wide == []
    assert reader.untroubled(), (reader.asked, reader.errors)


def test_from_the_start_page_to_a_notebook_and_to_a_function(reader):
    page = reader.open("index.html")
    page.wait_for_url("**/README.html")
    page.get_by_role("link", name="00 start here").click()
    page.get_by_role("heading", name="Start here").wait_for()
    page.wait_for_function(DRAWN)
    page = reader.open("docs/api/index.html")
    page.get_by_role("link", name="attention_residual", exact=True).click()
    page.wait_for_url("**/model.html#minimodel.attention_residuals.attention_residual")
    described = page.locator("dl.py.function", has=page.locator("[id='minimodel.attention_residuals.attention_residual']")).first
    assert "Float[Tensor" in described.inner_text() and "softmax" in described.inner_text()
    assert reader.untroubled()


def test_a_figure_of_a_notebook_is_alive(reader):
    """It holds the data that the notebook stores, and a box drawn with the mouse zooms into it."""
    page = reader.open("notebooks/00_start_here.html")
    plot = page.locator(".k3-plot", has=page.locator(".scatterlayer .trace")).last  # the memory curves
    stored = json.loads(plot.locator("xpath=following-sibling::script").first.inner_text())
    assert plot.evaluate("node => node.data.length") == len(stored["data"]) > 0

    ranges = "node => JSON.stringify(Object.entries(node._fullLayout).filter(([k]) => /^[xy]axis/.test(k)).map(([k, axis]) => axis.range))"
    before = plot.evaluate(ranges)
    area = plot.locator(".nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.3)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] * 0.7, steps=5)
    page.mouse.up()
    page.wait_for_function(f"([node, before]) => ({ranges})(node) !== before", arg=[plot.element_handle(), before])
    assert reader.untroubled()


def test_a_heat_map_says_what_it_holds_under_the_mouse(reader):
    page = reader.open("notebooks/00_start_here.html")
    plot = page.locator(".k3-plot").first
    areas = plot.locator(".nsewdrag")
    for number in range(areas.count()):
        areas.nth(number).scroll_into_view_if_needed()
        areas.nth(number).hover()
        page.mouse.move(1, 1)
        areas.nth(number).hover(position={"x": 30, "y": 20})
    plot.locator(".hoverlayer .hovertext").first.wait_for(state="attached")
    assert reader.untroubled()


def test_formulas_are_drawn(reader):
    page = reader.open("notebooks/05_chunks.html")
    formulas = page.locator("math")
    assert formulas.count() > 10
    assert all(formula.bounding_box()["height"] > 5 for formula in formulas.all())
    assert not re.search(r"\\(frac|beta|top)\b", page.locator("article").inner_text().split("import")[0])


def test_the_search_finds_a_word(reader):
    page = reader.open("search.html?q=quantile")
    result = page.locator("#search-results li a").first
    result.wait_for()
    result.click()
    page.locator("article").get_by_text("uantile").first.wait_for()
    assert reader.untroubled()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_are_readable(browser, site, scheme):
    reader = Reader(browser, site, color_scheme=scheme)
    page = reader.open("notebooks/00_start_here.html")
    dark = "selector => getComputedStyle(document.querySelector(selector)).backgroundColor.match(/\\d+/g).slice(0, 3).every(x => x < 100)"
    assert page.evaluate(dark, "body") == (scheme == "dark")
    assert not page.evaluate(dark, ".k3-plot")  # figures have dark text, so they keep a light ground
    reader.context.close()
    assert reader.untroubled()
