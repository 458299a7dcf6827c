"""The decay story: 128 dials, one a key channel, set how fast each part of the memory fades; beside them one dial for all.

A note is read word by word. *By hand* the dials stand as K3 starts them (A_log = 0, Mamba-style bias), the words that state a fact
write with keys in the slower half of the channels, all other words in the faster half. *Learned* (``k3viz.decay.learned``): keys,
write strengths and dials are those of one head of a trained model. Both run through ``kda_recurrent`` with a value of its own for
every word, so that ``ink[t, c, s]`` is exactly how much of word s stands in channel c after word t: faded, and erased where a
later key overlapped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minimodel import K3ForCausalLM
from minimodel.config import LinearAttnConfig
from minimodel.delta_rule import bounded_log_decay, kda_recurrent, softplus_log_decay
from minimodel.formats import format_count, format_digits, format_probability, plural
from minimodel.tasks import meeting
from minimodel.trace import frozen

CHANNELS = LinearAttnConfig().head_dim  # 128, as in K3
BOUND = LinearAttnConfig().gate_lower_bound  # -5, as in K3
TEXT = meeting.ARTICLE[0] + " Lunch is at noon. Please bring the slides. The coffee machine is broken."
LONGEST = 60  # words: as many as the picture can name
GATES = {"bounded": "bounded sigmoid (K3)", "softplus": "softplus (Kimi Linear)"}
VALUES = {word for words in meeting.SLOTS.values() for word in words}  # the words that state a fact
STEPS = (1e-3, 1e-1)  # Mamba-2's range of initial step sizes: see ``mamba_dt_bias``
READING = 0.01  # chosen: two fades that differ by less than 1 % of the fresh ink look the same
ONE_DIAL = 8.0  # chosen: tokens
AGE = 100  # chosen: tokens
SHIFT = 8.0  # dials can be moved this far


@dataclass(frozen=True, eq=False)
class Head:
    """What one head does while it reads T words: z [T, K] before the gate (bias included), keys k [T, K], write strengths beta [T].

    place: (layer, head) of a model, 0-based; None by hand. A_log: log of the gate's slope. bound: the lower bound of its gate's g,
    None if its gate is the softplus.
    """

    place: tuple[int, int] | None
    z: Tensor
    A_log: float
    bound: float | None
    k: Tensor
    beta: Tensor


@dataclass(frozen=True, eq=False)
class DecayStory:
    """Trace of 128 dials over T words. Channels are sorted: row 0 fades slowest over the text.

    tokens [T], facts [T]: the words, and whether each states a fact. place: (layer, head), 0-based, None by hand. gate: of GATES; bound: of
    the bounded one; shift: added to every z. channels [K]: the channel's number in the head. z, g [T, K]: dials and log-decays.
    k [T, K], beta [T]. one_half_life: the single dial's, in tokens. ink, one_ink [T, K, T]: with 128 dials and with one; see the
    module's docstring.
    """

    text: str
    tokens: tuple[str, ...]
    facts: tuple[bool, ...]
    place: tuple[int, int] | None
    gate: str
    bound: float
    shift: float
    A_log: float
    channels: np.ndarray
    z: np.ndarray
    g: np.ndarray
    k: np.ndarray
    beta: np.ndarray
    one_half_life: float
    ink: np.ndarray
    one_ink: np.ndarray

    @property
    def alpha(self) -> np.ndarray:
        """[T, K] what each channel keeps at each word."""
        return np.exp(self.g)

    @property
    def mean_g(self) -> np.ndarray:
        """[K] mean log-decay over the text: a channel's clock speed."""
        return self.g.mean(0)

    def half_lives(self, now: int) -> np.ndarray:
        """[K] tokens until half is gone, if every word faded as word ``now`` does."""
        return half_life(self.g[now])

    def kept(self, now: int, *, one: bool = False) -> np.ndarray:
        """[T] how much of its own value each word's key reads after word ``now``, of 1; 0 for words to come."""
        ink = self.one_ink if one else self.ink
        return np.einsum("sc,cs->s", self.k, ink[now])

    def kept_by_kind(self, now: int, *, one: bool = False) -> tuple[float | None, float | None]:
        """Mean of ``kept`` over the facts, and over the other words, read so far; None where there are none."""
        read = range(len(self.tokens))[now] + 1
        kept, fact = self.kept(now, one=one)[:read], np.array(self.facts[:read])
        return tuple(float(kept[kind].mean()) if kind.any() else None for kind in (fact, ~fact))

    def clock(self, ages: np.ndarray, *, one: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """(youngest, oldest) age [N] in tokens that can't be told from each of ``ages`` by how far the channels have faded."""
        return look_alike(np.array([-math.log(2) / self.one_half_life]) if one else self.mean_g, ages)

    def sentence(self, now: int = -1, age: int = AGE) -> str:
        """The picture after word ``now``, and what the clock says of a note ``age`` tokens old, in two sentences with their numbers."""
        now, lives = range(len(self.tokens))[now], self.half_lives(now)
        many, one = (self._kept_text(now, one=x) for x in (False, True))
        tell, tell_one = (_range_text(*(float(end[0]) for end in self.clock(np.array([age]), one=x))) for x in (False, True))
        return (
            f"After {now + 1} {plural('word', now + 1)}, {len(lives)} dials with half-lives from {tokens_text(lives.min())} to "
            f"{tokens_text(lives.max())} tokens keep {many}; one dial of {tokens_text(self.one_half_life)} tokens keeps {one}. "
            f"A note {age:,} {plural('token', age)} old reads as {tell} by the {len(lives)} dials, as {tell_one} by the one dial."
        )

    def _kept_text(self, now: int, *, one: bool) -> str:
        facts, others = self.kept_by_kind(now, one=one)
        parts = [f"{format_probability(x)} of {name}" for x, name in ((facts, "the facts"), (others, "the other words")) if x is not None]
        return " and ".join(parts)


def decay_story(
    *,
    model: K3ForCausalLM | None = None,
    text: str = TEXT,
    head: tuple[int, int] | None = None,
    gate: str | None = None,
    shift: float = 0.0,
    one_half_life: float = ONE_DIAL,
) -> DecayStory:
    """Read a note with 128 decays and with one.

    model: a trained ``K3ForCausalLM`` whose own dials, keys and write strengths are used; without it they are chosen by hand.
    text: up to 60 words of the meeting vocabulary. head: (layer, head), 0-based, with a model (default: the one that keeps facts
    best apart from other words). gate: "bounded" or "softplus" (default: the model's own, bounded by hand). shift: added to every z,
    from -8 to 8; higher fades faster. one_half_life: of the single dial, in tokens, at least 0.01.
    Raises ValueError that names the argument.
    """
    if model is not None:
        from k3viz.decay.learned import read_heads

        heads = read_heads(model, text)
        return tell(text, choose(heads, text, head), gate, shift, one_half_life)
    if head is not None:
        raise ValueError(f"head needs a model: give model=... to look into head {head!r}")
    return tell(text, by_hand(text), gate, shift, one_half_life)


def tell(text: str, head: Head, gate: str | None, shift: float, one_half_life: float) -> DecayStory:
    """The story of one head that has been read before: what a slider changes costs no run of the model."""
    gate = ("softplus" if head.bound is None else "bounded") if gate is None else gate
    if gate not in tuple(GATES):
        raise ValueError(f"gate must be one of {', '.join(GATES)}, got {gate!r}")
    for name, value, low, high in (("shift", shift, -SHIFT, SHIFT), ("one_half_life", one_half_life, 0.01, 1e9)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:  # NaN fails every comparison
            raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")
    words = split(text)
    bound = BOUND if head.bound is None else head.bound
    g = log_decay(head.z + shift, head.A_log, gate, bound)
    order = g.mean(0).argsort(descending=True, stable=True)  # slowest first
    z, g, k = (head.z + shift)[:, order], g[:, order], head.k[:, order]
    one = torch.full_like(g, -math.log(2) / one_half_life)
    ink, one_ink = word_ink(k, g, head.beta), word_ink(k, one, head.beta)
    arrays = {"channels": order, "z": z, "g": g, "k": k, "beta": head.beta, "ink": ink, "one_ink": one_ink}
    return DecayStory(
        text=text, tokens=words, facts=tuple(w in VALUES for w in words), place=head.place, gate=gate, bound=bound,
        shift=float(shift), A_log=head.A_log, one_half_life=float(one_half_life), **{name: frozen(x) for name, x in arrays.items()},
    )  # fmt: skip


# ---- the mechanism ----


def log_decay(z: Tensor, A_log: float, gate: str, bound: float) -> Tensor:
    """g [T, K] of dials z [T, K], by the model's own gates (K3 report Eq. 5; Kimi Linear's softplus)."""
    raw = z[None, :, None], torch.tensor([A_log], dtype=z.dtype), torch.zeros(1, z.shape[-1], dtype=z.dtype)
    return (bounded_log_decay(*raw, bound) if gate == "bounded" else softplus_log_decay(*raw))[0, :, 0]


def word_ink(k: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """[T, K, T]: after word t, how much of word s stands in channel c. The states of the operator when word s has value e_s."""
    T = len(k)
    values, keys, decay = torch.eye(T, dtype=k.dtype), k[None, :, None], g[None, :, None]
    empty = k.new_zeros(1, 1, k.shape[1], T)
    _, _, states = kda_recurrent(keys, keys, values[None, :, None], decay, beta[None, :, None], empty, keep_states=True)
    return states[0, :, 0]


def half_life(g: np.ndarray | float) -> np.ndarray:
    """Tokens until exp(g n) = 1/2; infinite for a channel that does not fade."""
    with np.errstate(divide="ignore"):
        return math.log(2) / np.maximum(-np.asarray(g), 0.0)


def look_alike(g: np.ndarray, ages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(youngest, oldest) whole ages [N] whose fades exp(g n) differ from those at ``ages`` by at most READING in every channel.

    g [K] log-decay a token. A channel tells the time while it is fading: one that has not begun, or has ended, says little.
    """
    g = g[g < 0]
    if not len(g):
        return np.ones(len(ages)), np.full(len(ages), np.inf)
    faded = np.exp(np.outer(ages, g))
    with np.errstate(divide="ignore", invalid="ignore"):
        youngest = (np.log(np.minimum(faded + READING, 1.0)) / g).max(1)
        oldest = np.where(faded > READING, np.log(np.maximum(faded - READING, 0.0)) / g, np.inf).min(1)
    return np.maximum(np.ceil(youngest - 1e-9), 1.0), np.floor(oldest + 1e-9)


def equal_dial(story: DecayStory) -> float:
    """Half-life, in tokens, of the single dial that after the last word keeps as much of the facts as all the story's dials do.

    Raises ValueError where the text has no facts, or where no single dial keeps as much.
    """
    wanted, _ = story.kept_by_kind(-1)
    if wanted is None:
        raise ValueError(f"text: it states no fact, and so no dial can keep one: {story.text!r}")
    k, beta, fact = torch.tensor(story.k), torch.tensor(story.beta), torch.tensor(story.facts)

    def kept(half_life: float) -> float:
        ink = word_ink(k, torch.full_like(k, -math.log(2) / half_life), beta)[-1]
        return float(torch.einsum("sc,cs->s", k, ink)[fact].mean())

    low, high = 0.1, 1e9
    if not kept(low) <= wanted <= kept(high):
        raise ValueError(f"text: no single dial keeps {format_probability(wanted)} of the facts, as the {k.shape[1]} dials do")
    for _ in range(40):  # halves the interval's logarithm: the last step is far below a digit that is shown
        middle = math.sqrt(low * high)
        low, high = (middle, high) if kept(middle) < wanted else (low, middle)
    return high


# ---- chosen by hand, and choosing ----


def by_hand(text: str) -> Head:
    """K3's initial dials, spread evenly in the logarithm of the step size; keys of facts in the slower half of the channels."""
    words = split(text)
    dt = torch.logspace(*map(math.log10, STEPS), CHANNELS, dtype=torch.float64)
    z = (dt + torch.log(-torch.expm1(-dt))).repeat(len(words), 1)
    half = CHANNELS // 2
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(half)] for i in range(half)]  # a Hadamard matrix: rows at right angles
    patterns = torch.tensor(signs, dtype=torch.float64) / math.sqrt(half)
    k = torch.zeros(len(words), CHANNELS, dtype=torch.float64)
    for s, word in enumerate(words):  # every word has a key of its own, at a right angle to all others
        k[s, slice(half) if word in VALUES else slice(half, None)] = patterns[s]
    return Head(None, z, 0.0, BOUND, k, torch.ones(len(words), dtype=torch.float64))


def choose(heads: dict[tuple[int, int], Head], text: str, place: tuple[int, int] | None) -> Head:
    """The head asked for, or the one that at the end keeps most more of the facts than of the other words."""
    if place is not None:
        if tuple(place) not in heads:
            raise ValueError(f"head must be a (layer, head) pair of a KDA layer, one of {', '.join(map(str, heads))}, got {place!r}")
        return heads[tuple(place)]

    def apart(head: Head) -> float:
        facts, others = tell(text, head, None, 0.0, ONE_DIAL).kept_by_kind(-1)
        return (facts or 0.0) - (others or 0.0)

    return max(heads.values(), key=apart)


def split(text: str) -> tuple[str, ...]:
    """The words of a text; ValueError in one sentence for an empty, long or unknown one."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"text must hold at least one word, got {text!r}")
    ids = meeting.encode(text)
    if not 1 <= len(ids) <= LONGEST:
        raise ValueError(f"text: this story is for 1 to {LONGEST} words, got {len(ids)}")
    return tuple(meeting.VOCABULARY[i] for i in ids)


def tokens_text(n: float) -> str:
    """A number of tokens for people: whole numbers below a million as they are."""
    return format_count(float(n)) if float(n).is_integer() and n < 1e6 else format_digits(float(n))


def _range_text(youngest: float, oldest: float) -> str:
    if not np.isfinite(oldest):
        return f"{int(youngest):,} or more"
    return f"{int(youngest):,}" if youngest == oldest else f"{int(youngest):,} to {int(oldest):,}"
