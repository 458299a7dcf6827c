"""The memory story: what a conversation keeps in memory, word by word.

*Measured*: small models that differ only in their attention really run, and ``cache.nbytes`` adds up their real tensors; the
closed form of ``cache_bytes`` is computed independently. *Published*: the same closed form on the released models' sizes, to a
million tokens. The two are never mixed in one curve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from k3viz.memory.bill import DTYPES, PATTERNS, WEIGHTS, Bill, bill, pattern_of
from minimodel import K3Config, K3ForCausalLM, cache_bytes
from minimodel.accounting import row_numbers, with_mixer
from minimodel.facts import DEEPSEEK_V3_PAPER, KIMI_K2_CONFIG, deepseek_v3_dimensions, kimi_k2_dimensions
from minimodel.formats import format_bytes, format_count, format_number, plural

KINDS = {  # the small models: all layers of one kind, and K3's hybrid of three KDA layers to one MLA layer
    "mha": "MHA",
    "gqa": "GQA",
    "mla": "MLA",
    "sliding_window": "sliding window",
    "kda": "KDA hybrid",
}
LONGEST = 1 << 24  # tokens
MOST = 4096  # sessions in a batch
OWN = "own"  # the name of the curve of a config that was given


@dataclass(frozen=True)
class MeasuredCurve:
    """kind: one of KINDS. measured: ``cache.nbytes`` after each of ``tokens``; formula: ``cache_bytes(...).total`` there."""

    kind: str
    label: str
    tokens: tuple[int, ...]
    measured: tuple[int, ...]
    formula: tuple[int, ...]
    per_token: int
    fixed: int


@dataclass(frozen=True)
class PublishedCurve:
    """A model's cache by the closed form. mixer: what its growing layers are ("kda" marks the hybrids); source: of its sizes.

    bytes: of all sessions of the batch at each of ``tokens``; per_token, fixed: of one session; bill: at the story's context. layers:
    those that keep every token; copies: how often each of them does (MHA for every head, GQA for every group, MLA once).
    windowed: bytes of one session in window layers, once these are full.
    """

    name: str
    label: str
    mixer: str
    tokens: tuple[int, ...]
    bytes: tuple[int, ...]
    per_token: int
    fixed: int
    source: str
    bill: Bill
    layers: int
    copies: int
    windowed: int

    def fills(self, memory: float) -> int | None:
        """Tokens of one session that fit into so many bytes, None where no number of them fills it."""
        if not self.per_token:
            return None
        return max(0, int(memory - self.fixed - self.windowed) // self.per_token)


@dataclass(frozen=True)
class MemoryStory:
    """measured: small models of this course (float32); window: of the sliding-window one. published: to ``context`` in ``dtype``, for
    ``batch`` sessions, and a config of one's own among them; memory: bytes of all GPUs; weights: how the weights are stored."""

    measured: tuple[MeasuredCurve, ...]
    published: tuple[PublishedCurve, ...]
    window: int
    context: int
    dtype: str
    batch: int
    memory: float
    weights: str
    break_even: int | None  # tokens from which K3's hybrid keeps less than the same model with MLA in every layer

    @property
    def sentence(self) -> str:
        """The published curves at full context, in one sentence."""
        if not self.published:
            return "Choose at least one published model."
        ends = sorted(self.published, key=lambda c: c.bytes[-1])
        sizes = ", ".join(f"{c.label} {format_bytes(c.bytes[-1])}" for c in ends)
        takes = "one conversation takes" if self.batch == 1 else f"{format_count(self.batch)} conversations take"
        said = f"At {format_count(self.context)} tokens {takes}: {sizes}"
        if self.break_even is not None:
            said += f"; below {format_count(self.break_even)} tokens K3's fixed state makes it larger than all-MLA"
        return said + "."

    @property
    def bill_sentence(self) -> str:
        """How many sessions fit beside the weights, and what a new token moves, for one's own model or else K3 or the first one.

        Empty without a published model.
        """
        if not self.published:
            return ""
        named = {c.name: c for c in self.published}
        c = named.get(OWN) or named.get("k3") or self.published[0]
        room, weights = f"{format_bytes(self.memory)} of GPU memory", f"{format_bytes(c.bill.weights)} of weights"
        if c.bill.weights > self.memory:
            said = f"{room} can't hold the {weights} of {c.label}"
        else:
            said = f"{room} hold {format_count(c.bill.sessions)} {plural('such session', c.bill.sessions)} of {c.label} beside {weights}"
        return f"{said}; each new token moves {format_bytes(c.bill.moved)}."

    @property
    def measured_sentence(self) -> str:
        """The measured curves at their end, and how far the closed form is off, in one sentence."""
        if not self.measured:
            return "Choose at least one small model."
        said = ", ".join(f"{c.label} {format_bytes(c.measured[-1])}" for c in self.measured)
        off = max(abs(m - f) for c in self.measured for m, f in zip(c.measured, c.formula, strict=True))
        tokens = format_count(self.measured[0].tokens[-1])
        return f"After {tokens} tokens the small models hold: {said}; the formula is off by {off} {plural('byte', off)} at most."


