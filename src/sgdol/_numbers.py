"""Arithmetic that is the same on Python numbers and on arrays of any namespace.

A decision that is written once with these runs on the host, where Python's own numbers are fastest, and inside a traced
function, where nothing may branch. Divisions are guarded: what is not chosen is still evaluated.
"""

from __future__ import annotations

import math
from typing import Any

import array_api_compat

__all__ = ["clip", "hypot", "isfinite", "maximum", "minimum", "namespace", "negate", "ratio", "sqrt", "where"]

Array = Any

PLAIN = (int, float)
"""Python's own numbers. (A tuple is asked faster than a union, and these functions are asked often.)"""


def namespace(*values: Array) -> Any:
    """The array namespace of the first value that has one, or None if all are Python numbers."""
    for value in values:
        if not isinstance(value, PLAIN):
            return array_api_compat.array_namespace(value)
    return None


def where(condition: Array, yes: Array, no: Array) -> Array:
    """The one or the other."""
    if isinstance(condition, bool):
        return yes if condition else no
    return namespace(condition).where(condition, yes, no)


def maximum(a: Array, b: Array) -> Array:
    """The larger; of Python numbers, like Python's max, the first where they cannot be compared."""
    if isinstance(a, PLAIN) and isinstance(b, PLAIN):
        return b if b > a else a
    xp = namespace(a, b)
    return xp.clip(a, b, None) if isinstance(b, PLAIN) else xp.maximum(*_alike(xp, a, b))


def minimum(a: Array, b: Array) -> Array:
    """The smaller."""
    if isinstance(a, PLAIN) and isinstance(b, PLAIN):
        return b if b < a else a
    xp = namespace(a, b)
    return xp.clip(a, None, b) if isinstance(b, PLAIN) else xp.minimum(*_alike(xp, a, b))


def clip(value: Array, low: float, high: float) -> Array:
    """The value, moved into [low, high]."""
    return min(max(value, low), high) if isinstance(value, PLAIN) else namespace(value).clip(value, low, high)


def sqrt(value: Array) -> Array:
    """The square root; of a Python number that is not at least 0 it is not a number, as arrays have it."""
    if isinstance(value, PLAIN):
        return math.sqrt(value) if value >= 0 else math.nan
    return namespace(value).sqrt(value)


def hypot(a: Array, b: Array) -> Array:
    """The root of a^2 + b^2, also where the squares leave the range."""
    if isinstance(a, PLAIN) and isinstance(b, PLAIN):
        return math.hypot(a, b)
    xp = namespace(a, b)
    return xp.hypot(*_alike(xp, a, b))


def isfinite(value: Array) -> Array:
    """Whether it is a finite number."""
    return math.isfinite(value) if isinstance(value, PLAIN) else namespace(value).isfinite(value)


def negate(condition: Array) -> Array:
    """Not; ``~True`` of a Python bool would be a number."""
    return not condition if isinstance(condition, bool) else ~condition


def ratio(numerator: Array, denominator: Array, otherwise: float) -> Array:
    """The quotient, or ``otherwise`` where the denominator is not positive."""
    if isinstance(denominator, PLAIN):
        return numerator / denominator if denominator > 0 else otherwise
    # On the CPU torch.where takes ten times as long as a division, and a number is read without a wait.
    host = array_api_compat.is_torch_array(denominator) and denominator.device.type == "cpu"
    if host and denominator.numel() and denominator.amin().item() > 0:
        return numerator / denominator
    positive = denominator > 0
    return where(positive, numerator / where(positive, denominator, 1.0), otherwise)


def _alike(xp: Any, *values: Array) -> list[Array]:
    """Python numbers as arrays of the type of the array among the values."""
    like = next(v for v in values if not isinstance(v, PLAIN))
    return [xp.full_like(like, v) if isinstance(v, PLAIN) else v for v in values]
