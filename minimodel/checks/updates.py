"""Steps of notebook 5, Per-Head Muon: Newton-Schulz, one head at a time, and the whole update (K3 report 2.5)."""

from __future__ import annotations

import torch
from torch import nn

from minimodel import muon
from minimodel.checks.grading import Step

# small on purpose: without the first division some slips would leave float64's range, and nothing could be compared
newton_schulz = Step(
    "newton_schulz", muon.newton_schulz, lambda draw: {"G": 0.2 * draw.normal(3, *draw.pick((4, 5), (5, 3), (4, 4)))}, ("X [H m n]",)
)


def _iterate(X, a, b, c, steps=5):
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


def _unit(G):
    return G / torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True)


@newton_schulz.slip("the matrix is not divided by its norm first. The iteration needs singular values of at most one")
def not_divided_by_norm(G):
    return _iterate(G, *muon.COEFFICIENTS)


@newton_schulz.slip("it was divided by the norm of the whole stack. Each head's matrix has its own")
def one_norm_for_all(G):
    return _iterate(G / G.norm(), *muon.COEFFICIENTS)


@newton_schulz.slip("this is the classic step, 1.5 X - 0.5 X X^T X. Muon's is a polynomial of degree five that is steeper at zero")
def classic_step(G):
    return _iterate(_unit(G), 1.5, -0.5, 0.0)


@newton_schulz.slip("b and c are swapped: X <- a X + (b A + c A A) X")
def coefficients_swapped(G):
    a, b, c = muon.COEFFICIENTS
    return _iterate(0.1 * _unit(G), a, c, b, 1)


@newton_schulz.slip("this is the exact answer, all singular values one. Muon's five steps only come near it, and are asked for")
def exact_svd(G):
    U, _, Vh = torch.linalg.svd(G, full_matrices=False)
    return U @ Vh


@newton_schulz.slip("one step was made. It takes five")
def one_step(G):
    return _iterate(_unit(G), *muon.COEFFICIENTS, steps=1)


@newton_schulz.law("a large gradient and a small one of the same direction give the same update")
def size_does_not_matter(mine, G):
    return torch.allclose(mine(G), mine(7 * G), atol=1e-4)


# ---- one head at a time ----
def _scaled(blocks):
    return 0.2 * max(blocks.shape[-2:]) ** 0.5 * muon.newton_schulz(blocks)


def reference_per_head(M, heads):
    return _scaled(M.unflatten(0, (heads, -1))).flatten(0, 1)


def _matrix(draw):
    heads, K, D = draw.pick((2, 3, 8), (3, 4, 4), (2, 5, 3))
    strong = torch.where(torch.arange(heads * K) < K, 50.0, 1.0)[:, None].to(draw.dtype)  # one loud head
    return heads, strong * draw.normal(heads * K, D)


def _per_head_inputs(draw):
    heads, M = _matrix(draw)
    return {"M": M, "heads": heads}


per_head_update = Step("per_head_update", reference_per_head, _per_head_inputs, ("update [H*K D]",))


