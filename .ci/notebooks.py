"""`make notebooks`: run every notebook from top to bottom and store what it shows. Needs the test extra and Chromium.

Stored are text, figures and a PNG still of each figure. Left out is what is different in every run or means nothing without a
kernel: widget states and views, times, version numbers. A notebook that fails stays as it was.
"""
import base64
import io
import json
import os
import sys
import time
from pathlib import Path

import nbformat
import plotly.io
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
FIGURE = "application/vnd.plotly.v1+json"
VIEW = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def still(figure):
    """A plotly figure, given as JSON, as a PNG in base64. 256 colors are enough for a drawing and make it three times smaller."""
    from PIL import Image  # only here: who hands out exercises has the notebooks extra alone

    layout = figure["layout"]
    size = {"width": layout.get("width", 900), "height": layout.get("height", 450)}
    drawn = plotly.io.to_image({"data": figure["data"], "layout": layout}, "png", **size)
    small = io.BytesIO()
    # max coverage keeps the color of a thin line; the default would give it up for one more shade of a large area
    colors = Image.open(io.BytesIO(drawn)).convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    colors.save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def clean(notebook):
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = {key: value for key, value in cell.metadata.items() if key in ("tags", "nbgrader")}
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            data.pop(VIEW, None)
            if FIGURE in data and "image/png" not in data:
                data["image/png"] = still(data[FIGURE])


def text(notebook):
    """The notebook as nbformat writes it, but each figure on one line: an indented figure is twice as large."""
    figures = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if FIGURE in output.get("data", {}):
                place = f"figure {len(figures)}"
                figures[place], output.data[FIGURE] = output.data[FIGURE], place
    written = nbformat.writes(notebook)
    for place, figure in figures.items():
        written = written.replace(f'"{FIGURE}": "{place}"', f'"{FIGURE}": {json.dumps(figure, separators=(",", ":"), ensure_ascii=False)}')
    return written + "\n"


def execute(path, notebook=None):
    """Run what is stored at ``path``, or another notebook in its place, and store it there."""
    notebook = notebook or nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False, coalesce_streams=True,
                            resources={"metadata": {"path": path.parent}})
    client.execute()
    clean(notebook)
    nbformat.validate(notebook)
    part = path.with_suffix(".part")
    part.write_text(text(notebook), encoding="utf-8")
    os.replace(part, path)


def main(names):
    paths = [Path(name).resolve() for name in names] or sorted(FOLDER.glob("*.ipynb"))  # exercises.py makes the others
    for number, path in enumerate(paths, 1):
        start = time.time()
        print(f"[{number}/{len(paths)}] {path.name} ...", end=" ", flush=True)
        try:
            execute(path)
        except CellExecutionError as error:
            sys.exit(f"a cell failed; the stored notebook stays as it was.\n{error}")
        print(f"{time.time() - start:.0f} s, {path.stat().st_size // 1000} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
