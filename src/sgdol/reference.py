r"""Algorithms 1 and 2 as the paper prints them: numpy, float64, slow and obvious. This is the truth.

Nothing here is shared with the fast code, on purpose: sums are recomputed from the whole history at every step, so that
whoever doubts an optimizer of this library can compare it with these lines and with the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Run",
    "algorithm_1",
    "algorithm_2",
    "argmin",
    "diagonal",
    "ftrl",
    "measured_multiplier",
    "minimise_with_ftrl",
    "polynomial_average",
    "replay",
    "step_size",
]

Vector = NDArray[np.float64]

MetricName = Literal["euclidean", "rms", "adagrad"]
MetricFunction = Callable[[Sequence[Vector], Vector, NDArray[np.intp]], ArrayLike]
"""D from the mean gradients of the updates before, that of this update and the number of each coordinate's tensor: a
positive definite matrix, or the diagonal of one."""
METRICS: Mapping[str, Mapping[str, float]] = {"rms": {"decay": 0.99}, "adagrad": {"decay": 1.0}}
"""The arguments of :func:`diagonal` that a name stands for."""


def step_size(u: ArrayLike, n: ArrayLike, *, smoothness: float, alpha: float) -> float:
    r"""The closed form of the FTRL update, from the losses of the rounds before.

    .. math:: \eta_t = \max\left\{0, \min\left\{
        \frac{\alpha + \sum_{j<t} u_j}{M (\alpha + \sum_{j<t} n_j)}, \frac2M\right\}\right\}

    >>> step_size([], [], smoothness=10.0, alpha=1.0)
    0.1
    >>> step_size([-2.0], [3.0], smoothness=10.0, alpha=1.0)
    0.0
    """
    numerator = alpha + float(np.sum(np.asarray(u, dtype=np.float64)))
    denominator = smoothness * (alpha + float(np.sum(np.asarray(n, dtype=np.float64))))
    if denominator == 0:
        return 1 / smoothness
    return max(0.0, min(numerator / denominator, 2 / smoothness))


def argmin(function: Callable[[float], float], low: float, high: float, tolerance: float = 1e-12) -> float:
    """The minimiser of a convex function on an interval, by golden-section search.

    Good to about the square root of machine precision, which is all that values of a smooth function can tell.

    >>> round(argmin(lambda v: (v - 0.3) ** 2, 0.0, 1.0), 6)
    0.3
    """
    ratio = (5.0**0.5 - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    width = high - low
    while high - low > tolerance * width:
        if function(left) <= function(right):
            high, right = right, left
            left = high - ratio * (high - low)
        else:
            low, left = left, right
            right = low + ratio * (high - low)
    return (low + high) / 2


def algorithm_2(
    regulariser: Callable[[float], float],
    losses: Sequence[Callable[[float], float]],
    *,
    low: float,
    high: float,
) -> float:
    r"""Algorithm 2 (FTRL) after some losses, as the numerical argmin that the paper prints.

    .. math:: v_{t+1} = \arg\min_{v \in [low, high]} r(v) + \sum_{s=1}^t \ell_s(v)

    >>> v = algorithm_2(lambda v: (v - 1) ** 2, [lambda v: v**2], low=0.0, high=2.0)
    >>> round(v, 6)
    0.5
    """
    return argmin(lambda v: regulariser(v) + sum(loss(v) for loss in losses), low, high)


def minimise_with_ftrl(u: Sequence[float], n: Sequence[float], *, smoothness: float, alpha: float) -> float:
    r"""FTRL on the surrogate losses by a numerical argmin, with Theorem 4's regulariser.

    The same number as :func:`step_size`, from the definition instead of the closed form.

    >>> round(minimise_with_ftrl([1.0], [3.0], smoothness=10.0, alpha=1.0), 8)
    0.05
    """
    return algorithm_2(
        lambda eta: smoothness * alpha / 2 * (eta - 1 / smoothness) ** 2,
        [
            lambda eta, u_j=u_j, n_j=n_j: smoothness * eta**2 / 2 * n_j - eta * u_j  # type: ignore[misc]
            for u_j, n_j in zip(u, n, strict=True)
        ],
        low=0.0,
        high=2 / smoothness,
    )


def ftrl(u: Sequence[float], n: Sequence[float], *, smoothness: float, alpha: float) -> list[float]:
    """All the step sizes eta_1, ..., eta_{T+1} that FTRL plays against the losses (u_t, n_t).

    >>> ftrl([1.0], [3.0], smoothness=10.0, alpha=1.0)
    [0.1, 0.05]
    """
    return [step_size(u[:t], n[:t], smoothness=smoothness, alpha=alpha) for t in range(len(u) + 1)]


def diagonal(
    past: Sequence[ArrayLike],
    present: ArrayLike,
    tensors: ArrayLike,
    *,
    decay: float = 0.99,
    tensor: float = 0.01,
    overall: float = 1e-4,
) -> Vector:
    r"""D of :class:`sgdol.metrics.RMS` (AdaGrad with decay = 1), from the mean gradients of the updates before.

    With the weighted mean :math:`q = v/w` of the past squares, w the sum of their weights, or the present squares if
    there is no past, tmean the mean over a coordinate's tensor and mean that over all coordinates,

    .. math:: V = \frac{w q + k_0\,\mathrm{tmean}(q)}{w + k_0}, \qquad
        D = \sqrt{\frac{V + k_1\,\mathrm{mean}(q)}{1 + k_1}} \bigg/ \text{its root mean square}

    Args:
        past: the mean gradients of the updates before, in order.
        present: that of this update.
        tensors: the number of the tensor that each coordinate is in, from 0.
        decay: what is left of a square after one more update.
        tensor: k_0.
        overall: k_1.

    >>> diagonal([], [3.0, 4.0, 0.0], [0, 0, 1], overall=0.0)  # the first update: a constant in each tensor
    array([1.22474487, 1.22474487, 0.        ])
    """
    number = np.asarray(tensors)
    weights = [decay ** (len(past) - 1 - j) for j in range(len(past))]
    w = sum(weights)
    q: Vector = np.asarray(present, dtype=np.float64) ** 2
    if len(past):
        v = np.zeros_like(q)
        for weight, g in zip(weights, past, strict=True):
            v = v + weight * np.asarray(g, dtype=np.float64) ** 2
        q = v / w
    tmean = np.array([q[number == i].mean() for i in number])
    V = ((w * q + tensor * tmean) / (w + tensor) + overall * q.mean()) / (1 + overall)
    return np.sqrt(V) / np.sqrt(V.mean()) if V.mean() > 0 else np.ones_like(V)


def measured_multiplier(
    u: Sequence[float],
    v: Sequence[float],
    multipliers: Sequence[float],
    *,
    alpha: float,
    tolerance: float = 0.6,
    charge: float = 2.0,
) -> float:
    r"""The multiplier of :class:`sgdol.learners.MeasuredCurvature`, from the rounds before.

    Args:
        u: u_1, ..., u_{t-1}; the last has no v yet and does not count.
        v: v_1, ..., v_{t-2}: <gbar_{j+1}, d_j>.
        multipliers: s_1, ..., s_{t-1}.
        alpha: the regulariser's alpha.
        tolerance: tau.
        charge: a.

    >>> measured_multiplier([2.0, 9.0], [-6.0], [1.0, 1.0], alpha=2.0, tolerance=0.5, charge=1.0)
    0.5
    """
    U = sum(u[: len(v)])
    H = sum((u_j - v_j) / s_j if s_j > 0 else 0.0 for u_j, v_j, s_j in zip(u, v, multipliers, strict=False))
    A = max(alpha + U, 0.0)
    cost = A + charge * max(H - U / tolerance, 0.0)
    return A / cost if cost > 0 else 1.0


class Run(NamedTuple):
    """What a run of Algorithm 1 leaves."""

    iterates: Vector
    """x_1, ..., x_{T+1}, along the first axis."""
    step_sizes: Vector
    """eta_1, ..., eta_T; with blocks, the step size of every coordinate."""
    u: Vector
    """u_1, ..., u_T, per block."""
    n: Vector
    """n_1, ..., n_T, per block."""
    output: int
    """k - 1 for the uniformly random k in 1, ..., T: ``iterates[output]`` is what Algorithm 1 returns."""
    diagonals: Vector
    """D_1, ..., D_T of the metric, as diagonals or, if it gives full matrices, as matrices; ones for Euclid's."""


