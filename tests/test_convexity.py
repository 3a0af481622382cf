"""Every constant of sgdol.convexity on problems that satisfy its assumptions.

Expectations are means over repeats; an inequality counts as violated if it fails by more than five standard errors, as
in the checks of the paper's theorems. Bounds that are exact for one step are checked without Monte Carlo.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from sgdol import convexity, theory
from sgdol.learners import FTRL, Floored
from sgdol.surrogate import symmetric_signal

K = 2


@dataclass(frozen=True)
class Logistic:
    """Regularised or plain logistic regression on a few rows, minibatches of one: every constant is known."""

    ridge: float = 0.0

    def __post_init__(self):
        rng = np.random.default_rng(0)
        a = rng.normal(size=(30, 3)) * [1.0, 0.5, 0.2]
        y = np.where(a @ [1.0, -1.0, 1.0] + rng.normal(size=30) > 0, 1.0, -1.0)
        x = np.zeros(3)
        object.__setattr__(self, "rows", a * y[:, None])
        for _ in range(50):  # Newton
            p = self.slopes(x[None])[0]
            hessian = (self.rows.T * (-p * (1 + p))) @ self.rows / 30 + self.ridge * np.eye(3)
            x = x - np.linalg.solve(hessian, self.gradient(x[None])[0])
        object.__setattr__(self, "minimiser", x)

    def slopes(self, x):
        return -1 / (1 + np.exp(x @ self.rows.T))

    def gradient(self, x):
        return self.slopes(x) @ self.rows / 30 + self.ridge * x

    def gap(self, x):
        def value(z):
            return np.log1p(np.exp(-z @ self.rows.T)).mean(-1) + self.ridge / 2 * (z**2).sum(-1)

        return value(x) - value(self.minimiser)

    def samples(self, x, rng):
        drawn = rng.integers(30, size=(K, len(x)))
        slopes = np.take_along_axis(self.slopes(x)[None], drawn[..., None], axis=2)
        return slopes * self.rows[drawn] + self.ridge * x

    def variance(self, x):
        each = (self.slopes(x) ** 2) @ (self.rows**2).sum(1) / 30
        return each - ((self.slopes(x) @ self.rows / 30) ** 2).sum(-1)

    @property
    def smoothness(self):
        return float(np.linalg.eigvalsh(self.rows.T @ self.rows / 30)[-1] / 4 + self.ridge)

    @property
    def lipschitz(self):
        return float(np.linalg.norm(self.rows, axis=1).max())  # of the plain one


class Run:
    """Repeats of SGDOL side by side: means over them, with standard errors."""

    def __init__(self, problem, learner, *, given, alpha=1.0, horizon=400, repeats=300, x1=None, seed=0):
        rng = np.random.default_rng(seed)
        x = np.tile(np.zeros(len(problem.minimiser)) if x1 is None else x1, (repeats, 1))
        self.start = x[0]
        state = learner.initial(np.zeros(repeats))
        alphas = np.full(repeats, alpha)
        kept = {name: [] for name in ("losses", "gaps", "steps", "squares", "variances")}
        for _ in range(horizon):
            g = problem.samples(x, rng)
            d = g.mean(0)
            n = (d**2).sum(-1)
            u = symmetric_signal(n, (g**2).sum((0, 2)) / K**2, K)
            s = learner.predict(state, alphas)
            state = learner.observe(state, s, u, n, alphas)
            eta = s / given
            kept["losses"].append(given * eta**2 / 2 * n - eta * u)
            kept["gaps"].append(problem.gap(x))
            kept["steps"].append(eta)
            kept["squares"].append((problem.gradient(x) ** 2).sum(-1))
            kept["variances"].append(problem.variance(x))
            x = x - eta[:, None] * d
        for name, values in kept.items():
            setattr(self, name, np.array(values))
        self.distance = float(np.linalg.norm(self.start - problem.minimiser))
        self.last_distances = ((x - problem.minimiser) ** 2).sum(-1)
        self.last_gaps = problem.gap(x)


def holds(values, bound):
    """The mean over the repeats is at most the bound, give or take five standard errors."""
    return values.mean() <= bound + 5 * values.std() / math.sqrt(len(values))


@pytest.fixture(scope="module")
def plain():
    problem = Logistic()
    return problem, Run(problem, FTRL(), given=problem.smoothness)


@pytest.fixture(scope="module")
def floored():
    problem = Logistic()
    return problem, Run(problem, Floored(floor=1.0), given=2 * problem.smoothness)


def constants(problem, run, given):
    return {"k": K, "smoothness": given, "lipschitz": problem.lipschitz, "alpha": 1.0, "horizon": len(run.losses)}


def test_the_sum_of_the_surrogates_is_below_its_bound(plain, floored):
    for (problem, run), factor, floor in ((plain, 1, 0.0), (floored, 2, 1.0)):
        bound = convexity.surrogate_sum_bound(**constants(problem, run, factor * problem.smoothness), floor=floor)
        assert holds(run.losses.sum(0), bound)


def test_the_distance_stays_below_its_bound(plain, floored):
    for (problem, run), factor, floor in ((plain, 1, 0.0), (floored, 2, 1.0)):
        given = factor * problem.smoothness
        total = convexity.surrogate_sum_bound(**constants(problem, run, given), floor=floor)
        bound = convexity.distance_bound(run.distance, smoothness=given, surrogate_sum=total)
        assert holds(run.last_distances, bound)
        # and with the measured sum instead of its bound, which is sharper
        slack = run.last_distances - run.distance**2 - 2 / given * run.losses.sum(0)
        assert holds(slack, 0.0)


def test_the_mean_gap_of_ftrl_is_below_the_rate_through_gradient_norms(plain):
    problem, run = plain
    bound = convexity.convex_rate(
        **constants(problem, run, problem.smoothness),
        gap=float(problem.gap(run.start[None])[0]),
        distance=run.distance,
        variance_sum=float(run.variances.mean(1).sum()),
    )
    assert holds(run.gaps.mean(0), bound)


@pytest.mark.parametrize("factor", [1.25, 2.0, 5.0])
def test_the_gaps_weighted_by_the_step_sizes_are_below_their_bound(factor):
    problem = Logistic()
    given = factor * problem.smoothness
    run = Run(problem, FTRL(), given=given, horizon=200, repeats=200)
    total = convexity.surrogate_sum_bound(**constants(problem, run, given))
    bound = convexity.weighted_bound(run.distance, smoothness=problem.smoothness, given=given, surrogate_sum=total)
    weighted = (run.steps * run.gaps).sum(0)
    assert holds(weighted, bound)
    share = min(2, 4 * (1 - 1 / factor))
    assert holds(share * weighted - run.distance**2 - 2 / given * run.losses.sum(0), 0.0)


def test_the_mean_gap_with_a_floor_is_below_its_rate(floored):
    problem, run = floored
    bound = convexity.floored_rate(
        **{**constants(problem, run, problem.smoothness), "given": 2 * problem.smoothness}, distance=run.distance
    )
    assert holds(run.gaps.mean(0), bound)
    assert np.all(run.steps[-1] >= 1 / (2 * problem.smoothness * math.sqrt(len(run.steps))) * (1 - 1e-12))


def test_the_mean_gap_of_a_strongly_convex_objective_is_below_its_gradients_over_twice_mu():
    problem = Logistic(ridge=0.1)
    run = Run(problem, FTRL(), given=problem.smoothness, horizon=200, repeats=100)
    for square, gap in zip(run.squares, run.gaps, strict=True):
        assert np.all(gap <= convexity.pl_rate(pl_constant=0.1, mean_squared_gradient=1.0) * square + 1e-12)


class Huber:
    """Huber's function of one coordinate, with slope G outside; noise +-sqrt(variance), or in proportion to it."""

    minimiser = np.zeros(1)

    def __init__(self, slope, *, smoothness=1.0, variance=0.0, growth=0.0):
        self.slope, self.smoothness, self.noise, self.growth = slope, smoothness, variance, growth
        self.lipschitz = slope * (1 + math.sqrt(growth)) + math.sqrt(variance)

    def gradient(self, x):
        return np.clip(self.smoothness * x, -self.slope, self.slope)

    def gap(self, x):
        far = np.abs(x) > self.slope / self.smoothness
        outside = self.slope * np.abs(x) - self.slope**2 / (2 * self.smoothness)
        return np.where(far, outside, self.smoothness * x**2 / 2).sum(-1)

    def samples(self, x, rng):
        signs = rng.choice([-1.0, 1.0], size=(K, *x.shape))
        return self.gradient(x) * (1 + math.sqrt(self.growth) * signs) + math.sqrt(self.noise) * signs

    def variance(self, x):
        return (self.growth * self.gradient(x) ** 2).sum(-1) + self.noise


