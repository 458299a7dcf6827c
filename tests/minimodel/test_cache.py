"""What a model keeps: bytes against the closed form, storage that grows by doubling, snapshots, reordering."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimodel import HybridCache, cache_bytes
from minimodel.cache import Rows
from tests.minimodel.common import tiny_config, tiny_model, tokens

MIXERS = {
    "k3": {},
    "all kda": {"full_mixer": "kda"},
    "all mla": {"linear_mixer": "mla"},
    "windows": {"linear_mixer": "sliding_window", "sliding_window": 5},
    "gqa": {"linear_mixer": "kda", "full_mixer": "gqa", "num_attention_heads": 4, "num_key_value_groups": 2},
    "no taps": {"linear_attn_config": replace(tiny_config().linear_attn_config, short_conv_kernel_size=1)},
}


def storages(cache):
    """Bytes of the distinct storages behind a cache's tensors."""
    found = {}
    for slot in cache.layers:
        for x in slot.tensors().values():
            found[x.untyped_storage().data_ptr() or id(x)] = x.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize("mixers", ["k3", "windows", "gqa"])
def test_a_session_may_leave_inference_mode(mixers):
    """What torch.inference_mode made cannot be written to outside of it; the cache then goes on in memory of its own."""
    model, ids = tiny_model(**MIXERS[mixers]), tokens(1, 12)
    cache = model.new_cache(1)
    with torch.inference_mode():
        model(ids[:, :8], cache=cache)
        model(ids[:, 8:9], cache=cache)
    parts = [model(ids[:, t : t + 1], cache=cache).logits for t in (9, 10)]
    with torch.inference_mode():
        parts.append(model(ids[:, 11:], cache=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits[:, 9:], rtol=0, atol=1e-11)


# ---- bytes ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mixers", MIXERS)
def test_bytes_are_the_closed_form(mixers, dtype):
    model = tiny_model(dtype=dtype, **MIXERS[mixers])
    for B, lengths in ((1, [1, 1, 1, 9, 1, 1]), (3, [40, 1, 1])):
        cache, seen = model.new_cache(B), 0
        assert cache.nbytes == cache.reserved_nbytes == 0
        for T in lengths:
            model(tokens(B, T), cache=cache)
            seen += T
            assert cache.nbytes == cache_bytes(model.config, seen, batch=B, dtype=dtype).total
            assert cache.nbytes <= cache.reserved_nbytes <= 2 * cache.nbytes
            assert cache.reserved_nbytes == storages(cache)


def test_k3_keeps_576_numbers_a_token_in_a_latent_layer():
    from minimodel import K3Config

    config = K3Config.k3()
    assert config.kv_lora_rank + config.qk_rope_head_dim == 576
    assert cache_bytes(config, 1).per_token == 24 * 576 * 2 and cache_bytes(config, 1_048_576).fixed == 449_372_160
    model = tiny_model()
    model(tokens(1, 6), cache=(cache := model.new_cache()))
    assert cache.layers[2].live.shape == (1, 6, model.config.kv_lora_rank + model.config.qk_rope_head_dim)


def test_a_window_lets_a_long_prompt_go():
    model = tiny_model(**MIXERS["windows"])
    cache = model.new_cache()
    model(tokens(1, 500), cache=cache)
    assert cache.layers[0].live.shape[1] == 5 and cache.layers[0].dropped == 495
    assert cache.layers[0].reserved_nbytes <= 2 * cache.layers[0].live.nbytes


# ---- growth ----


@settings(max_examples=50)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12), window=st.sampled_from([None, 1, 3, 8]))
def test_rows_are_all_there_and_at_most_half_of_the_room_is_spare(lengths, window):
    rows, written = Rows(window), torch.arange(sum(lengths), dtype=torch.float64).view(1, -1, 1)
    at = 0
    for T in lengths:
        view = rows.append(written[:, at : at + T])
        kept_before = at if window is None else min(at, window)
        assert torch.equal(view, written[:, at - kept_before : at + T])  # everything kept, before the window drops its oldest
        at += T
        kept = at if window is None else min(at, window)
        assert torch.equal(rows.live, written[:, at - kept : at])
        assert rows.dropped == at - kept
        assert rows.live.nbytes <= rows.reserved_nbytes <= 2 * rows.live.nbytes


