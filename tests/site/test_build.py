"""What `make docs` builds holds every page, name and figure; and a fault in a page stops the build."""
import json
import shutil
import sys
from pathlib import Path

import pytest

import k3viz
import minimodel

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".ci"))
import docs  # noqa: E402

FIGURE = "application/vnd.plotly.v1+json"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("**/*.ipynb"))


def read(path):
    return path.read_text(encoding="utf-8")


def test_every_page_and_notebook_is_there(site):
    written = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    sources = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/api").glob("*.md"), *NOTEBOOKS]
    assert {path.relative_to(ROOT).with_suffix("") for path in sources} <= written
    assert "README.html" in read(site / "index.html")


def test_every_public_name_has_its_place_in_the_reference(site):
    pages = {path: docs.Page(read(path)) for path in (site / "docs/api").glob("*.html")}
    anchors = {anchor for page in pages.values() for anchor in page.anchors if anchor}
    assert {f"k3viz.{name}" for name in k3viz.__all__} <= anchors
    links = [link for link in pages[site / "docs/api/index.html"].links if link]
    for name in minimodel.__all__:
        assert [link for link in links if link.endswith(f".{name}")], name


def test_every_stored_figure_is_drawn_by_one_plotly(site):
    for path in NOTEBOOKS:
        outputs = [output for cell in json.loads(read(path))["cells"] for output in cell.get("outputs", [])]
        stored = [output for output in outputs if FIGURE in output.get("data", {})]
        page = read(site / path.relative_to(ROOT).with_suffix(".html"))
        assert page.count('class="k3-plot"') == len(stored)
        assert ("plotly.min.js" in page) == bool(stored)
    assert len(list(site.rglob("*plotly*.js"))) == 1


def test_links_to_code_lead_to_the_highlighted_file(site):
    assert "_modules/minimodel/delta_rule/recurrent.html" in docs.Page(read(site / "README.html")).links


# ---- strictness: each fault must stop the build

def repository(folder, page):
    """A repository of two pages with this project's settings."""
    shutil.copytree(ROOT / "docs/site", folder / "docs/site", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "docs/conf.py", folder / "docs")
    shutil.copytree(ROOT / "docs/images", folder / "docs/images")
    (folder / "README.md").write_text("# Start\n[A page](docs/page.md)\n", encoding="utf-8")
    (folder / "docs/page.md").write_text(f"# Page\n{page}\n", encoding="utf-8")
    return folder


def test_a_small_site_without_faults_is_built(tmp_path):
    page = "[Start](../README.md), [here](#part), ![A router](images/panel_experts.png), $e^{-g} \\in \\big(0, 1\\big)$, "
    page += "[far](https://pytorch.org)\n\n## Part"
    root = repository(tmp_path / "repository", page)
    docs.build(root, tmp_path / "out")
    assert "<math" in read(tmp_path / "out/docs/page.html")


@pytest.mark.parametrize("faults", [
    {"[gone](gone.md)": "gone.md", "[lost](../README.md#lost)": "lost", "[away](#away)": "away", 
     "![A picture](images/none.png)": "none.png",
     "$\\nosuchcommand{x}$": "nosuchcommand"},  # Sphinx notices these
    {"![](images/panel_experts.png)": "no words for the picture", "![Far](https://example.org/far.png)": "far.png from another machine",
     "<script src='https://example.org/far.js'></script>": "far.js from another machine"},
], ids=["in a source", "in a page"])  # fmt: skip
def test_faults_stop_the_build_and_the_old_site_stays(tmp_path, capfd, faults):
    root = repository(tmp_path / "repository", "\n\n".join(faults))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/index.html").write_text("the old site", encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        docs.build(root, tmp_path / "out")
    said = (capfd.readouterr().err + str(stop.value)).splitlines()
    for message in faults.values():  # each is named with its page
        assert [line for line in said if message in line and "page" in line], message
    assert read(tmp_path / "out/index.html") == "the old site"


@pytest.mark.parametrize("html, message", [
    ("<a href='gone.html'>x</a>", "leads nowhere"),
    ("<a href='page.html#gone'>x</a>", "no such anchor"),
    ("<link rel='stylesheet' href='//example.org/a.css'>", "from another machine"),
    ("<p style='background: url(https://example.org/a.png)'>x</p>", "from another machine"),
    ("<style>@import 'https://example.org/a.css';</style>", "from another machine"),
    ("<img alt='x' src='gone.png'>", "not there"),
    ("<img src='page.html'>", "no words"),
])  # fmt: skip
def test_the_check_of_pages_notices_each_kind_of_fault(tmp_path, html, message):
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    (found,) = docs.problems(tmp_path)
    assert message in found


def test_the_check_of_pages_passes_good_ones(tmp_path):
    links = "<a href='#a%25b'>x</a><a href='https://example.org'>y</a><a href='page.html?q=1'>z</a>"
    (tmp_path / "page.html").write_text(f"<h1 id='a%b'>A</h1>{links}", encoding="utf-8")
    (tmp_path / "a.css").write_text("p { background: url(data:image/png;base64,AAAA) }", encoding="utf-8")
    assert list(docs.problems(tmp_path)) == []
    (tmp_path / "a.css").write_text("p { background: url(https://example.org/a.png) }", encoding="utf-8")
    assert len(list(docs.problems(tmp_path))) == 1
