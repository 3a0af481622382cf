"""The bounds against the paper's formulas, written out again, and the theorems themselves on problems they speak of."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgdol import metrics, reference, theory

fixed = settings(deadline=None, derandomize=True, max_examples=50)
positive = st.floats(0.01, 100)
non_negative = st.floats(0, 100)
horizons = st.integers(1, 10**6)
per_coordinate = st.lists(st.tuples(positive, non_negative, st.floats(0.01, 1)), min_size=1, max_size=5)

# Two ways to write the same sum of positive terms: a few roundings apart.
CLOSE = {"rel": 1e-13, "abs": 0}


# The formulas ---------------------------------------------------------------------------------------------------------


@fixed
@given(M=positive, share=st.floats(0.01, 1), gap=non_negative, regret=st.floats(-100, 100), Sigma=non_negative)
def test_theorem_2_is_the_papers_formula(M, share, gap, regret, Sigma):
    eta = share * 2 / M
    expected = gap + regret + (M * eta**2 / 2) * Sigma
    found = theory.theorem_2(eta, smoothness=M, gap=gap, expected_regret=regret, variance_sum=Sigma)
    assert found == pytest.approx(expected, abs=1e-13 * (gap + abs(regret) + Sigma / M))


@fixed
@given(M=positive, gap=non_negative, L=positive, alpha=positive, Sigma=non_negative, T=horizons)
def test_theorem_4_is_the_papers_formula(M, gap, L, alpha, Sigma, T):
    expected = (
        (2 * M / T) * (gap + (5 * L**2 / M) * math.log(1 + L**2 * T / alpha))
        + (1 / T) * math.sqrt(2 * M * Sigma * (gap + alpha / (2 * M)))
        + (1 / T) * math.sqrt(10 * L**2 * Sigma * math.log(1 + L**2 * T / alpha))
    )
    found = theory.theorem_4(smoothness=M, gap=gap, lipschitz=L, alpha=alpha, variance_sum=Sigma, horizon=T)
    # ln(1 + z) loses digits for the smallest z here, 1e-6; log1p does not.
    assert found == pytest.approx(expected, rel=1e-9, abs=0)


@fixed
@given(M=positive, share=st.floats(0.01, 1), gap=non_negative, T=st.integers(0, 1000))
def test_theorem_6_is_the_papers_formula(M, share, gap, T):
    mu = share * M
    expected = gap
    for _ in range(T):  # as the proof goes: one factor per step
        expected *= 1 - mu / M
    assert theory.theorem_6(smoothness=M, pl_constant=mu, gap=gap, horizon=T) == pytest.approx(
        expected, rel=1e-12, abs=1e-300
    )


@fixed
@given(M=positive, gap=non_negative, regret=st.floats(-100, 100), coordinates=per_coordinate)
def test_theorem_7_is_the_papers_formula(M, gap, regret, coordinates):
    etas = [share * 2 / M for _, _, share in coordinates]
    sigmas = [sigma for _, sigma, _ in coordinates]
    expected = gap + regret
    for eta_i, sigma_i in zip(etas, sigmas, strict=True):
        expected += (M / 2) * eta_i**2 * sigma_i
    found = theory.theorem_7(etas, smoothness=M, gap=gap, expected_regret=regret, variance_sums=sigmas)
    assert found == pytest.approx(expected, abs=1e-13 * (gap + abs(regret) + sum(sigmas) / M))


def theorem_8_as_printed(M, gap, L, alpha, Sigma, T):
    """Both statements, with sigma_t^2 = sum_i sigma_{t,i}^2 in place of the paper's slip; Sigma[i] sums over t."""
    d = len(L)
    logs = sum(5 * L_i**2 / M * math.log(1 + L_i**2 * T / alpha) for L_i in L)
    each = [
        2 * M * (gap + logs)
        + math.sqrt(2 * M * Sigma_i * (gap + d * alpha / (2 * M)))
        + math.sqrt(10 * Sigma_i * sum(L_i**2 * math.log(1 + L_i**2 * T / alpha) for L_i in L))
        + (d - 1) * alpha
        for Sigma_i in Sigma
    ]
    total = (
        2 * M * (gap + logs)
        + math.sqrt(2 * M * sum(Sigma) * (gap + d * alpha / (2 * M)))
        + math.sqrt(10 * sum(Sigma) * sum(L_i**2 * math.log(1 + L_i**2 * T / alpha) for L_i in L))
    )
    return each, total


