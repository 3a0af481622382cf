"""What makes a number: a digest of the code that a run goes through, and no more.

The code of a problem is the function that builds it and everything of this package that it refers to, directly or not:
functions, classes with their bases, constants. So a new problem, or a change to another one, leaves a problem's digest
as it is, and its saved runs are used again. Comments, docstrings and formatting change no number and no digest.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import textwrap
import types
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.quality import data, training
from benchmarks.quality.methods import Method
from benchmarks.quality.problem import Problem

__all__ = ["code", "of", "problem_code", "reached", "source", "units_code"]

PACKAGE = __package__.partition(".")[0] + "."
"""Where all benchmarks are: their functions may call those of another."""
TRAINING = (training.run, Problem.make, Method.make)
"""The training loop, how a problem gets its seeds, and how an optimizer is made."""


def of(value: Any) -> str:
    """The digest of plain values.

    >>> of({"a": 1, "b": 2}) == of({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:20]


@functools.cache
def source(thing: Any) -> str:
    """Of a module, a class or a function, without comments and docstrings."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [n for n in body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    return ast.unparse(tree)  # not dump, whose form differs between versions of Python


def reached(roots: Iterable[Any]) -> dict[str, str]:
    """Functions and classes, and all of the benchmarks that they refer to: what each is, by its name."""
    found: dict[str, str] = {}
    waiting = list(roots)
    while waiting:
        thing = inspect.unwrap(waiting.pop())
        name = f"{thing.__module__}.{thing.__qualname__}"
        if name in found:
            continue
        found[name] = source(thing)
        for label, other in _references(thing):
            if _is_code(other):
                waiting.append(other)
            elif label:
                found[label] = repr(other)
    return found


@functools.cache
def code(roots: tuple[Any, ...]) -> str:
    """The digest of what is reached from functions and classes."""
    return of(reached(roots))


def _is_code(thing: Any) -> bool:
    thing = inspect.unwrap(thing) if callable(thing) else thing
    is_code = inspect.isfunction(thing) or inspect.isclass(thing)
    return is_code and str(thing.__module__).startswith(PACKAGE)


def _references(thing: Any) -> Iterator[tuple[str, Any]]:
    """What a function or class of this package names: code, and constants with the name under which to note them."""
    if inspect.isclass(thing):
        yield from (("", base) for base in thing.__mro__[1:])
        for member in vars(thing).values():
            function = (
                getattr(member, "func", None) or getattr(member, "fget", None) or getattr(member, "__func__", member)
            )
            if inspect.isfunction(function) and _is_code(function):
                yield from _references(function)
        return
    names = set(_names(thing.__code__))
    modules = [vars(m) for n in names if isinstance(m := thing.__globals__.get(n), types.ModuleType) and _ours(m)]
    for space in (thing.__globals__, *modules):
        for name in sorted(names & space.keys()):
            value = space[name]
            if _is_code(value):
                yield "", value
            elif isinstance(value, int | float | str | tuple | dict):
                yield f"{space['__name__']}.{name}", value


def _ours(module: types.ModuleType) -> bool:
    return module.__name__.startswith(PACKAGE)


def _names(function: types.CodeType) -> Iterator[str]:
    """Global names and attributes, in nested functions too."""
    yield from function.co_names
    for constant in function.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def units_code() -> str:
    """Of the units of learning rates."""
    return code((vars(Problem)["scales"].func, Problem._normalised))


def problem_code(problem: Problem) -> str:
    """Of one problem: its function, and the data that its options name."""
    named = [getattr(data, v) for v in problem.options.values() if isinstance(v, str) and v in data.__all__]
    return code((problem.build, *(d for d in named if callable(d))))
