"""What diagnostics show is bounded, and the same on numbers and on arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sgdol import averaging, summary

SUMS = [(1.0, 3.0), (-1.0, 3.0), (0.0, 3.0), (3.0, 3.0), (4.0, 3.0), (1e-300, 1e300), (1e300, 1e300), (0.0, 0.0)]
"""(sum of u, sum of n): estimates, so that u may be negative or larger than n."""


@pytest.mark.parametrize(("signal", "length"), SUMS)
def test_signal_to_noise_is_finite_and_never_negative(signal, length):
    value = summary.signal_to_noise(signal, length)
    assert math.isnan(value) if length == 0 else 0 <= value <= 2.0**52


@pytest.mark.parametrize(("signal", "length"), SUMS)
def test_the_noise_scale_is_never_negative_and_infinite_only_without_signal(signal, length):
    value = summary.noise_scale(signal, length, 2)
    assert math.isnan(value) if length == 0 else value >= 0
    assert not (math.isinf(value) and signal > 1e-200)


@pytest.mark.parametrize("function", [summary.signal_to_noise, summary.best_multiplier])
def test_arrays_give_what_numbers_give(function):
    signal, length = np.array(SUMS).T
    np.testing.assert_array_equal(function(signal, length), [function(*pair) for pair in SUMS])


def test_regret_is_never_negative_for_the_best_multiplier_itself():
    for signal, length in SUMS[:4]:
        s = summary.best_multiplier(signal, length)
        assert summary.regret(s * s / 2 * length - s * signal, signal, length) == 0


@pytest.mark.parametrize("power", [0.0, 2.5, 8.0])
def test_the_first_iterate_is_the_whole_average(power):
    assert averaging.weight(1, power) == 1
    np.testing.assert_array_equal(
        averaging.weight(np.arange(4.0), power), [averaging.weight(t, power) for t in range(4)]
    )
