r"""Theorem 4 for the symmetric estimator, and constants in a metric. Proofs: docs/explanation/theory.md."""

from __future__ import annotations

import math
from typing import NamedTuple

from sgdol.theory._checks import in_range, non_negative, positive
from sgdol.theory._paper import solve

__all__ = ["MetricConstants", "in_metric", "moment_rate", "symmetric_rate", "symmetric_regret_bound", "symmetric_term"]


def symmetric_term(lipschitz: float, horizon: int, alpha: float, *, random_alpha: bool = False) -> float:
    r"""M times the part of FTRL's expected regret that the losses cost, for the symmetric estimator.

    .. math:: L^2 \min\left(\frac{L^2}{\alpha} + \ln\left(1 + \frac{L^2 T}{\alpha}\right),\; 5 + \ln(4T)\right)

    The second holds for every alpha, also one that is made of the first gradient; the first needs an alpha that is
    fixed before step 1, and is left out with ``random_alpha``.
    """
    non_negative(lipschitz=lipschitz, horizon=horizon)
    if horizon == 0 or lipschitz == 0:
        return 0.0
    square = lipschitz**2
    without_alpha = square * (5 + math.log(4 * horizon))
    if random_alpha:
        return without_alpha
    return min(without_alpha, square * (square / alpha + math.log1p(square * horizon / alpha)))


def symmetric_regret_bound(
    step_size: float,
    *,
    smoothness: float,
    alpha: float,
    lipschitz: float,
    horizon: int,
    random_alpha: bool = False,
) -> float:
    r"""A bound on FTRL's expected regret with the symmetric estimator of k gradients, for every :math:`k \ge 2`.

    .. math:: E\,\mathrm{Regret}_T(\eta) \le \frac{M\,E\alpha}{2}\left(\eta - \frac1M\right)^2
        + \frac{L^2}{M} \min\left(\frac{L^2}{\alpha} + \ln\left(1 + \frac{L^2 T}{\alpha}\right),\; 5 + \ln(4T)\right)

    Args:
        step_size: eta, in [0, 2/M].
        smoothness: M.
        alpha: the regulariser's alpha, or its expectation if it is random.
        lipschitz: L.
        horizon: T.
        random_alpha: True if alpha is made of the first gradients (alpha = kappa n_1, the default of the
            optimizers). Only the bound without alpha is used then.

    >>> symmetric_regret_bound(0.1, smoothness=10.0, alpha=1.0, lipschitz=1.0, horizon=1, random_alpha=True)
    0.638...
    """
    positive(smoothness=smoothness, alpha=alpha)
    in_range(step_size, smoothness)
    term = symmetric_term(lipschitz, horizon, alpha, random_alpha=random_alpha)
    return smoothness * alpha / 2 * (step_size - 1 / smoothness) ** 2 + term / smoothness


def symmetric_rate(
    *,
    k: int,
    smoothness: float,
    gap: float,
    lipschitz: float,
    alpha: float,
    variance_sum: float,
    horizon: int,
    random_alpha: bool = False,
) -> float:
    r"""The counterpart of Theorem 4 for the symmetric estimator of ``k`` gradients.

    With :math:`\Lambda = \min(L^2/\alpha + \ln(1 + L^2 T/\alpha),\; 5 + \ln(4T))`,

    .. math:: E\|\nabla f(x_k)\|^2 \le \frac{2M}{T}\left(f(x_1) - f^\star + \frac{L^2}{M} \Lambda\right)
        + \frac1T \sqrt{\frac{2M \Sigma}{k} \left(f(x_1) - f^\star + \frac{\alpha}{2M}\right)}
        + \frac1T \sqrt{\frac{2 L^2 \Lambda \Sigma}{k}}

    ``variance_sum`` is that of single gradients. With ``random_alpha``, alpha is the expectation of a random one and
    :math:`\Lambda = 5 + \ln(4T)`; see :func:`symmetric_regret_bound`.

    >>> symmetric_rate(k=2, smoothness=1.0, gap=1.0, lipschitz=1.0, alpha=1.0, variance_sum=0.0, horizon=100) < 0.14
    True
    """
    positive(smoothness=smoothness, alpha=alpha, lipschitz=lipschitz, horizon=horizon)
    non_negative(gap=gap, variance_sum=variance_sum)
    if k < 2:
        raise ValueError(f"k must be at least 2, got {k!r}")
    term = symmetric_term(lipschitz, horizon, alpha, random_alpha=random_alpha)
    return solve(smoothness, gap, term, alpha, variance_sum / k) / horizon


