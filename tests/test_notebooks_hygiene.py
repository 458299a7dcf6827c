"""The stored notebooks are small, executed in order, the same on every machine, and readable without a kernel."""
import ast
import copy
import importlib
import json
import re
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("**/*.ipynb"))
COURSE = sorted(FOLDER.glob("*.ipynb"))
STARTERS = sorted((FOLDER / "exercises").glob("*.ipynb"))  # exercises to be filled in: stored as they are, not run
LARGEST = 500_000
LINES, LETTERS = 25, 106  # of a code cell; JupyterLab beside its file browser shows that many letters on a page 1,280 px wide
VIEW = "application/vnd.jupyter.widget-view+json"
FIGURE = "application/vnd.plotly.v1+json"
PICTURES = ("image/png", "image/svg+xml", FIGURE)
# Libraries that a learner meets; what else a notebook needs, minimodel and k3viz give it
LIBRARIES = {"minimodel", "k3viz", "torch", "numpy"} | set(sys.stdlib_module_names)
MODULES = {"minimodel": {"checks"}}  # public, but not imported with the package
ABSOLUTE_PATH = re.compile(r"(?<![\w./:-])/(?:home|Users|root|tmp|work|opt|mnt|srv|usr|var|builds|content)/[\w.]|\b[A-Z]:\\\\?[A-Za-z]")
TIMESTAMP = re.compile(r"\b20\d\d-\d\d-\d\d[T ]\d\d:\d\d|\b\d\d:\d\d:\d\d\b")


def strings(node):
    """Every text in a notebook, without the encoded pictures and arrays."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, list):
        for item in node:
            yield from strings(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key not in ("image/png", "image/jpeg", "bdata", "id"):
                yield from strings(value)


def stored_state_problems(notebook):
    if "widgets" in notebook.metadata:
        yield "metadata.widgets is stored"
    for cell in notebook.cells:
        if "execution" in cell.metadata:
            yield "a cell's metadata holds execution times"
        for output in cell.get("outputs", []):
            if VIEW in output.get("data", {}):
                yield "an output is a widget view, which shows an error without its kernel"
    for text in strings(notebook):
        for pattern, name in ((ABSOLUTE_PATH, "an absolute path"), (TIMESTAMP, "a timestamp")):
            for match in pattern.finditer(text):
                yield f"{name}: ...{text[max(0, match.start() - 20):match.end() + 30]!r}"


def execution_problems(notebook):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    counts = [cell.execution_count for cell in cells]
    if counts != list(range(1, len(cells) + 1)):
        yield f"not executed from top to bottom: the execution counts are {counts}"
    for cell in cells:
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"a stored error: {output.ename}: {output.evalue}"
            if output.get("name") == "stderr":
                yield f"a stored warning: {output.text[:100]!r}"


def public_names(module):
    """What `from module import name` may name; None stands for `import module` itself, which only the two packages allow."""
    listed = getattr(importlib.import_module(module), "__all__", ())
    listed = {*listed, *MODULES.get(module, ())}
    return listed | {None} if "." not in module else listed


def import_problems(notebook):
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    python = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())
    for node in ast.walk(ast.parse(python)):
        if isinstance(node, ast.Import):
            names = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            top = module.split(".")[0]
            if top not in LIBRARIES:
                yield f"imports {module}"
            elif top in ("minimodel", "k3viz") and name not in public_names(module):
                yield f"imports {name or module}: {module} has no such public name"


def description_problems(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            tags = re.findall(r"<img[^>]*>", cell.source)
            if re.search(r"!\[\s*\]\(", cell.source) or any(not re.search(r'\balt="[^"]+"', tag) for tag in tags):
                yield "an image in a text cell has no alt text"
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            title = data.get(FIGURE, {}).get("layout", {}).get("title", {}).get("text", "")
            words = data.get("text/plain") or re.sub(r"</?\w[^<>]*>", "", title)
            if any(kind in data for kind in PICTURES) and (len(words) < 20 or words.startswith(("<", "Figure("))):
                yield f"a picture has no description in words, neither text/plain nor a figure's title: {words[:60]!r}"


def size_problems(notebook):
    for number, cell in enumerate(notebook.cells):
        lines = cell.source.splitlines()
        if cell.cell_type == "code" and (len(lines) > LINES or any(len(line) > LETTERS for line in lines)):
            yield f"cell {number} has {len(lines)} lines, the longest of {max(map(len, lines))} letters: more than {LINES} or {LETTERS}"


def missing_parts(notebook):
    """What every notebook of the course has: a prediction, a panel, the price, a box of mistakes, three exercises and the sources."""
    text = "\n".join(cell.source for cell in notebook.cells)
    parts = {"**Predict.**": 1, "_panel(": 1, "What articles get wrong": 1, "## Exercises": 1, "## Sources": 1,
             "Acme|[Mm]eeting|Thursday": 1, r"(?m)^\*\*[123]\. ": 3, "</details>": 2}  # fmt: skip
    for part, times in parts.items():
        found = len(re.findall(part if "|" in part or "(?m)" in part else re.escape(part), text))
        if found < times:
            yield f"{part!r} is there {found} times, not {times}"


def course_problems(notebook):
    """What a learner would trip over: an import far down, more exercises than three, a helper where there is a public one."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    for source in code[1:]:
        yield from (f"an import below the first code cell: {line}" for line in re.findall(r"(?m)^\s*(?:import|from) \w.*", source))
    exercises = re.findall(r"(?m)^\*\*(\d)\. ", "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown"))
    if exercises != ["1", "2", "3"]:
        yield f"the exercises are numbered {exercises}"
    if any("def check(" in source for source in code):
        yield "defines check, which minimodel.checks has"