@fixed
@given(M=positive, gap=non_negative, alpha=positive, coordinates=per_coordinate, T=horizons)
def test_theorem_8_is_the_papers_formula_with_its_slip_corrected(M, gap, alpha, coordinates, T):
    L, Sigma = [row[0] for row in coordinates], [row[1] for row in coordinates]
    each, total = theorem_8_as_printed(M, gap, L, alpha, Sigma, T)
    found = theory.theorem_8(smoothness=M, gap=gap, lipschitz=L, alpha=alpha, variance_sums=Sigma, horizon=T)
    # See theorem 4 for the tolerance.
    assert found.each == pytest.approx(each, rel=1e-9, abs=0)
    assert found.total == pytest.approx(total, rel=1e-9, abs=0)


@fixed
@given(M=positive, share=st.floats(0, 1), alpha=positive, L=non_negative, T=st.integers(0, 10**6))
def test_the_regret_bound_is_the_one_in_the_proof_of_theorem_4(M, share, alpha, L, T):
    eta = share * 2 / M
    expected = (M * alpha / 2) * (eta - 1 / M) ** 2 + (5 * L**2 / M) * math.log1p(L**2 * T / alpha)
    found = theory.ftrl_regret_bound(eta, smoothness=M, alpha=alpha, lipschitz=L, horizon=T)
    assert found == pytest.approx(expected, **CLOSE)


@fixed
@given(k=st.integers(2, 8), M=positive, gap=non_negative, L=positive, alpha=positive, Sigma=non_negative, T=horizons)
def test_the_symmetric_rate_is_its_documented_formula(k, M, gap, L, alpha, Sigma, T):
    Lambda = min(L**2 / alpha + math.log1p(L**2 * T / alpha), 5 + math.log(4 * T))
    expected = (
        (2 * M / T) * (gap + L**2 / M * Lambda)
        + (1 / T) * math.sqrt(2 * M * Sigma / k * (gap + alpha / (2 * M)))
        + (1 / T) * math.sqrt(2 * L**2 * Lambda * Sigma / k)
    )
    found = theory.symmetric_rate(k=k, smoothness=M, gap=gap, lipschitz=L, alpha=alpha, variance_sum=Sigma, horizon=T)
    assert found == pytest.approx(expected, **CLOSE)


# Regret ---------------------------------------------------------------------------------------------------------------


def random_run(seed: int, shape: tuple[int, ...] = (30,)):
    rng = np.random.default_rng(seed)
    smoothness = float(rng.uniform(0.5, 20))
    return rng.uniform(0, 2 / smoothness, size=shape), rng.normal(size=shape), rng.exponential(size=shape), smoothness


@fixed
@given(seed=st.integers(0, 10**6))
def test_regret_against_the_best_fixed_step_size_is_the_largest(seed):
    eta, u, n, smoothness = random_run(seed)
    largest = theory.regret(eta, u, n, smoothness)
    for other in np.linspace(0, 2 / smoothness, 41):
        assert theory.regret(eta, u, n, smoothness, against=other) <= largest + 1e-13 * np.sum(np.abs(u) + n)


def test_regret_is_the_difference_of_the_sums_of_losses():
    eta, u, n, smoothness = random_run(0)
    expected = 0.0
    for e, u_t, n_t in zip(eta, u, n, strict=True):
        expected += smoothness * e**2 / 2 * n_t - e * u_t - (smoothness * 0.03**2 / 2 * n_t - 0.03 * u_t)
    assert theory.regret(eta, u, n, smoothness, against=0.03) == pytest.approx(expected, rel=1e-12, abs=0)


def test_regret_of_blocks_is_that_of_each_by_itself():
    eta, u, n, smoothness = random_run(1, shape=(30, 4))
    expected = [theory.regret(eta[:, b], u[:, b], n[:, b], smoothness) for b in range(4)]
    np.testing.assert_allclose(theory.regret(eta, u, n, smoothness), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("u_sum", "n_sum", "best"), [(1.0, 4.0, 0.025), (-1.0, 4.0, 0.0), (9.0, 4.0, 0.2), (0.0, 0.0, 0.1)]
)
def test_the_best_fixed_step_size_by_hand(u_sum, n_sum, best):
    """M = 10: inside, at 0, at 2/M, and 1/M where nothing is known."""
    assert theory.best_fixed_step_size(np.asarray(u_sum), np.asarray(n_sum), smoothness=10.0) == best


