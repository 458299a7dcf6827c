"""A whole training step of a K3 and of its plain Transformer twin: forward, backward, clipping, optimizer, router biases."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.transformer import active_parameters, twin
from minimodel import K3Config, K3ForCausalLM, PerHeadMuon, parameter_budget

TOKENS = {512: 4, 8192: 1}  # tokens in a row -> rows in a batch


class Training:
    """The variants "k3" and "transformer", each trained as it usually is: K3 with Per-Head Muon, the other with torch's fused AdamW."""

    def __init__(self, threads: int, variant: str) -> None:
        torch.set_num_threads(threads)
        self.config = K3Config.mini()
        self.step = {"k3": self._k3, "transformer": self._transformer}[variant]()

    def describe(self) -> dict:
        return {"parameters": sum(p.numel() for p in self.model.parameters()), "active": self.active}

    def prepare(self, T: int, B: int, seed: int = 0) -> None:
        self.ids = torch.randint(self.config.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))

    def _k3(self) -> Callable[[], float]:
        self.model = K3ForCausalLM(self.config, seed=0)
        self.active = parameter_budget(self.config).active
        self.optimizer = PerHeadMuon(self.model, lr=1e-3)

        def step() -> float:
            loss = self._learn(lambda: self.model(self.ids, labels=self.ids).loss)
            self.model.update_router_bias()
            return loss

        return step

    def _transformer(self) -> Callable[[], float]:
        self.model = twin(self.config)
        self.active = active_parameters(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        return lambda: self._learn(lambda: self.model(self.ids))

    def _learn(self, loss_of: Callable[[], torch.Tensor]) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def profile(self) -> dict[str, float]:
        """Share of one step's time by part; see profile.py."""
        from benchmarks.profile import shares

        return shares(self.model, self.step)
