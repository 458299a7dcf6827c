# %% [markdown]
# # Exercise 5. Per-Head Muon and four-bit weights
#
# Two ideas about weights. *Per-Head Muon* trains them: every head gets an update of the same size, however loud its gradient is.
# *MXFP4* stores them: four bits a weight, and one scale for 32 neighbors.
# %%
import torch

from minimodel import checks
# %% [markdown]
# ## Step 1. `newton_schulz`
# A matrix stretches some directions more than others. Muon makes all stretches (singular values) nearly one, and keeps the directions.
# First divide by the norm (root of the sum of squares) of the matrix. Then five times:
#
# $$A = X X^\top \qquad X \leftarrow a X + (b A + c A^2) X \qquad a, b, c = 3.4445,\ -4.7750,\ 2.0315$$
#
# `G [H, m, n]` are H matrices, each for itself. Returns `X [H, m, n]`.
#
# <details><summary>Hint</summary>
#
# `torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True)` is the norm of each. `A @ A` is a product of matrices, `A * A` is not.
# </details>
# %%
def newton_schulz(G):
    """Each matrix with singular values near one."""
    ### BEGIN SOLUTION
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G / torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True)
    for _ in range(5):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X
    ### END SOLUTION
# %%
checks.newton_schulz(newton_schulz)
# %% [markdown]
# ## Step 2. `per_head_update`
# A query projection `M [heads*K, D]` has a block of K rows for each head. Cut it, make each block orthogonal on its own, and scale it:
#
# $$\text{update}_h = 0.2 \sqrt{\max(K, D)}\ \text{NS}(M_h)$$
#
# The scale gives an update about the size of AdamW's. Returns `[heads*K, D]`.
#
# > **Predict.** One head's momentum is fifty times larger than the others'. What would Newton-Schulz over the *whole* matrix do to the quiet heads?
#
# <details><summary>Hint</summary>
#
# `M.unflatten(0, (heads, -1))` is `[heads, K, D]`; `.flatten(0, 1)` undoes it.
# </details>
# %%
def per_head_update(M, heads):
    """One orthogonal update a head."""
    ### BEGIN SOLUTION
    blocks = M.unflatten(0, (heads, -1))
    return 0.2 * max(blocks.shape[1:]) ** 0.5 * newton_schulz(blocks).flatten(0, 1)
    ### END SOLUTION
# %%
checks.per_head_update(per_head_update)
# %% [markdown]
# ## Step 3. `muon_step`
# The whole step for one matrix, with $\mu$ the momentum:
#
# 1. $\text{buffer} \leftarrow \mu\, \text{buffer} + (1-\mu)\, G$, a running mean of gradients,
# 2. $M = (1-\mu)\, G + \mu\, \text{buffer}$ with the new buffer (Nesterov looks one step ahead),
# 3. $W \leftarrow (1 - \text{lr} \cdot \text{weight decay})\, W - \text{lr} \cdot \text{update}(M)$.
#
# `W, G, buffer [heads*K, D]`, the others are numbers. Returns the new `W` and `buffer`, without changing the old ones.
# %%
def muon_step(W, G, buffer, heads, lr, weight_decay, momentum):
    """One step of Per-Head Muon."""
    ### BEGIN SOLUTION
    buffer = momentum * buffer + (1 - momentum) * G
    M = (1 - momentum) * G + momentum * buffer
    return (1 - lr * weight_decay) * W - lr * per_head_update(M, heads), buffer
    ### END SOLUTION
# %%
checks.muon_step(muon_step)
# %% [markdown]
# ## Step 4. `mxfp4_scale`
# A four-bit number is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6, and its sign. A block of 32 weights shares a scale $2^E$, so that its largest weight lands on 4 or 6:
#
# $$E = \lfloor \log_2(\text{amax}) \rfloor - 2 \quad \text{and one more where amax is at least } 1.75 \cdot 2^{\lfloor \log_2(\text{amax}) \rfloor}$$
#
# The exception: amax is first rounded to one bit behind its leading one. Stored is the byte $E + 127$; a block of zeros has byte 0.
# `w [rows, N]` in blocks of 32 along N. Returns `scale [rows, N/32]`, `torch.uint8`.
#
# <details><summary>Hint</summary>
#
# `mantissa, exponent = torch.frexp(amax)` is exact: amax = mantissa * 2^exponent, with the mantissa from 0.5 to 1. So floor(log2) is exponent - 1.
# </details>
# %%
def mxfp4_scale(w):
    """One E8M0 byte a block of 32."""
    ### BEGIN SOLUTION
    amax = w.unflatten(-1, (-1, 32)).abs().amax(-1)
    mantissa, exponent = torch.frexp(amax)
    E = exponent - 3 + (mantissa >= 0.875)
    return torch.where(amax == 0, 0, E + 127).to(torch.uint8)
    ### END SOLUTION
