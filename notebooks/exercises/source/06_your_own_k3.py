# %% [markdown]
# # Exercise 6. Your own K3 answers
#
# You have written all the parts. Now you put them together into a model. It gets the weights that the course has trained, and then you ask it:
# *"The meeting is now on ..."*
#
# The names of the modules are those of the released K3 checkpoint. That is why weights find their place by name.
# %%
import torch
import torch.nn.functional as F
from torch import nn

from minimodel import K3Config, checks, load_pretrained
from minimodel.tasks import meeting, story
# %% [markdown]
# ## Bring your functions
# Paste your functions from the earlier exercises over these. You have passed their checks, so no check stands here. If one is missing or not right, a
# check below says which.
# %%
# paste: l2norm, rms_norm, short_conv
# Yours from exercise 1
# %%
# paste: log_decay, kda_step, gated_norm
# Yours from exercise 1
# %%
# paste: kda_recurrent
# Yours from exercise 1
# %%
# paste: mla_latent, mla_expand, causal_attention
# Yours from exercise 3
# %%
# paste: attention_residual, situ_glu, route
# Yours from exercise 4
# %%
# paste: routed_experts
# Yours from exercise 4
# %%
# paste: latent_moe
# Yours from exercise 4
# %% [markdown]
# ## Step 1. `kda_layer`
# The layer from its parts. `x [B, T, D]` is normed already, `p` is a dict of weights, `config` a `K3Config`.
#
# 1. $q, k, v$: project (`q_proj.weight`), convolve (`q_conv1d.weight [P, 1, W]`), SiLU, cut into heads. Then `l2norm` for q and k.
# 2. $f$ = `f_b_proj` of `f_a_proj` of x. $g$ from `log_decay` with `A_log [H]` and `dt_bias [H*K]`. $\beta = \sigma(\text{b\_proj}\ x)$.
# 3. `kda_recurrent`, then `gated_norm` with the gate `g_proj` x and the gain `o_norm.weight`, then `o_proj`.
#
# Every projection is `y @ p["NAME.weight"].T`. Heads: `config.linear_attn_config.num_heads`. Returns `[B, T, D]`.
# %%
def kda_layer(x, p, config):
    """A KDA layer, from a dict of weights with the released names."""
    ### BEGIN SOLUTION
    H = config.linear_attn_config.num_heads

    def project(name, y=x):
        return y @ p[f"{name}.weight"].T

    def convolved(letter):
        return F.silu(short_conv(project(f"{letter}_proj"), p[f"{letter}_conv1d.weight"][:, 0])).unflatten(-1, (H, -1))

    q, k, v = l2norm(convolved("q")), l2norm(convolved("k")), convolved("v")
    f = project("f_b_proj", project("f_a_proj")).unflatten(-1, (H, -1))
    g = log_decay(f, p["A_log"], p["dt_bias"].view(H, -1))
    o, _ = kda_recurrent(q, k, v, g, torch.sigmoid(project("b_proj")))
    y = gated_norm(o, project("g_proj").unflatten(-1, (H, -1)), p["o_norm.weight"])
    return project("o_proj", y.flatten(2))
    ### END SOLUTION
# %%
checks.kda_layer(kda_layer)
# %% [markdown]
# ## Step 2. `mla_layer`
# The other mixer. The query has a small latent of its own: `q_a_proj`, RMSNorm with `q_a_layernorm.weight` (eps $10^{-6}$), `q_b_proj`, then cut into heads.
#
# Rows: `mla_latent` with `kv_a_proj_with_mqa.weight` and `kv_a_layernorm.weight`. Keys and values: `mla_expand` with `kv_b_proj.weight`,
# `config.num_attention_heads` and `config.qk_nope_head_dim`. Then `causal_attention`, the gate $\sigma(\text{g\_proj}\ x)$, and `o_proj`. x is normed already.
# Returns `[B, T, D]`.
#
# <details><summary>Hint</summary>
#
# `causal_attention` wants heads before time. `.transpose(1, 2).flatten(2)` brings `[B, H, T, V]` back to `[B, T, H*V]`.
# </details>
# %%
def mla_layer(x, p, config):
    """A Gated MLA layer, from a dict of weights with the released names."""
    ### BEGIN SOLUTION
    H, nope = config.num_attention_heads, config.qk_nope_head_dim
    q = rms_norm(x @ p["q_a_proj.weight"].T, p["q_a_layernorm.weight"], 1e-6) @ p["q_b_proj.weight"].T
    rows = mla_latent(x, p["kv_a_proj_with_mqa.weight"], p["kv_a_layernorm.weight"])
    k, v = mla_expand(rows, p["kv_b_proj.weight"], H, nope)
    o = causal_attention(q.unflatten(-1, (H, -1)).transpose(1, 2), k, v)
    gate = torch.sigmoid(x @ p["g_proj.weight"].T)
    return (gate * o.transpose(1, 2).flatten(2)) @ p["o_proj.weight"].T
    ### END SOLUTION
