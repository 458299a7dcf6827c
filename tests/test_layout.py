"""The shape of the project: who may import whom, what an import costs, how long a file may be, what lies where."""
import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
STANDARD = set(sys.stdlib_module_names)
TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "Makefile", "constraints.txt", "manim.cfg", ".gitignore", ".ci",
             "notebooks", "k3viz", "minimodel", "animations", "docs", "tests", "benchmarks"}
LONGEST = 350  # lines
MODULES = sorted(path for package in ("minimodel", "k3viz", "animations") for path in (ROOT / package).rglob("*.py"))

MAY_IMPORT = {
    "minimodel": {"torch", "triton", "numpy", "safetensors", "jaxtyping", "tqdm", "minimodel"},
    "story": {"torch", "numpy", "jaxtyping", "minimodel"},
    "figure": {"torch", "numpy", "plotly", "jaxtyping", "minimodel"},
    "panel": {"torch", "numpy", "plotly", "jaxtyping", "minimodel", "ipywidgets", "anywidget", "traitlets", "IPython"},
    "animations": {"torch", "numpy", "manim", "typst", "av", "PIL", "tqdm", "minimodel", "animations"},  # manim brings av and PIL
}


def imports(source, package):
    """(module, name) of every import in a file; name is None for `import module`. package: the dotted folder, for relative imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            module = (base + (node.module or "")).rstrip(".")
            yield from ((module, alias.name) for alias in node.names)


def kind(path):
    """What a file is for: minimodel, animations, or in k3viz one of story, figure, panel, theme, package."""
    parts = path.relative_to(ROOT).parts
    if parts[0] != "k3viz":
        return parts[0]
    if path.name == "__init__.py":
        return "package"
    return layer(path.stem)


def layer(stem):
    """Story, figure, panel or theme; what draws nothing belongs to the story."""
    return next((name for name in ("figure", "panel", "theme") if stem.endswith(name)), "story")


def may_import(path, module, name):
    """Whether a file of ours may import this."""
    top = module.split(".")[0]
    mine = kind(path)
    if top in STANDARD or top in MAY_IMPORT.get(mine, {"minimodel"}):
        return True
    if top != "k3viz" or mine == "minimodel":
        return False
    if module == "k3viz":
        module = f"k3viz.{name.rsplit('_', 1)[0]}.{name.rsplit('_', 1)[1]}" if "_" in name else f"k3viz.{name}"
    if mine == "package":  # the flat public names
        return True
    if mine == "animations":
        return module == "k3viz.theme" or module.endswith("story")
    if module == "k3viz.theme":
        return mine != "story"
    if module == "k3viz.panel":
        return mine == "panel"
    subject = path.relative_to(ROOT).parts[1]
    layers = ["story", "figure", "panel"]
    return module.split(".")[1] == subject and layers.index(layer(module)) <= layers.index(mine)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_import_directions(path):
    package = ".".join(path.relative_to(ROOT).parts[:-1])
    wrong = [f"{module} {name or ''}" for module, name in imports(path.read_text(encoding="utf-8"), package)
             if not may_import(path, module, name)]
    assert not wrong


@pytest.mark.parametrize("path, line, allowed", [
    ("minimodel/kda.py", "import torch", True),
    ("minimodel/kda.py", "from .layers import RMSNorm", True),
    ("minimodel/kda.py", "import plotly", False),
    ("minimodel/kda.py", "from k3viz import theme", False),
    ("k3viz/whiteboard/story.py", "from minimodel import kda", True),
    ("k3viz/whiteboard/story.py", "from k3viz.theme import LIGHT", False),
    ("k3viz/whiteboard/story.py", "from .figure import whiteboard_figure", False),
    ("k3viz/whiteboard/figure.py", "from k3viz.theme import LIGHT", True),
    ("k3viz/whiteboard/figure.py", "from k3viz.whiteboard.story import whiteboard_story", True),
    ("k3viz/whiteboard/figure.py", "from k3viz import memory_story", False),
    ("k3viz/whiteboard/figure.py", "import ipywidgets", False),
    ("k3viz/whiteboard/panel.py", "from k3viz.panel import Panel", True),
    ("k3viz/whiteboard/panel.py", "import manim", False),
    ("animations/whiteboard.py", "from k3viz import whiteboard_story, theme", True),
    ("animations/whiteboard.py", "from k3viz import whiteboard_figure", False),
    ("animations/whiteboard.py", "import plotly.graph_objects", False),
])
def test_the_import_rule_itself(path, line, allowed):
    package = ".".join(Path(path).parts[:-1])
    assert all(may_import(ROOT / path, module, name) for module, name in imports(line, package)) == allowed


def run_python(code):
    """What a fresh interpreter prints for this code."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def test_importing_minimodel_costs_little_more_than_torch():
    code = ("import time; a = time.process_time(); import torch; b = time.process_time(); import minimodel; c = time.process_time();"
            "print((c - b) / (b - a))")
    assert any(float(run_python(code)) < 0.25 for _ in range(3))  # a busy machine may spoil one measurement


