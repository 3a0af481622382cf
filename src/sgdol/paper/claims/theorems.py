"""Theorems 1 to 8 and Lemma 5, measured on problems that satisfy their assumptions (:mod:`sgdol.paper.theorems`).

The right-hand sides come from :mod:`sgdol.theory`. An inequality counts as violated when it fails by more than five
standard errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgdol import theory
from sgdol.paper.claims._check import claim
from sgdol.paper.measures import Reader
from sgdol.paper.theorems import (
    Problem,
    Trace,
    adult,
    cosines,
    excess_over_surrogate,
    least_squares,
    simulate,
    sine_bowl,
)
from sgdol.paper.verdict import Part

STANDARD_ERRORS = 5.0
"""Of a thousand normal means, none is expected further off than this."""
ALPHA = 10.0
MULTIPLIERS = (0.1, 0.5, 1.0, 1.5, 2.0)

REASON = "the theorem's own right-hand side, with five standard errors of the measured side for the Monte-Carlo error"


@functools.cache
def _people() -> Problem:
    return adult(1000, 1)


@functools.cache
def _global_runs() -> list[tuple[Problem, Trace]]:
    runs = []
    for noise in (0.2, 2.0):
        problem = cosines((1.0,), (noise,), (2.0,))
        runs.append((problem, simulate(problem, repeats=2000, horizon=500, alpha=ALPHA)))
    return [*runs, (_people(), simulate(_people(), repeats=48, horizon=400, alpha=ALPHA))]


@functools.cache
def _coordinate_runs() -> list[tuple[Problem, Trace]]:
    three = cosines((1.0, 0.5, 0.1), (0.0, 0.5, 2.0), (2.0, 2.0, 2.0))
    return [
        (three, simulate(three, repeats=1000, horizon=500, alpha=ALPHA, per_coordinate=True)),
        (_people(), simulate(_people(), repeats=48, horizon=400, alpha=ALPHA, per_coordinate=True)),
    ]


def _against(what: str, values: NDArray[np.float64], bound: float) -> Part:
    """The mean over repeats against a bound, within five of its standard errors."""
    error = _error(values)
    return Part(what, float(values.mean()), "<=", bound, spread=error, slack=STANDARD_ERRORS * error, main=True)


def _error(values: NDArray[np.float64]) -> float:
    """The standard error of the mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values)))


@claim(
    "theorem-1",
    kind="theorem",
    sentence="E[f(x_{t+1}) − f(x_t)] ≤ E[ℓ_t(η_t)].",
    where="Theorem 1",
    check="the largest excess of the left side over the right one in any iteration, in standard errors of their"
    " difference over the repeats",
    reason="0 but for the Monte-Carlo error: among some hundred iterations five standard errors are not reached by"
    " chance",
)
def theorem_1(read: Reader) -> Iterable[Part]:
    """The surrogate loss bounds the expected decrease."""
    for problem, trace in _global_runs():
        yield Part(
            f"{problem.name}: largest excess in {len(trace.u)} iterations, {trace.u.shape[1]} repeats",
            excess_over_surrogate(problem, trace),
            "<=",
            STANDARD_ERRORS,
            main=True,
        )


@claim(
    "theorem-2",
    kind="theorem",
    sentence="E[(η − Mη²/2) Σ_t ‖∇f(x_t)‖²] ≤ f(x_1) − f* + E[Regret_T(η)] + (Mη²/2) Σ_t E[σ_t²].",
    where="Theorem 2",
    check="both sides at several η, with the measured regret; the spread is the standard error of their difference",
    reason=REASON,
    note="The paper says for any η > 0; the regret bound that the theorem is used with needs η ≤ 2/M.",
)
def theorem_2(read: Reader) -> Iterable[Part]:
    """The regret bounds the gradients."""
    for problem, trace in _global_runs():
        gradient, variance = trace.squared_gradient_sum.sum(axis=1), trace.variance_sum.sum(axis=1)
        for multiplier in MULTIPLIERS:
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
            error = _error(weight * gradient - regret - problem.smoothness * eta**2 / 2 * variance)
            yield Part(
                f"{problem.name}: left side at η = {multiplier:g}/M",
                float(weight * gradient.mean()),
                "<=",
                bound,
                spread=error,
                slack=STANDARD_ERRORS * error,
                main=True,
            )