@pytest.fixture(scope="module")
def vanishing():
    """A run under noise in proportion to the gradient, and its constants."""
    problem = Huber(1.0, growth=4.0)
    run = Run(problem, FTRL(), given=1.0, x1=[5.0], horizon=300)
    gap = float(problem.gap(run.start[None])[0])
    return run, {"k": K, "smoothness": 1.0, "lipschitz": problem.lipschitz, "alpha": 1.0, "growth": 4.0, "gap": gap}


def test_noise_that_vanishes_with_the_gradient_gives_the_fast_rate(vanishing):
    run, numbers = vanishing
    bound = convexity.multiplicative_rate(**numbers, horizon=300)
    assert holds(run.squares.mean(0), bound)
    longer = convexity.multiplicative_rate(**numbers, horizon=3000)
    assert longer == pytest.approx(0.1 * bound, rel=0.3)  # 1/T, or ln T/T where that is smaller


def test_the_mean_gap_under_vanishing_noise_is_below_its_rate(vanishing):
    run, numbers = vanishing
    assert holds(run.squares.sum(0), convexity.multiplicative_sum(**numbers))
    assert holds(run.gaps.mean(0), convexity.multiplicative_convex_rate(**numbers, distance=5.0, horizon=300))


@pytest.mark.parametrize("horizon", [1, 10, 100])
def test_without_noise_it_is_gradient_descent_with_its_rate(horizon):
    problem = Huber(1.0)
    run = Run(problem, FTRL(), given=1.0, x1=[4.0], horizon=horizon, repeats=1)
    assert run.steps == pytest.approx(1.0)
    bound = convexity.noiseless_rate(smoothness=1.0, distance=run.distance, horizon=horizon)
    assert run.last_gaps[0] <= bound * (1 + 1e-12)


