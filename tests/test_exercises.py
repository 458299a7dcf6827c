"""The exercises: one source, starters that fail where they should and only there, solutions that pass, a chain that ends in Thursday."""
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST_CELL = 25  # lines


def load_exercises():
    sys.path.insert(0, str(ROOT / ".ci"))  # it imports its neighbor notebooks.py
    try:
        spec = importlib.util.spec_from_file_location("exercises", ROOT / ".ci" / "exercises.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / ".ci"))
    return module


exercises = load_exercises()
SOURCES = pytest.mark.parametrize("source", exercises.SOURCES, ids=lambda source: source.stem)


def run_cells(notebook):
    """Run the code cells one after the other, also after a failure. Returns the errors by cell id."""
    names, errors = {}, {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            try:
                exec(compile(cell.source, cell.id, "exec"), names)
            except Exception as error:
                errors[cell.id] = error
    return errors


def graded(notebook):
    return [cell for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("grade")]


@SOURCES
def test_the_stored_starter_is_the_source_without_its_solutions(source):
    built = exercises.build(source, solved=False)
    assert exercises.starter_path(source).read_text(encoding="utf-8") == exercises.notebooks.text(built), "run: python .ci/exercises.py"


@SOURCES
def test_the_stored_solution_is_the_source(source):
    """Cells, ids and metadata; what they print is compared by nbval."""
    stored, built = nbformat.read(exercises.solution_path(source), as_version=4), exercises.build(source, solved=True)
    parts = [[(cell.id, cell.cell_type, cell.source, cell.metadata) for cell in notebook.cells] for notebook in (stored, built)]
    assert parts[0] == parts[1], "run: python .ci/exercises.py"


def test_no_notebook_is_left_without_a_source():
    folder = exercises.FOLDER
    made = {path for source in exercises.SOURCES for path in (exercises.starter_path(source), exercises.solution_path(source))}
    assert made == set(folder.rglob("*.ipynb"))


@SOURCES
def test_a_starter_fails_its_checks_and_only_them(source):
    from minimodel.checks import NotYet

    notebook = exercises.build(source, solved=False)
    errors = run_cells(notebook)
    assert list(errors) == [cell.id for cell in graded(notebook)]
    assert {type(error) for error in errors.values()} <= {NotYet, NotImplementedError}
    functions = {name for cell in notebook.cells for name in exercises.FUNCTION.findall(cell.source)}
    for error in errors.values():  # each says which function is missing
        assert re.search(r"not yet\. `(\w+)` is not written: put your lines in place of", str(error))[1] in functions


@SOURCES
def test_a_solution_passes_all_its_checks(source, capsys):
    notebook = exercises.build(source, solved=True)
    assert run_cells(notebook) == {}
    said = capsys.readouterr().out
    for cell in graded(notebook):
        assert f"{exercises.CHECK.search(cell.source)[1]}: right, on 5 inputs\n" in said


def test_the_chain_ends_in_the_learners_own_model_saying_thursday():
    stored = nbformat.read(exercises.solution_path(exercises.SOURCES[-1]), as_version=4)
    assert graded(stored)[-1].outputs[0].text.rstrip().endswith("The meeting is now on Thursday.")


def test_every_step_has_its_place_in_the_notebooks_in_order():
    from minimodel import checks

    cells = [cell for source in exercises.SOURCES for cell in graded(exercises.build(source, solved=True))]
    names = [exercises.CHECK.findall(cell.source) for cell in cells]
    assert all(len(found) == 1 for found in names)
    assert [found[0] for found in names] == list(checks.STEPS)


@SOURCES
def test_a_starter_gives_no_solution_away(source):
    text = "\n".join(cell.source for cell in exercises.build(source, solved=False).cells)
    assert "SOLUTION" not in text
    solved = exercises.build(source, solved=True)
    for cell in solved.cells:
        for _, body in exercises.SOLUTION.findall(cell.source + "\n"):
            assert body.strip() not in text


@SOURCES
def test_cells_are_short_and_every_step_says_what_to_return(source):
    notebook = exercises.build(source, solved=True)
    assert {cell.id: cell.source.count("\n") + 1 for cell in notebook.cells if cell.source.count("\n") >= LONGEST_CELL} == {}
    steps = [cell.source for cell in notebook.cells if cell.source.startswith("## Step ")]
    assert 5 <= len(steps) <= 8 and len(steps) == len(graded(notebook))
    assert [text.split()[2] for text in steps] == [f"{n}." for n in range(1, len(steps) + 1)]
    assert all("Returns" in text for text in steps)


@SOURCES
def test_nbgrader_can_read_the_solution(source):
    """What nbgrader 0.9 asks of a notebook: its schema 3, ids of their own, points where something is graded, markers that close."""
    notebook = exercises.build(source, solved=True)
    marks = [cell.metadata["nbgrader"] for cell in notebook.cells if "nbgrader" in cell.metadata]
    ids = [mark["grade_id"] for mark in marks]
    assert len(set(ids)) == len(ids)
    for mark in marks:
        assert set(mark) == {"schema_version", "task", "grade", "grade_id", "locked", "solution"} | ({"points"} if mark["grade"] else set())
        assert mark["schema_version"] == 3 and mark["locked"] == mark["grade"] != mark["solution"]
    for cell in notebook.cells:
        text = cell.source
        assert text.count("### BEGIN SOLUTION") == text.count("### END SOLUTION") == len(exercises.SOLUTION.findall(text + "\n"))
        if text.count("### BEGIN SOLUTION"):
            assert cell.metadata["nbgrader"]["solution"]


# ---- the generator itself ----

def test_a_starter_cell_keeps_everything_but_the_solution():
    solved = """def a(x):
    '''Doc.'''
    ### BEGIN SOLUTION
    y = x
    return y
    ### END SOLUTION


def given():
    pass


def b(x):
    ### BEGIN SOLUTION
    return x
    ### END SOLUTION

print(1)"""
    assert exercises.starter(solved) == """def a(x):
    '''Doc.'''
    raise NotImplementedError("a")


def given():
    pass


def b(x):
    raise NotImplementedError("b")

print(1)"""


def test_the_generator_gives_the_same_bytes_twice():
    source = exercises.SOURCES[0]
    texts = [exercises.notebooks.text(exercises.build(source, solved=False)) for _ in range(2)]
    assert texts[0] == texts[1]
    json.loads(texts[0])


def test_checks_are_imported_only_when_asked_for():
    code = ("import sys, minimodel; print('minimodel.checks' in sys.modules); from minimodel import checks;"
            "print([m for m in ('plotly', 'IPython', 'ipywidgets', 'nbformat') if m in sys.modules])")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split("\n")
    assert said[:2] == ["False", "[]"]
