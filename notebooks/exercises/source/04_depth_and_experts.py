# %% [markdown]
# # Exercise 4. Depth and experts
#
# Two parts. *Attention Residuals*: a layer chooses what it reads from earlier layers. *Stable LatentMoE*: a word visits a few of many experts.
#
# Letters: `N` sources, `S` tokens in one row (a batch laid flat), `E` experts, `k` experts a token, `L` numbers of a latent.
# %%
import torch

from minimodel import checks


def rms_norm(x, gain, eps):
    """Yours from exercise 1 does the same."""
    return gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
# %% [markdown]
# ## Step 1. `attention_residual`
# A layer has a learned *pseudo-query* $w$. It compares it with every earlier output (*source*) and reads a mix of them:
#
# $$h = \sum_i p_i\, v_i \qquad p = \text{softmax}_i\big(w \cdot \text{RMSNorm}(v_i)\big)$$
#
# The norm has a gain, eps is $10^{-5}$. The values $v_i$ themselves are not normed. `sources [T, N, D]`, `query [D]`, `gain [D]`. Returns `h [T, D]`.
#
# > **Predict.** Training starts with $w = 0$. What does a layer read then?
# %%
def attention_residual(sources, query, gain):
    """A mix of the sources of each token, weighed by how they match the query."""
    ### BEGIN SOLUTION
    p = (rms_norm(sources, gain, 1e-5) @ query).softmax(-1)
    return (p[..., None] * sources).sum(-2)
    ### END SOLUTION
# %%
checks.attention_residual(attention_residual)
# %% [markdown]
# ## Step 2. `depth_sources`
# Which sources are there? First the embedding. Then outputs are summed over blocks of `block` *layers*; a layer has two sublayers
# (attention and feed-forward), so a block is the sum of `2 * block` outputs. The unfinished block is a source too: the last one.
#
# `embedding [T, D]`, `outputs [M, T, D]` of the M sublayers so far. Returns `sources [N, T, D]`, oldest first.
#
# <details><summary>Hint</summary>
#
# `outputs.split(size)` cuts along the first axis. With no outputs it gives one empty piece, which is not a source.
# </details>
# %%
def depth_sources(embedding, outputs, block):
    """The embedding, the sums of finished blocks, the sum so far."""
    ### BEGIN SOLUTION
    blocks = [part.sum(0) for part in outputs.split(2 * block) if len(part)]
    return torch.stack([embedding, *blocks])
    ### END SOLUTION
# %%
checks.depth_sources(depth_sources)
# %% [markdown]
# ## Step 3. `situ_glu`
# K3's activation. For small numbers it is SwiGLU; for large ones it bends, so that nothing explodes.
#
# $$y = 4 \tanh\!\left(\tfrac{a}{4}\right) \sigma(a) \cdot 25 \tanh\!\left(\tfrac{b}{25}\right)$$
#
# `gate` is $a$, `up` is $b$, both `[T, F]`. Returns `[T, F]`.
# %%
def situ_glu(gate, up):
    """SiTU-GLU: a gated activation that never leaves -100 to 100."""
    ### BEGIN SOLUTION
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
    ### END SOLUTION
# %%
checks.situ_glu(situ_glu)
# %% [markdown]
# ## Step 4. `route`
# Which experts does a token visit? Those with the largest *biased* score. How much does each count? By its *unbiased* score:
#
# $$T = \text{top-}k(s + b) \qquad p_j = \frac{s_j}{\sum_{i \in T} s_i}$$
#
# `scores [S, E]` are sigmoids, `bias [E]`, `top_k` a number. Returns `weights [S, k]` and `indices [S, k]`, in any order.
#
# <details><summary>Hint</summary>
#
# `x.topk(k, -1).indices`, then `scores.gather(-1, indices)`.
# </details>
# %%
def route(scores, bias, top_k):
    """Mixture weights and expert indices of every token."""
    ### BEGIN SOLUTION
    indices = (scores + bias).topk(top_k, -1).indices
    weights = scores.gather(-1, indices)
    return weights / weights.sum(-1, keepdim=True), indices
    ### END SOLUTION
# %%
checks.route(route)
# %% [markdown]
# ## Step 5. `routed_experts`
# Run every expert once, on the tokens that chose it, and add up: $u = \sum_j p_j\, E_j(z)$. An expert is a gated MLP:
#
# $$E_j(z) = W2_j\; \text{SiTU-GLU}(W1_j\, z,\; W3_j\, z)$$
#
# `z [S, L]`, `weights` and `indices [S, k]`, `w1, w3 [E, F, L]`, `w2 [E, L, F]`. Returns `u [S, L]`.
#
# <details><summary>Hint</summary>
#
# `token, slot = (indices == e).nonzero(as_tuple=True)` are the places where expert e was chosen. `u.index_add(0, token, y)` adds rows.
# </details>
# %%
def routed_experts(z, weights, indices, w1, w3, w2):
    """The weighted sum of each token's experts."""
    ### BEGIN SOLUTION
    u = torch.zeros_like(z)
    for e in range(len(w1)):
        token, slot = (indices == e).nonzero(as_tuple=True)
        y = situ_glu(z[token] @ w1[e].T, z[token] @ w3[e].T) @ w2[e].T
        u = u.index_add(0, token, weights[token, slot][:, None] * y)
    return u
    ### END SOLUTION
