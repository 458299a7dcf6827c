"""The whiteboard story: three notes, one correction, told by the real ``kda`` operator, fade by erase by write.

*By hand* the words have chosen vectors. Each row of the board (client, budget, meeting day) owns a band of key channels, so
the 128 x 128 state looks like a board with rows; each word has its own pattern of +1/-1 over the value channels, so what a
row says can be read exactly. Beside it runs the additive update of plain linear attention: the same fade, the same write, no
erase. *Learned*: see ``k3viz.whiteboard.learned``; the same trace type, with states, decays and betas of a trained model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minimodel.config import LinearAttnConfig
from minimodel.delta_rule import kda
from minimodel.formats import format_number as number
from minimodel.formats import plural
from minimodel.tasks import meeting
from minimodel.trace import frozen

if TYPE_CHECKING:
    from k3viz.whiteboard.learned import LearnedWhiteboard
    from minimodel import K3ForCausalLM

CHANNELS = LinearAttnConfig().head_dim  # 128 key channels and 128 value channels, as in K3
FACTS = (("client", meeting.ARTICLE_FACTS["client"]), ("budget", "$80k"), ("meeting day", meeting.ARTICLE_FACTS["day"]))
UPDATE = ("meeting day", meeting.ARTICLE_UPDATE[1])
MAX_ROWS, MAX_NOTES, MAX_LETTERS = 16, 64, 40
AUDIBLE = 0.005  # weaker than this a word would print as 0.00
PHASES = ("fade", "erase", "write")  # in this order within one token; the frame before the first token is called "start"


@dataclass(frozen=True)
class Write:
    """One note put on the board: ``text`` says that ``row`` holds ``word``."""

    row: str
    word: str
    text: str


@dataclass(frozen=True, eq=False)
class Frame:
    """The two boards after one sub-step.

    step: which of the story's writes (0-based), -1 before the first. phase: "start", "fade", "erase" or "write".
    state, additive: [K, V], the delta board and the additive board. board, additive_board: [rows, words], how strongly each
    row says each word (1 = written once in full; the same number in both boards means the same amount of ink).
    sentence: what just happened, with its numbers.
    """

    step: int
    phase: str
    state: np.ndarray
    additive: np.ndarray
    board: np.ndarray
    additive_board: np.ndarray
    sentence: str


@dataclass(frozen=True, eq=False)
class WhiteboardStory:
    """By-hand trace. ``frames[0]`` is the empty board, then three frames (fade, erase, write) for each of ``writes``.

    rows, words: labels. keys [rows, K] of length 1; values [words, V], entries +1/-1, orthogonal. alpha: what one step keeps
    (the same in all channels here); beta: write strength; similarity: cosine between the keys of any two rows.
    """

    rows: tuple[str, ...]
    words: tuple[str, ...]
    writes: tuple[Write, ...]
    keys: np.ndarray
    values: np.ndarray
    alpha: float
    beta: float
    similarity: float
    frames: tuple[Frame, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """One short label a frame: "start", "client: Acme · fade", ..."""
        return step_labels([w.text.rstrip(".") for w in self.writes])

    @property
    def sentence(self) -> str:
        """The end of the story in one sentence."""
        return self.frames[-1].sentence

    def frame(self, position: int) -> Frame:
        """One sub-step, counted from the end if negative."""
        return self.frames[position]

    def current(self, frame: int) -> dict[str, str]:
        """Row -> the word written there last, up to and including ``frame`` (what a perfect board would say)."""
        f = self.frames[frame]
        done = f.step + (f.phase == "write")
        return {w.row: w.word for w in self.writes[:done]}

    def says(self, row: str, frame: int = -1, additive: bool = False) -> list[tuple[str, float]]:
        """(word, strength) pairs that ``row`` says in a frame, strongest first; what would print as 0.00 is left out."""
        f = self.frames[frame]
        strengths = (f.additive_board if additive else f.board)[self.rows.index(row)]
        return self._loudest(strengths)

    def answer(self, row: str, frame: int = -1) -> np.ndarray:
        """[V] what comes out when the row's key is the query: S^T q, at scale 1."""
        return self.frames[frame].state.T @ self.keys[self.rows.index(row)]

    def words_in(self, vector: np.ndarray) -> list[tuple[str, float]]:
        """(word, strength) pairs that a value vector [V] says, strongest first."""
        return self._loudest(vector @ self.values.T / (self.values**2).sum(1))

    def _loudest(self, strengths: np.ndarray) -> list[tuple[str, float]]:
        pairs = [(w, float(s)) for w, s in zip(self.words, strengths, strict=True) if abs(s) >= AUDIBLE]
        return sorted(pairs, key=lambda pair: -pair[1])


