r"""Theorems 2 and 4 with momentum, for the symmetric estimator. Proofs: docs/explanation/theory.md.

The direction is :math:`d_t = m_t/(1-\beta^t)` with :math:`m_t = \beta m_{t-1} + (1-\beta) \bar g_t`, its signal
:math:`u_t = (\beta\langle m_{t-1}, \bar g_t\rangle + (1-\beta) u)/(1-\beta^t)`, and :math:`n_t = \|d_t\|^2`. SGDOL is
given M' > M: its base rate is 1/M', below 1/M.
"""

from __future__ import annotations

import math

from sgdol.theory._checks import in_range, non_negative, positive

__all__ = ["momentum_constant", "momentum_rate", "momentum_regret_bound", "momentum_theorem"]


def _check(momentum: float, smoothness: float, given: float) -> None:
    positive(smoothness=smoothness)
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum!r}")
    if not (math.isfinite(given) and given >= smoothness and (momentum == 0 or given > smoothness)):
        least = "at least" if momentum == 0 else "larger than"
        raise ValueError(f"given must be finite and {least} the smoothness {smoothness!r}, got {given!r}")


def momentum_constant(*, momentum: float, smoothness: float, given: float) -> float:
    r"""By how much momentum multiplies the cost of noise: C of :func:`momentum_theorem`.

    .. math:: C = 1 + \frac{\pi^2}{6} \left(\frac{\beta}{1-\beta}\right)^2 \frac{M^2}{M'(M' - M)}

    It is 1 without momentum and :math:`1 + \pi^2\beta/6 < 2.65` for :math:`M' = M/(1-\beta)`.

    Args:
        momentum: beta, in [0, 1).
        smoothness: M, of f.
        given: M', larger than M (without momentum: at least M).

    >>> round(momentum_constant(momentum=0.9, smoothness=1.0, given=10.0), 3)
    2.48
    """
    _check(momentum, smoothness, given)
    if momentum == 0:
        return 1.0
    lag = momentum / (1 - momentum)
    return 1 + math.pi**2 / 6 * lag**2 * smoothness**2 / (given * (given - smoothness))


def momentum_theorem(
    step_size: float,
    *,
    momentum: float,
    smoothness: float,
    given: float,
    gap: float,
    expected_regret: float,
    variance_sum: float,
    lipschitz: float,
) -> float:
    r"""The right-hand side of Theorem 2 with momentum.

    With C of :func:`momentum_constant` and :math:`b = \beta/(1-\beta)`, for every fixed :math:`0 < \eta \le 2/M'`

    .. math:: E\left[\left(\eta - \frac{C M'}{2} \eta^2\right) \sum_{t=1}^T \|\nabla f(x_t)\|^2\right]
        \le f(x_1) - f^\star + E[\mathrm{Regret}_T(\eta)] + \frac{C M' \eta^2}{2} \Sigma
        + b L^2 \left(\eta + \frac{M' \eta^2}{2}\right)

    Args:
        step_size: eta, in (0, 2/M'].
        momentum: beta.
        smoothness: M, of f.
        given: M'.
        gap: f(x_1) - f*.
        expected_regret: E[Regret_T(eta)], of the losses with M'.
        variance_sum: Sigma, the sum of the variances of the mean gradient: that of single ones divided by k.
        lipschitz: L.

    >>> momentum_theorem(0.1, momentum=0.5, smoothness=5.0, given=10.0, gap=1.0, expected_regret=0.5, variance_sum=0.0,
    ...                  lipschitz=1.0)
    1.65
    """
    constant = momentum_constant(momentum=momentum, smoothness=smoothness, given=given)
    positive(step_size=step_size)
    in_range(step_size, given)
    non_negative(gap=gap, variance_sum=variance_sum, lipschitz=lipschitz)
    lag = momentum / (1 - momentum)
    noise = constant * given * step_size**2 / 2 * variance_sum
    return gap + expected_regret + noise + lag * lipschitz**2 * (step_size + given * step_size**2 / 2)


def momentum_regret_bound(step_size: float, *, given: float, alpha: float, lipschitz: float, horizon: int) -> float:
    r"""A bound on FTRL's expected regret with momentum and the symmetric estimator, for every beta and k.

    .. math:: E\,\mathrm{Regret}_T(\eta) \le \frac{M' \alpha}{2}\left(\eta - \frac{1}{M'}\right)^2
        + \frac{L^2}{M'} \left(10 \ln\left(1 + \frac{L^2 T}{\alpha}\right) + \frac{L^2}{\alpha}\right)

    >>> momentum_regret_bound(0.1, given=10.0, alpha=1.0, lipschitz=0.0, horizon=100)
    0.0
    """
    positive(given=given, alpha=alpha)
    in_range(step_size, given)
    return given * alpha / 2 * (step_size - 1 / given) ** 2 + _term(lipschitz, horizon, alpha) / given


def momentum_rate(
    *,
    momentum: float,
    smoothness: float,
    given: float,
    gap: float,
    lipschitz: float,
    alpha: float,
    variance_sum: float,
    horizon: int,
) -> float:
    r"""The rate of SGDOL with FTRL and momentum: Theorem 4's, up to constants.

    With C of :func:`momentum_constant`, :math:`b = \beta/(1-\beta)`, :math:`\Lambda = \ln(1 + L^2 T/\alpha)` and

    .. math:: K = C \left(M' (f(x_1) - f^\star) + \frac\alpha2 + L^2 \left(10 \Lambda + \frac{L^2}{\alpha}\right)\right)
        + \frac32 b L^2, \qquad E\|\nabla f(x_k)\|^2 \le \frac{2K + \sqrt{2K\Sigma}}{T}

    The arguments are those of :func:`momentum_theorem`; alpha is fixed before step 1.

    >>> numbers = dict(momentum=0.9, smoothness=1.0, given=10.0, gap=1.0, lipschitz=1.0, alpha=1.0)
    >>> rates = [momentum_rate(**numbers, variance_sum=t, horizon=t) for t in (10**8, 10**12)]
    >>> round(rates[1] / rates[0] * 10**2, 1)  # but for logarithms it would be 1
    1.2
    """
    constant = momentum_constant(momentum=momentum, smoothness=smoothness, given=given)
    positive(alpha=alpha, lipschitz=lipschitz, horizon=horizon)
    non_negative(gap=gap, variance_sum=variance_sum)
    lag = momentum / (1 - momentum)
    total = constant * (given * gap + alpha / 2 + _term(lipschitz, horizon, alpha)) + 1.5 * lag * lipschitz**2
    return (2 * total + math.sqrt(2 * total * variance_sum)) / horizon


def _term(lipschitz: float, horizon: int, alpha: float) -> float:
    non_negative(lipschitz=lipschitz, horizon=horizon)
    square = lipschitz**2
    return square * (10 * math.log1p(square * horizon / alpha) + square / alpha)
