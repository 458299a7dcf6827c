"""What .ci/assign.py hands out: a students' copy without solutions, nbgrader's source folder, Otter's master notebooks."""
import importlib.util
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent


def load(name):
    sys.path.insert(0, str(ROOT / ".ci"))  # it imports its neighbors
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / ".ci"))
    return module


assign = load("assign")
exercises = assign.exercises


def solutions():
    """Every solution's lines, as one text each."""
    for source in exercises.SOURCES:
        for cell in exercises.build(source, solved=True).cells:
            yield from (body.strip() for _, body in exercises.SOLUTION.findall(cell.source + "\n"))


@pytest.fixture(scope="module")
def students(tmp_path_factory):
    folder = tmp_path_factory.mktemp("students") / "course"
    assign.main(["release", str(folder), "--seed", "anna"])
    return folder


def test_a_release_is_the_course_without_solutions(students):
    assert (students / "minimodel/checks/grading.py").exists() and (students / "Makefile").exists()
    assert not (students / "notebooks/exercises/solutions").exists() and not (students / "notebooks/exercises/source").exists()
    text = "\n".join(path.read_text(encoding="utf-8") for path in (students / "notebooks/exercises").rglob("*") if path.is_file())
    assert "BEGIN SOLUTION" not in text and "For instructors" not in text and "solutions/" not in text
    cells = "\n".join(cell.source for path in (students / "notebooks").rglob("*.ipynb") for cell in nbformat.read(path, 4).cells)
    assert [body for body in solutions() if "\n" in body and body in cells] == []


def test_a_release_with_a_seed_sets_it_before_the_first_check(students):
    for source in exercises.SOURCES:
        notebook = nbformat.read(students / "notebooks/exercises" / f"{source.stem}.ipynb", 4)
        first = next(cell for cell in notebook.cells if cell.cell_type == "code")
        assert first.source.startswith('import os\n\nos.environ.setdefault("K3_SEED", \'anna\')\n')


def test_nbgrader_gets_a_folder_an_assignment(tmp_path):
    assign.main(["nbgrader", str(tmp_path / "course")])
    for source in exercises.SOURCES:
        made = tmp_path / "course/source" / source.stem / f"{source.stem}.ipynb"
        assert made.read_bytes() == exercises.solution_path(source).read_bytes()


@pytest.mark.parametrize("source", exercises.SOURCES, ids=lambda source: source.stem)
def test_a_master_notebook_has_one_question_a_check(source):
    notebook = assign.master(source)
    nbformat.validate(notebook)
    marks = [cell.source for cell in notebook.cells if cell.cell_type == "raw"]
    assert marks[0].startswith(f"# ASSIGNMENT CONFIG\nname: {source.stem}\n")
    order = ["# BEGIN QUESTION", "# BEGIN SOLUTION", "# END SOLUTION", "# BEGIN TESTS", "# END TESTS", "# END QUESTION"]
    checks = [cell for cell in notebook.cells if cell.source.startswith("checks.")]
    assert [mark.partition("\n")[0] for mark in marks[1:]] == order * len(checks)
    names = [mark.split("\n")[1].removeprefix("name: ") for mark in marks if mark.startswith("# BEGIN QUESTION")]
    assert names == [exercises.CHECK.match(cell.source)[1] for cell in checks] and len(set(names)) == len(names)
    for name, cell in zip(names, checks, strict=True):
        assert "\n" not in cell.source and [output.text for output in cell.outputs] == [f"{name}: right, on 5 inputs\n"]
    text = "\n".join(cell.source for cell in notebook.cells)
    assert "###" not in text.replace("####", "") and text.count("# BEGIN SOLUTION") == text.count("# END SOLUTION")


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit, match="is not empty"):
        assign.main(["otter", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_seed_goes_with_a_release_only(tmp_path, capsys):
    with pytest.raises(SystemExit):
        assign.main(["otter", str(tmp_path / "new"), "--seed", "anna"])
    assert "--seed goes with release" in capsys.readouterr().err and not (tmp_path / "new").exists()
