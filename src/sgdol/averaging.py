r"""The weight of the newest iterate in the polynomial average, the same in every front end.

.. math:: \bar x_t = \bar x_{t-1} + \min\left(1, \frac{a + 1}{t + a}\right) (x_t - \bar x_{t-1})

weights iterate t in proportion to about :math:`t^a`: a = 0 is the uniform average, and the larger a, the more the late
iterates count. (Shamir and Zhang 2013.)
"""

from __future__ import annotations

from typing import Any

from sgdol._numbers import maximum

__all__ = ["weight"]

Array = Any


def weight(t: Array, power: Array) -> Array:
    r"""min(1, (a + 1)/(t + a)): by how much the average moves towards iterate t.

    Args:
        t: how many iterates there are with this one; of 0, as of 1, the weight is 1. A number or an array.
        power: a, at least 0 and finite.

    >>> [weight(t, 0.0) for t in (1, 2, 4)]  # the uniform average
    [1.0, 0.5, 0.25]
    >>> weight(10, 8.0)
    0.5
    """
    return (power + 1) / maximum(t + power, power + 1)
