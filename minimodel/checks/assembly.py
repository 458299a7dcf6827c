"""Steps of notebook 6, your own K3: both mixers as layers, the stack, the whole model with the course's trained weights, its answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from minimodel.attention_residuals import DepthSources
from minimodel.attention_residuals import attention_residual as reference_residual
from minimodel.checks import parts, recall
from minimodel.checks.grading import Step
from minimodel.checks.whiteboard import recurrent
from minimodel.config import K3Config, LinearAttnConfig
from minimodel.kda import KimiDeltaAttention
from minimodel.layers import l2norm, rms_norm
from minimodel.mla import LATENT_EPS, GatedMLA
from minimodel.model import K3ForCausalLM
from minimodel.pretrained import load_pretrained
from minimodel.tasks import meeting, story

# ---- the two mixers: p holds a layer's weights by their released names ----
SMALL = K3Config.meeting().replace(
    hidden_size=12, q_lora_rank=6, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=3, v_head_dim=4,
    linear_attn_config=LinearAttnConfig(num_heads=2, head_dim=4),
)  # fmt: skip


def _layer(kind: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):  # building draws weights, which are then replaced
        return kind(SMALL)


def _layer_inputs(kind: type[nn.Module]) -> Callable:
    def inputs(draw):
        p = {name: 0.5 * draw.normal(*weight.shape) for name, weight in _layer(kind).named_parameters()}
        return {"x": draw.normal(2, draw.pick(5, 1, 6), SMALL.hidden_size), "p": p, "config": SMALL}

    return inputs


kda_layer = Step("kda_layer", lambda x, p, config: functional_call(_layer(KimiDeltaAttention), p, (x,)), _layer_inputs(KimiDeltaAttention),
                 ("y [B T D]",))  # fmt: skip


def _kda(x, p, config, *, activation=F.silu, value=lambda v: v, taps="qkv", gated=True):
    """The layer from the parts of notebook 1, with what people get wrong left open."""
    H = config.linear_attn_config.num_heads

    def projected(letter, tap):
        y = parts.short_conv.reference(x @ p[f"{letter}_proj.weight"].T, p[f"{tap}_conv1d.weight"][:, 0])
        return activation(y).unflatten(-1, (H, -1))

    q, k, v = (projected(*letters) for letters in zip("qkv", taps, strict=True))
    f = (x @ p["f_a_proj.weight"].T @ p["f_b_proj.weight"].T).unflatten(-1, (H, -1))
    g = parts.log_decay.reference(f, p["A_log"], p["dt_bias"].view(H, -1))
    o, _ = recurrent(l2norm(q), l2norm(k), value(v), g, torch.sigmoid(x @ p["b_proj.weight"].T))
    o = rms_norm(o, p["o_norm.weight"])
    if gated:
        o = o * torch.sigmoid(x @ p["g_proj.weight"].T).unflatten(-1, (H, -1))
    return o.flatten(2) @ p["o_proj.weight"].T


@kda_layer.slip("the values are normed too. Only queries and keys are")
def values_normed(x, p, config):
    return _kda(x, p, config, value=l2norm)


@kda_layer.slip("there is no SiLU after the convolution")
def without_silu(x, p, config):
    return _kda(x, p, config, activation=lambda y: y)


@kda_layer.slip("one convolution was used for all three. Query, key and value have taps of their own")
def one_convolution_for_all(x, p, config):
    return _kda(x, p, config, taps="qqq")


@kda_layer.slip("the output gate is missing: sigmoid(g_proj x) times the normed output")
def kda_without_gate(x, p, config):
    return _kda(x, p, config, gated=False)


@kda_layer.slip("query and key have changed places")
def query_and_key_swapped(x, p, config):
    names = {"q_proj.weight": "k_proj.weight", "q_conv1d.weight": "k_conv1d.weight"}
    names |= {b: a for a, b in names.items()}
    return _kda(x, {name: p[names.get(name, name)] for name in p}, config)


@kda_layer.slip("dt_bias is missing in the decay")
def decay_without_bias(x, p, config):
    return _kda(x, {**p, "dt_bias": 0 * p["dt_bias"]}, config)


mla_layer = Step("mla_layer", lambda x, p, config: functional_call(_layer(GatedMLA), p, (x,)), _layer_inputs(GatedMLA), ("y [B T D]",))


def _mla(x, p, config, *, query_norm=True, gated=True):
    """The layer from the parts of notebook 3."""
    H, nope = config.num_attention_heads, config.qk_nope_head_dim
    a = x @ p["q_a_proj.weight"].T
    a = rms_norm(a, p["q_a_layernorm.weight"], LATENT_EPS) if query_norm else a
    q = (a @ p["q_b_proj.weight"].T).unflatten(-1, (H, -1)).transpose(1, 2)
    rows = recall.reference_latent(x, p["kv_a_proj_with_mqa.weight"], p["kv_a_layernorm.weight"])
    k, v = recall.reference_expand(rows, p["kv_b_proj.weight"], H, nope)
    o = recall.causal_attention.reference(q, k, v).transpose(1, 2).flatten(2)
    return ((torch.sigmoid(x @ p["g_proj.weight"].T) * o) if gated else o) @ p["o_proj.weight"].T


@mla_layer.slip("the query's latent is not normed: q_b_proj reads RMSNorm(q_a_proj x), with eps 1e-6")
def query_not_normed(x, p, config):
    return _mla(x, p, config, query_norm=False)


@mla_layer.slip("the output gate is missing: sigmoid(g_proj x) times the output")
def mla_without_gate(x, p, config):
    return _mla(x, p, config, gated=False)


@mla_layer.slip("the extra key has no part in it (zero). It is not rotated in K3, but it is used")
def extra_part_unused(x, p, config):
    L = config.kv_lora_rank
    weight = p["kv_a_proj_with_mqa.weight"].clone()
    weight[L:] = 0
    return _mla(x, {**p, "kv_a_proj_with_mqa.weight": weight}, config)


@mla_layer.slip("the gain of the key-value latent's norm is missing")
def latent_gain_missing(x, p, config):
    return _mla(x, {**p, "kv_a_layernorm.weight": torch.ones_like(p["kv_a_layernorm.weight"])}, config)


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


# ---- the whole model ----
@cache
def _trained() -> K3ForCausalLM:
    return load_pretrained("meeting")


@torch.no_grad()
def _logits(build: Callable, config: K3Config, ids: Tensor) -> Tensor:
    """Build the learner's model, load the trained weights by their released names, run it in float64."""
    with torch.random.fork_rng(devices=[]):
        model = build(config)
    model.load_state_dict(_trained().state_dict())
    out = model.double().eval()(ids)
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


@torch.no_grad()
def _word(model: Callable, text: str) -> str:
    """The word that a model puts behind a text."""
    out = model(torch.tensor([meeting.encode(text)]))
    return meeting.decode([int(getattr(out, "logits", out)[0, -1].argmax())])


# the reference reads the same weights in the course's model; the first question is the one that began the course
thursday = Step("thursday", lambda ids: _trained()(ids), lambda draw: {"text": _text(draw)}, ("word",), run=_word)

STEPS = (kda_layer, mla_layer, depth_stack, own_model, greedy, thursday)
