"""Hand out the exercises: a students' copy, source notebooks for nbgrader, master notebooks for Otter. See docs/teaching.md.

    python .ci/assign.py release FOLDER [--seed SEED]    the course without its solutions
    python .ci/assign.py nbgrader FOLDER                 FOLDER/source/NAME/NAME.ipynb, for nbgrader generate_assignment
    python .ci/assign.py otter FOLDER                    FOLDER/NAME.ipynb, for otter assign

FOLDER must be empty or new. With a seed, every starter of a release sets the environment variable K3_SEED, if nothing else has set it.
"""
import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import exercises
import nbformat

import notebooks

ROOT = Path(__file__).resolve().parent.parent
# what only an instructor needs: solutions, what they are made from, and the tests that read them
KEPT_BACK = ("notebooks/exercises/solutions/", "notebooks/exercises/source/", "tests/test_exercise")


def release(folder, seed=None):
    """Copy every file that git tracks, without what is kept back."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, tracked):
        if not name.startswith(KEPT_BACK) and (ROOT / name).exists():
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
            said = nbformat.v4.new_output("stream", name="stdout", text=cell.outputs[0].text.partition("\n")[0] + "\n")
            cells.append(nbformat.v4.new_code_cell(check, id=cell.id, outputs=[said], execution_count=cell.execution_count))
            mark("END TESTS")
            mark("END QUESTION")
            step = None
            if rest.strip():
                cells.append(nbformat.v4.new_code_cell(rest.strip(), id=f"{cell.id}-shows"))
        else:
            cells.append(nbformat.from_dict({**cell, "source": text, "metadata": {}}))
    return nbformat.v4.new_notebook(metadata=notebooks.METADATA, cells=cells)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("goal", choices=["release", "nbgrader", "otter"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", help="of a release: a number or a student's name")
    options = parser.parse_args(arguments)
    if options.seed is not None and options.goal != "release":
        parser.error("--seed goes with release; graders take the environment variable K3_SEED")
    if options.folder.exists() and (not options.folder.is_dir() or any(options.folder.iterdir())):
        sys.exit(f"folder {options.folder} is not empty: choose a new one")
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.goal == "release":
        release(options.folder, options.seed)
    else:
        {"nbgrader": nbgrader, "otter": otter}[options.goal](options.folder)
    print(f"{options.folder}: {options.goal}, {len(exercises.SOURCES)} notebooks")


if __name__ == "__main__":
    main()
