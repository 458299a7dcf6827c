"""Narrow weights for the passes, wide ones for the updates.

An update of a bfloat16 weight is often smaller than half its last bit and would be rounded away. So the optimizer steps a *master* in the
model's own precision (float32), and the model computes with its rounding. Gradients are summed in the master's precision as well.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor, nn

from minimodel.io import FLOAT32


class MasterWeights:
    """Inside the ``with`` block ``model`` computes in ``dtype``; after it, it has its own precision back and everything it learned.

    ``by_name`` holds what an optimizer should step. A_log, dt_bias and the router's bias are never narrowed, and with ``dtype=None``
    nothing is: a parameter is then its own master. Masters take over the model's memory, so only the narrow copies are added.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        self.model = model
        self.by_name: dict[str, nn.Parameter] = {}
        self._narrow: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._hooks = []
        for name, p in model.named_parameters():
            self.by_name[name] = p
            if dtype is None or p.dtype == dtype or name.endswith(FLOAT32):
                continue
            master = self.by_name[name] = nn.Parameter(p.detach(), requires_grad=p.requires_grad)
            p.grad = None
            p.data = p.detach().to(dtype)
            self._narrow.append((p, master))
            if p.requires_grad:
                self._hooks.append(p.register_post_accumulate_grad_hook(self._adder(master)))

    @staticmethod
    def _adder(master: nn.Parameter):
        def add(p: nn.Parameter) -> None:
            """As soon as a backward pass has p's gradient, it joins the master's sum and the narrow one is freed."""
            if master.grad is None:
                master.grad = p.grad.to(master.dtype)
            else:
                master.grad.add_(p.grad)
            p.grad = None

        return add

    @torch.no_grad()
    def round(self) -> None:
        """After an update: the model's weights are the masters, rounded."""
        for p, master in self._narrow:
            p.copy_(master)

    def state(self) -> dict[str, Tensor]:
        """The model's ``state_dict`` with the masters in it."""
        wide = {id(p): master for p, master in self._narrow}
        return {name: wide.get(id(x), x).detach() for name, x in self.model.state_dict(keep_vars=True).items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what :meth:`state` gave."""
        for name, x in self.state().items():  # detached, but the same memory
            x.copy_(state[name])
        self.round()

    def __enter__(self) -> MasterWeights:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        for p, master in self._narrow:
            p.grad = None
            p.data = master.data