# Theorems beyond the paper's own (those: tests/paper/test_theorems.py) -----------------------------------------------

SIGMA, START = 0.25, 3.0
CURVATURES = np.array([1.0, 0.1])


@pytest.mark.parametrize("k", [2, 4])
def test_the_symmetric_rate_holds_on_a_noisy_non_convex_function(k):
    """f(x) = 1 - cos x with noise +-SIGMA: M = 1, L = 1 + SIGMA. The mean over two seeds stands for the expectation.

    It is a factor of 9 below the bound, and the bound says something: at random points the mean of sin^2 is 1/2.
    """
    horizon, problem = 400, {"smoothness": 1.0, "alpha": 10.0, "k": k}
    means = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        run = reference.algorithm_1(
            lambda x, rng=rng: np.sin(x) + SIGMA * rng.choice([-1.0, 1.0], size=1),
            [START], horizon, **problem, estimator="symmetric",
        )  # fmt: skip
        means.append(np.mean(np.sin(run.iterates[:-1, 0]) ** 2))
    constants = {"gap": 1 - math.cos(START), "lipschitz": 1 + SIGMA, "variance_sum": horizon * SIGMA**2}
    assert np.mean(means) <= theory.symmetric_rate(**problem, **constants, horizon=horizon) < 0.5


@pytest.fixture(scope="module")
def in_metric():
    """Two runs on f(x) = sum c_i (1 - cos x_i), c = (1, 0.1), with noise +-c_i SIGMA, in RMS with a floor of 0.71."""
    metric, runs = metrics.RMS(overall=1.0), []
    for seed in range(2):
        rng, states = np.random.default_rng(seed), [metric.initial(np.zeros(2))]

        def diagonal(past, present, tensors, states=states):
            if past:
                states.append(metric.observe(states.pop(), past[-1]))
            mean = metric.mean_square(states[0], present)
            return metric.operator(states[0], metrics.Means(mean, mean)).flat(np.ones(2))

        def oracle(x, rng=rng):
            return CURVATURES * (np.sin(x) + SIGMA * rng.choice([-1.0, 1.0], size=2))

        smoothness = 1 / metric.floor
        runs.append(reference.algorithm_1(oracle, [START] * 2, 1000, smoothness=smoothness, alpha=1.0, metric=diagonal))
    assert min(run.diagonals.min() for run in runs) >= metric.floor
    return metric.floor, float(np.sum(CURVATURES)) * (1 - math.cos(START)), runs


def squared_gradients(run):
    return (CURVATURES * np.sin(run.iterates[:-1])) ** 2 / run.diagonals


def test_theorem_4_holds_in_a_metric(in_metric):
    """The bound is 0.33; at random points the mean of ||grad f||^2_{D^-1} is at least 0.36. Measured: 0.01."""
    floor, gap, runs = in_metric
    constants = theory.in_metric(
        floor=floor,
        smoothness=1.0,
        lipschitz=float(np.linalg.norm(CURVATURES)) * (1 + SIGMA),
        variance_sum=1000 * SIGMA**2 * float(np.sum(CURVATURES**2)),
    )
    bound = theory.theorem_4(**constants._asdict(), gap=gap, alpha=1.0, horizon=1000)
    assert np.mean([squared_gradients(run).sum(1).mean() for run in runs]) <= bound < 0.36


def test_theorem_2_holds_in_a_metric(in_metric):
    floor, gap, runs = in_metric
    step, left, right = 0.3, [], []
    for run in runs:
        left.append((step - step**2 / (2 * floor)) * np.sum(squared_gradients(run)))
        regret = theory.regret(run.step_sizes, run.u[:, 0], run.n[:, 0], 1 / floor, against=step)
        variances = np.sum((CURVATURES * SIGMA) ** 2 / run.diagonals)
        constants = {"smoothness": 1 / floor, "gap": gap, "expected_regret": float(regret)}
        right.append(theory.theorem_2(step, **constants, variance_sum=float(variances)))
    assert np.mean(left) <= np.mean(right)


