"""Objectives, gradients and the noise on them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgdol.paper.problems import AdultClassifier, Noise, Rosenbrock, phi
from sgdol.paper.runner import evaluate


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def small_table(rows=40, columns=6, binary=True, seed=0):
    rng = np.random.default_rng(seed)
    features = (rng.random((rows, columns)) < 0.4).astype(float)
    if not binary:
        features *= rng.normal(size=features.shape)
    features = np.column_stack([features, np.ones(rows)])
    features[1] = features[0]  # equal samples, which full gradients merge
    labels = np.where(rng.random(rows) < 0.5, -1.0, 1.0)
    labels[1] = labels[0]
    return features, labels


@pytest.mark.parametrize("x", [[0.0, 0.0], [-1.2, 1.0], [1.0, 1.0], [0.3, -2.0]])
def test_rosenbrock_gradient_is_the_derivative(x):
    def f(point):
        return (1 - point[0]) ** 2 + 100 * (point[1] - point[0] ** 2) ** 2

    value, gradient = evaluate(Rosenbrock(), [x])
    assert value[0] == f(np.array(x))
    np.testing.assert_allclose(gradient[0], jax.grad(f)(jnp.array(x)), rtol=1e-14)


@pytest.mark.parametrize("binary", [True, False])
def test_adult_objective_and_gradient_are_those_of_the_paper(binary):
    features, labels = small_table(binary=binary)
    problem = AdultClassifier(features, labels)
    x = np.random.default_rng(1).normal(size=(3, 7))
    value, gradient = evaluate(problem, x)

    def f(point):
        return jnp.mean(phi(features @ point - labels))

    np.testing.assert_allclose(value, [f(point) for point in x], rtol=1e-14)
    np.testing.assert_allclose(gradient, [jax.grad(f)(point) for point in x], atol=1e-15)


@pytest.mark.parametrize("binary", [True, False])
def test_the_minibatch_of_all_samples_gives_the_full_gradient(binary):
    features, labels = small_table(binary=binary)
    problem = AdultClassifier(features, labels)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 7)))
    everything = jnp.tile(jnp.arange(len(labels)), (2, 1))
    stochastic = problem.stochastic_gradient(jax.device_put(problem.data), x, everything)
    np.testing.assert_allclose(stochastic, evaluate(problem, x)[1], atol=1e-15)


def test_minibatches_are_drawn_with_replacement_from_all_samples():
    problem = AdultClassifier(*small_table())
    drawn = problem.draw(np.random.default_rng(0), 1000, Noise("batch=50", batch=50))
    assert drawn.shape == (1000, 50)
    assert set(np.unique(drawn)) == set(range(40))
    assert any(len(set(batch)) < 50 for batch in drawn)


@pytest.mark.parametrize(("model", "total"), [("coordinate", 2 * 25.0), ("total", 25.0)])
def test_the_two_readings_of_sigma(model, total):
    problem = Rosenbrock(model)
    noise = problem.noises[2]
    assert noise.name == "sigma=5"
    assert problem.total_variance(noise) == pytest.approx(total)
    drawn = problem.draw(np.random.default_rng(0), 20_000, noise)
    assert (drawn**2).sum(axis=1).mean() == pytest.approx(total, rel=0.03)


def test_the_variance_at_the_first_point_is_that_of_minibatches():
    problem = AdultClassifier(*small_table())
    noise = Noise("batch=5", batch=5)
    drawn = problem.draw(np.random.default_rng(0), 20_000, noise)
    x = jnp.zeros((20_000, 7))
    gradients = np.asarray(problem.stochastic_gradient(jax.device_put(problem.data), x, jnp.asarray(drawn)))
    true = evaluate(problem, x[:1])[1]
    measured = ((gradients - true) ** 2).sum(axis=1).mean()
    assert problem.total_variance(noise) == pytest.approx(measured, rel=0.03)


def test_bad_problems_are_named():
    with pytest.raises(ValueError, match=r"noise_model must be one of \('coordinate', 'total'\), got 'white'"):
        Rosenbrock("white")
    with pytest.raises(ValueError, match="every sigma must be finite and at least 0, got -1"):
        Rosenbrock(sigmas=(-1.0,))
    with pytest.raises(ValueError, match="a label for each row"):
        AdultClassifier(np.ones((3, 2)), np.ones(2))
