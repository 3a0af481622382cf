"""The appendix: Rosenbrock's function, and the other methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sgdol.paper.claims import behaviour, setting
from sgdol.paper.claims._check import COMPARABLE_REASON, EXACT_REASON, STALL_REASON, Measured, claim
from sgdol.paper.claims.behaviour import SGDOL
from sgdol.paper.experiments import ADULT, ROSENBROCK
from sgdol.paper.measures import Curve, Reader, part
from sgdol.paper.verdict import Part, Relation

WHERE = "Appendix, 2D Rosenbrock Function"


def _hessian(x: float, y: float) -> NDArray[np.float64]:
    return np.array([[2 - 400 * y + 1200 * x**2, -400 * x], [-400 * x, 200.0]])


@claim(
    "rosenbrock-shape",
    kind="set-up",
    sentence="It is non-convex and has one global minimum at x=y=1.",
    where=WHERE,
    check="the Hessian's smallest eigenvalue at (0, 1), the value at (1, 1), the number of stationary points, and the"
    " smallest value elsewhere on a grid",
    reason="what the words mean",
)
def rosenbrock_shape(read: Reader) -> Iterable[Part]:
    """The function's shape."""
    # 200 (y - x^2) = 0 leaves -2 (1 - x) = 0: the stationary points are the real roots of that polynomial.
    roots = np.roots([2.0, -2.0])
    x, y = np.meshgrid(np.linspace(-2, 2, 401), np.linspace(-2, 4, 601))
    f = (1 - x) ** 2 + 100 * (y - x**2) ** 2
    away = np.hypot(x - 1, y - 1) > 1e-9
    return (
        Part("curvature at (0, 1) (negative: not convex)", float(np.linalg.eigvalsh(_hessian(0, 1))[0]), "<=", 0.0),
        Part("f(1, 1)", float(f[~away][0]), "<=", 1e-12),
        Part("stationary points", float(len(roots)), "<=", 1.0),
        Part("smallest f elsewhere on the grid", float(f[away].min()), ">=", 1e-12),
    )


@claim(
    "rosenbrock-setting",
    kind="set-up",
    sentence="To add stochasticity, we apply additive white Gaussian noise to each gradient. To have a robust estimate"
    " of the performance, we repeat each experiment independently with the same parameters for 40 times and take the"
    " average. […] 3 levels of added noise: zero noise, small noise (σ=0.2), and large noise (σ=5). […] We set"
    " x1=y1=0.",
    where=WHERE,
    check="f(x_1) against f(0, 0) = 1, the number of repeats, and whether they differ",
    reason=EXACT_REASON,
)
def rosenbrock_setting(read: Reader) -> Iterable[Part]:
    """Where the runs start, how many there are, and that they differ under noise alone."""
    curves = {noise: [read.curve(ROSENBROCK.name, noise, SGDOL)] for noise in ROSENBROCK.noises}

    def distance(curve: Curve) -> float:
        return float(np.abs(curve.values("objective")[:, 0] - 1).max())

    for noise, curve in curves.items():
        yield part(f"{noise}: largest distance of f(x_1) from 1", curve, distance, "<=", 1e-9)
    for noise in ROSENBROCK.noisy:
        yield part(f"{noise}: repeats", curves[noise], setting.repeats, ">=", 40.0)
    for noise, curve in curves.items():
        relation: Relation = "<=" if noise == ROSENBROCK.noiseless else ">="
        yield part(f"{noise}: spread of the result over repeats", curve, setting.spread, relation, 1e-12)


@claim(
    "competitors",
    kind="set-up",
    sentence="The competitors are: SGD, AdaGrad Global (with one learning rate for all dimensions), AdaGrad Coordinate"
    " (with one learning rate for each dimension), Adam, RMSProp, AdaDelta, AMSGrad, and Hypergradient. Also, we test"
    " the performance of the stepsize proposed by Ghadimi and Lan, denoted by SGD GL. […] here we show the results for"
    " comparison between SGDOL Global and other optimization algorithms listed in the above subsection but applied to"
    " the classification task",
    where="Appendix",
    check="whether each method was run at each level of noise",
    reason="none may be missing",
    figures=(2, 3, 4),
)
def competitors(read: Reader) -> Iterable[Part]:
    """Who was run."""
    for experiment in (ROSENBROCK, ADULT):
        methods = {method for figure in experiment.figures for method in figure.methods}
        runs = [read.curve(experiment.name, noise, method) for noise in experiment.noises for method in methods]
        missing = float(sum(run is None for run in runs))
        # A reader who asked for one figure was not promised the methods of the others.
        asked = all(figure.number in read.configuration.figures for figure in experiment.figures)
        yield Part(f"{experiment.name}: runs missing of {len(runs)}", missing if asked else None, "<=", 0.0)


