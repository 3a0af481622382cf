"""The compiled runs against plain loops, and what they record."""

from __future__ import annotations

import numpy as np
import pytest

from sgdol.paper import runner
from sgdol.paper.methods import methods
from sgdol.paper.problems import AdultClassifier, Noise, Rosenbrock
from sgdol.paper.recording import record_iterations, strata
from sgdol.paper.runner import Lanes, evaluate, run_noiseless, run_noisy, seed_of
from sgdol.reference import replay

TABLE = methods()
SGD = TABLE["SGD"]
SGDOL = TABLE["SGDOL Global"]


def lanes(method, count, **hyperparameters):
    return Lanes(method, {name: np.full(count, value) for name, value in hyperparameters.items()})


def rosenbrock_gradient(x):
    return evaluate(Rosenbrock(), x[None])[1][0]


def test_a_noisy_run_of_sgdol_is_algorithm_1_with_two_independent_streams():
    problem = Rosenbrock()
    noise, horizon = problem.noises[1], 60
    trace = run_noisy(problem, lanes(SGDOL, 2, smoothness=500.0, alpha=10.0), noise, horizon, seed=4)
    own = seed_of(4, "rosenbrock", "sigma=0.2", "SGDOL Global")
    for repeat in range(2):
        first, second = (
            problem.draw(np.random.Generator(np.random.Philox(np.random.SeedSequence([own, repeat, i]))), 1000, noise)
            for i in range(2)
        )
        assert not np.allclose(first, second)
        x, squared, etas, u, n = np.zeros(2), [], [], 0.0, 0.0
        for t in range(horizon):
            true = rosenbrock_gradient(x)
            g, other = true + first[t], true + second[t]
            eta = np.clip((10 + u) / (10 + n), 0, 2) / 500
            squared.append(true @ true)
            etas.append(eta)
            x, u, n = x - eta * g, u + g @ other, n + g @ g
        running = np.cumsum(squared) / np.arange(1, horizon + 1)
        at = trace.iteration - 1
        np.testing.assert_allclose(trace.mean_squared_gradient[repeat], running[at], rtol=1e-10)
        np.testing.assert_allclose(trace.squared_gradient[repeat], np.array(squared)[at], rtol=1e-9)
        np.testing.assert_allclose(trace.step_size[repeat], np.array(etas)[at], rtol=1e-10)


def test_a_short_run_is_the_beginning_of_a_long_one_with_more_repeats():
    problem = Rosenbrock()
    short = run_noisy(problem, lanes(SGD, 2, learning_rate=1e-3), problem.noises[1], 100, seed=0)
    long = run_noisy(problem, lanes(SGD, 3, learning_rate=1e-3), problem.noises[1], 10_000, seed=0)
    common = np.intersect1d(short.iteration, long.iteration)
    assert {1, 100} <= set(common.tolist())
    a = short.mean_squared_gradient[:, np.searchsorted(short.iteration, common)]
    b = long.mean_squared_gradient[:2, np.searchsorted(long.iteration, common)]
    np.testing.assert_allclose(a, b, rtol=1e-12)


def test_every_run_has_its_own_randomness():
    names = [("rosenbrock", "sigma=5", "SGD"), ("rosenbrock", "sigma=5", "Adam"), ("adult", "batch=1", "SGD")]
    assert len({seed_of(seed, *name) for seed in (0, 1) for name in names}) == 6


def test_without_noise_sgdol_is_sgd():
    traces = run_noiseless(
        Rosenbrock(), [lanes(SGD, 1, learning_rate=1e-3), lanes(SGDOL, 1, smoothness=1000.0, alpha=10.0)], 2500
    )
    np.testing.assert_allclose(traces[0].mean_squared_gradient, traces[1].mean_squared_gradient, rtol=1e-9)
    x = np.zeros(2)
    squared = []
    for _ in range(2500):
        g = np.array([-2 * (1 - x[0]) - 400 * x[0] * (x[1] - x[0] ** 2), 200 * (x[1] - x[0] ** 2)])
        squared.append(g @ g)
        x = x - 1e-3 * g
    running = np.cumsum(squared) / np.arange(1, 2501)
    np.testing.assert_allclose(traces[0].mean_squared_gradient[0], running[traces[0].iteration - 1], rtol=1e-9)
    assert not traces[0].diverged.any()


def test_divergence_is_kept_and_marked():
    trace = run_noiseless(Rosenbrock(), [Lanes(SGD, {"learning_rate": np.array([1e-3, 1.0])})], 1100)[0]
    assert trace.diverged.tolist() == [False, True]
    assert np.isfinite(trace.mean_squared_gradient[0]).all()
    assert not np.isfinite(trace.mean_squared_gradient[1, -1])
    noisy = run_noisy(
        Rosenbrock(), Lanes(SGD, {"learning_rate": np.array([1e-3, 1.0])}), Rosenbrock().noises[1], 50, seed=0
    )
    assert noisy.diverged.tolist() == [False, True]
    assert noisy.mean_squared_gradient.shape == (2, len(noisy.iteration))


