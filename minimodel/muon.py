"""Per-Head Muon: orthogonal updates for matrices, one head at a time, and AdamW for everything else.

K3 report 2.5 and 3.3: "following Kimi K2", Muon for matrix parameters; the Q, K and V projections are cut along the head
dimension and each head's block is orthogonalized on its own. Not published for K3: Newton-Schulz coefficients, momentum,
update scale, how MLA's factors are cut, the AdamW settings. Those follow Moonshot's public Muon (Moonlight).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["PerHeadMuon", "clip_query_key", "newton_schulz", "parameter_groups"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest at zero; singular values land in about 0.68 .. 1.14, not exactly at 1
PER_HEAD = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj")  # rows are grouped by head; W_o and the gates are not listed
METHODS = ("muon", "adamw")
AT_ONCE = 2**25  # numbers updated together: enough for large products, little memory beside a large model's own


def newton_schulz(G: Float[Tensor, "*batch m n"], steps: int = 5, *, dtype: torch.dtype | None = None) -> Float[Tensor, "*batch m n"]:
    """Push the singular values of each matrix toward one and keep its singular vectors: X ~ U V^T for G = U S V^T.

    Args:
        G: matrices [..., m, n]; leading dimensions are a batch (heads, experts), each matrix on its own.
        steps: Newton-Schulz steps, each X <- a X + (b A + c A^2) X with A = X X^T.
        dtype: precision of the iteration; default G's own. bfloat16 is usual on GPUs.
    Returns: X [..., m, n] in G's dtype; a zero matrix stays zero.
    Raises: ValueError, TypeError for a G that is not a floating-point matrix, or steps < 1.
    Source: K. Jordan's Muon; the same coefficients as Moonlight and ``torch.optim.Muon``.
    """
    if G.ndim < 2:
        raise ValueError(f"G must be matrices [..., m, n], got shape {list(G.shape)}")
    if not G.is_floating_point():
        raise TypeError(f"G must be floating point, got {G.dtype}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a positive integer, got {steps!r}")
    a, b, c = COEFFICIENTS
    m, n = G.shape[-2:]
    X = G.to(dtype or G.dtype).reshape(math.prod(G.shape[:-2]), m, n)
    if m > n:  # A = X X^T is smallest when the short side comes first
        X = X.mT
    X = X / torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return (X.mT if m > n else X).reshape(G.shape).to(G.dtype)


@torch.no_grad()
def clip_query_key(
    q_weight: Float[Tensor, "rows_q rank_q"],
    kv_weight: Float[Tensor, "rows_kv rank_kv"],
    max_logits: Float[Tensor, " H"],
    *,
    nope_head_dim: int,
    threshold: float = 100.0,
) -> Float[Tensor, " H"]:
    """K2's weight clipping (QK-Clip), in place: shrink the heads of one MLA layer whose largest logit passed ``threshold``.

    With gamma_h = min(1, threshold / max_logits_h), the no-position part of head h's query and key rows is multiplied by
    sqrt(gamma_h) and its extra query rows by gamma_h, so every logit of head h scales by gamma_h. The extra key is shared by all heads
    and stays. Call it after the optimizer step.

    Args:
        q_weight: q_b_proj (or q_proj) weight, rows [H, nope + extra].
        kv_weight: kv_b_proj weight, rows [H, nope + value].
        max_logits: the largest pre-softmax logit of each head in the batch [H].
        nope_head_dim: channels of a head without the extra ones (``qk_nope_head_dim``).
        threshold: largest logit left alone; K2 uses 100, K3's value is not published.
    Returns: gamma [H], one where a head was left alone.
    Raises: ValueError for rows that do not divide into heads, logits that are not finite, or a threshold <= 0.
    Source: Kimi K2 report, Algorithm 1; for K3 the report only names it (3.3).
    """
    H = max_logits.numel()
    if max_logits.ndim != 1 or H == 0 or not bool(torch.isfinite(max_logits).all()):
        raise ValueError(f"max_logits must be [H] finite numbers, one a head, got shape {list(max_logits.shape)}")
    if not threshold > 0:
        raise ValueError(f"threshold must be positive, got {threshold!r}")
    for name, weight in (("q_weight", q_weight), ("kv_weight", kv_weight)):
        if weight.ndim != 2 or weight.shape[0] % H or weight.shape[0] // H < nope_head_dim:
            raise ValueError(f"{name} {list(weight.shape)} needs H={H} groups of at least nope_head_dim={nope_head_dim} rows")
    gamma = (threshold / max_logits.clamp_min(threshold)).to(q_weight.dtype)
    q, kv = q_weight.view(H, -1, q_weight.shape[1]), kv_weight.view(H, -1, kv_weight.shape[1])
    root = gamma.sqrt()[:, None, None]
    q[:, :nope_head_dim] *= root
    q[:, nope_head_dim:] *= gamma[:, None, None]
    kv[:, :nope_head_dim] *= root.to(kv.dtype)
    return gamma


def parameter_groups(model: nn.Module, *, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Sort a model's trainable parameters into Muon and AdamW groups.

    Muon: every matrix named ``weight`` between hidden features (attention, dense and shared experts, latent projections, the
    router) and the stacked expert weights [E, F, L], one block an expert. Inside a module with ``num_heads``, the projections in
    ``PER_HEAD`` get one block a head: [K, D] in KDA; in MLA [nope + extra, rank] for the query and [nope + value, rank] for the
    joint key-value factor, whose cut is not published. AdamW: embeddings, output head, convolutions, AttnRes pseudo-queries,
    norms, A_log, dt_bias. No weight decay for vectors (pseudo-queries [1, D] among them), A_log and dt_bias.

    Returns: groups with keys ``params`` ((name, parameter) pairs), ``method``, ``heads`` (row blocks a matrix is cut into) and
    ``weight_decay``.
    Raises: ValueError if a per-head projection's rows do not divide into its heads, or nothing is trainable.
    """
    heads: dict[Tensor, int] = {}
    for path, module in model.named_modules():
        for child in PER_HEAD:
            weight = getattr(getattr(module, child, None), "weight", None)
            blocks = getattr(module, "num_heads", None)
            if weight is None or not isinstance(blocks, int):
                continue
            if child in ("k_proj", "v_proj"):
                blocks = getattr(module, "kv_heads", blocks)  # grouped-query attention has fewer key than query heads
            if weight.shape[0] % blocks:
                raise ValueError(f"{path}.{child} has {weight.shape[0]} rows, which {blocks} heads do not divide")
            heads[weight] = blocks
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    tables |= {p for name, p in model.named_parameters() if name.split(".")[-2:] == ["lm_head", "weight"]}
    groups: dict[tuple, dict[str, Any]] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        leaf = name.rpartition(".")[2]
        vector = p.ndim < 2 or (p.ndim == 2 and p.shape[0] == 1)  # A_log and dt_bias too: decay would change how long a memory lasts
        stack = p.ndim == 3 and min(p.shape[1:]) > 1  # experts [E, F, L]; a depthwise convolution is [P, 1, 4]
        muon = stack or (p.ndim == 2 and leaf == "weight" and not vector and p not in tables)
        key = ("muon" if muon else "adamw", heads.get(p, 1), 0.0 if vector else weight_decay)
        group = groups.setdefault(key, {"params": [], "method": key[0], "heads": key[1], "weight_decay": key[2]})
        group["params"].append((name, p))
    if not groups:
        raise ValueError("model has no trainable parameters")
    return list(groups.values())


