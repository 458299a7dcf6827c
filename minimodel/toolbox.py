"""Five small models that differ in their attention only, trained on the same meeting notes: share, shrink, forget, replace.

The body around the attention is the plainest that K3's parts allow: dense feed-forwards, one residual stream, no positions.

    python -m minimodel.pretrained toolbox          # trains all five and writes minimodel/pretrained/toolbox
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from minimodel.config import K3Config, LinearAttnConfig, hybrid_pattern
from minimodel.io import from_pretrained, save_pretrained
from minimodel.model import K3ForCausalLM
from minimodel.pretrained import FOLDER
from minimodel.tasks import meeting
from minimodel.train import Recipe, train

__all__ = ["TECHNIQUES", "load_toolbox", "toolbox_config", "train_toolbox"]

TECHNIQUES = ("mha", "gqa", "mla", "sliding_window", "kda")  # the mixer in every layer
STEPS = 600  # softmax without positions takes long to tell old from new
GROUPS = 1  # four heads read one copy
LATENT = 32  # numbers of a latent card; MLA keeps qk_rope_head_dim more beside it
WINDOW = 21  # the tokens of four notes: the article's original day, room, attendees and update
ASKABLE = ("client", "day", "room", "attendees")  # the facts of an opening
LENGTH, ROWS = 64, 16  # of a training batch: tokens of a note, notes


def toolbox_config(technique: str, *, groups: int = GROUPS, latent: int = LATENT, window: int = WINDOW) -> K3Config:
    """Four layers of four heads with 32 channels each, ``technique`` in all of them.

    groups: copies of keys and values that GQA keeps; 1, 2 or 4. latent: numbers in MLA's latent. window: tokens that a layer of the
    sliding-window model reads. Raises ValueError for an unknown technique or an impossible size.
    """
    if technique not in TECHNIQUES:
        raise ValueError(f"technique must be one of {', '.join(TECHNIQUES)}, got {technique!r}")
    linear, full = hybrid_pattern(4)
    return K3Config(
        vocab_size=len(meeting.VOCABULARY), hidden_size=64, num_hidden_layers=4,
        linear_attn_config=LinearAttnConfig(kda_layers=linear, full_attn_layers=full, num_heads=4, head_dim=32),
        num_attention_heads=4, kv_lora_rank=latent, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, mla_use_output_gate=False,
        intermediate_size=192, first_k_dense_replace=4, attn_res_block_size=None, initializer_range=0.05, pad_token_id=0,
        linear_mixer=technique, full_mixer=technique, num_key_value_groups=groups, sliding_window=window,
    )  # fmt: skip


def load_toolbox(technique: str) -> K3ForCausalLM:
    """The trained model of one technique, in float32 on the CPU, in eval mode."""
    if technique not in TECHNIQUES:
        raise ValueError(f"technique must be one of {', '.join(TECHNIQUES)}, got {technique!r}")
    return from_pretrained(FOLDER / "toolbox" / technique, dtype=torch.float32)


# ---- training ----


def write_note(rng: random.Random) -> meeting.Note:
    """A short note about one project: an opening like the article's in most, then changes (often asked about at once), chat, questions."""
    w = meeting.NoteWriter(rng, 1)
    if rng.random() < 0.8:
        w.opening()
    while len(w.note.ids) <= LENGTH - meeting.SENTENCE - meeting.ASKED:
        roll, known = rng.random(), list(w.note.facts)
        if roll < 0.1:
            w.filler()
        elif roll < 0.4 and known:
            w.ask(*rng.choice(known), reveal=False)
        else:
            slot = rng.choice(("day", *meeting.SLOTS))
            new, wrong = (None, slot) not in w.note.facts, rng.random() < 0.15
            w.state(None, slot, meeting.STATEMENT if new else meeting.CORRECTION if wrong else meeting.UPDATE)
            if rng.random() < 0.5:
                w.ask(None, slot, reveal=False)
    if w.note.facts:
        w.ask(*rng.choice(list(w.note.facts)), reveal=False)
    return w.note


def article_notes(count: int, seed: int = 1) -> list[meeting.Note]:
    """The article's situation with other words: an opening, one update, then one question about any of its four facts."""
    notes = []
    for i in range(count):
        rng = random.Random(f"toolbox/article/{seed}/{i}")
        w = meeting.NoteWriter(rng, 1)
        w.opening()
        w.state(None, rng.choice(ASKABLE), meeting.UPDATE)
        w.note.labels = [-100] * len(w.note.ids)
        w.ask(None, rng.choice(ASKABLE), reveal=False)
        notes.append(w.note)
    return notes