def algorithm_1(
    oracle: Callable[[Vector], Vector],
    x1: ArrayLike,
    horizon: int,
    *,
    smoothness: float,
    alpha: float | None,
    k: int = 2,
    estimator: Literal["paper", "symmetric"] = "paper",
    blocks: ArrayLike | None = None,
    seed: int = 0,
    metric: MetricName | Mapping[str, float] | MetricFunction = "euclidean",
    tensors: ArrayLike | None = None,
) -> Run:
    r"""Algorithm 1 (SGDOL) with FTRL as its learner.

    In round t it computes :math:`\eta_t` from the losses of the rounds before, then receives independent gradients,
    then moves :math:`x_{t+1} = x_t - \eta_t d_t`.

    Args:
        oracle: returns a fresh stochastic gradient at the given point each time that it is called.
        x1: the first point.
        horizon: T.
        smoothness: M.
        alpha: the regulariser's alpha, in each block; None for the first non-zero squared direction, shared
            among the blocks in proportion to their sizes.
        k: how many gradients to draw in a round; the paper's estimator uses the first two.
        estimator: ``"paper"``: d = g, u = <g, g'>; ``"symmetric"``: d = mean, u = mean of the cross products.
        blocks: the block number of each coordinate, from 0: coordinates of one block share a step size. None for one
            block (Algorithm 1); ``range(d)`` for the per-coordinate variant of section 6.
        seed: of the random output iterate.
        metric: past the paper: in which products of gradients are taken; a name, arguments of :func:`diagonal`, or a
            function that makes D (:data:`MetricFunction`).
        tensors: for the metric, the number of the tensor that each coordinate is in; None for one.

    >>> rng = np.random.default_rng(0)
    >>> run = algorithm_1(lambda x: x + rng.normal(size=2), [3.0, 4.0], 50, smoothness=1.0, alpha=10.0)
    >>> run.step_sizes[0], bool(run.step_sizes[-1] < run.step_sizes[0])
    (np.float64(1.0), True)
    """

    def draw(_: int, x: Vector) -> Vector:
        return np.stack([oracle(x) for _ in range(k)])

    return _run(draw, x1, horizon, smoothness, alpha, estimator, blocks, seed, metric=metric, tensors=tensors)


