r"""Bounds for SGDOL on convex objectives. Statements and proofs: docs/explanation/convexity.md.

Symbols as in :mod:`sgdol.theory`: M' the smoothness that SGDOL was given (its base rate is 1/M'), M that of f, L a
bound on the norm of a stochastic gradient, k how many of them there are in a step, alpha the regulariser's; and
:math:`D = \|x_1 - x^\star\|` for a minimiser of f, c the floor of :class:`sgdol.learners.Floored`, zero for FTRL.

Two facts carry everything. For M-smooth f and any step size known before step t,
:math:`E_t f(x_{t+1}) - f(x_t) \le E_t \ell_t(\eta_t)` (Theorem 1); for convex f also

.. math:: \frac M2 \left(E_t \|x_{t+1} - x^\star\|^2 - \|x_t - x^\star\|^2\right) \le E_t \ell_t(\eta_t),

by co-coercivity: the surrogate of the decrease is a surrogate of the distance too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sgdol.learners import LARGEST_MULTIPLIER
from sgdol.theory import symmetric_rate
from sgdol.theory._checks import non_negative as _non_negative
from sgdol.theory._checks import positive as _positive
from sgdol.theory._symmetric import symmetric_term

__all__ = [
    "HardInstance",
    "convex_rate",
    "decrease_bound",
    "decrease_step_size",
    "distance_bound",
    "equilibrium_exponent",
    "floored_rate",
    "hard_instance",
    "multiplicative_convex_rate",
    "multiplicative_rate",
    "multiplicative_sum",
    "multiplier_floor",
    "noiseless_rate",
    "pl_rate",
    "surrogate_sum_bound",
    "weighted_bound",
]


def surrogate_sum_bound(
    *, k: int, smoothness: float, lipschitz: float, alpha: float, horizon: int, floor: float = 0.0
) -> float:
    r"""A bound on :math:`E \sum_{t \le T} \ell_t(\eta_t)`: the regret against never moving, :math:`\eta = 0`.

    .. math:: W_T = \frac{1}{M'}\left(\frac\alpha2 + L^2 \Lambda + \frac{c^2 L^2}{2} (1 + \ln T)\right)

    with :math:`\Lambda = \min(L^2/\alpha + \ln(1 + L^2 T/\alpha), 5 + \ln(4T))` as in
    :func:`sgdol.theory.symmetric_rate`, the same for every k. The last term is the price of the floor: where the floor
    is played in place of a lower :math:`\eta`, the expected loss grows by at most
    :math:`\frac{M'}{2} \frac{c^2}{M'^2 t} E_t n_t`.

    >>> surrogate_sum_bound(k=2, smoothness=2.0, lipschitz=0.0, alpha=1.0, horizon=10)
    0.25
    """
    _positive(smoothness=smoothness, alpha=alpha, horizon=horizon)
    _non_negative(lipschitz=lipschitz, floor=floor)
    if k < 2:
        raise ValueError(f"k must be at least 2, got {k!r}")
    ftrl = alpha / 2 + symmetric_term(lipschitz, horizon, alpha)
    return (ftrl + floor**2 * lipschitz**2 / 2 * (1 + math.log(horizon))) / smoothness


def distance_bound(distance: float, *, smoothness: float, surrogate_sum: float) -> float:
    r"""A bound on :math:`E \|x_{T+1} - x^\star\|^2` for convex f: the iterates stay where they are, up to a logarithm.

    .. math:: E \|x_{T+1} - x^\star\|^2 \le D^2 + \frac{2}{M'} W_T, \qquad M' \ge M

    Args:
        distance: D.
        smoothness: M', at least M.
        surrogate_sum: W_T, of :func:`surrogate_sum_bound`.

    >>> distance_bound(1.0, smoothness=2.0, surrogate_sum=0.5)
    1.5
    """
    _positive(smoothness=smoothness)
    _non_negative(distance=distance, surrogate_sum=surrogate_sum)
    return distance**2 + 2 / smoothness * surrogate_sum


def convex_rate(
    *,
    k: int,
    smoothness: float,
    gap: float,
    distance: float,
    lipschitz: float,
    alpha: float,
    variance_sum: float,
    horizon: int,
) -> float:
    r"""A bound on :math:`\frac1T \sum_t E f(x_t) - f^\star` for convex f and FTRL, through gradient norms.

    .. math:: E f(\bar x_T) - f^\star \le \frac1T \sum_{t=1}^T E f(x_t) - f^\star
        \le \sqrt{R_T \left(D^2 + \frac2M W_T\right)}

    where :math:`R_T` bounds the mean squared gradient norm (:func:`sgdol.theory.symmetric_rate`): from
    :math:`f(x_t) - f^\star \le \|\nabla f(x_t)\| \|x_t - x^\star\|`, Cauchy-Schwarz and :func:`distance_bound`. The
    iterates need not be bounded beforehand. With noise it falls as :math:`T^{-1/4}`, times logarithms.

    >>> numbers = dict(k=2, smoothness=1.0, gap=0.5, distance=1.0, lipschitz=1.0, alpha=1.0)
    >>> rates = [convex_rate(**numbers, variance_sum=t, horizon=t) for t in (10**6, 10**12)]
    >>> round(rates[1] / rates[0] * 10 ** (6 / 4))  # but for logarithms it would be 1
    2
    """
    rate = symmetric_rate(
        k=k,
        smoothness=smoothness,
        gap=gap,
        lipschitz=lipschitz,
        alpha=alpha,
        variance_sum=variance_sum,
        horizon=horizon,
    )
    total = surrogate_sum_bound(k=k, smoothness=smoothness, lipschitz=lipschitz, alpha=alpha, horizon=horizon)
    return math.sqrt(rate * distance_bound(distance, smoothness=smoothness, surrogate_sum=total))


def weighted_bound(distance: float, *, smoothness: float, given: float, surrogate_sum: float) -> float:
    r"""A bound on :math:`E \sum_t \eta_t (f(x_t) - f^\star)` for convex f, with a base rate 1/M' below 1/M.

    .. math:: E \sum_{t=1}^T \eta_t (f(x_t) - f^\star) \le \frac{D^2 + \frac{2}{M'} W_T}{\min(2, 4 (1 - M/M'))}

    So the average of the iterates weighted by their step sizes is good as soon as :math:`\sum_t \eta_t` is large: the
    rate is that bound divided by :math:`\sum_t \eta_t`.

    Args:
        distance: D.
        smoothness: M, of f.
        given: M', larger than M; from 2M on the bound does not improve.
        surrogate_sum: W_T, with M'.

    >>> weighted_bound(1.0, smoothness=1.0, given=2.0, surrogate_sum=1.0)
    1.0
    """
    _positive(smoothness=smoothness)
    if not given > smoothness:
        raise ValueError(f"given must be larger than the smoothness {smoothness!r}, got {given!r}")
    return distance_bound(distance, smoothness=given, surrogate_sum=surrogate_sum) / min(
        2, 4 * (1 - smoothness / given)
    )


def floored_rate(
    *,
    k: int,
    smoothness: float,
    given: float,
    distance: float,
    lipschitz: float,
    alpha: float,
    horizon: int,
    floor: float = 1.0,
) -> float:
    r"""A bound on :math:`\frac1T \sum_t E f(x_t) - f^\star` for convex f and :class:`sgdol.learners.Floored`.

    .. math:: E f(\bar x_T) - f^\star \le \frac{M'}{c \sqrt T} \cdot \frac{D^2 + \frac{2}{M'} W_T}{\min(2, 4(1 - M/M'))}

    because every :math:`\eta_t \ge c/(M' \sqrt T)` in :func:`weighted_bound`: :math:`O(\ln T/\sqrt T)`, the rate of SGD
    on convex functions up to the logarithm, with the same two numbers (u, n).

    >>> numbers = dict(k=2, smoothness=1.0, given=2.0, distance=1.0, lipschitz=1.0, alpha=1.0)
    >>> 0.011 < floored_rate(**numbers, horizon=10**8) / floored_rate(**numbers, horizon=10**4) < 0.03
    True
    """
    _positive(floor=floor)
    if floor > LARGEST_MULTIPLIER:
        raise ValueError(f"floor must be at most {LARGEST_MULTIPLIER:g}, got {floor!r}")
    total = surrogate_sum_bound(k=k, smoothness=given, lipschitz=lipschitz, alpha=alpha, horizon=horizon, floor=floor)
    bound = weighted_bound(distance, smoothness=smoothness, given=given, surrogate_sum=total)
    return given / (floor * math.sqrt(horizon)) * bound


def pl_rate(*, pl_constant: float, mean_squared_gradient: float) -> float:
    r"""A bound on :math:`\frac1T \sum_t E f(x_t) - f^\star` under PL, hence for strongly convex f: :math:`R_T/(2\mu)`.

    With noise it falls as :math:`1/\sqrt T`, where SGD with steps :math:`1/(\mu t)` has 1/T. Without noise the paper's
    Theorem 6 is better.

    Args:
        pl_constant: mu.
        mean_squared_gradient: R_T, of Theorem 4 or :func:`sgdol.theory.symmetric_rate`.

    >>> pl_rate(pl_constant=0.5, mean_squared_gradient=0.1)
    0.1
    """
    _positive(pl_constant=pl_constant)
    _non_negative(mean_squared_gradient=mean_squared_gradient)
    return mean_squared_gradient / (2 * pl_constant)


def multiplicative_sum(
    *, k: int, smoothness: float, gap: float, lipschitz: float, alpha: float, growth: float
) -> float:
    r"""A bound on :math:`E \sum_{t \le T} \|\nabla f(x_t)\|^2`, for every T, if the noise vanishes with the gradient.

    If :math:`\sigma_t^2 \le \rho \|\nabla f(x_t)\|^2` (strong growth; an interpolating model has it), the logarithm of
    the regret bound is that of a multiple of the sum itself, and the sum stays bounded. With :math:`q = 1 + \rho/k`,

    .. math:: A \le 2 c_0 + 2 c_1 \ln\max\left(1, \frac{2 c_1 q}{\alpha}\right), \qquad
        c_0 = 2q\left(M (f(x_1) - f^\star) + \frac\alpha2 + \frac{L^4}{\alpha}\right), \qquad c_1 = 2 q L^2.

    Convexity is not needed. Here ``growth`` is rho, at least 0; the other arguments are those of
    :func:`sgdol.theory.symmetric_rate`.

    >>> multiplicative_sum(k=2, smoothness=1.0, gap=1.0, lipschitz=0.0, alpha=1.0, growth=2.0)
    12.0
    """
    _positive(smoothness=smoothness, alpha=alpha)
    _non_negative(growth=growth, gap=gap, lipschitz=lipschitz)
    if k < 2:
        raise ValueError(f"k must be at least 2, got {k!r}")
    q, square = 1 + growth / k, lipschitz**2
    first, second = 2 * q * (smoothness * gap + alpha / 2 + square**2 / alpha), 2 * q * square
    return 2 * first + 2 * second * math.log(max(1.0, 2 * second * q / alpha))


def multiplicative_rate(
    *, k: int, smoothness: float, gap: float, lipschitz: float, alpha: float, growth: float, horizon: int
) -> float:
    r"""A bound on the mean squared gradient norm when the noise vanishes with the gradient: :math:`O(1/T)`.

    With :math:`q = 1 + \rho/k`, Theorem 2 with :math:`\eta = 1/(M q)` is the first of two bounds,

    .. math:: \frac1T \sum_{t=1}^T E \|\nabla f(x_t)\|^2
        \le \frac1T \min\left(2 M q \left(f(x_1) - f^\star + W_T\right), A\right),

    and A of :func:`multiplicative_sum`, which does not depend on T, the second. The first has the smaller constants and
    is the better one for small T.

    >>> multiplicative_rate(k=2, smoothness=1.0, gap=1.0, lipschitz=0.0, alpha=1.0, growth=2.0, horizon=60)
    0.1
    """
    numbers = {"k": k, "smoothness": smoothness, "lipschitz": lipschitz, "alpha": alpha}
    bounded = multiplicative_sum(**numbers, gap=gap, growth=growth)  # type: ignore[arg-type]
    total = surrogate_sum_bound(**numbers, horizon=horizon)  # type: ignore[arg-type]
    return min(2 * smoothness * (1 + growth / k) * (gap + total), bounded) / horizon


def multiplicative_convex_rate(
    *,
    k: int,
    smoothness: float,
    gap: float,
    distance: float,
    lipschitz: float,
    alpha: float,
    growth: float,
    horizon: int,
) -> float:
    r"""A bound on :math:`\frac1T \sum_t E f(x_t) - f^\star` for convex f whose noise vanishes with the gradient.

    With A of :func:`multiplicative_sum`, which does not depend on T, and :math:`q = 1 + \rho/k`,

    .. math:: E f(\bar x_T) - f^\star \le \sqrt{\frac AT \left(D^2 + \frac2M W\right)}, \qquad
        W = \frac1M \left(\frac\alpha2 + \frac{L^4}{\alpha} + L^2 \ln\left(1 + \frac{qA}{\alpha}\right)\right),

    :math:`O(1/\sqrt T)` without a logarithm.

    >>> numbers = dict(k=2, smoothness=1.0, gap=0.5, distance=1.0, lipschitz=1.0, alpha=1.0, growth=1.0)
    >>> rates = [multiplicative_convex_rate(**numbers, horizon=t) for t in (100, 10_000)]
    >>> round(rates[0] / rates[1], 9)
    10.0
    """
    _positive(horizon=horizon)
    bounded = multiplicative_sum(k=k, smoothness=smoothness, gap=gap, lipschitz=lipschitz, alpha=alpha, growth=growth)
    square = lipschitz**2
    losses = alpha / 2 + square**2 / alpha + square * math.log1p((1 + growth / k) * bounded / alpha)
    return math.sqrt(
        bounded / horizon * distance_bound(distance, smoothness=smoothness, surrogate_sum=losses / smoothness)
    )


def noiseless_rate(*, smoothness: float, distance: float, horizon: int) -> float:
    r"""A bound on :math:`f(x_{T+1}) - f^\star` without noise: u = n, so SGDOL is gradient descent with step 1/M.

    .. math:: f(x_{T+1}) - f^\star \le \frac{M D^2}{2T}

    >>> noiseless_rate(smoothness=4.0, distance=0.5, horizon=10)
    0.05
    """
    _positive(smoothness=smoothness, horizon=horizon)
    _non_negative(distance=distance)
    return smoothness * distance**2 / (2 * horizon)


def decrease_bound(step_size: float, *, smoothness: float, distance: float, variance: float, horizon: int) -> float:
    r"""A bound on :math:`E f(x_{T+1}) - f^\star` of SGD with a fixed step, convex f, by the decrease of f alone.

    .. math:: E f(x_{T+1}) - f^\star \le \max\left(\sqrt{2 M \eta v}\, B + \frac{M \eta^2 v}{2},
        \frac{4 B^2}{\eta T}\right), \qquad B^2 = D^2 + \eta^2 v T, \quad \eta \le \frac1M

    from :math:`a_{t+1} \le a_t - \frac{\eta}{2 B^2} a_t^2 + \frac{M \eta^2 v}{2}` for :math:`a_t = E f(x_t) - f^\star`.

    Args:
        step_size: eta, in (0, 1/M].
        smoothness: M.
        distance: D.
        variance: v, of the direction: sigma^2/k.
        horizon: T.

    >>> decrease_bound(0.5, smoothness=2.0, distance=1.0, variance=0.0, horizon=80)
    0.1
    """
    _positive(step_size=step_size, smoothness=smoothness, distance=distance, horizon=horizon)
    _non_negative(variance=variance)
    if step_size > 1 / smoothness:
        raise ValueError(f"step_size must be at most 1/M = {1 / smoothness:g}, got {step_size!r}")
    spread = distance**2 + step_size**2 * variance * horizon
    noise = math.sqrt(2 * smoothness * step_size * variance * spread) + smoothness * step_size**2 * variance / 2
    return max(noise, 4 * spread / (step_size * horizon))


def decrease_step_size(*, smoothness: float, distance: float, variance: float, horizon: int) -> float:
    r"""The step, of order :math:`T^{-2/3}`, at which the two parts of :func:`decrease_bound` meet, about.

    The bound is then :math:`2 (M v D^4/T)^{1/3}`, about. That exponent, and not 1/2, is what the decrease of f alone
    gives on convex functions (Bach and Moulines 2011 have it for steps :math:`t^{-2/3}`); :func:`hard_instance` shows
    that the surrogate's own best step does not do better.

    >>> round(decrease_step_size(smoothness=2.0, distance=1.0, variance=4.0, horizon=1000), 9)
    0.01
    """
    _positive(smoothness=smoothness, distance=distance, variance=variance, horizon=horizon)
    meet = (4 * distance / (horizon * math.sqrt(2 * smoothness * variance))) ** (2 / 3)
    return min(meet, 1 / smoothness)


class HardInstance(NamedTuple):
    """Huber's function of one coordinate, on which the surrogate's best fixed step is too small to get anywhere."""

    slope: float
    """G: f is ``G|x| - G^2/(2M)`` beyond ``|x| = G/M``, and ``M x^2/2`` within."""
    largest_step: float
    """No trajectory's best fixed step for the expected surrogate is larger: G^2/(M (G^2 + v))."""
    gap: float
    """With any steps up to that, E f(x_t) - f* is at least this for all t <= T + 1."""


def hard_instance(*, smoothness: float, distance: float, variance: float, horizon: int) -> HardInstance:
    r"""A convex function for horizon T on which the surrogate's best step leaves :math:`f - f^\star \sim T^{-1/3}`.

    With :math:`G = (D M v/(2T))^{1/3}` and x_1 = D: :math:`E u_t = f'(x_t)^2 \le G^2` and
    :math:`E n_t = f'(x_t)^2 + v`, so the fixed step that minimises the expected surrogate is at most
    :math:`G^2/(M(G^2 + v))`; with steps up to that :math:`E x_{T+1} \ge D - G \eta T \ge D/2`, and by Jensen's
    inequality :math:`E f(x_{T+1}) \ge f(D/2) = GD/2 - G^2/(2M)`. SGD with a step :math:`D/\sqrt{vT}` has
    :math:`O(D \sqrt{v/T})` on it, as on every convex function.

    Args:
        smoothness: M.
        distance: D.
        variance: v, of the direction: sigma^2/k.
        horizon: T.

    >>> hard = hard_instance(smoothness=1.0, distance=1.0, variance=1.0, horizon=500_000)
    >>> round(hard.slope, 9), round(hard.gap, 6)
    (0.01, 0.00495)
    """
    _positive(smoothness=smoothness, distance=distance, variance=variance, horizon=horizon)
    slope = (distance * smoothness * variance / (2 * horizon)) ** (1 / 3)
    if slope / smoothness > distance / 2:
        raise ValueError(
            f"horizon must be larger, so that D/2 = {distance / 2:g} is where f is linear; got {horizon!r}"
        )
    largest = slope**2 / (smoothness * (slope**2 + variance))
    return HardInstance(slope, largest, slope * distance / 2 - slope**2 / (2 * smoothness))


def multiplier_floor(time: int, *, lipschitz: float, alpha: float, deviation: float) -> float:
    r"""A lower bound on :math:`E s_t` of FTRL if the noise does not vanish: of order :math:`1/\sqrt t`.

    If the standard deviation of :math:`u_j` given the past is at least v in every step,

    .. math:: E s_t \ge \frac{v^3 \sqrt{t-1}}{32 L^4 (\alpha + L^2 (t-1))}

    because :math:`\sum u` fluctuates by :math:`v \sqrt t` and s is clipped at 0.

    Args:
        time: t, at least 1.
        lipschitz: L.
        alpha: the regulariser's alpha.
        deviation: v, at most L^2.

    >>> round(multiplier_floor(101, lipschitz=1.0, alpha=1.0, deviation=1.0) * 320, 2)
    0.99
    """
    _positive(time=time, lipschitz=lipschitz, alpha=alpha)
    _non_negative(deviation=deviation)
    if deviation > lipschitz**2:
        raise ValueError(f"deviation must be at most L^2 = {lipschitz**2:g}, got {deviation!r}")
    before = time - 1
    return deviation**3 * math.sqrt(before) / (32 * lipschitz**4 * (alpha + lipschitz**2 * before))


def equilibrium_exponent(curvatures: Sequence[float], variances: Sequence[float], smoothness: float) -> float:
    r"""The exponent p of :math:`s_t \sim t^{-p}` on a noisy quadratic if u and n are replaced by their means.

    At a slowly moving :math:`\eta`, coordinate i of a quadratic with curvature h_i has
    :math:`E \nabla f_i^2 = h_i \eta v_i/2`, so the mean of :math:`S = \sum_t u_t` follows :math:`S' = \rho S/t` with

    .. math:: \rho = \frac{\sum_i h_i v_i}{2 M \sum_i v_i} \le \frac12, \qquad s_t \sim t^{\rho - 1}

    A heuristic, and for the algorithm itself, which sees samples of u, wrong where :math:`\rho < 1/2`:
    :func:`multiplier_floor` proves that its mean step falls no faster than :math:`t^{-1/2}`.

    Args:
        curvatures: h_i.
        variances: v_i of the noise.
        smoothness: M, at least the largest curvature.

    >>> equilibrium_exponent([1.0, 1.0], [1.0, 1.0], smoothness=1.0)
    0.5
    """
    _positive(smoothness=smoothness)
    total = sum(variances)
    _positive(variances=total)
    return 1 - sum(h * v for h, v in zip(curvatures, variances, strict=True)) / (2 * smoothness * total)
