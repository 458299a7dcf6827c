"""The course's meeting model, trained on a CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from minimodel.cache import FixedState
from minimodel.config import K3Config
from minimodel.io import from_pretrained
from minimodel.kda import KimiDeltaAttention
from minimodel.model import K3ForCausalLM
from minimodel.tasks import meeting
from minimodel.train.loop import Recipe, train

NOTES = ("curriculum", "dense", "cold", "old")
SEEDS = (-(2**31), 2**32 - 1)  # with the step they make a seed of 64 bits


def train_meeting(
    folder: str | Path | None = None,
    *,
    steps: int = 100,
    projects: int = 1,
    lr: float = 8e-3,
    seed: int = 0,
    start: str | Path | None = None,
    notes: str = "curriculum",
    residue: float = 0.0,
    past: float = 0.0,
    progress: bool = True,
) -> tuple[K3ForCausalLM, list[dict]]:
    """The course's meeting model, 2,048 tokens a step.

    One project is learned from notes of 128 tokens in about a hundred steps at lr 1.5e-2. With more, notes and their number of projects
    grow along ``meeting.curriculum``; ``notes`` "dense", "cold" or "old" takes those of :func:`later_batch`. ``residue`` and ``past``:
    see :func:`used_memory`. ``start``: the folder of a trained model to go on from. ``folder``: see :func:`train`.

    Returns: the model and its log.
    """
    if notes not in NOTES:
        raise ValueError(f"notes must be one of {', '.join(NOTES)}, got {notes!r}")
    if notes != "curriculum" and projects != 8:
        raise ValueError(f"notes={notes!r} is about up to 8 projects, got projects={projects}")
    if not 1 <= projects <= 8:
        raise ValueError(f"projects must lie in 1..8, got {projects}")
    for name, value in (("residue", residue), ("past", past)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
    if not SEEDS[0] <= seed <= SEEDS[1]:
        raise ValueError(f"seed must lie in {SEEDS[0]}..{SEEDS[1]}, got {seed}")
    data = f"meeting notes, {notes}, seed {seed}, up to {projects} projects"
    data += f", residue {residue:g}" if residue else ""
    data += f", past {past:g}" if past else ""
    model = _started(start, residue, past) if start else K3ForCausalLM(K3Config.meeting(), seed=seed)
    data += f", from a trained model ({_fingerprint(model)})" if start else ""
    noise = torch.Generator()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        noise.manual_seed(seed << 32 | step)
        if notes != "curriculum":
            return later_batch(notes, seed, step)
        length, most = (128, 1) if projects == 1 else meeting.curriculum(step, steps)
        return meeting.training_batch(seed, step, rows=2048 // length, length=length, max_projects=min(most, projects))

    length = 128 if projects == 1 else 512

    def scores(model: K3ForCausalLM) -> dict[str, float]:
        held_out = {n: meeting.held_out_notes(1, 16, projects=n, length=length) for n in {1, projects}}
        return {f"accuracy_{n}": meeting.score(model, asked).accuracy for n, asked in sorted(held_out.items())}

    every = 200 if projects > 1 else 25
    recipe = Recipe(steps=steps, lr=lr, data=data)
    with used_memory(model, residue, past, noise):
        log = train(model, batch, recipe, folder=folder, evaluate=scores, evaluate_every=every, progress=progress)
    return model, log


def _started(start: str | Path, residue: float, past: float) -> K3ForCausalLM:
    """The model to go on from. Raises ValueError for one that can't be trained on these notes."""
    try:
        model = from_pretrained(start)
    except (ValueError, OSError) as error:
        raise ValueError(f"start: {error}") from None
    if model.config.vocab_size != len(meeting.VOCABULARY):
        raise ValueError(
            f"start: the model in {start} has a vocabulary of {model.config.vocab_size}, the meeting notes one of {len(meeting.VOCABULARY)}"
        )
    if (residue or past) and not isinstance(model.model.layers[0].self_attn, KimiDeltaAttention):
        raise ValueError(
            f"start: residue={residue:g} and past={past:g} fill the memory of a first layer with KDA, and that of the model in {start} is "
            f"{type(model.model.layers[0].self_attn).__name__}"
        )
    return model


def _fingerprint(model: K3ForCausalLM) -> str:
    """Of the weights: two starts of one config are two runs."""
    digest = sha256()
    for name, x in sorted(model.state_dict().items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


@contextmanager
def used_memory(model: K3ForCausalLM, residue: float, past: float, noise: torch.Generator) -> Iterator[None]:
    """While it trains, the first layer's KDA memory does not start empty, as if a long past had left something behind.

    It starts from what another note of the batch left there, times a number drawn from 0 to ``past`` for every note, and from normal noise
    with a standard deviation drawn from 0 to ``residue``.

    An empty memory lets a model write with one key and read with a query that only agrees with it on what was written so far. What each
    write leaves behind then adds up, in notes longer than those of the training. Here any reading is punished that the last write to the
    same key did not set.
    """

    def start(mixer: KimiDeltaAttention, inputs: tuple[Tensor], options: dict) -> tuple[tuple[Tensor], dict]:
        if not mixer.training:
            return inputs, options
        (x,), left, memory = inputs, FixedState(), FixedState()
        shape = len(x), mixer.num_heads, mixer.head_dim, mixer.head_dim
        memory.state = torch.zeros(shape)
        if past:
            with torch.no_grad():
                mixer.forward(x.roll(1, 0), cache=left)  # not mixer(..), which would come here again
            memory.state += past * torch.rand(len(x), 1, 1, 1, generator=noise) * left.state
        if residue:
            memory.state += residue * torch.rand(len(x), 1, 1, 1, generator=noise) * torch.randn(shape, generator=noise)
        return inputs, {**options, "cache": memory}

    if not residue and not past:
        yield
        return
    handle = model.model.layers[0].self_attn.register_forward_pre_hook(start, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def later_batch(kind: str, seed: int, step: int) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Ids and labels of a training step after the curriculum: 2,048 tokens of notes with more writes, about up to eight projects.

    kind: "dense", with as many writes as the held-out notes have; "cold", in most of which a few facts change all the time while others
    grow old: those have to survive many writes to keys beside their own; or "old", half of them with fewer questions and less chat, in
    which they have to survive twice as many.
    """
    if kind not in NOTES[1:]:
        raise ValueError(f"kind must be one of {', '.join(NOTES[1:])}, got {kind!r}")
    rng = random.Random(f"meeting/train/{kind}/{seed}/{step}")
    length = meeting.LONGEST // (1 if step % (2 if kind == "dense" else 4) else 2)
    notes = []
    for _ in range(2 * meeting.LONGEST // length):
        if kind == "dense":
            chat, ask = rng.uniform(0, 0.6), rng.uniform(0, 0.25)
            projects, final, uneven = rng.randint(1, 8), rng.randint(8, length // 24), {}
        else:
            projects, terse = rng.randint(1, 8), kind == "old" and rng.random() < 0.5
            most = min(5 * projects, length // (64 if terse else 24))
            chat = rng.uniform(0, 0.2 if terse else 0.6)
            ask = rng.choice((0.0, rng.uniform(0, 0.25))) if not terse else 0.0
            final, spread = rng.randint((most + 1) // 2, most), rng.choice((0.0, 2.0, 6.0))
            uneven = {"reveal": 0.2, "few": 0.3, "spread": spread}
        notes.append(meeting.write_note(rng, projects=projects, length=length, chat=chat, ask=ask, final_questions=final, **uneven))
    return meeting.pad_notes(notes, length)
