"""docs/minimodel.md and docs/teaching.md: every Python example runs and prints what stands beneath it; every public name is on the page."""
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import minimodel

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n(?:```\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("minimodel", "teaching")}
EXAMPLES = [(f"{name}-{i}", code, said) for name, page in PAGES.items() for i, (code, said) in enumerate(EXAMPLE.findall(page))]


@pytest.mark.bad_input
@pytest.mark.parametrize("place, code, said", EXAMPLES, ids=[place for place, _, _ in EXAMPLES])
def test_an_example_prints_what_stands_beneath_it(place, code, said, capsys, monkeypatch):
    monkeypatch.delenv("K3_SEED", raising=False)
    exec(compile(code, place, "exec"), {})
    assert capsys.readouterr().out == said


def test_every_python_block_has_an_output():
    for page in PAGES.values():
        assert len(EXAMPLE.findall(page)) == page.count("```python")
    assert len(EXAMPLES) >= 14 and all(said for _, _, said in EXAMPLES)


def test_every_public_name_is_on_the_page():
    """Of every module with __all__. The steps of minimodel.checks are left out: each stands in its exercise."""
    named, missing = set(re.findall(r"\w+", PAGES["minimodel"])), {}
    for module in pkgutil.walk_packages(minimodel.__path__, "minimodel."):
        leaf = module.name.rpartition(".")[2]
        if leaf == "__main__" or leaf.startswith("triton_"):
            continue
        loaded = importlib.import_module(module.name)
        steps = set(loaded.STEPS) if module.name == "minimodel.checks" else set()
        if lost := {name for name in getattr(loaded, "__all__", ()) if name not in steps} - named:
            missing[module.name] = lost
    assert missing == {} and set(minimodel.__all__) <= named
