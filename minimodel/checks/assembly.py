"""Steps of notebook 6, your own K3: the stack, the whole model with the course's trained weights, its answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn

from minimodel.attention_residuals import DepthSources
from minimodel.attention_residuals import attention_residual as reference_residual
from minimodel.checks.grading import Step
from minimodel.checks.mixers import kda_layer, mla_layer
from minimodel.config import K3Config
from minimodel.model import K3ForCausalLM
from minimodel.pretrained import load_pretrained
from minimodel.tasks import meeting, story


# ---- the stack: every sublayer reads depth, then writes ----
def _stack(embedding, sublayers, readers, block, *, reads=reference_residual, residual=False, last=True):
    depth = DepthSources(embedding, block)
    for f, reader in zip(sublayers, readers, strict=False):
        h = reads(depth.stacked(), *reader)
        depth.write(h + f(h) if residual else f(h))
    return reads(depth.stacked(), *readers[-1]) if last else depth.prefix


def _sublayer(M, h):
    return torch.tanh(h @ M)


def _stack_inputs(draw):
    count, D = draw.pick(8, 6), 4
    sublayers = [partial(_sublayer, draw.normal(D, D)) for _ in range(count)]
    readers = [(draw.normal(D), draw.normal(D)) for _ in range(count + 1)]
    return {"embedding": draw.normal(2, 3, D), "sublayers": sublayers, "readers": readers, "block": draw.pick(1, 2)}


def reference_stack(embedding, sublayers, readers, block):
    return _stack(embedding, sublayers, readers, 2 * block)


depth_stack = Step("depth_stack", reference_stack, _stack_inputs, ("h [B T D]",))


@depth_stack.slip("a block was ended after `block` sublayers. It counts layers, and a layer has two sublayers")
def stack_block_in_sublayers(embedding, sublayers, readers, block):
    return _stack(embedding, sublayers, readers, block)


@depth_stack.slip("a sublayer's input was added to its output, h + f(h). Only f(h) is written; reading depth takes the residual's place")
def residual_as_well(embedding, sublayers, readers, block):
    return _stack(embedding, sublayers, readers, 2 * block, residual=True)


@depth_stack.slip("the last read is missing: after the last sublayer, one more reader mixes all sources")
def no_last_read(embedding, sublayers, readers, block):
    return _stack(embedding, sublayers, readers, 2 * block, last=False)


@depth_stack.slip("sublayers read the newest source only. They read a mix of all of them")
def newest_source_only(embedding, sublayers, readers, block):
    return _stack(embedding, sublayers, readers, 2 * block, reads=lambda sources, query, gain: sources[..., -1, :])


@depth_stack.slip("all sublayers share the first reader. Each has its own query and gain")
def one_reader(embedding, sublayers, readers, block):
    return _stack(embedding, sublayers, [readers[0]] * len(readers), 2 * block)


@depth_stack.law("where sublayers give zero and queries are zero, the embedding comes out, divided by the number of sources")
def silent_sublayers(mine, embedding, sublayers, readers, block):
    silent = [torch.zeros_like for _ in sublayers]
    even = [(torch.zeros_like(query), gain) for query, gain in readers]
    sources = 1 + math.ceil(len(sublayers) / (2 * block))
    return torch.allclose(mine(embedding, silent, even, block), embedding / sources, atol=1e-5)


# ---- the whole model ----
@cache
def _trained() -> K3ForCausalLM:
    return load_pretrained("meeting")


def _loaded(build: Callable, config: K3Config) -> nn.Module:
    """The learner's model with the trained weights, which find their place by the released names, in float64."""
    with torch.random.fork_rng(devices=[]):
        model = build(config)
    model.load_state_dict(_trained().state_dict())
    return model.double().eval()


@torch.no_grad()
def _logits(build: Callable, config: K3Config, ids: Tensor) -> Tensor:
    out = _loaded(build, config)(ids)
    return getattr(out, "logits", out)


ARTICLE = f"{' '.join(meeting.ARTICLE)} {meeting.question('day')}"
SEVERAL = ("The budget for Falcon is $80k. The budget for Harbor is $20k. The budget for Falcon changed to $50k. "
           + meeting.question("budget", "Falcon"))  # fmt: skip


def _text(draw):
    """The article's question first; the seed's own story, without its update too; a fact it does not change; several projects."""
    own = story.tell(draw.seed)
    return draw.pick(ARTICLE, own.text, f"{own.notes} {own.question}", f"{own.notes} {own.update} {meeting.question('attendees')}", SEVERAL)


def _ids(draw):
    return torch.tensor([meeting.encode(_text(draw))])


own_model = Step("own_model", K3ForCausalLM, lambda draw: {"config": K3Config.meeting(), "ids": _ids(draw)}, ("logits [B T vocab]",),
                 run=_logits)  # fmt: skip


class _Changed(K3ForCausalLM):
    """The course's model with one thing wrong, put in when it first runs: its weights have been loaded by then."""

    def __init__(self, config: K3Config, change: Callable[[K3ForCausalLM], None]) -> None:
        super().__init__(config)
        self._change = change

    def forward(self, ids: Tensor) -> Tensor:
        self._change(self)
        return super().forward(ids).logits


@own_model.slip("the final norm, before lm_head, is missing")
def no_final_norm(config):
    return _Changed(config, lambda m: setattr(m.model, "norm", nn.Identity()))


@own_model.slip("the mixers read their input as it is. input_layernorm comes first")
def no_input_norm(config):
    return _Changed(config, lambda m: [setattr(block, "input_layernorm", nn.Identity()) for block in m.model.layers])


