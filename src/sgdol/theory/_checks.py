"""What every bound refuses, in a sentence that names the argument, its value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sgdol.learners import LARGEST_MULTIPLIER

__all__ = ["in_range", "non_negative", "positive", "same_length"]


def positive(**arguments: float) -> None:
    """Refuse what is not positive and finite."""
    for name, value in arguments.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive and finite, got {value!r}")


def non_negative(**arguments: float) -> None:
    """Refuse what is negative or not finite."""
    for name, value in arguments.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and at least 0, got {value!r}")


def in_range(step_size: float, smoothness: float) -> None:
    """Refuse a step size outside [0, 2/M]."""
    if not 0 <= step_size <= LARGEST_MULTIPLIER / smoothness:
        raise ValueError(f"step_size must be in [0, 2/M] = [0, {LARGEST_MULTIPLIER / smoothness:g}], got {step_size!r}")


def same_length(**arguments: Sequence[float]) -> None:
    """Refuse lists of different lengths, and empty ones."""
    lengths = {name: len(values) for name, values in arguments.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(f"one entry per coordinate is needed in each of {', '.join(lengths)}, got {lengths}")