def test_running_away_to_where_the_loss_is_flat_is_divergence(small_adult):
    trace = run_noiseless(small_adult, [Lanes(SGD, {"learning_rate": np.array([0.1, 1e4])})], 200)[0]
    assert trace.mean_squared_gradient[1, -1] < 1e-3 + trace.mean_squared_gradient[0, 0]
    assert trace.objective[1, -1] > 0.95
    assert trace.diverged.tolist() == [False, True]


@pytest.fixture(scope="module")
def small_adult():
    rng = np.random.default_rng(0)
    features = np.column_stack([(rng.random((200, 12)) < 0.3).astype(float), np.ones(200)])
    labels = np.sign(features @ rng.normal(size=13) + rng.normal(size=200))
    return AdultClassifier(features, labels, batches=(0, 3))


def test_the_sampled_running_mean_agrees_with_the_exact_one(small_adult, monkeypatch):
    noise = small_adult.noises[1]
    run = lanes(SGD, 20, learning_rate=0.3)
    sampled = run_noisy(small_adult, run, noise, 5000, seed=1)
    monkeypatch.setattr(type(small_adult), "cheap", True)
    exact = run_noisy(small_adult, run, noise, 5000, seed=1)
    np.testing.assert_allclose(sampled.squared_gradient, exact.squared_gradient, rtol=1e-6)
    np.testing.assert_array_equal(sampled.step_size, exact.step_size)
    early = sampled.iteration <= 200
    np.testing.assert_allclose(
        sampled.mean_squared_gradient[:, early], exact.mean_squared_gradient[:, early], rtol=1e-9
    )
    assert (sampled.sampling_error[:, early] == 0).all()
    difference = (sampled.mean_squared_gradient - exact.mean_squared_gradient)[:, -1]
    error = sampled.sampling_error[:, -1]
    assert 0 < (error / exact.mean_squared_gradient[:, -1]).max() < 0.1
    assert (np.abs(difference) < 5 * error).all()
    assert abs(difference.mean()) < 4 * np.sqrt((error**2).sum()) / 20, "the estimate is unbiased"
    assert sampled.evaluations < 5000 / 3
    assert exact.evaluations == 0


def test_adult_minibatch_run_is_algorithm_1_on_those_minibatches(small_adult):
    noise = small_adult.noises[1]
    trace = run_noisy(small_adult, lanes(SGDOL, 1, smoothness=2.0, alpha=10.0), noise, 80, seed=0)
    own = seed_of(0, "adult", "batch=3", "SGDOL Global")
    drawn = [
        small_adult.draw(np.random.Generator(np.random.Philox(np.random.SeedSequence([own, 0, i]))), 1000, noise)
        for i in range(2)
    ]

    x, recorded = np.zeros(13), []
    for t in range(80):  # replay needs gradients at its own iterates, so it is asked again after each step
        pair = []
        for rows in (drawn[0][t], drawn[1][t]):
            a, residual = small_adult.features[rows], small_adult.features[rows] @ x - small_adult.labels[rows]
            pair.append(a.T @ (2 * residual / (1 + residual**2) ** 2) / 3)
        recorded.append(pair)
        if t < 79:
            x = replay(recorded, np.zeros(13), smoothness=2.0, alpha=10.0).iterates[-1]
    value, gradient = evaluate(small_adult, x[None])
    np.testing.assert_allclose(trace.objective[0, -1], value[0], rtol=1e-10)
    np.testing.assert_allclose(trace.squared_gradient[0, -1], (gradient**2).sum(), rtol=1e-9)


@pytest.mark.parametrize("horizon", [1, 2, 10, 12_345, 100_000])
def test_strata_cover_every_iteration_once_and_end_at_the_recorded_ones(horizon):
    recorded = record_iterations(horizon)
    assert recorded[0] == 1
    assert recorded[-1] == horizon
    assert (np.diff(recorded) > 0).all()
    cut = strata(recorded, np.random.default_rng(0))
    edges = np.cumsum(cut.size)
    assert edges[-1] == horizon
    np.testing.assert_array_equal(edges[cut.ends - 1], recorded)
    assert ((cut.position > edges - cut.size) & (cut.position <= edges)).all()
    assert (cut.size[edges <= 200] == 1).all()
    assert cut.size.max() <= 41


def test_the_position_in_a_stratum_is_uniform():
    recorded = np.array([1, 20_000, 20_040])
    draws = [strata(recorded, np.random.default_rng(seed)).position[-1] for seed in range(2000)]
    counts = np.bincount(np.array(draws) - 20_001, minlength=40)
    assert counts.shape == (40,)
    assert ((counts - 50.0) ** 2 / 50).sum() < 80  # chi-squared with 39 degrees of freedom


def test_progress_adds_up_to_the_horizon():
    done = []
    run_noisy(
        Rosenbrock(), lanes(SGD, 1, learning_rate=1e-3), Noise("sigma=1", sigma=1.0), 2500, seed=0, progress=done.append
    )
    assert sum(done) == 2500
    assert runner.STEPS == 1000
