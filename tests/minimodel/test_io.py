"""Checkpoints: released names, exact round trips, packed experts, memory."""

import json
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

import minimodel.io as k3io
from minimodel.config import K3Config
from minimodel.io import RELEASED_K3, Layout, from_pretrained, load_released, load_safetensors, save_pretrained, save_safetensors
from minimodel.model import K3ForCausalLM
from minimodel.mxfp4 import quantize_mxfp4
from tests.minimodel.tiny_checkpoints import A_LOG, W1, files, on_grid, released, same, tiny_model

NAMES = json.loads((Path(__file__).parents[1] / "golden" / "kimi_k3_tiny_names.json").read_text())


@pytest.fixture
def saved(tmp_path):
    model = tiny_model()
    save_pretrained(model, tmp_path / "one")
    save_pretrained(model, tmp_path / "many", max_shard_bytes=20_000)
    return model, tmp_path


# ---- names and exact round trips ----


def test_names_and_shapes_are_the_released_ones(tmp_path):
    model = K3ForCausalLM(K3Config.from_hf(NAMES["config"]))
    save_pretrained(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: list(t.shape) for name, t in stored.items()} == NAMES["shapes"]


def test_plain_round_trip(saved):
    model, root = saved
    assert same(from_pretrained(root / "one"), model)
    assert same(from_pretrained(root / "many"), model)
    stored, expected = load_file(root / "one" / "model.safetensors"), released(model)
    assert stored.keys() == expected.keys() and all(torch.equal(stored[n], expected[n]) for n in stored)
    other = tiny_model(seed=1)
    for source in (expected, {n: t.numpy() for n, t in expected.items()}, root / "many", str(root / "one" / "model.safetensors")):
        other = tiny_model(seed=1)
        load_released(other, source)
        assert same(other, model)


@pytest.mark.parametrize("kind", ["one", "many"])
def test_load_then_save_gives_the_same_bytes(saved, kind):
    _, root = saved
    save_pretrained(from_pretrained(root / kind), root / "again", max_shard_bytes=20_000 if kind == "many" else 10**9)
    assert files(root / "again") == files(root / kind)


def test_bytes_are_those_of_the_formats_own_writer(saved):
    model, root = saved
    assert (root / "one" / "model.safetensors").read_bytes() == save(released(model), metadata={"format": "pt"})


def test_a_released_checkpoint_comes_back_byte_for_byte(tmp_path):
    """Prefix, nested config, padded A_log, packed experts, mixed dtypes: written here by hand, read and written by io."""
    model = on_grid(tiny_model())
    wide = ("A_log", "dt_bias", "e_score_correction_bias")
    tensors = {}
    for name, t in released(model).items():
        if ".experts." in name:
            tensors[f"language_model.{name}_packed"], tensors[f"language_model.{name}_scale"] = quantize_mxfp4(t)
        elif name.endswith("A_log"):
            tensors[f"language_model.{name}"] = torch.cat([t, torch.zeros(126)])
        else:
            tensors[f"language_model.{name}"] = t if name.endswith(wide) else t.bfloat16()
    folder = tmp_path / "released"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = '{"text_config": ' + json.dumps(model.config.to_hf()) + ', "model_type": "kimi_k3",    "vision_config": {"layers": 27}}'
    (folder / "config.json").write_text(text)
    loaded = from_pretrained(folder)
    ours, theirs = loaded.state_dict(), model.state_dict()
    experts = "model.layers.1.block_sparse_moe.experts.w1"
    assert ours[A_LOG].dtype == torch.float32 and ours["lm_head.weight"].dtype == ours[experts].dtype == torch.bfloat16
    assert torch.equal(ours[A_LOG], theirs[A_LOG]) and torch.equal(ours[experts].float(), theirs[experts])
    save_pretrained(loaded, tmp_path / "again")
    assert files(tmp_path / "again") == files(folder)


@pytest.mark.parametrize("shape", [(2,), (128,), (1, 1, 2, 1)])
def test_shapes_of_a_log(tmp_path, shape):
    model = tiny_model()
    tensors = released(model)
    tensors[A_LOG] = torch.cat([tensors[A_LOG], torch.zeros(int(np.prod(shape)) - 2)]).view(shape)
    other = tiny_model(seed=1)
    load_released(other, tensors)
    assert same(other, model)
    save_pretrained(other, tmp_path)
    assert load_file(tmp_path / "model.safetensors")[A_LOG].shape == shape
    assert same(from_pretrained(tmp_path), model)


def test_dtypes(tmp_path):
    model = tiny_model()
    save_pretrained(model, tmp_path, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    narrow = {n for n, t in stored.items() if t.dtype == torch.bfloat16}
    assert {n.rsplit(".", 1)[1] for n in stored.keys() - narrow} == {"A_log", "dt_bias", "e_score_correction_bias"}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        loaded = from_pretrained(tmp_path, dtype=dtype).state_dict()
        assert loaded["lm_head.weight"].dtype == dtype
        assert loaded[A_LOG].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.equal(loaded["lm_head.weight"].bfloat16(), model.lm_head.weight.bfloat16())


def test_loaded_model_computes_and_trains(saved):
    model, root = saved
    loaded = from_pretrained(root / "many")
    ids = torch.arange(8)[None] % 11
    assert not loaded.training
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    loaded.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for n, p in loaded.named_parameters() if "self_attn." in n)


