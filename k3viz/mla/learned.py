"""The Gated MLA story as a trained model lives it: its own cards, attention, gate, and its next word after every token."""

from __future__ import annotations

from typing import Any

import torch

from k3viz.mla.story import forms_differ, held_gate
from minimodel import K3ForCausalLM, record
from minimodel.tasks import meeting
from minimodel.trace import frozen, private_copy

TEXT = " ".join(meeting.ARTICLE)
LONGEST = 64  # tokens of text: a story for reading
SAID = 4  # words kept a token


def learned_trace(model: K3ForCausalLM, text: str | None, slot: str, gate: str) -> dict[str, Any]:
    """The fields of an ``MLAStory``: ``model`` reads ``text`` and the question for ``slot``, in float64 on a private copy.

    Raises ValueError for an empty text, an unknown word, more than 64 tokens, an unknown slot, a model of another vocabulary, or one
    without a Gated MLA layer.
    """
    text = TEXT if text is None else text
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"text must hold at least one word, got {text!r}")
    notes = meeting.encode(text)
    if len(notes) > LONGEST:
        raise ValueError(f"text: at most {LONGEST} tokens fit in this story, got {len(notes)}")
    if slot not in meeting.SLOTS:
        raise ValueError(f"slot must be one of {', '.join(meeting.SLOTS)}, got {slot!r}")
    meeting.check_reader(model)
    layers = [i for i in range(model.config.num_hidden_layers) if model.config.mixer(i) == "mla"]
    if not layers or not model.config.mla_use_output_gate:
        raise ValueError("model has no Gated MLA layer, so it keeps no cards behind a gate")
    project = next((w for i in notes if (w := meeting.VOCABULARY[i]) in meeting.PROJECTS), None)
    ids = notes + meeting.encode(meeting.question(slot, project))

    reader = private_copy(model)
    layer = reader.model.layers[layers[-1]].self_attn
    inputs: list[torch.Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _module, args: inputs.append(args[0]))
    try:
        with torch.no_grad(), held_gate(layer, gate), record(layer) as trace:  # the layer alone: whole states would take long
            logits = reader(torch.tensor([ids])).logits[0]
            attention, opened, latent = (trace[f"layers.{layers[-1]}.mla.{name}"][0] for name in ("attention", "gate", "latent"))
    finally:
        hook.remove()
    off = forms_differ(layer, inputs[0])
    top = logits.softmax(-1).topk(SAID)
    answers = tuple(
        tuple((meeting.VOCABULARY[i], p) for i, p in zip(words, ps, strict=True))
        for words, ps in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    )
    return dict(
        learned=True, place=f"layer {layers[-1] + 1} of {model.config.num_hidden_layers}", tokens=tuple(meeting.VOCABULARY[i] for i in ids),
        heads=tuple(f"head {h + 1}" for h in range(layer.num_heads)), slot=slot, gate_held=gate, rank=layer.rank, latent=frozen(latent),
        attention=frozen(attention), gate=frozen(opened), answers=answers, off=off,
    )  # fmt: skip