def whiteboard_story(
    *,
    facts: Sequence[tuple[str, str]] = FACTS,
    update: tuple[str, str] = UPDATE,
    alpha: float = 0.95,
    beta: float = 0.9,
    similarity: float = 0.0,
    model: K3ForCausalLM | None = None,
    text: str | None = None,
) -> WhiteboardStory | LearnedWhiteboard:
    """Tell the whiteboard story, computed by ``kda`` in float64 (K3 report Eq. 1): by hand, or learned when ``model`` is given.

    facts: (row, word) notes in the order in which they are written. update: (row, word), the correction that comes last; its
    row must be among the facts. alpha: retention of one step, in (0, 1]. beta: write strength, in (0, 1]. similarity: cosine
    between the keys of two rows, in [0, 1]; 0 keeps rows apart, 1 makes all rows the same row.
    model, text: a trained ``K3ForCausalLM`` and the sentences that it reads (default: the meeting notes and the update); the
    by-hand settings are then not used. Returns ``WhiteboardStory``, or ``LearnedWhiteboard`` when a model is given.
    Raises ValueError that names the argument for an unknown row, an empty list, or a number out of range (NaN included).
    """
    if model is not None:
        from k3viz.whiteboard.learned import learned_story

        return learned_story(model=model, text=text)
    if text is not None:
        raise ValueError("text needs a model to read it: give model=..., or use facts=... and update=... for the story by hand")
    writes = _writes(facts, update)
    _in_range("alpha", alpha, low=0.0, low_open=True)
    _in_range("beta", beta, low=0.0, low_open=True)
    _in_range("similarity", similarity, low=0.0, low_open=False)

    rows = tuple(dict.fromkeys(w.row for w in writes))
    words = tuple(dict.fromkeys(w.word for w in writes))
    keys, values = row_keys(len(rows), similarity), word_values(len(words))
    g = torch.full((CHANNELS,), math.log(alpha), dtype=torch.float64)
    b = torch.tensor(float(beta), dtype=torch.float64)

    state = additive = torch.zeros(CHANNELS, CHANNELS, dtype=torch.float64)
    frames = [
        _frame(
            -1, "start", state, additive, keys, values, f"The board is empty: {len(rows)} {plural('row', len(rows))}, nothing written yet."
        )
    ]
    for step, write in enumerate(writes):
        k, v = keys[rows.index(write.row)], values[words.index(write.word)]
        for phase, s, a in zip(PHASES, delta_substeps(state, k, v, g, b), additive_substeps(additive, k, v, g, b), strict=True):
            before = frames[-1]
            frame = _frame(step, phase, s, a, keys, values, "")
            sentence = _sentence(phase, write, rows, words, before, frame, beta)
            frames.append(replace(frame, sentence=sentence))
            state, additive = s, a
    return WhiteboardStory(
        rows=rows, words=words, writes=writes, keys=frozen(keys), values=frozen(values), alpha=float(alpha), beta=float(beta),
        similarity=float(similarity), frames=tuple(frames),
    )  # fmt: skip


# ---- the order of the sub-steps, by hand and learned ----


def position(step: int, phase: str) -> int:
    """Where a story's frames hold a sub-step of a token: 0 is the start, then fade, erase and write of each one."""
    return 1 + len(PHASES) * step + PHASES.index(phase)


def step_labels(tokens: Sequence[str]) -> tuple[str, ...]:
    """A label for every position, without computing what happens there."""
    return ("start", *(f"{token} · {phase}" for token in tokens for phase in PHASES))


# ---- the operator, one sub-step at a time ----