# %%
checks.routed_experts(routed_experts)
# %% [markdown]
# ## Step 6. `latent_moe`
# The layer. The router reads the full x, the experts a latent of it. Two shared experts (one MLP of twice the width) read the full x.
#
# $$z = W_\downarrow x \qquad y = \text{shared}(x) + W_\uparrow\, \text{RMSNorm}\Big(\sum_j p_j E_j(z)\Big)$$
#
# `x [B, T, D]`, `p` is a dict of weights, `top_k` a number. Scores are $\sigma(W x)$ with `gate.weight [E, D]`; the bias is
# `gate.e_score_correction_bias`. The others: `routed_expert_down_proj.weight`, `routed_expert_norm.weight` (a gain, eps $10^{-5}$),
# `routed_expert_up_proj.weight`, `experts.w1`, `experts.w3`, `experts.w2`, and `shared_experts.gate_proj.weight`, `.up_proj.weight`, `.down_proj.weight`.
# Returns `[B, T, D]`.
#
# <details><summary>Hint</summary>
#
# A weight `[out, in]` is applied as `x @ weight.T`. `x.flatten(0, 1)` lays the batch flat, `y.view_as(x)` undoes it.
# </details>
# %%
def latent_moe(x, p, top_k):
    """Stable LatentMoE, from a dict of weights with the released names."""
    ### BEGIN SOLUTION
    flat = x.flatten(0, 1)
    scores = torch.sigmoid(flat @ p["gate.weight"].T)
    weights, indices = route(scores, p["gate.e_score_correction_bias"], top_k)
    z = flat @ p["routed_expert_down_proj.weight"].T
    u = routed_experts(z, weights, indices, p["experts.w1"], p["experts.w3"], p["experts.w2"])
    u = rms_norm(u, p["routed_expert_norm.weight"], 1e-5)
    gate, up = (flat @ p[f"shared_experts.{name}_proj.weight"].T for name in ("gate", "up"))
    shared = situ_glu(gate, up) @ p["shared_experts.down_proj.weight"].T
    return (shared + u @ p["routed_expert_up_proj.weight"].T).view_as(x)
    ### END SOLUTION
# %%
checks.latent_moe(latent_moe)
# %% [markdown]
# ## Step 7. `quantile_bias`
# Some experts are popular. Quantile Balancing asks: with which bias would each expert have had its share, $q = S k / E$ tokens (rounded down)?
#
# 1. A token's *cutoff* is its $(k+1)$-th largest biased score, the best that was not chosen.
# 2. The *margin* of a token and an expert is score minus cutoff. Sort each expert's margins, largest first.
# 3. The new bias is minus the $(q+1)$-th largest margin. Take its mean over all experts off.
#
# `scores [S, E]`, `bias [E]` (the one used in this step), `top_k`. Returns the next `bias [E]`.
# %%
def quantile_bias(scores, bias, top_k):
    """The bias that would have given every expert its share."""
    ### BEGIN SOLUTION
    S, E = scores.shape
    cutoff = (scores + bias).topk(top_k + 1, -1).values[:, -1]
    margins = (scores - cutoff[:, None]).sort(0, descending=True).values
    b = -margins[S * top_k // E]
    return b - b.mean()
    ### END SOLUTION
# %%
checks.quantile_bias(quantile_bias)
# %% [markdown]
# ## What you have built
# The rule at work, with the course's own functions: a router that likes some experts too much, before and after one update.
# %%
import minimodel

random = torch.Generator().manual_seed(0)
scores = torch.sigmoid(torch.randn(512, 8, generator=random, dtype=torch.float64) + torch.linspace(-1, 1, 8))
bias = torch.zeros(8, dtype=torch.float64)
for name in ("before", "after"):
    _, indices, _ = minimodel.route(scores, bias, 2)
    print(f"{name:<7} tokens of each expert: {torch.bincount(indices.flatten(), minlength=8).tolist()}")
    bias = minimodel.quantile_bias(scores, bias, 2)
# %% [markdown]
# Use your own `route` and `quantile_bias` in it. Sources: K3 report, 2.2 and 2.3; `minimodel/attention_residuals.py`, `latent_moe.py`, `routing.py`.
