"""Write the exercise notebooks, starters and solutions, from their one source. `make notebooks` calls it.

    python .ci/exercises.py            all of them
    python .ci/exercises.py 01 05      those of two sources, by number or name

A source is a Python file in notebooks/exercises/source with cells in percent format: "# %%" begins code, "# %% [markdown]" text. Of a
solution,

    ### BEGIN SOLUTION
    ...
    ### END SOLUTION

the starter keeps neither the markers nor what is between them; it raises NotImplementedError instead. A cell "# paste: l2norm, route"
stands for solutions of earlier notebooks. Solutions keep the markers and nbgrader's metadata, so they are what an instructor gives to
nbgrader. They are run from top to bottom and stored with what they print; starters are stored as they are, not run.
"""
import argparse
import os
import re
import sys
import time

import nbformat
from nbclient.exceptions import CellExecutionError

import notebooks

FOLDER = notebooks.FOLDER / "exercises"
SOURCES = sorted((FOLDER / "source").glob("[0-9]*.py"))
SOLUTION = re.compile(r"^( *)### BEGIN SOLUTION\n(.*?)^ *### END SOLUTION\n?", re.DOTALL | re.MULTILINE)
FUNCTION = re.compile(r"^(?:def|class) (\w+)", re.MULTILINE)
CHECK = re.compile(r"^checks\.(\w+)\(", re.MULTILINE)


def cells(path):
    """(kind, text) of every cell of a source; kind is "markdown" or "code"."""
    for part in re.split(r"^# %%", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if head.strip() == "[markdown]":
            yield "markdown", "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines())
        else:
            yield "code", pasted(body.strip(), path)


def pasted(text, path):
    """A paste cell with the named functions in it, taken from the sources before ``path``."""
    if not text.startswith("# paste: "):
        return text
    line, _, rest = text.partition("\n")
    earlier = {}
    for source in SOURCES[: SOURCES.index(path)]:
        for kind, cell in cells(source):
            if kind == "code" and SOLUTION.search(cell):
                earlier[FUNCTION.search(cell)[1]] = cell
    names = line.removeprefix("# paste: ").split(", ")
    # in this notebook the docstrings would only be in the way
    return "\n\n\n".join([rest, *(re.sub(r'^ *""".*?"""\n', "", earlier[name], flags=re.DOTALL | re.MULTILINE) for name in names)]).strip()


def starter(text):
    """A code cell without its solutions; what stands in their place names the function that is missing."""

    def missing(found):
        return f'{found[1]}raise NotImplementedError("{FUNCTION.findall(found.string[: found.start()])[-1]}")\n'

    return SOLUTION.sub(missing, text + "\n").strip()


def grading(text):
    """nbgrader's metadata of a code cell: a solution to write, a check that counts one point, or neither."""
    check, solution = CHECK.search(text), SOLUTION.search(text)
    if check is None and solution is None:
        return {}
    mark = {"schema_version": 3, "task": False, "grade": check is not None, "locked": check is not None, "solution": check is None}
    if check is not None:
        return {"nbgrader": {**mark, "grade_id": f"check_{check[1]}", "points": 1}}
    return {"nbgrader": {**mark, "grade_id": FUNCTION.search(text)[1]}}


def build(path, *, solved):
    """The notebook of a source, not run."""
    notebook = nbformat.v4.new_notebook(metadata=notebooks.METADATA)
    for number, (kind, text) in enumerate(cells(path)):
        if kind == "markdown":
            notebook.cells.append(nbformat.v4.new_markdown_cell(text, id=f"text-{number:02}"))
        else:
            source = text if solved else starter(text)
            notebook.cells.append(nbformat.v4.new_code_cell(source, id=f"code-{number:02}", metadata=grading(text)))
    return notebook


def starter_path(source):
    return FOLDER / f"{source.stem}.ipynb"


def solution_path(source):
    return FOLDER / "solutions" / f"{source.stem}.ipynb"


def require_sources():
    """End with a sentence in a copy that was made for students: everything here is made from what they don't get."""
    if not SOURCES:
        sys.exit(f"there is no exercise source in {FOLDER / 'source'}: a students' copy has none; run this in the full course")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a source's name or number, 01 for instance (default: all)")
    names = parser.parse_args(arguments).names
    require_sources()
    if unknown := [name for name in names if name not in {known for source in SOURCES for known in (source.stem, source.stem[:2])}]:
        parser.error(f"unknown exercise {', '.join(unknown)}; there are {', '.join(source.stem for source in SOURCES)}")
    chosen = [source for source in SOURCES if not names or source.stem in names or source.stem[:2] in names]
    (FOLDER / "solutions").mkdir(exist_ok=True)
    for source in chosen:
        start = time.time()
        print(f"{source.stem}, starter and solution ...", end=" ", flush=True)
        part = starter_path(source).with_suffix(".part")
        part.write_text(notebooks.text(build(source, solved=False)), encoding="utf-8")
        os.replace(part, starter_path(source))
        try:
            notebooks.execute(solution_path(source), build(source, solved=True))
        except CellExecutionError as error:
            sys.exit(f"a solution failed; the stored one stays as it was.\n{error}")
        print(f"{time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
