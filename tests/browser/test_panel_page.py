"""The page's side of a panel, panel.js, in a real browser, with a stand-in for the kernel and for plotly."""
import pytest
from playwright.sync_api import sync_playwright

from k3viz.panel import STATIC
from tests.browser.lab import FLAGS

pytestmark = pytest.mark.browser

# A widget model that answers like ipywidgets, and a plotly whose react notes the title it drew, or fails where the title is "bad".
PAGE = """async (source) => {
    const plotly = `module.exports = { purge() {}, async react(node, data, layout) {
        await null;
        node.on = (name, act) => { window.click = (id) => act({ points: [{ id }] }); };
        if (layout.title === "bad") throw new Error("no such trace");
        node.textContent = layout.title;
    } }`;
    const zipped = new Blob([plotly]).stream().pipeThrough(new CompressionStream("gzip"));
    const library = { version: "stand-in", gz: await new Response(zipped).arrayBuffer() };
    const part = { kind: "choice", name: "part", label: "Part", options: [["router", "router"]] };
    const state = { library: "IPY_MODEL_x", name: "Panel", controls: [part], values: {}, dark: false, asked: 0, answered: 0,
                    picture: { data: [], layout: { title: "first" } }, sentence: "One.", problem: "", hidden: [] };
    const listeners = {};
    window.model = {
        get: (name) => state[name], save_changes() {}, off() {},
        on: (event, act) => { (listeners[event] ??= []).push(act); },
        set: (name, value) => { state[name] = value; for (const act of listeners["change:" + name] ?? []) act(); },
        widget_manager: { get_model: async () => ({ get: (name) => library[name] }) },
    };
    window.show = (title, sentence) => { model.set("picture", { data: [], layout: { title } }); model.set("sentence", sentence); };
    const { default: panel } = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    await panel.render({ model, el: document.body });
}"""


@pytest.fixture
def page(chromium):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        page = browser.new_page()
        page.evaluate(PAGE, (STATIC / "panel.js").read_text())
        yield page
        browser.close()


def test_a_picture_that_fails_is_reported_and_the_next_one_is_drawn(page):
    picture, problem = page.locator(".k3viz-picture"), page.locator(".k3viz-problem")
    picture.get_by_text("first").wait_for()
    assert not problem.is_visible()
    page.evaluate("show('bad', 'Two.')")
    problem.get_by_text("The picture could not be drawn: no such trace").wait_for()
    page.evaluate("show('good', 'Three.')")
    picture.get_by_text("good").wait_for()
    problem.wait_for(state="hidden")


def test_of_pictures_that_come_while_one_is_drawn_the_last_one_stays(page):
    page.locator(".k3viz-picture").get_by_text("first").wait_for()
    page.evaluate("() => { show('bad', 'Two.'); show('good', 'Three.'); show('last', 'Four.'); }")
    page.locator(".k3viz-picture").get_by_text("last").wait_for()
    page.locator(".k3viz-problem").wait_for(state="hidden")


def test_a_click_on_a_point_with_an_id_sets_its_control(page):
    page.locator(".k3viz-picture").get_by_text("first").wait_for()
    page.evaluate("click('part=router')")
    assert page.evaluate("[model.get('values').part, model.get('asked')]") == ["router", 1]
    page.evaluate("click('nothing=here'); click(undefined)")
    assert page.evaluate("[model.get('values').part, model.get('asked')]") == ["router", 1]
