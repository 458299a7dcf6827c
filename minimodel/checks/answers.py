"""What an exercise inside a notebook of the course says to an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minimodel.checks.held import attempt, named


def check(answer: Any, is_right: Callable[[Any], bool], hint: str) -> None:
    """Print whether an answer is right; a wrong one gets the hint.

    Args:
        answer: the learner's. None means that nothing has been filled in.
        is_right: from the answer to True or False. It tries what the answer must do, so that nobody reads the answer off the check.
        hint: one sentence or two.
    """
    if answer is None:
        print("Your turn: nothing is filled in yet.")
        return
    right, error = attempt(lambda: bool(is_right(answer)))
    if error is not None:  # an answer of another kind than was asked for, half of a pair or a wrong shape for instance
        print(f"Not yet: with this answer the check stops with {named(error)}. {hint}")
    else:
        print("Right." if right else f"Not yet. {hint}")
