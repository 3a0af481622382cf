"""Arguments are refused by name, with the value and with what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["check_choice", "check_number", "is_given", "known", "shown"]


def check_number(
    name: str, value: Any, allowed: Callable[[float], bool], words: str, *, of_any_size: bool = False
) -> Any:
    """Refuse a bad number, and return a good one: as a Python float, or as the jax array that it was.

    A traced array is let through if it is a single real number: under jit, vmap or inject_hyperparams its value is
    unknown. Any other number is checked as the default float type has it, in which 1e-50 may be 0.

    Args:
        name: the argument's.
        value: what was given.
        allowed: whether a finite number is.
        words: what is allowed.
        of_any_size: do not mind what the default float type makes of it.

    >>> check_number("momentum", np.float32(0.5), lambda beta: 0 <= beta < 1, "in [0, 1)")
    0.5
    """
    number = _plain(name, value, words)
    if number is None:
        return value
    try:
        number = exact = float(number)
    except OverflowError:  # an integer that is larger than any float
        number = exact = math.inf
    kind = jnp.result_type(float)
    if not of_any_size:
        with np.errstate(over="ignore"):
            number = float(np.asarray(exact, kind))
    if not (math.isfinite(number) and allowed(number)):
        rounded = f", which is {number!r} in {kind}" if math.isfinite(exact) and number != exact else ""
        raise ValueError(f"{name} must be {words}, got {shown(value)}{rounded}")
    return value if isinstance(value, jax.Array) else exact


def _plain(name: str, value: Any, words: str) -> Any:
    """The value as a number of Python's; None if it is traced, or on other machines, and nobody can know it."""
    number = value
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        real = jnp.issubdtype(value.dtype, jnp.integer) or jnp.issubdtype(value.dtype, jnp.floating)
        if value.ndim or not real:
            raise TypeError(f"{name} must be a number, {words}, got {shown(value)}")
        if not known(value):
            return None
        number = value.item()
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"{name} must be a number, {words}, got {shown(value)}")
    return number


def known(value: Any) -> bool:
    """Whether the value of a number is known now."""
    return not isinstance(value, jax.core.Tracer) and bool(getattr(value, "is_fully_addressable", True))


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuse a word that is none of those allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {shown(value)}")


def is_given(value: Any) -> bool:
    """Whether an optional number asks for anything. An array does: whether it is zero may change."""
    return value is not None and not (isinstance(value, Real) and value == 0)


def shown(value: Any) -> str:
    """A value in an error, on one line and not too long.

    >>> len(shown(10**400))
    60
    """
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python does not print integers of many thousand digits
        text = f"an {type(value).__name__} of too many digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