# %%
checks.mla_layer(mla_layer)
# %% [markdown]
# ## Step 3. `depth_stack`
# How sublayers are joined. There is no `h + f(h)`. Each sublayer *reads* a mix of all sources through its own reader, and *writes* its output:
#
# * at the start of a block (every `2 * block` sublayers, the very first included) the running sum becomes a stored source, and a new sum begins with this output,
# * otherwise the output is added to the running sum.
#
# The running sum begins as the embedding, and it is always the last source. After the last sublayer, one more reader mixes everything.
#
# `embedding [B, T, D]`, `sublayers` a list of functions, `readers` a list of `(query, gain)`, one for each sublayer and one for the end. Returns `[B, T, D]`.
# %%
def depth_stack(embedding, sublayers, readers, block):
    """Every sublayer reads depth and writes; the last reader mixes the result."""
    ### BEGIN SOLUTION
    stored, running = [], embedding
    for number, (f, reader) in enumerate(zip(sublayers, readers)):
        output = f(attention_residual(torch.stack([*stored, running], -2), *reader))
        if number % (2 * block) == 0:
            stored.append(running)
            running = output
        else:
            running = running + output
    return attention_residual(torch.stack([*stored, running], -2), *readers[-1])
    ### END SOLUTION
# %%
checks.depth_stack(depth_stack)
# %% [markdown]
# ## The skeleton
# These modules only hold weights, under the released names (the routed experts of a layer are stacked into three arrays). You don't need to write
# them, but read them: this is the list of all that a K3 learns.
# %%
def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class Weight(nn.Module):
    """One array: the gain of a norm, the taps of a convolution, a pseudo-query."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))


class KDA(nn.Module):
    def __init__(self, config):
        super().__init__()
        D, lin = config.hidden_size, config.linear_attn_config
        H, K, P = lin.num_heads, lin.head_dim, lin.num_heads * lin.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = (linear(D, P) for _ in range(4))
        taps = (Weight(P, 1, lin.short_conv_kernel_size) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = taps
        self.f_a_proj, self.f_b_proj, self.b_proj = linear(D, K), linear(K, P), linear(D, H)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(H)), nn.Parameter(torch.zeros(P))
        self.o_norm, self.o_proj = Weight(K), linear(P, D)
# %%
class MLA(nn.Module):
    def __init__(self, config):
        super().__init__()
        D, H, L, Q = config.hidden_size, config.num_attention_heads, config.kv_lora_rank, config.q_lora_rank
        N, R, V = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.q_a_proj, self.q_a_layernorm, self.q_b_proj = linear(D, Q), Weight(Q), linear(Q, H * (N + R))
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = linear(D, L + R), Weight(L)
        self.kv_b_proj, self.g_proj, self.o_proj = linear(L, H * (N + V)), linear(D, H * V), linear(H * V, D)


class MLP(nn.Module):
    def __init__(self, D, width):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(D, width), linear(D, width), linear(width, D)
# %%
class Router(nn.Module):
    def __init__(self, experts, D):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, D))
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))


class Experts(nn.Module):
    def __init__(self, E, width, L):
        super().__init__()
        self.w1, self.w3 = nn.Parameter(torch.zeros(E, width, L)), nn.Parameter(torch.zeros(E, width, L))
        self.w2 = nn.Parameter(torch.zeros(E, L, width))


class MoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        D, L, M = config.hidden_size, config.routed_expert_hidden_size, config.moe_intermediate_size
        self.gate, self.experts = Router(config.num_experts, D), Experts(config.num_experts, M, L)
        self.routed_expert_down_proj, self.routed_expert_norm = linear(D, L), Weight(L)
        self.routed_expert_up_proj = linear(L, D)
        self.shared_experts = MLP(D, config.num_shared_experts * M)
# %%
class Layer(nn.Module):
    def __init__(self, config, i):
        super().__init__()
        D = config.hidden_size
        self.self_attn = KDA(config) if config.is_kda_layer(i) else MLA(config)
        if config.is_moe_layer(i):
            self.block_sparse_moe = MoE(config)
        else:
            self.mlp = MLP(D, config.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = Weight(D), Weight(D)
        self.self_attention_res_norm, self.mlp_res_norm = Weight(D), Weight(D)
        self.self_attention_res_proj, self.mlp_res_proj = Weight(1, D), Weight(1, D)


class Body(nn.Module):
    def __init__(self, config):
        super().__init__()
        D = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, D)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm, self.output_attn_res_norm, self.output_attn_res_proj = Weight(D), Weight(D), Weight(1, D)
# %% [markdown]
# ## Step 4. `own_model`
# Write what happens between a token and a logit. `weights(module)` gives a module's arrays as the dict that your functions take.
#
# * `mix(layer, h)`: norm h with `input_layernorm`, then your `kda_layer` or `mla_layer`.
# * `think(layer, h)`: norm h with `post_attention_layernorm`, then `latent_moe`, or in the first layer the MLP `down(situ_glu(gate, up))`.
# * `forward(ids)`: look up the embedding, collect sublayers and readers (`res_proj.weight[0]` is the query, `res_norm.weight` the gain),
#   call `depth_stack` with `config.attn_res_block_size`, norm with `model.norm`, then `lm_head`. All eps are `config.rms_norm_eps`.
#
# `ids [B, T]`. Returns logits `[B, T, vocab]`. The check loads the trained weights by name and compares logits.
#
# <details><summary>Hint</summary>
#
# A sublayer is a function of h alone: `lambda h, a=layer: mix(a, h, config)`. Without `a=layer` a lambda made in a loop reads `layer` only when it is
# called, and all of them would run the last layer. `isinstance(layer.self_attn, KDA)` and `hasattr(layer, "mlp")` tell layers apart.
# </details>
# %%
def weights(module):
    return dict(module.state_dict(keep_vars=True))


def mix(layer, h, config):
    """The sublayer along time: a norm, then KDA or MLA."""
    ### BEGIN SOLUTION
    x = rms_norm(h, layer.input_layernorm.weight, config.rms_norm_eps)
    mixer = kda_layer if isinstance(layer.self_attn, KDA) else mla_layer
    return mixer(x, weights(layer.self_attn), config)
    ### END SOLUTION


def think(layer, h, config):
    """The feed-forward sublayer: a norm, then experts, or the MLP of a dense layer."""
    ### BEGIN SOLUTION
    x = rms_norm(h, layer.post_attention_layernorm.weight, config.rms_norm_eps)
    if hasattr(layer, "mlp"):
        return layer.mlp.down_proj(situ_glu(layer.mlp.gate_proj(x), layer.mlp.up_proj(x)))
    return latent_moe(x, weights(layer.block_sparse_moe), config.num_experts_per_token)
    ### END SOLUTION
# %%
class OwnK3(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.model = config, Body(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)

    def forward(self, ids):
        """Logits [B, T, vocab] of token ids [B, T]."""
        ### BEGIN SOLUTION
        sublayers, readers, c, m = [], [], self.config, self.model
        for layer in m.layers:
            sublayers += [lambda h, a=layer: mix(a, h, c), lambda h, a=layer: think(a, h, c)]
            readers += [(layer.self_attention_res_proj.weight[0], layer.self_attention_res_norm.weight)]
            readers += [(layer.mlp_res_proj.weight[0], layer.mlp_res_norm.weight)]
        readers += [(m.output_attn_res_proj.weight[0], m.output_attn_res_norm.weight)]
        h = depth_stack(m.embed_tokens(ids), sublayers, readers, c.attn_res_block_size)
        return self.lm_head(rms_norm(h, m.norm.weight, c.rms_norm_eps))
        ### END SOLUTION
# %%
checks.own_model(OwnK3)
# %% [markdown]
# ## Step 5. `greedy`
# Let it speak: take the likeliest next token, put it behind the text, and read again.
#
# `logits_of` is a function from `ids [1, T]` to logits `[1, T, vocab]`, `count` how many tokens to add. Returns `ids [1, T + count]`.
# %%
def greedy(logits_of, ids, count):
    """ids with the count likeliest tokens behind them."""
    ### BEGIN SOLUTION
    for _ in range(count):
        next_token = logits_of(ids)[:, -1].argmax(-1)
        ids = torch.cat([ids, next_token[:, None]], 1)
    return ids
    ### END SOLUTION
# %%
checks.greedy(greedy)
# %% [markdown]
# ## Step 6. Ask it
# Your model, the course's weights, the question that began the course. `load_mine` builds an `OwnK3` and gives it the arrays of
# `load_pretrained("meeting").state_dict()`, with torch's `load_state_dict`. Returns the model.
#
# The cell also asks about notes of your own, drawn from a seed: the environment variable `K3_SEED`, if your course gives you one.
#
# > **Predict.** The notes say Tuesday, the update Thursday. You wrote every step in between. What will it say?
# %%
def load_mine():
    """An OwnK3 of the size K3Config.meeting(), with the trained weights in it."""
    ### BEGIN SOLUTION
    mine = OwnK3(K3Config.meeting())
    mine.load_state_dict(load_pretrained("meeting").state_dict())
    return mine
    ### END SOLUTION
# %%
checks.thursday(lambda ids: load_mine()(ids))

own = story.tell(checks.seed_in_use())
for notes, question in ((f"{own.notes} {own.update}", own.question), (" ".join(meeting.ARTICLE), meeting.question("day"))):
    with torch.no_grad():
        answer = greedy(load_mine(), torch.tensor([meeting.encode(f"{notes} {question}")]), 2)
    print(f"{notes}\n{question} {meeting.decode(answer[0, -2:].tolist())}\n")
# %% [markdown]
# ## What you have built
# A K3. It is small, and it holds every part of the large one: the whiteboard with its dials, exact recall, the choice over depth, experts behind a
# latent, and weights that a checkpoint fills by name. `minimodel/model.py` is the course's own version; you can read all of it now.