def problems(notebook):
    checks = (stored_state_problems, execution_problems, import_problems, description_problems)
    return [problem for check in checks for problem in check(notebook)]


def starter_problems(notebook):
    if any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells):
        yield "a starter has been run"
    for check in (stored_state_problems, import_problems, description_problems):
        yield from check(notebook)


def test_the_first_notebook_is_there():
    assert FOLDER / "00_start_here.ipynb" in NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_notebook(path):
    assert path.stat().st_size <= LARGEST
    found = starter_problems if path in STARTERS else problems
    assert list(found(nbformat.read(path, as_version=4))) == []


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)
def test_notebook_of_the_course(path):
    notebook = nbformat.read(path, as_version=4)
    assert [*size_problems(notebook), *missing_parts(notebook), *course_problems(notebook)] == []


# ---- the checks themselves: each must notice its own kind of fault

def good_notebook():
    figure = nbformat.v4.new_output("display_data", {"image/png": "AAAA", "text/plain": "Memory grows from 1 kB to 8 kB."})
    code = [nbformat.v4.new_code_cell("import torch\nfrom minimodel import kda", execution_count=1),
            nbformat.v4.new_code_cell("kda", execution_count=2, outputs=[figure])]
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("![A curve](curve.png)"), *code])


def test_a_starter_that_has_been_run_is_noticed():
    assert list(starter_problems(good_notebook())) == ["a starter has been run"]


def spoil(change):
    notebook = copy.deepcopy(good_notebook())
    change(notebook, notebook.cells[-1])
    return problems(notebook)


def test_a_good_notebook_has_no_problems():
    assert problems(good_notebook()) == []


@pytest.mark.parametrize("change, word", [
    (lambda nb, cell: cell.update(execution_count=None), "not executed"),
    (lambda nb, cell: cell.update(execution_count=7), "not executed"),
    (lambda nb, cell: nb.metadata.update(widgets={}), "metadata.widgets"),
    (lambda nb, cell: cell.outputs[0].data.update({VIEW: {}}), "widget view"),
    (lambda nb, cell: cell.metadata.update(execution={}), "execution times"),
    (lambda nb, cell: cell.update(source="open('/home/me/notes.txt')"), "absolute path"),
    (lambda nb, cell: cell.update(source=r"open(r'C:\Users\me')"), "absolute path"),
    (lambda nb, cell: cell.outputs.append(nbformat.v4.new_output("stream", text="2026-01-02 10:20")), "timestamp"),
    (lambda nb, cell: cell.outputs.append(nbformat.v4.new_output("error", ename="ValueError", evalue="no")), "stored error"),
    (lambda nb, cell: cell.outputs.append(nbformat.v4.new_output("stream", name="stderr", text="careful")), "stored warning"),
    (lambda nb, cell: cell.update(source="import manim"), "imports manim"),
    (lambda nb, cell: cell.update(source="from minimodel import _secret"), "no such public name"),
    (lambda nb, cell: cell.update(source="import minimodel.kda"), "no such public name"),
    (lambda nb, cell: cell.outputs[0].data.pop("text/plain"), "no description"),
    (lambda nb, cell: nb.cells[0].update(source="![](curve.png)"), "no alt text"),
    (lambda nb, cell: nb.cells[0].update(source='<img src="curve.png">'), "no alt text"),
])
def test_a_fault_is_noticed(change, word):
    found = spoil(change)
    assert any(word in problem for problem in found), found


@pytest.mark.parametrize("source", ["\n" * LINES + "1", "1  # " + "x" * LETTERS])
def test_a_large_cell_is_noticed(source):
    assert len(list(size_problems(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])))) == 1


def test_a_missing_part_is_noticed():
    notebook = nbformat.read(COURSE[1], as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("**Predict.**", "").replace("**3. ", "**4. ")
    assert len(list(missing_parts(notebook))) == 2


@pytest.mark.parametrize("source, word", [
    ("if ready:\n    from minimodel import kda", "an import below"), ("def check(answer, is_right, hint):\n    pass", "defines check"),
])
def test_a_fault_of_the_course_is_noticed(source, word):
    notebook = nbformat.read(COURSE[1], as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(source))
    (problem,) = course_problems(notebook)
    assert problem.startswith(word)


def test_a_fourth_exercise_is_noticed():
    notebook = nbformat.read(COURSE[1], as_version=4)
    notebook.cells.append(nbformat.v4.new_markdown_cell("**4. One more.** ..."))
    assert len(list(course_problems(notebook))) == 1


def test_notebook_files_are_plain_json_with_stable_cell_ids():
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        ids = [cell["id"] for cell in cells]
        assert len(set(ids)) == len(ids), path.name
