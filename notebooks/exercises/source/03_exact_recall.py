# %% [markdown]
# # Exercise 3. Exact recall, and what it costs
#
# A whiteboard blurs when too much is written on it. So every fourth layer of K3 keeps a row for every word and looks it up exactly: Gated MLA.
# The row is small, a *latent* that all heads share. First you write the layer's parts, then you read the bill.
#
# Letters: a query has `N` channels of its own and `R` extra ones, a value has `V`, a latent has `L` numbers.
# %%
import torch

from minimodel import K3Config, checks
from minimodel.formats import format_bytes


def rms_norm(x, gain, eps):
    """Yours from exercise 1 does the same."""
    return gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
# %% [markdown]
# ## Step 1. `mla_latent`
# The row that a token leaves in the cache: a normed latent, and an extra key as it is.
#
# $$[c \mid e] = W\,x \qquad \text{row} = [\text{RMSNorm}(c) \mid e]$$
#
# `x [B, T, D]`, `weight [L+R, D]`, `gain [L]`, eps is $10^{-6}$ here. Returns `rows [B, T, L+R]`.
#
# <details><summary>Hint</summary>
#
# `len(gain)` is L. `y.tensor_split([L], -1)` cuts the last axis in two at L.
# </details>
# %%
def mla_latent(x, weight, gain):
    """The cached rows: RMSNorm(c) and e."""
    ### BEGIN SOLUTION
    c, e = (x @ weight.T).tensor_split([len(gain)], -1)
    return torch.cat([rms_norm(c, gain, 1e-6), e], -1)
    ### END SOLUTION
# %%
checks.mla_latent(mla_latent)
# %% [markdown]
# ## Step 2. `mla_expand`
# From the rows, every head makes keys and values of its own: $[k \mid v]_h = W_h\, c$. The extra key is the same for all heads: $k_h = [k_h \mid e]$.
#
# `rows [B, T, L+R]`, `weight [heads*(N+V), L]` grouped by head (head 0's N key rows, its V value rows, then head 1's), `heads`, `nope` is N.
# Returns `k [B, heads, T, N+R]` and `v [B, heads, T, V]`.
#
# <details><summary>Hint</summary>
#
# `y.unflatten(-1, (heads, -1)).transpose(1, 2)` makes `[B, heads, T, N+V]`. `e[:, None].expand(-1, heads, -1, -1)` repeats e without copying it.
# </details>
# %%
def mla_expand(rows, weight, heads, nope):
    """Keys and values of every head, from the cached rows."""
    ### BEGIN SOLUTION
    c, e = rows.tensor_split([weight.shape[-1]], -1)
    up = (c @ weight.T).unflatten(-1, (heads, -1)).transpose(1, 2)
    k, v = up.tensor_split([nope], -1)
    return torch.cat([k, e[:, None].expand(-1, heads, -1, -1)], -1), v
    ### END SOLUTION
# %%
checks.mla_expand(mla_expand)
# %% [markdown]
# ## Step 3. `causal_attention`
# Every token looks at itself and at all tokens before it.
#
# $$o_t = \sum_{s \le t} \text{softmax}_s\!\left(\frac{q_t \cdot k_s}{\sqrt{N+R}}\right) v_s$$
#
# `q, k [B, H, T, N+R]`, `v [B, H, T, V]`. Returns `o [B, H, T, V]`. The width of a query is `q.shape[-1]`.
#
# <details><summary>Hint</summary>
#
# `torch.ones(T, T, dtype=torch.bool).triu(1)` is True where a token would see the future. `masked_fill(mask, -torch.inf)` hides these scores.
# </details>
# %%
def causal_attention(q, k, v):
    """Softmax attention to the past."""
    ### BEGIN SOLUTION
    scores = q @ k.mT * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v
    ### END SOLUTION
# %%
checks.causal_attention(causal_attention)
# %% [markdown]
# ## Step 4. `output_gate`
# A gate for every channel of every head decides how much of what was recalled goes on. It reads the layer's *normed* input.
#
# $$y = \sigma\big(W_g\, \text{RMSNorm}(x)\big) \cdot o$$
#
# `o [B, T, H, V]`, `x [B, T, D]` before its norm, `norm_gain [D]` (eps is $10^{-5}$), `weight [H*V, D]`. Returns `[B, T, H, V]`.
#
# > **Predict.** KDA norms its output before the gate. MLA does not. What can the gate do here that it cannot do there?
# %%
def output_gate(o, x, norm_gain, weight):
    """A sigmoid gate on every channel of the output."""
    ### BEGIN SOLUTION
    gate = rms_norm(x, norm_gain, 1e-5) @ weight.T
    return torch.sigmoid(gate).unflatten(-1, o.shape[-2:]) * o
    ### END SOLUTION
