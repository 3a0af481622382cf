"""The reference of SGDOL without M: by hand where a hand suffices, and by what it must not do."""

import numpy as np
import pytest

from sgdol.free import Rule, Settings, next_probe
from sgdol.reference_free import sgdol_free


def parabola(curvature: float = 3.0):
    def oracle(t, x):
        gradient = curvature * x
        return float(curvature * x @ x / 2), np.array([gradient, gradient])

    return oracle


def test_the_first_two_steps_by_hand():
    """F = 3 x^2/2 from x = 1: M = 3 exactly; the first step is a tenth of what that allows, the next twice as long."""
    run = sgdol_free(parabola(), [1.0], 2, momentum=0.0)
    assert run.smoothness[0] == pytest.approx(3.0, rel=1e-14)
    # eta = 1/M = 1/3, a step of 1; of that a tenth
    assert run.iterates[:, 0] == pytest.approx([1.0, 0.9, 0.7], rel=1e-14)
    assert run.step_sizes == pytest.approx([0.1 / 3, 0.2 / 2.7], rel=1e-14)
    # x, once more to check the closure, probes at 1/64 (too short to tell) and 1/8; then x and one look-back
    assert run.evaluations == 4 + 2
    assert run.averages[:, 0] == pytest.approx([1.0, 1.0 + 9 / 10 * (0.9 - 1.0)], rel=1e-14)


def test_probes_settle_where_the_gradient_changes_by_an_eighth():
    assert next_probe(1.0, 1 / 8) is None
    assert next_probe(1.0, 1 / 64) == 8.0
    assert next_probe(1.0, 4.0) == 1 / 32
    assert next_probe(1.0, 0.0) == 64.0
    assert next_probe(1.0, np.inf) == next_probe(1.0, 1e9) == 1 / 64


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_any_curvature_is_found_from_the_first_gradient(scale):
    run = sgdol_free(parabola(scale), [1.0, 2.0], 1)
    assert run.smoothness[0] == pytest.approx(scale, rel=1e-6)


def test_without_noise_it_converges():
    curvatures = np.logspace(0, 2, 5)

    def oracle(t, x):
        return float(curvatures @ x**2 / 2), np.array([curvatures * x] * 2)

    run = sgdol_free(oracle, np.ones(5), 300)
    assert np.linalg.norm(run.averages[-1]) < 1e-3
    assert run.evaluations < 1.2 * 300


def test_a_batch_that_is_not_finite_anywhere_is_skipped():
    def oracle(t, x):
        value, gradients = parabola()(t, x)
        return (np.nan, gradients * np.nan) if t in (0, 3, 15) else (value, gradients)

    run = sgdol_free(oracle, [1.0], 60)
    assert run.skipped == 3
    for t in (0, 3, 15):
        assert run.iterates[t + 1] == run.iterates[t]
        assert run.step_sizes[t] == 0
    assert abs(run.averages[-1, 0]) < 0.1


def test_a_point_that_is_not_finite_is_left():
    """Beyond 2.5 there is nothing: steps that end there are taken back, and the slope is followed up to there."""

    def oracle(t, x):
        if x[0] > 2.5:
            return np.nan, np.full((2, 1), np.nan)
        return float(-x[0] + 1e-3 * x[0] ** 2), np.array([[-1 + 2e-3 * x[0]]] * 2)

    run = sgdol_free(oracle, [1.0], 60)
    assert run.rejections > 0
    assert run.skipped == 0
    assert 2 < run.averages[-1, 0] <= 2.5
    assert np.isfinite(run.iterates).all()


def test_the_rule_never_sees_the_gradients_that_it_scales():
    rule = Rule(updates=3, alpha=1.0, smoothness=2.0, longest=100.0, signal=1.0, noise=1.0)
    eta = rule.choose_step_size(1.0, 0.0, Settings())
    rule.observe(u=-5.0, n=50.0)
    assert eta == rule.step_size
    assert rule.choose_step_size(1.0, 0.0, Settings()) < eta
