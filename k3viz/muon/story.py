"""The Muon story: Newton-Schulz lifts all directions of an update to about one, for the whole matrix at once or head by head.

The gradient of a query projection is chosen (seeded, heads that read the same few input directions), or it is a trained model's own. One
head's part is then made k times stronger. What that does to the other heads' updates is computed by ``newton_schulz``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from minimodel import K3ForCausalLM, newton_schulz
from minimodel.formats import format_digits, plural
from minimodel.tasks import meeting
from minimodel.trace import frozen, private_copy

HEADS, ROWS, WIDTH = 6, 16, 56  # chosen: as tall against its width as K3's, 6 * 16 / 56 = 96 * 128 / 7168
STEPS = 8  # Newton-Schulz steps computed; Muon takes 5
MUON_STEPS = 5
SIZE = 0.2  # Muon scales an orthogonal update to this root mean square, AdamW's usual size
NOTHING = 1e-9  # singular values below this share of the largest are zeros


@dataclass(frozen=True, eq=False)
class MuonStory:
    """Update of one projection of H heads, [H * rows, width], after 0 .. STEPS Newton-Schulz steps.

    source: where the gradient comes from. strength: what head 0 was multiplied with. gradient [H]: root mean square (RMS) of each
    head's gradient, 1 = the mean of the others. whole_values [STEPS+1, n], head_values [STEPS+1, H, m]: singular values of the whole
    matrix and of each head's block, strongest first. owned [n]: the share of head 0 in each direction of the whole matrix.
    whole_update, head_update [STEPS+1, H]: RMS of each head's update, learning rate 1, orthogonalized as one matrix and head by head.
    Step 0: only normalized. gradient_matrix, whole_matrix, head_matrix [H * rows, width]: the gradient, and the two updates as Muon makes
    them, after 5 steps.
    """

    source: str
    strength: float
    shape: tuple[int, int, int]
    gradient: np.ndarray
    whole_values: np.ndarray
    head_values: np.ndarray
    owned: np.ndarray
    whole_update: np.ndarray
    head_update: np.ndarray
    gradient_matrix: np.ndarray
    whole_matrix: np.ndarray
    head_matrix: np.ndarray

    def ratio(self, step: int, per_head: bool) -> float:
        """How many times the other heads' mean update head 0 moves."""
        update = (self.head_update if per_head else self.whole_update)[step]
        return float(update[0] / update[1:].mean())

    def sentence_at(self, step: int) -> str:
        """What one step count gives, with its numbers."""
        one, other = (format_digits(x) for x in (self.whole_update[step, 0], self.whole_update[step, 1:].mean()))
        mine, theirs = (format_digits(x) for x in (self.head_update[step, 0], self.head_update[step, 1:].mean()))
        times = format_digits(self.gradient[0] / self.gradient[1:].mean())
        own, n = int((self.owned > 0.5).sum()), len(self.owned)
        done = f"After {step} Newton-Schulz {plural('step', step)}" if step else "Normalized only"
        return (
            f"Head 1's gradient is {times} times the others'. {done}, as one matrix head 1 moves by {one} and the others by {other} "
            f"({format_digits(self.ratio(step, False))} times); head by head, by {mine} and {theirs} "
            f"({format_digits(self.ratio(step, True))} times). Head 1 owns {own} of the {n} directions of the whole matrix."
        )

    @property
    def sentence(self) -> str:
        return self.sentence_at(MUON_STEPS)


def muon_story(*, strength: float = 10.0, directions: int = 12, model: K3ForCausalLM | None = None) -> MuonStory:
    """Orthogonalize one gradient as a whole and head by head, in float64.

    strength: what head 0's gradient is multiplied with, 1 to 1000. directions: input directions that the heads' chosen gradients share,
    1 to 56; few of them are what real gradients are like when a batch says much the same to every head. model: a ``K3ForCausalLM`` of
    the meeting vocabulary, whose own query gradient on a seeded batch is taken instead; directions is then not used.
    Raises ValueError that names the argument.
    """
    if isinstance(strength, bool) or not isinstance(strength, (int, float)) or not 1 <= strength <= 1000:
        raise ValueError(f"strength must lie in [1, 1000], got {strength!r}")
    if isinstance(directions, bool) or not isinstance(directions, int) or not 1 <= directions <= WIDTH:
        raise ValueError(f"directions must be a whole number from 1 to {WIDTH}, got {directions!r}")
    if model is None:
        source = f"chosen, {HEADS} heads that share {directions} input {plural('direction', directions)}"
        return orthogonalized(chosen_gradient(directions), float(strength), source)
    gradient, source = model_gradient(model)
    return orthogonalized(gradient, float(strength), source)


