"""Open a notebook in a real JupyterLab in headless Chromium, and look at it as a person would.

    with open_lab("00_start_here.ipynb") as lab:
        lab.run_all()
        assert not lab.errors()

Everything waits for a state of the page, never for a number of seconds. The server gets copies of the notebooks and empty
settings folders of its own, so a test changes nothing outside its temporary folder.
"""
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120_000  # ms; only reached when something is broken
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
# anywidget says this when a widget's code takes longer than two seconds to start, as on a busy machine; the widget then comes a little
# later. A panel that never came would be missed by the test that waits for it.
SLOW = "[anywidget] Failed to initialize model."
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]


def find_chromium():
    """The browser to use: the environment variable CHROMIUM, one on PATH, or playwright's own download; None if there is none."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found:
        return found
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).exists() else None


class Lab:
    """One notebook in one browser page. `page` is playwright's page; `console` and `external` collect what should stay empty."""

    def __init__(self, page, address):
        self.page = page
        self.address = address
        self.console = []
        self.external = []
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: self._note(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self._note(str(error)))
        page.on("request", self._note_request)

    def _note(self, error):
        if SLOW not in error:
            self.console.append(error)

    def _note_request(self, request):
        if not request.url.startswith((self.address, self.address.replace("http", "ws"), "data:", "blob:")):
            self.external.append(request.url)

    def open(self, notebook):
        """Show the notebook and wait until it can be run.

        The toolbar's data-status="idle" is no sign of that: it stands there before a kernel exists, and Run All is then dropped.
        """
        self.page.goto(f"{self.address}/lab/tree/notebooks/{notebook}?reset", wait_until="domcontentloaded")
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for()
        self.page.wait_for_function("""() => {
            const notebook = window.jupyterapp && window.jupyterapp.shell.currentWidget;
            const session = notebook && notebook.sessionContext;
            const kernel = session && session.session && session.session.kernel;
            return !!(kernel && session.isReady && kernel.connectionStatus === 'connected' && notebook.context.isReady);
        }""")

    def run_all(self):
        """Run all cells and wait until the last one has ended and its widgets have come."""
        self.page.evaluate("""() => {
            window.ended = undefined;
            window.jupyterapp.commands.execute('notebook:run-all-cells').then(
                () => { window.ended = 'yes' }, error => { window.ended = 'failed: ' + error });
        }""")
        self.page.wait_for_function("() => window.ended !== undefined")
        assert self.page.evaluate("window.ended") == "yes"
        self.page.wait_for_function("() => !document.querySelector('.jp-Notebook').innerText.includes('Loading widget')")

    def restart(self):
        """Restart the kernel, as Kernel > Restart Kernel does once it was confirmed, and wait until it can run cells again."""
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
        self.page.wait_for_function("""() => {
            const session = window.jupyterapp.shell.currentWidget.sessionContext;
            return session.isReady && session.session.kernel.connectionStatus === 'connected' && session.session.kernel.status === 'idle';
        }""")

    def outputs(self):
        """The notebook's outputs as JSON, one list per code cell."""
        return self.page.evaluate("""() => window.jupyterapp.shell.currentWidget.content.widgets
            .filter(cell => cell.model.type === 'code').map(cell => cell.model.sharedModel.getOutputs())""")

    def errors(self):
        """Exceptions in outputs, widgets that could not be shown and what panels complain about, as text."""
        raised = [f"{out['ename']}: {out['evalue']}" for cell in self.outputs() for out in cell if out["output_type"] == "error"]
        text = self.page.locator(".jp-OutputArea").all_inner_texts()
        broken = [line for area in text for line in area.splitlines()
                  if any(sign in line for sign in ("Error displaying widget", "model not found"))]
        return raised + broken + self.page.locator(".k3viz-problem:visible").all_inner_texts()

    def output(self, cell):
        """The output area of the code cell with this index, scrolled into view."""
        area = self.page.locator(".jp-CodeCell").nth(cell).locator(".jp-Cell-outputWrapper")
        area.scroll_into_view_if_needed()
        return area

    def cell(self, text):
        """The output of the only code cell that holds this text, for instance the name of a panel."""
        return self.output(self.page.evaluate("""text => {
            const cells = window.jupyterapp.shell.currentWidget.content.widgets.filter(cell => cell.model.type === 'code');
            const found = cells.flatMap((cell, i) => cell.model.sharedModel.getSource().includes(text) ? [i] : []);
            if (found.length !== 1) throw new Error(`${found.length} cells hold "${text}"`);
            return found[0];
        }""", text))

    def wait_for_picture(self, area):
        """Wait until an output shows an image that has loaded, or a drawn plotly figure."""
        self.page.wait_for_function("""area => [...area.querySelectorAll('img')].some(image => image.complete && image.naturalWidth > 0)
            || area.querySelector('.js-plotly-plot .main-svg')""", arg=area.element_handle())

    def sliders(self, area):
        """The sliders of a panel, in reading order: each takes the focus and the arrow keys."""
        return area.locator(".noUi-handle, input[type=range]")

    def figures(self):
        """The plotly figures on the page."""
        return self.page.locator(".js-plotly-plot")

    def data(self, figure):
        """What a plotly figure draws: its traces and layout, arrays as lists."""
        return figure.evaluate("""node => JSON.parse(JSON.stringify({data: node.data, layout: node.layout},
            (key, value) => ArrayBuffer.isView(value) ? Array.from(value) : value))""")

    def press(self, slider, key, figure):
        """Press a key on a slider and wait until the figure draws something else; returns the figure before and after."""
        before = self.data(figure)
        slider.focus()
        slider.press(key)
        self.page.wait_for_function("""([node, before]) => {
            const now = JSON.stringify({data: node.data, layout: node.layout},
                (key, value) => ArrayBuffer.isView(value) ? Array.from(value) : value);
            return now !== before;
        }""", arg=[figure.element_handle(), self.page.evaluate("value => JSON.stringify(value)", before)])
        return before, self.data(figure)