def replay(
    gradients: ArrayLike,
    x1: ArrayLike,
    *,
    smoothness: float,
    alpha: float | None,
    estimator: Literal["paper", "symmetric"] = "paper",
    blocks: ArrayLike | None = None,
    kappa: float = 1.0,
    momentum: float = 0.0,
    statistics: Literal["direction", "gradient"] = "direction",
    metric: MetricName | Mapping[str, float] | MetricFunction = "euclidean",
    tensors: ArrayLike | None = None,
    learner: Literal["ftrl", "measured"] = "ftrl",
    bias_correction: bool = True,
    epoch: int | None = None,
) -> Run:
    r"""Algorithm 1 on recorded gradients, of shape (T, k, d): what an optimizer must do on exact vectors.

    Past the paper: alpha=None is kappa times the first squared gradient; with momentum, :math:`d_t = m_t / (1 -
    \beta^t)` for :math:`m_t = \beta m_{t-1} + (1 - \beta) \bar g_t`, and the learner sees either the pair
    :math:`((\beta \langle m_{t-1}, \bar g_t\rangle + (1 - \beta) u_t)/(1 - \beta^t), \|d_t\|^2)` of that direction,
    or the pair of the gradients alone. In a metric every product of two gradients has :math:`D_t^{-1}`
    (:func:`diagonal`, or any positive definite matrix) in between, and :math:`d_t = D_t^{-1} m_t / (1 - \beta^t)`.
    The learner is FTRL, or the one of :func:`measured_multiplier`. ``tensors`` numbers the tensor of each coordinate;
    None for one. Without bias correction the direction is :math:`m_t`: 1 stands for :math:`1 - \beta^t` everywhere.
    With ``epoch`` = B updates in a shuffled epoch, products of two gradients of one epoch are low by a number of
    which :math:`(\|\bar g\|^2 - u)/B` is an unbiased estimate (of the symmetric estimator): it is added to u, and,
    with the weight that this epoch's gradients have in :math:`m_{t-1}`, to :math:`\langle m_{t-1}, \bar g_t\rangle`.

    >>> replay([[[1.0], [1.0]], [[2.0], [-2.0]]], [0.0], smoothness=1.0, alpha=1.0).iterates.ravel()
    array([ 0., -1., -3.])
    """
    recorded = np.asarray(gradients, dtype=np.float64)
    setting = (x1, len(recorded), smoothness, alpha, estimator, blocks)
    return _run(
        lambda t, _: recorded[t],
        *setting,
        seed=0,
        kappa=kappa,
        momentum=momentum,
        statistics=statistics,
        metric=metric,
        tensors=tensors,
        learner=learner,
        bias_correction=bias_correction,
        epoch=epoch,
    )


def polynomial_average(iterates: ArrayLike, power: float) -> Vector:
    r"""The average :math:`\bar x_t = \bar x_{t-1} + \frac{a+1}{t+a} (x_t - \bar x_{t-1})` after the last iterate.

    >>> polynomial_average([[2.0], [4.0]], power=0).item()
    3.0
    """
    points = np.asarray(iterates, dtype=np.float64)
    average = np.zeros_like(points[0])
    for t, x in enumerate(points, start=1):
        average = average + (power + 1) / (t + power) * (x - average)
    return average


