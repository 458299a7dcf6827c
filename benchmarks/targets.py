"""The targets, each computed from a results file of a CPU run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from minimodel.formats import format_bytes, format_probability

KDA_PEERS = ("fla", "transformers Kimi")
TORCH_PEERS = (*KDA_PEERS, "transformers Gated")  # Gated DeltaNet has one decay a head: a cheaper rule, and a peer all the same
UNCHECKED = "minimodel kda_step_, unchecked"
OURS = "minimodel kda"


@dataclass(frozen=True)
class Target:
    what: str
    wanted: str
    measured: str
    holds: bool


def targets(document: dict) -> list[Target]:
    """Those whose numbers are in the file; a quick run has none at the lengths that count."""
    rows = {name: section["rows"] for name, section in document["sections"].items()}
    forward, backward = _at(rows.get("forward", []), T=8192), _at(rows.get("forward_backward", []), T=8192)
    found = [
        *_forward(forward), *_flat(rows.get("forward", []), "calls in a row"),
        *_flat(rows.get("after_a_pause", []), "one call after a pause"), *_backward(forward, backward),
        *_fresh(rows.get("fresh_process", [])), *_decode(rows.get("decode", []), rows.get("context", [])),
        *_training(rows.get("training", [])),
    ]  # fmt: skip
    return found


def _at(rows: list[dict], **where: int) -> list[dict]:
    """Rows at one size whose results were right: the others don't count."""
    return [row for row in rows if all(row.get(name) == value for name, value in where.items()) and not row.get("wrong")]


def _ours(rows: list[dict]) -> dict | None:
    return next((row for row in rows if row["who"] == OURS), None)


def _best(rows: list[dict], *prefixes: str) -> dict | None:
    return min((row for row in rows if row["who"].startswith(prefixes)), key=lambda row: row["best_ms"], default=None)


def _forward(rows: list[dict]) -> list[Target]:
    ours, ggml = _ours(rows), _best(rows, "ggml")
    if ours is None:
        return []
    share = ours["flops"] / ours["gemm_gflops"] / 1e6 / ours["best_ms"]
    found = [Target("forward, T = 8192: share of the matrix-product limit", "at least 30 %", format_probability(share), share >= 0.30)]
    found += _times_faster("forward, T = 8192, against ggml's C", ours, ggml, 1.0)
    found += _times_faster("forward, T = 8192, against the best KDA in PyTorch", ours, _best(rows, *KDA_PEERS), 8.0)
    return found + _times_faster("forward, T = 8192, against the best PyTorch peer of any rule", ours, _best(rows, *TORCH_PEERS), 8.0)


def _times_faster(what: str, ours: dict, peer: dict | None, wanted: float) -> list[Target]:
    if peer is None:
        return []
    ratio = peer["best_ms"] / ours["best_ms"]
    asked = "faster" if wanted == 1 else f"at least {wanted:g} times faster"
    return [Target(what, asked, f"{ratio:.3g} times ({peer['who']})", ratio > 1 if wanted == 1 else ratio >= wanted)]


def _flat(rows: list[dict], how: str) -> list[Target]:
    per_token = {row["T"]: row["best_ms"] / row["T"] for row in rows if row["who"] == OURS and not row["wrong"]}
    if not {512, 65536} <= set(per_token):
        return []
    spread = max(per_token.values()) / min(per_token.values()) - 1
    return [Target(f"forward: time a token from T = 512 to 65536, {how}", "within 15 %", format_probability(spread), spread <= 0.15)]


def _backward(forward: list[dict], rows: list[dict]) -> list[Target]:
    ours, alone = _ours(rows), _ours(forward)
    if ours is None or alone is None:
        return []
    ratio = ours["best_ms"] / alone["best_ms"]
    found = [Target("forward and backward, T = 8192, against the forward", "at most 3.5 times", f"{ratio:.3g} times", ratio <= 3.5)]
    name = "forward and backward, T = 8192, against the best differentiable"
    found += _times_faster(f"{name} KDA", ours, _best(rows, *KDA_PEERS, "mlx"), 15.0)
    return found + _times_faster(f"{name} peer of any rule", ours, _best(rows, *TORCH_PEERS, "mlx"), 15.0)


def _fresh(rows: list[dict]) -> list[Target]:
    if not rows or rows[0]["T"] != 8192:
        return []
    stall = max(row["first_ms"] - row["second_ms"] for row in rows)
    memory = max(row["extra_bytes"] for row in rows)
    return [
        Target("first call in a fresh process: what it takes longer than the second", "at most 2 s", f"{stall / 1e3:.2f} s", stall <= 2000),
        Target("peak extra memory, T = 8192, forward and backward", "under 600 MB", format_bytes(memory), memory < 600e6),
    ]


def _decode(rows: list[dict], contexts: list[dict]) -> list[Target]:
    one, found = _at(rows, B=1), []
    for name, who in (("decode step, B = 1, as the layer calls it", UNCHECKED), ("the same through kda, which checks its inputs", OURS)):
        for row in (row for row in one if row["who"] == who):
            us = 1e3 * row["best_ms"]
            found.append(Target(name, "at most 50 us", f"{us:.3g} us", us <= 50))
    if contexts and max(row["context"] for row in contexts) >= 1_000_000:
        times = [row["best_ms"] for row in contexts]
        spread = max(times) / min(times) - 1 if min(times) else math.inf
        found.append(Target("decode step after 1k to 1M tokens", "flat (within 15 %)", format_probability(spread), spread <= 0.15))
    return found


def _training(rows: list[dict]) -> list[Target]:
    found = []
    for T, wanted, asked in ((512, 0.5, "at least 0.5"), (8192, 1.0, "more than 1")):
        speeds = {row["who"].split()[0]: row["tokens_per_second"] for row in rows if row["T"] == T}
        if {"minimodel", "plain"} <= set(speeds):
            ratio = speeds["minimodel"] / speeds["plain"]
            holds = ratio > wanted if wanted == 1 else ratio >= wanted
            found.append(Target(f"training tokens/s against a plain Transformer, T = {T}", asked, f"{ratio:.2f}", holds))
    return found