def memory_story(
    *,
    kinds: Sequence[str] = tuple(KINDS),
    models: Sequence[str] = ("k3", "kimi_linear", "kimi_k2", "k3_all_mla", "k3_gqa"),
    tokens: int = 1024,
    context: int = 1_048_576,
    dtype: str = "bfloat16",
    config: K3Config | None = None,
    batch: int = 1,
    memory: float = 2256e9,
    weights: str = "4-bit experts",
) -> MemoryStory:
    """Measure small models and count published ones.

    kinds: small models to run, of KINDS. models: published models to count, of ``MODELS``. tokens: how far the small models read
    (64 to 4096). context: how far the published curves go. dtype: of the published models' latents, keys and values, one of
    float32, bfloat16, float8 (KDA states stay float32). config: a model of one's own, counted like the published ones. batch: sessions
    that take their steps together (1 to 4096). memory: bytes of all GPUs (default: 16 of 141 GB). weights: how the weights of every
    model are stored, "4-bit experts" (as K3 ships: routed experts in MXFP4, the rest bfloat16), "float8" or "bfloat16".
    Raises ValueError naming the argument.
    """
    for name, chosen, known in (("kinds", kinds, KINDS), ("models", models, MODELS)):
        unknown = [x for x in chosen if x not in list(known)] if isinstance(chosen, (list, tuple)) else [chosen]
        if unknown:
            raise ValueError(f"{name}: unknown {unknown[0]!r}; choose a list from {', '.join(known)}")
    for name, value, low, high in (("tokens", tokens, 64, 4096), ("context", context, 64, LONGEST), ("batch", batch, 1, MOST)):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{name} must be a whole number from {low} to {high}, got {value!r}")
    if dtype not in tuple(DTYPES):
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if weights not in tuple(WEIGHTS):
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not 0 < memory < 1e18:
        raise ValueError(f"memory must be a number of bytes, more than 0, got {memory!r}")
    if config is not None and not isinstance(config, K3Config):
        raise ValueError(f"config must be a K3Config, got {type(config).__name__}")
    counted = {name: config_of() for name, (_, _, _, config_of) in MODELS.items() if name in models}
    if config is not None:
        counted[OWN] = config
    how = {"context": context, "dtype": dtype, "batch": batch, "memory": float(memory), "weights": weights}
    published = tuple(_count(name, chosen, **how) for name, chosen in counted.items())
    return MemoryStory(
        measured=tuple(_measure(kind, tokens) for kind in KINDS if kind in kinds),
        published=published,
        window=small_config("sliding_window").sliding_window,
        **how,
        break_even=next((c.bill.break_even for c in published if c.name == "k3" and "k3_all_mla" in models), None),
    )


# ---- measured ----


def small_config(kind: str) -> K3Config:
    """A meeting-sized model whose attention is all of one kind ("kda": the 3:1 hybrid), with 8 heads that GQA shares 4 to 1."""
    base = K3Config.meeting().replace(num_attention_heads=8, num_key_value_groups=2, sliding_window=64)
    return base if kind == "kda" else base.replace(linear_mixer=kind, full_mixer=kind)