def _run(
    draw: Callable[[int, Vector], Vector],
    x1: ArrayLike,
    horizon: int,
    smoothness: float,
    alpha: float | None,
    estimator: str,
    blocks: ArrayLike | None,
    seed: int,
    kappa: float = 1.0,
    momentum: float = 0.0,
    statistics: str = "direction",
    metric: str | Mapping[str, float] | MetricFunction = "euclidean",
    tensors: ArrayLike | None = None,
    learner: str = "ftrl",
    bias_correction: bool = True,
    epoch: int | None = None,
) -> Run:
    x = np.array(x1, dtype=np.float64)
    block_of = np.zeros(x.shape, dtype=np.intp) if blocks is None else np.array(blocks, dtype=np.intp)
    tensor_of = np.zeros(x.shape, dtype=np.intp) if tensors is None else np.array(tensors, dtype=np.intp)
    sizes = np.bincount(block_of)
    shares = None if alpha is None else np.full(len(sizes), float(alpha))
    iterates, step_sizes, m = [x], [], np.zeros_like(x)
    us: list[Vector] = []
    ns: list[Vector] = []
    vs: list[Vector] = []
    past: list[Vector] = []
    etas: list[Vector] = []
    diagonals: list[Vector] = []
    last = np.zeros_like(x)
    for t in range(horizon):
        eta = np.zeros(len(sizes))
        for b in range(len(sizes)):
            a = 0.0 if shares is None else shares[b]
            u_b, n_b, v_b = ([row[b] for row in rows] for rows in (us, ns, vs))
            if learner == "measured":
                s_b = [smoothness * row[b] for row in etas]
                eta[b] = measured_multiplier(u_b, v_b, s_b, alpha=a) / smoothness
            else:
                eta[b] = step_size(u_b, n_b, smoothness=smoothness, alpha=a)
        g = draw(t, x)
        k = len(g)
        mean: Any = g[0] if estimator == "paper" else sum(g) / k
        D = np.ones_like(x)
        if callable(metric):
            D = np.asarray(metric(past, mean, tensor_of), dtype=np.float64)
        elif metric != "euclidean":
            D = diagonal(past, mean, tensor_of, **(METRICS[metric] if isinstance(metric, str) else metric))
        # Products of two gradients <a, D^-1 b>, coordinate by coordinate, to be summed over a block.
        if estimator == "paper":
            u_each = g[0] * _solve(D, g[1])
        else:
            u_each = sum(g[i] * _solve(D, g[j]) for i in range(k) for j in range(k) if i != j) / (k * (k - 1))
        n_each = mean * _solve(D, mean)
        low, same_epoch = np.zeros_like(x), 0.0
        if epoch is not None:
            low = (n_each - u_each) / epoch
            same_epoch = 1 - momentum ** (t % epoch)
        u_each = u_each + low
        first = n_each.sum()
        before, correction = (1 - momentum**t, 1 - momentum ** (t + 1)) if bias_correction else (1.0, 1.0)
        v_each = mean * last + same_epoch * low / (before if t > 0 and before > 0 else 1.0)
        if statistics == "direction":
            u_each = (momentum * (m * _solve(D, mean) + same_epoch * low) + (1 - momentum) * u_each) / correction
        m = momentum * m + (1 - momentum) * mean
        if statistics == "direction":
            n_each = (m / correction) * _solve(D, m / correction)
        d = _solve(D, m / correction)
        us.append(np.array([u_each[block_of == b].sum() for b in range(len(sizes))]))
        ns.append(np.array([n_each[block_of == b].sum() for b in range(len(sizes))]))
        if t > 0:
            vs.append(np.array([v_each[block_of == b].sum() for b in range(len(sizes))]))
        if shares is None and first > 0:
            shares = kappa * first * sizes / x.size
        x = x - eta[block_of] * d
        last = d
        past.append(mean)
        diagonals.append(D)
        etas.append(eta)
        iterates.append(x)
        step_sizes.append(eta[block_of] if blocks is not None else eta[0])
    output = int(np.random.default_rng(seed).integers(horizon)) if horizon else 0
    return Run(np.array(iterates), np.array(step_sizes), np.array(us), np.array(ns), output, np.array(diagonals))


def _solve(D: Vector, g: Vector) -> Vector:
    """D^-1 g, of a matrix D or of its diagonal."""
    return np.asarray(np.linalg.solve(D, g) if D.ndim == 2 else g / D, dtype=np.float64)
