r"""The surrogate loss of the paper and the two numbers it is made of.

At :math:`x_t` there are :math:`k \ge 2` independent stochastic gradients :math:`g_1, \dots, g_k`. The update moves
along a direction :math:`d_t`, and for it

* :math:`u_t` is an unbiased estimate of :math:`\langle d_t, \nabla f(x_t)\rangle` (the signal),
* :math:`n_t = \|d_t\|^2` is the squared length of the direction (signal and noise).

The surrogate loss of a step size :math:`\eta`, equation (3) of the paper, is

.. math:: \ell_t(\eta) = \frac{M \eta^2}{2} n_t - \eta u_t,

and Theorem 1 says :math:`E[f(x_{t+1}) - f(x_t)] \le E[\ell_t(\eta_t)]` whenever :math:`\eta_t` does not depend on
the gradients of step :math:`t`.

Every function here is plain arithmetic on arrays that follow the array API standard: numpy, torch and jax arrays
give their own kind back.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import array_api_compat

__all__ = [
    "ESTIMATORS",
    "MOMENTUM_STATISTICS",
    "Estimator",
    "MomentumStatistics",
    "Statistics",
    "derivative",
    "loss",
    "momentum_signal",
    "statistics",
    "symmetric_signal",
]

Array = Any
"""An array of any library that follows the array API standard."""

Estimator = Literal["symmetric", "paper"]
ESTIMATORS: tuple[str, ...] = get_args(Estimator)

MomentumStatistics = Literal["direction", "gradient"]
MOMENTUM_STATISTICS: tuple[str, ...] = get_args(MomentumStatistics)
"""With momentum the learner sees u and n of the momentum direction, or those of the gradients alone, which do not hide
noise that the momentum has averaged away but that stays correlated over steps."""


class Statistics(NamedTuple):
    """The direction d of one step and its two numbers, u and n."""

    direction: Array
    """d_t, with the shape of one gradient."""
    u: Array
    """The unbiased estimate of <d_t, grad f(x_t)>, one per block."""
    n: Array
    """||d_t||^2, one per block."""


def loss(step_size: Array, u: Array, n: Array, smoothness: Array) -> Array:
    r"""The surrogate loss :math:`\ell_t(\eta) = M \eta^2 n_t / 2 - \eta u_t`, equation (3).

    Args:
        step_size: eta, at least 0; any shape that broadcasts with ``u`` and ``n``.
        u: the estimate of <d_t, grad f(x_t)>.
        n: ||d_t||^2.
        smoothness: M, positive.

    >>> loss(0.25, u=2.0, n=4.0, smoothness=4.0)
    0.0
    >>> loss(0.125, u=2.0, n=4.0, smoothness=4.0)  # its minimiser, u / (M n)
    -0.125
    """
    return smoothness * step_size**2 / 2 * n - step_size * u


def derivative(step_size: Array, u: Array, n: Array, smoothness: Array) -> Array:
    r"""The derivative :math:`\ell_t'(\eta) = M \eta n_t - u_t`.

    >>> derivative(0.125, u=2.0, n=4.0, smoothness=4.0)
    0.0
    """
    return smoothness * step_size * n - u


def symmetric_signal(n: Array, sum_of_squares: Array, k: Array) -> Array:
    r"""The symmetric estimate u of the signal, from an accumulated gradient and the norms of its contributions.

    With :math:`S` the sum of the ``k`` contributions (as scaled by whoever accumulated them) and :math:`Q` the sum of
    their squared norms,

    .. math:: u = \frac{k}{k - 1} \left(\|S\|^2 - Q\right),

    which is the mean of the cross products :math:`\langle g_i, g_j\rangle`, :math:`i \ne j`, in the scale of
    :math:`S`. If the loss is multiplied by a factor, ``u`` is multiplied by the factor squared.

    Args:
        n: ||S||^2, whole, per block or per coordinate.
        sum_of_squares: Q, of the shape of ``n``.
        k: how many contributions there are, at least 2.

    >>> symmetric_signal(n=4.0, sum_of_squares=2.0, k=2)  # two equal gradients of length 2, each divided by 2
    4.0
    """
    return (n - sum_of_squares) * (k / (k - 1))


def momentum_signal(cross: Array, u: Array, momentum: Array, correction: Array) -> Array:
    r"""The unbiased signal of a momentum direction.

    For :math:`d_t = m_t / (1 - \beta^t)` with :math:`m_t = \beta m_{t-1} + (1 - \beta) \bar g_t`,

    .. math:: u_t = \frac{\beta \langle m_{t-1}, \bar g_t\rangle + (1 - \beta) u}{1 - \beta^t},

    where ``u`` is the signal of :math:`\bar g_t` itself. The naive :math:`\langle d_t, \bar g_t\rangle` would count
    the noise of :math:`\bar g_t` as signal.

    Args:
        cross: <m_{t-1}, gbar_t>.
        u: the estimate of ||grad f(x_t)||^2 from the gradients of step t.
        momentum: beta, in [0, 1).
        correction: 1 - beta^t.

    >>> momentum_signal(cross=0.0, u=4.0, momentum=0.5, correction=0.5)  # the first step: plain u
    4.0
    """
    return (momentum * cross + (1 - momentum) * u) / correction


def statistics(
    gradients: Array,
    *,
    estimator: Estimator = "symmetric",
    blocks: Array | Literal["coordinate"] | None = None,
) -> Statistics:
    r"""The direction and the pair (u, n) from ``k`` independent gradients.

    ================ ============ =========================================================== =================
    estimator        d            u                                                           n
    ================ ============ =========================================================== =================
    ``"paper"``      g_1          <g_1, g_2>                                                  \|\|g_1\|\|^2
    ``"symmetric"``  mean of all  (\|\|sum g_i\|\|^2 - sum \|\|g_i\|\|^2) / (k (k - 1))        \|\|mean\|\|^2
    ================ ============ =========================================================== =================

    Args:
        gradients: shape ``(k, ...)``, the k gradients along the first axis, k at least 2. The paper's estimator uses
            the first two and ignores the others.
        estimator: ``"symmetric"`` or ``"paper"``.
        blocks: None for one pair over all coordinates (Algorithm 1); ``"coordinate"`` for a pair per coordinate
            (section 6); or an integer array with the shape of one gradient that numbers the blocks from 0.

    >>> import numpy as np
    >>> g = np.array([[1.0, 2.0], [3.0, -1.0]])
    >>> statistics(g, estimator="paper")
    Statistics(direction=array([1., 2.]), u=np.float64(1.0), n=np.float64(5.0))
    >>> statistics(g)
    Statistics(direction=array([2. , 0.5]), u=np.float64(1.0), n=np.float64(4.25))
    >>> statistics(g, blocks="coordinate").u
    array([ 3., -2.])
    """
    xp = array_api_compat.array_namespace(gradients)
    k = gradients.shape[0]
    if k < 2:
        raise ValueError(f"gradients must hold at least 2 independent gradients along axis 0, got {k}")
    if estimator == "paper":
        direction = gradients[0, ...]
        u, n = direction * gradients[1, ...], direction * direction
    elif estimator == "symmetric":
        direction = xp.sum(gradients, axis=0) / k
        n = direction * direction
        u = symmetric_signal(n, xp.sum(gradients * gradients, axis=0) / k**2, k)
    else:
        raise ValueError(f"estimator must be one of {ESTIMATORS}, got {estimator!r}")
    return Statistics(direction, _reduce(xp, u, blocks), _reduce(xp, n, blocks))


def _reduce(xp: Any, values: Array, blocks: Any) -> Array:
    """Sum over everything, over each numbered block, or over nothing."""
    if blocks is None:
        return xp.sum(values)
    if isinstance(blocks, str):
        if blocks != "coordinate":
            raise ValueError(f'blocks must be None, "coordinate" or an integer array, got {blocks!r}')
        return values
    if blocks.shape != values.shape:
        raise ValueError(f"blocks must have the shape of one gradient, {values.shape}, got {blocks.shape}")
    zero = xp.zeros_like(values)
    return xp.stack([xp.sum(xp.where(blocks == b, values, zero)) for b in range(int(xp.max(blocks)) + 1)])
