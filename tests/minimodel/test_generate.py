"""Generation: greedy is a plain loop, rows are independent, sampling draws from what it says, sessions continue."""
import pytest
import torch

from minimodel import HybridCache, K3Config, K3ForCausalLM, generate
from minimodel.generate import pick


@pytest.fixture(scope="module")
def model():
    config = K3Config.meeting().replace(initializer_range=0.3)  # large enough for logits that differ
    return K3ForCausalLM(config, seed=1).double().eval()


def tokens(*shape, seed=0):
    return torch.randint(1, 120, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def greedy_without_cache(model, ids, n):
    for _ in range(n):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids


def test_greedy_is_the_plain_loop(model):
    ids = tokens(2, 11)
    assert torch.equal(generate(model, ids, max_new_tokens=7), greedy_without_cache(model, ids, 7))


def test_prompts_of_different_lengths_give_what_each_gives_alone(model):
    prompts = [tokens(1, n, seed=n)[0] for n in (3, 17, 9)]
    for row, prompt in zip(generate(model, prompts, max_new_tokens=6), prompts, strict=True):
        assert torch.equal(row, greedy_without_cache(model, prompt[None], 6)[0])


def test_logits_of_a_padded_batch_are_those_of_its_rows(model):
    short, long = tokens(1, 5), tokens(1, 14, seed=1)
    ids = torch.cat([torch.cat([torch.zeros(1, 9, dtype=torch.long), short], 1), long])
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    cache, alone = model.new_cache(2), model.new_cache(1)
    both = [model(ids, cache=cache, attention_mask=mask).logits[:1, -1]]
    one = [model(short, cache=alone).logits[:, -1]]
    for t in range(4):
        step = tokens(2, 1, seed=t)
        both.append(model(step, cache=cache).logits[:1, -1])
        one.append(model(step[:1], cache=alone).logits[:, -1])
    torch.testing.assert_close(torch.cat(both), torch.cat(one), rtol=0, atol=1e-10)


def test_stream_gives_the_same_tokens(model):
    ids = tokens(2, 6)
    steps = list(generate(model, ids, max_new_tokens=5, stream=True))
    assert torch.equal(torch.stack(steps, 1), generate(model, ids, max_new_tokens=5)[:, 6:])


def test_stop_ends_a_row_and_then_the_run(model):
    ids = tokens(2, 6)
    full = generate(model, ids, max_new_tokens=8)[:, 6:]
    stop = int(full[0, 2])
    first = [int((row == stop).nonzero()[0]) if (row == stop).any() else 7 for row in full]
    out = generate(model, ids, max_new_tokens=8, stop=stop)[:, 6:]
    assert out.shape[1] == max(first) + 1
    for row, want, end in zip(out, full, first, strict=True):
        assert torch.equal(row[: end + 1], want[: end + 1]) and bool((row[end:] == row[end]).all())
    ragged = generate(model, [ids[0], ids[1]], max_new_tokens=8, stop=[stop])
    assert [len(r) - 6 for r in ragged] == [end + 1 for end in first]


def test_sampling_is_seeded_and_leaves_the_global_generator_alone(model):
    ids = tokens(1, 6)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    a = generate(model, ids, max_new_tokens=12, temperature=1.0, seed=3)
    assert torch.equal(a, generate(model, ids, max_new_tokens=12, temperature=1.0, seed=3))
    assert not torch.equal(a, generate(model, ids, max_new_tokens=12, temperature=1.0, seed=4))
    assert torch.equal(state, torch.get_rng_state())


def test_sampled_frequencies_are_the_truncated_softmax():
    logits = torch.tensor([3.0, 1.0, 2.0, 0.0]).repeat(20000, 1)
    generator = torch.Generator().manual_seed(0)

    def frequencies(**settings):
        return torch.bincount(pick(logits, generator=generator, **settings), minlength=4) / len(logits)

    p = logits[0].softmax(0)
    torch.testing.assert_close(frequencies(temperature=1.0), p, rtol=0, atol=0.015)
    torch.testing.assert_close(frequencies(temperature=2.0), (logits[0] / 2).softmax(0), rtol=0, atol=0.015)
    two = torch.tensor([p[0], 0.0, p[2], 0.0]) / (p[0] + p[2])
    torch.testing.assert_close(frequencies(temperature=1.0, top_k=2), two, rtol=0, atol=0.015)
    assert p[0] < 0.8 < p[0] + p[2]
    torch.testing.assert_close(frequencies(temperature=1.0, top_p=0.8), two, rtol=0, atol=0.015)
    assert frequencies(temperature=1.0, top_p=1e-9)[0] == 1  # the likeliest token always stays
    even = torch.tensor([0.5, 0.25, 0.25]).log().repeat(1000, 1)
    assert bool((pick(even, temperature=1.0, top_p=0.5, generator=generator) == 0).all())  # exactly reached is enough
    four = torch.tensor([0.3, 0.25, 0.25, 0.2]).log().repeat(1000, 1)
    assert bool((pick(four, temperature=1.0, top_k=2, top_p=0.5, generator=generator) == 0).all())  # counted among what top_k left


def test_generation_is_not_training(model):
    """Whatever the model's mode: the same tokens, the mode stays, and no router pools what it saw."""
    want = generate(model, tokens(1, 4), max_new_tokens=3)
    model.train()
    stream = generate(model, tokens(1, 4), max_new_tokens=3, stream=True)
    assert int(next(stream)) == int(want[0, 4]) and model.training
    assert torch.equal(generate(model, tokens(1, 4), max_new_tokens=3), want)
    assert all(router._pooled is None for router in model.routers())
    model.eval()


@pytest.mark.parametrize("stream", [False, True])
def test_generation_keeps_no_gradients(model, stream, monkeypatch):
    """Also with gradients on around it, and where the caller draws the tokens one by one."""
    seen, forward = [], type(model).forward

    def watched(*args, **kwargs):
        seen.append(forward(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(type(model), "forward", watched)
    with torch.enable_grad():
        list(generate(model, tokens(1, 4), max_new_tokens=3, stream=stream))
    assert len(seen) == 3 and not any(out.logits.requires_grad for out in seen)


def test_an_interrupted_pass_is_noticed(model):
    cache = model.new_cache(1)
    generate(model, tokens(1, 4), max_new_tokens=2, cache=cache)
    snapshot = cache.snapshot()
    last = model.model.layers[-1].block_sparse_moe
    model.model.layers[-1].block_sparse_moe = None  # the pass fails after the other layers have written
    with pytest.raises(TypeError):
        model(tokens(1, 1), cache=cache)
    model.model.layers[-1].block_sparse_moe = last
    for use in (lambda: model(tokens(1, 1), cache=cache), cache.snapshot):
        with pytest.raises(ValueError, match="cache was left half written by a pass that was interrupted"):
            use()
    cache.restore(snapshot)
    assert model(tokens(1, 1), cache=cache).cache.seen == snapshot.seen + 1


def test_a_session_is_saved_reloaded_and_continued(model, tmp_path):
    ids = tokens(2, 9)
    whole = generate(model, ids, max_new_tokens=10)
    cache = model.new_cache(2)
    first = generate(model, ids, max_new_tokens=4, cache=cache)
    cache.save(tmp_path / "session.safetensors")
    loaded = HybridCache.load(tmp_path / "session.safetensors", model)
    assert loaded.seen == cache.seen and loaded.nbytes == cache.nbytes
    for session in (cache, loaded):
        assert torch.equal(generate(model, first[:, -1:], max_new_tokens=6, cache=session)[:, 1:], whole[:, 13:])


@pytest.mark.bad_input
def test_wrong_arguments(model, tmp_path):
    ids = tokens(1, 4)
    for settings, message in (
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be 0 or a positive number, got -1"),
        ({"temperature": float("nan")}, "temperature must be 0 or a positive number, got nan"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, ids, **{"max_new_tokens": 2, **settings})
    with pytest.raises(ValueError, match="input_ids must hold at least one prompt and no empty one"):
        generate(model, [[1, 2], []], max_new_tokens=1)
    with pytest.raises(ValueError, match=rf"input_ids must lie in 0\.\.{model.config.vocab_size - 1} \(vocab_size\), got 1\.\.500"):
        generate(model, torch.tensor([[1, 500]]), max_new_tokens=1)
    with pytest.raises(ValueError, match="cache holds batch_size 2, input_ids has 1"):
        generate(model, ids, max_new_tokens=1, cache=model.new_cache(2))
    model.new_cache(1).save(tmp_path / "empty.safetensors")
    other = K3ForCausalLM(K3Config.meeting().replace(kv_lora_rank=16))
    with pytest.raises(ValueError, match="is the session of a model with another config"):
        HybridCache.load(tmp_path / "empty.safetensors", other)
    (tmp_path / "broken.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="broken.safetensors"):
        HybridCache.load(tmp_path / "broken.safetensors", model)
