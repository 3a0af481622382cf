"""Arguments are refused by name, with the value and with what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import jax
import numpy as np

from sgdol.learners import FTRL, Learner

__all__ = ["check_choice", "check_number", "is_given", "learner_or_default"]


def check_number(name: str, value: Any, allowed: Callable[[Any], bool], words: str) -> None:
    """Refuse a bad number. A jax array is let through: under jit, vmap or inject_hyperparams its value is unknown."""
    if isinstance(value, jax.Array):
        return
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, {words}, got {value!r}")
    if not (math.isfinite(value) and allowed(value)):
        raise ValueError(f"{name} must be {words}, got {value!r}")


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuse a word that is none of those allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def learner_or_default(learner: Learner | None) -> Learner:
    """The learner; FTRL for None."""
    if learner is None:
        return FTRL()
    if isinstance(learner, type) or not isinstance(learner, Learner):
        raise TypeError(
            f"learner must be an object with initial, predict and observe (see sgdol.learners), got {learner!r}"
        )
    return learner


def is_given(value: Any) -> bool:
    """Whether an optional number asks for anything. An array does, as nobody knows whether it is zero."""
    return value is not None and not (isinstance(value, Real) and value == 0)
