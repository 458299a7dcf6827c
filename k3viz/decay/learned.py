"""What every KDA head of a trained model does while it reads a note: its dials before the gate, its keys, its write strengths."""

from __future__ import annotations

import torch

from k3viz.decay.story import Head, split
from minimodel import K3ForCausalLM, record
from minimodel.tasks import meeting
from minimodel.trace import private_copy


def read_heads(model: K3ForCausalLM, text: str) -> dict[tuple[int, int], Head]:
    """(layer, head) -> ``Head``, in float64 on a private copy of the model.

    Raises ValueError for a text or a model that doesn't fit: unknown words, another vocabulary, no KDA layer.
    """
    meeting.check_reader(model)
    split(text)
    config = model.config
    layers = [layer for layer in range(config.num_hidden_layers) if config.mixer(layer) == "kda"]
    if not layers:
        raise ValueError("model has no KDA layer, so it has no dials")
    reader = private_copy(model)
    raw: dict[int, torch.Tensor] = {}
    for layer in layers:  # the trace holds alpha, from which a saturated z can't be had back
        reader.model.layers[layer].self_attn.f_b_proj.register_forward_hook(lambda _m, _in, f, layer=layer: raw.update({layer: f}))
    with torch.no_grad(), record(reader) as trace:
        reader(torch.tensor([meeting.encode(text)]))
    heads = {}
    for layer in layers:
        mixer, name = reader.model.layers[layer].self_attn, f"layers.{layer}.kda"
        z = (raw[layer] + mixer.dt_bias).unflatten(-1, (mixer.num_heads, mixer.head_dim))[0]
        for h in range(mixer.num_heads):
            k, beta = trace[f"{name}.k"][0, :, h], trace[f"{name}.beta"][0, :, h]
            heads[layer, h] = Head((layer, h), z[:, h].detach(), float(mixer.A_log[h].detach()), mixer.lower_bound, k, beta)
    return heads
