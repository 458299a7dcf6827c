"""What the parts of a small model did with one token, in words: read off a recorded run."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from k3viz.hybrid.parts import EXPERTS
from minimodel import K3ForCausalLM, load_pretrained, record
from minimodel.formats import format_number, format_probability
from minimodel.tasks import meeting

TEXT = " ".join((*meeting.ARTICLE, meeting.question("day")))


@lru_cache(maxsize=1)
def trained() -> K3ForCausalLM:
    """The trained meeting model in float64: a copy of its own, so that nothing else can be recording it."""
    return load_pretrained().double()


@lru_cache(maxsize=4)
def run(model: K3ForCausalLM) -> dict[str, Tensor]:
    """What ``record`` sees while ``model`` reads ``TEXT``."""
    with torch.no_grad(), record(model) as trace:
        model(torch.tensor([meeting.encode(TEXT)]))
    return dict(trace)


def seen(model: K3ForCausalLM, step: int) -> dict[str, str]:
    """Part -> what it did with the last token of ``TEXT``; step 0 is the embedding, then the layers from 1, then the output."""
    trace, last = run(model), meeting.encode(TEXT)[-1]
    if step == 0:
        return {"embedding": f"The token here is {meeting.VOCABULARY[last]!r}, row {last} of the table."}
    if step > model.config.num_hidden_layers:
        p = trace["logits"][0, -1].softmax(-1)
        word = meeting.VOCABULARY[int(p.argmax())]
        out = {"head": f"The blank is filled with {word!r}, probability {format_probability(float(p.max()))}."}
        return out | _depth(trace, "output_res", "read")
    name = f"layers.{step - 1}"
    found = {n.removeprefix(name + "."): x for n, x in trace.items() if n.startswith(name + ".")}
    out = _depth(trace, f"{name}.attn_res", "read") | _depth(trace, f"{name}.mlp_res", "read_2")
    out |= _kda(found) if "kda.state" in found else _mla(found)
    if "moe.indices" in found:
        pairs = zip(found["moe.indices"][-1].tolist(), found["moe.weights"][-1].tolist(), strict=True)
        chosen = " and ".join(f"{e + 1} ({format_number(w)})" for e, w in sorted(pairs, key=lambda pair: -pair[1]))
        experts = found["moe.scores"].shape[-1]
        out["router"] = f"It scored {experts} experts and sent this token to {chosen}; the weights stand in brackets."
        out[EXPERTS] = f"Of {experts} experts {chosen} worked on this token; their weights stand in brackets."
    return out


def _depth(trace: dict[str, Tensor], name: str, part: str) -> dict[str, str]:
    """The weights that a reader gives to the outputs of earlier blocks. The first layer has one source and nothing to choose."""
    if f"{name}.weights" not in trace:
        return {}
    weights = trace[f"{name}.weights"][0, -1].tolist()
    said = ", ".join(map(format_number, weights))
    return {part: f"It mixed {len(weights)} earlier outputs with weights {said} (embedding first, the current block last)."}


def _kda(found: dict[str, Tensor]) -> dict[str, str]:
    alpha, beta, state = (found[f"kda.{x}"][0] for x in ("alpha", "beta", "state"))
    kept = [format_number(float(x)) for x in (alpha[-1].min(), alpha[-1].max(), alpha[-1].mean())]
    before, after = (float(state[t].norm()) for t in (-2, -1))
    H, K, V = state.shape[1:]
    return {
        "qkv": f"{H} heads got a query, a key and a value of {K} channels each; the key's length is "
        f"{format_number(float(found['kda.k'][0, -1, 0].norm()))}.",
        "decay": f"Its channels kept between {kept[0]} and {kept[1]}, on average {kept[2]}.",
        "beta": f"The heads wrote with strength {' and '.join(format_number(b) for b in beta[-1].tolist())}.",
        "state": f"{H} boards of {K} x {V} went from norm {format_number(before)} to {format_number(after)}.",
    }


def _mla(found: dict[str, Tensor]) -> dict[str, str]:
    p, latent = found["mla.attention"][0, :, -1], found["mla.latent"][0]
    words = [meeting.VOCABULARY[i] for i in meeting.encode(TEXT)]
    looked = " and ".join(f"{words[int(h.argmax())]!r} ({format_number(float(h.max()))})" for h in p)
    out = {
        "latent": f"This token left a card of {latent.shape[1]} numbers; {len(latent)} cards are kept by now.",
        "attention": f"Its heads looked most at {looked}; the shares stand in brackets.",
    }
    if "mla.gate" in found:
        gate = found["mla.gate"][0, -1]
        out["out"] = f"The gate let between {format_number(float(gate.min()))} and {format_number(float(gate.max()))} of each channel pass."
    return out
