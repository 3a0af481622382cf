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


@pytest.mark.parametrize("k", [2, 3, 7])
def test_squared_mean_and_noise_together_are_at_most_the_largest_squared_gradient(k):
    """a + b <= L^2, with equality for k = 2 and gradients of length L: the constant cannot be smaller."""
    rng = np.random.default_rng(0)
    g = rng.normal(size=(2000, k, 2))
    g = g / np.linalg.norm(g, axis=2, keepdims=True) * rng.choice([1.0, 0.5], size=(2000, k, 1))
    a, b = pair(g)
    assert np.all(a + b <= 1 + 1e-12)
    if k == 2:
        assert (a + b).max() == pytest.approx(1.0)


def test_the_sum_inside_the_regret_is_below_its_bound_for_every_order_of_losses():
    """sum a_t min(L^2/(2 S_{t-1}), 2) <= L^2 (5 + ln 4T)/2, for growing, falling, constant and random a in [0, L^2]."""
    rng = np.random.default_rng(0)
    tightest = 0.0
    for _ in range(500):
        horizon = int(rng.integers(1, 300))
        a = {
            0: np.ones(horizon),
            1: np.minimum(1.0, 1e-6 * 2.0 ** np.arange(horizon)),
            2: rng.random(horizon) ** 8,
            3: np.minimum(1.0, rng.random() * 1.5 ** np.arange(horizon)),
        }[int(rng.integers(4))]
        before = np.concatenate([[0.0], np.cumsum(a)])[:-1]
        with np.errstate(divide="ignore"):
            total = float(np.sum(a * np.minimum(0.5 / before, 2.0)))
        bound = (5 + math.log(4 * horizon)) / 2
        assert total <= bound
        tightest = max(tightest, total / bound)
    assert tightest > 0.55


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
        bound = theory.symmetric_regret_bound(
            against,
            smoothness=1.0,
            alpha=max(float(alphas.mean()), 1e-300),
            lipschitz=1.0,
            horizon=horizon,
            random_alpha=kappa is not None,
        )
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
    bound = theory.moment_rate(
        smoothness=1.0,
        gap=1 - math.cos(2.0),
        ratio=ratio,
        scale=scale,
        alpha=alpha,
        variance_sum=horizon * sigma**2,
        horizon=horizon,
    )
    assert total.mean() / horizon <= bound
    if sigma < 1:
        assert bound < 0.5  # below the mean of sin^2 at random points


# Momentum -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9, 0.99, 0.999])
def test_the_weights_of_past_gradients_add_up_as_in_the_proof(beta):
    lag, j = beta / (1 - beta), np.arange(30_000)
    late = np.sum(j * (1 - beta) * beta**j / (1 - beta ** (j + 1.0)))
    assert late <= math.pi**2 / 6 * lag
    if beta == 0.999:
        assert late > 0.99 * math.pi**2 / 6 * lag  # the constant is reached as beta goes to 1
    r = np.arange(1, 30_000)
    extra = np.sum(beta**r / (1 - beta**r) * (1 - beta**r))
    assert extra == pytest.approx(lag, rel=1e-6)


@functools.cache
class MomentumRun:
    """SGDOL with momentum on f = 1 - cos x, M = 1, L = 1 + sigma, k = 2, in many repeats side by side."""

    def __init__(self, beta, given, sigma, *, horizon=400, repeats=200, alpha=1.0, seed=0):
        rng = np.random.default_rng(seed)
        learner, state, alphas = FTRL(), FTRL().initial(np.zeros(repeats)), np.full(repeats, alpha)
        x, m = np.full(repeats, 2.0), np.zeros(repeats)
        self.squares, self.signals, self.lengths = np.zeros(repeats), np.zeros(repeats), np.zeros(repeats)
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
            self.signals += u
            self.lengths += n
            x = x - eta * d
        self.variance_sum = horizon * sigma**2 / 2
        self.gap = 1 - math.cos(2.0)


MOMENTA = [(0.5, 1.2, 0.1), (0.9, 10.0, 0.1), (0.9, 10.0, 2.0), (0.9, 1.5, 0.5), (0.0, 1.0, 0.5)]


@pytest.mark.parametrize(("beta", "given", "sigma"), MOMENTA)
def test_theorem_2_holds_with_momentum(beta, given, sigma):
    """Both sides at five step sizes with the measured regret; five standard errors of their difference."""
    run = MomentumRun(beta, given, sigma)
    constant = theory.momentum_constant(momentum=beta, smoothness=1.0, given=given)
    for eta, regrets in zip(run.against, run.regrets.T, strict=True):
        right = theory.momentum_theorem(
            eta,
            momentum=beta,
            smoothness=1.0,
            given=given,
            gap=run.gap,
            expected_regret=float(regrets.mean()),
            variance_sum=run.variance_sum,
            lipschitz=1 + sigma,
        )
        left = (eta - constant * given / 2 * eta**2) * run.squares
        error = (left - regrets).std() / math.sqrt(len(left))
        assert left.mean() <= right + 5 * error


@pytest.mark.parametrize(("beta", "given", "sigma"), MOMENTA)
def test_the_signal_of_momentum_is_never_too_small_for_the_proof(beta, given, sigma):
    """With momentum sum E u is not sum ||grad f||^2; what is short of it is at most what the proof allows."""
    run, lag = MomentumRun(beta, given, sigma), beta / (1 - beta)
    largest_step = 2 / given
    heavy = run.squares + run.variance_sum
    allowed = lag * (1 + sigma) ** 2 + lag / 2 * (largest_step * run.lengths + largest_step * math.pi**2 / 6 * heavy)
    assert np.all(run.signals.mean() >= (run.squares - allowed).mean() - 5 * run.signals.std() / math.sqrt(200))


