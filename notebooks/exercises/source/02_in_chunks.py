# %% [markdown]
# # Exercise 2. The same whiteboard, in chunks
#
# A loop over tokens leaves a GPU idle: each step is small and waits for the one before. Here you cut time into chunks of `C` tokens.
# From chunk to chunk the board is handed on. Inside a chunk everything becomes a matrix product. The result is the same, number by number.
#
# Arrays of one chunk have their heads before time, `[B, H, C, ...]`, so that a head's matrices are the last two axes. $S$ is the board before the chunk.
# %%
import torch

from minimodel import K3Config, checks
# %% [markdown]
# ## Step 1. `running_decay`
# How much has a row faded since its chunk began? Shares multiply, so their logarithms add:
#
# $$G_t = \sum_{s \le t} g_s \quad \text{from the first token of the chunk, } t \text{ included}$$
#
# `g [B, T, H, K]`, `chunk` is C. Returns `G [B, T, H, K]`; the sum starts again at tokens 0, C, 2C, ... The last chunk may be shorter.
#
# <details><summary>Hint</summary>
#
# `g.split(chunk, 1)` gives the chunks, `cumsum(1)` sums along time, `torch.cat(..., 1)` joins them again.
# </details>
# %%
def running_decay(g, chunk):
    """The sum of g since the start of each token's chunk."""
    ### BEGIN SOLUTION
    return torch.cat([part.cumsum(1) for part in g.split(chunk, 1)], 1)
    ### END SOLUTION
# %%
checks.running_decay(running_decay)
# %% [markdown]
# ## Step 2. `overlaps`
# Token $i$ erases what its key finds on the board. Some of that was written by earlier tokens $j$ of the same chunk, and has faded since:
#
# $$L_{ij} = \beta_i \sum_c k_{ic} \, k_{jc} \, e^{G_{ic} - G_{jc}} \quad \text{for } j < i, \text{ else } 0$$
#
# As a product of matrices: $L = \text{StrictTril}\big(\mathrm{Diag}(\beta)\, (e^G k)\, (e^{-G} k)^\top\big)$.
# `k, G [B, H, C, K]`, `beta [B, H, C]`. Returns `L [B, H, C, C]`.
#
# > **Predict.** $e^{-G}$ grows. With K3's bound on $g$ and a chunk of 16 tokens, how large can it get, and does float32 hold it? The end says.
#
# <details><summary>Hint</summary>
#
# `.mT` swaps the last two axes. `.tril(-1)` keeps what is below the diagonal.
# </details>
# %%
def overlaps(k, G, beta):
    """How strongly each token erases what earlier tokens of its chunk wrote."""
    ### BEGIN SOLUTION
    products = (G.exp() * k) @ ((-G).exp() * k).mT
    return (beta[..., None] * products).tril(-1)
    ### END SOLUTION
# %%
checks.overlaps(overlaps)
# %% [markdown]
# ## Step 3. `corrected`
# A write changes what later tokens erase, which changes what *they* write. All these corrections at once are one triangular inverse:
#
# $$M = (I + L)^{-1} \mathrm{Diag}(\beta) \qquad W = M\,(e^G k) \qquad U = M\,v$$
#
# Then $E = U - W S$ is what each token really puts on the board. `k, G [B, H, C, K]`, `v [B, H, C, V]`, `beta [B, H, C]`, `L [B, H, C, C]`.
# Returns `W [B, H, C, K]` and `U [B, H, C, V]`.
#
# <details><summary>Hint</summary>
#
# `torch.linalg.solve_triangular(I + L, X, upper=False)` is (I + L)^-1 X. `torch.eye(C, dtype=L.dtype)` is I.
# </details>
# %%
def corrected(k, v, G, beta, L):
    """W and U: keys and values after the corrections inside the chunk."""
    ### BEGIN SOLUTION
    eye = torch.eye(L.shape[-1], dtype=L.dtype)
    W = torch.linalg.solve_triangular(eye + L, beta[..., None] * G.exp() * k, upper=False)
    U = torch.linalg.solve_triangular(eye + L, beta[..., None] * v, upper=False)
    return W, U
    ### END SOLUTION
