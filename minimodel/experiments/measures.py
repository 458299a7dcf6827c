"""What several experiments measure of a trained model: held-out loss, answers by distance and by update, bytes, reach, time."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from minimodel.experiments import probes
from minimodel.experiments.definition import Curve
from minimodel.model import K3ForCausalLM
from minimodel.tasks import meeting

HELD_OUT = 10**6  # the seed of held-out batches: no run trains with it


@torch.no_grad()
def held_out_loss(model: K3ForCausalLM, batch: Callable[[int, int], tuple[Tensor, Tensor]], batches: int) -> float:
    """Mean loss over batches from a seed that training never sees, every label weighing the same."""
    total, labels = 0.0, 0
    for step in range(batches):
        x, y = batch(HELD_OUT, step)
        asked = int((y[:, 1:] != -100).sum())
        total += model(x, labels=y).loss.item() * asked
        labels += asked
    return total / labels


def recall(model: torch.nn.Module, *, projects: int, length: int, answers: int) -> float:
    """Share of the blanks of held-out notes that are filled with the latest value."""
    per_note = min(8, 5 * projects, (length - meeting.SENTENCE) // meeting.ASKED)
    notes = meeting.held_out_notes(1, max(1, answers // per_note), projects=projects, length=length, final_questions=per_note)
    return meeting.score(model, notes, rows=32).accuracy


def by_distance(model: K3ForCausalLM, *, projects: int, answers: int, distances: tuple[int, ...] = probes.DISTANCES) -> Curve:
    """Share of right answers against the tokens between a fact and its question (mean of the notes asked)."""
    x, y = [], []
    for distance in distances:
        notes = probes.told_at(0, max(2, answers // len(distances)), distance=distance, projects=projects)
        x.append(float(probes.ends(notes).double().mean()))
        y.append(probes.right(probes.answers(model, notes)))
    return {"x": x, "y": y}


def by_updates(model: K3ForCausalLM, *, answers: int, most: int = 4) -> tuple[Curve, Curve]:
    """Two curves against the number of updates: right answers, and answers that held once (Tuesday, after Thursday replaced it)."""
    x, fresh, old = [], [], []
    for updates in range(most + 1):
        notes, stale = probes.replaced(0, max(2, answers // (most + 1)), updates=updates)
        said = probes.answers(model, notes)
        x.append(float(updates))
        fresh.append(probes.right(said))
        old.append(sum(a in days for (a, _), days in zip(said, stale, strict=True)) / len(said))
    return {"x": x, "y": fresh}, {"x": x, "y": old}


@torch.no_grad()
def cache_growth(model: K3ForCausalLM, tokens: tuple[int, ...]) -> Curve:
    """Bytes of a real cache after so many tokens."""
    cache, y = model.new_cache(1), []
    for old, new in zip((0, *tokens), tokens, strict=False):
        model(torch.ones(1, new - old, dtype=torch.long), cache=cache)
        y.append(float(cache.nbytes))
    return {"x": [float(n) for n in tokens], "y": y}


@torch.no_grad()
def reach(model: K3ForCausalLM, tokens: int = 96) -> tuple[int, int]:
    """How far back a word still changes anything: (in the first layer's mixer, in the answer), in tokens, up to ``tokens`` - 1.

    Every earlier word is changed in turn, in float64; nothing less than no difference at all counts as none.
    """
    wide = K3ForCausalLM(model.config).double().eval()
    wide.load_state_dict(model.state_dict())
    ids = torch.randint(2, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    changed = ids.repeat(tokens, 1)
    place = torch.arange(tokens)
    changed[place, place] = (changed[place, place] - 1) % (model.config.vocab_size - 2) + 2
    seen: list[Tensor] = []
    hook = wide.model.layers[0].self_attn.register_forward_hook(lambda _module, _inputs, out: seen.append(out[:, -1]))
    try:
        ends = [wide(x).logits[:, -1] for x in (ids, changed)]
    finally:
        hook.remove()
    out = []
    for base, other in (seen, ends):
        differs = (other != base).any(-1)
        out.append(tokens - 1 - int(differs.nonzero()[0]))
    return out[0], out[1]


@torch.no_grad()
def decode_ms(model: K3ForCausalLM, context: int, *, steps: int = 24) -> float:
    """Processor milliseconds for one more token behind ``context`` tokens: the least of several, since anything else is the machine's."""
    cache, best = model.new_cache(1), float("inf")
    for start in range(0, context, 1024):
        model(torch.ones(1, min(1024, context - start), dtype=torch.long), cache=cache)
    token = torch.ones(1, 1, dtype=torch.long)
    for _ in range(steps):
        started = time.process_time()
        model(token, cache=cache)
        best = min(best, time.process_time() - started)
    return 1e3 * best
