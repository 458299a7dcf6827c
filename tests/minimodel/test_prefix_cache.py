"""PrefixCache: a resumed prompt gives a cold run's logits; blocks and checkpoints, eviction, independence of what was handed out."""
import pytest
import torch

from minimodel import K3Config, K3ForCausalLM, PrefixCache

BLOCK = 8


@pytest.fixture(scope="module")
def model():
    return K3ForCausalLM(K3Config.meeting(), seed=3).double().eval()


def tokens(n, seed=0):
    return torch.randint(2, 100, (1, n), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def cold(model, ids):
    return model(ids).logits[:, -1]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_resumed_logits_equal_a_cold_run(model):
    prefix = PrefixCache(model, block_tokens=BLOCK)
    first = tokens(29)
    logits, cache, hit = prefix.read(first)
    assert hit == 0 and cache.seen == 29
    close(logits, cold(model, first))
    for n in (25, 29, 40):  # the same beginning, other ends
        ids = torch.cat([first[:, :24], tokens(n, seed=n)], 1)
        logits, cache, hit = prefix.read(ids)
        assert hit == 24 and cache.seen == ids.shape[1]
        close(logits, cold(model, ids))


def test_a_hit_ends_at_a_checkpoint_and_leaves_a_token_to_read(model):
    prefix = PrefixCache(model, block_tokens=BLOCK)
    ids = tokens(24)
    prefix.read(ids)  # checkpoint at 16: the last block end with a token after it
    assert prefix.lookup(ids)[1] == 16
    assert prefix.lookup(ids[:, :16])[1] == 0  # all of it is stored, but nothing would be left to compute logits from
    assert prefix.lookup(ids[:, :17])[1] == 16
    assert prefix.lookup(ids[:, :12])[1] == 0  # its block is stored, but no checkpoint stands at 8
    changed = ids.clone()
    changed[0, 0] += 1
    assert prefix.lookup(changed)[1] == 0  # names are chained: another first token changes every block
    assert (prefix.hits, prefix.misses) == (2, 4)


def test_longest_of_several_checkpoints(model):
    prefix = PrefixCache(model, block_tokens=BLOCK)
    ids = tokens(60)
    for n in (10, 30, 60):
        prefix.read(ids[:, :n])
    assert [prefix.lookup(ids[:, :n])[1] for n in (12, 26, 50, 60)] == [8, 24, 24, 56]


def test_what_was_handed_out_is_a_copy(model):
    prefix = PrefixCache(model, block_tokens=BLOCK)
    ids = tokens(17)
    prefix.read(ids)
    cache, n = prefix.lookup(ids)
    with torch.no_grad():
        model(tokens(30, seed=9), cache=cache)
        for slot in cache.layers:
            for x in slot.tensors().values():
                x.fill_(7.0)
    again, m = prefix.lookup(ids)
    assert n == m == 16
    with torch.no_grad():
        close(model(ids[:, 16:], cache=again).logits[:, -1], cold(model, ids))


def test_bytes_are_bounded_and_the_least_recently_used_goes_first(model):
    one = PrefixCache(model, block_tokens=BLOCK)
    one.read(tokens(17, seed=1))
    prefix = PrefixCache(model, block_tokens=BLOCK, max_bytes=2 * one.nbytes)
    for seed in (1, 2, 1, 3):
        prefix.read(tokens(17, seed=seed))
        assert prefix.nbytes <= prefix.max_bytes
        assert prefix.nbytes == sum(x.nbytes for e in prefix._entries.values() for t in e.values() for x in t.values())
    assert [prefix.lookup(tokens(17, seed=seed))[1] for seed in (1, 2, 3)] == [16, 0, 16]
    nothing = PrefixCache(model, block_tokens=BLOCK, max_bytes=0)
    close(nothing.read(tokens(17))[0], cold(model, tokens(17)))
    assert nothing.nbytes == 0


def test_eviction_takes_a_chain_from_its_far_end(model):
    """Used again, a chain's beginning counts as used last: without it the rest could not be reached."""
    prefix = PrefixCache(model, block_tokens=BLOCK)
    ids = tokens(60)
    prefix.read(ids[:, :10])
    prefix.read(ids)  # checkpoints at 8 and 56
    blocks = [key for key in prefix._entries if key[0] == "block"]
    chain = [("block", name) for name in prefix._names(ids[0, :56])]
    assert set(blocks) == set(chain)
    order = [key for key in prefix._entries if key[0] == "block"]
    assert order == chain[::-1]  # least recently used first: the far end
    prefix.max_bytes = prefix.nbytes - 1
    prefix.insert(*_cache_of(model, ids[:, :8]))
    assert prefix.lookup(ids)[1] == 8 and chain[0] in prefix._entries


def _cache_of(model, ids):
    cache = model.new_cache(1)
    with torch.no_grad():
        model(ids, cache=cache)
    return ids, cache


@pytest.mark.bad_input
def test_wrong_arguments(model):
    with pytest.raises(ValueError, match="block_tokens must be at least 1, got 0"):
        PrefixCache(model, block_tokens=0)
    with pytest.raises(ValueError, match="max_bytes must not be negative, got -1"):
        PrefixCache(model, max_bytes=-1)
    prefix = PrefixCache(model, block_tokens=BLOCK)
    ids, cache = _cache_of(model, tokens(9))
    with pytest.raises(ValueError, match="cache has read 9 tokens, ids holds 8"):
        prefix.insert(ids[:, :8], cache)
    with pytest.raises(ValueError, match="ids must be one row of at least one token"):
        prefix.lookup(torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="cache belongs to a model with another config"):
        prefix.insert(ids, K3ForCausalLM(K3Config.meeting().replace(vocab_size=99)).new_cache(1))
