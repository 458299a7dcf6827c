"""Which graded functions a learner's function calls: where a step is wrong, the cause may lie in an earlier one."""

from __future__ import annotations

import dis
from collections.abc import Callable, Container, Iterator
from types import CodeType, FunctionType


def called(mine: Callable, names: Container[str]) -> dict[str, Callable]:
    """The functions called ``names`` that ``mine`` uses, itself or through others of its notebook; what is used comes before its users."""
    found: dict[str, Callable] = {}
    seen: set[type | FunctionType] = set()

    def walk(used: object) -> None:
        if not isinstance(used, (type, FunctionType)) or used in seen:
            return
        seen.add(used)
        if isinstance(used, type):
            for method in vars(used).values():
                walk(method)
            return
        for name in _globals(used.__code__):
            value = used.__globals__.get(name)
            if getattr(value, "__module__", None) == mine.__module__:
                walk(value)
            if name in names and _is_a_learners(value) and value is not mine:
                found.setdefault(name, value)

    walk(mine)
    return found


def _is_a_learners(value: object) -> bool:
    return isinstance(value, FunctionType) and str(value.__module__).partition(".")[0] not in ("minimodel", "torch")


def _globals(code: CodeType) -> Iterator[str]:
    """Global names that a function reads, those of the lambdas and functions inside it included."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner)
