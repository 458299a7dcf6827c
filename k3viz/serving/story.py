"""The serving story: an agent sends its whole history at every turn, and a prefix cache reads only what is new.

The session really runs: a tiny K3 (one KDA layer, one MLA layer, untrained) reads it through ``PrefixCache``, one of its tokens for 256 of
the session's, so that K3's hash block of 512 tokens is a block of 2. The hits are that cache's. Prices are the published ones, bytes are
those of K3, or of another config, by formula, and times follow a latency model with a chosen machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from minimodel import K3Config, K3ForCausalLM, PrefixCache, cache_bytes
from minimodel.accounting import flops
from minimodel.config import LinearAttnConfig
from minimodel.facts import Serving
from minimodel.formats import format_bytes, format_count, format_number, format_probability, plural

SCALE = 256  # tokens of the session for one token of the tiny model
BLOCK = Serving.hash_block.value  # tokens
BREAKS = {
    "nothing": "nothing: only append",
    "clock": "a clock in the first line",
    "edit": "the first message is edited",
    "summary": "history becomes a summary",
}
SNAPSHOTS = {
    "prompts": "after each prompt",
    "answers": "after prompts and answers",
    "all": "and after the instructions",
}
MOST = {"system": 32_768, "message": 8_192, "output": 4_096}  # tokens
TURNS = 10
# the latency model's machine, chosen
SPEED = 3.2e15  # FLOP/s: eight accelerators of 1e15 at 40 %
COPY = 1e12  # bytes/s, from the prefix cache into the session's own


@dataclass(frozen=True)
class Turn:
    """One request, in tokens of the session. prompt: all that is sent; hit: of it, resumed from the cache; output: the answer.

    checkpoints: where this turn left a snapshot of the KDA states. cost, uncached_cost: dollars with the cache and without one.
    seconds, uncached_seconds: to the first token, by the latency model. snapshots, stored: snapshots and tokens in the cache after it.
    """

    prompt: int
    hit: int
    output: int
    checkpoints: tuple[int, ...]
    cost: float
    uncached_cost: float
    seconds: float
    uncached_seconds: float
    snapshots: int
    stored: int

    @property
    def read(self) -> int:
        return self.prompt - self.hit


@dataclass(frozen=True)
class ServingStory:
    """A session of ``turns``. broken: what breaks the prefix, of BREAKS, from turn ``at`` on (1-based). unbroken: the same session
    when nothing does. off: largest difference of the last turn's logits, resumed against read from the start. nbytes: of the tiny model's
    prefix cache. config: whose bytes and times are counted. settings: the arguments that this story was told with."""

    turns: tuple[Turn, ...]
    broken: str
    at: int
    unbroken: tuple[Turn, ...]
    off: float
    nbytes: int
    config: K3Config
    settings: Mapping[str, Any]

    def again(self, **changes: Any) -> ServingStory:
        """The same story with some of ``serving_story``'s arguments changed."""
        return serving_story(**{**self.settings, **changes})

    @property
    def size(self) -> str:
        """Whose bytes and times these are."""
        return "K3" if self.config == _k3() else "this config"

    def bill(self, turn: int = -1, *, cached: bool = True) -> float:
        """Dollars up to and including a turn (0-based, or from the end)."""
        turn = range(len(self.turns))[turn]
        return sum(t.cost if cached else t.uncached_cost for t in self.turns[: turn + 1])

    def hit_rate(self, turn: int = -1) -> float:
        """Share of all input tokens so far that came from the cache."""
        turn = range(len(self.turns))[turn]
        return sum(t.hit for t in self.turns[: turn + 1]) / sum(t.prompt for t in self.turns[: turn + 1])

    def kept_bytes(self, turn: int = -1) -> int:
        """Bytes of snapshots and latents at the config's size."""
        t, size = self.turns[turn], cache_bytes(self.config, 1)
        return t.snapshots * size.fixed + t.stored * size.per_token

    def sentence_at(self, turn: int) -> str:
        """What one turn read, cost and took, in one sentence or two."""
        turn = range(len(self.turns))[turn]
        t = self.turns[turn]
        blocks = f", {format_count(t.hit // BLOCK)} {plural('block', t.hit // BLOCK)} of {BLOCK}" if t.hit else ""
        broken = self.broken == "clock" and turn > 0 or self.broken in ("edit", "summary") and turn + 1 == self.at
        said = f"Turn {turn + 1}{': the prefix is broken, and of' if broken else ': of'} {format_count(t.prompt)} tokens "
        said += f"{format_count(t.hit)} are resumed{blocks}, {format_count(t.read)} are read; "
        said += f"first token after {format_number(t.seconds)} s instead of {format_number(t.uncached_seconds)} s. "
        said += f"So far {dollars(self.bill(turn))}, without a cache {dollars(self.bill(turn, cached=False))}"
        saved = sum(u.cost for u in self.unbroken[: turn + 1])
        if self.broken != "nothing":
            said += f", with an unbroken prefix {dollars(saved)}"
        kept = f"{t.snapshots} {plural('snapshot', t.snapshots)} and {format_count(t.stored)} tokens"
        return (
            f"{said}; {format_probability(self.hit_rate(turn))} of the input came from the cache. "
            f"{kept} are kept, {format_bytes(self.kept_bytes(turn))} in {self.size}."
        )

    @property
    def sentence(self) -> str:
        return self.sentence_at(-1)