# %%
checks.mxfp4_scale(mxfp4_scale)
# %% [markdown]
# ## Step 5. `mxfp4_codes`
# With the scale divided out, round each number to the nearest of the eight values. Half-way goes to the even code. Beyond 6 is 6.
# Codes 0 to 7 are the values in order; a negative number has 8 more.
#
# `x [rows, N]`. Returns `codes [rows, N]`, `torch.uint8`.
#
# <details><summary>Hint</summary>
#
# `torch.bucketize(x.abs(), middle)` counts the middles below each number, and `right=True` counts equal ones too. Where both counts differ, take the even one.
# </details>
# %%
def mxfp4_codes(x):
    """The nearest E2M1 code of every number."""
    ### BEGIN SOLUTION
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=x.dtype)
    middle = (values[1:] + values[:-1]) / 2
    low, high = (torch.bucketize(x.abs(), middle, right=right) for right in (False, True))
    code = torch.where(low % 2 == 0, low, high)
    return (code + 8 * (x < 0)).to(torch.uint8)
    ### END SOLUTION
# %%
checks.mxfp4_codes(mxfp4_codes)
# %% [markdown]
# ## Step 6. `mxfp4_pack`
# Two codes share a byte: element 2i in the low four bits of byte i, element 2i + 1 in the high four.
#
# `codes [rows, N]`. Returns `packed [rows, N/2]`, `torch.uint8`.
# %%
def mxfp4_pack(codes):
    """Two codes a byte, low nibble first."""
    ### BEGIN SOLUTION
    return codes[..., 0::2] | codes[..., 1::2] << 4
    ### END SOLUTION
# %%
checks.mxfp4_pack(mxfp4_pack)
# %% [markdown]
# ## Step 7. `dequantize`
# The way back. `packed [rows, N/2]` and `scale [rows, N/32]`, both `torch.uint8`. Returns the weights `[rows, N]` in float32.
#
# <details><summary>Hint</summary>
#
# `packed & 15` are the low nibbles, `packed >> 4` the high ones; `torch.stack([low, high], -1).flatten(-2)` puts them in turn.
# A table `values[codes.int()]` reads codes. `repeat_interleave(32, -1)` repeats each scale for its 32 weights.
# </details>
# %%
def dequantize(packed, scale):
    """The float32 weights that bytes and scales stand for."""
    ### BEGIN SOLUTION
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return values[codes.int()] * 2.0 ** (scale.float() - 127).repeat_interleave(32, -1)
    ### END SOLUTION
# %%
checks.dequantize(dequantize)
# %% [markdown]
# ## Step 8. `fake_quantize`
# To train *inside* the grid, the forward pass sees rounded weights. But rounding is flat: its gradient is zero nearly everywhere. So the backward pass
# pretends that nothing was rounded (*straight-through*): the gradient of the result reaches w unchanged.
#
# `w [rows, N]`. Returns rounded weights, in the type of w. Use your functions: scale, codes of `w / 2^E`, pack, dequantize.
#
# <details><summary>Hint</summary>
#
# `w + (rounded - w).detach()` has the value of rounded and the gradient of w.
# </details>
# %%
def fake_quantize(w):
    """w as MXFP4 stores it, with the gradient of the identity."""
    ### BEGIN SOLUTION
    scale = mxfp4_scale(w)
    x = w / 2.0 ** (scale.to(w.dtype) - 127).repeat_interleave(32, -1)
    rounded = dequantize(mxfp4_pack(mxfp4_codes(x)), scale).to(w.dtype)
    return w + (rounded - w).detach()
    ### END SOLUTION
# %%
checks.fake_quantize(fake_quantize)
# %% [markdown]
# ## What you have built
# How K3's routed experts are stored, and how they are trained to bear it. What the four bits cost, by the course's own function:
# %%
from minimodel import fake_quantize_mxfp4

w = torch.randn(64, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
error = (fake_quantize_mxfp4(w) - w).norm() / w.norm()
print(f"Bits a weight: {4 + 8 / 32}. Rounding moves normal random weights by {error:.1%} of their size.")
# %% [markdown]
# Sources: K3 report, 2.5 and 4.1.4; OCP Microscaling Formats; `minimodel/muon.py` and `minimodel/mxfp4.py`.