def delta_substeps(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(faded, erased, written) states of one token, each a call of ``kda``; ``written`` is exactly kda's own next state.

    state [K, V], k [K], v [V], g [K] log-decay, beta scalar. Without a key nothing is erased or written: the fade alone is
    left, Diag(alpha) S. With the key but an empty value: fade and erase, (I - beta k k^T) Diag(alpha) S. With both: Eq. 1.
    """
    nothing = torch.zeros_like
    return tuple(_one_token(state, key, value, g, beta) for key, value in ((nothing(k), v), (k, nothing(v)), (k, v)))


def additive_substeps(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same three moments for linear attention with decay, S <- Diag(alpha) S + beta k v^T: it has no erase."""
    faded = g.exp()[:, None] * state
    return faded, faded, faded + beta * torch.outer(k, v)


def _one_token(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    token = [x[None, None, None] for x in (k, k, v, g)]  # [B=1, T=1, H=1, channels]
    with torch.no_grad():
        _, after = kda(*token, beta[None, None, None], initial_state=state[None, None], backend="recurrent")
    return after[0, 0]


# ---- chosen vectors ----


def row_keys(rows: int, similarity: float, channels: int = CHANNELS) -> Tensor:
    """[rows, channels] unit keys, every two of them with cosine ``similarity``.

    At similarity 0 row i owns band i of the channels. Otherwise the keys are the symmetric square root of the wanted table of
    cosines, written over the bands: each row keeps its own band strongest and leans equally into the others.
    """
    width = channels // rows
    bands = torch.zeros(rows, channels, dtype=torch.float64)
    for i in range(rows):
        bands[i, i * width : (i + 1) * width] = width**-0.5
    own = math.sqrt(1 - similarity)  # eigenvalues of the table: 1-c, and once 1+(rows-1)c along the all-ones direction
    shared = (math.sqrt(1 + (rows - 1) * similarity) - own) / rows
    return own * bands + shared * bands.sum(0)


def word_values(words: int, channels: int = CHANNELS) -> Tensor:
    """[words, channels]: orthogonal patterns of +1 and -1 (rows of a Hadamard matrix), one a word, coarse stripes first."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < channels:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    changes = (h[:, 1:] != h[:, :-1]).sum(1)
    return h[changes.argsort()][3 : 3 + words]  # the first three are too plain to tell apart at a glance


# ---- checks, readings, sentences ----


def read_board(state: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[rows, words]: read each row, S^T k, and measure each word in it: (S^T k) . v / |v|^2."""
    return (keys @ state) @ values.T / values.square().sum(1)


def _frame(step: int, phase: str, state: Tensor, additive: Tensor, keys: Tensor, values: Tensor, sentence: str) -> Frame:
    boards = (frozen(read_board(s, keys, values)) for s in (state, additive))
    return Frame(step, phase, frozen(state), frozen(additive), *boards, sentence)


def _sentence(phase: str, write: Write, rows: tuple, words: tuple, before: Frame, after: Frame, beta: float) -> str:
    r, w = rows.index(write.row), words.index(write.word)
    if phase == "fade":
        held, kept = np.linalg.norm(before.state), np.linalg.norm(after.state)
        if not held:
            return "Fade: the board is empty, so there is nothing to fade."
        return f"Fade: everything on the board keeps {number(kept / held)} of its strength."
    if phase == "erase":
        held = int(np.abs(before.board[r]).argmax())
        old, left = before.board[r, held], after.board[r, held]
        if abs(old) < AUDIBLE:
            return f"Erase: the row {write.row} is empty, so there is nothing to remove."
        return f"Erase: {words[held]} in the row {write.row} goes from {number(old)} to {number(left)} (beta {number(beta)})."
    here, left = _loud(after.board[r], words, w)
    there, stale = _loud(after.additive_board[r], words, w)
    rest = f", with {' and '.join(left)} left over" if left else ""
    adding = f"; adding without erasing would leave {' and '.join(stale)} beside {there}" if stale else ""
    return f"Write: the row {write.row} now says {here}{rest}{adding}."


def _loud(strengths: np.ndarray, words: tuple, word: int) -> tuple[str, list[str]]:
    """("Thursday 0.90", ["Tuesday 0.85", ...]): the word asked about, and every other one that the row still says."""
    said = [f"{x} {number(s)}" for x, s in zip(words, strengths, strict=True)]
    return said[word], [text for i, text in enumerate(said) if i != word and abs(strengths[i]) >= AUDIBLE]


def _writes(facts: Sequence[tuple[str, str]], update: tuple[str, str]) -> tuple[Write, ...]:
    pairs = [_pair("facts", f) for f in facts] if isinstance(facts, (list, tuple)) else [_pair("facts", facts)]
    if not pairs:
        raise ValueError("facts must hold at least one (row, word) pair, got none")
    rows = list(dict.fromkeys(row for row, _ in pairs))
    if len(rows) > MAX_ROWS:
        raise ValueError(f"facts: the board has room for {MAX_ROWS} rows, got {len(rows)}")
    if len(pairs) > MAX_NOTES:
        raise ValueError(f"facts: at most {MAX_NOTES} notes, got {len(pairs)}")
    row, word = _pair("update", update)
    if row not in rows:
        raise ValueError(f"update: unknown row {row!r}; the rows are {', '.join(rows)}")
    moved = f"The meeting has moved to {word}." if row == "meeting day" else f"The {row} is now {word}."
    return (*(Write(r, w, f"{r}: {w}") for r, w in pairs), Write(row, word, moved))


def notes_text(pairs: Sequence[tuple[str, str]]) -> str:
    """(row, word) pairs as a person types them: "client: Acme; budget: $80k"."""
    return "; ".join(f"{row}: {word}" for row, word in pairs)


def read_notes(name: str, text: str) -> tuple[tuple[str, str], ...]:
    """The (row, word) pairs of a typed text. name: of the field, for the ValueError in one sentence where it isn't of that form."""
    pairs = []
    for note in filter(str.strip, text.split(";")):
        row, colon, word = (part.strip() for part in note.partition(":"))
        if not (row and colon and word) or len(note) > 2 * MAX_LETTERS:
            said = note.strip() if len(note) <= MAX_LETTERS else note.strip()[:MAX_LETTERS] + "…"
            raise ValueError(f"{name}: write each note as row: word, at most {2 * MAX_LETTERS} letters, with ; between two, got {said!r}")
        pairs.append((row, word))
    if not pairs:
        raise ValueError(f"{name}: write at least one note, as in client: Acme")
    return tuple(pairs)


def _pair(name: str, pair: tuple[str, str]) -> tuple[str, str]:
    ok = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(x, str) and x.strip() for x in pair)
    if not ok:
        raise ValueError(f"{name}: a note is a (row, word) pair of two texts that are not empty, got {pair!r}")
    return pair[0], pair[1]


def _in_range(name: str, value: float, *, low: float, low_open: bool) -> None:
    number = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
    if not (number and (low < value if low_open else low <= value) and value <= 1):  # NaN fails every comparison
        raise ValueError(f"{name} must lie in {'(' if low_open else '['}{low:.0f}, 1], got {value!r}")
