r"""Problems that satisfy the assumptions of the paper's theorems, and Algorithm 1 on them.

The paper's own experiments do not: Gaussian noise has no bounded gradients (H3) and Rosenbrock's function no smoothness
constant (H4). These problems have everything, and their constants are known:

* :func:`cosines`: :math:`f(x) = \sum_i a_i (1 - \cos x_i)`, with noise :math:`\pm\sigma_i` in coordinate i;
* :func:`adult`: the model of section 7 on some of its people, with minibatches, and :math:`M = 2 \lambda_{\max}`;
* :func:`sine_bowl` and :func:`least_squares`: without noise, and with the Polyak-Lojasiewicz condition (H5).

The step sizes come from the library's learner and its surrogate losses. Expectations are means over repeats that run
side by side. :mod:`sgdol.paper.claims.theorems` compares what they give with the theorems.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgdol import surrogate
from sgdol.learners import FTRL
from sgdol.paper.data import balanced_adult

__all__ = [
    "Point",
    "Problem",
    "Trace",
    "adult",
    "cosines",
    "excess_over_surrogate",
    "least_squares",
    "phi_slope",
    "simulate",
    "sine_bowl",
]

Array = NDArray[np.float64]


class Point(NamedTuple):
    """What is known at some points."""

    objective: Array
    """f, shape (repeats,)."""
    gradient: Array
    """The true gradient, shape (repeats, d)."""
    variance: Array
    """The exact variance of a stochastic gradient in each coordinate, shape (repeats, d)."""


@dataclass(frozen=True)
class Problem:
    """An objective with stochastic gradients and every constant that the theorems name.

    Points are rows: an array of shape (repeats, d) holds one point per repeat.
    """

    name: str
    x1: Array
    evaluate: Callable[[Array], Point]
    noisy_pair: Callable[[Array, np.random.Generator], Array]
    """Two independent stochastic gradients at each point, shape (2, repeats, d)."""
    smoothness: float
    lipschitz: tuple[float, ...]
    """L_i of H3', for each coordinate."""
    lipschitz_norm: float
    """L of H3."""
    infimum: float = 0.0
    """f*, or a number below it: the gap then only grows, and so do the bounds."""
    pl_constant: float | None = None

    @property
    def gap(self) -> float:
        """f(x_1) - f*."""
        return float(self.evaluate(self.x1[None]).objective[0]) - self.infimum


def cosines(scales: tuple[float, ...], noise: tuple[float, ...], x1: tuple[float, ...]) -> Problem:
    r""":math:`f(x) = \sum_i a_i (1 - \cos x_i)` with Rademacher noise: non-convex, smooth, bounded gradients.

    >>> problem = cosines((1.0,), (0.5,), (2.0,))
    >>> problem.smoothness, problem.lipschitz
    (1.0, (1.5,))
    """
    a, sigma = np.array(scales), np.array(noise)
    lipschitz = a + sigma

    def evaluate(x: Array) -> Point:
        return Point((a * (1 - np.cos(x))).sum(axis=-1), a * np.sin(x), np.broadcast_to(sigma**2, x.shape))

    def noisy_pair(x: Array, rng: np.random.Generator) -> Array:
        return a * np.sin(x) + sigma * rng.choice([-1.0, 1.0], size=(2, *x.shape))

    return Problem(
        name=f"1 - cos, noise {'/'.join(f'{level:g}' for level in noise)}",
        x1=np.array(x1),
        evaluate=evaluate,
        noisy_pair=noisy_pair,
        smoothness=float(a.max()),
        lipschitz=tuple(float(bound) for bound in lipschitz),
        lipschitz_norm=float(np.linalg.norm(lipschitz)),
    )


def phi_slope(theta: Array) -> Array:
    r""":math:`\phi'(\theta) = 2\theta / (1 + \theta^2)^2`, at most :math:`3\sqrt3/8` in absolute value."""
    return 2 * theta / (1 + theta**2) ** 2