@lru_cache(maxsize=64)
def _measure(kind: str, tokens: int) -> MeasuredCurve:
    config = small_config(kind)
    model = K3ForCausalLM(config, seed=0).eval()
    ids = torch.randint(config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    cache, at, measured = model.new_cache(1), [], []
    stops = [round(tokens * i / 8) for i in range(1, 9)]
    with torch.no_grad():
        for start, stop in zip([0, *stops], stops, strict=False):
            model(ids[:, start:stop], cache=cache)
            at.append(stop)
            measured.append(cache.nbytes)
    form = [cache_bytes(config, t, dtype=torch.float32) for t in at]
    return MeasuredCurve(kind, KINDS[kind], tuple(at), tuple(measured), tuple(f.total for f in form), form[-1].per_token, form[-1].fixed)


# ---- published ----


GROUPS = 8  # of K3's imagined twin with GQA


def _k3_with(mixer: str) -> K3Config:
    return K3Config.k3().replace(linear_mixer=mixer, full_mixer=mixer, num_key_value_groups=GROUPS)


MODELS: dict[str, tuple[str, str, str, Callable[[], K3Config]]] = {  # name: label, mixer, source of the sizes, config
    "kimi_linear": ("Kimi Linear 48B", "kda", "released config.json", K3Config.kimi_linear_48b),
    "kimi_linear_mla": ("Kimi Linear if all MLA", "mla", "Kimi Linear's sizes, another attention",
                        lambda: with_mixer(K3Config.kimi_linear_48b(), "mla")),
    "k3": ("Kimi K3", "kda", "released config.json", K3Config.k3),
    "kimi_k2": ("Kimi K2", "mla", KIMI_K2_CONFIG, kimi_k2_dimensions),
    "deepseek_v3": ("DeepSeek-V3", "mla", DEEPSEEK_V3_PAPER, deepseek_v3_dimensions),
    "k3_all_mla": ("K3 if all MLA", "mla", "K3's sizes, another attention", lambda: _k3_with("mla")),
    "k3_gqa": (f"K3 if GQA ({GROUPS} groups)", "gqa", "K3's sizes, another attention", lambda: _k3_with("gqa")),
    "k3_mha": ("K3 if MHA", "mha", "K3's sizes, another attention", lambda: _k3_with("mha")),
}


@lru_cache(maxsize=256)  # the released configs have 93 layers to walk through: once is enough
def _count(name: str, config: K3Config, *, context: int, dtype: str, batch: int, memory: float, weights: str) -> PublishedCurve:
    label, mixer, source = MODELS[name][:3] if name in MODELS else _own_label(config)
    at = _grid(context, config.sliding_window if "sliding_window" in (config.linear_mixer, config.full_mixer) else None)
    end = cache_bytes(config, context, dtype=DTYPES[dtype])
    row = cache_bytes(config, 1, dtype=DTYPES[dtype]).windowed  # one token in all window layers
    full = end.windowed // row if row else 0
    line = tuple(batch * (end.fixed + row * min(t, full) + end.per_token * t) for t in at)
    paid = bill(config, context=context, dtype=dtype, batch=batch, memory=memory, weights=weights)
    kinds = [config.mixer(i) for i in range(config.num_hidden_layers)]
    growing = [kind for kind in kinds if row_numbers(config, kind) and kind != "sliding_window"]
    copies = {"mha": config.num_attention_heads, "gqa": config.num_key_value_groups}.get(growing[0], 1) if growing else 0
    return PublishedCurve(name, label, mixer, at, line, end.per_token, end.fixed, source, paid, len(growing), copies, end.windowed)


def _own_label(config: K3Config) -> tuple[str, str, str]:
    pattern = pattern_of(config)
    kind = PATTERNS[pattern][0] if pattern else f"{config.linear_mixer} and {config.full_mixer}"
    return "Yours", config.linear_mixer, f"your own sizes, {kind}"


def _grid(context: int, window: int | None) -> tuple[int, ...]:
    """Token counts for a curve that looks smooth on a linear and on a logarithmic axis, ending at ``context``, with the window's knee."""
    powers = {1 << p for p in range(context.bit_length()) if 1 << p <= context}
    knee = {window} if window is not None and window < context else set()
    return tuple(sorted(powers | knee | {max(1, context * i // 32) for i in range(1, 33)}))


def curve_text(curve: PublishedCurve) -> str:
    """What a curve is made of, for hover texts and tables."""
    fixed = f"{format_bytes(curve.fixed)} fixed and " if curve.fixed else ""
    return f"{curve.label}: {fixed}{format_number(curve.per_token / 1000)} kB a token ({curve.source})"
