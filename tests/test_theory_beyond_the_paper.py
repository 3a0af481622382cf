"""Constants of docs/explanation/theory.md beyond the paper: symmetric estimator, momentum, measured curvature."""

import functools
import math

import numpy as np
import pytest

from sgdol import theory
from sgdol.learners import FTRL, MeasuredCurvature

# The symmetric estimator ----------------------------------------------------------------------------------------------


def pair(g):
    """(a, b) of k gradients: the squared mean, and the sample variance over k, along the second axis."""
    k = g.shape[1]
    mean = g.mean(axis=1)
    return (mean**2).sum(-1), ((g - mean[:, None]) ** 2).sum((1, 2)) / (k * (k - 1))


def symmetric_regret(draw, *, horizon, alpha, repeats, kappa=None, seed=0):
    """Regrets of FTRL, M = 1, against nine fixed step sizes; shape (repeats, 9), and the alphas."""
    rng = np.random.default_rng(seed)
    learner, state = FTRL(), FTRL().initial(np.zeros(repeats))
    alphas = np.full(repeats, alpha)
    against = np.linspace(0, 2, 9)
    total = np.zeros((repeats, 9))
    for t in range(horizon):
        a, b = pair(draw(rng, repeats))
        if t == 0 and kappa is not None:
            alphas = kappa * a
        s = learner.predict(state, alphas) if t else np.ones(repeats)
        state = learner.observe(state, s, a - b, a, alphas)
        loss = s**2 / 2 * a - s * (a - b)
        total += loss[:, None] - (against**2 / 2 * a[:, None] - against * (a - b)[:, None])
    return total, alphas


