r"""Bounds for algorithms that do not know M (:mod:`sgdol.reference_tested`).

Proofs: docs/explanation/unknown_smoothness.md.

Symbols: M the smoothness of f, unknown to the algorithm; m_0 its first guess; :math:`\hat M` the present guess, which
doubles at each rejection; :math:`M' = c \hat M` the smoothness that FTRL is given.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from sgdol.theory._checks import non_negative, positive
from sgdol.theory._paper import theorem_4

__all__ = ["doubling_high_probability", "doubling_rate", "grid_rate", "wrong_guesses"]

Test = Literal["three", "two", "symmetric"]


class Guesses(NamedTuple):
    """The guesses of M from m_0 to the first that is at least M."""

    number: int
    """K: how many guesses there are up to the first right one, at most 2 + log2(M/m_0) for m_0 <= M."""
    total: float
    """The sum of the guesses: m_0 (2^K - 1), below 4M for m_0 <= M."""
    last: float
    """The first right guess: m_0 2^(K-1), below 2M for m_0 <= M."""
    inverse_total: float
    """The sum of their reciprocals: (2 - 2^(1-K))/m_0."""


def wrong_guesses(*, smoothness: float, guess: float) -> Guesses:
    r"""The guesses :math:`m_0, 2 m_0, 4 m_0, \dots` up to the first that is at least M, and their sums.

    >>> wrong_guesses(smoothness=10.0, guess=1.0)
    Guesses(number=5, total=31.0, last=16.0, inverse_total=1.9375)
    """
    positive(smoothness=smoothness, guess=guess)
    count, last = 1, guess
    while last < smoothness:  # exact, where a logarithm would round
        count, last = count + 1, 2 * last
    return Guesses(count, 2 * last - guess, last, (2 - 2.0 ** (1 - count)) / guess)


def doubling_rate(
    *,
    smoothness: float,
    guess: float,
    gap: float,
    lipschitz: float,
    alpha: float,
    variance_sum: float,
    horizon: int,
    test: Test = "three",
    back: bool = True,
) -> float:
    r"""The rate of one run that tests its guess of M (:func:`sgdol.reference_tested.run_with_test`).

    With :math:`\Lambda = \ln(1 + L^2T/\alpha)`, K guesses of sum :math:`\sum_e \hat M_e` (:func:`wrong_guesses`),
    :math:`M'_e = c \hat M_e`, :math:`\Delta = f(x_1) - f^\star` and :math:`\Sigma = \sum_t E\sigma_t^2`,

    .. math:: T\, E\|\nabla f(x_k)\|^2 \le 2\Delta \sum_e M'_e + KW
        + \sqrt{\Sigma \left(2\Delta \sum_e M'_e + K (\alpha + W)\right)} + L^2

    * ``test="three"``, three gradients a step: c = 2, :math:`W = 2L^2 (5\Lambda + 8 \ln T + 2)`.
    * ``test="two"``, two gradients: c = 2, :math:`W = 2L^2 (8\Lambda + 8 \ln T + 2)`.
    * ``test="symmetric"``, three gradients: c = 4,
      :math:`W = 2L^2 (5\Lambda + \frac{25}{4} B + 4) + 2\alpha\sqrt B`, where
      :math:`B = 2\ln T + \ln(1 + 25 T L^4/\alpha^2)`.

    The first two know L, the third does not and asks for noise that is symmetric about its mean. If the run does not
    go back to x_1 after a rejection, with :math:`R = 2 M'_K (\Delta + \frac{\alpha + W}{2} \sum_e 1/M'_e)`

    .. math:: T\, E\|\nabla f(x_k)\|^2 \le R + \sqrt{\Sigma R} + L^2.

    Args:
        smoothness: M.
        guess: m_0, positive; one that is larger than M is right at once.
        gap: f(x_1) - f*.
        lipschitz: L.
        alpha: the regulariser's alpha.
        variance_sum: Sigma.
        horizon: T, over all guesses, at least 2.
        test: how a guess is tested.
        back: whether the run goes back to x_1 after a rejection.

    >>> numbers = dict(smoothness=1.0, gap=1.0, lipschitz=1.0, alpha=1.0, variance_sum=0.0, horizon=10**6)
    >>> known, unknown = doubling_rate(**numbers, guess=1.0), doubling_rate(**numbers, guess=1e-3)
    >>> 1 < unknown / known < 12  # 11 guesses in place of one
    True
    """
    positive(alpha=alpha, lipschitz=lipschitz)
    non_negative(gap=gap, variance_sum=variance_sum)
    if horizon < 2:
        raise ValueError(f"horizon must be at least 2, got {horizon!r}")
    guesses = wrong_guesses(smoothness=smoothness, guess=guess)
    square = lipschitz**2
    logarithm = math.log1p(square * horizon / alpha)
    factor = 2.0
    if test == "three":
        price = 2 * square * (5 * logarithm + 8 * math.log(horizon) + 2)
    elif test == "two":
        price = 2 * square * (8 * logarithm + 8 * math.log(horizon) + 2)
    elif test == "symmetric":
        factor = 4.0
        level = 2 * math.log(horizon) + math.log1p(25 * horizon * square**2 / alpha**2)
        price = 2 * square * (5 * logarithm + 6.25 * level + 4) + 2 * alpha * math.sqrt(level)
    else:
        raise ValueError(f"test must be 'three', 'two' or 'symmetric', got {test!r}")
    if back:
        base = 2 * gap * factor * guesses.total + guesses.number * price
        under_root = base + guesses.number * alpha
    else:
        base = 2 * factor * guesses.last * (gap + (alpha + price) / 2 * guesses.inverse_total / factor)
        under_root = base
    return (base + math.sqrt(variance_sum * under_root) + square) / horizon


def doubling_high_probability(
    *,
    failure: float,
    smoothness: float,
    guess: float,
    gap: float,
    lipschitz: float,
    alpha: float,
    variance_sum: float,
    horizon: int,
) -> float:
    r"""A bound on :math:`\frac1T \sum_t \|\nabla f(x_t)\|^2` of one tested run that fails with probability p at most.

    For ``run_with_test(..., test="three", factor=3.0, level=math.log(1/delta))`` with :math:`\delta = p/(3K+1)`. With
    :math:`\lambda = \ln(1/\delta)`, :math:`\Lambda = \ln(1 + L^2T/\alpha)`, V an upper bound on :math:`\sum_t
    \sigma_t^2` and :math:`R = \Delta \sum_e 3\hat M_e + K (\alpha/2 + L^2 (5\Lambda + 15.5\lambda + 3))`,

    .. math:: \sum_t \|\nabla f(x_t)\|^2 \le 7.1 R + 3.3 \sqrt{V R}
        + 1.76 \left(2.4 L \sqrt{K V \lambda} + 4 K L^2 \lambda\right).

    Args:
        failure: p, in (0, 1).
        smoothness: M.
        guess: m_0.
        gap: f(x_1) - f*.
        lipschitz: L.
        alpha: the regulariser's alpha.
        variance_sum: V; it has to hold on every path, as T times the largest variance does.
        horizon: T.

    >>> numbers = dict(smoothness=1.0, guess=0.1, gap=1.0, lipschitz=1.0, alpha=1.0, variance_sum=0.0, horizon=10**6)
    >>> doubling_high_probability(failure=1e-6, **numbers) < 2 * doubling_high_probability(failure=1e-2, **numbers)
    True
    """
    positive(alpha=alpha, lipschitz=lipschitz, horizon=horizon)
    non_negative(gap=gap, variance_sum=variance_sum)
    if not 0 < failure < 1:
        raise ValueError(f"failure must be in (0, 1), got {failure!r}")
    guesses = wrong_guesses(smoothness=smoothness, guess=guess)
    square, count = lipschitz**2, guesses.number
    level = math.log((3 * count + 1) / failure)
    each = alpha / 2 + square * (5 * math.log1p(square * horizon / alpha) + 15.5 * level + 3)
    base = 3 * gap * guesses.total + count * each
    signal = 2.4 * lipschitz * math.sqrt(count * variance_sum * level) + 4 * count * square * level
    return (7.1 * base + 3.3 * math.sqrt(variance_sum * base) + 1.76 * signal) / horizon


def grid_rate(
    *,
    smoothness: float,
    guess: float,
    runs: int,
    gap: float,
    lipschitz: float,
    alpha: float,
    variance: float,
    horizon: int,
) -> float:
    r"""The rate of a grid of guesses and a selection (:func:`sgdol.reference_tested.grid_and_selection`).

    K runs with :math:`M_i = 2^i m_0`, of :math:`N = \lfloor T/(2K) \rfloor` steps each, then N pairs of gradients at a
    random iterate of each. With :math:`M_j` the smallest :math:`M_i \ge M`, below 2M for :math:`m_0 \le M`,

    .. math:: E\|\nabla f(x)\|^2 \le \text{Theorem 4 with } M_j \text{ and horizon } N
        + \sigma L \sqrt{\frac{2K}{N}}

    whose last term is :math:`2 K \sigma L/\sqrt T` if 2K divides T.

    Args:
        smoothness: M.
        guess: m_0.
        runs: K, so large that the last guess is at least M.
        gap: f(x_1) - f*.
        lipschitz: L.
        alpha: the regulariser's alpha.
        variance: sigma^2, the largest of the variances.
        horizon: T, the pairs of gradients in all.

    >>> round(grid_rate(smoothness=1.0, guess=0.1, runs=5, gap=1.0, lipschitz=1.0, alpha=1.0, variance=0.0,
    ...                 horizon=10**4), 3)
    0.072
    """
    non_negative(variance=variance)
    if runs < 1:
        raise ValueError(f"runs must be at least 1, got {runs!r}")
    right = wrong_guesses(smoothness=smoothness, guess=guess)
    if right.number > runs:
        raise ValueError(
            f"runs must be at least {right.number}, so that the last guess is at least the smoothness {smoothness!r}; "
            f"got {runs!r}"
        )
    steps = horizon // (2 * runs)
    if steps < 1:
        raise ValueError(f"horizon must be at least 2 * runs = {2 * runs}, got {horizon!r}")
    rate = theorem_4(
        smoothness=right.last, gap=gap, lipschitz=lipschitz, alpha=alpha, variance_sum=steps * variance, horizon=steps
    )
    return rate + lipschitz * math.sqrt(2 * runs * variance / steps)