def serving_story(
    *,
    turns: int = 8,
    system: int = 16_384,
    message: int = 3_840,
    output: int = 1_024,
    broken: str = "nothing",
    at: int | None = None,
    snapshots: str = "answers",
    config: K3Config | None = None,
) -> ServingStory:
    """Run an agent's session through a prefix cache.

    turns: requests, 2 to 10. system, message, output: tokens of the instructions and tools that come first, of what each turn adds
    (a tool's result), and of each answer: multiples of 256, at most 32,768, 8,192 and 4,096. broken: "nothing", "clock" (the first token
    differs at every turn), "edit" (at turn ``at`` the first message changes), "summary" (at turn ``at`` the history is replaced by a
    message). at: that turn, 2 to turns (default: in the middle). snapshots: where KDA states are kept, always at the last block end: after
    "prompts", after prompts and "answers", or "all": after the instructions too. config: whose bytes and times are counted (default: K3's).
    Raises ValueError that names the argument.
    """
    if isinstance(turns, bool) or not isinstance(turns, int) or not 2 <= turns <= TURNS:
        raise ValueError(f"turns must be a whole number from 2 to {TURNS}, got {turns!r}")
    for name, value in (("system", system), ("message", message), ("output", output)):
        if isinstance(value, bool) or not isinstance(value, int) or not SCALE <= value <= MOST[name] or value % SCALE:
            raise ValueError(f"{name} must be a multiple of {SCALE} tokens from {SCALE} to {MOST[name]}, got {value!r}")
    if broken not in tuple(BREAKS):
        raise ValueError(f"broken must be one of {', '.join(BREAKS)}, got {broken!r}")
    if snapshots not in tuple(SNAPSHOTS):
        raise ValueError(f"snapshots must be one of {', '.join(SNAPSHOTS)}, got {snapshots!r}")
    settings = {"turns": turns, "system": system, "message": message, "output": output, "broken": broken, "at": at, "snapshots": snapshots,
                "config": config}  # fmt: skip
    at = turns // 2 + 1 if at is None else at
    if isinstance(at, bool) or not isinstance(at, int) or not 2 <= at <= turns:
        raise ValueError(f"at must be a turn from 2 to {turns}, got {at!r}")
    if config is not None and not isinstance(config, K3Config):
        raise ValueError(f"config must be a K3Config, got {type(config).__name__}")
    config = _k3() if config is None else config
    sizes = (config, turns, system // SCALE, message // SCALE, output // SCALE, snapshots)
    told, off, nbytes = _session(*sizes, broken, at if broken in ("edit", "summary") else 0)
    return ServingStory(told, broken, at, _session(*sizes, "nothing", 0)[0], off, nbytes, config, settings)


def dollars(x: float) -> str:
    return f"${format_number(x)}"


# ---- the session ----


def tiny_model() -> K3ForCausalLM:
    """One KDA layer and one MLA layer, as small as they get: what a prefix cache hits does not depend on the weights."""
    config = K3Config(
        vocab_size=512, hidden_size=8, num_hidden_layers=2, num_attention_heads=1, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2,
        linear_attn_config=LinearAttnConfig(kda_layers=(1,), full_attn_layers=(2,), num_heads=1, head_dim=8), v_head_dim=4,
        intermediate_size=16, first_k_dense_replace=2, attn_res_block_size=None,
    )  # fmt: skip
    return K3ForCausalLM(config, seed=0).double().eval()


def prompts(turns: int, system: int, message: int, output: int, broken: str, at: int) -> list[tuple[Tensor, Tensor]]:
    """(prompt, answer) of every turn, as token ids of the tiny model; each prompt holds everything before it."""
    rng = torch.Generator().manual_seed(0)

    def words(n: int) -> Tensor:
        return torch.randint(1, 256, (n,), generator=rng)

    start = words(system)
    history, out = start, []
    for turn in range(1, turns + 1):
        new = words(message)
        if broken == "summary" and turn == at:
            history = torch.cat([start, words(message)])
        prompt = torch.cat([history, new])
        if broken == "clock":
            prompt[0] = 256 + turn
        if broken == "edit" and turn >= at:
            prompt[system] = 256
        answer = words(output)
        out.append((prompt, answer))
        history = torch.cat([prompt, answer])
    return out


@lru_cache(maxsize=64)
@torch.inference_mode()
def _session(
    config: K3Config, turns: int, system: int, message: int, output: int, snapshots: str, broken: str, at: int
) -> tuple[tuple[Turn, ...], float, int]:
    """(turns, difference of the last logits to a cold run, bytes of the cache); sizes in tokens of the tiny model."""
    model, block = tiny_model(), BLOCK // SCALE
    prefix = PrefixCache(model, block_tokens=block)
    told, kept, blocks = [], set(), set()
    for prompt, answer in prompts(turns, system, message, output, broken, at):
        first = system // block * block
        apart = snapshots == "all" and prefix.lookup(prompt)[1] < first
        if apart:
            prefix.read(prompt[: first + 1])  # a snapshot where the instructions end
        logits, cache, hit = prefix.read(prompt)
        hit = 0 if apart else hit  # the instructions were read just now
        whole, ends = prompt, [first * apart, (len(prompt) - 1) // block * block]
        if snapshots != "prompts":
            whole = torch.cat([prompt, answer])
            end = len(whole) // block * block
            if end > len(prompt):
                model(whole[None, len(prompt) : end], cache=cache)
                prefix.insert(whole[:end], cache)
                ends.append(end)
        ids, ends = whole.tolist(), sorted({end for end in ends if end > hit})
        kept |= {tuple(ids[:end]) for end in ends}
        blocks |= {tuple(ids[:end]) for end in range(block, max(ends, default=0) + 1, block)}
        told.append(_turn(config, SCALE * len(prompt), SCALE * hit, SCALE * len(answer), tuple(SCALE * e for e in ends), len(kept),
                          BLOCK * len(blocks)))  # fmt: skip
    off = float((logits - model(prompt[None]).logits[:, -1]).abs().max())
    return tuple(told), off, prefix.nbytes


def _turn(
    config: K3Config, prompt: int, hit: int, output: int, checkpoints: tuple[int, ...], snapshots: int, stored: int
) -> Turn:
    price, cached, written = (p.value / 1e6 for p in (Serving.input_price, Serving.cached_price, Serving.output_price))
    return Turn(
        prompt=prompt, hit=hit, output=output, checkpoints=checkpoints, snapshots=snapshots, stored=stored,
        cost=cached * hit + price * (prompt - hit) + written * output, uncached_cost=price * prompt + written * output,
        seconds=first_token_seconds(config, prompt, hit), uncached_seconds=first_token_seconds(config, prompt, 0),
    )  # fmt: skip


# ---- the latency model ----


def first_token_seconds(config: K3Config, prompt: int, hit: int) -> float:
    """FLOPs of the tokens that are read, at ``SPEED``, and bytes of the cache that is resumed, at ``COPY``; queues, network left out."""
    return (_work(config, prompt) - _work(config, hit)) / SPEED + (cache_bytes(config, hit).total / COPY if hit else 0.0)


@lru_cache(maxsize=4096)
def _work(config: K3Config, tokens: int) -> float:
    """FLOPs of reading the first ``tokens`` tokens."""
    return tokens * flops(config, tokens).per_token if tokens else 0.0


@lru_cache(maxsize=1)
def _k3() -> K3Config:
    return K3Config.k3()
