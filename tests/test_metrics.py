"""Metrics: against the reference, which recomputes D from the whole history, and what D promises."""

import numpy as np
import pytest

from sgdol import metrics, reference
from sgdol.metrics import AdaGrad, Euclidean, Means, Metric, Squares

SIZES = (3, 4, 1)
TENSORS = np.repeat(range(len(SIZES)), SIZES)


def diagonals(metric, gradients: np.ndarray, present: np.ndarray) -> np.ndarray:
    """D of three tensors after some gradients, as a front end takes it."""
    states, parts = [], np.split(present, np.cumsum(SIZES)[:-1])
    for i, size in enumerate(SIZES):
        state = metric.initial(np.zeros(size, dtype=present.dtype))
        for g in gradients:
            state = metric.observe(state, np.split(g, np.cumsum(SIZES)[:-1])[i])
        states.append(state)
    means = [metric.mean_square(state, g) for state, g in zip(states, parts, strict=True)]
    overall = sum(mean * size for mean, size in zip(means, SIZES, strict=True)) / sum(SIZES)
    return np.concatenate(
        [metric.operator(s, Means(m, overall)).flat(np.ones(len(s.square))) for s, m in zip(states, means, strict=True)]
    )


@pytest.mark.parametrize("past", [0, 1, 2, 30])
@pytest.mark.parametrize(
    ("metric", "options"),
    [
        (metrics.RMS(), {}),
        (AdaGrad(), {"decay": 1.0}),
        (metrics.RMS(decay=0.5, tensor=2.0, overall=0.3), {"decay": 0.5, "tensor": 2.0, "overall": 0.3}),
    ],
)
def test_the_diagonal_is_that_of_the_reference(metric, options, past):
    gradients = np.random.default_rng(0).normal(size=(past + 1, sum(SIZES))) * 10.0 ** np.arange(-3.0, 5.0)
    expected = reference.diagonal(gradients[:-1], gradients[-1], TENSORS, **options)
    np.testing.assert_allclose(diagonals(metric, gradients[:-1], gradients[-1]), expected, rtol=1e-13)


def test_a_tensor_without_any_gradient_has_the_floor():
    gradients = np.random.default_rng(2).normal(size=(5, sum(SIZES)))
    gradients[:, TENSORS == 1] = 0
    found = diagonals(metrics.RMS(), gradients, gradients[0])
    np.testing.assert_allclose(found[TENSORS == 1], metrics.RMS().floor, rtol=1e-13)


@pytest.mark.parametrize("past", [0, 3])
def test_gradients_that_are_all_zero_leave_euclids_norm(past):
    zeros = np.zeros((past, sum(SIZES)))
    np.testing.assert_allclose(diagonals(metrics.RMS(), zeros, np.zeros(sum(SIZES))), 1.0, rtol=1e-13)


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
def test_the_diagonal_does_not_change_with_the_unit_of_the_gradients(scale):
    gradients = np.random.default_rng(3).normal(size=(6, sum(SIZES)))
    one, other = (diagonals(metrics.RMS(), g[:-1], g[-1]) for g in (gradients, scale * gradients))
    np.testing.assert_array_equal(one, other)


def test_sharp_and_flat_undo_each_other():
    metric, g = metrics.RMS(), np.array([1.0, -2.0, 0.5])
    operator = metric.operator(Squares(np.array([3.0, 0.1, 7.0]), 4.0), Means(2.0, 3.0))
    np.testing.assert_allclose(operator.flat(operator.sharp(g)), g, rtol=1e-15)


@pytest.mark.parametrize("name", metrics.METRICS)
def test_every_metric_that_has_a_name_is_a_metric(name):
    assert isinstance(metrics.get(name), Metric)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decay": 0.0}, r"decay must be in \(0, 1\], got 0.0"),
        ({"decay": 1.5}, r"decay must be in \(0, 1\], got 1.5"),
        ({"tensor": 0.0}, "tensor must be positive and finite, got 0.0"),
        ({"overall": -1.0}, "overall must be finite and at least 0, got -1.0"),
    ],
)
def test_a_bad_constant_is_refused_by_name_and_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        metrics.RMS(**arguments)


def test_a_bad_metric_is_refused_by_name():
    names = "'euclidean', 'rms', 'adagrad', 'kronecker'"
    with pytest.raises(ValueError, match=f"metric must be one of {names} or an object, got 'l2'"):
        metrics.get("l2")
    with pytest.raises(TypeError, match="metric must be a name or an object"):
        metrics.get(Euclidean)
