r"""The numbers of ``diagnostics()``: signal-to-noise ratio, noise scale, regret.

Front ends add (u, n) of every update to a few sums, each weighted by the base rate (two of them are moving averages,
:func:`recent`). The functions here compute the diagnostics from these sums. Noise can make the sums negative; all
results are at least 0 or finite nevertheless, so that a plot can show them.
"""

from __future__ import annotations

from typing import Any

from sgdol._numbers import clip, maximum, minimum, ratio, where
from sgdol.learners import LARGEST_MULTIPLIER
from sgdol.surrogate import loss

__all__ = ["RECENT", "best_multiplier", "noise_scale", "recent", "regret", "signal_to_noise"]

Array = Any

RECENT = 0.99
"""The signal-to-noise ratio and the noise scale are averages over about the last 1 / (1 - RECENT) updates."""

SMALLEST_NOISE = 2.0**-52
"""In units of n: what is smaller is rounding, and counts as this much."""


def recent(average: Array, value: Array) -> Array:
    """The moving average after one more value.

    >>> recent(1.0, 0.0)
    0.99
    """
    return value + RECENT * (average - value)


def signal_to_noise(signal: Array, length: Array) -> Array:
    r"""The sum of u over that of n - u: from 0 (nothing but noise) to :math:`2^{52}` (none).

    Not a number before any update. Both sums are estimates: a signal that comes out negative counts as 0, and so does
    the noise, as nearly as a finite ratio allows.

    Args:
        signal: the sum of u, or its moving average.
        length: the same of n.

    >>> signal_to_noise(1.0, 3.0), signal_to_noise(-1.0, 3.0), signal_to_noise(2.0, 2.0) == 2.0**52
    (0.5, 0.0, True)
    """
    noise = maximum(length - signal, SMALLEST_NOISE * length)
    return ratio(minimum(maximum(signal, 0.0), length), noise, otherwise=float("nan"))


def noise_scale(signal: Array, length: Array, k: Array) -> Array:
    r"""How many of the k gradients have to be averaged until signal and noise are equal.

    From 0 (no noise) to infinity (no signal was seen); nan before any update.

    Args:
        signal: the sum of u, or its moving average.
        length: the same of n.
        k: how many gradients an update has.

    >>> noise_scale(1.0, 3.0, k=2), noise_scale(3.0, 2.0, k=2), noise_scale(-1.0, 2.0, k=2)
    (4.0, 0.0, inf)
    """
    noise = maximum(length - signal, 0.0)
    positive = signal > 0
    nothing = where(length > 0, float("inf"), float("nan"))
    return where(positive, k * noise / where(positive, signal, 1.0), nothing)


def best_multiplier(signal: Array, length: Array) -> Array:
    """The fixed multiple of the base rate that would have had the least surrogate; 1 before any update.

    >>> best_multiplier(1.0, 4.0), best_multiplier(-1.0, 4.0)
    (0.25, 0.0)
    """
    return clip(ratio(signal, length, otherwise=1.0), 0.0, LARGEST_MULTIPLIER)


def regret(surrogate: Array, signal: Array, length: Array) -> Array:
    """The sum of the surrogate losses that were played, minus that of the best fixed multiple of the base rate.

    Args:
        surrogate: the sum of the losses at the multipliers that were played.
        signal: the sum of u.
        length: the sum of n.

    >>> regret(0.5, 1.0, 4.0)  # the best, 1/4, has -1/8
    0.625
    """
    return surrogate - loss(best_multiplier(signal, length), signal, length, 1.0)