class Constant:
    """A learner that does not learn: SGD."""

    def __init__(self, multiplier):
        self.multiplier = multiplier

    def initial(self, zero):
        return zero

    def predict(self, state, alpha):
        return state + self.multiplier

    def observe(self, state, multiplier, u, n, alpha):
        return state


@pytest.mark.parametrize("horizon", [30, 300])
def test_sgd_with_a_fixed_step_is_below_the_bound_by_decrease(horizon):
    problem = Huber(1.0, variance=4.0)
    numbers = {"smoothness": 1.0, "distance": 3.0, "variance": 4.0 / K, "horizon": horizon}
    step = convexity.decrease_step_size(**numbers)
    run = Run(problem, Constant(step), given=1.0, x1=[3.0], horizon=horizon)
    assert holds(run.last_gaps, convexity.decrease_bound(step, **numbers))


def test_the_bound_by_decrease_falls_as_the_cube_root_of_the_horizon():
    bounds = []
    for horizon in (10**8, 10**11):
        numbers = {"smoothness": 2.0, "distance": 3.0, "variance": 4.0, "horizon": horizon}
        bounds.append(convexity.decrease_bound(convexity.decrease_step_size(**numbers), **numbers))
        assert bounds[-1] == pytest.approx(2 * (2.0 * 4.0 * 3.0**4 / horizon) ** (1 / 3), rel=0.02)
    assert bounds[1] / bounds[0] == pytest.approx(0.1, rel=0.02)


def test_on_the_hard_instance_the_best_step_of_the_surrogate_stays_behind():
    numbers = {"smoothness": 1.0, "distance": 1.0, "variance": 1.0, "horizon": 1000}
    hard = convexity.hard_instance(**numbers)
    problem = Huber(hard.slope, variance=K * 1.0)
    run = Run(problem, Constant(hard.largest_step), given=1.0, x1=[1.0], horizon=1000, repeats=200)
    best = run.squares.mean(1).sum() / (run.squares + run.variances / K).mean(1).sum()
    assert best <= hard.largest_step * (1 + 1e-9)  # in hindsight, of the expected surrogate
    assert holds(-run.last_gaps, -hard.gap)
    tuned = Run(problem, Constant(1 / math.sqrt(1000)), given=1.0, x1=[1.0], horizon=1000, repeats=200)
    assert tuned.gaps[500:].mean() < run.last_gaps.mean() / 2


def test_the_hard_instance_falls_as_the_cube_root_of_the_horizon():
    gaps = [convexity.hard_instance(smoothness=2.0, distance=3.0, variance=0.5, horizon=t).gap for t in (10**9, 10**12)]
    assert gaps[1] / gaps[0] == pytest.approx(0.1, rel=0.01)


def test_the_exponent_of_the_heuristic_is_the_one_by_hand():
    for curvatures, expected in (([1.0], 0.5), ([1.0, 0.5], 0.625), ([1.0] + [0.01] * 9, 0.9455)):
        assert convexity.equilibrium_exponent(curvatures, [1.0] * len(curvatures), 1.0) == pytest.approx(expected)


@pytest.mark.parametrize("curvatures", [[1.0], [1.0, 0.5]])
def test_fed_with_expectations_the_step_falls_with_the_exponent_of_the_heuristic(curvatures):
    """f = x'Hx/2, M = 1, noise N(0, I): the slope of the mean step over the last decade of 3,000, to within 0.1."""
    h, rng, learner, repeats = np.array(curvatures), np.random.default_rng(0), FTRL(), 400
    x, alpha, state, steps = np.zeros((repeats, len(h))), np.full(repeats, 4.0), learner.initial(np.zeros(repeats)), []
    for _ in range(3000):
        s = learner.predict(state, alpha)
        u = ((h * x) ** 2).sum(-1).mean()
        state = learner.observe(state, s, u, u + len(h), alpha)
        x = x - s[:, None] * (h * x + rng.normal(size=x.shape))
        steps.append(s.mean())
    slope = np.polyfit(np.log(np.arange(300, 3000)), np.log(steps[300:]), 1)[0]
    assert -slope == pytest.approx(convexity.equilibrium_exponent(curvatures, [1.0] * len(h), 1.0), abs=0.1)