class PerHeadMuon(torch.optim.Optimizer):
    """Muon with one orthogonalized block per head or expert; AdamW, in the same optimizer, for what is not a matrix.

    Matrices: M <- mu M + (1-mu) G; U = (1-mu) G + mu M (Nesterov); W <- (1 - lr wd) W - lr 0.2 sqrt(max(A, B)) NS(U) for each
    block [A, B]. An orthogonal block has RMS 1/sqrt(max(A, B)), so every update has RMS of about 0.2, AdamW's usual size, and one
    ``lr`` serves both. Vectors: AdamW, decoupled decay.

    Args:
        params: a model (see ``parameter_groups``), or parameters, or groups of them; a group may set ``method`` ("muon" or
            "adamw"), ``heads`` (row blocks a matrix is cut into), ``lr``, ``weight_decay``. Default: Muon, whole matrices.
        lr: learning rate of every group; schedulers change it as usual.
        weight_decay: decoupled; for a model, not applied to vectors.
        momentum, nesterov: Muon's.
        betas, eps: AdamW's.
        steps: Newton-Schulz steps.
        dtype: precision of Newton-Schulz; default the parameter's own.
    Raises: ValueError for settings out of range, an unknown method, a non-matrix under Muon, or rows that heads do not divide.
    Source: K3 report 2.5; Moonlight's public code; ``torch.optim.Muon`` with ``match_rms_adamw``.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        *,
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        steps: int = 5,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
            if not value >= 0:
                raise ValueError(f"{name} must be >= 0, got {value!r}")
        for name, value in (("momentum", momentum), ("betas[0]", betas[0]), ("betas[1]", betas[1])):
            if not 0 <= value < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {value!r}")
        if isinstance(params, nn.Module):
            params = parameter_groups(params, weight_decay=weight_decay)
        defaults = dict(
            lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, betas=betas, eps=eps, steps=steps,
            dtype=dtype, method="muon", heads=1,
        )  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["method"] not in METHODS:
            raise ValueError(f"method must be one of {METHODS}, got {group['method']!r}")
        if group["method"] == "muon":
            for p in group["params"]:
                if p.ndim not in (2, 3):
                    raise ValueError(f"Muon takes matrices [m, n] or stacks [E, m, n], got a parameter {list(p.shape)}; use method='adamw'")
                if p.shape[0] % group["heads"] or (p.ndim == 3 and group["heads"] != 1):
                    raise ValueError(f"heads={group['heads']} does not cut a parameter {list(p.shape)} into equal row blocks")

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of every parameter that has a gradient. Returns what ``closure`` returned, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Blocks of one shape go through Newton-Schulz together, whichever layer they come from: few large batched products
        # instead of many small ones. Tall blocks join the wide ones transposed.
        batches: dict[tuple, list[tuple[Tensor, Tensor, float]]] = defaultdict(list)
        waiting = 0
        for group, params in self._pieces():
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            if group["method"] == "adamw":
                self._adamw(group, params)
                continue
            if waiting + (numbers := sum(p.numel() for p in params)) > AT_ONCE:
                self._orthogonal_update(batches)
                batches.clear()
                waiting = 0
            waiting += numbers
            for p, update in zip(params, self._momentum(group, params), strict=True):
                U = update if p.ndim == 3 else update.view(group["heads"], -1, p.shape[1])
                U = U.mT if U.shape[1] > U.shape[2] else U
                batches[(*U.shape[1:], group["steps"], group["dtype"], U.dtype, U.device)].append((p, U, group["lr"]))
        self._orthogonal_update(batches)
        return loss

    def _pieces(self) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        """Every group's parameters that have a gradient, at most ``AT_ONCE`` numbers at a time (or one larger parameter)."""
        for group in self.param_groups:
            piece, size = [], 0
            for p in group["params"]:
                if p.grad is None:
                    continue
                if piece and size + p.numel() > AT_ONCE:
                    yield group, piece
                    piece, size = [], 0
                piece.append(p)
                size += p.numel()
            if piece:
                yield group, piece

    def _orthogonal_update(self, batches: dict[tuple, list[tuple[Tensor, Tensor, float]]]) -> None:
        """Newton-Schulz on every batch of like blocks, and the weights' step."""
        for (_, longest, steps, dtype, *_), blocks in batches.items():
            X = newton_schulz(torch.cat([U for _, U, _ in blocks]), steps, dtype=dtype)
            params, lrs = [p for p, _, _ in blocks], [lr for _, _, lr in blocks]
            parts = X.split([len(U) for _, U, _ in blocks])
            updates = [self._as_parameter(x, p) for x, p in zip(parts, params, strict=True)]
            torch._foreach_mul_(updates, [-lr * 0.2 * math.sqrt(longest) for lr in lrs])
            torch._foreach_add_(params, updates)

    @staticmethod
    def _as_parameter(blocks: Tensor, p: Tensor) -> Tensor:
        """Wide blocks [heads, m, n] back in the parameter's layout; the transpose is undone where the rows were longer."""
        rows = p.shape[0] // len(blocks) if p.ndim == 2 else p.shape[1]
        return (blocks if rows <= p.shape[-1] else blocks.mT).reshape(p.shape)

    def _momentum(self, group: dict[str, Any], params: list[Tensor]) -> Sequence[Tensor]:
        grads = [p.grad for p in params]
        buffers = []
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
            buffers.append(self.state[p]["momentum"])
        mu = group["momentum"]
        torch._foreach_lerp_(buffers, grads, 1 - mu)
        return torch._foreach_lerp(grads, buffers, mu) if group["nesterov"] else buffers

    def _adamw(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = [p.grad for p in params]
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if not state:
                state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
            state["step"] += 1
        beta1, beta2 = group["betas"]
        means, squares = [s["mean"] for s in states], [s["square"] for s in states]
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        scale = torch._foreach_div(squares, [1 - beta2 ** s["step"] for s in states])
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, group["eps"])
        torch._foreach_addcdiv_(params, means, scale, [-group["lr"] / (1 - beta1 ** s["step"]) for s in states])