@own_model.slip("the feed-forwards read their input as it is. post_attention_layernorm comes first")
def no_second_norm(config):
    return _Changed(config, lambda m: [setattr(block, "post_attention_layernorm", nn.Identity()) for block in m.model.layers])


@own_model.slip("the two norms of a layer have changed places")
def norms_swapped(config):
    def swap(m):
        for block in m.model.layers:
            block.input_layernorm, block.post_attention_layernorm = block.post_attention_layernorm, block.input_layernorm

    return _Changed(config, swap)


@own_model.slip("attn_res_block_size counts layers. With two sublayers a layer, a block ends after twice as many sublayers")
def half_blocks(config):
    return _Changed(config, lambda m: setattr(m.model, "config", config.replace(attn_res_block_size=1)))


@own_model.slip("a plain residual stream. Sublayers read depth through their pseudo-queries")
def plain_residuals(config):
    return _Changed(config, lambda m: setattr(m.model, "config", config.replace(attn_res_block_size=None)))


@own_model.slip("the two readers of a layer have changed places: self_attention_res before the mixer, mlp_res before the feed-forward")
def readers_swapped(config):
    def swap(m):
        for block in m.model.layers:
            block.self_attention_res_proj, block.mlp_res_proj = block.mlp_res_proj, block.self_attention_res_proj
            block.self_attention_res_norm, block.mlp_res_norm = block.mlp_res_norm, block.self_attention_res_norm

    return _Changed(config, swap)


@own_model.slip("the router's correction bias is not used")
def no_correction_bias(config):
    return _Changed(config, lambda m: [router.e_score_correction_bias.zero_() for router in m.routers()])


@own_model.slip("the shared experts are missing")
def model_without_shared_experts(config):
    return _Changed(config, lambda m: [setattr(b.block_sparse_moe, "shared_experts", None) for b in m.model.layers if b.block_sparse_moe])


@own_model.slip("every sublayer ran the last layer. A lambda of a loop reads `layer` when it is called: keep it, lambda h, a=layer: ...")
def last_layer_only(config):
    def share(m):
        last = m.model.layers[-1]
        for block in m.model.layers:
            block.input_layernorm, block.post_attention_layernorm = last.input_layernorm, last.post_attention_layernorm
            block.self_attn, block.mlp, block.block_sparse_moe = last.self_attn, last.mlp, last.block_sparse_moe

    return _Changed(config, share)


@own_model.law("every weight has a part in the logits: a gradient reaches it")
def every_weight_counts(mine, config, ids):
    model = _loaded(mine, config)
    # the very first reader has one source to choose from: its weights change nothing
    weights = [weight for name, weight in model.named_parameters() if not name.startswith("model.layers.0.self_attention_res")]
    out = model(ids)
    logits = getattr(out, "logits", out)
    picked = (logits * torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)).sum()
    return all(g is not None and bool(g.any()) for g in torch.autograd.grad(picked, weights, allow_unused=True))


# ---- what it says ----
def reference_greedy(logits_of, ids, count):
    for _ in range(count):
        ids = torch.cat([ids, logits_of(ids)[:, -1:].argmax(-1)], 1)
    return ids


def _greedy_inputs(draw):
    return {"logits_of": lambda ids: _trained()(ids).logits, "ids": _ids(draw), "count": draw.pick(2, 1, 3)}


greedy = Step("greedy", reference_greedy, _greedy_inputs, ("ids [B T]",), run=torch.no_grad()(lambda function, *inputs: function(*inputs)))


@greedy.slip("the logits of the first place were read. The last place says what comes next")
def first_place(logits_of, ids, count):
    return reference_greedy(lambda ids: logits_of(ids).flip(1), ids, count)


@greedy.slip("only the new tokens came back. Asked for is the prompt with them behind it")
def without_the_prompt(logits_of, ids, count):
    return reference_greedy(logits_of, ids, count)[:, ids.shape[1] :]


@greedy.slip("each round read the prompt alone, so that every new token is the same. Put the new token behind it first")
def reads_the_prompt_only(logits_of, ids, count):
    new = logits_of(ids)[:, -1:].argmax(-1)
    return torch.cat([ids, new.expand(-1, count)], 1)


@greedy.slip("one token too many")
def one_too_many(logits_of, ids, count):
    return reference_greedy(logits_of, ids, count + 1)


@greedy.law("the prompt stays in front as it was")
def prompt_stays(mine, logits_of, ids, count):
    return torch.equal(mine(logits_of, ids, count)[:, : ids.shape[1]], ids)


@torch.no_grad()
def _word(model: Callable, text: str) -> str:
    """The word that a model puts behind a text."""
    out = model(torch.tensor([meeting.encode(text)]))
    return meeting.decode([int(getattr(out, "logits", out)[0, -1].argmax())])


# the reference reads the same weights in the course's model; the first question is the one that began the course
thursday = Step("thursday", lambda ids: _trained()(ids), lambda draw: {"text": _text(draw)}, ("word",), run=_word)

@thursday.slip("the trained weights are not in the model, so that all words are alike to it. load_state_dict puts them there")
def without_weights(ids):
    return torch.zeros(*ids.shape, len(meeting.VOCABULARY))


@thursday.law("what it says depends on the update: without it the meeting is on the day that the notes say")
def update_counts(mine, text):
    notes, _ = meeting.ARTICLE
    return _word(mine, f"{notes} {meeting.question('day')}") != _word(mine, ARTICLE)


STEPS = (kda_layer, mla_layer, depth_stack, own_model, greedy, thursday)