@pytest.mark.parametrize("slope", [0.0, 0.5, 2.0])
def test_the_mean_multiplier_is_above_its_floor(slope):
    """Huber's function with noise +-1: Var u = 2 f'^2 + 1 >= 1, L = slope + 1. Five standard errors, 400 repeats."""
    rng = np.random.default_rng(0)
    lipschitz, repeats, learner = slope + 1.0, 400, FTRL()
    x, alpha = np.ones(repeats), np.full(repeats, 1.0)
    state = learner.initial(np.zeros(repeats))
    for t in range(1, 401):
        s = learner.predict(state, alpha)
        floor = convexity.multiplier_floor(t, lipschitz=lipschitz, alpha=1.0, deviation=1.0)
        assert s.mean() >= floor - 5 * s.std() / math.sqrt(repeats)
        if t == 400 and slope == 0:  # of pure noise the order is right: half of E|N(0, 1)|, without the constant 1/32
            assert 5 < s.mean() / floor < 20
        g = np.clip(x, -slope, slope) + rng.choice([-1.0, 1.0], size=(2, repeats))
        state = learner.observe(state, s, g[0] * g[1], g[0] ** 2, alpha)
        x = x - s * g[0]


def test_the_sum_under_vanishing_noise_solves_its_own_inequality():
    """A <= c_0 + c_1 ln(1 + q A/alpha) fails for every A above the bound."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        M, gap, L, alpha, growth = 10 ** rng.uniform(-2, 2, size=5)
        k = int(rng.integers(2, 6))
        q = 1 + growth / k
        first, second = 2 * q * (M * gap + alpha / 2 + L**4 / alpha), 2 * q * L**2
        bound = convexity.multiplicative_sum(k=k, smoothness=M, gap=gap, lipschitz=L, alpha=alpha, growth=growth)
        for A in bound * (1 + np.array([1e-9, 0.1, 1.0, 100.0])):
            assert first + second * math.log1p(q * A / alpha) < A


GOOD = {"k": 2, "smoothness": 1.0, "lipschitz": 1.0, "alpha": 1.0, "horizon": 10}
SGD = {"smoothness": 1.0, "distance": 1.0, "variance": 1.0, "horizon": 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: convexity.surrogate_sum_bound(**{**GOOD, "k": 1}), "k must be at least 2"),
        (lambda: convexity.weighted_bound(1.0, smoothness=1.0, given=1.0, surrogate_sum=1.0), "given must be larger"),
        (lambda: convexity.floored_rate(**GOOD, given=2.0, distance=1.0, floor=3.0), "floor must be at most 2"),
        (lambda: convexity.decrease_bound(2.0, **SGD), "step_size must be at most"),
        (
            lambda: convexity.multiplier_floor(10, lipschitz=1.0, alpha=1.0, deviation=2.0),
            r"deviation must be at most L\^2 = 1, got 2\.0",
        ),
        (
            lambda: convexity.multiplicative_sum(k=1, smoothness=1.0, gap=1.0, lipschitz=1.0, alpha=1.0, growth=1.0),
            "k must be at least 2, got 1",
        ),
        (lambda: convexity.hard_instance(**{**SGD, "distance": 0.1, "variance": 100.0}), "horizon must be larger"),
    ],
)
def test_arguments_outside_their_range_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_floor_of_zero_is_the_regret_of_the_symmetric_rate_and_one_of_c_adds_its_share():
    """symmetric_rate solves Theorem 2 with this regret: without noise its bound is 2M/T times gap and regret.

    A floor c adds c^2 L^2 (1 + ln T)/(2M).
    """
    numbers = {"k": 3, "smoothness": 2.0, "lipschitz": 1.5, "alpha": 0.7, "horizon": 50}
    rate = theory.symmetric_rate(**numbers, gap=0.0, variance_sum=0.0)
    regret = convexity.surrogate_sum_bound(**numbers) - 0.7 / (2 * 2.0)
    assert rate == pytest.approx(2 * 2.0 / 50 * regret)
    added = convexity.surrogate_sum_bound(**numbers, floor=0.3) - convexity.surrogate_sum_bound(**numbers)
    assert added == pytest.approx(0.3**2 * 1.5**2 * (1 + math.log(50)) / (2 * 2.0))