@claim(
    "sgd-gl",
    kind="set-up",
    sentence="Also, we test the performance of the stepsize proposed by Ghadimi and Lan, denoted by SGD GL, given that"
    " in this synthetic experiment we know all the relevant quantities.",
    where=WHERE,
    check="the largest relative distance of the step size that SGD GL used from min(1/M, √(2 (f_1 − f*)/M) / (σ √T)),"
    " with f_1 − f* = 1 and σ² the total variance",
    reason=EXACT_REASON,
    note="Section 4's formula in the text has lost its 1/√M; this is the one of Ghadimi and Lan (2013).",
    figures=(2,),
)
def ghadimi_lan(read: Reader) -> Iterable[Part]:
    """SGD GL's step size."""
    per_coordinate = getattr(read.configuration, "noise_model", "coordinate") != "total"

    def distance(noise: str) -> Callable[[Curve], float]:
        def measure(curve: Curve) -> float:
            total = float(noise.removeprefix("sigma=")) * (math.sqrt(2) if per_coordinate else 1)
            m, horizon = float(curve.attrs["smoothness"]), float(curve.attrs["horizon"])
            step = 1 / m if total == 0 else min(1 / m, math.sqrt(2 / m) / (total * math.sqrt(horizon)))
            return float(np.abs(curve.values("step_size") / step - 1).max())

        return measure

    for noise in ROSENBROCK.noises:
        yield part(noise, [read.curve(ROSENBROCK.name, noise, "SGD GL")], distance(noise), "<=", 1e-9)


@claim(
    "rosenbrock-tuning",
    kind="set-up",
    sentence="We select the stepsize of all optimization algorithms except for SGDOL Global and SGD GL to be the one"
    " giving best convergence rate when running on the objective function with zero noise added.",
    where=WHERE,
    check=setting.TUNING_CHECK,
    reason=setting.TUNING_REASON,
    figures=(2, 3),
)
def rosenbrock_tuning(read: Reader) -> Iterable[Part]:
    """The rates on Rosenbrock's function."""
    return setting.tuning_parts(read, ROSENBROCK)


def _fine_best_rate(horizon: int) -> float:
    """SGD's best rate on noiseless Rosenbrock over a grid of 1 % steps, by the same criterion as the tuning."""
    rates = np.geomspace(5e-4, 4e-3, 210)
    x, y, total = np.zeros_like(rates), np.zeros_like(rates), np.zeros_like(rates)
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(horizon):
            residual = 200 * (y - x * x)
            gx, gy = -2 * (1 - x) - 2 * x * residual, residual
            total += gx * gx + gy * gy
            x, y = x - rates * gx, y - rates * gy
    return float(rates[np.where(np.isfinite(total), total, np.inf).argmin()])


@claim(
    "smoothness-1002",
    kind="finding",
    sentence="We choose M of SGDOL to be the reciprocal of SGD's best learning rate which happens to be very close to"
    " the smoothness at the optimal point, 1002.",
    where=WHERE,
    check="the largest eigenvalue of the Hessian at the optimum, and the distance of M from 1002: with the grid of the"
    " run, and with a finer one",
    reason="very close is read as within 10 %",
    note="On a 1-2-5 grid the candidates near 1/1002 are 0.001 (M = 1000) and 0.002 (M = 500); a fine grid tunes SGD to"
    " the edge of stability, near 2/1002.",
    figures=(2,),
)
def smoothness_1002(read: Reader) -> Iterable[Part]:
    """SGD's best rate and the curvature at the optimum; the run's own grid decides, which is the paper's procedure."""
    largest = float(np.linalg.eigvalsh(_hessian(1, 1))[-1])
    curve = read.curve(ROSENBROCK.name, ROSENBROCK.noiseless, SGDOL)
    yield Part("|largest curvature at (1, 1) − 1002|", abs(largest - 1002), "<=", 1.0)
    yield part(
        "|M − 1002| / 1002",
        [curve],
        lambda c: abs(float(c.attrs["smoothness"]) / 1002 - 1),
        "<=",
        0.1,
        main=True,
    )
    what = "|M − 1002| / 1002 with a grid of 1 % steps"
    if curve is None:
        yield Part(what, None, "<=", 0.1)
    else:
        horizon = min(int(curve.attrs["horizon"]), 100_000)
        distance = abs(1 / _fine_best_rate(horizon) / 1002 - 1)
        yield Part(f"{what} (T = {horizon})", distance, "<=", 0.1)


@claim(
    "known-minimum",
    kind="set-up",
    sentence="the curve of the optimality gap f(x_t) − f* at each round t since we know f*=0",
    where=WHERE,
    check="the smallest recorded value of the objective",
    reason="the sentence's own number",
    figures=(2, 3),
)
def known_minimum(read: Reader) -> Iterable[Part]:
    """Nobody goes below the minimum."""
    for noise in ROSENBROCK.noises:
        runs = [read.curve(ROSENBROCK.name, noise, method) for method in read.methods(ROSENBROCK.name, noise)]
        lowest = min((float(run.values("objective").min()) for run in runs if run), default=None)
        yield Part(f"{noise}: smallest f(x_t) of any method", lowest, ">=", 0.0)