# Bad input ------------------------------------------------------------------------------------------------------------

RATE = {"smoothness": 1.0, "gap": 1.0, "alpha": 1.0, "horizon": 10}
BOUND = {"smoothness": 1.0, "gap": 1.0, "expected_regret": 0.0}
GOOD = {
    "theorem_2": {**BOUND, "step_size": 0.1, "variance_sum": 0.0},
    "theorem_4": {**RATE, "lipschitz": 1.0, "variance_sum": 1.0},
    "theorem_6": {"smoothness": 1.0, "pl_constant": 0.5, "gap": 1.0, "horizon": 10},
    "theorem_7": {**BOUND, "step_sizes": [0.1, 0.2], "variance_sums": [0.0, 1.0]},
    "theorem_8": {**RATE, "lipschitz": [1.0, 2.0], "variance_sums": [0.0, 1.0]},
    "ftrl_regret_bound": {"step_size": 0.1, "smoothness": 1.0, "alpha": 1.0, "lipschitz": 1.0, "horizon": 10},
    "symmetric_rate": {**RATE, "lipschitz": 1.0, "variance_sum": 1.0, "k": 2},
}
IN_ALL = [
    ("smoothness", 0.0, "smoothness must be positive and finite, got 0.0"),
    ("smoothness", math.nan, "smoothness must be positive and finite, got nan"),
    ("gap", -1.0, "gap must be finite and at least 0, got -1.0"),
    ("alpha", math.inf, "alpha must be positive and finite, got inf"),
]
BAD = [
    *((name, *bad) for name, good in GOOD.items() for bad in IN_ALL if bad[0] in good),
    ("theorem_2", "step_size", 0.0, "step_size must be positive and finite, got 0.0"),
    ("theorem_2", "step_size", 2.5, r"step_size must be in \[0, 2/M\] = \[0, 2\], got 2.5"),
    ("theorem_2", "variance_sum", -1.0, "variance_sum must be finite and at least 0, got -1.0"),
    ("theorem_4", "lipschitz", 0.0, "lipschitz must be positive and finite, got 0.0"),
    ("theorem_4", "horizon", 0, "horizon must be positive and finite, got 0"),
    ("theorem_4", "variance_sum", -1.0, "variance_sum must be finite and at least 0, got -1.0"),
    ("symmetric_rate", "k", 1, "k must be at least 2, got 1"),
    ("theorem_6", "pl_constant", 2.0, "pl_constant must be at most the smoothness 1.0, got 2.0"),
    ("theorem_6", "pl_constant", 0.0, "pl_constant must be positive and finite, got 0.0"),
    ("theorem_7", "step_sizes", [0.1, 2.5], r"step_size must be in \[0, 2/M\] = \[0, 2\], got 2.5"),
    ("theorem_7", "step_sizes", [0.1], "one entry per coordinate is needed in each of step_sizes, variance_sums"),
    ("theorem_7", "variance_sums", [0.0, -1.0], "variance_sum.* must be finite and at least 0, got -1.0"),
    ("theorem_8", "lipschitz", [], "one entry per coordinate is needed in each of lipschitz, variance_sums"),
    ("theorem_8", "lipschitz", [1.0, -1.0], "lipschitz must be finite and at least 0, got -1.0"),
    ("theorem_8", "variance_sums", [0.0, -1.0], "variance_sum.* must be finite and at least 0, got -1.0"),
    ("ftrl_regret_bound", "step_size", 2.5, r"step_size must be in \[0, 2/M\] = \[0, 2\], got 2.5"),
    ("ftrl_regret_bound", "horizon", -1, "horizon must be finite and at least 0, got -1"),
]


@pytest.mark.parametrize(("name", "argument", "value", "message"), BAD)
def test_a_bad_argument_is_refused_by_name_and_value(name, argument, value, message):
    with pytest.raises(ValueError, match=message):
        getattr(theory, name)(**{**GOOD[name], argument: value})


def test_the_best_fixed_step_size_needs_a_positive_smoothness():
    with pytest.raises(ValueError, match=r"smoothness must be positive and finite, got -1\.0"):
        theory.best_fixed_step_size(np.asarray(1.0), np.asarray(1.0), smoothness=-1.0)
