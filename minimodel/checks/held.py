"""A learner's code is held while it runs: whatever it raises is kept for the verdict, and torch's settings stay as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def attempt(function: Callable, *inputs: Any) -> tuple[Any, BaseException | None]:
    """``(what it gives, None)``, or ``(None, what stopped it)``: sys.exit() too, which would end the grading without a verdict.

    Only KeyboardInterrupt passes: a person stops the cell with it.
    """
    with _settings_kept():
        try:
            return function(*inputs), None
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return None, error


@contextmanager
def _settings_kept() -> Iterator[None]:
    """What a cell sets for all of torch would change every result after it, the reference's too."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)


def message(error: BaseException) -> str:
    """The words of an error; none where its own ``__str__`` fails."""
    said, failure = attempt(str, error)
    return "" if failure is not None else said


def named(error: BaseException) -> str:
    """ "ValueError: its words", or the name alone where there are none."""
    return f"{type(error).__name__}: {message(error)}".removesuffix(": ")
