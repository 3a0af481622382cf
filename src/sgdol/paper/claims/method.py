"""Sections 1, 5, 6 and 8: what the paper says of the method outside its theorems and experiments.

The experiments' results do not hold what most of these sentences are about, so they are measured on the problems of
:mod:`sgdol.paper.theorems`, which need no results.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

from sgdol import reference, theory
from sgdol.paper.claims import behaviour
from sgdol.paper.claims._check import COMPARABLE, COMPARABLE_REASON, EXACT_REASON, STALL, STALL_REASON, claim
from sgdol.paper.claims.behaviour import SGDOL
from sgdol.paper.experiments import ADULT, ROSENBROCK
from sgdol.paper.measures import Curve, Reader, part
from sgdol.paper.theorems import Problem, Trace, adult, cosines, simulate
from sgdol.paper.verdict import Part

ALPHAS = (1e-4, 1e-2, 1.0)
"""alpha in units of M: comparable to M, and smaller."""

ADAPTIVE = ("AdaGrad Global", "AdaGrad Coordinate", "Adam", "RMSProp", "AdaDelta", "AMSGrad")
"""The competitors that are called adaptive."""


@claim(
    "closed-form",
    kind="set-up",
    sentence="In particular, the FTRL update has a closed form: η_t = max{0, min{(α + Σ_{j<t} ⟨g_j, g'_j⟩) / (M (α +"
    " Σ_{j<t} ‖g_j‖²)), 2/M}}. Note that this update can be efficiently computed by keeping track of the quantities"
    " Σ ⟨g_j, g'_j⟩ and Σ ‖g_j‖².",
    where="Section 5",
    check="the largest distance of the closed form from a numerical argmin of the regularizer and the losses, in units"
    " of 1/M, over 200 random histories of losses",
    reason="the same number in exact arithmetic; the numerical argmin ends within 1e-6",
)
def closed_form(read: Reader) -> Iterable[Part]:
    """The step size is the minimiser that it is said to be."""
    rng = np.random.default_rng(0)
    largest = 0.0
    for _ in range(200):
        length, smoothness, alpha = int(rng.integers(1, 8)), 10 ** rng.uniform(-2, 2), 10 ** rng.uniform(-1, 1)
        n = rng.exponential(size=length)
        u = n * rng.uniform(-3, 3, size=length)
        closed = reference.step_size(u.tolist(), n.tolist(), smoothness=smoothness, alpha=alpha)
        argmin = reference.minimise_with_ftrl(u.tolist(), n.tolist(), smoothness=smoothness, alpha=alpha)
        largest = max(largest, abs(closed - argmin) * smoothness)
    yield Part("largest distance from the argmin, in units of 1/M", largest, "<=", 1e-6)


@claim(
    "factor-two",
    kind="set-up",
    sentence="While the computational complexity of calculating η_t by FTRL is negligible, SGDOL requires two unbiased"
    " gradients per step. This increases the computational complexity with respect to a plain SGD procedure by a factor"
    " of two. […] The overall price to pay is a factor of 2 in the computation of the gradients.",
    where="Section 5; Section 8",
    check="how many gradients Algorithm 1 asks its oracle for, per iteration; SGD asks for one",
    reason=EXACT_REASON,
    note="The library's default splits one batch into two halves: two gradients of half the size, at the cost of one.",
)
def factor_two(read: Reader) -> Iterable[Part]:
    """SGDOL's gradients are counted."""
    calls = 0

    def oracle(x: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        return x

    reference.algorithm_1(oracle, [1.0, 2.0], 50, smoothness=2.0, alpha=1.0)
    yield Part("|gradients per iteration − 2|", abs(calls / 50 - 2), "<=", 1e-9)


@functools.cache
def _alpha_runs() -> list[tuple[Problem, list[Trace]]]:
    runs = []
    for problem, repeats, horizon in (
        (cosines((1.0,), (0.2,), (2.0,)), 100, 1000),
        (cosines((1.0,), (2.0,), (2.0,)), 100, 1000),
        (adult(400, 1), 12, 300),
    ):
        some = [
            simulate(problem, repeats=repeats, horizon=horizon, alpha=ratio * problem.smoothness) for ratio in ALPHAS
        ]
        runs.append((problem, some))
    return runs


@claim(
    "alpha-influence",
    kind="finding",
    sentence="Although Theorem 4 shows that a too small α would blow up the log factor, it also indicates setting α to"
    " be comparable with M(f(x_1) − f(x*)) or smaller would suffice for not inducing a major influence on the"
    " convergence rate. In fact, preliminary experiments have shown that α has no notable influence on performance so"
    " long as it is comparable to M or smaller.",
    where="Section 5",
    check="the mean squared gradient with α = M, M/100 and M/10,000, the largest over the smallest; and Theorem 4's"
    " bound at α = M (f(x_1) − f*), over its least value for any α",
    reason=COMPARABLE_REASON,
    note="The paper's preliminary experiments are not described; these are the problems on which the theorems are"
    " checked.",
)
def alpha_influence(read: Reader) -> Iterable[Part]:
    """Performance hardly depends on alpha, from far below M up to M."""
    for problem, traces in _alpha_runs():
        means = [float(trace.squared_gradient_sum.sum(axis=1).mean()) for trace in traces]
        yield Part(
            f"{problem.name}: E‖∇f(x_k)‖² for α from M/10,000 to M, the largest over the smallest",
            max(means) / min(means),
            "<=",
            COMPARABLE,
            main=True,
        )
    for problem, traces in _alpha_runs():
        variance, horizon = float(traces[0].variance_sum.sum(axis=1).mean()), len(traces[0].u)

        def bound(
            alpha: float, problem: Problem = problem, variance: float = variance, horizon: int = horizon
        ) -> float:
            return theory.theorem_4(
                smoothness=problem.smoothness,
                gap=problem.gap,
                lipschitz=problem.lipschitz_norm,
                alpha=alpha,
                variance_sum=variance,
                horizon=horizon,
            )

        scale = problem.smoothness * problem.gap
        least = min(bound(scale * 10.0**power) for power in np.linspace(-6, 6, 121))
        what = f"{problem.name}: Theorem 4's bound at α = M (f(x_1) − f*), over its least"
        yield Part(what, bound(scale) / least, "<=", COMPARABLE)


@functools.cache
def _unequal_noise() -> tuple[Problem, Trace]:
    problem = cosines((1.0, 1.0, 1.0), (0.0, 0.5, 2.0), (2.0, 2.0, 2.0))
    return problem, simulate(problem, repeats=300, horizon=500, alpha=10.0, per_coordinate=True)


@claim(
    "less-noise-faster",
    kind="finding",
    sentence="In words, the coordinates which have smaller variances σ²_{t,i} achieve smaller gradient values faster"
    " than coordinates with larger variances. […] We also presented a per-coordinate version of SGDOL that achieves"
    " faster convergence on the coordinates with less noise.",
    where="Section 6; Section 8",
    check="per-coordinate SGDOL on three coordinates that differ in their noise alone: the sum over time of a"
    " coordinate's squared gradient, over that of the next noisier coordinate",
    reason="faster means smaller; any difference counts",
)
def less_noise_faster(read: Reader) -> Iterable[Part]:
    """Less noise, smaller gradients."""
    _, trace = _unequal_noise()
    sums = trace.squared_gradient_sum.mean(axis=0)
    for less, more, i in (("0", "0.5", 0), ("0.5", "2", 1)):
        ratio = float(sums[i] / sums[i + 1])
        yield Part(f"Σ_t ∇f(x_t)_i² at noise {less} over that at noise {more}", ratio, "<=", 1.0, main=True)


@claim(
    "no-fiddling",
    kind="finding",
    sentence="showing that, differently from other adaptive methods, our method does not require fiddling with"
    " stepsizes to guarantee convergence in the stochastic setting.",
    where="Section 1, last paragraph",
    check="with the parameters of the noiseless problem: SGDOL's decade ratio under noise and the change of its M and"
    " α between the noises; and how many of the other adaptive methods converge without a new rate",
    reason=f"{STALL_REASON}; unchanged means unchanged; “differently from other adaptive methods” asks that none of"
    " them does",
    note="AdaGrad converges with the rate of the noiseless problem as well, which section 7 says itself.",
    figures=(1, 2),
)
def no_fiddling(read: Reader) -> Iterable[Part]:
    """SGDOL converges with what was tuned without noise; others are not to."""

    def change(*curves: Curve) -> float:
        first = curves[0].attrs
        return max(
            abs(float(curve.attrs[name]) / float(first[name]) - 1)
            for curve in curves
            for name in ("smoothness", "alpha")
        )

    def converging(*curves: Curve) -> float:
        return float(sum(curve.decade_ratio().value <= STALL for curve in curves))

    for experiment in (ADULT, ROSENBROCK):
        yield from behaviour.converges(read, experiment, SGDOL)
        curves = [read.curve(experiment.name, noise, SGDOL) for noise in experiment.noises]
        yield part(f"{experiment.name}: relative change of M and α between noises", curves, change, "<=", 1e-9)
    others = [read.curve(ADULT.name, ADULT.largest_noise, method) for method in ADAPTIVE]
    what = f"{ADULT.largest_noise}: other adaptive methods that converge, of {len(ADAPTIVE)}"
    yield part(what, others, converging, "<=", 0.0)
