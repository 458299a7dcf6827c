"""The hybrid story: one token's way through K3, step by step, and what every part on it costs.

Costs are counted from the tensors of the model and the closed forms of ``minimodel.accounting``, at three sizes. At the smallest size a
trained model really reads a sentence, and the story tells what its parts did with the last word. The pattern of KDA and MLA layers can be
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from k3viz.hybrid import recorded
from k3viz.hybrid.parts import EXPERTS, Layer, layers_of
from minimodel import K3Config, K3ForCausalLM, cache_bytes, load_pretrained
from minimodel.formats import format_bytes, format_count, format_probability
from minimodel.tasks import meeting
from minimodel.trace import private_copy

SCALES: dict[str, tuple[str, Callable[[], K3Config]]] = {
    "tiny": ("Trained meeting model", lambda: load_pretrained().config),
    "48B": ("Kimi Linear 48B", K3Config.kimi_linear_48b),
    "2.8T": ("Kimi K3, 2.8T", K3Config.k3),
}
LENSES = {  # cost lens: the number of a part that it adds up, and what that counts
    "parameters": ("parameters", "parameters"),
    "compute": ("flops", "FLOPs a token, on average"),
    "memory": ("memory", "memory of a session"),
}
LONGEST = 1 << 24  # tokens
MOST_LAYERS = 128
UNTRAINED = "not trained"


@dataclass(frozen=True, eq=False)
class HybridStory:
    """steps: embedding, layers, output. at: the step looked into, 0-based. part: the part of it, by name. lens: of LENSES.

    tokens: that the session has read. seen: part -> what it did in a recorded run, in words, for the step looked into; ran: the
    model of that run (empty: none, at sizes that don't run here). per_token: bytes that every further token adds.
    """

    label: str
    config: K3Config
    pattern: str
    steps: tuple[Layer, ...]
    at: int
    part: str
    lens: str
    tokens: int
    per_token: int
    seen: dict[str, str]
    ran: str

    @property
    def step(self) -> Layer:
        return self.steps[self.at]

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(s.label for s in self.steps)

    def cost(self, step: Layer) -> float:
        """A step's cost under the lens."""
        return step.total(LENSES[self.lens][0])

    def shares(self) -> dict[str, float]:
        """Every part's share of all steps' cost under the lens, the parts of one name in all layers together."""
        of, total = LENSES[self.lens][0], max(1, sum(self.cost(s) for s in self.steps))
        sums: dict[str, float] = {}
        for part in (p for s in self.steps for p in s.parts):
            sums[part.name] = sums.get(part.name, 0) + getattr(part, of)
        return {name: cost / total for name, cost in sums.items()}

    @property
    def sentence(self) -> str:
        """Where the token is, what this part costs, and what the pattern costs, with numbers."""
        p, step = self.step.part(self.part), self.step
        name = step.label[0].upper() + step.label[1:]
        said = f"{name}, {p.label}: {format_count(p.parameters)} parameters, {operations(p.flops)} a token, "
        said += f"{format_bytes(p.memory)} kept at {format_count(self.tokens)} tokens."
        if self.part in self.seen:
            said += f" {self.seen[self.part]}"
            said += " (The trained model has another pattern; this one is not trained.)" if self.ran == UNTRAINED else ""
        growing = sum(s.mixer == "mla" for s in self.steps)
        layers = self.config.num_hidden_layers
        said += f" Pattern {self.pattern}: {growing} of {layers} layers grow, {format_bytes(self.per_token)} a token in all."
        experts = [x for s in self.steps for x in s.parts if x.name == EXPERTS]
        if experts:
            total, flops = (sum(s.total(cost) for s in self.steps) for cost in ("parameters", "flops"))
            held, used = sum(x.parameters for x in experts) / total, sum(x.flops for x in experts) / flops
            held, used = format_probability(held), format_probability(used)
            said += f" Routed experts hold {held} of the parameters and do {used} of the arithmetic."
        return said


def hybrid_story(
    *,
    scale: str = "2.8T",
    pattern: str | None = None,
    at: int | None = None,
    part: str | None = None,
    lens: str = "compute",
    tokens: int = 131_072,
    config: K3Config | None = None,
    model: K3ForCausalLM | None = None,
) -> HybridStory:
    """Follow one token through a hybrid and count what its parts cost.

    scale: "tiny", "48B" or "2.8T"; config, model: another one instead. pattern: K (KDA) and M (MLA), repeated over the depth; the last
    layer is MLA wherever M occurs, as in K3 (default: the model's own). at: 0 is the embedding, then the layers from 1, then the output
    (default: layer 4, or the last one). part: of that step (default: its largest under the lens). lens: "parameters", "compute" or
    "memory". tokens: read so far. Raises ValueError that names the argument.
    """
    if model is not None and not isinstance(model, K3ForCausalLM):
        raise ValueError(f"model must be a K3ForCausalLM, got {type(model).__name__}")
    config = config if model is None else model.config
    if config is not None and not isinstance(config, K3Config):
        raise ValueError(f"config must be a K3Config, got {type(config).__name__}")
    if config is None and scale not in tuple(SCALES):
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    if lens not in tuple(LENSES):
        raise ValueError(f"lens must be one of {', '.join(LENSES)}, got {lens!r}")
    _whole("tokens", tokens, 1, LONGEST)
    label, native = SCALES[scale] if config is None else ("this model", lambda: config)
    native = native()
    if {native.linear_mixer, native.full_mixer} != {"kda", "mla"} or native.linear_mixer != "kda":
        raise ValueError(f"config must have KDA and MLA layers, got {native.linear_mixer!r} and {native.full_mixer!r}")
    pattern = own_pattern(native) if pattern is None else pattern
    shown = with_pattern(native, pattern)
    at = min(4, shown.num_hidden_layers) if at is None else at
    _whole("at", at, 0, shown.num_hidden_layers + 1)
    steps, cost = layers_of(shown, tokens), LENSES[lens][0]
    step = steps[at]
    chosen = step.part(part) if part is not None else max(step.parts, key=lambda p: (getattr(p, cost), p.parameters))
    reader, ran = _reader(shown, scale if config is None else "", model)
    return HybridStory(
        label=label, config=shown, pattern=pattern.upper(), steps=steps, at=at, part=chosen.name, lens=lens, tokens=tokens,
        per_token=cache_bytes(shown, 1).per_token, seen=recorded.seen(reader, at) if reader else {}, ran=ran,
    )  # fmt: skip


def with_pattern(config: K3Config, pattern: str) -> K3Config:
    """The config with its KDA and MLA layers in another order: ``pattern`` repeated, the last layer MLA wherever M occurs."""
    letters, L = pattern.upper() if isinstance(pattern, str) else "", config.num_hidden_layers
    if not letters or set(letters) - set("KM") or len(letters) > min(L, MOST_LAYERS):
        shown = pattern if isinstance(pattern, str) and len(pattern) <= 20 else f"{str(pattern)[:20]}..."
        raise ValueError(f"pattern must be 1 to {min(L, MOST_LAYERS)} letters K (KDA) and M (MLA), such as KKKM, got {shown!r}")
    layers = [letters[i % len(letters)] for i in range(L)]
    layers[-1] = "M" if "M" in letters else "K"
    slots = {x: tuple(i + 1 for i, letter in enumerate(layers) if letter == x) for x in "KM"}
    return config.replace(linear_attn_config=replace(config.linear_attn_config, kda_layers=slots["K"], full_attn_layers=slots["M"]))


def own_pattern(config: K3Config) -> str:
    """The shortest pattern that gives the config's own layers. ValueError if none does: the last layer is KDA, but not all others."""
    letters = "".join("K" if config.mixer(i) == "kda" else "M" for i in range(config.num_hidden_layers))
    slots = config.linear_attn_config
    for n in range(1, len(letters) + 1):
        if with_pattern(config, letters[:n]).linear_attn_config == slots:
            return letters[:n]
    raise ValueError(f"config: where there are MLA layers the last layer must be one, as in K3, got the layers {letters}")


def operations(n: float) -> str:
    """Floating-point operations for people: "4.03B FLOPs"."""
    return f"{format_count(n)} FLOPs"


def _whole(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high}, got {value!r}")


# ---- the recorded run ----


def _reader(config: K3Config, scale: str, model: K3ForCausalLM | None) -> tuple[K3ForCausalLM | None, str]:
    """Which model reads the sentence, and what it is; none if the size is not one that runs here, or the words are not its own."""
    if model is not None and model.config == config:
        readable = config.vocab_size == len(meeting.VOCABULARY)
        return (private_copy(model), "this model") if readable else (None, "")
    if scale != "tiny":
        return None, ""
    trained = recorded.trained()
    return (trained, "trained") if config == trained.config else (_untrained(config), UNTRAINED)


@lru_cache(maxsize=4)
def _untrained(config: K3Config) -> K3ForCausalLM:
    return K3ForCausalLM(config, seed=0).double().eval()