# %%
checks.corrected(corrected)
# %% [markdown]
# ## Step 4. `chunk_output`
# A query reads two things: the board from before the chunk, faded, and what this chunk's tokens have written up to now, its own token included.
#
# $$O = (e^G q)\, S + \text{Tril}\big((e^G q)(e^{-G} k)^\top\big)\,(U - W S)$$
#
# `q, k, G [B, H, C, K]` (q is scaled already), `S [B, H, K, V]`, `W [B, H, C, K]`, `U [B, H, C, V]`. Returns `O [B, H, C, V]`.
# %%
def chunk_output(q, k, G, S, W, U):
    """What the tokens of a chunk read."""
    ### BEGIN SOLUTION
    scores = ((G.exp() * q) @ ((-G).exp() * k).mT).tril()
    return (G.exp() * q) @ S + scores @ (U - W @ S)
    ### END SOLUTION
# %%
checks.chunk_output(chunk_output)
# %% [markdown]
# ## Step 5. `chunk_state`
# The board that goes on to the next chunk. The old one has faded for the whole chunk; each write fades from its own token to the end.
#
# $$S' = \mathrm{Diag}(e^{G_C})\, S + (e^{G_C - G}\, k)^\top (U - W S)$$
#
# $G_C$ is the last row of $G$. Returns `S [B, H, K, V]`.
#
# <details><summary>Hint</summary>
#
# `G[..., -1:, :]` keeps the time axis, `G[..., -1, :, None]` makes a column that multiplies the rows of S.
# </details>
# %%
def chunk_state(k, G, S, W, U):
    """The board after a chunk."""
    ### BEGIN SOLUTION
    left = (G[..., -1:, :] - G).exp() * k
    return G[..., -1, :, None].exp() * S + left.mT @ (U - W @ S)
    ### END SOLUTION
# %%
checks.chunk_state(chunk_state)
# %% [markdown]
# ## Step 6. `kda_chunked`
# Put it together: start with an empty board, go from chunk to chunk. The shapes are those of `kda_recurrent`: `q, k, g [B, T, H, K]`,
# `v [B, T, H, V]`, `beta [B, T, H]`. Scale the query by $K^{-1/2}$. Returns `o [B, T, H, V]` and `S [B, H, K, V]`.
# The check compares with the loop over tokens.
#
# <details><summary>Hint</summary>
#
# `x.transpose(1, 2)` brings heads before time, and back. `zip(*(x.split(chunk, 1) for x in (q, k, v, G, beta)))` goes through all chunks together.
# </details>
# %%
def kda_chunked(q, k, v, g, beta, chunk):
    """KDA over time with one loop step a chunk."""
    ### BEGIN SOLUTION
    (B, T, H, K), V = q.shape, v.shape[-1]
    S, outputs = q.new_zeros(B, H, K, V), []
    arrays = (q * K**-0.5, k, v, running_decay(g, chunk), beta)
    for parts in zip(*(x.split(chunk, 1) for x in arrays)):
        q_c, k_c, v_c, G, beta_c = (x.transpose(1, 2) for x in parts)
        W, U = corrected(k_c, v_c, G, beta_c, overlaps(k_c, G, beta_c))
        outputs.append(chunk_output(q_c, k_c, G, S, W, U).transpose(1, 2))
        S = chunk_state(k_c, G, S, W, U)
    return torch.cat(outputs, 1), S
    ### END SOLUTION
# %%
checks.kda_chunked(kda_chunked)
# %% [markdown]
# ## What you have built
# The form in which KDA is trained. The loop is now `T / C` steps long, and its steps are large products, which a GPU likes.
# K3's bound on the decay is what allows the plain product in step 2:
# %%
bound, tile = K3Config.k3().linear_attn_config.gate_lower_bound, 16
largest = torch.tensor(-bound * tile).exp().item()
print(f"A tile of {tile} tokens has factors of at most exp({-bound * tile:g}) = {largest:.1e}.")
print(f"float32 ends at {torch.finfo(torch.float32).max:.1e}, float16 at {torch.finfo(torch.float16).max:.1e}.")
# %% [markdown]
# Sources: Kimi Linear report, Eq. 6 to 9; K3 report, Eq. 3 and 4; `minimodel/delta_rule/chunked.py` is the course's own version.