def moment_rate(
    *,
    smoothness: float,
    gap: float,
    ratio: float,
    scale: float,
    alpha: float,
    variance_sum: float,
    horizon: int,
) -> float:
    r"""Theorem 4 for the symmetric estimator of two gradients with unbounded noise, as under differential privacy.

    Let :math:`a = \|(g_1 + g_2)/2\|^2` and :math:`b = \|(g_1 - g_2)/2\|^2`. If
    :math:`E_t (a + b)^2 \le \lambda^2 E_t (a + b)` and :math:`E_t e^{a/\nu^2} \le 2` in every step, the bound of
    :func:`symmetric_rate` holds with k = 2 and

    .. math:: \lambda^2 \left(\frac{\nu^2 \ln(2T)}{\alpha} + \ln\left(1 + \frac{\nu^2 T}{\alpha}\right)\right)
        \quad\text{in place of } L^2 \Lambda.

    Args:
        smoothness: M.
        gap: f(x_1) - f*.
        ratio: lambda^2, in the unit of a squared gradient.
        scale: nu^2, in the same unit.
        alpha: the regulariser's alpha, fixed before step 1.
        variance_sum: that of single gradients.
        horizon: T.

    >>> rate = moment_rate(
    ...     smoothness=1.0, gap=1.0, ratio=1.0, scale=1.0, alpha=1.0, variance_sum=0.0, horizon=100
    ... )
    >>> round(rate, 4)
    0.2183
    """
    positive(smoothness=smoothness, alpha=alpha, horizon=horizon, ratio=ratio, scale=scale)
    non_negative(gap=gap, variance_sum=variance_sum)
    term = ratio * (scale * math.log(2 * horizon) / alpha + math.log1p(scale * horizon / alpha))
    return solve(smoothness, gap, term, alpha, variance_sum / 2) / horizon


class MetricConstants(NamedTuple):
    """The constants of Theorems 2 and 4 in a metric."""

    smoothness: float
    """M in D."""
    lipschitz: float
    """L in D^-1."""
    variance_sum: float
    """The sum of the variances in D^-1."""


def in_metric(*, floor: float, smoothness: float, lipschitz: float, variance_sum: float) -> MetricConstants:
    r"""Constants that serve in every diagonal metric with :math:`D_t \ge \delta`, from Euclid's.

    .. math:: \frac M2\|s\|^2 \le \frac{M}{2\delta}\|s\|_D^2, \qquad \|g\|_{D^{-1}}^2 \le \frac{\|g\|^2}{\delta}

    :class:`sgdol.metrics.RMS` has the floor :math:`\delta = \sqrt{k_1/(1 + k_1)}`, and :math:`D \le \sqrt d`, so that
    :math:`\|\nabla f\|^2 \le \sqrt d\, \|\nabla f\|_{D^{-1}}^2`. A metric that fits the problem does much better
    than these: its M is the largest curvature after rescaling.

    Args:
        floor: delta, positive.
        smoothness: M for Euclid's norm.
        lipschitz: L for Euclid's norm.
        variance_sum: the sum of the variances for Euclid's norm.

    >>> in_metric(floor=0.25, smoothness=2.0, lipschitz=1.0, variance_sum=3.0)
    MetricConstants(smoothness=8.0, lipschitz=2.0, variance_sum=12.0)
    """
    positive(floor=floor, smoothness=smoothness, lipschitz=lipschitz)
    non_negative(variance_sum=variance_sum)
    return MetricConstants(smoothness / floor, lipschitz / math.sqrt(floor), variance_sum / floor)