@per_head_update.slip("Newton-Schulz ran over the whole matrix, so that the loud head sets the pace. Cut the rows into heads first")
def whole_matrix(M, heads):
    return 0.2 * max(len(M) // heads, M.shape[1]) ** 0.5 * muon.newton_schulz(M)


@per_head_update.slip("neither the iteration nor the scale knows of heads: cut the rows into heads first")
def plain_muon(M, heads):
    return _scaled(M)


@per_head_update.slip("the scale is missing: 0.2 sqrt(max(rows, columns)) of a head's block")
def unscaled(M, heads):
    return muon.newton_schulz(M.unflatten(0, (heads, -1))).flatten(0, 1)


@per_head_update.slip("the scale comes from the whole matrix. It is that of a head's block, 0.2 sqrt(max(rows, columns))")
def scale_of_the_whole(M, heads):
    return 0.2 * max(M.shape) ** 0.5 * muon.newton_schulz(M.unflatten(0, (heads, -1))).flatten(0, 1)


@per_head_update.slip("rows were dealt out to the heads in turn. A head's rows lie together: the first K are head 0's")
def rows_dealt_out(M, heads):
    return _scaled(M.unflatten(0, (-1, heads)).transpose(0, 1)).transpose(0, 1).flatten(0, 1)


@per_head_update.law("making one head's momentum larger leaves all updates as they are")
def heads_are_apart(mine, M, heads):
    louder = torch.where(torch.arange(len(M)) < len(M) // heads, 3.0, 1.0)[:, None].to(M.dtype) * M
    return torch.allclose(mine(M, heads), mine(louder, heads), atol=1e-4)


# ---- the step of the optimizer ----
SETTINGS = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.9}


def reference_muon(W, G, buffer, heads, lr, weight_decay, momentum):
    """The course's own optimizer, told of the buffer that it had."""
    p = nn.Parameter(W.clone())
    optimizer = muon.PerHeadMuon([{"params": [p], "heads": heads}], lr=lr, weight_decay=weight_decay, momentum=momentum)
    p.grad, optimizer.state[p]["momentum"] = G.clone(), buffer.clone()
    optimizer.step()
    return p.detach(), optimizer.state[p]["momentum"]


def _muon_inputs(draw):
    heads, G = _matrix(draw)
    return {"W": draw.normal(*G.shape), "G": G, "buffer": draw.normal(*G.shape), "heads": heads, **SETTINGS}


muon_step = Step("muon_step", reference_muon, _muon_inputs, ("W [H*K D]", "buffer [H*K D]"))


def _muon(W, direction, buffer, heads, lr, decay):
    return (1 - decay) * W - lr * reference_per_head(direction, heads), buffer


@muon_step.slip("Nesterov's look ahead is missing: what goes into Newton-Schulz is (1-mu) G + mu buffer, with the new buffer")
def no_nesterov(W, G, buffer, heads, lr, weight_decay, momentum):
    buffer = buffer.lerp(G, 1 - momentum)
    return _muon(W, buffer, buffer, heads, lr, lr * weight_decay)


@muon_step.slip("the gradient alone was orthogonalized. It is averaged with the buffer first")
def gradient_alone(W, G, buffer, heads, lr, weight_decay, momentum):
    return _muon(W, G, buffer.lerp(G, 1 - momentum), heads, lr, lr * weight_decay)


@muon_step.slip("the weight decay was added to the gradient, where Newton-Schulz swallows it. It shrinks the weights: 1 - lr * decay")
def coupled_decay(W, G, buffer, heads, lr, weight_decay, momentum):
    G = G + weight_decay * W
    buffer = buffer.lerp(G, 1 - momentum)
    return _muon(W, G.lerp(buffer, momentum), buffer, heads, lr, 0)


@muon_step.slip("the weight decay lacks the learning rate: (1 - lr * weight_decay) W")
def decay_without_rate(W, G, buffer, heads, lr, weight_decay, momentum):
    buffer = buffer.lerp(G, 1 - momentum)
    return _muon(W, G.lerp(buffer, momentum), buffer, heads, lr, weight_decay)


@muon_step.slip("the buffer adds gradients up, mu buffer + G. Here it is their running mean, mu buffer + (1-mu) G")
def summing_buffer(W, G, buffer, heads, lr, weight_decay, momentum):
    buffer = momentum * buffer + G
    return _muon(W, G + momentum * buffer, buffer, heads, lr, lr * weight_decay)


@muon_step.slip("it goes uphill. The update is subtracted")
def uphill(W, G, buffer, heads, lr, weight_decay, momentum):
    W_new, buffer = reference_muon(W, G, buffer, heads, lr, weight_decay, momentum)
    return 2 * (1 - lr * weight_decay) * W - W_new, buffer


@muon_step.law("with a learning rate of zero the weights stay as they are")
def no_rate_no_step(mine, W, G, buffer, heads, lr, weight_decay, momentum):
    return torch.allclose(mine(W, G, buffer, heads, 0.0, weight_decay, momentum)[0], W)


STEPS = (newton_schulz, per_head_update, muon_step)
