"""Hand out the exercises: a students' copy, source notebooks for nbgrader, master notebooks for Otter. See docs/teaching.md.

    python .ci/assign.py release FOLDER [--seed SEED]    the course without its solutions
    python .ci/assign.py nbgrader FOLDER                 FOLDER/source/NAME/NAME.ipynb, for nbgrader generate_assignment
    python .ci/assign.py otter FOLDER                    FOLDER/NAME.ipynb, for otter assign

FOLDER must be empty or new; if something fails, nothing is left of it. With a seed, every starter of a release sets the
environment variable K3_SEED, if nothing else has set it.
"""
import argparse
import os
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import exercises
import nbformat

import notebooks

ROOT = Path(__file__).resolve().parent.parent
# what only an instructor needs: solutions, what they are made from, and the tests that read them
KEPT_BACK = ("notebooks/exercises/solutions/", "notebooks/exercises/source/", "tests/test_exercise")
# without git: what the course consists of at the top. Whatever else lies there, submissions for instance, is not for students
COURSE = (".ci", ".gitignore", "CITATION.cff", "LICENSE", "Makefile", "README.md", "animations", "benchmarks", "constraints.txt", "docs",
          "k3viz", "manim.cfg", "minimodel", "notebooks", "pyproject.toml", "tests")  # fmt: skip


def files():
    """The course's files: what git tracks or, in an archive that was downloaded, the course's folders without what .gitignore names."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
        if listed.returncode:
            sys.exit(f"git cannot list the files of {ROOT}: {listed.stderr.decode(errors='replace').strip()}")
        return [name for name in os.fsdecode(listed.stdout).split("\0") if name and (ROOT / name).exists()]
    print("No git here: the course's own folders are copied, without what .gitignore names.")
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
    return sorted(path.relative_to(ROOT).as_posix() for name in COURSE for path in kept(ROOT / name, patterns))


def kept(path, patterns):
    """The files at and below a path that no pattern names. Of .gitignore's grammar: NAME, NAME/ (folders only), /NAME (at the top only)."""

    def names_it(pattern):
        anywhere = not pattern.startswith("/") or path.parent == ROOT
        return anywhere and (path.is_dir() or not pattern.endswith("/")) and fnmatch(path.name, pattern.strip("/"))

    if any(map(names_it, patterns)):
        return
    if path.is_dir():
        for inner in path.iterdir():
            yield from kept(inner, patterns)
    elif path.is_file():
        yield path


def release(folder, seed=None):
    """Copy the course's files, without what is kept back."""
    for name in files():
        if not name.startswith(KEPT_BACK):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    page = folder / "notebooks/exercises/README.md"
    for_students = page.read_text(encoding="utf-8").partition("## For instructors")[0]
    page.write_text(for_students.replace(" Solutions are in `solutions/`.", "").rstrip() + "\n", encoding="utf-8")
    for source in exercises.SOURCES if seed is not None else ():
        notebook = exercises.build(source, solved=False)
        first = next(cell for cell in notebook.cells if cell.cell_type == "code")
        first.source = f'import os\n\nos.environ.setdefault("K3_SEED", {seed!r})\n\n{first.source}'
        (folder / "notebooks/exercises" / exercises.starter_path(source).name).write_text(notebooks.text(notebook), encoding="utf-8")


def nbgrader(folder):
    """The stored solutions are nbgrader's source notebooks as they are; it wants a folder for each assignment."""
    for source in exercises.SOURCES:
        target = folder / "source" / source.stem
        target.mkdir(parents=True)
        shutil.copy2(exercises.solution_path(source), target)


def otter(folder):
    for source in exercises.SOURCES:
        (folder / f"{source.stem}.ipynb").write_text(notebooks.text(master(source)), encoding="utf-8")


def printed(cell, source):
    """What a check's cell in a stored solution has printed."""
    text = "".join(output.get("text", "") for output in cell.outputs)
    if not text:
        sys.exit(f"{exercises.solution_path(source)} has a check without its output: run python .ci/exercises.py {source.stem[:2]} first")
    return text


def master(source):
    """A notebook in Otter Assign's format: raw cells begin and end questions, a check's printed line is what its test expects."""
    stored = nbformat.read(exercises.solution_path(source), as_version=4)
    off = "".join(f"\n{name}: false" for name in ("check_all_cell", "export_cell", "solutions_pdf", "template_pdf"))
    cells = [nbformat.v4.new_raw_cell(f"# ASSIGNMENT CONFIG\nname: {source.stem}\ninit_cell: true{off}", id="config")]
    step = None  # cells from a step's first solution to its check belong to one question

    def mark(text):
        cells.append(nbformat.v4.new_raw_cell(f"# {text}", id=f"mark-{len(cells):03}"))

    checks = [cell.metadata["nbgrader"] for cell in stored.cells if cell.metadata.get("nbgrader", {}).get("grade")]
    for cell in stored.cells:
        graded = cell.metadata.get("nbgrader", {})
        text = cell.source.replace("### BEGIN SOLUTION", "# BEGIN SOLUTION").replace("### END SOLUTION", "# END SOLUTION")
        if graded.get("solution") and step is None:
            step = checks.pop(0)
            mark(f"BEGIN QUESTION\nname: {step['grade_id'].removeprefix('check_')}\npoints: {step['points']}")
            mark("BEGIN SOLUTION")
        if graded.get("grade"):
            mark("END SOLUTION")
            mark("BEGIN TESTS")
        check, _, rest = text.partition("\n") if graded.get("grade") else (text, "", "")
        if graded.get("grade"):  # the verdict alone is the test: what else a check's cell shows differs with the seed
            said = nbformat.v4.new_output("stream", name="stdout", text=printed(cell, source).partition("\n")[0] + "\n")
            cells.append(nbformat.v4.new_code_cell(check, id=cell.id, outputs=[said], execution_count=cell.execution_count))
            mark("END TESTS")
            mark("END QUESTION")
            step = None
            if rest.strip():
                cells.append(nbformat.v4.new_code_cell(rest.strip(), id=f"{cell.id}-shows"))
        else:
            cells.append(nbformat.from_dict({**cell, "source": text, "metadata": {}}))
    return nbformat.v4.new_notebook(metadata=notebooks.METADATA, cells=cells)


def is_text(seed):
    """Whether a seed is a word that a notebook can hold; a blank one would be taken for none by the checks."""
    return bool(seed.strip()) and not any("\ud800" <= character <= "\udfff" for character in seed)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("goal", choices=["release", "nbgrader", "otter"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", help="of a release: a number or a student's name")
    options = parser.parse_args(arguments)
    if options.seed is not None and options.goal != "release":
        parser.error("--seed goes with release; graders take the environment variable K3_SEED")
    if options.seed is not None and not is_text(options.seed):
        parser.error(f"--seed must be a number or a name in UTF-8 that is not blank, got {options.seed!a}")
    exercises.require_sources()
    folder = options.folder
    try:
        if folder.exists() and not folder.is_dir():
            sys.exit(f"folder {folder} is a file: choose a new one")
        if folder.exists() and any(folder.iterdir()):
            sys.exit(f"folder {folder} is not empty: choose a new one")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"folder {folder} cannot be made: {error.strerror}")
    try:
        if options.goal == "release":
            release(folder, options.seed)
        else:
            {"nbgrader": nbgrader, "otter": otter}[options.goal](folder)
    except BaseException as error:  # half a course would look like a whole one
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            sys.exit(f"nothing was handed out: {error}")
        raise
    print(f"{folder}: {options.goal}, {len(exercises.SOURCES)} notebooks")


if __name__ == "__main__":
    main()