@pytest.mark.parametrize(("beta", "given", "sigma"), MOMENTA)
def test_the_regret_with_momentum_is_below_its_bound(beta, given, sigma):
    run = MomentumRun(beta, given, sigma)
    for eta, regrets in zip(run.against, run.regrets.T, strict=True):
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


class Quadratic:
    """MeasuredCurvature on f = x'Hx/2, H diagonal, with momentum and noise, in repeats side by side.

    Each repeat may have its own base rate and curvatures.
    """

    def __init__(self, curvatures, lr, *, beta=0.0, sigma=0.0, horizon=60, repeats=1, seed=0, learner=None, alpha=1.0):
        rng = np.random.default_rng(seed)
        learner = learner or MeasuredCurvature()
        h, lr = np.array(curvatures), np.broadcast_to(lr, repeats)
        x, m = np.ones((repeats, h.shape[-1])), np.zeros((repeats, h.shape[-1]))
        state, alphas = learner.initial(np.zeros(repeats)), np.full(repeats, alpha)
        d = np.zeros_like(x)
        self.objective, self.multipliers, self.u, self.v = [(h * x**2).sum(1) / 2], [], [], []
        for t in range(1, horizon + 2):
            g = h * x + sigma * rng.choice([-1.0, 1.0], size=(2, *x.shape))
            mean, correction = g.mean(0), 1 - beta**t
            last = (mean * d).sum(1)
            u = (beta * (m * mean).sum(1) + (1 - beta) * (g[0] * g[1]).sum(1)) / correction
            if t > 1:
                self.v.append(last)
            if t == horizon + 1:
                break
            m = beta * m + (1 - beta) * mean
            d = m / correction
            s = learner.predict(state, alphas)
            state = learner.observe(state, s, u, (d**2).sum(1), alphas, last=last)
            x = x - (lr * s)[:, None] * d
            self.multipliers.append(s)
            self.u.append(u)
            self.objective.append((h * x**2).sum(1) / 2)
        for name in ("objective", "multipliers", "u", "v"):
            setattr(self, name, np.array(getattr(self, name)))


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("lr", [0.1, 1.0, 1.9])
def test_without_noise_the_decrease_is_half_the_sum_of_promise_and_outcome(beta, lr):
    """f(x_1) - f(x_{T+1}) = lr/2 sum s (u + v), exactly; rounding alone is allowed for."""
    run = Quadratic([1.0, 0.3, 0.01], lr, beta=beta)
    promised = lr / 2 * np.sum(run.multipliers * (run.u + run.v))
    assert run.objective[0, 0] - run.objective[-1, 0] == pytest.approx(promised, rel=1e-10)


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_under_noise_the_decrease_is_that_in_expectation(beta):
    run = Quadratic([1.0, 0.3, 0.01], 1.0, beta=beta, sigma=0.7, repeats=4000)
    left = run.objective[0] - run.objective[-1]
    right = 0.5 * np.sum(run.multipliers * (run.u + run.v), axis=0)
    difference = left - right
    assert abs(difference.mean()) <= 5 * difference.std() / math.sqrt(4000)


@pytest.mark.parametrize("curvatures", [[1.0], [1.0, 0.5, 0.001], [1.0] * 5])
def test_without_noise_a_step_up_to_one_over_tolerance_times_m_is_never_shortened(curvatures):
    """lr M <= 1/tau = 1.67 gives H <= U/tau: the run is gradient descent. A rounding beyond it is shortened."""
    exact = Quadratic(curvatures, 1 / 0.6 * (1 - 1e-12), horizon=200)
    assert np.all(exact.multipliers == 1.0)
    assert Quadratic([1.0], 1.7, horizon=50).multipliers.min() < 1.0


@pytest.mark.parametrize(("tolerance", "charge"), [(0.6, 2.0), (0.51, 0.6), (1.0, 1.0), (2.0, 5.0)])
def test_in_one_dimension_it_converges_for_every_base_rate(tolerance, charge):
    """Gradient descent diverges from lr M = 2 on; with tau > 1/2 and a > 1/2 this does not."""
    rates = np.array([1.7, 1.99, 2.5, 10.0, 1e3, 1e6])
    learner = MeasuredCurvature(tolerance=tolerance, charge=charge)
    objective = Quadratic([1.0], rates, horizon=1500, learner=learner, repeats=len(rates)).objective
    assert np.all(objective[-1] < 1e-6 * objective[0])
    # The first two steps are full: what is measured counts from the third on.
    np.testing.assert_allclose(objective[2] / objective[0], (rates - 1) ** 4, rtol=1e-9)


def test_a_tolerance_below_one_half_lets_a_one_dimensional_run_diverge():
    """The condition is needed: with tau = 0.45 a step of 2.2/M is never shortened, as 2.2 < 1/0.45."""
    run = Quadratic([1.0], 2.2, horizon=100, learner=MeasuredCurvature(tolerance=0.45))
    assert np.all(run.multipliers == 1.0)
    assert run.objective[-1, 0] > 1e6 * run.objective[0, 0]


def test_the_conjecture_for_several_dimensions_is_not_refuted_by_random_spectra():
    """Conjectured only: f goes to its minimum for every lr and spectrum. The slowest curvature decides how far."""
    rng, runs = np.random.default_rng(0), 20
    curvatures = np.concatenate([np.ones((runs, 1)), 10 ** rng.uniform(-1.5, 0, size=(runs, 4))], axis=1)
    run = Quadratic(curvatures, 10 ** rng.uniform(0.3, 4, size=runs), horizon=6000, repeats=runs)
    assert np.all(run.objective[-1] < 0.01 * run.objective[0])