# %%
checks.output_gate(output_gate)
# %% [markdown]
# ## Step 5. `absorbed_decode`
# For one new token it would be a waste to expand a long cache. Move the query into the latent space instead, and the result back out:
#
# $$\hat q_h = W_{K,h}^\top q_h \qquad s = \frac{\hat q_h \cdot c + q^{\text{extra}} \cdot e}{\sqrt{N+R}} \qquad o_h = W_{V,h} \sum_t \text{softmax}_t(s)\, c_t$$
#
# `q [B, H, N+R]` of the newest token, `rows [B, T, L+R]` (its own row included), `weight` and `nope` as in step 2. Returns `o [B, H, V]`.
# Do not call `mla_expand`: nothing of size `heads * T * N` should be made.
#
# <details><summary>Hint</summary>
#
# `weight.unflatten(0, (H, -1)).tensor_split([nope], 1)` gives `[H, N, L]` and `[H, V, L]`. Write each product as an einsum: `"bhn,hnl->bhl"` moves the query.
# </details>
# %%
def absorbed_decode(q, rows, weight, nope):
    """Attention of one token, in the latent space."""
    ### BEGIN SOLUTION
    c, e = rows.tensor_split([weight.shape[-1]], -1)
    up_k, up_v = weight.unflatten(0, (q.shape[1], -1)).tensor_split([nope], 1)
    q_latent = torch.einsum("bhn,hnl->bhl", q[..., :nope], up_k)
    scores = q_latent @ c.mT + q[..., nope:] @ e.mT
    p = (scores * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("bhl,hvl->bhv", p @ c, up_v)
    ### END SOLUTION
# %%
checks.absorbed_decode(absorbed_decode)
# %% [markdown]
# ## Step 6. `mha_bytes`
# Now the bill. Suppose that all layers were plain attention: every layer keeps a key and a value for every head and every token.
# Both have `config.qk_nope_head_dim` numbers. There are `config.num_hidden_layers` layers and `config.num_attention_heads` heads.
#
# `config` is a `K3Config`, `tokens` how many were read, `number_bytes` the bytes of a number. Returns an integer.
# %%
def mha_bytes(config, tokens, number_bytes):
    """Bytes of keys and values, if every layer were multi-head attention."""
    ### BEGIN SOLUTION
    numbers = 2 * config.num_attention_heads * config.qk_nope_head_dim
    return config.num_hidden_layers * numbers * tokens * number_bytes
    ### END SOLUTION
# %%
checks.mha_bytes(mha_bytes)
# %% [markdown]
# ## Step 7. `mla_bytes`
# What grows in K3: its MLA layers keep one row a token, with `config.kv_lora_rank` (L) and `config.qk_rope_head_dim` (R) numbers.
# `config.mixer(i)` says what layer i is, `"kda"` or `"mla"`. Returns an integer.
# %%
def mla_bytes(config, tokens, number_bytes):
    """Bytes of all rows in the MLA layers."""
    ### BEGIN SOLUTION
    layers = [config.mixer(i) for i in range(config.num_hidden_layers)].count("mla")
    return layers * (config.kv_lora_rank + config.qk_rope_head_dim) * tokens * number_bytes
    ### END SOLUTION
# %%
checks.mla_bytes(mla_bytes)
# %% [markdown]
# ## Step 8. `kda_bytes`
# What does not grow: each KDA layer keeps, for each head, a board of `head_dim x head_dim` numbers, always in float32 (4 bytes).
# Its three convolutions (query, key, value) keep the last `W - 1` projections, `num_heads * head_dim` numbers each, with `number_bytes` bytes.
#
# The sizes stand in `config.linear_attn_config`: `num_heads`, `head_dim`, `short_conv_kernel_size` (W). Returns an integer.
# %%
def kda_bytes(config, number_bytes):
    """Bytes of the boards and the convolutions' tails, whatever the length."""
    ### BEGIN SOLUTION
    lin = config.linear_attn_config
    layers = [config.mixer(i) for i in range(config.num_hidden_layers)].count("kda")
    board = lin.num_heads * lin.head_dim**2 * 4
    tail = 3 * (lin.short_conv_kernel_size - 1) * lin.num_heads * lin.head_dim * number_bytes
    return layers * (board + tail)
    ### END SOLUTION
# %%
checks.kda_bytes(kda_bytes)
# %% [markdown]
# ## What you have built
# The bill of the real K3 for one session of the longest text that it takes, from the course's own accounting:
# %%
from minimodel import cache_bytes

k3 = K3Config.k3()
bill = cache_bytes(k3, k3.max_position_embeddings)
print(f"{bill.tokens:,} tokens: {format_bytes(bill.per_token * bill.tokens)} of rows, {format_bytes(bill.fixed)} of boards and tails")
# %% [markdown]
# Put K3's config into your three functions and compare. Sources: K3 report, 2.1.2; `minimodel/mla.py` and `minimodel/accounting`.