def test_importing_minimodel_loads_no_pictures():
    drawing = "('plotly', 'ipywidgets', 'anywidget', 'manim', 'IPython')"
    heavy = run_python(f"import sys, minimodel; print([m for m in {drawing} if m in sys.modules])")
    assert heavy == "[]"


def test_importing_k3viz_loads_neither_manim_nor_widgets():
    heavy = run_python("import sys, k3viz; print([m for m in ('manim', 'ipywidgets', 'anywidget') if m in sys.modules])")
    assert heavy == "[]"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_explains_one_idea(path):
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= LONGEST


def tracked():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: which files belong to the project is unknown")
    listing = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).exists()]


def test_nothing_else_lies_at_the_top():
    assert {path.relative_to(ROOT).parts[0] for path in tracked()} <= TOP_LEVEL


def test_files_are_small():
    sizes = {path.relative_to(ROOT): path.stat().st_size for path in tracked()}
    assert {str(path): size for path, size in sizes.items() if size > 4_000_000} == {}
    assert sum(size for path, size in sizes.items() if "pretrained" in path.parts) <= 12_000_000


def test_the_linter_finds_nothing():
    """The rules are in pyproject.toml."""
    found = subprocess.run([sys.executable, "-m", "ruff", "check", "--output-format", "concise", "--no-cache", "."],
                           cwd=ROOT, capture_output=True, text=True)  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr


def test_no_file_names_a_place_on_somebodys_machine():
    text = {".py", ".md", ".toml", ".cfg", ".cff", ".json", ".txt", ".js", ""}
    place = re.compile("/(?:work|root|home|Users)/" + r"\w")
    found = [f"{path.relative_to(ROOT)}: {line.strip()[:100]}" for path in tracked() if path.suffix in text and path != Path(__file__)
             for line in path.read_text(encoding="utf-8").splitlines() if place.search(line) and "hygiene" not in path.name]
    assert not found


def test_constraints_are_exact_and_cover_what_the_project_asks_for():
    """A constraint that is missing would let a version in that nobody tested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [line for lines in (project["dependencies"], *project["optional-dependencies"].values()) for line in lines]
    names = {re.match(r"[\w-]+", line)[0].lower() for line in asked} - {project["name"]}
    pins = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert names <= {pin.split("==")[0].lower() for pin in pins}


def test_constraints_install_on_the_oldest_python():
    """Debian's Python 3.11.2 once could not install a package that asked for 3.11.5."""
    checked = 0
    for pin in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, _, version = pin.partition("==")
        found = None if pin.startswith("#") else next(iter(metadata.distributions(name=name)), None)
        if found and found.version.split("+")[0] == version:
            needs = SpecifierSet(found.metadata.get("Requires-Python") or "")
            assert "3.11.0" in needs, f"{name} {version} needs Python {needs}"
            checked += 1
    assert checked > 50
