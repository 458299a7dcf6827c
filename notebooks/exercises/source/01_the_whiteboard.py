# %% [markdown]
# # Exercise 1. Build the whiteboard
#
# In this notebook you write Kimi Delta Attention (KDA), the layer that remembers on a whiteboard of fixed size. Eight small functions, each a few lines.
#
# How it works: run the cells from the top, with Shift + Enter. A cell asks for a function: replace its line `raise NotImplementedError` by your own,
# run the cell again, then the check below it. The check compares your function with the course's own on five inputs. It says *right*, or what broke and which slip is likely.
#
# Letters: `B` sequences in a batch, `T` tokens, `D` numbers of a token, `H` heads, `K` key channels and `V` value channels of a head.
# `x [B, T, D]` reads: the array x has these three axes.
# %%
import torch
import torch.nn.functional as F

from minimodel import checks
# %% [markdown]
# ## Step 1. `l2norm`
# A key says *where* on the board to write. Only its direction should count, so queries and keys get length 1.
#
# $$y = \frac{x}{\sqrt{\sum_i x_i^2 + 10^{-6}}}$$
#
# `x [B, T, K]`, the sum runs over the last axis. Returns the same shape.
#
# <details><summary>Hint</summary>
#
# `torch.rsqrt(s)` is one over the root of s. `keepdim=True` keeps an axis of size 1 that broadcasts.
# </details>
# %%
def l2norm(x):
    """x [B, T, K] with every key brought to length 1."""
    ### BEGIN SOLUTION
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    ### END SOLUTION
# %%
checks.l2norm(l2norm)
# %% [markdown]
# ## Step 2. `rms_norm`
# The norm in front of every layer. It brings the *mean* square to 1 and has a learned gain.
#
# $$y = \text{gain} \cdot \frac{x}{\sqrt{\frac{1}{D} \sum_i x_i^2 + \text{eps}}}$$
#
# `x [B, T, D]`, `gain [D]`, `eps` a number. Returns `[B, T, D]`.
#
# <details><summary>Hint</summary>
#
# It is `l2norm` with a mean in place of the sum. Nothing is subtracted.
# </details>
# %%
def rms_norm(x, gain, eps):
    """gain * x / sqrt(mean(x^2) + eps) over the last axis."""
    ### BEGIN SOLUTION
    return gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    ### END SOLUTION
# %%
checks.rms_norm(rms_norm)
# %% [markdown]
# ## Step 3. `short_conv`
# Before a word is written, it may look at its neighbors: every channel is a weighted sum over the last $W$ tokens (4 in K3).
#
# $$y_t = \sum_{i=0}^{W-1} w_i \, x_{t-W+1+i}$$
#
# The last tap multiplies the current token. Before the first token there are zeros. `x [B, T, P]`, `weight [P, W]`. Returns `[B, T, P]`.
#
# <details><summary>Hint</summary>
#
# `F.pad(x, (0, 0, W - 1, 0))` puts W - 1 rows of zeros in front of the time axis. Then add W shifted slices.
# </details>
# %%
def short_conv(x, weight):
    """A causal convolution of each channel with its own W taps."""
    ### BEGIN SOLUTION
    W, T = weight.shape[1], x.shape[1]
    padded = F.pad(x, (0, 0, W - 1, 0))
    return sum(padded[:, i : i + T] * weight[:, i] for i in range(W))
    ### END SOLUTION
# %%
checks.short_conv(short_conv)
# %% [markdown]
# ## Step 4. `log_decay`
# How fast does each row of the board fade? K3 gives every channel of every head a dial of its own, with a bound.
#
# $$g = -5 \; \sigma\!\big(e^{A} (f + \text{bias})\big)$$
#
# $\alpha = e^g$ is the share that is kept. With $g > -5$ no channel loses more than a factor $e^5$ in one step.
# `f [B, T, H, K]`, `A_log [H]` (that is $A$, one number a head), `dt_bias [H, K]`. Returns `g [B, T, H, K]`, the logarithm.
#
# <details><summary>Hint</summary>
#
# `A_log.exp()[:, None]` has shape `[H, 1]` and broadcasts over the channels.
# </details>
# %%
def log_decay(f, A_log, dt_bias):
    """K3's bounded log-decay, between -5 and 0."""
    ### BEGIN SOLUTION
    return -5 * torch.sigmoid(A_log.exp()[:, None] * (f + dt_bias))
    ### END SOLUTION