@claim(
    "rosenbrock-similar",
    kind="finding",
    sentence="The behavior of both the curve of E[‖∇f(x_k)‖²] vs. number of iterations and the curve of stepsizes are"
    " similar to Figure 1.",
    where=WHERE,
    check="every check of section 7's fifth paragraph, on Rosenbrock's function",
    reason="the thresholds of those checks",
    figures=(1, 2),
)
def rosenbrock_similar(read: Reader) -> Iterable[Part]:
    """What was found on adult, on Rosenbrock's function."""
    e = ROSENBROCK
    # The first step sizes are not main: they differ from SGD's in Figure 1 as well, and so do not make it another one.
    first = (replace(p, main=False) for p in behaviour.same_step_at_first(read, e))
    groups: dict[str, Iterable[Part]] = {
        "same step at first": first,
        "gradual decrease": behaviour.gradual_decrease(read, e),
        "sooner under noise": behaviour.sooner(read, e),
        "decrease pays": behaviour.better_than_fixed(read, e),
        "recovers SGD": behaviour.recovers_sgd(read, e),
        "converges": behaviour.converges(read, e, SGDOL),
        "AdaGrad converges": behaviour.converges(read, e, "AdaGrad Global"),
        "AdaGrad comparable": behaviour.comparable(read, e, "AdaGrad Global"),
        "SGD and Adam oscillate": behaviour.stalls(read, e, ("SGD", "Adam")),
        "level depends on noise": behaviour.level_depends(read, e),
    }
    for name, parts in groups.items():
        for each in parts:
            yield replace(each, what=f"{name} – {each.what}")


@claim(
    "gap-similar",
    kind="finding",
    sentence="And the behavior of the curve of optimality gap is similar to that of the curve of E[‖∇f(x_k)‖²] vs."
    " number of iterations.",
    where=WHERE,
    check="the correlation over time between the logarithms of the two curves, median over the methods",
    reason="0.9 is a relation that can be seen",
    figures=(2, 3),
)
def gap_similar(read: Reader) -> Iterable[Part]:
    """The gap goes with the gradient."""

    def correlation(*curves: Curve) -> float:
        values = []
        for curve in curves:
            gap, gradient = (curve.values(name).mean(axis=0) for name in ("objective", "mean_squared_gradient"))
            usable = (gap > 0) & (gradient > 0) & np.isfinite(gap) & np.isfinite(gradient)
            if usable.sum() > 2:
                values.append(float(np.corrcoef(np.log(gap[usable]), np.log(gradient[usable]))[0, 1]))
        return float(np.median(values))

    for noise in ROSENBROCK.noises:
        curves = [read.curve(ROSENBROCK.name, noise, method) for method in read.methods(ROSENBROCK.name, noise)]
        main = noise == ROSENBROCK.largest_noise
        yield part(f"{noise}: median correlation", curves or [None], correlation, ">=", 0.9, main=main)


@claim(
    "others-similar",
    kind="finding",
    sentence="The comparison shown in Figure 4 is similar to what is reported in Figure 1.",
    where="Appendix, Other Results for Fitting a Non-Linear Classification Model",
    check="as in section 7: AdaGrad Coordinate, whose steps shrink, converges and is comparable to SGDOL; RMSProp,"
    " AdaDelta, AMSGrad and Hypergradient, whose steps do not, stop converging under noise; and for how many of the"
    " five that is so under the largest noise",
    reason=f"{STALL_REASON}; {COMPARABLE_REASON}; a run that diverged has not converged; the comparison is similar if"
    " most of the methods are",
    figures=(1, 4),
)
def others_similar(read: Reader) -> Measured:
    """The other methods on adult."""
    e, shrinking = ADULT, "AdaGrad Coordinate"
    others = [method for method in e.figures[1].methods if method != SGDOL]
    each = {
        method: (
            [*behaviour.converges(read, e, method), *behaviour.comparable(read, e, method)]
            if method == shrinking
            else list(behaviour.stalls(read, e, [method]))
        )
        for method in others
    }
    # A method behaves as said if all of its parts at the largest noise hold; those are what is main elsewhere.
    decisive = [[part.holds for part in some if part.main] for some in each.values()]
    measured = all(outcome is not None for some in decisive for outcome in some)
    behave = float(sum(all(some) for some in decisive)) if measured else None
    what = f"{e.largest_noise}: methods that behave as in Figure 1, of {len(others)}"
    parts = (
        Part(what, behave, ">=", math.floor(len(others) / 2) + 1.0, main=True),
        *(replace(part, main=False) for some in each.values() for part in some),
    )
    fled = [
        f"{method} under {noise} ends at f = {curve.fled:.2f}, above f(x_1) = 0.5"
        for method in others
        for noise in e.noises
        if (curve := read.curve(e.name, noise, method)) and curve.fled is not None
    ]
    note = f"{'; '.join(fled)}: small gradients there are those of the flat region, not of a minimum." if fled else ""
    return Measured(parts, note)
