"""What one Gated MLA layer costs in its two forms, by formula: absorbed, or with keys and values rebuilt from the cards."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minimodel import K3Config
from minimodel.formats import format_count, plural

CONTEXT = 131_072  # cards kept, unless asked otherwise
LONGEST = 1 << 24
MOST_AT_ONCE = 1 << 14
BYTES = torch.bfloat16.itemsize
NAMES = {"absorbed": "absorbed", "rebuilt": "rebuilt each pass", "kept": "rebuilt once and kept"}


@dataclass(frozen=True)
class Forms:
    """FLOPs of a pass of T tokens over N cards in one layer (projections common to all forms left out), and the bytes kept.

    *absorbed*: queries move into the latent space, all heads read the cards. *rebuilt*: every head's keys and values are rebuilt from
    the cards in every pass. *kept*: rebuilt once and cached instead of the cards, as MHA does.
    """

    model: str
    context: int  # N
    at_once: int  # T
    heads: int
    rank: int
    nope: int
    extra: int
    value: int

    def flops(self, form: str, at_once: int | None = None) -> int:
        """FLOPs of one pass (a multiply-add counts as two); every token of the pass is counted as reading all N cards."""
        N, T, H, L = self.context, self.at_once if at_once is None else at_once, self.heads, self.rank
        into_and_out = 2 * H * L * (self.nope + self.value)  # of one card into keys and values, or of one query into the latent space
        expanded = 2 * T * N * H * (self.nope + self.extra + self.value)
        if form == "absorbed":
            return T * into_and_out + 2 * T * N * H * (2 * L + self.extra)
        if form == "rebuilt":
            return N * into_and_out + expanded
        if form == "kept":
            return T * into_and_out + expanded
        raise ValueError(f"form must be one of {', '.join(NAMES)}, got {form!r}")

    def numbers(self, form: str) -> int:
        """Numbers that one token leaves in the cache of the layer."""
        return self.heads * (self.nope + self.value) + self.extra if form == "kept" else self.rank + self.extra

    def kept_bytes(self, form: str) -> int:
        return self.context * self.numbers(form) * BYTES

    @property
    def break_even(self) -> int | None:
        """Fewest tokens in a pass for which rebuilding is cheaper than the absorbed form; None where it never is."""
        N, L, sizes = self.context, self.rank, self.nope + self.value
        gain = N * (2 * L - sizes) + L * sizes  # what absorbing costs more, for each token of the pass
        return N * L * sizes // gain + 1 if gain > 0 else None

    @property
    def sentence(self) -> str:
        """The costs at ``at_once`` tokens, and from where on rebuilding pays."""
        read = f"{format_count(self.at_once)} {plural('token', self.at_once)}"
        absorbed, rebuilt = (format_count(self.flops(form)) for form in ("absorbed", "rebuilt"))
        said = f"One layer of {self.model} with {format_count(self.context)} cards reads {read} with {absorbed} FLOPs absorbed, "
        said += f"{rebuilt} rebuilt; rebuilding is cheaper "
        return said + (f"from {format_count(self.break_even)} tokens at once." if self.break_even else "for no number of tokens.")


def count_forms(config: K3Config | None, context: int, at_once: int) -> Forms:
    """Both forms' costs in one Gated MLA layer of ``config`` (default: K3). Raises ValueError naming the argument."""
    for name, value, high in (("context", context, LONGEST), ("at_once", at_once, MOST_AT_ONCE)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            raise ValueError(f"{name} must be a whole number from 1 to {high}, got {value!r}")
    if config is not None and not isinstance(config, K3Config):
        raise ValueError(f"config must be a K3Config, got {type(config).__name__}")
    name = "Kimi K3" if config is None else "this config"
    c = K3Config.k3() if config is None else config
    return Forms(name, context, at_once, c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim)
