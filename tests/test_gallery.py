"""docs/gallery.md shows every panel and figure that k3viz offers: its call, a still that is small, and words for those who can't see it."""
import re
from pathlib import Path

import pytest

import k3viz

DOCS = Path(__file__).resolve().parent.parent / "docs"
GALLERY = (DOCS / "gallery.md").read_text(encoding="utf-8")
SHOWN = sorted(name for name in k3viz.__all__ if name.endswith(("_panel", "_figure")))
LARGEST = 150_000  # bytes of a still


@pytest.mark.parametrize("name", SHOWN)
def test_each_has_its_call_its_still_and_a_sentence(name):
    sections = [part for part in re.split(r"^#+ ", GALLERY, flags=re.M) if f"`k3viz.{name}()`" in part]
    assert len(sections) == 1, f"docs/gallery.md names k3viz.{name}() {len(sections)} times"
    ((words, target),) = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", sections[0])
    assert len(words) > 20
    assert (DOCS / target).stat().st_size <= LARGEST
    assert re.search(r"^[A-Z].{20,}[.!?]$", sections[0], flags=re.M)


def test_it_offers_nothing_that_is_not_there():
    assert sorted(re.findall(r"`k3viz\.(\w+)\(\)`", GALLERY)) == SHOWN
