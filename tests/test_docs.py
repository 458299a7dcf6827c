"""What the README and the docs promise: links lead somewhere, the example runs, the tables name what there is."""
import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from minimodel.config import K3Config, LinearAttnConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
README = PAGES[0].read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


def test_images_have_alt_text():
    for page in PAGES:
        assert not re.search(r"!\[\s*\]\(", page.read_text(encoding="utf-8")), page.name


def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_install_table_names_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(re.findall(r'pip install -e "\.\[(\w+)\]"', README)) == set(extras)


def test_make_help_lists_every_command():
    commands = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    described = set(re.findall(r"^([a-z]+): +##", (ROOT / "Makefile").read_text(), flags=re.M))
    assert commands == described


def test_the_equation_table_names_what_there_is():
    """docs/architecture.md: every `file:function` and every `test_file:test` of the table is really there."""
    row = r"^\| .+ \| `([\w/]+\.py):(\w+)` \| `(test_\w+\.py):(test_\w+)` \|$"
    rows = re.findall(row, (ROOT / "docs/architecture.md").read_text(), flags=re.M)
    assert len(rows) > 25
    for file, name, test_file, test in rows:
        assert re.search(rf"^\s*(def|class) {name}\b", (ROOT / "minimodel" / file).read_text(), flags=re.M), f"{file}:{name}"
        assert re.search(rf"^\s*def {test}\b", (ROOT / "tests/minimodel" / test_file).read_text(), flags=re.M), f"{test_file}:{test}"


def test_the_glossary_names_real_config_keys():
    rows = re.findall(r"^\|(?!-|\s*term)(.*)\|$", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), flags=re.M)
    assert len(rows) >= 40 and {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {5}
    keys = {key for row in rows for key in re.findall(r"`([\w.]+)`", row.split("|")[3])}
    known = {field.name for field in dataclasses.fields(K3Config)}
    known |= {f"linear_attn_config.{field.name}" for field in dataclasses.fields(LinearAttnConfig)}
    assert len(keys) > 15 and keys <= known, keys - known
