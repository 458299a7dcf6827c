"""Stored notebooks on the site: their plotly figures answer to the mouse, without a kernel."""
import html
import json
import re

FIGURE = "application/vnd.plotly.v1+json"
DRAWING = """<div class="k3-figure">
<div class="k3-plot" role="img" aria-label="{words}" style="height:{height}px"></div>
<script type="application/json">{figure}</script>
</div>"""
NOTE = "*The notebook as it is stored. Its figures answer to the mouse; sliders and buttons need a kernel, which `make lab` gives them.*"


def words(data):
    """What a figure shows, for those who can't see it: its sentence, or else its title."""
    title = data[FIGURE]["layout"].get("title", {}).get("text", "")
    return "".join(data.get("text/plain", "")) or html.unescape(re.sub(r"<[^>]*>", " ", title))


def drawing(data):
    """A stored figure as HTML that static/figures.js draws: a place of its height, and its JSON beside it."""
    figure = data[FIGURE]
    return DRAWING.format(
        words=html.escape(" ".join(words(data).split())),
        height=figure["layout"].get("height", 450),
        figure=json.dumps(figure, separators=(",", ":")).replace("</", "<\\/"),  # "</script>" in a text would end the script
    )


def draw(app, docname, source):
    """Replace each figure that a notebook stores by its drawing."""
    if app.env.doc2path(docname).suffix != ".ipynb":
        return
    notebook = json.loads(source[0])
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", []) if FIGURE in output.get("data", {})]
    for output in outputs:
        output["data"] = {"text/html": drawing(output["data"])}
    if outputs:
        notebook["cells"].insert(1, {"cell_type": "markdown", "id": "site-note", "metadata": {}, "source": NOTE})
    source[0] = json.dumps(notebook)


def load_plotly(app, pagename, templatename, context, doctree):
    """Pages with figures, and only these, load the one plotly.js."""
    if 'class="k3-plot"' in context.get("body", ""):
        app.add_js_file("plotly.min.js", loading_method="defer")
        app.add_js_file("figures.js", loading_method="defer")
        context["furo_hide_toc"] = True  # figures need the width


def setup(app):
    app.connect("source-read", draw)
    app.connect("html-page-context", load_plotly)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
