"""Every way a checkpoint can be broken, on reading and while it is being written."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import minimodel.io as k3io
from minimodel.io import Layout, from_pretrained, load_released, save_pretrained
from minimodel.model import K3ForCausalLM
from minimodel.mxfp4 import quantize_mxfp4
from tests.minimodel.tiny_checkpoints import A_LOG, W1, files, released, same, tiny_config, tiny_model


@pytest.fixture
def saved(tmp_path):
    model = tiny_model()
    save_pretrained(model, tmp_path / "one")
    save_pretrained(model, tmp_path / "many", max_shard_bytes=20_000)
    return model, tmp_path


# ---- broken checkpoints ----


def refuse(model, source, message):
    """load_released raises one sentence and leaves the model as it was."""
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=message) as caught:
        load_released(model, source)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


@pytest.mark.bad_input
def test_names_shapes_and_dtypes_that_do_not_fit():
    model = tiny_model(seed=1)
    good = released(tiny_model())
    refuse(model, {n: t for n, t in good.items() if n != W1}, f"1 tensors are missing: {W1}")
    refuse(model, good | {"model.layers.7.oops": torch.ones(1)}, "1 tensors are unknown: model.layers.7.oops")
    refuse(model, good | {"language_model.lm_head.weight": torch.ones(11, 16)}, "unknown")
    refuse(model, good | {W1: torch.ones(32, 31)}, rf"{W1} in tensors has shape \[32, 31\], the model needs \[32, 32\]")
    refuse(model, good | {W1: torch.ones(32, 32, dtype=torch.int64)}, f"{W1} in tensors has dtype torch.int64")
    refuse(model, good | {A_LOG: torch.ones(128)}, f"{A_LOG} in tensors must be zero after its 2 heads")
    refuse(model, good | {A_LOG: torch.ones(1)}, rf"{A_LOG} in tensors has shape \[1\]")
    refuse(model, {}, "tensors are missing")
    with pytest.raises(TypeError, match=r"tensors\['lm_head.weight'\] must be a tensor"):
        load_released(model, good | {"lm_head.weight": "x"})
    with pytest.raises(TypeError, match="tensors_or_folder must map names to tensors or be a path, got int"):
        load_released(model, 3)
    with torch.device("meta"):
        empty = K3ForCausalLM(tiny_config())
    with pytest.raises(ValueError, match="model has no storage"):
        load_released(empty, good)
    with pytest.raises(ValueError, match="model has no storage to save"):
        save_pretrained(empty, "nowhere")
    assert not Path("nowhere").exists()


@pytest.mark.bad_input
def test_packed_tensors_that_do_not_fit():
    model = tiny_model(seed=1)
    good = released(tiny_model())
    packed, scale = quantize_mxfp4(good.pop(W1))
    refuse(model, good | {W1 + "_packed": packed}, f"missing: {W1}_scale")
    refuse(model, good | {W1 + "_packed": packed, W1 + "_scale": scale[:, :0]}, rf"{W1}_scale in tensors has shape \[32, 0\]")
    refuse(model, good | {W1 + "_packed": packed.short(), W1 + "_scale": scale}, "has dtype torch.int16, the model needs torch.uint8")
    bad = torch.full_like(scale, 255)
    refuse(model, good | {W1 + "_packed": packed, W1 + "_scale": bad}, f"{W1}_scale in tensors holds an MXFP4 scale byte of 255")
    narrow = tiny_model(moe_intermediate_size=24)
    w2 = "model.layers.1.block_sparse_moe.experts.0.w2.weight"
    tensors = {n: t for n, t in released(narrow).items() if n != w2}
    halves = {w2 + "_packed": torch.zeros(32, 12, dtype=torch.uint8), w2 + "_scale": torch.zeros(32, 1, dtype=torch.uint8)}
    refuse(narrow, tensors | halves, "rows of 24 are not multiples of 32")


@pytest.mark.bad_input
def test_vision_parts_are_skipped():
    model = tiny_model(seed=1)
    tensors = {f"language_model.{n}": t for n, t in released(tiny_model()).items()}
    load_released(model, tensors | {"vision_tower.patch_embed.weight": torch.ones(2), "mm_projector.weight": torch.ones(2)})
    assert same(model, tiny_model())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
@pytest.mark.bad_input
def test_truncated_anywhere(saved, share):
    _, root = saved
    whole = (root / "one" / "model.safetensors").read_bytes()
    cut = root / "cut.safetensors"
    cut.write_bytes(whole[: int(len(whole) * share)])
    refuse(tiny_model(seed=1), cut, f"checkpoint file {cut} is truncated or corrupted")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.bad_input
def test_a_changed_header_byte_is_an_error_or_changes_no_shape(saved, data):
    """Flip one byte of the header: a clear error, or (white space, metadata) the same tensors as before. Never a crash."""
    model, root = saved
    whole = bytearray((root / "one" / "model.safetensors").read_bytes())
    position = data.draw(st.integers(0, 8 + int.from_bytes(whole[:8], "little") - 1))
    whole[position] ^= 1 << data.draw(st.integers(0, 7))
    path = root / "flipped.safetensors"
    path.write_bytes(whole)
    other = tiny_model(seed=1)
    before = {n: t.clone() for n, t in other.state_dict().items()}
    try:
        load_released(other, path)
    except ValueError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        assert all(torch.equal(before[n], t) for n, t in other.state_dict().items())
    else:
        assert other.state_dict().keys() == model.state_dict().keys()


@pytest.mark.bad_input
def test_missing_files_and_a_wrong_index(saved):
    _, root = saved
    model, folder = tiny_model(seed=1), root / "many"
    index, shard = folder / "model.safetensors.index.json", sorted(folder.glob("model-*"))[1]
    refuse(model, root / "nowhere", "checkpoint file .*nowhere does not exist")
    with pytest.raises(ValueError, match="folder .*nowhere does not exist"):
        from_pretrained(root / "nowhere")
    original, whole = index.read_text(), shard.read_bytes()

    shard.unlink()
    refuse(model, folder, f"lacks 1 of .* shards: {shard.name}")
    shard.write_bytes(whole[:-1])
    refuse(model, folder, f"{shard} is truncated or corrupted")
    with pytest.raises(ValueError, match=f"{shard} is truncated or corrupted"):
        from_pretrained(folder)
    shard.write_bytes(whole)

    index.write_text(original[: len(original) // 2])
    refuse(model, folder, "index .*json is truncated or corrupted")
    for text in ('{"weight_map": {}}', '{"weight_map": {"a": "../one/model.safetensors"}}'):
        index.write_text(text)
        refuse(model, folder, "must map tensor names to files in its own folder")
    listed = json.loads(original)
    listed["weight_map"]["oops"] = shard.name
    index.write_text(json.dumps(listed))
    refuse(model, folder, "promises 1 tensors that its shards lack: oops")
    del listed["weight_map"]["oops"], listed["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(listed))
    refuse(model, folder, "lm_head.weight is in model-.* but .* says nothing about it")
    index.unlink()
    refuse(model, folder, "holds neither model.safetensors nor model.safetensors.index.json")
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="no config file"):
        from_pretrained(folder)


# ---- interrupted writing ----


@pytest.mark.parametrize("fails_at", [0, 1, 3])
@pytest.mark.parametrize("old", ["one", "many"])
def test_an_interrupted_save_leaves_the_old_checkpoint(saved, monkeypatch, old, fails_at):
    model, root = saved
    before = files(root / old)
    calls = iter(range(99))

    def disk_full(path, entries, metadata):
        if next(calls) == fails_at:
            path.write_bytes(b"half a shard")
            raise OSError("no space left")
        write(path, entries, metadata)

    write = k3io.write_entries
    monkeypatch.setattr(k3io, "write_entries", disk_full)
    with pytest.raises(OSError, match="no space left"):
        save_pretrained(tiny_model(seed=2), root / old, max_shard_bytes=20_000)
    assert files(root / old) == before
    assert same(from_pretrained(root / old), model)


@pytest.mark.parametrize("fails_at", range(1, 8))
def test_killed_between_renames_is_an_error_or_a_whole_checkpoint(saved, monkeypatch, fails_at):
    """The only moment with old and new names side by side: never a mixture that loads."""
    model, root = saved
    newer = tiny_model(seed=2)
    calls, replace = iter(range(99)), os.replace

    def killed(a, b):
        if next(calls) == fails_at:
            raise KeyboardInterrupt
        replace(a, b)

    monkeypatch.setattr(os, "replace", killed)
    try:
        save_pretrained(newer, root / "many", max_shard_bytes=20_000)
    except KeyboardInterrupt:
        with pytest.raises(ValueError, match="holds neither"):
            from_pretrained(root / "many")
    else:
        assert same(from_pretrained(root / "many"), newer)


def test_saving_again_leaves_nothing_stale(saved):
    _, root = saved
    newer = tiny_model(seed=2)
    save_pretrained(newer, root / "many")
    assert sorted(files(root / "many")) == ["config.json", "model.safetensors"]
    save_pretrained(newer, root / "one", max_shard_bytes=30_000)
    assert "model.safetensors" not in files(root / "one")
    (root / "one" / "notes.txt").write_text("mine")
    save_pretrained(tiny_model(), root / "one", max_shard_bytes=60_000)
    assert (root / "one" / "notes.txt").exists() and same(from_pretrained(root / "one"), tiny_model())


@pytest.mark.bad_input
def test_settings_out_of_range(tmp_path):
    model = tiny_model()
    with pytest.raises(ValueError, match="max_shard_bytes must be a positive integer, got 0"):
        save_pretrained(model, tmp_path / "a", max_shard_bytes=0)
    with pytest.raises(ValueError, match="dtype must be a floating-point dtype, got torch.int8"):
        save_pretrained(model, tmp_path / "a", dtype=torch.int8)
    with pytest.raises(ValueError, match=r"a_log_shape=\(1,\) has no room for the 2 heads"):
        save_pretrained(model, tmp_path / "a", layout=Layout(a_log_shape=(1,)))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file"):
        save_pretrained(model, tmp_path / "file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]
