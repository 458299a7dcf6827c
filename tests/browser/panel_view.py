"""A panel on a page, as a person at the keyboard sees it: its controls, its picture, how long an answer takes, what can't be read.

    view = PanelView(lab.page, lab.cell("decay_panel()"))
    changed, milliseconds = view.press(view.controls()[0], "ArrowRight")

Times are taken inside the page, from the key's own time stamp to the first frame that shows the answer: the model's run in the kernel,
the way there and back, and the drawing are all in them. Playwright's own time isn't.
"""

WATCH = """root => {
    root.paints = [];
    root.addEventListener('keydown', event => {
        if (['Tab', 'Shift'].includes(event.key)) return;
        const painted = () => {  // in the frame that shows the answer, after it is on the screen
            if (root.getAttribute('aria-busy') === 'true') { requestAnimationFrame(painted); return; }
            const after = new MessageChannel();
            after.port1.onmessage = () => root.paints.push(performance.now() - event.timeStamp);
            after.port2.postMessage(0);
        };
        requestAnimationFrame(painted);
    }, true);
}"""

# What the panel shows: what plotly was given, the sentence, the values in the controls
SHOWN = """root => JSON.stringify([...root.querySelectorAll('.js-plotly-plot')].map(node => ({data: node.data, layout: node.layout}))
    .concat([...root.querySelectorAll('.k3viz-sentence, .k3viz-problem')].map(node => node.textContent)))"""

# Texts of a picture that are cut at its edge, too small, or written over each other. Turned texts overlap only with their boxes.
UNREADABLE = """([root, smallest]) => {
    const found = [], texts = [], page = root.querySelector('.js-plotly-plot').getBoundingClientRect();
    for (const node of root.querySelectorAll('.js-plotly-plot text')) {
        const said = node.textContent.trim(), style = getComputedStyle(node), box = node.getBoundingClientRect();
        if (!/[\\p{L}\\p{N}]/u.test(said) || style.visibility === 'hidden' || +style.opacity === 0 || !box.width) continue;
        if (box.left < page.left - 2 || box.right > page.right + 2 || box.top < page.top - 2 || box.bottom > page.bottom + 2)
            found.push(`cut at the edge: ${said}`);
        const size = parseFloat(style.fontSize);
        if (size < smallest && !node.closest('.slider-group')) found.push(`${size} px: ${said}`);
        const turned = node.closest('[transform*="rotate"]');
        const angle = turned && /rotate\\((-?[\\d.]+)/.exec(turned.getAttribute('transform'));
        if (!angle || +angle[1] === 0) texts.push({said, box});
    }
    for (let i = 0; i < texts.length; i++) for (let j = 0; j < i; j++) {
        const [a, b] = [texts[i].box, texts[j].box];
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left), high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 3 && high > 0.45 * Math.min(a.height, b.height)) found.push(`overlap: ${texts[j].said} | ${texts[i].said}`);
    }
    return found;
}"""


def unreadable(page, area, *, smallest=10.5):
    """Texts of the pictures in an area that are cut, smaller than this many px, or written over each other."""
    return page.evaluate(UNREADABLE, [area.element_handle(), smallest])


class PanelView:
    """One panel in an output area of a Lab."""

    def __init__(self, page, area):
        self.page = page
        self.root = area.locator(".k3viz-panel")
        self.root.wait_for()
        self.root.locator(".js-plotly-plot .main-svg").first.wait_for()
        self.ready()
        self.root.evaluate(WATCH)

    def ready(self):
        """Wait until the last question has been answered and drawn."""
        self.page.wait_for_function("root => root.getAttribute('aria-busy') === 'false'", arg=self.root.element_handle())

    def shown(self):
        return self.root.evaluate(SHOWN)

    def sentence(self):
        return self.root.locator(".k3viz-sentence").inner_text()

    def problem(self):
        """What the panel complains about, "" if it doesn't."""
        problem = self.root.locator(".k3viz-problem")
        return problem.inner_text() if problem.is_visible() else ""

    def controls(self):
        """All controls in reading order, those hidden just now too (each choice may hide or show others); of a group of boxes the first."""
        return self.root.locator(".k3viz-control :is(input, select), .k3viz-checks label:first-of-type input").all()

    def values(self):
        """What all controls say, hidden ones too, by label."""
        return self.root.evaluate("""root => Object.fromEntries([...root.querySelectorAll('input, select')].map(node =>
            [node.labels[0].textContent.trim(), node.type === 'checkbox' ? node.checked : node.value]))""")

    def press(self, control, key):
        """Press a key on a control and wait for the answer: (whether something else is shown, milliseconds from key to paint)."""
        before, count = self.shown(), self.root.evaluate("root => root.paints.length")
        control.focus()
        control.press(key)
        self.page.wait_for_function("([root, count]) => root.paints.length > count", arg=[self.root.element_handle(), count])
        return self.shown() != before, self.root.evaluate("root => root.paints.at(-1)")
