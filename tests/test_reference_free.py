"""The reference of SGDOL without M: by hand where a hand suffices, and by what it must not do."""

import numpy as np
import pytest

from sgdol import free, probing
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
    start = probing.Bracket(1.0)
    assert probing.next_probe(start, 1 / 8).told
    assert probing.next_probe(start, 1 / 8).curvature == 1 / 8
    assert probing.next_probe(start, 1 / 64).length == 8.0
    assert probing.next_probe(start, 4.0).length == 1 / 32
    assert probing.next_probe(start, 0.0).length == 64.0
    assert probing.next_probe(start, np.inf).length == probing.next_probe(start, 1e9).length == 1 / 64
    assert probing.next_probe(start, np.nan).length == 1 / 64


def test_a_search_never_believes_a_probe_that_was_too_long():
    """A gradient that is flat up to 1 and a wall from there: no probe tells, and M is that of the longest short one."""
    bracket = probing.Bracket(1 / 8)
    while not bracket.told and bracket.count < 8:
        bracket = probing.next_probe(bracket, 0.0 if bracket.length < 1 else 1e9)
    assert not bracket.told
    assert 0.9 < bracket.short < 1 <= bracket.long < 1.1
    assert bracket.curvature == 1 / 32 / bracket.short


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


def test_the_step_never_sees_the_gradients_that_it_scales():
    state = free.State(updates=3, first_norm=1.0, smoothness=2.0, longest=100.0, signal=1.0, noise=1.0)
    chosen = free.choose_step(state, 1.0)
    noisy = free.observe(chosen, norm=7.0, squares=8.0, k=2)
    assert noisy.step_size == chosen.step_size
    assert free.choose_step(noisy, 1.0).step_size < chosen.step_size


@pytest.mark.parametrize(("metric", "left"), [("rms", 1e-6), ("euclidean", 1.2)])
def test_a_metric_is_worth_having_where_the_axes_differ(metric, left):
    """Condition 10^4 along the axes, without noise: D learns the scales; Euclid's norm does not, and 1.18 are left."""
    curvatures = np.logspace(0, 4, 5)

    def oracle(t, x):
        return float(curvatures @ x**2 / 2), np.array([curvatures * x] * 2)

    run = sgdol_free(oracle, np.ones(5), 300, metric=metric)
    assert oracle(0, run.averages[-1])[0] < left
    assert metric == "rms" or oracle(0, run.averages[-1])[0] > 1


def test_a_tensor_that_has_had_no_gradient_so_far_does_not_stop_the_others():
    """A product of two factors, one of them 0 at first: it has no gradient of its own scale to be divided by."""

    def oracle(t, x):
        a, b = x[:2], x[2:]
        residual = a @ b - 1
        return float(residual**2 / 2), np.array([np.concatenate([residual * b, residual * a])] * 2)

    run = sgdol_free(oracle, [1.0, -0.5, 0.0, 0.0], 100, tensors=[2, 2])
    assert oracle(0, run.averages[-1])[0] < 1e-6


def test_a_gradient_counts_as_at_most_twice_the_usual_length():
    state = free.State(updates=20, first_norm=1.0, usual_gradient=1.0, usual_weight=1.0)
    assert free.clipping(state, 1.9) == 1
    assert free.clipping(state, 8.0) == 1 / 4
    assert free.clipping(state, 8.0, usual=2.0) == 1 / 2
    assert free.clipping(state, 0.0) == 1
    assert free.clipping(state._replace(updates=19), 8.0) == 1
    assert free.clipping(state._replace(usual_gradient=0.0), 8.0) == 1  # a state that was saved without it


def test_a_clipped_gradient_counts_once_in_the_signal_and_twice_in_its_length():
    """||g|| = 8, two equal halves: u = n = 64, of which a quarter and a sixteenth count."""
    state = free.State(updates=20, first_norm=1.0, usual_gradient=1.0, usual_weight=1.0)
    seen = free.observe(state, 8.0, 8 / 2**0.5, 2, clipped=1 / 4)
    assert seen.signal == pytest.approx(16)
    assert seen.noise == pytest.approx(4 - 16)
    assert seen.largest_gradient == 8
    assert seen.usual_weight == 1.99
    assert seen.usual_gradient**2 == pytest.approx((0.99 * 1 + 2**2) / 1.99)


def test_young_runs_look_back_more_often():
    state = free.State(step_size=1.0, largest_gradient=1.0)
    for updates, interval in ((6, 1), (12, 2), (13, 3), (60, 10), (72, 12), (1000, 12)):
        for since in range(interval + 1):
            _, looks = free.wants_look_back(state._replace(updates=updates, since=since), 1.0)
            assert looks == (since + 1 >= interval), (updates, since)


def test_a_look_back_costs_less_than_a_seventh_more_gradients():
    """The aim is 15 % in runs of 265 steps and more."""
    rng = np.random.default_rng(0)

    def oracle(t, x):
        return float(x @ x / 2), x + 0.1 * rng.normal(size=(2, 2))

    assert sgdol_free(oracle, [1.0, 2.0], 300).evaluations <= 1.15 * 300
