"""The regret, and the right-hand sides of the paper's Theorems 2, 4, 6, 7 and 8."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import array_api_compat

from sgdol import surrogate
from sgdol.learners import LARGEST_MULTIPLIER
from sgdol.theory._checks import in_range, non_negative, positive, same_length

__all__ = [
    "CoordinateBounds",
    "best_fixed_step_size",
    "ftrl_regret_bound",
    "log_term",
    "regret",
    "solve",
    "theorem_2",
    "theorem_4",
    "theorem_6",
    "theorem_7",
    "theorem_8",
]

Array = Any


def best_fixed_step_size(u_sum: Array, n_sum: Array, smoothness: float) -> Array:
    r"""The fixed step size with the smallest cumulative surrogate loss in hindsight.

    .. math:: \eta^\star = \mathrm{clip}\left(\frac{\sum_t u_t}{M \sum_t n_t}, 0, \frac2M\right)

    Args:
        u_sum: the sum of u_t over the run.
        n_sum: the sum of n_t over the run; where it is 0, every step size is as good and 1/M is returned.
        smoothness: M.

    >>> import numpy as np
    >>> best_fixed_step_size(np.asarray(1.0), np.asarray(4.0), smoothness=10.0)
    np.float64(0.025)
    """
    positive(smoothness=smoothness)
    xp = array_api_compat.array_namespace(n_sum)
    one = xp.ones_like(n_sum)
    ratio = xp.where(n_sum > 0, u_sum, one) / xp.where(n_sum > 0, n_sum, one)
    return xp.clip(ratio, 0.0, LARGEST_MULTIPLIER) / smoothness


def regret(step_sizes: Array, u: Array, n: Array, smoothness: float, against: Array | None = None) -> Array:
    r"""The regret :math:`\sum_{t=1}^T (\ell_t(\eta_t) - \ell_t(\eta))` of the step sizes that were played.

    Args:
        step_sizes: eta_t, time along the first axis; further axes are blocks or coordinates.
        u: u_t, of the same shape.
        n: n_t, of the same shape.
        smoothness: M.
        against: the fixed eta to compare with, one per block; None for the best one in hindsight.

    >>> import numpy as np
    >>> u, n = np.array([1.0, 1.0]), np.array([1.0, 3.0])
    >>> regret(np.array([1.0, 1.0]), u, n, smoothness=1.0)  # best is 1/2
    np.float64(0.5)
    """
    xp = array_api_compat.array_namespace(u)
    if against is None:
        against = best_fixed_step_size(xp.sum(u, axis=0), xp.sum(n, axis=0), smoothness)
    played = surrogate.loss(step_sizes, u, n, smoothness)
    return xp.sum(played - surrogate.loss(against, u, n, smoothness), axis=0)


def ftrl_regret_bound(step_size: float, *, smoothness: float, alpha: float, lipschitz: float, horizon: int) -> float:
    r"""The bound on FTRL's regret inside the proof of Theorem 4, for the paper's estimator.

    .. math:: \mathrm{Regret}_T(\eta) \le \frac{M \alpha}{2}\left(\eta - \frac1M\right)^2
        + \frac{5 L^2}{M} \ln\left(1 + \frac{L^2 T}{\alpha}\right), \qquad 0 \le \eta \le \frac2M

    >>> ftrl_regret_bound(0.1, smoothness=10.0, alpha=1.0, lipschitz=1.0, horizon=0)
    0.0
    """
    positive(smoothness=smoothness, alpha=alpha)
    in_range(step_size, smoothness)
    return smoothness * alpha / 2 * (step_size - 1 / smoothness) ** 2 + log_term(lipschitz, horizon, alpha) / smoothness


def theorem_2(step_size: float, *, smoothness: float, gap: float, expected_regret: float, variance_sum: float) -> float:
    r"""The right-hand side of Theorem 2.

    .. math:: E\left[\left(\eta - \frac M2 \eta^2\right) \sum_{t=1}^T \|\nabla f(x_t)\|^2\right]
        \le f(x_1) - f^\star + E[\mathrm{Regret}_T(\eta)] + \frac{M \eta^2}{2} \sum_{t=1}^T E[\sigma_t^2]

    Args:
        step_size: eta, in (0, 2/M].
        smoothness: M.
        gap: f(x_1) - f*.
        expected_regret: E[Regret_T(eta)].
        variance_sum: sum_t E[sigma_t^2]; with the symmetric estimator of k gradients, that sum divided by k.

    >>> theorem_2(0.1, smoothness=10.0, gap=1.0, expected_regret=0.5, variance_sum=0.0)
    1.5
    """
    positive(smoothness=smoothness, step_size=step_size)
    non_negative(gap=gap, variance_sum=variance_sum)
    in_range(step_size, smoothness)
    return gap + expected_regret + smoothness * step_size**2 / 2 * variance_sum


def theorem_4(
    *, smoothness: float, gap: float, lipschitz: float, alpha: float, variance_sum: float, horizon: int
) -> float:
    r"""The right-hand side of Theorem 4, the rate of SGDOL with FTRL.

    .. math:: E\|\nabla f(x_k)\|^2 \le \frac{2M}{T}\left(f(x_1) - f^\star + \frac{5L^2}{M} \Lambda\right)
        + \frac1T \sqrt{2M \Sigma \left(f(x_1) - f^\star + \frac{\alpha}{2M}\right)}
        + \frac1T \sqrt{10 L^2 \Sigma \Lambda}

    with :math:`\Lambda = \ln(1 + L^2 T/\alpha)` and :math:`\Sigma = \sum_t E[\sigma_t^2]`.

    >>> round(theorem_4(smoothness=1.0, gap=1.0, lipschitz=1.0, alpha=1.0, variance_sum=0.0, horizon=100), 4)
    0.4815
    """
    positive(smoothness=smoothness, alpha=alpha, lipschitz=lipschitz, horizon=horizon)
    non_negative(gap=gap, variance_sum=variance_sum)
    logarithm = log_term(lipschitz, horizon, alpha)
    return solve(smoothness, gap, logarithm, alpha, variance_sum) / horizon


def theorem_6(*, smoothness: float, pl_constant: float, gap: float, horizon: int) -> float:
    r"""The right-hand side of Theorem 6, the linear rate without noise under the PL condition.

    .. math:: f(x_{T+1}) - f^\star \le \left(1 - \frac{\mu}{M}\right)^T (f(x_1) - f^\star)

    >>> theorem_6(smoothness=2.0, pl_constant=1.0, gap=1.0, horizon=3)
    0.125
    """
    positive(smoothness=smoothness, pl_constant=pl_constant)
    non_negative(gap=gap, horizon=horizon)
    if pl_constant > smoothness:
        raise ValueError(f"pl_constant must be at most the smoothness {smoothness!r}, got {pl_constant!r}")
    return (1 - pl_constant / smoothness) ** horizon * gap


def theorem_7(
    step_sizes: Sequence[float],
    *,
    smoothness: float,
    gap: float,
    expected_regret: float,
    variance_sums: Sequence[float],
) -> float:
    r"""The right-hand side of Theorem 7, Theorem 2 per coordinate.

    .. math:: E\left[\sum_{t,i} \left(\eta_i - \frac M2 \eta_i^2\right) \nabla f(x_t)_i^2\right]
        \le f(x_1) - f^\star + E[\mathrm{Regret}_T(\eta)] + \frac M2 \sum_i \eta_i^2 \sum_t E[\sigma_{t,i}^2]

    Args:
        step_sizes: eta_i, each in (0, 2/M].
        smoothness: M.
        gap: f(x_1) - f*.
        expected_regret: the regret summed over the coordinates.
        variance_sums: sum_t E[sigma_{t,i}^2] for each coordinate i.

    >>> theorem_7([0.1, 0.1], smoothness=10.0, gap=1.0, expected_regret=0.5, variance_sums=[0.0, 20.0])
    2.5
    """
    positive(smoothness=smoothness)
    non_negative(gap=gap)
    same_length(step_sizes=step_sizes, variance_sums=variance_sums)
    for eta in step_sizes:
        positive(step_size=eta)
        in_range(eta, smoothness)
    for variance in variance_sums:
        non_negative(variance_sum=variance)
    noise = sum(eta**2 * variance for eta, variance in zip(step_sizes, variance_sums, strict=True))
    return gap + expected_regret + smoothness / 2 * noise


class CoordinateBounds(NamedTuple):
    """The two statements of Theorem 8."""

    each: list[float]
    """For each i, a bound on E sum_t (grad f(x_t)_i)^2."""
    total: float
    """A bound on E sum_t ||grad f(x_t)||^2."""


def theorem_8(
    *,
    smoothness: float,
    gap: float,
    lipschitz: Sequence[float],
    alpha: float,
    variance_sums: Sequence[float],
    horizon: int,
) -> CoordinateBounds:
    r"""The right-hand sides of Theorem 8, the rate of per-coordinate SGDOL with FTRL.

    With :math:`R = \sum_i L_i^2 \ln(1 + L_i^2 T/\alpha)`, for each coordinate i

    .. math:: E \sum_t \nabla f(x_t)_i^2 \le 2M\left(f(x_1) - f^\star + \frac{5R}{M}\right)
        + \sqrt{2M \Sigma_i \left(f(x_1) - f^\star + \frac{d\alpha}{2M}\right)} + \sqrt{10 \Sigma_i R} + (d-1)\alpha

    with :math:`\Sigma_i = \sum_t E[\sigma_{t,i}^2]`, and for the whole gradient the same without the last term and with
    :math:`\Sigma = \sum_i \Sigma_i`. Sums over t, not means.

    Args:
        smoothness: M.
        gap: f(x_1) - f*.
        lipschitz: L_i, the bound on coordinate i of a stochastic gradient (H3').
        alpha: the regulariser's alpha in each coordinate.
        variance_sums: Sigma_i for each coordinate.
        horizon: T.

    >>> bounds = theorem_8(smoothness=1.0, gap=1.0, lipschitz=[1.0], alpha=1.0, variance_sums=[4.0], horizon=100)
    >>> bounds.total == bounds.each[0]  # one coordinate: both statements are Theorem 4's
    True
    """
    positive(smoothness=smoothness, alpha=alpha, horizon=horizon)
    non_negative(gap=gap)
    same_length(lipschitz=lipschitz, variance_sums=variance_sums)
    d = len(lipschitz)
    logarithm = sum(log_term(bound, horizon, alpha) for bound in lipschitz)
    each = [solve(smoothness, gap, logarithm, d * alpha, variance) + (d - 1) * alpha for variance in variance_sums]
    return CoordinateBounds(each, solve(smoothness, gap, logarithm, d * alpha, sum(variance_sums)))


def log_term(lipschitz: float, horizon: int, alpha: float) -> float:
    """5 L^2 ln(1 + L^2 T / alpha)."""
    non_negative(lipschitz=lipschitz, horizon=horizon)
    return 5 * lipschitz**2 * math.log1p(lipschitz**2 * horizon / alpha)


def solve(smoothness: float, gap: float, logarithm: float, alpha: float, variance_sum: float) -> float:
    """The solution of the quadratic inequality that ends the proofs of Theorems 4 and 8."""
    non_negative(variance_sum=variance_sum)
    return (
        2 * (smoothness * gap + logarithm)
        + math.sqrt(2 * smoothness * variance_sum * (gap + alpha / (2 * smoothness)))
        + math.sqrt(2 * variance_sum * logarithm)
    )
