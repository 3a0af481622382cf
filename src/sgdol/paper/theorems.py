r"""Theorems 1, 2, 4, 6 and 8, measured on problems that satisfy their assumptions.

The paper's own experiments do not: Gaussian noise has no bounded gradients (H3) and Rosenbrock's function no smoothness
constant (H4). These problems have everything, and their constants are known:

* :func:`cosines`: :math:`f(x) = \sum_i a_i (1 - \cos x_i)`, with noise :math:`\pm\sigma_i` in coordinate i;
* :func:`adult`: the model of section 7 on some of its people, with minibatches, and :math:`M = 2 \lambda_{\max}`;
* :func:`sine_bowl` and :func:`least_squares`: without noise, and with the Polyak-Lojasiewicz condition (H5).

The step sizes come from the library's learner and its surrogate losses, the right-hand sides from :mod:`sgdol.theory`.
Expectations are means over repeats that run side by side; an inequality counts as violated when it fails by more than
five standard errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgdol import surrogate, theory
from sgdol.learners import FTRL
from sgdol.paper.data import balanced_adult
from sgdol.paper.verdict import Claim, Part

__all__ = ["Point", "Problem", "Trace", "adult", "check_theorems", "cosines", "least_squares", "simulate", "sine_bowl"]

Array = NDArray[np.float64]

STANDARD_ERRORS = 5.0
"""Of a thousand normal means, none is expected further off than this."""

REASON = "the theorem's own right-hand side, with five standard errors of the measured side for the Monte-Carlo error"


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


def _error(values: Array) -> float:
    """The standard error of the mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def excess_over_surrogate(problem: Problem, trace: Trace) -> float:
    """The largest excess over time of E[f(x_{t+1}) - f(x_t)] over E[l_t(eta_t)], in standard errors (Theorem 1)."""
    played = surrogate.loss(trace.step_sizes, trace.u, trace.n, problem.smoothness)
    difference = np.diff(trace.objective, axis=0) - played
    errors = difference.std(axis=1, ddof=1) / np.sqrt(difference.shape[1])
    # Rounding of f, where there is no randomness left to divide by.
    return float((difference.mean(axis=1) / np.maximum(errors, 1e-15)).max())


def _theorem_1(runs: list[tuple[Problem, Trace]]) -> Claim:
    return Claim(
        id="theorem-1",
        sentence="E[f(x_{t+1}) − f(x_t)] ≤ E[ℓ_t(η_t)].",
        where="Theorem 1",
        check="the largest excess of the left side over the right one in any iteration, in standard errors of their"
        " difference over the repeats",
        reason="0 but for the Monte-Carlo error: among some hundred iterations five standard errors are not reached"
        " by chance",
        parts=tuple(
            Part(
                f"{problem.name}: largest excess in {len(trace.u)} iterations, {trace.u.shape[1]} repeats",
                excess_over_surrogate(problem, trace),
                "<=",
                STANDARD_ERRORS,
            )
            for problem, trace in runs
        ),
    )


def _theorem_2(runs: list[tuple[Problem, Trace]], multipliers: tuple[float, ...]) -> Claim:
    parts = []
    for problem, trace in runs:
        gradient, variance = trace.squared_gradient_sum.sum(axis=1), trace.variance_sum.sum(axis=1)
        for multiplier in multipliers:
            eta = multiplier / problem.smoothness
            regret = theory.regret(trace.step_sizes, trace.u, trace.n, problem.smoothness, against=eta)
            weight = eta - problem.smoothness / 2 * eta**2
            bound = theory.theorem_2(
                eta,
                smoothness=problem.smoothness,
                gap=problem.gap,
                expected_regret=float(regret.mean()),
                variance_sum=float(variance.mean()),
            )
            difference = weight * gradient - regret - problem.smoothness * eta**2 / 2 * variance
            error = _error(difference)
            parts.append(
                Part(
                    f"{problem.name}: left side at η = {multiplier:g}/M",
                    float(weight * gradient.mean()),
                    "<=",
                    bound,
                    spread=error,
                    slack=STANDARD_ERRORS * error,
                )
            )
    return Claim(
        id="theorem-2",
        sentence="E[(η − Mη²/2) Σ_t ‖∇f(x_t)‖²] ≤ f(x_1) − f* + E[Regret_T(η)] + (Mη²/2) Σ_t E[σ_t²].",
        where="Theorem 2",
        check="both sides at several η, with the measured regret; the spread is the standard error of their difference",
        reason=REASON,
        parts=tuple(parts),
        note="The paper says for any η > 0; the regret bound that the theorem is used with needs η ≤ 2/M.",
    )


def _theorem_4(runs: list[tuple[Problem, Trace]], alpha: float) -> Claim:
    parts = []
    for problem, trace in runs:
        horizon = len(trace.u)
        mean_squared_gradient = trace.squared_gradient_sum.sum(axis=1) / horizon
        bound = theory.theorem_4(
            smoothness=problem.smoothness,
            gap=problem.gap,
            lipschitz=problem.lipschitz_norm,
            alpha=alpha,
            variance_sum=float(trace.variance_sum.sum(axis=1).mean()),
            horizon=horizon,
        )
        error = _error(mean_squared_gradient)
        parts.append(
            Part(
                f"{problem.name}: E‖∇f(x_k)‖² at T = {horizon}",
                float(mean_squared_gradient.mean()),
                "<=",
                bound,
                spread=error,
                slack=STANDARD_ERRORS * error,
            )
        )
    return Claim(
        id="theorem-4",
        sentence="E[‖∇f(x_k)‖²] ≤ (2M/T)(f(x_1) − f* + (5L²/M) ln(1 + L²T/α))"
        " + (1/T)√(2M Σ_t E[σ_t²] (f(x_1) − f* + α/(2M))) + (1/T)√(10L² Σ_t E[σ_t²] ln(1 + L²T/α)).",
        where="Theorem 4",
        check="the mean squared gradient over the iterations and the repeats, against the bound",
        reason=REASON,
        parts=tuple(parts),
    )


