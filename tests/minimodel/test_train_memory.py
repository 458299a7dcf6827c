"""The memory estimate against what tensors really take."""

import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minimodel import K3Config, K3ForCausalLM
from minimodel.accounting import parameter_budget
from minimodel.formats import format_bytes
from minimodel.muon import parameter_groups
from minimodel.train import Recipe, training_bytes
from minimodel.train.loop import _optimizer, _step
from minimodel.train.precision import MasterWeights
from tests.minimodel.common import tiny_config, tokens

CONFIGS = {
    "mini": K3Config.mini(), "meeting": K3Config.meeting(), "tied": tiny_config(tie_word_embeddings=True),
    "like Kimi Linear": tiny_config(q_lora_rank=None, routed_expert_hidden_size=None, attn_res_block_size=None, mla_use_output_gate=False),
}  # fmt: skip


class Live(TorchDispatchMode):
    """Bytes of the tensors that operators made and that still live, and the most there were."""

    def __init__(self, model):
        super().__init__()
        self.now = self.most = 0
        self.sizes = {x.untyped_storage()._cdata: 0 for x in model.state_dict().values()}  # were there before

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and (key := x.untyped_storage()._cdata) not in self.sizes:
                self.sizes[key] = x.untyped_storage().nbytes()
                self.now += self.sizes[key]
                self.most = max(self.most, self.now)
                weakref.finalize(x.untyped_storage(), self._gone, key)
        return out

    def _gone(self, key):
        self.now -= self.sizes.pop(key)


def nbytes(tensors):
    """Of each piece of memory once: weights that share one count once."""
    return sum({x.data_ptr(): x.nbytes for x in tensors if x is not None}.values())


def recipe(dtype):
    return Recipe(steps=1, dtype="bfloat16" if dtype == torch.bfloat16 else None)


# ---- exact: numbers times bytes ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_gradients_and_optimizer_to_the_byte(name, dtype):
    config = CONFIGS[name]
    model, need = K3ForCausalLM(config), training_bytes(config, rows=2, length=40, dtype=dtype)
    with MasterWeights(model, None if dtype == torch.float32 else dtype) as masters:
        optimizer = _optimizer(masters, recipe(dtype))
        ids = tokens(2, 40, vocab=config.vocab_size)
        _step(masters, optimizer, recipe(dtype), 0, ids, ids)
        own = {id(p) for p in model.parameters()}
        learned = list(masters.by_name.values())
        assert nbytes(model.state_dict().values()) == need.weights
        assert nbytes(p for p in learned if id(p) not in own) == need.masters
        unread = [p for p in learned if p.grad is None]  # the first sublayer's depth query has one source and is not asked
        assert nbytes(p.grad for p in learned) + nbytes(unread) == need.gradients
        state = nbytes(x for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor))
        assert state + 2 * nbytes(unread) == need.optimizer


@pytest.mark.parametrize("preset", ["small", "base", "k3"])
def test_large_presets_agree_with_their_modules(preset):
    """On the meta device: every parameter where the optimizer would put it, nothing allocated."""
    config = getattr(K3Config, preset)()
    with torch.device("meta"):
        model = K3ForCausalLM(config)
    need = training_bytes(config, rows=1, length=64, dtype=torch.bfloat16)
    by_method = {"muon": 0, "adamw": 0}
    for group in parameter_groups(model):
        by_method[group["method"]] += sum(p.numel() for _, p in group["params"])
    assert need.optimizer == 4 * by_method["muon"] + 8 * by_method["adamw"] and need.gradients == 4 * sum(by_method.values())
    wide = sum(x.numel() for name, x in model.state_dict().items() if name.endswith(("A_log", "dt_bias", "e_score_correction_bias")))
    assert need.weights == 2 * (parameter_budget(config).total - wide) + 4 * wide


# ---- estimated: activations ----


def kept_between_passes(model, ids):
    """Bytes that autograd saves, weights left out, and the loss's own."""
    weights, sizes = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def note(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        model.model(ids).sum()
    return sum(sizes.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_activations_are_what_autograd_keeps(name, dtype):
    from minimodel.train.memory import _layer

    config, rows, length = CONFIGS[name], 2, 96
    model = K3ForCausalLM(config)
    need = training_bytes(config, rows=rows, length=length, dtype=dtype)
    expected = need.activations - max(_layer(config, i, rows, length, dtype.itemsize) for i in range(config.num_hidden_layers))
    with MasterWeights(model, None if dtype == torch.float32 else dtype):
        assert kept_between_passes(model, tokens(rows, length, vocab=config.vocab_size)) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_passes_stay_below_the_estimate_and_near_it(dtype, recompute):
    config, rows, length = K3Config.mini().replace(vocab_size=256), 2, 128
    model, ids = K3ForCausalLM(config), tokens(rows, length, vocab=256)
    model.model.recompute = recompute
    need = training_bytes(config, rows=rows, length=length, dtype=dtype, recompute=recompute)
    with MasterWeights(model, None if dtype == torch.float32 else dtype):
        live = Live(model)
        with live:
            model(ids, labels=ids).loss.backward()
    estimate = need.activations + need.logits + need.gradients
    assert 0.6 * estimate < live.most < estimate


def test_what_the_estimate_depends_on():
    config = K3Config.small()
    need = {
        (rows, dtype, again): training_bytes(config, rows=rows, length=1024, dtype=dtype, recompute=again)
        for rows in (1, 4) for dtype in (torch.float32, torch.bfloat16) for again in (False, True)
    }  # fmt: skip
    for (rows, dtype, again), x in need.items():
        assert x.total == x.weights + x.masters + x.gradients + x.optimizer + max(x.activations + x.logits, x.scratch)
        assert list(x.by_part.values())[:4] == [x.weights, x.masters, x.gradients, x.optimizer] and sum(x.by_part.values()) >= x.total
        assert x.activations == rows * need[1, dtype, again].activations
        assert again or need[rows, dtype, True].activations < 0.35 * x.activations
    # float32 inside norms, gates, SiTU and reads over depth: narrow passes save on weights' traffic, hardly on activations
    assert need[1, torch.bfloat16, False].activations == pytest.approx(need[1, torch.float32, False].activations, rel=0.05)


@pytest.mark.parametrize("preset, size", [("small", "8.2 GB"), ("base", "89 GB")])
def test_the_readme_quotes_the_estimate(preset, size):
    config = getattr(K3Config, preset)().replace(vocab_size=256)
    need = training_bytes(config, rows=4, length=1024, dtype=torch.bfloat16, recompute=True)
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert format_bytes(need.total, digits=2) == size and f"{size} for `{preset}`" in readme


@pytest.mark.bad_input
def test_what_is_not_counted_is_refused():
    with pytest.raises(ValueError, match="config: memory is counted for kda and mla, got mamba2 and mla"):
        training_bytes(tiny_config(linear_mixer="mamba2"), rows=1, length=8)
    with pytest.raises(ValueError, match="dtype must be torch.float32 or torch.bfloat16, got torch.float16"):
        training_bytes(tiny_config(), rows=1, length=8, dtype=torch.float16)