def test_tied_table_is_stored_once(tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    save_pretrained(model, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight and same(loaded, model)


def test_control_experiments_come_back_as_what_they_are(tmp_path):
    model = tiny_model(linear_mixer="gated_delta_net", full_mixer="mha")
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(tmp_path)
    assert loaded.config == model.config and same(loaded, model)


# ---- packed experts ----


def test_packing_needs_a_word_unless_it_loses_nothing(tmp_path):
    model = tiny_model()
    with pytest.raises(ValueError, match="experts.0.w1.weight is not on the MXFP4 grid: .*quantize_experts=True"):
        save_pretrained(model, tmp_path / "a", layout=RELEASED_K3)
    assert not any((tmp_path / "a").iterdir())
    before = {n: t.clone() for n, t in model.state_dict().items()}
    save_pretrained(model, tmp_path / "b", layout=RELEASED_K3, quantize_experts=True)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())  # only the file is rounded
    save_pretrained(on_grid(model), tmp_path / "c", layout=RELEASED_K3)
    assert files(tmp_path / "b") == files(tmp_path / "c")
    assert same(from_pretrained(tmp_path / "c"), model)
    stored = load_file(tmp_path / "c" / "model.safetensors")
    assert stored[f"language_model.{W1}_packed"].shape == (32, 16) and stored[f"language_model.{A_LOG}"].shape == (128,)
    config = json.loads((tmp_path / "c" / "config.json").read_text())["text_config"]
    assert config["quantization_config"]["format"] == "mxfp4-pack-quantized"


def test_a_packed_model_that_was_trained_is_not_rounded_silently(tmp_path):
    save_pretrained(tiny_model(), tmp_path / "a", quantize_experts=True)
    model = from_pretrained(tmp_path / "a")
    with torch.no_grad():
        model.model.layers[1].block_sparse_moe.experts.w2[3, 0, 0] += 0.01
    old = files(tmp_path / "a")
    with pytest.raises(ValueError, match="experts.3.w2.weight is not on the MXFP4 grid"):
        save_pretrained(model, tmp_path / "a")
    assert files(tmp_path / "a") == old
    save_pretrained(model, tmp_path / "plain", layout=Layout())
    assert same(from_pretrained(tmp_path / "plain"), model)


@pytest.mark.bad_input
def test_experts_that_cannot_be_packed(tmp_path):
    with pytest.raises(ValueError, match=r"w2.weight \[32, 24\] cannot be packed: .* multiples of 32"):
        save_pretrained(tiny_model(moe_intermediate_size=24), tmp_path, quantize_experts=True)


def test_halves_of_a_packed_expert_may_lie_in_two_shards(tmp_path):
    model = on_grid(tiny_model())
    save_pretrained(model, tmp_path, layout=RELEASED_K3, max_shard_bytes=1)  # every tensor a shard
    where = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert where[f"language_model.{W1}_packed"] != where[f"language_model.{W1}_scale"]
    assert same(from_pretrained(tmp_path), model)


# ---- memory ----


def test_reading_holds_one_tensor_beside_the_model(tmp_path, monkeypatch):
    """Shard by shard, tensor by tensor: what was read before is given back before the next is asked for."""
    save_pretrained(tiny_model(), tmp_path, max_shard_bytes=20_000)
    alive, most = [], 0
    read = k3io.read_entries

    def watched(entries):
        nonlocal most
        for name, t in read(entries):
            alive.append(weakref.ref(t))
            most = max(most, sum(r() is not None for r in alive))
            yield name, t
            del t

    monkeypatch.setattr(k3io, "read_entries", watched)
    from_pretrained(tmp_path)
    assert len(alive) > 50 and most <= 2


# ---- plain safetensors files ----


def test_save_safetensors_is_atomic_and_deterministic(tmp_path):
    tensors = {"b": torch.arange(6.0).view(2, 3).T, "a": torch.tensor([True]), "empty": torch.zeros(0, 3)}
    tensors["scalar"] = torch.tensor(2.5).bfloat16()
    metadata = {k: k * 2 for k in "zyxabc"}
    save_safetensors(tmp_path / "new" / "t.safetensors", tensors, metadata)
    first = (tmp_path / "new" / "t.safetensors").read_bytes()
    save_safetensors(tmp_path / "new" / "t.safetensors", dict(reversed(tensors.items())), dict(reversed(metadata.items())))
    assert (tmp_path / "new" / "t.safetensors").read_bytes() == first
    loaded, meta = load_safetensors(tmp_path / "new" / "t.safetensors")
    assert meta == metadata and loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[n], tensors[n]) and loaded[n].dtype == tensors[n].dtype for n in tensors)
    assert load_file(tmp_path / "new" / "t.safetensors").keys() == tensors.keys()


@pytest.mark.bad_input
def test_save_safetensors_refuses(tmp_path):
    path = tmp_path / "t.safetensors"
    save_safetensors(path, {"a": torch.ones(2)})
    with pytest.raises(TypeError, match=r"tensors\['a'\] must be a tensor of a plain dtype, got list"):
        save_safetensors(path, {"a": [1.0]})
    with pytest.raises(TypeError, match="torch.complex64"):
        save_safetensors(path, {"a": torch.ones(2, dtype=torch.complex64)})
    with pytest.raises(TypeError, match="metadata must map strings to strings, got 'step': int"):
        save_safetensors(path, {"a": torch.ones(2)}, {"step": 3})
    assert torch.equal(load_safetensors(path)[0]["a"], torch.ones(2)) and len(files(tmp_path)) == 1
    with pytest.raises(ValueError, match="does not exist"):
        load_safetensors(tmp_path / "other")
