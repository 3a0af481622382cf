"""The theorems hold where their assumptions do, the constants are right, and the checks can fail."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sgdol import reference
from sgdol.paper import theorems
from sgdol.paper.claims import CHECKS
from sgdol.paper.claims.theorems import STANDARD_ERRORS


@pytest.fixture(scope="module")
def claims():
    return [check(None) for check in CHECKS if check.kind == "theorem"]


def test_every_theorem_holds_where_its_assumptions_do(claims):
    order = ["theorem-1", "theorem-2", "theorem-3", "theorem-4", "lemma-5", "theorem-6", "theorem-7", "theorem-8"]
    assert [claim.id for claim in claims] == order
    assert {claim.verdict for claim in claims} == {"holds"}


def test_the_bounds_are_not_vacuous_by_a_slip_of_scale(claims):
    ratios = [
        p.measured / p.threshold
        for claim in claims
        for p in claim.parts
        if claim.id in ("theorem-2", "theorem-4", "theorem-7")
    ]
    assert max(ratios) > 0.5


PROBLEMS = [
    theorems.cosines((1.0, 0.5), (0.3, 2.0), (2.0, -1.0)),
    theorems.adult(200, 1),
    theorems.adult(200, 5),
    theorems.sine_bowl(3.0),
    theorems.least_squares(),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_gradients_are_those_of_the_objective(problem):
    rng = np.random.default_rng(0)
    x, direction = problem.x1 + rng.normal(size=(4, len(problem.x1))), rng.normal(size=len(problem.x1))
    h = 1e-5
    difference = (problem.evaluate(x + h * direction).objective - problem.evaluate(x - h * direction).objective) / (
        2 * h
    )
    np.testing.assert_allclose(problem.evaluate(x).gradient @ direction, difference, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_the_constants_are_what_the_assumptions_say(problem):
    rng = np.random.default_rng(1)
    x = problem.x1 + rng.normal(size=(300, len(problem.x1)))
    y = x + 0.1 * rng.normal(size=x.shape)
    slope = np.linalg.norm(problem.evaluate(x).gradient - problem.evaluate(y).gradient, axis=1) / np.linalg.norm(
        x - y, axis=1
    )
    assert slope.max() <= problem.smoothness * (1 + 1e-12)
    if problem.pl_constant:
        gradient = (problem.evaluate(x).gradient ** 2).sum(axis=1)
        assert (gradient >= 2 * problem.pl_constant * problem.evaluate(x).objective * (1 - 1e-9)).all()
    else:
        pair = problem.noisy_pair(x, rng)
        assert (np.abs(pair) <= np.array(problem.lipschitz) + 1e-12).all()
        assert np.linalg.norm(pair, axis=-1).max() <= problem.lipschitz_norm + 1e-12


@pytest.mark.parametrize("problem", PROBLEMS[:3], ids=lambda p: p.name)
def test_noisy_gradients_are_unbiased_independent_and_of_the_stated_variance(problem):
    rng = np.random.default_rng(2)
    x = np.tile(problem.x1 + 0.3, (20_000, 1))
    mean, variance = problem.evaluate(x[:1]).gradient[0], problem.evaluate(x[:1]).variance[0]
    g, other = problem.noisy_pair(x, rng)
    error = np.sqrt(variance / len(x))
    assert (np.abs(g.mean(axis=0) - mean) <= 5 * error + 1e-12).all()
    np.testing.assert_allclose(((g - mean) ** 2).sum(axis=1).mean(), variance.sum(), rtol=0.05)
    inner = (g * other).sum(axis=1)
    assert abs(inner.mean() - (mean**2).sum()) <= 5 * inner.std() / np.sqrt(len(x))


@pytest.mark.parametrize("per_coordinate", [False, True])
def test_the_simulation_is_algorithm_1(per_coordinate):
    problem = theorems.cosines((1.0, 0.5), (1.0, 2.0), (2.0, -1.0))
    trace = theorems.simulate(problem, repeats=1, horizon=60, alpha=10.0, per_coordinate=per_coordinate, seed=3)
    rng = np.random.default_rng(3)
    pending = []

    def oracle(x):
        if not pending:
            pending.extend(problem.noisy_pair(x[None], rng)[:, 0])
        return pending.pop(0)

    run = reference.algorithm_1(
        oracle, problem.x1, 60, smoothness=problem.smoothness, alpha=10.0, blocks=range(2) if per_coordinate else None
    )
    np.testing.assert_allclose(trace.step_sizes[:, 0], run.step_sizes, rtol=1e-12)
    np.testing.assert_allclose(trace.objective[:, 0], problem.evaluate(run.iterates).objective, rtol=1e-12)


def test_using_one_gradient_twice_is_caught_by_theorem_1():
    honest = theorems.cosines((1.0,), (2.0,), (2.0,))
    twice = dataclasses.replace(honest, noisy_pair=lambda x, rng: np.stack([honest.noisy_pair(x, rng)[0]] * 2))
    trace = theorems.simulate(twice, repeats=500, horizon=50, alpha=10.0)
    assert theorems.excess_over_surrogate(twice, trace) > STANDARD_ERRORS
