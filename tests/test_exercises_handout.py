"""What .ci/assign.py hands out: a students' copy without solutions, nbgrader's source folder, Otter's master notebooks."""
import importlib.util
import os
import shutil
import subprocess
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


def said(capsys, *arguments):
    """What a wrong call says; it must end with a status that is not zero."""
    with pytest.raises(SystemExit) as stopped:
        assign.main(list(map(str, arguments)))
    assert stopped.value.code
    return capsys.readouterr().err if isinstance(stopped.value.code, int) else stopped.value.code


@pytest.mark.parametrize("seed, shown", [("", "''"), (" ", "' '"), ("\udcff", r"'\udcff'")])
def test_a_seed_that_would_be_none_is_refused(seed, shown, tmp_path, capsys):
    words = said(capsys, "release", tmp_path / "new", "--seed", seed)
    assert f"--seed must be a number or a name in UTF-8 that is not blank, got {shown}" in words and not (tmp_path / "new").exists()


def test_a_target_that_cannot_be_a_folder_is_told_in_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere/at/all")
    assert said(capsys, "otter", tmp_path / "file").endswith("file is a file: choose a new one")
    for target in (tmp_path / "file/sub", tmp_path / "link", tmp_path / ("long" * 100)):
        assert said(capsys, "otter", target).startswith(f"folder {target} cannot be made: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_nothing_half_written_stays(tmp_path, monkeypatch, capsys):
    whole = exercises.solution_path
    empty = tmp_path / f"{exercises.SOURCES[1].stem}.ipynb"
    notebook = nbformat.read(whole(exercises.SOURCES[1]), as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    nbformat.write(notebook, empty)
    monkeypatch.setattr(exercises, "solution_path", lambda source: empty if source == exercises.SOURCES[1] else whole(source))
    assert "has a check without its output: run python .ci/exercises.py 02 first" in said(capsys, "otter", tmp_path / "new")
    empty.unlink()
    for goal in ("otter", "nbgrader"):
        assert said(capsys, goal, tmp_path / "new").startswith("nothing was handed out: ")
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("arguments", [["assign.py", "release"], ["assign.py", "nbgrader"], ["assign.py", "otter"], ["exercises.py"]],
                         ids=" ".join)  # fmt: skip
def test_a_students_copy_says_that_it_cannot_hand_out(students, tmp_path, arguments):
    script, *goal = arguments
    command = [sys.executable, str(students / ".ci" / script), *goal, *([str(tmp_path / "new")] if goal else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "a students' copy has none" in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""
    assert not (tmp_path / "new").exists() and not (students / "notebooks/exercises/solutions").exists()


@pytest.mark.parametrize("arguments, code, words", [(["99"], 2, "unknown exercise 99; there are 01_the_whiteboard, "), (["--help"], 0, "")])
def test_the_maker_of_exercises_answers_a_wrong_name_and_a_call_for_help(arguments, code, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        exercises.main(arguments)
    shown = capsys.readouterr()
    assert stopped.value.code == code and words in shown.err and ("python .ci/exercises.py 01 05" in shown.out) == (code == 0)


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """A little course without .git, as a downloaded archive is, with what programs and an instructor leave in it."""
    for name in ("minimodel/kda.py", "notebooks/exercises/README.md", "notebooks/exercises/solutions/01.ipynb", "tests/test_exercises.py",
                 "tests/site/page.py", "minimodel/__pycache__/kda.pyc", "notebooks/media/film.mp4", "site/index.html", ".venv/lib/torch.py",
                 "submitted/anna/01.ipynb", "docs/run.log"):  # fmt: skip
        (tmp_path / "archive" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "archive" / name).write_text("text")
    for name in assign.COURSE:
        if not (tmp_path / "archive" / name).exists():
            (tmp_path / "archive" / name).write_text("text")
    shutil.copy2(ROOT / ".gitignore", tmp_path / "archive/.gitignore")
    monkeypatch.setattr(assign, "ROOT", tmp_path / "archive")
    return tmp_path


def test_an_archive_without_git_hands_out_the_course_and_nothing_else(archive):
    assign.main(["release", str(archive / "new")])
    made = {path.relative_to(archive / "new").as_posix() for path in (archive / "new").rglob("*") if path.is_file()}
    folders = {"minimodel", "notebooks", "tests", "docs"}
    assert made == {"minimodel/kda.py", "notebooks/exercises/README.md", "tests/site/page.py"} | set(assign.COURSE) - folders


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="compares with what git tracks")
def test_what_is_handed_out_without_git_is_what_git_tracks_at_the_top():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    assert {name.partition("/")[0] for name in filter(None, os.fsdecode(listed).split("\0"))} == set(assign.COURSE)