@pytest.mark.parametrize("window", [None, 16])
def test_one_token_at_a_time_copies_linearly(window):
    """Every storage is filled before a new one is made, and each is twice the last: n tokens copy fewer than 2n rows."""
    rows, copied, last = Rows(window), 0, None
    for _ in range(1000):
        before = 0 if rows.live is None else rows.live.shape[1]
        rows.append(torch.zeros(1, 1, 1))
        pointer = rows.live.untyped_storage().data_ptr()
        copied += before if pointer != last else 0
        last = pointer
    assert copied <= 2 * 1000


# ---- snapshots ----


@pytest.mark.parametrize("mixers", MIXERS)
def test_a_snapshot_can_be_used_many_times(mixers):
    model, ids = tiny_model(**MIXERS[mixers]), tokens(2, 14)
    cache = model.new_cache(2)
    model(ids[:, :8], cache=cache)
    snapshot = cache.snapshot()
    expected = model(ids[:, 8:], cache=cache).logits
    kept = snapshot.nbytes
    for _ in range(2):
        cache.restore(snapshot)
        assert cache.seen == 8 and cache.nbytes + cache.padding.nbytes == kept
        assert torch.equal(model(ids[:, 8:], cache=cache).logits, expected)
    other = model.new_cache(2)
    other.restore(snapshot)
    assert torch.equal(model(ids[:, 8:], cache=other).logits, expected)


def test_a_snapshot_shares_nothing_with_its_cache():
    model, ids = tiny_model(), tokens(1, 5)
    cache = model.new_cache()
    model(ids, cache=cache)
    snapshot = cache.snapshot()
    for _ in range(2):  # neither when it is taken nor when it is restored
        for slot in cache.layers:
            for x in slot.tensors().values():
                x.fill_(torch.nan)
        cache.restore(snapshot)
    assert bool(torch.isfinite(model(ids, cache=cache).logits).all())


def test_an_empty_snapshot_empties():
    model, ids = tiny_model(), tokens(1, 5)
    cache = model.new_cache()
    empty, expected = cache.snapshot(), model(ids).logits
    model(ids, cache=cache)
    cache.restore(empty)
    assert cache.seen == 0 and cache.nbytes == 0
    torch.testing.assert_close(model(ids, cache=cache).logits, expected, rtol=0, atol=1e-10)


def test_padding_survives_a_snapshot():
    model, ids = tiny_model(), tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    cache, more = model.new_cache(2), tokens(2, 3, seed=1)
    model(ids, attention_mask=mask, cache=cache)
    other = model.new_cache(2)
    other.restore(cache.snapshot())
    assert other.padding.tolist() == [2, 0]
    assert torch.equal(model(more, cache=other).logits, model(more, cache=cache).logits)


# ---- rows of the batch ----


@pytest.mark.parametrize("mixers", MIXERS)
def test_reorder(mixers):
    model, ids = tiny_model(**MIXERS[mixers]), tokens(3, 9)
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = 0
    cache = model.new_cache(3)
    model(ids, attention_mask=mask, cache=cache)
    rows = torch.tensor([2, 1, 1, 0])
    cache.reorder(rows)
    assert cache.batch_size == 4 and cache.padding.tolist() == [0, 4, 4, 0]
    more = tokens(4, 3, seed=1)
    logits = model(more, cache=cache).logits
    for i, row in enumerate(rows.tolist()):
        whole = torch.cat([ids[row, 4 * (row == 1) :], more[i]])[None]
        assert float((logits[i] - model(whole).logits[0, -3:]).detach().abs().max()) < 1e-10
    cache.reorder(torch.tensor([3]))  # finished sequences are dropped
    assert cache.batch_size == 1 and cache.nbytes == cache_bytes(model.config, 12, dtype=torch.float64).total


# ---- wrong input ----


@pytest.mark.bad_input
def test_wrong_arguments():
    model = tiny_model()
    cache = model.new_cache(2)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got -1"):
        HybridCache(model.config, -1)
    for rows in ([2], [-1, 0], []):
        with pytest.raises(ValueError, match=r"rows must index the batch of 2, got \["):
            cache.reorder(torch.tensor(rows, dtype=torch.long))
    with pytest.raises(ValueError, match="cache holds batch_size 2, snapshot has 1"):
        cache.restore(model.new_cache(1).snapshot())
    with pytest.raises(ValueError, match="another config: q_lora_rank 9 and 8"):
        cache.restore(tiny_model(q_lora_rank=8).new_cache(2).snapshot())