def training_batch(seed: int, step: int) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Token ids and labels of one step: a pure function of (seed, step)."""
    rng = random.Random(f"toolbox/train/{seed}/{step}")
    return meeting.pad_notes([write_note(rng) for _ in range(ROWS)], LENGTH)


@torch.no_grad()
def scores(model: K3ForCausalLM) -> dict[str, float | dict]:
    """Accuracy on held-out notes of 64 tokens with chat, by slot; on the article's situation; and the probability of its Thursday."""
    held_out = meeting.score(model, meeting.held_out_notes(1, 128, projects=1, length=LENGTH, final_questions=4), rows=64)
    article = meeting.score(model, article_notes(256), rows=64)
    text = " ".join((*meeting.ARTICLE, meeting.question("day")))
    p = model(torch.tensor([meeting.encode(text)])).logits[0, -1].softmax(-1)
    by_slot = {slot: round(x, 3) for slot, x in held_out.by_slot().items()}
    return {
        "accuracy": round(held_out.accuracy, 4), "article": round(article.accuracy, 4),
        "p_thursday": round(float(p[meeting.encode("Thursday")[0]]), 4), "by_slot": by_slot,
    }  # fmt: skip


def train_toolbox(technique: str, folder: str | Path | None = None, *, seed: int = 0, progress: bool = True) -> tuple[K3ForCausalLM, list]:
    """Train one technique's model, 1,024 tokens a step. ``folder``: see :func:`minimodel.train.train`. Returns the model and its log."""
    model = K3ForCausalLM(toolbox_config(technique), seed=seed)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        return training_batch(seed, step)

    def evaluate(model: K3ForCausalLM) -> dict[str, float]:
        return {name: x for name, x in scores(model).items() if name != "by_slot"}

    recipe = Recipe(steps=STEPS, lr=1.2e-2, data=f"toolbox notes, seed {seed}")
    log = train(model, batch, recipe, folder=folder, checkpoint_every=50, evaluate=evaluate, evaluate_every=100, progress=progress)
    return model, log


def publish(technique: str, model: K3ForCausalLM, log: list[dict], folder: Path = FOLDER / "toolbox") -> None:
    """Write the model in bfloat16, its curve and the scores of what was written; then the page about all models that are there."""
    target = folder / technique
    save_pretrained(model, target, dtype=torch.bfloat16)
    curve = [{"step": row["step"], "loss": round(row["loss"], 4)} for row in log if row["step"] % 10 == 0 or row is log[-1]]
    (target / "curve.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in curve) + "\n]\n")
    stored = from_pretrained(target, dtype=torch.float32)
    (target / "scores.json").write_text(json.dumps({"steps": len(log), **scores(stored)}, indent=1) + "\n")
    (folder / "README.md").write_text(readme(folder))


def readme(folder: Path) -> str:
    """The page beside the models: how they were made, and how well they do."""
    found = {t: json.loads((folder / t / "scores.json").read_text()) for t in TECHNIQUES if (folder / t / "scores.json").exists()}
    rows = "\n".join(
        f"| `{t}` | {s['steps']} | {100 * s['accuracy']:.1f} % | {100 * s['article']:.1f} % | {s['p_thursday']:.4f} |"
        for t, s in found.items()
    )
    return f"""# The toolbox models

Five small models that differ in their attention only (`minimodel.toolbox.toolbox_config`), trained on a CPU by

```
python -m minimodel.pretrained toolbox --threads 1
```

Each step reads {ROWS * LENGTH:,} tokens of short notes about one project; a model takes one to four minutes of one core. The weights are
stored in bfloat16 and read in float32; the scores are those of the stored weights. The same command gives the same models on the same
processor with the same number of threads; elsewhere rounding differs, and so do the models a little.

*Held out*: notes of {LENGTH} tokens with chat, updates and corrections. *Article*: an opening like the article's, one update, then one
question, with other words. A blank is right when the likeliest of all {len(meeting.VOCABULARY)} words is the latest value. *Thursday*:
its probability in the article's own question.

| technique in every layer | steps | held out | article | Thursday |
|---|---|---|---|---|
{rows}
"""
