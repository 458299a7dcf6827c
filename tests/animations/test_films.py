"""All scenes: they are there, docs/animations.md shows them, and three are really rendered, by the command that a person types."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations.films import caption, scenes, source
from animations.sheet import BEGIN, END, listed

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "animations.md").read_text(encoding="utf-8")
LARGEST = {"still": 150_000, "sheet": 1_500_000}  # bytes
COURSE = {
    "MemoryBill", "Toolbox", "ShareGQA", "ShrinkMLA", "ForgetSlidingWindow", "ReplaceLinear", "KDAStep", "KDAWhiteboard",
    "SameConversationTwice", "DecayDials", "BoundedDecay", "ChunkwiseKDA", "HybridStack", "InferencePath", "GatedMLA",
    "AttentionResiduals", "StableLatentMoE", "QuantileBalancing", "PerHeadMuon", "FourBitWeights", "TwinResults", "ProveItSmall",
    "Lineage", "PrefixCache", "WhereK3Lands",
}  # fmt: skip
pytestmark = pytest.mark.scene


def test_the_course_has_its_scenes():
    assert set(scenes()) == COURSE


@pytest.mark.parametrize("name", sorted(COURSE))
def test_a_scene_has_a_caption_sections_and_a_still(name):
    scene = scenes()[name]
    assert re.fullmatch(r"[A-Z0-9].{20,139}[.?]", caption(scene))
    code = (ROOT / source(scene)).read_text(encoding="utf-8")
    assert "next_section(" in code[code.index(f"class {name}(") :]
    assert (ROOT / "docs" / "images" / f"scene_{name}.png").stat().st_size <= LARGEST["still"]


def test_the_page_shows_every_scene():
    shown = PAGE[PAGE.index(BEGIN) + len(BEGIN) : PAGE.index(END)]
    assert shown.strip() == listed(scenes()).strip(), "run `python -m animations sheet --docs`"
    assert (ROOT / "docs" / "images" / "scenes.png").stat().st_size <= LARGEST["sheet"]


def test_the_readme_shows_three():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(set(re.findall(r"docs/images/scene_(\w+)\.png", readme)) & COURSE) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["KDAWhiteboard", "QuantileBalancing", "KDAStep"])
def test_manim_writes_the_film(name, tmp_path):
    """The README's command; then the film's length, size and pictures."""
    import av

    file = source(scenes()[name])
    command = [sys.executable, "-m", "manim", "-ql", "--progress_bar", "none", "--media_dir", str(tmp_path), file, name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    film = tmp_path / "videos" / Path(file).stem / "480p15" / f"{name}.mp4"
    assert 100_000 < film.stat().st_size < 10_000_000
    with av.open(str(film)) as opened:
        assert 10 <= opened.duration / av.time_base <= 45
        pictures = [frame.to_ndarray(format="gray") for i, frame in enumerate(opened.decode(video=0)) if i % 60 == 0]
    assert {picture.shape for picture in pictures} == {(480, 854)}
    assert all((picture < 245).mean() > 0.005 for picture in pictures)  # none is blank
    assert sum(abs(a.astype(int) - b).mean() > 0.2 for a, b in zip(pictures, pictures[1:], strict=False)) > len(pictures) / 2
