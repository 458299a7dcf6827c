"""`make docs`: build the documentation site into site/ and check it. Standard library only; Sphinx comes with the docs extra.

A warning of Sphinx is an error. Then every page that it wrote is read: links and anchors must lead somewhere, pictures must be
described in words, and nothing may be loaded from another machine. A build that fails leaves the site as it was.
"""
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import setup

SITE = setup.ROOT / "site"
LOADED = {"script": "src", "img": "src", "source": "src", "video": "src", "audio": "src", "iframe": "src", "embed": "src", "object": "data"}
LINKS_TO_PAGES = {"index", "next", "prev", "search"}  # <link rel=...> that loads nothing
LOADED_BY_CSS = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])([^"')]+)""")


class Page(HTMLParser):
    """What an HTML page offers (anchors), leads to (links) and loads; and its pictures without words."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.loads, self.wordless = set(), [], [], []
        self.in_style = False
        self.feed(text)

    def handle_starttag(self, tag, pairs):
        attributes = dict(pairs)
        self.anchors.add(attributes.get("id"))
        self.in_style = tag == "style"
        if tag == "a":
            self.anchors.add(attributes.get("name"))
            self.links.append(attributes.get("href"))
        elif tag == "link":
            to_page = LINKS_TO_PAGES.issuperset((attributes.get("rel") or "").split())
            (self.links if to_page else self.loads).append(attributes.get("href"))
        elif tag in LOADED:
            self.loads.append(attributes.get(LOADED[tag]))
        if tag == "img" and not attributes.get("alt"):
            self.wordless.append(attributes.get("src"))
        self.loads += LOADED_BY_CSS.findall(attributes.get("style") or "")

    def handle_data(self, data):
        if self.in_style:
            self.loads += LOADED_BY_CSS.findall(data)

    def handle_endtag(self, tag):
        self.in_style = False


def problems(site):
    """What a reader of the site, without network, would stumble over."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        for source in page.wordless:
            yield f"{name}: no words for the picture {source}"
        for url in filter(None, page.loads):
            yield from load_problems(name, path, url)
        for url in filter(None, page.links):
            parts = urlsplit(url)
            if parts.scheme in ("http", "https", "mailto"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                yield f"{name}: the link {url} leads nowhere"
            elif target in pages and parts.fragment and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{name}: the link {url} leads to no such anchor"
    for path in sorted(site.rglob("*.css")):
        for url in LOADED_BY_CSS.findall(path.read_text(encoding="utf-8")):
            yield from load_problems(path.relative_to(site).as_posix(), path, url)


def load_problems(name, path, url):
    parts = urlsplit(url)
    if parts.scheme == "data":
        return
    if parts.scheme or parts.netloc:
        yield f"{name}: loads {url} from another machine"
    elif not (path.parent / unquote(parts.path)).is_file():
        yield f"{name}: loads {url}, which is not there"


def build(root, site, *, python=sys.executable):
    """Build the site of the repository at ``root``. Leaves ``site`` as it was, and the program, where anything is wrong."""
    part = site.with_name(site.name + ".part")  # MyST-NB writes beside the pages too
    shutil.rmtree(part, ignore_errors=True)
    command = [python, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", root / "docs", "-d", part / "doctrees",
               root, part / "html"]
    if subprocess.run([str(word) for word in command], cwd=root).returncode:
        sys.exit("the site was not built: Sphinx's messages are above.")
    found = list(problems(part / "html"))
    if found:
        sys.exit("the site was not built:\n" + "\n".join(found))
    shutil.rmtree(site, ignore_errors=True)
    (part / "html").replace(site)
    shutil.rmtree(part)


def main():
    start = time.time()
    setup.main("docs")
    setup.say("Building the site (about half a minute)")
    build(setup.ROOT, SITE, python=setup.PYTHON)
    setup.say(f"Built in {time.time() - start:.0f} s. Open {SITE / 'index.html'} in a browser; it needs no network.")


if __name__ == "__main__":
    main()