def _theorem_6(problems: list[Problem], horizon: int, alpha: float) -> Claim:
    parts = []
    for problem in problems:
        assert problem.pl_constant is not None
        trace = simulate(problem, repeats=1, horizon=horizon, alpha=alpha)
        bounds = [
            theory.theorem_6(smoothness=problem.smoothness, pl_constant=problem.pl_constant, gap=problem.gap, horizon=t)
            for t in range(1, horizon + 1)
        ]
        parts.append(
            Part(
                f"{problem.name}: largest ratio of f(x_{{T+1}}) − f* to its bound, T ≤ {horizon}",
                float((trace.objective[1:, 0] / bounds).max()),
                "<=",
                1.0,
                slack=1e-9,
            )
        )
    return Claim(
        id="theorem-6",
        sentence="E[f(x_{T+1}) − f*] ≤ (1 − μ/M)^T [f(x_1) − f*].",
        where="Theorem 6 (the linear rate under the Polyak-Łojasiewicz condition)",
        check="the largest ratio of the left side to the right one over all T up to a horizon, without noise",
        reason="the theorem's own right-hand side; there is no randomness, and 1e-9 is for rounding",
        parts=tuple(parts),
    )


def _theorem_8(runs: list[tuple[Problem, Trace]], alpha: float) -> Claim:
    parts = []
    for problem, trace in runs:
        horizon = len(trace.u)
        bounds = theory.theorem_8(
            smoothness=problem.smoothness,
            gap=problem.gap,
            lipschitz=problem.lipschitz,
            alpha=alpha,
            variance_sums=trace.variance_sum.mean(axis=0).tolist(),
            horizon=horizon,
        )
        total = trace.squared_gradient_sum.sum(axis=1)
        each = trace.squared_gradient_sum
        tightest = int((each.mean(axis=0) / bounds.each).argmax())
        parts += [
            Part(
                f"{problem.name}: Σ_t ‖∇f(x_t)‖², T = {horizon}",
                float(total.mean()),
                "<=",
                bounds.total,
                spread=_error(total),
                slack=STANDARD_ERRORS * _error(total),
            ),
            Part(
                f"{problem.name}: Σ_t ∇f(x_t)_i² in the coordinate nearest to its bound",
                float(each[:, tightest].mean()),
                "<=",
                bounds.each[tightest],
                spread=_error(each[:, tightest]),
                slack=STANDARD_ERRORS * _error(each[:, tightest]),
            ),
        ]
    return Claim(
        id="theorem-8",
        sentence="E[Σ_t ∇f(x_t)_i²] ≤ … for each i, and E[Σ_t ‖∇f(x_t)‖²] ≤"
        " 2M(f(x_1) − f* + Σ_i (5L_i²/M) ln(1 + L_i²T/α))"
        " + √(2M Σ_t E[σ_t²] (f(x_1) − f* + dα/(2M))) + √(10 Σ_t E[σ_t²] Σ_i L_i² ln(1 + L_i²T/α)).",
        where="Theorem 8 (per-coordinate step sizes)",
        check="both statements: the sum of squared gradients, and that of the coordinate nearest to its own bound",
        reason=REASON,
        parts=tuple(parts),
        note="With σ_t² = Σ_i σ_{t,i}², for which the paper's “σ_t = Σ_{t=1}^T σ_{t,i}²” is a slip.",
    )


def check_theorems(alpha: float = 10.0, seed: int = 0) -> list[Claim]:
    """All five, in a few seconds."""
    one = [cosines((1.0,), (noise,), (2.0,)) for noise in (0.2, 2.0)]
    three = cosines((1.0, 0.5, 0.1), (0.0, 0.5, 2.0), (2.0, 2.0, 2.0))
    people = adult(1000, 1, seed)
    global_runs = [(p, simulate(p, repeats=2000, horizon=500, alpha=alpha, seed=seed)) for p in one]
    global_runs.append((people, simulate(people, repeats=48, horizon=400, alpha=alpha, seed=seed)))
    coordinate_runs = [
        (three, simulate(three, repeats=1000, horizon=500, alpha=alpha, per_coordinate=True, seed=seed)),
        (people, simulate(people, repeats=48, horizon=400, alpha=alpha, per_coordinate=True, seed=seed)),
    ]
    return [
        _theorem_1(global_runs),
        _theorem_2(global_runs, (0.1, 0.5, 1.0, 1.5, 2.0)),
        _theorem_4(global_runs, alpha),
        _theorem_6([sine_bowl(3.0), sine_bowl(40.0), least_squares()], 2000, alpha),
        _theorem_8(coordinate_runs, alpha),
    ]
