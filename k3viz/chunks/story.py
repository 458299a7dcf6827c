"""The chunk story: the same outputs token by token, and chunk by chunk as matrix products; and what 1/Gamma does to the second.

A trained model reads a note; queries, keys, values, write strengths and dials of one head are the tile. Per chunk of C tokens, with
G = cumsum(g) inside the chunk and Gamma = exp(G) (Kimi Linear report Eq. 6-9, K3 report Eq. 3-4; q comes scaled)::

    L = StrictTril(diag(beta) (Gamma K)(K / Gamma)^T)      P = Tril((Gamma Q)(K / Gamma)^T)
    X = (I + L)^-1 diag(beta) (V - (Gamma K) S)            O = (Gamma Q) S + P X           S <- Diag(Gamma_C) S + ((Gamma_C / Gamma) K)^T X

The letters are those of ``minimodel/delta_rule/chunkwise.py``; X is the reports' V with a tilde.
Everything is float64 but for one thing: Gamma, 1/Gamma and their products with Q and K are stored in a number format to choose.
Beside it the same with exp(G_i - G_j), pair by pair, which never passes 1.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minimodel import K3ForCausalLM, kda, record
from minimodel.config import LinearAttnConfig
from minimodel.delta_rule import bounded_log_decay, softplus_log_decay
from minimodel.delta_rule.chunkwise import decay_between, overlaps
from minimodel.formats import format_digits, plural
from minimodel.pretrained import load_pretrained
from minimodel.tasks import meeting

TEXT = (
    f"{meeting.ARTICLE[0]} Lunch is at noon. Please bring the slides. The budget is $80k. The coffee machine is broken. "
    f"Thanks for the notes. {meeting.ARTICLE[1]} Nothing else changed. The printer is out of paper. See you there."
)
LONGEST = 128  # tokens
GATES = {"bounded": "bounded sigmoid (K3)", "softplus": "softplus (Kimi Linear)"}
NUMBERS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
BOUND = LinearAttnConfig().gate_lower_bound
TILE = 16  # K3's: 16 steps of at least -5 stay within float32
SHIFT = 16.0  # dials can be moved this far


@dataclass(frozen=True, eq=False)
class Tile:
    """One head's inputs for T tokens: q (scaled), k, z [T, K], v [T, V], beta [T], the gate's A_log and bound (None: softplus)."""

    place: tuple[int, int]
    tokens: tuple[str, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    beta: Tensor
    A_log: float
    bound: float | None


@dataclass(frozen=True, eq=False)
class ChunksStory:
    """Trace of T tokens cut into chunks of at most ``chunk`` tokens.

    tokens [T]; place: (layer, head), 0-based; gate, bound, shift (added to z), numbers: what was chosen. g [T, K]. bounds: (start,
    stop) of every chunk. L, inverse, P: one [C, C] matrix a chunk, ``inverse`` of I + L; they may hold infinities and NaN. outputs,
    pairwise, reference [T, V]: by matrix products, with the decay pair by pair, and by the token loop. reach [T]: largest G_i's size,
    so that 1/Gamma reaches e^reach. work, loop_work: multiply-adds and such of the whole head, chunked and token by token.
    """

    tokens: tuple[str, ...]
    place: tuple[int, int]
    gate: str
    bound: float
    shift: float
    numbers: str
    chunk: int
    g: np.ndarray
    bounds: tuple[tuple[int, int], ...]
    L: tuple[np.ndarray, ...]
    inverse: tuple[np.ndarray, ...]
    P: tuple[np.ndarray, ...]
    outputs: np.ndarray
    pairwise: np.ndarray
    reference: np.ndarray
    reach: np.ndarray
    work: int
    loop_work: int

    @property
    def limit(self) -> float:
        """Largest e-exponent that the number format holds."""
        return largest_exponent(self.numbers)

    @property
    def errors(self) -> np.ndarray:
        """[T] largest error of an output, as a share of the largest true output; NaN where the result is not a number."""
        return self._error(self.outputs)

    @property
    def pair_errors(self) -> np.ndarray:
        """[T] the same for the decay pair by pair."""
        return self._error(self.pairwise)

    def _error(self, outputs: np.ndarray) -> np.ndarray:
        off = np.abs(outputs - self.reference).max(1) / np.abs(self.reference).max()
        return np.where(np.isfinite(off), off, np.nan)

    @property
    def labels(self) -> tuple[str, ...]:
        """One short label a chunk."""
        return tuple(f"words {start + 1} to {stop}" for start, stop in self.bounds)

    @property
    def sentence(self) -> str:
        """Steps, work, and whether 1/Gamma fits, in two sentences with their numbers."""
        T, n, broken = len(self.tokens), len(self.bounds), int(np.isnan(self.errors).sum())
        said = (
            f"{n} {plural('chunk', n)} of {self.chunk} words: {n} {plural('step', n)} one after another instead of {T}, "
            f"{format_digits(self.work / self.loop_work, digits=3)} times the work of the token loop."
        )
        reach = f"1/Γ reaches e^{power(self.reach.max())}, {self.numbers} holds e^{power(self.limit)}"
        if broken:
            good = f"pair by pair the largest error is {format_digits(np.nanmax(self.pair_errors))}"
            return f"{said} {reach}: {broken} of {T} outputs are not numbers; {good}."
        return f"{said} {reach}: the largest error of an output is {format_digits(self.errors.max())} of the largest output."


def chunks_story(
    *,
    model: K3ForCausalLM | None = None,
    text: str = TEXT,
    head: tuple[int, int] | None = None,
    chunk: int = TILE,
    gate: str | None = None,
    shift: float = 0.0,
    numbers: str = "float32",
) -> ChunksStory:
    """Compute one head's outputs token by token and chunk by chunk.

    model: a trained ``K3ForCausalLM`` (default: the course's meeting model). text: 2 to 128 words of the meeting vocabulary. head:
    (layer, head), 0-based (default: the one that forgets most). chunk: words a chunk, 1 to 128. gate: "bounded" or "softplus"
    (default: the model's own). shift: added to every z before the gate, from -16 to 16; higher fades faster. numbers: what Gamma, 1/Gamma
    and their products are stored as: float16, bfloat16, float32, float64. Raises ValueError that names the argument.
    """
    tiles = read_tiles(load_pretrained() if model is None else model, text)
    return tell(choose(tiles, head), chunk, gate, shift, numbers)


def tell(tile: Tile, chunk: int, gate: str | None, shift: float, numbers: str) -> ChunksStory:
    """The story of one tile that has been read before: what a slider changes costs no run of the model."""
    gate = ("softplus" if tile.bound is None else "bounded") if gate is None else gate
    for name, value, known in (("gate", gate, tuple(GATES)), ("numbers", numbers, tuple(NUMBERS))):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or not 1 <= chunk <= LONGEST:
        raise ValueError(f"chunk must be a whole number of words from 1 to {LONGEST}, got {chunk!r}")
    if isinstance(shift, bool) or not isinstance(shift, (int, float)) or not -SHIFT <= shift <= SHIFT:  # NaN fails every comparison
        raise ValueError(f"shift must be a number from {-SHIFT:g} to {SHIFT:g}, got {shift!r}")
    bound = BOUND if tile.bound is None else tile.bound
    g = log_decay(tile.z + shift, tile.A_log, gate, bound)
    inputs = (tile.q, tile.k, tile.v, g, tile.beta)
    batch = [x[None, :, None] for x in inputs]
    reference, _ = kda(*batch, scale=1.0, backend="recurrent")
    factored = chunkwise(*inputs, chunk, NUMBERS[numbers], pairs=False)
    paired = chunkwise(*inputs, chunk, NUMBERS[numbers], pairs=True)
    (T, K), V, bounds = g.shape, tile.v.shape[1], factored.bounds
    reach = torch.cat([-g[a:b].cumsum(0).min(1).values for a, b in bounds])
    return ChunksStory(
        tokens=tile.tokens, place=tile.place, gate=gate, bound=bound, shift=float(shift), numbers=numbers, chunk=chunk, g=_frozen(g),
        bounds=bounds, L=tuple(map(_frozen, factored.L)), inverse=tuple(map(_frozen, factored.inverse)),
        P=tuple(map(_frozen, factored.P)), outputs=_frozen(factored.outputs), pairwise=_frozen(paired.outputs),
        reference=_frozen(reference[0, :, 0]), reach=_frozen(reach), loop_work=6 * T * K * V,
        work=sum(_work(b - a, K, V) for a, b in bounds),
    )  # fmt: skip


# ---- the mechanism ----


@dataclass(frozen=True, eq=False)
class Chunked:
    """What ``chunkwise`` computed: outputs [T, V], and the matrices of every chunk."""

    outputs: Tensor
    bounds: tuple[tuple[int, int], ...]
    L: list[Tensor]
    inverse: list[Tensor]
    P: list[Tensor]


def chunkwise(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int, numbers: torch.dtype, *, pairs: bool) -> Chunked:
    """The equations of the module's docstring on [T, K], [T, V], [T]. pairs: decays as exp(G_i - G_j) instead of Gamma_i / Gamma_j."""

    def stored(x: Tensor) -> Tensor:
        return x.to(numbers).double()

    S = v.new_zeros(k.shape[1], v.shape[1])
    bounds = tuple((start, min(start + chunk, len(q))) for start in range(0, len(q), chunk))
    outputs, Ls, inverses, Ps = [], [], [], []
    for rows in (slice(*b) for b in bounds):
        Q, K, V, G, b = q[rows], k[rows], v[rows], g[rows].cumsum(0), beta[rows, None]
        fade = stored(G.exp())
        Qd, Kd = stored(fade * Q), stored(fade * K)
        if pairs:
            decay = stored(decay_between(G))
            KK, QK = overlaps(K, K, decay), overlaps(Q, K, decay)
        else:
            Ki = stored(stored((-G).exp()) * K)  # the reciprocal of the fade: this is what overflows
            KK, QK = Kd @ Ki.T, Qd @ Ki.T
        L, P, one = (b * KK).tril(-1), QK.tril(), torch.eye(len(Q), dtype=q.dtype)
        inverse = torch.linalg.solve_triangular(one + L, one, upper=False, unitriangular=True)
        X = inverse @ (b * (V - Kd @ S))
        outputs.append(Qd @ S + P @ X)
        S = G[-1].exp()[:, None] * S + ((G[-1] - G).exp() * K).T @ X
        Ls.append(L), inverses.append(inverse), Ps.append(P)
    return Chunked(torch.cat(outputs), bounds, Ls, inverses, Ps)


def log_decay(z: Tensor, A_log: float, gate: str, bound: float) -> Tensor:
    """g [T, K] of dials z [T, K], by the model's own gates."""
    raw = z[None, :, None], torch.tensor([A_log], dtype=z.dtype), torch.zeros(1, z.shape[-1], dtype=z.dtype)
    return (bounded_log_decay(*raw, bound) if gate == "bounded" else softplus_log_decay(*raw))[0, :, 0]


def power(x: float) -> str:
    """An exponent for people: 88.72 -> "88.7"."""
    return format_digits(float(x), digits=3)


def largest_exponent(numbers: str) -> float:
    """ln of the largest finite number of a format: 88.7 for float32."""
    return float(np.log(torch.finfo(NUMBERS[numbers]).max))


def _work(C: int, K: int, V: int) -> int:
    """Operations of one chunk: 6 C d^2 + 3 C^2 d + C^3 with d = K = V (Kimi Linear report Eq. 13, T = C)."""
    return 6 * C * K * V + 3 * C * C * K + C**3


# ---- the tile ----


def read_tiles(model: K3ForCausalLM, text: str) -> dict[tuple[int, int], Tile]:
    """(layer, head) -> what that KDA head computes while ``model`` reads ``text``, in float64 on a private copy of the model."""
    meeting.check_reader(model)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"text must hold at least two words, got {text!r}")
    config, ids = model.config, meeting.encode(text)
    if not 2 <= len(ids) <= LONGEST:
        raise ValueError(f"text: this story is for 2 to {LONGEST} words, got {len(ids)}")
    layers = [layer for layer in range(config.num_hidden_layers) if config.mixer(layer) == "kda"]
    if not layers:
        raise ValueError("model has no KDA layer, so there is nothing to cut into chunks")
    reader = copy.deepcopy(model).double().eval()  # a private copy: nothing else can be recording it at the same time
    raw: dict[int, Tensor] = {}
    for layer in layers:  # the trace holds alpha, from which a saturated z can't be had back
        reader.model.layers[layer].self_attn.f_b_proj.register_forward_hook(lambda _m, _in, f, layer=layer: raw.update({layer: f}))
    with torch.no_grad(), record(reader) as trace:
        reader(torch.tensor([ids]))
    tokens, tiles = tuple(meeting.VOCABULARY[i] for i in ids), {}
    for layer in layers:
        mixer = reader.model.layers[layer].self_attn
        z = (raw[layer] + mixer.dt_bias).unflatten(-1, (mixer.num_heads, mixer.head_dim))[0].detach()
        for h in range(mixer.num_heads):
            q, k, v, beta = (trace[f"layers.{layer}.kda.{x}"][0, :, h] for x in ("q", "k", "v", "beta"))
            A_log = float(mixer.A_log[h].detach())
            tiles[layer, h] = Tile((layer, h), tokens, q * mixer.head_dim**-0.5, k, v, z[:, h], beta, A_log, mixer.lower_bound)
    return tiles


def choose(tiles: dict[tuple[int, int], Tile], place: tuple[int, int] | None) -> Tile:
    """The head asked for, or the one with the channel that forgets most over the note."""
    if place is None:
        return max(tiles.values(), key=lambda tile: -float(_own_decay(tile).sum(0).min()))
    if not isinstance(place, (tuple, list)) or tuple(place) not in tiles:
        raise ValueError(f"head must be a (layer, head) pair of a KDA layer, one of {', '.join(map(str, tiles))}, got {place!r}")
    return tiles[tuple(place)]


def _own_decay(tile: Tile) -> Tensor:
    return log_decay(tile.z, tile.A_log, "softplus" if tile.bound is None else "bounded", tile.bound or BOUND)


def _frozen(x: Tensor) -> np.ndarray:
    out = x.detach().numpy().copy()
    out.setflags(write=False)
    return out
