"""The memory bill is the closed form's, follows the chip, and can be read."""

from __future__ import annotations

import re

import pytest

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations.memory_bill import HeadGrid, MemoryBill, bill_story, story_from_environment
from k3viz.theme import format_bytes, format_count
from minimodel import K3Config, cache_bytes
from minimodel.accounting import with_mixer
from tests.animations.watch import faults, watch, words

pytestmark = [pytest.mark.scene, pytest.mark.filterwarnings("ignore:'mode' parameter:DeprecationWarning")]  # manim's own use of Pillow


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    return watch(MemoryBill, tmp_path_factory.mktemp("media"))


def test_the_chip_is_full_where_the_closed_form_says_so():
    story = bill_story(memory=80e9)
    configs = {
        "k3_mha": with_mixer(K3Config.k3(), "mha"), "k3_gqa": with_mixer(K3Config.k3(), "gqa", num_key_value_groups=8),
        "k3_all_mla": with_mixer(K3Config.k3(), "mla"), "k3": K3Config.k3(),
    }  # fmt: skip
    for curve in story.published:
        n, config = curve.fills(80e9), configs[curve.name]
        assert cache_bytes(config, n).total <= 80e9 < cache_bytes(config, n + 1).total


def test_a_head_a_layer_and_a_token_pay_what_the_config_says(watched):
    scene, frames = watched
    config = with_mixer(K3Config.k3(), "mha")
    each = 2 * config.qk_nope_head_dim * 2  # a key and a value in bfloat16
    layer, token = each * config.num_attention_heads, cache_bytes(config, 1).per_token
    assert token == layer * config.num_hidden_layers
    shown = words(frames)
    assert all(format_bytes(n) in shown for n in (each, layer, token))
    assert f"{config.num_hidden_layers} layers (rows) of {config.num_attention_heads} heads" in shown


def test_every_number_is_in_the_story(watched):
    story, shown = bill_story(), words(watched[1])
    mha = story.published[[c.name for c in story.published].index("k3_mha")]
    counts = [c.fills(story.memory) for c in story.published] + [story.context] + [1 << p for p in range(20)]
    held = {format_count(n) for n in counts} | {format_bytes(mha.per_token * n).split()[0] for n in counts}
    held |= {format_bytes(n).split()[0] for n in (512, 49_152, mha.per_token, story.memory)}
    held |= {format_bytes(c.bytes[-1]).split()[0] for c in story.published} | {"93", "96", "8"}
    seen = set(re.findall(r"(?<![\w.])\d[\d,.]*\d[MBT]?|(?<![\w.])\d(?![\w.])", shown.replace("bfloat16", "").replace("K3", "")))
    assert seen and seen <= held, seen - held


def test_it_can_be_read_and_ends_with_its_result(watched):
    scene, frames = watched
    assert not faults(frames) and 10 <= scene.time <= 45
    end = " ".join(text.words for text in frames[-1])
    story = bill_story()
    full = {c.name: c.fills(story.memory) for c in story.published}
    assert f"{format_count(full['k3_mha'])} tokens fill the chip" in end and all(format_count(n) in end for n in full.values())


def test_another_chip_is_full_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("K3_CHIP", "80")
    story = story_from_environment()
    assert story.memory == 80e9
    _, frames = watch(MemoryBill, tmp_path, frame_rate=1)
    shown, mha = words(frames), next(c for c in story.published if c.name == "k3_mha")
    assert "80.0 GB" in shown and "141" not in shown and format_count(mha.fills(80e9)) in shown and not faults(frames)


@pytest.mark.parametrize("text", ["big", "-1", "0", "nan"])
def test_a_chip_that_is_none_is_refused(text, monkeypatch):
    monkeypatch.setenv("K3_CHIP", text)
    with pytest.raises(ValueError, match=f"^K3_CHIP must be the chip's memory in GB, a number above 0, got '{text}'$"):
        story_from_environment()


def test_the_grid_has_a_cell_for_each_head_of_each_layer():
    grid = HeadGrid(3, 4, left=0, top=0, size=1, color="#d55e00")
    grid.pay(5).now()
    paid = (grid.image.pixel_array[..., :3] == (0xD5, 0x5E, 0)).all(-1)
    assert paid.shape == (3, 4) and paid.sum() == 5 and paid.ravel()[:5].all()