# ---- gradients ----


@lru_cache(maxsize=64)
def chosen_gradient(directions: int) -> Tensor:
    """[HEADS, ROWS, WIDTH]: every head's gradient of RMS 1, a seeded mixture of the same ``directions`` orthonormal inputs."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=rng, dtype=torch.float64))[0][:directions]
    G = torch.randn(HEADS, ROWS, WIDTH, generator=rng, dtype=torch.float64)[..., :directions] @ inputs
    return G / G.square().mean((-2, -1), keepdim=True).sqrt()


def model_gradient(model: K3ForCausalLM) -> tuple[Tensor, str]:
    """([heads, rows, width], where it comes from): the query gradient of the first KDA layer on one seeded batch of meeting notes."""
    meeting.check_reader(model)
    layer = next((i for i in range(model.config.num_hidden_layers) if model.config.mixer(i) == "kda"), None)
    if layer is None:
        raise ValueError("model has no KDA layer, so it has no query projection that is cut by head")
    learner = private_copy(model).train()  # the private copy gets the gradients
    ids, labels = meeting.training_batch(0, 0, rows=2, length=96)
    mixer = learner.model.layers[layer].self_attn
    with torch.enable_grad():
        loss = learner(ids, labels=labels).loss
        (G,) = torch.autograd.grad(loss, [mixer.q_proj.weight])
    return G.unflatten(0, (mixer.num_heads, -1)), f"the trained model's own, layer {layer + 1}, on a batch of meeting notes"


# ---- orthogonalization ----


def orthogonalized(gradient: Tensor, strength: float, source: str) -> MuonStory:
    """Both ways for a gradient [heads, rows, width] whose head 0 is made ``strength`` times stronger."""
    H, K, D = gradient.shape
    G = gradient / _rms(gradient)[1:].mean()
    G[0] *= strength
    whole, blocks = G.reshape(1, H * K, D), G
    whole_values, left = _values(whole)
    head_values, _ = _values(blocks)
    owned = left[0].unflatten(0, (H, K))[0].square().sum(0)
    whole_updates, head_updates = _updates(whole), _updates(blocks)
    return MuonStory(
        source=source, strength=strength, shape=(H, K, D), gradient=frozen(_rms(G)), whole_values=frozen(whole_values[:, 0]),
        head_values=frozen(head_values), owned=frozen(owned),
        whole_update=frozen(torch.stack([_rms(x.view(H, K, D)) for x in whole_updates])),
        head_update=frozen(torch.stack([_rms(x) for x in head_updates])), gradient_matrix=frozen(whole[0]),
        whole_matrix=frozen(whole_updates[MUON_STEPS][0]), head_matrix=frozen(head_updates[MUON_STEPS].reshape(H * K, D)),
    )  # fmt: skip


def _iterates(G: Tensor) -> list[Tensor]:
    """G after 0 .. STEPS steps; step 0 is the normalization that comes first."""
    start = G / torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True)
    return [start, *(newton_schulz(G, steps) for steps in range(1, STEPS + 1))]


def _updates(G: Tensor) -> list[Tensor]:
    """What Muon subtracts at learning rate 1, after 0 .. STEPS steps."""
    return [SIZE * math.sqrt(max(G.shape[-2:])) * X for X in _iterates(G)]


def _values(G: Tensor) -> tuple[Tensor, Tensor]:
    """([STEPS+1, blocks, n], left vectors [blocks, rows, n]): each iterate measured along the singular vectors of G, which it keeps."""
    U, S, Vh = torch.linalg.svd(G, full_matrices=False)
    n = int((S > NOTHING * S.amax(-1, keepdim=True)).sum(-1).max())
    U, Vh = U[..., :n], Vh[..., :n, :]
    return torch.stack([((U.mT @ X) * Vh).sum(-1) for X in _iterates(G)]), U


def _rms(G: Tensor) -> Tensor:
    return G.square().mean((-2, -1)).sqrt()
