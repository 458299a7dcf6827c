"""The memory curve under the learner's hand: which models, a model of one's own, how many tokens and sessions, how much GPU memory."""

from __future__ import annotations

from functools import cache
from typing import Any

from k3viz.memory.bill import DTYPES, PATTERNS, WEIGHTS, own_config, pattern_of
from k3viz.memory.figure import SCALES, memory_picture
from k3viz.memory.story import KINDS, LONGEST, MODELS, MOST, OWN, memory_story
from k3viz.panel import Checks, Choice, Drawing, Panel, Slider
from k3viz.theme import Theme, format_count
from minimodel import K3Config

GPUS = {24: "24 GB", 80: "80 GB", 640: "8 × 80 GB", 1128: "8 × 141 GB", 2256: "16 × 141 GB", 9024: "64 × 141 GB"}
SIZES = {  # what can be chosen for a model of one's own; heads can be divided into all of the groups
    "heads": (8, 16, 32, 64, 96, 128),
    "groups": (1, 2, 4, 8),
    "latent": (64, 128, 256, 512, 1024),
    "window": (128, 512, 1024, 4096, 32768),
}
LABELS = {"heads": "heads", "groups": "GQA groups", "latent": "MLA latent", "window": "window"}


def memory_panel(
    *,
    kinds: tuple[str, ...] = tuple(KINDS),
    models: tuple[str, ...] = ("k3", "kimi_linear", "kimi_k2", "k3_all_mla"),
    tokens: int = 1024,
    context: int = 1_048_576,
    dtype: str = "bfloat16",
    scale: str = "linear",
    config: K3Config | None = None,
    batch: int = 1,
    memory: int = 2256,
    weights: str = "4-bit experts",
) -> Panel:
    """A live memory curve. kinds, models, tokens, context, dtype, batch, weights: as in ``memory_story``; scale: "linear" or "log".

    config: where your own model starts; its attention can then be changed, its width and experts stay (default: K3's sizes with GQA in
    every layer). context, batch: the sliders stop at powers of two; any other number starts at the one nearest to it. memory: GB of all
    GPUs together. Returns a ``Panel``. Raises ValueError naming the argument.
    """
    memory_story(kinds=kinds, models=models, tokens=tokens, context=context, dtype=dtype, batch=batch, memory=_gigabytes(memory),
                 weights=weights, config=config)  # wrong arguments are named here  # fmt: skip
    base = K3Config.k3().replace(num_key_value_groups=8, sliding_window=4096) if config is None else config
    start = "gqa" if config is None else pattern_of(config)
    if start is None:
        raise ValueError(f"config: this panel can change {', '.join(PATTERNS)}, and its pattern is another; give it to memory_story")

    @cache
    def own(pattern: str, layers: int, heads: int, groups: int, latent: int, window: int) -> K3Config:
        return own_config(base=base, pattern=pattern, layers=layers, heads=heads, groups=groups, latent=latent, window=window)

    def draw(values: dict[str, Any], theme: Theme) -> Drawing:
        chosen, pattern = values["models"], values["pattern"]
        yours = own(pattern, int(values["layers"]), *(int(values[name]) for name in SIZES)) if OWN in chosen else None
        story = memory_story(
            kinds=values["kinds"], models=[m for m in chosen if m != OWN], tokens=tokens, context=1 << int(values["context"]), config=yours,
            dtype=values["dtype"], batch=1 << int(values["batch"]), memory=_gigabytes(int(values["memory"])), weights=values["weights"],
        )  # fmt: skip
        sentence = " ".join(filter(None, (story.sentence, story.bill_sentence, story.measured_sentence)))
        return Drawing(story, memory_picture(story, values["scale"], theme, title=False), sentence, hidden=_idle(pattern, yours))

    powers, batches = range(6, LONGEST.bit_length()), range(MOST.bit_length())  # 64 tokens is the least that ``memory_story`` takes
    now = {"heads": base.num_attention_heads, "groups": base.num_key_value_groups}
    now |= {"latent": base.kv_lora_rank, "window": base.sliding_window}
    gpus = sorted({memory: f"{memory} GB", **GPUS}.items())
    shown = {OWN: "your own", **{name: label for name, (label, *_) in MODELS.items()}}
    controls = [
        Slider("context", "Tokens read", round_log2(context), powers[0], powers[-1], 1,
               labels=tuple(format_count(1 << p) for p in powers)),
        Slider("batch", "Sessions in a batch", round_log2(batch), 0, batches[-1], 1, labels=tuple(format_count(1 << p) for p in batches)),
        Choice("dtype", "Cache stored as", dtype, tuple((d, d) for d in DTYPES)),
        Choice("weights", "Weights stored as", weights, tuple((w, w) for w in WEIGHTS)),
        Choice("memory", "GPU memory", str(memory), tuple((str(gb), label) for gb, label in gpus)),
        Choice("scale", "Axes", scale, tuple((s, s) for s in SCALES)),
        Checks("models", "Published", (OWN, *models), tuple(shown.items())),
        Checks("kinds", "Measured", tuple(kinds), tuple(KINDS.items())),
        Choice("pattern", "Your own model:", start, tuple((name, label) for name, (label, *_) in PATTERNS.items())),
        Slider("layers", "layers", base.num_hidden_layers, 1, max(128, base.num_hidden_layers), 1),
        *(Choice(name, LABELS[name], str(now[name]), tuple((str(n), format_count(n)) for n in sorted({now[name], *sizes})))
          for name, sizes in SIZES.items()),
    ]  # fmt: skip
    return Panel(name="Memory: what a conversation keeps", controls=controls, draw=draw)


def _idle(pattern: str, yours: K3Config | None) -> tuple[str, ...]:
    """Controls of one's own model that change nothing with this pattern, or all of them while it isn't shown."""
    if yours is None:
        return ("pattern", "layers", *SIZES)
    mixers = PATTERNS[pattern][1:3]
    needed = {"groups": "gqa", "latent": "mla", "window": "sliding_window"}
    return tuple(name for name, mixer in needed.items() if mixer not in mixers)


def _gigabytes(n: int) -> float:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"memory must be a whole number of GB from 1, got {n!r}")
    return 1e9 * n


def round_log2(n: int) -> int:
    """The exponent of the power of two nearest to n."""
    low = n.bit_length() - 1
    return low + (n - (1 << low) > (1 << (low + 1)) - n)