def adult(people: int, batch: int, seed: int = 0) -> Problem:
    r"""The classification model of section 7 on some people of each class, with :math:`M = 2 \lambda_{\max}(A^T A/m)`.

    :math:`|\phi''| \le 2` makes that an M of H4 for every point, and :math:`f \ge 0` gives a gap.

    Args:
        people: how many, a multiple of 40.
        batch: the minibatch, drawn with replacement.
        seed: which people.
    """
    whole = balanced_adult(seed)
    rng = np.random.default_rng(seed)
    rows = np.concatenate(
        [rng.choice(np.flatnonzero(whole.labels == label), people // 2, replace=False) for label in (-1, 1)]
    )
    a, y = whole.features[rows], whole.labels[rows]
    slope = 3 * np.sqrt(3) / 8
    per_coordinate = slope * np.abs(a).max(axis=0)

    # Products this small stay on one thread; on a busy machine, waiting for a second one costs ten times more.
    blocks, targets = a.reshape(people // 40, 40, -1), y.reshape(people // 40, 1, 40)

    def evaluate(x: Array) -> Point:
        theta = x @ blocks.transpose(0, 2, 1) - targets
        slopes = phi_slope(theta)
        gradient = (slopes @ blocks).sum(axis=0) / people
        second_moment = (slopes**2 @ blocks**2).sum(axis=0) / people
        objective = 1 - (1 / (1 + theta**2)).mean(axis=(0, 2))
        return Point(objective, gradient, (second_moment - gradient**2) / batch)

    def noisy_pair(x: Array, rng: np.random.Generator) -> Array:
        drawn = rng.integers(len(y), size=(2, len(x), batch))
        samples = a[drawn]
        theta = np.einsum("krbd,rd->krb", samples, x) - y[drawn]
        return np.einsum("krb,krbd->krd", phi_slope(theta), samples) / batch

    return Problem(
        name=f"adult, {people:,} people, minibatch {batch}",
        x1=np.zeros(a.shape[1]),
        evaluate=evaluate,
        noisy_pair=noisy_pair,
        smoothness=float(2 * np.linalg.eigvalsh(a.T @ a / len(y))[-1]),
        lipschitz=tuple(float(bound) for bound in per_coordinate),
        lipschitz_norm=float(slope * np.linalg.norm(a, axis=1).max()),
    )


def _noiseless(name: str, x1: Array, objective: Callable, gradient: Callable, smoothness: float, mu: float) -> Problem:
    # Without noise the iterates never leave the first level set, so its largest gradient bounds them (H3).
    norm = float(np.sqrt(2 * smoothness * objective(x1[None])[0]))
    return Problem(
        name=name,
        x1=x1,
        evaluate=lambda x: Point(objective(x), gradient(x), np.zeros_like(x)),
        noisy_pair=lambda x, rng: np.stack([gradient(x)] * 2),
        smoothness=smoothness,
        lipschitz=(norm,) * len(x1),
        lipschitz_norm=norm,
        pl_constant=mu,
    )


def sine_bowl(x1: float) -> Problem:
    r""":math:`f(x) = x^2 + 3 \sin^2 x`: non-convex, M = 8, and PL with :math:`\mu = 1/32` (Karimi et al. 2016)."""
    return _noiseless(
        f"x² + 3 sin² x from {x1:g}",
        np.array([x1]),
        lambda x: (x**2 + 3 * np.sin(x) ** 2).sum(axis=-1),
        lambda x: 2 * x + 3 * np.sin(2 * x),
        8.0,
        1 / 32,
    )


def least_squares(rows: int = 12, columns: int = 20, seed: int = 0) -> Problem:
    r""":math:`f(x) = \|A(x - x^\star)\|^2 / 2` of deficient rank, which is PL."""
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(rows, columns)) / np.sqrt(columns)
    minimiser = rng.normal(size=columns)
    eigenvalues = np.linalg.eigvalsh(a @ a.T)
    return _noiseless(
        f"least squares, rank {rows} in {columns} dimensions",
        np.zeros(columns),
        lambda x: (((x - minimiser) @ a.T) ** 2).sum(axis=-1) / 2,
        lambda x: (x - minimiser) @ a.T @ a,
        float(eigenvalues[-1]),
        float(eigenvalues[0]),
    )


class Trace(NamedTuple):
    """What a run leaves, repeats along the axis after time."""

    objective: Array
    """f(x_1), ..., f(x_{T+1}), shape (T + 1, repeats)."""
    step_sizes: Array
    """eta_t, shape (T, repeats) or, per coordinate, (T, repeats, d)."""
    u: Array
    n: Array
    squared_gradient_sum: Array
    """The sum over t of the true squared gradient in each coordinate, shape (repeats, d)."""
    variance_sum: Array
    """The sum over t of the exact variance in each coordinate, shape (repeats, d)."""


def simulate(
    problem: Problem,
    *,
    repeats: int,
    horizon: int,
    alpha: float,
    per_coordinate: bool = False,
    seed: int = 0,
) -> Trace:
    """Algorithm 1 with FTRL, as printed, in many repeats side by side.

    >>> trace = simulate(cosines((1.0,), (0.0,), (2.0,)), repeats=1, horizon=50, alpha=10.0)
    >>> bool((trace.step_sizes == 1.0).all()), bool(trace.objective[-1, 0] < 1e-12)
    (True, True)
    """
    rng = np.random.default_rng(seed)
    learner = FTRL()
    x = np.tile(problem.x1, (repeats, 1))
    state = learner.initial(np.zeros_like(x) if per_coordinate else np.zeros(repeats))
    here = problem.evaluate(x)
    objective, step_sizes, us, ns = [here.objective], [], [], []
    squared_gradient_sum, variance_sum = np.zeros_like(x), np.zeros_like(x)
    for _ in range(horizon):
        squared_gradient_sum += here.gradient**2
        variance_sum += here.variance
        multiplier = learner.predict(state, alpha)
        direction, u, n = surrogate.statistics(problem.noisy_pair(x, rng), estimator="paper", blocks="coordinate")
        if not per_coordinate:
            u, n = u.sum(axis=-1), n.sum(axis=-1)
        state = learner.observe(state, multiplier, u, n, alpha)
        step_size = multiplier / problem.smoothness
        x = x - (step_size if per_coordinate else step_size[:, None]) * direction
        here = problem.evaluate(x)
        objective.append(here.objective)
        step_sizes.append(step_size)
        us.append(u)
        ns.append(n)
    return Trace(
        np.array(objective), np.array(step_sizes), np.array(us), np.array(ns), squared_gradient_sum, variance_sum
    )


def excess_over_surrogate(problem: Problem, trace: Trace) -> float:
    """The largest excess over time of E[f(x_{t+1}) - f(x_t)] over E[l_t(eta_t)], in standard errors (Theorem 1)."""
    played = surrogate.loss(trace.step_sizes, trace.u, trace.n, problem.smoothness)
    difference = np.diff(trace.objective, axis=0) - played
    errors = difference.std(axis=1, ddof=1) / np.sqrt(difference.shape[1])
    # Rounding of f, where there is no randomness left to divide by.
    return float((difference.mean(axis=1) / np.maximum(errors, 1e-15)).max())