DRAWS = {
    "opposed or equal": lambda rng, r: rng.choice([-1.0, 1.0], size=(r, 2, 1)),
    "rare and long": lambda rng, r: (
        np.where(rng.random((r, 2, 1)) < 0.02, 1.0, 0.01) * rng.choice([-1.0, 1.0], (r, 2, 1))
    ),
    "drift": lambda rng, r: np.clip(0.3 + 0.7 * rng.choice([-1.0, 1.0], size=(r, 2, 1)), -1, 1),
    "constant": lambda rng, r: np.ones((r, 2, 1)),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize(("alpha", "kappa"), [(1.0, None), (1e-6, None), (1.0, 1.0), (1.0, 1e-3)])
def test_the_expected_regret_of_the_symmetric_estimator_is_below_its_bound_for_every_alpha(name, alpha, kappa):
    """L = 1; the old bound has L^2/alpha = 1e6 for the second alpha. Five standard errors over 300 repeats."""
    horizon, repeats = 100, 300
    total, alphas = symmetric_regret(DRAWS[name], horizon=horizon, alpha=alpha, repeats=repeats, kappa=kappa)
    errors = total.std(axis=0) / math.sqrt(repeats)
    for regret, error, against in zip(total.mean(axis=0), errors, np.linspace(0, 2, 9), strict=True):
        numbers = {"smoothness": 1.0, "lipschitz": 1.0, "horizon": horizon, "random_alpha": kappa is not None}
        bound = theory.symmetric_regret_bound(against, alpha=max(float(alphas.mean()), 1e-300), **numbers)
        assert regret <= bound + 5 * error


def test_a_random_alpha_has_the_bound_without_alpha():
    numbers = {"smoothness": 2.0, "lipschitz": 1.5, "horizon": 100}
    fixed = theory.symmetric_regret_bound(0.5, **numbers, alpha=100.0)
    unknown = theory.symmetric_regret_bound(0.5, **numbers, alpha=100.0, random_alpha=True)
    assert fixed < unknown == pytest.approx(1.5**2 / 2.0 * (5 + math.log(400)))
    rate = {"k": 2, "gap": 1.0, "variance_sum": 0.0, "alpha": 100.0}
    assert theory.symmetric_rate(**numbers, **rate) < theory.symmetric_rate(**numbers, **rate, random_alpha=True)


@pytest.mark.parametrize("sigma", [0.3, 2.0])
def test_the_rate_under_moments_holds_with_gaussian_noise(sigma):
    """f = 1 - cos x and N(0, sigma^2). a + b is the mean of two squares: the moments follow from |grad f| <= 1."""
    horizon, repeats, alpha = 2000, 20, 1.0
    # E y^2 <= ratio E y for y = (g_1^2 + g_2^2)/2: each E g^4 is at most 3 (1 + sigma^2) E g^2.
    ratio = 3 * (1 + sigma**2)
    # a is the square of N(c, sigma^2/2), |c| <= 1: E e^{a/z} = e^{c^2/(z - sigma^2)}/sqrt(1 - sigma^2/z) <= 2.
    scale = next(
        z
        for z in np.linspace(1.5, 9, 400) * (1 + sigma**2)
        if math.exp(1 / (z - sigma**2)) / math.sqrt(1 - sigma**2 / z) <= 2
    )
    rng = np.random.default_rng(0)
    learner, state, alphas = FTRL(), FTRL().initial(np.zeros(repeats)), np.full(repeats, alpha)
    x, total = np.full(repeats, 2.0), np.zeros(repeats)
    for _ in range(horizon):
        total += np.sin(x) ** 2
        g = np.sin(x) + sigma * rng.normal(size=(2, repeats))
        d, s = g.mean(0), learner.predict(state, alphas)
        state = learner.observe(state, s, g[0] * g[1], d**2, alphas)
        x = x - s * d
    numbers = {"smoothness": 1.0, "gap": 1 - math.cos(2.0), "variance_sum": horizon * sigma**2, "horizon": horizon}
    bound = theory.moment_rate(**numbers, ratio=ratio, scale=scale, alpha=alpha)
    assert total.mean() / horizon <= bound
    if sigma < 1:
        assert bound < 0.5  # below the mean of sin^2 at random points


# Momentum -------------------------------------------------------------------------------------------------------------


@functools.cache
class MomentumRun:
    """SGDOL with momentum on f = 1 - cos x, M = 1, L = 1 + sigma, k = 2, in many repeats side by side."""

    def __init__(self, beta, given, sigma, *, horizon=400, repeats=200, alpha=1.0, seed=0):
        rng = np.random.default_rng(seed)
        learner, state, alphas = FTRL(), FTRL().initial(np.zeros(repeats)), np.full(repeats, alpha)
        x, m = np.full(repeats, 2.0), np.zeros(repeats)
        self.squares = np.zeros(repeats)
        self.against = np.array([0.02, 0.1, 0.3, 0.7, 1.0]) / given
        self.regrets = np.zeros((repeats, len(self.against)))
        for t in range(1, horizon + 1):
            g = np.sin(x) + sigma * rng.choice([-1.0, 1.0], size=(2, repeats))
            correction, mean = 1 - beta**t, g.mean(0)
            u = (beta * m * mean + (1 - beta) * g[0] * g[1]) / correction
            m = beta * m + (1 - beta) * mean
            d = m / correction
            n, eta = d**2, learner.predict(state, alphas) / given
            state = learner.observe(state, eta * given, u, n, alphas)
            loss = given / 2 * eta**2 * n - eta * u
            self.regrets += loss[:, None] - (given / 2 * self.against**2 * n[:, None] - self.against * u[:, None])
            self.squares += np.sin(x) ** 2
            x = x - eta * d
        self.variance_sum = horizon * sigma**2 / 2
        self.gap = 1 - math.cos(2.0)


MOMENTA = [(0.5, 1.2, 0.1), (0.9, 10.0, 0.1), (0.9, 10.0, 2.0), (0.9, 1.5, 0.5), (0.0, 1.0, 0.5)]


@pytest.mark.parametrize(("beta", "given", "sigma"), MOMENTA)
def test_theorem_2_and_the_bound_of_the_regret_hold_with_momentum(beta, given, sigma):
    """Both sides at five step sizes with the measured regret; five standard errors of their difference."""
    run = MomentumRun(beta, given, sigma)
    constant = theory.momentum_constant(momentum=beta, smoothness=1.0, given=given)
    for eta, regrets in zip(run.against, run.regrets.T, strict=True):
        numbers = {"momentum": beta, "smoothness": 1.0, "given": given, "gap": run.gap, "lipschitz": 1 + sigma}
        measured = {"expected_regret": float(regrets.mean()), "variance_sum": run.variance_sum}
        right = theory.momentum_theorem(eta, **numbers, **measured)
        left = (eta - constant * given / 2 * eta**2) * run.squares
        error = (left - regrets).std() / math.sqrt(len(left))
        assert left.mean() <= right + 5 * error
        bound = theory.momentum_regret_bound(eta, given=given, alpha=1.0, lipschitz=1 + sigma, horizon=400)
        assert regrets.mean() <= bound + 5 * regrets.std() / math.sqrt(len(regrets))


def test_the_rate_with_momentum_holds_and_says_something():
    """At uniformly random points the mean of sin^2 is 1/2, which the bound is below at this horizon."""
    horizon, numbers = 4000, {"momentum": 0.9, "smoothness": 1.0, "given": 10.0, "lipschitz": 1.1, "alpha": 1.0}
    run = MomentumRun(0.9, 10.0, 0.1, horizon=horizon, repeats=20)
    bound = theory.momentum_rate(**numbers, gap=run.gap, variance_sum=run.variance_sum, horizon=horizon)
    assert run.squares.mean() / horizon <= bound < 0.5


def test_without_momentum_the_theorem_is_theorem_2():
    numbers = {"smoothness": 2.0, "gap": 1.0, "expected_regret": 0.3, "variance_sum": 5.0}
    found = theory.momentum_theorem(0.2, **numbers, momentum=0.0, given=2.0, lipschitz=3.0)
    assert found == pytest.approx(theory.theorem_2(0.2, **numbers))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1\.0"),
        ({"given": 1.0}, r"given must be finite and larger than the smoothness 1\.0, got 1\.0"),
        ({"momentum": 0.0, "given": 0.5}, r"given must be finite and at least the smoothness 1\.0, got 0\.5"),
        ({"smoothness": 0.0}, r"smoothness must be positive and finite, got 0\.0"),
    ],
)
def test_impossible_momenta_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        theory.momentum_constant(**{"momentum": 0.9, "smoothness": 1.0, "given": 10.0, **change})