@claim(
    "theorem-3",
    kind="theorem",
    sentence="Regret_T(x*) ≤ r(x*) + ½ Σ_t ‖g_t‖²_{(t),*}.",
    where="Theorem 3 (the regret of FTRL, from McMahan 2017)",
    check="on every path, against several η: the regret over r(η) + Σ_t ℓ_t'(η_t)² / (2M (α + Σ_{s≤t} ‖g_s‖²)), the"
    " largest",
    reason="the theorem's own right-hand side; it holds path by path, and 1e-9 is for rounding",
)
def theorem_3(read: Reader) -> Iterable[Part]:
    """The regret of FTRL, path by path."""
    for problem, trace in _global_runs():
        m = problem.smoothness
        slopes = m * trace.step_sizes * trace.n - trace.u
        sums = (slopes**2 / (2 * m * (ALPHA + np.cumsum(trace.n, axis=0)))).sum(axis=0)
        largest = -np.inf
        for multiplier in MULTIPLIERS:
            regret = theory.regret(trace.step_sizes, trace.u, trace.n, m, against=multiplier / m)
            largest = max(largest, float((regret / (ALPHA / (2 * m) * (multiplier - 1) ** 2 + sums)).max()))
        what = f"{problem.name}: largest ratio of the regret to its bound, {trace.u.shape[1]} paths"
        yield Part(what, largest, "<=", 1.0, slack=1e-9, main=True)


@claim(
    "theorem-4",
    kind="theorem",
    sentence="E[‖∇f(x_k)‖²] ≤ (2M/T)(f(x_1) − f* + (5L²/M) ln(1 + L²T/α))"
    " + (1/T)√(2M Σ_t E[σ_t²] (f(x_1) − f* + α/(2M))) + (1/T)√(10L² Σ_t E[σ_t²] ln(1 + L²T/α)).",
    where="Theorem 4",
    check="the mean squared gradient over the iterations and the repeats, against the bound",
    reason=REASON,
)
def theorem_4(read: Reader) -> Iterable[Part]:
    """The rate with one step size."""
    for problem, trace in _global_runs():
        horizon = len(trace.u)
        bound = theory.theorem_4(
            smoothness=problem.smoothness,
            gap=problem.gap,
            lipschitz=problem.lipschitz_norm,
            alpha=ALPHA,
            variance_sum=float(trace.variance_sum.sum(axis=1).mean()),
            horizon=horizon,
        )
        mean_squared_gradient = trace.squared_gradient_sum.sum(axis=1) / horizon
        yield _against(f"{problem.name}: E‖∇f(x_k)‖² at T = {horizon}", mean_squared_gradient, bound)


@claim(
    "lemma-5",
    kind="theorem",
    sentence="Σ_{t=1}^T a_t h(a_0 + Σ_{i=1}^t a_i) ≤ ∫_{a_0}^{Σ_{t=0}^T a_t} h(x) dx.",
    where="Lemma 5",
    check="the largest ratio of the left side to the right one, for h(x) = 1/x, 1/√x and e^{−x} and 300 random"
    " sequences of each",
    reason="the lemma's own right-hand side; there is no randomness in it, and 1e-9 is for rounding",
)
def lemma_5(read: Reader) -> Iterable[Part]:
    """A sum is below its integral."""
    rng = np.random.default_rng(0)
    integrals: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
        "1/x": (lambda x: 1 / x, np.log),
        "1/√x": (lambda x: x**-0.5, lambda x: 2 * np.sqrt(x)),
        "e^{−x}": (lambda x: np.exp(-x), lambda x: -np.exp(-x)),
    }
    for name, (h, primitive) in integrals.items():
        largest = 0.0
        for _ in range(300):
            a = rng.exponential(size=rng.integers(2, 30)) * 10 ** rng.uniform(-2, 1)
            sums = np.cumsum(a)
            largest = max(largest, float(np.sum(a[1:] * h(sums[1:])) / (primitive(sums[-1]) - primitive(a[0]))))
        yield Part(f"h = {name}: largest ratio", largest, "<=", 1.0, slack=1e-9, main=True)


@claim(
    "theorem-6",
    kind="theorem",
    sentence="E[f(x_{T+1}) − f*] ≤ (1 − μ/M)^T [f(x_1) − f*].",
    where="Theorem 6 (the linear rate under the Polyak-Łojasiewicz condition)",
    check="the largest ratio of the left side to the right one over all T up to a horizon, without noise",
    reason="the theorem's own right-hand side; there is no randomness, and 1e-9 is for rounding",
)
def theorem_6(read: Reader) -> Iterable[Part]:
    """The linear rate."""
    horizon = 2000
    for problem in (sine_bowl(3.0), sine_bowl(40.0), least_squares()):
        assert problem.pl_constant is not None
        trace = simulate(problem, repeats=1, horizon=horizon, alpha=ALPHA)
        bounds = [
            theory.theorem_6(smoothness=problem.smoothness, pl_constant=problem.pl_constant, gap=problem.gap, horizon=t)
            for t in range(1, horizon + 1)
        ]
        yield Part(
            f"{problem.name}: largest ratio of f(x_{{T+1}}) − f* to its bound, T ≤ {horizon}",
            float((trace.objective[1:, 0] / bounds).max()),
            "<=",
            1.0,
            slack=1e-9,
            main=True,
        )


