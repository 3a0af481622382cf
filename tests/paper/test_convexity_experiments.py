"""The convex problems have the constants that they name, and the experiments write what a report needs."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgdol.paper import convexity
from sgdol.paper.convex_problems import double_precision, huber, least_squares, softmax


def small_softmax(classes):
    rng = np.random.default_rng(0)
    return softmax("small", rng.normal(size=(40, 3)), rng.integers(classes, size=40), ridge=0.01, horizon=10)


PROBLEMS = {
    "two classes": lambda: small_softmax(2),
    "four classes": lambda: small_softmax(4),
    "least squares, additive": lambda: least_squares(10.0, multiplicative=False, horizon=10),
    "least squares, multiplicative": lambda: least_squares(10.0, multiplicative=True, horizon=10),
    "Huber": lambda: huber(1000),
}


@pytest.fixture(scope="module", params=PROBLEMS)
def problem(request):
    """Made when it is needed: its minimum is found by a compiled program."""
    return PROBLEMS[request.param]()


def away(problem):
    return problem.data["x1"] + 0.3 * np.cos(np.arange(len(problem.data["x1"])))


def test_stochastic_gradients_have_the_gradient_as_their_mean_and_are_uncorrelated(problem):
    """Five standard errors for each coordinate, seed fixed."""
    with double_precision():
        x = jnp.asarray(away(problem))
        data = jax.tree.map(jnp.asarray, problem.data)
        exact = np.asarray(jax.jit(jax.grad(problem.value, argnums=1))(data, x))
        keys = jax.random.split(jax.random.key(0), 1000)
        drawn = np.asarray(jax.jit(jax.vmap(problem.gradients, in_axes=(None, None, 0)))(data, x, keys))
    for which in range(2):
        error = drawn[:, which].std(axis=0) / np.sqrt(1000)
        assert np.all(np.abs(drawn[:, which].mean(axis=0) - exact) <= 5 * error + 1e-12)
    cross = (drawn[:, 0] * drawn[:, 1]).sum(-1)
    assert abs(cross.mean() - exact @ exact) <= 5 * cross.std() / np.sqrt(1000) + 1e-12


def test_the_smoothness_bounds_the_curvature_and_the_minimum_the_value(problem):
    with double_precision():
        data = jax.tree.map(jnp.asarray, problem.data)
        hessian, value = jax.jit(jax.hessian(problem.value, argnums=1)), jax.jit(problem.value)
        for scale in (0.0, 0.5, 1.0):
            x = jnp.asarray(scale * away(problem))
            curvature = np.linalg.eigvalsh(np.asarray(hessian(data, x)))
            assert curvature[-1] <= problem.data["smoothness"] * (1 + 1e-9)
            assert curvature[0] >= -1e-9  # convex
            assert float(value(data, x)) >= problem.data["minimum"] - 1e-12


def test_the_first_record_is_the_first_point_and_the_average_is_the_mean_of_the_iterates():
    problem = least_squares(1.0, multiplicative=False, noise=0.0, horizon=40)
    found = convexity.measure(problem, convexity.METHODS["SGD, best constant"]._replace(rates=(0.5,)), 1, 0)
    iterates = 0.5 ** np.arange(40)  # of every coordinate, in units of x_1
    start = 0.5 * 9.0
    late = np.maximum(found.times, 1)
    np.testing.assert_allclose(found.last[0], start * iterates[late - 1] ** 2, rtol=1e-9)
    means = np.cumsum(iterates) / np.arange(1, 41)
    np.testing.assert_allclose(found.average[0], start * means[late - 1] ** 2, rtol=1e-9)


def test_the_best_of_the_rates_is_kept():
    problem = least_squares(1.0, multiplicative=False, noise=0.0, horizon=10)
    found = convexity.measure(problem, convexity.METHODS["SGD, best constant"]._replace(rates=(0.1, 1.0, 100.0)), 2, 0)
    assert found.rate == 1.0
    assert found.last.shape == (2, convexity.POINTS)


def test_a_run_writes_its_table_its_curves_and_its_figure_and_makes_a_table(tmp_path):
    told = []
    rows = convexity.run(
        tmp_path, horizon=30, repeats=2, people=60, hard_horizons=(30, 60), methods=("DoG",),
        only="additive, condition 1", progress=told.append,
    )  # fmt: skip
    assert told == [f"least squares, additive, condition {c}" for c in (1, 10, 100)] + ["the hard instance"]
    with (tmp_path / "convexity.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows) == 2 * (3 * 1 + 2)
    assert all((tmp_path / name).stat().st_size for name in ("convexity-curves.csv", "convexity.png", "convexity.svg"))
    table = convexity.table(tmp_path)
    assert len(table) == 3 * 1 + 2
    assert {len(row) for row in table} == {len(convexity.HEADER)}
    assert all(np.isfinite(row["gap"]) and np.isfinite(row["slope"]) for row in rows)


def test_the_same_seed_gives_the_same_numbers():
    problem = huber(30)
    first, again = (convexity.measure(problem, convexity.METHODS["SGDOL"], 2, 3) for _ in range(2))
    np.testing.assert_array_equal(first.last, again.last)