class Traffic:
    """Counts the bytes that a page receives from now on, over HTTP and the kernel's websocket."""

    def __init__(self, page):
        self.bytes = 0
        session = page.context.new_cdp_session(page)
        session.on("Network.dataReceived", lambda event: self._add(event["encodedDataLength"]))
        # a binary frame (opcode 2) is reported in base64
        session.on("Network.webSocketFrameReceived", lambda event: self._add(
            len(event["response"]["payloadData"]) * (1 if event["response"]["opcode"] == 1 else 3 / 4)))
        session.send("Network.enable")

    def _add(self, count):
        self.bytes += max(0, int(count))


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_it_answers(server, address, log):
    deadline = time.monotonic() + PATIENCE / 1000
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{address}/api/status", timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()}")


@contextmanager
def _serve(notebook, trusted):
    """A JupyterLab over copies of the notebooks, with settings of its own; yields its address."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        home = Path(temporary)
        course = home / "course"
        shutil.copytree(notebook.parent, course / "notebooks")
        if (ROOT / "docs/images").exists():
            shutil.copytree(ROOT / "docs/images", course / "docs/images")
        places = ["JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR",
                  "IPYTHONDIR"]
        environment = {**os.environ, **{name: str(home / name) for name in places}, "OMP_NUM_THREADS": "1"}
        no_news = home / "JUPYTERLAB_SETTINGS_DIR/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
        no_news.parent.mkdir(parents=True)
        no_news.write_text('{"fetchNews": "false", "checkForUpdates": false}')
        if trusted:
            subprocess.run([sys.executable, "-m", "jupyter", "trust", course / "notebooks" / notebook.name], env=environment, check=True,
                           capture_output=True)
        port = _free_port()
        log = home / "server.log"
        # no token and no XSRF check: the server listens on the loopback address only, for the length of a test
        options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0",
                   "--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True", f"--ServerApp.root_dir={course}",
                   "--LabApp.extension_manager=readonly", "--LabApp.expose_app_in_browser=True"]
        with log.open("w") as stream:
            server = subprocess.Popen([sys.executable, "-m", "jupyterlab", *options], env=environment, stdout=stream, stderr=stream)
        try:
            _wait_until_it_answers(server, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


@contextmanager
def open_lab(notebook, *, trusted=False, chromium=None, width=1400):
    """Serve a notebook (a name in notebooks/, or a path) and show it in headless Chromium; yields a Lab with a running kernel."""
    path = ROOT / "notebooks" / notebook  # an absolute path stays as it is
    with _serve(path, trusted) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium or find_chromium(), headless=True, args=FLAGS)
        lab = Lab(browser.new_page(viewport={"width": width, "height": 1000}), address)
        try:
            lab.open(path.name)
            yield lab
        finally:
            browser.close()
