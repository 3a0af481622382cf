r"""The paper's guarantees as numbers: regret, and the right-hand sides of Theorems 2, 4, 6, 7 and 8.

Theorems carry the numbers that the paper's counter gives them (the lemma takes number 5), and its slips are corrected:
Theorems 2 and 7 need :math:`\eta \le 2/M` for the regret bound that they are used with, and in Theorem 8
:math:`\sigma_t^2 = \sum_{i=1}^d \sigma_{t,i}^2`.

Symbols: M the smoothness (H4), ``gap`` the initial optimality gap :math:`f(x_1) - f^\star`, T the horizon, L a bound
on the norm of a stochastic gradient (H3), :math:`\sigma_t^2` the variance of one (H2), mu the constant of the
Polyak-Lojasiewicz condition (H5).

**In a metric** (:mod:`sgdol.metrics`). Let :math:`D_t > 0` be a diagonal that is known before step t, and let

.. math:: f(x + s) \le f(x) + \langle\nabla f(x), s\rangle + \frac M2 \|s\|_{D_t}^2 \quad\text{for all } x, s, t.

Then Theorems 2 and 4 and the symmetric rate hold word for word with every norm of a gradient taken in
:math:`D_t^{-1}`: M is the constant above, L bounds :math:`\|g\|_{D_t^{-1}}`, :math:`\sigma_t^2` is
:math:`E\|g - \nabla f\|^2_{D_t^{-1}}`, and what is bounded is the mean of :math:`\|\nabla f(x_t)\|^2_{D_t^{-1}}`.
*Proof.* The step is :math:`s = -\eta D_t^{-1} d`, so :math:`\|s\|_{D_t}^2 = \eta^2 n_t`, and
:math:`E_t \langle\nabla f, D_t^{-1} d\rangle = \|\nabla f\|^2_{D_t^{-1}} = E_t u_t`, because :math:`D_t` is fixed given
the past: :math:`E_t[f(x_{t+1}) - f(x_t)] \le E_t \ell_t(\eta_t)`, which is Theorem 1. What follows it in the paper uses
nothing of the norm but Cauchy-Schwarz. Sums telescope f and no distance, so that D may move up and down. The first
step of :class:`sgdol.metrics.RMS` with several tensors is not covered: its D sees the present gradient's means over
each tensor. :func:`in_metric` gives constants that serve for every such D with a floor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import array_api_compat

from sgdol import surrogate
from sgdol.learners import LARGEST_MULTIPLIER

__all__ = [
    "CoordinateBounds",
    "MetricConstants",
    "best_fixed_step_size",
    "ftrl_regret_bound",
    "in_metric",
    "regret",
    "symmetric_rate",
    "theorem_2",
    "theorem_4",
    "theorem_6",
    "theorem_7",
    "theorem_8",
]

Array = Any


def _positive(**arguments: float) -> None:
    for name, value in arguments.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive and finite, got {value!r}")


def _non_negative(**arguments: float) -> None:
    for name, value in arguments.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and at least 0, got {value!r}")


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
    _positive(smoothness=smoothness)
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
    _positive(smoothness=smoothness, alpha=alpha)
    _in_range(step_size, smoothness)
    return (
        smoothness * alpha / 2 * (step_size - 1 / smoothness) ** 2 + _log_term(lipschitz, horizon, alpha) / smoothness
    )


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
    _positive(smoothness=smoothness, step_size=step_size)
    _non_negative(gap=gap, variance_sum=variance_sum)
    _in_range(step_size, smoothness)
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
    _positive(smoothness=smoothness, alpha=alpha, lipschitz=lipschitz, horizon=horizon)
    _non_negative(gap=gap, variance_sum=variance_sum)
    log_term = _log_term(lipschitz, horizon, alpha)
    return _rate(smoothness, gap, log_term, alpha, variance_sum) / horizon


def symmetric_rate(
    *,
    k: int,
    smoothness: float,
    gap: float,
    lipschitz: float,
    alpha: float,
    variance_sum: float,
    horizon: int,
) -> float:
    r"""The counterpart of Theorem 4 for the symmetric estimator of ``k`` gradients.

    With :math:`C_k = 2k/(k-1)` and :math:`\Lambda = L^2/\alpha + \ln(1 + L^2 T/\alpha)`,

    .. math:: E\|\nabla f(x_k)\|^2 \le \frac{2M}{T}\left(f(x_1) - f^\star + \frac{C_k L^2}{M} \Lambda\right)
        + \frac1T \sqrt{\frac{2M \Sigma}{k} \left(f(x_1) - f^\star + \frac{\alpha}{2M}\right)}
        + \frac1T \sqrt{\frac{2 C_k L^2 \Lambda \Sigma}{k}}

    The bound on :math:`(\ell_t')^2` that gives Theorem 4 its constant 5 is false here path by path and holds in
    expectation; the term :math:`L^2/\alpha` is its price. ``variance_sum`` is that of single gradients.

    >>> symmetric_rate(k=2, smoothness=1.0, gap=1.0, lipschitz=1.0, alpha=1.0, variance_sum=0.0, horizon=100) < 0.5
    True
    """
    _positive(smoothness=smoothness, alpha=alpha, lipschitz=lipschitz, horizon=horizon)
    _non_negative(gap=gap, variance_sum=variance_sum)
    if k < 2:
        raise ValueError(f"k must be at least 2, got {k!r}")
    log_term = 2 * k / (k - 1) * (lipschitz**4 / alpha + lipschitz**2 * math.log1p(lipschitz**2 * horizon / alpha))
    return _rate(smoothness, gap, log_term, alpha, variance_sum / k) / horizon


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
    _positive(floor=floor, smoothness=smoothness, lipschitz=lipschitz)
    _non_negative(variance_sum=variance_sum)
    return MetricConstants(smoothness / floor, lipschitz / math.sqrt(floor), variance_sum / floor)


def theorem_6(*, smoothness: float, pl_constant: float, gap: float, horizon: int) -> float:
    r"""The right-hand side of Theorem 6, the linear rate without noise under the PL condition.

    .. math:: f(x_{T+1}) - f^\star \le \left(1 - \frac{\mu}{M}\right)^T (f(x_1) - f^\star)

    >>> theorem_6(smoothness=2.0, pl_constant=1.0, gap=1.0, horizon=3)
    0.125
    """
    _positive(smoothness=smoothness, pl_constant=pl_constant)
    _non_negative(gap=gap, horizon=horizon)
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
    _positive(smoothness=smoothness)
    _non_negative(gap=gap)
    _same_length(step_sizes=step_sizes, variance_sums=variance_sums)
    for eta in step_sizes:
        _positive(step_size=eta)
        _in_range(eta, smoothness)
    for variance in variance_sums:
        _non_negative(variance_sum=variance)
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
    _positive(smoothness=smoothness, alpha=alpha, horizon=horizon)
    _non_negative(gap=gap)
    _same_length(lipschitz=lipschitz, variance_sums=variance_sums)
    d = len(lipschitz)
    log_term = sum(_log_term(bound, horizon, alpha) for bound in lipschitz)
    each = [_rate(smoothness, gap, log_term, d * alpha, variance) + (d - 1) * alpha for variance in variance_sums]
    return CoordinateBounds(each, _rate(smoothness, gap, log_term, d * alpha, sum(variance_sums)))


def _log_term(lipschitz: float, horizon: int, alpha: float) -> float:
    """5 L^2 ln(1 + L^2 T / alpha)."""
    _non_negative(lipschitz=lipschitz, horizon=horizon)
    return 5 * lipschitz**2 * math.log1p(lipschitz**2 * horizon / alpha)


def _rate(smoothness: float, gap: float, log_term: float, alpha: float, variance_sum: float) -> float:
    """The solution of the quadratic inequality that ends the proofs of Theorems 4 and 8."""
    _non_negative(variance_sum=variance_sum)
    return (
        2 * (smoothness * gap + log_term)
        + math.sqrt(2 * smoothness * variance_sum * (gap + alpha / (2 * smoothness)))
        + math.sqrt(2 * variance_sum * log_term)
    )


def _in_range(step_size: float, smoothness: float) -> None:
    if not 0 <= step_size <= LARGEST_MULTIPLIER / smoothness:
        raise ValueError(f"step_size must be in [0, 2/M] = [0, {LARGEST_MULTIPLIER / smoothness:g}], got {step_size!r}")


def _same_length(**arguments: Sequence[float]) -> None:
    lengths = {name: len(values) for name, values in arguments.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(f"one entry per coordinate is needed in each of {', '.join(lengths)}, got {lengths}")