@claim(
    "theorem-7",
    kind="theorem",
    sentence="E[Σ_t Σ_i (η_i − Mη_i²/2) ∇f(x_t)_i²] ≤ f(x_1) − f* + E[Regret_T(η)] + (M/2) Σ_i Σ_t η_i² E[σ_{t,i}²].",
    where="Theorem 7 (Theorem 2 with a step size for each coordinate)",
    check="both sides with the measured regret, at the same η in all coordinates, at one that grows with the coordinate"
    " and at the best of each in hindsight; the spread is the standard error of their difference",
    reason=REASON,
    note="The paper says for any η_i > 0; the regret bound that the theorem is used with needs η_i ≤ 2/M.",
)
def theorem_7(read: Reader) -> Iterable[Part]:
    """The regrets of the coordinates bound the gradients."""
    for problem, trace in _coordinate_runs():
        m, d = problem.smoothness, trace.u.shape[-1]
        u_sum, n_sum = trace.u.sum(axis=(0, 1)), trace.n.sum(axis=(0, 1))
        # A coordinate whose gradient is always 0 has no best step: any will do.
        best = np.clip(np.divide(u_sum, n_sum, out=np.ones(d), where=n_sum > 0), 1e-3, 2)
        steps = {"η = 1/M": np.ones(d), "η from 0.1/M to 2/M": np.linspace(0.1, 2, d), "the best η_i": best}
        for name, multipliers in steps.items():
            eta = multipliers / m
            regret = theory.regret(trace.step_sizes, trace.u, trace.n, m, against=eta).sum(axis=-1)
            left = trace.squared_gradient_sum @ (eta - m / 2 * eta**2)
            bound = theory.theorem_7(
                eta.tolist(),
                smoothness=m,
                gap=problem.gap,
                expected_regret=float(regret.mean()),
                variance_sums=trace.variance_sum.mean(axis=0).tolist(),
            )
            error = _error(left - regret - m / 2 * trace.variance_sum @ eta**2)
            yield Part(
                f"{problem.name}: left side at {name}",
                float(left.mean()),
                "<=",
                bound,
                spread=error,
                slack=STANDARD_ERRORS * error,
                main=True,
            )


@claim(
    "theorem-8",
    kind="theorem",
    sentence="E[Σ_t ∇f(x_t)_i²] ≤ … for each i, and E[Σ_t ‖∇f(x_t)‖²] ≤"
    " 2M(f(x_1) − f* + Σ_i (5L_i²/M) ln(1 + L_i²T/α))"
    " + √(2M Σ_t E[σ_t²] (f(x_1) − f* + dα/(2M))) + √(10 Σ_t E[σ_t²] Σ_i L_i² ln(1 + L_i²T/α)).",
    where="Theorem 8 (per-coordinate step sizes)",
    check="both statements: the sum of squared gradients, and that of the coordinate nearest to its own bound",
    reason=REASON,
    note="With σ_t² = Σ_i σ_{t,i}², for which the paper's “σ_t = Σ_{t=1}^T σ_{t,i}²” is a slip.",
)
def theorem_8(read: Reader) -> Iterable[Part]:
    """The rate with a step size for each coordinate."""
    for problem, trace in _coordinate_runs():
        horizon, each = len(trace.u), trace.squared_gradient_sum
        bounds = theory.theorem_8(
            smoothness=problem.smoothness,
            gap=problem.gap,
            lipschitz=problem.lipschitz,
            alpha=ALPHA,
            variance_sums=trace.variance_sum.mean(axis=0).tolist(),
            horizon=horizon,
        )
        tightest = int((each.mean(axis=0) / bounds.each).argmax())
        yield _against(f"{problem.name}: Σ_t ‖∇f(x_t)‖², T = {horizon}", each.sum(axis=1), bounds.total)
        nearest = f"{problem.name}: Σ_t ∇f(x_t)_i² in the coordinate nearest to its bound"
        yield _against(nearest, each[:, tightest], bounds.each[tightest])