# %%
checks.log_decay(log_decay)
# %% [markdown]
# ## Step 5. `write_strength`
# How strongly is a word written? One number between 0 and 1 for each head.
#
# $$\beta = \sigma(W_b \, x)$$
#
# `x [B, T, D]`, `weight [H, D]`. Returns `beta [B, T, H]`.
# %%
def write_strength(x, weight):
    """One beta a token and head."""
    ### BEGIN SOLUTION
    return torch.sigmoid(x @ weight.T)
    ### END SOLUTION
# %%
checks.write_strength(write_strength)
# %% [markdown]
# ## Step 6. `kda_step`
# The heart of it: one token edits the board `S [H, K, V]`, then reads it. Three moves, in this order:
#
# 1. **fade**: $S \leftarrow \mathrm{Diag}(e^g)\, S$, each of the K rows by its own share,
# 2. **erase and write**: what does the board hold for this key? $r = S^\top k$. Put in a part of the difference: $S \leftarrow S + k\,\beta\,(v - r)^\top$,
# 3. **read**: $o = S^\top q$.
#
# `q, k, g [H, K]`, `v [H, V]`, `beta [H]`. Returns `o [H, V]` and the new `S [H, K, V]`. The old `S` must stay as it is.
#
# > **Predict.** What does the board hold under the key $k$ after this step, if $\beta = 1$?
#
# <details><summary>Hint</summary>
#
# `(k[:, None] @ S).squeeze(1)` is S^T k of every head. `k[..., None] * e[:, None]` is the outer product of k and e.
# </details>
# %%
def kda_step(S, q, k, v, g, beta):
    """Fade, erase, write, read. Returns o [H, V] and S [H, K, V]."""
    ### BEGIN SOLUTION
    S = g.exp()[..., None] * S
    error = v - (k[:, None] @ S).squeeze(1)
    S = S + k[..., None] * (beta[:, None] * error)[:, None]
    return (q[:, None] @ S).squeeze(1), S
    ### END SOLUTION
# %%
checks.kda_step(kda_step)
# %% [markdown]
# ## Step 7. `kda_recurrent`
# Now all tokens of a batch, one after the other. Start with an empty board. The query is scaled by $K^{-1/2}$.
#
# `q, k, g [B, T, H, K]`, `v [B, T, H, V]`, `beta [B, T, H]`. Returns `o [B, T, H, V]` and the last board `S [B, H, K, V]`.
#
# <details><summary>Hint</summary>
#
# Call your `kda_step` for every b and t. `q.new_zeros(H, K, V)` has the type of q.
# `torch.stack` joins a list of arrays along a new axis.
# </details>
# %%
def kda_recurrent(q, k, v, g, beta):
    """kda_step over time, every sequence from an empty board."""
    ### BEGIN SOLUTION
    (B, T, H, K), V = q.shape, v.shape[-1]
    outputs, boards = [], []
    for b in range(B):
        S, row = q.new_zeros(H, K, V), []
        for t in range(T):
            o, S = kda_step(S, q[b, t] * K**-0.5, k[b, t], v[b, t], g[b, t], beta[b, t])
            row.append(o)
        outputs.append(torch.stack(row))
        boards.append(S)
    return torch.stack(outputs), torch.stack(boards)
    ### END SOLUTION
# %%
checks.kda_recurrent(kda_recurrent)
# %% [markdown]
# ## Step 8. `gated_norm`
# What a head read is brought to one size, then a gate decides how much of it goes on.
#
# $$y = \text{RMSNorm}(o) \cdot \sigma(\text{gate})$$
#
# `o, gate [B, T, H, V]`, `gain [V]` for all heads, eps is $10^{-5}$. Each head has a norm of its own. Returns `[B, T, H, V]`.
#
# <details><summary>Hint</summary>
#
# Your `rms_norm` works over the last axis, whatever stands before it.
# </details>
# %%
def gated_norm(o, gate, gain):
    """The norm of every head, then its gate."""
    ### BEGIN SOLUTION
    return rms_norm(o, gain, 1e-5) * torch.sigmoid(gate)
    ### END SOLUTION
# %%
checks.gated_norm(gated_norm)
# %% [markdown]
# ## What you have built
# All parts of a KDA layer. In exercise 6 you put them together. The board has `K x V` numbers a head, after ten words or after a million.
# What it costs: a loop over tokens. Exercise 2 gets rid of it.
#
# Sources: K3 report, Eq. 1, 2, 5 and 6; `minimodel/delta_rule/recurrent.py` is the course's own version.
