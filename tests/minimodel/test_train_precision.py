"""Accumulation, recomputing and narrow weights: less memory, the same training."""

import pytest
import torch

from minimodel import K3ForCausalLM, muon
from minimodel.muon import PerHeadMuon
from minimodel.train import Recipe, train
from minimodel.train.precision import MasterWeights
from tests.minimodel.common import assert_within, tiny_config, tiny_model, tokens


def batch(step):
    ids = tokens(6, 20, seed=step)
    labels = ids.clone()
    labels[torch.rand(ids.shape, generator=torch.Generator().manual_seed(step)) < 0.3] = -100  # parts with unlike numbers of labels
    return ids, labels


def run(model, **settings):
    folder = settings.pop("folder", None)
    return train(model, settings.pop("batch", batch), Recipe(**{"steps": 2, **settings}), folder=folder, checkpoint_every=1, progress=False)


def all_within(a, b, tolerance):
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert x.dtype == y.dtype and x.isfinite().all(), name
        assert_within(x, y, tolerance)


# ---- accumulation ----


@pytest.mark.parametrize("parts", [2, 6])
def test_a_step_in_parts_is_the_same_step(parts):
    whole, cut = tiny_model(), tiny_model()
    expected, log = run(whole), run(cut, accumulate=parts)
    for row, other in zip(expected, log, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-12) and row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-9)
    all_within(cut, whole, 1e-7)


def test_routers_balance_over_all_parts_of_a_step():
    """The histogram adds integers, so a step in parts gives the very same bias; the last part alone gives another."""
    whole, cut, last = tiny_model(), tiny_model(), tiny_model()
    run(whole, steps=1)
    run(cut, steps=1, accumulate=3)
    run(last, steps=1, batch=lambda step: tuple(x[4:] for x in batch(step)))
    for a, b, c in zip(whole.routers(), cut.routers(), last.routers(), strict=True):
        assert torch.equal(a.e_score_correction_bias, b.e_score_correction_bias)
        assert not torch.equal(a.e_score_correction_bias, c.e_score_correction_bias)


@pytest.mark.bad_input
def test_parts_must_divide_the_rows():
    with pytest.raises(ValueError, match="accumulate=4 must divide the batch's 6 rows"):
        run(tiny_model(), accumulate=4)


# ---- recomputing ----


@pytest.mark.parametrize("changes", [{}, {"attn_res_block_size": None}, {"attn_res_block_size": 1}], ids=str)
def test_recomputing_changes_no_bit(changes):
    plain, again = tiny_model(dtype=torch.float32, **changes), tiny_model(dtype=torch.float32, **changes)
    again.model.recompute = True
    assert run(plain, accumulate=2) == run(again, accumulate=2)  # routers count every pass once, or the second step would differ
    assert all(torch.equal(x, y) for x, y in zip(plain.state_dict().values(), again.state_dict().values(), strict=True))


def test_recomputing_counts_every_token_once():
    model = tiny_model().train()
    model.model.recompute = True
    ids = tokens(2, 9)
    model(ids, labels=ids).loss.backward()
    assert [router._pooled.tokens for router in model.routers()] == [18] * 4 and all(router.pooling for router in model.routers())


def test_recomputing_keeps_less():
    def kept(model):
        sizes = {}

        def note(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        ids = tokens(4, 64)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            out = model(ids, labels=ids)
        assert out.loss.requires_grad
        return sum(sizes.values())

    plain, again = tiny_model().train(), tiny_model().train()
    again.model.recompute = True
    assert kept(again) < kept(plain) / 5


def test_recomputing_leaves_reading_and_caches_alone():
    model, ids = tiny_model(), tokens(2, 9)
    expected = model(ids).logits
    model.model.recompute = True
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)
        cache = model.new_cache(2)
        assert_within(torch.cat([model(ids[:, :5], cache=cache).logits, model(ids[:, 5:], cache=cache).logits], 1), expected, 1e-10)


# ---- bfloat16 passes, float32 masters ----


def test_passes_are_narrow_and_updates_wide():
    seen = {}

    def evaluate(model):
        seen.update({name: x.dtype for name, x in model.state_dict().items()}, logits=model(tokens(1, 4)).logits.dtype)
        return {}

    model = tiny_model(dtype=torch.float32)
    train(model, batch, Recipe(steps=1, dtype="bfloat16"), evaluate=evaluate, progress=False)
    wide = {name for name, dtype in seen.items() if dtype == torch.float32}
    assert {name.rpartition(".")[2] for name in wide} == {"A_log", "dt_bias", "e_score_correction_bias"}
    assert {dtype for name, dtype in seen.items() if name not in wide} == {torch.bfloat16}
    assert {x.dtype for x in model.state_dict().values()} == {torch.float32}  # after the run it is what it was