# Measured curvature on quadratics -------------------------------------------------------------------------------------


def descended(curvatures, lr, *, horizon=60, repeats=1, learner=None):
    """MeasuredCurvature on f = x'Hx/2, H diagonal, in repeats side by side: f and the multipliers of every step."""
    learner, h, lr = learner or MeasuredCurvature(), np.array(curvatures), np.broadcast_to(lr, repeats)
    x, state, alphas = np.ones((repeats, len(h))), learner.initial(np.zeros(repeats)), np.ones(repeats)
    d, objective, multipliers = np.zeros_like(x), [(h * x**2).sum(1) / 2], []
    for _ in range(horizon):
        g, s = h * x, learner.predict(state, alphas)
        square = (g**2).sum(1)
        state = learner.observe(state, s, square, square, alphas, last=(g * d).sum(1))
        d, x = g, x - (lr * s)[:, None] * g
        multipliers.append(s)
        objective.append((h * x**2).sum(1) / 2)
    return np.array(objective), np.array(multipliers)


@pytest.mark.parametrize("curvatures", [[1.0], [1.0, 0.5, 0.001], [1.0] * 5])
def test_without_noise_a_step_up_to_one_over_tolerance_times_m_is_never_shortened(curvatures):
    """lr M <= 1/tau = 1.67 gives H <= U/tau: gradient descent. Also with tau < 1/2, where 2.2/M < 1/tau diverges."""
    assert np.all(descended(curvatures, 1 / 0.6 * (1 - 1e-12), horizon=200)[1] == 1.0)
    assert descended([1.0], 1.7)[1].min() < 1.0
    objective, multipliers = descended([1.0], 2.2, horizon=100, learner=MeasuredCurvature(tolerance=0.45))
    assert np.all(multipliers == 1.0)
    assert objective[-1, 0] > 1e6 * objective[0, 0]


@pytest.mark.parametrize(("tolerance", "charge"), [(0.6, 2.0), (0.51, 0.6), (1.0, 1.0), (2.0, 5.0)])
def test_in_one_dimension_it_converges_for_every_base_rate(tolerance, charge):
    """Gradient descent diverges from lr M = 2 on; with tau > 1/2 and a > 1/2 this does not."""
    rates, learner = np.array([1.7, 1.99, 2.5, 10.0, 1e3, 1e6]), MeasuredCurvature(tolerance=tolerance, charge=charge)
    objective, _ = descended([1.0], rates, horizon=1500, learner=learner, repeats=len(rates))
    assert np.all(objective[-1] < 1e-6 * objective[0])
    # The first two steps are full: what is measured counts from the third on.
    np.testing.assert_allclose(objective[2] / objective[0], (rates - 1) ** 4, rtol=1e-9)