def test_masters_learn_what_narrow_weights_would_round_away():
    model = tiny_model(dtype=torch.float32)
    before = model.lm_head.weight.detach().clone()
    run(model, lr=1e-5, steps=1, dtype="bfloat16")
    change = model.lm_head.weight.detach() - before
    assert bool(change.any()) and float((before.bfloat16() == model.lm_head.weight.bfloat16()).float().mean()) > 0.9


def test_a_narrow_gradient_is_the_gradient_of_the_rounded_model():
    """Two ways: hooks summing into masters, and plain autograd on a model that was cast."""
    model, cast = tiny_model(dtype=torch.float32), tiny_model(dtype=torch.float32)
    ids = tokens(2, 16)
    with MasterWeights(model, torch.bfloat16) as masters:
        for name, p in cast.named_parameters():
            p.data = p.data.to(model.get_parameter(name).dtype)
        for _ in range(2):
            model(ids, labels=ids).loss.backward()
        cast(ids, labels=ids).loss.backward()
        for name, p in cast.named_parameters():
            if p.grad is None:  # the first layer's depth query has nothing to read
                assert masters.by_name[name].grad is None
                continue
            assert masters.by_name[name].grad.dtype == torch.float32
            assert torch.equal(masters.by_name[name].grad, 2 * p.grad.float()), name
        assert all(p.grad is None for p in model.parameters() if p.dtype == torch.bfloat16)


def test_a_narrow_run_stays_close_to_the_wide_one():
    wide, narrow = (K3ForCausalLM(tiny_config(), seed=0) for _ in range(2))
    a, b = run(wide, steps=4, lr=1e-3), run(narrow, steps=4, lr=1e-3, dtype="bfloat16")
    assert [row["loss"] for row in a] == pytest.approx([row["loss"] for row in b], rel=0.002)
    assert [row["loss"] for row in a] != [row["loss"] for row in b]


def test_a_narrow_run_is_continued_with_its_masters(tmp_path):
    whole, resumed = tiny_model(dtype=torch.float32), tiny_model(dtype=torch.float32)
    expected = run(whole, steps=3, dtype="bfloat16", accumulate=2)

    def killed(step):
        if step == 2:
            raise KeyboardInterrupt
        return batch(step)

    with pytest.raises(KeyboardInterrupt):
        run(resumed, steps=3, dtype="bfloat16", accumulate=2, folder=tmp_path, batch=killed)
    resumed = tiny_model(seed=1, dtype=torch.float32)
    assert run(resumed, steps=3, dtype="bfloat16", accumulate=2, folder=tmp_path) == expected
    assert all(torch.equal(x, y) for x, y in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True))


def test_tied_tables_have_one_master(tmp_path):
    model = tiny_model(dtype=torch.float32, tie_word_embeddings=True)
    run(model, steps=1, dtype="bfloat16", folder=tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.dtype == torch.float32
    again = tiny_model(seed=1, dtype=torch.float32, tie_word_embeddings=True)
    run(again, steps=1, dtype="bfloat16", folder=tmp_path)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight) and again.lm_head.weight is again.model.embed_tokens.weight


# ---- updating a few numbers at a time ----


def test_an_update_in_pieces_is_the_same_update(monkeypatch):
    whole, pieces = tiny_model(), tiny_model()
    largest = []
    run(whole)
    real = muon.newton_schulz
    monkeypatch.setattr(muon, "newton_schulz", lambda G, *a, **k: largest.append(G.numel()) or real(G, *a, **k))
    monkeypatch.setattr(muon, "AT_ONCE", 300)
    run(pieces)
    all_within(pieces, whole, 1e-12)
    assert max(largest) <= max(300, max(p.numel() for p in pieces.parameters())) and len(largest) > 40


def test_a_run_can_start_on_parameters_without_gradients():
    """Frozen parts have no master to step, and stay as they were."""
    model = tiny_model(dtype=torch.float32)
    frozen = model.model.embed_tokens.weight.requires_grad_(False)
    before = frozen.detach().clone()
    run(model, dtype="bfloat16")
    assert torch.equal(frozen, before) and frozen.dtype == torch.float32
    assert PerHeadMuon(model, lr=1.0).param_groups


@pytest.mark.bad_input
@pytest.mark.parametrize("settings, words", [
    ({"accumulate": 0}, "accumulate must be an integer of at least 1, got 0"),
    ({"dtype": "float16"}, "dtype must be 'bfloat16' or None (the model's own), got 'float16'"),
])  # fmt: skip
def test_wrong_recipes(settings, words):
    with pytest.raises(ValueError) as caught:
        Recipe(steps=1, **settings)
    assert str(caught.value) == words
