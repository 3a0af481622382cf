"""The surrogate loss and the pair (u, n), against definitions written out as sums."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import namespace

from sgdol import surrogate
from sgdol.surrogate import ESTIMATORS, derivative, loss, momentum_signal, statistics, symmetric_signal

fixed = settings(deadline=None, derandomize=True, max_examples=50)
numbers = st.floats(-100, 100)
lengths = st.floats(0, 100)
rates = st.floats(0.01, 100)

BLOCK_ARRAYS = {
    "whole": None,
    "coordinate": "coordinate",
    "two blocks": np.array([[0, 0, 1], [1, 0, 1]]),
    "an empty block between": np.array([[2, 2, 2], [0, 0, 2]]),
}


def gradients(k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(k, 2, 3))


def blocks_of(blocks, shape: tuple[int, ...]) -> np.ndarray:
    """The block number of every coordinate, in every notation."""
    if blocks is None:
        return np.zeros(shape, dtype=int)
    return np.arange(np.prod(shape)).reshape(shape) if isinstance(blocks, str) else blocks


def brute_force(g: np.ndarray, estimator: str, block_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(u, n) per block by the definition: a double sum over pairs of gradients, coordinate by coordinate."""
    k = len(g)
    u, n = np.zeros(block_of.max() + 1), np.zeros(block_of.max() + 1)
    for c in np.ndindex(block_of.shape):
        b = block_of[c]
        if estimator == "paper":
            u[b] += g[0][c] * g[1][c]
            n[b] += g[0][c] ** 2
        else:
            u[b] += sum(g[i][c] * g[j][c] for i in range(k) for j in range(k) if i != j) / (k * (k - 1))
            n[b] += sum(g[i][c] * g[j][c] for i in range(k) for j in range(k)) / k**2
    return u, n


# The loss -------------------------------------------------------------------------------------------------------------


@fixed
@given(eta=st.floats(0, 10), u=numbers, n=lengths, smoothness=rates)
def test_derivative_is_the_slope_of_the_loss(eta, u, n, smoothness):
    # A central difference of a quadratic has no truncation error, so only rounding remains: that of values of this
    # size, divided by the width.
    width = 0.5
    high, low = loss(eta + width, u, n, smoothness), loss(eta - width, u, n, smoothness)
    size = smoothness * (eta + 1) ** 2 * n + (eta + 1) * abs(u)
    assert derivative(eta, u, n, smoothness) == pytest.approx((high - low) / (2 * width), abs=1e-15 * 8 * size + 1e-300)


def test_loss_is_equation_3_on_vectors():
    g, h = gradients(2).reshape(2, -1)
    expected = 10.0 * 0.3**2 / 2 * np.sum(g**2) - 0.3 * np.sum(g * h)
    assert loss(0.3, np.dot(g, h), np.dot(g, g), 10.0) == pytest.approx(expected, rel=1e-14, abs=0)


# The statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", BLOCK_ARRAYS.values(), ids=BLOCK_ARRAYS)
@pytest.mark.parametrize("k", [2, 3, 4, 5])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_statistics_are_the_double_sums_and_the_direction_is_the_mean_or_the_first_gradient(estimator, k, blocks):
    g = gradients(k)
    u, n = brute_force(g, estimator, blocks_of(blocks, g.shape[1:]))
    found = statistics(g, estimator=estimator, blocks=blocks)
    # Numbers of order one summed over at most 6 coordinates and 25 pairs: a few hundred roundings.
    np.testing.assert_allclose(np.ravel(found.u), u, rtol=0, atol=1e-13)
    np.testing.assert_allclose(np.ravel(found.n), n, rtol=0, atol=1e-13)
    np.testing.assert_allclose(found.direction, g[0] if estimator == "paper" else sum(g) / k, rtol=0, atol=1e-15)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_scalar_parameter_is_its_own_block(estimator):
    found = statistics(np.array([2.0, 3.0]), estimator=estimator, blocks="coordinate")
    assert (found.u, found.n) == (6.0, {"symmetric": 6.25, "paper": 4.0}[estimator])


@fixed
@given(scale=st.floats(1e-3, 1e3), k=st.integers(2, 5), seed=st.integers(0, 1000))
def test_symmetric_signal_is_the_statistics_u_for_any_scaling_of_the_loss(scale, k, seed):
    g = gradients(k, seed)
    c = scale * g  # what a backward of the loss times ``scale`` contributes
    signal = symmetric_signal(np.sum(sum(c) ** 2), np.sum(c**2), k)
    # In the scale of the accumulated sum, which is ``scale * k`` times the mean; cancellation costs the size of Q.
    np.testing.assert_allclose(signal / (scale * k) ** 2, statistics(g).u, rtol=0, atol=1e-14 * np.sum(g**2))


# What the theorems need of them: exact expectations -------------------------------------------------------------------

# Gradients that are multiples of 60, drawn with probabilities 1/6, 2/6 and 3/6: every quotient by k, k^2, k - 1 (k = 2
# to 5) and by 6^2 is then an integer far below 2^53, so that float64 sums over all k-tuples are exact.
ATOMS = 60.0 * np.array([[1.0, -2.0, 0.0], [3.0, 1.0, -1.0], [-2.0, 2.0, 5.0]])
WEIGHTS = np.array([1.0, 2.0, 3.0])


def enumerate_all(k: int):
    """Every k-tuple of gradients with its weight; the weights sum to 6^k."""
    for tuple_ in itertools.product(range(3), repeat=k):
        yield ATOMS[list(tuple_)], float(np.prod(WEIGHTS[list(tuple_)]))


@pytest.mark.parametrize("blocks", [None, "coordinate"])
@pytest.mark.parametrize("k", [2, 3, 4, 5])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_expectation_of_u_is_the_squared_gradient(estimator, k, blocks):
    total = sum(weight * statistics(g, estimator=estimator, blocks=blocks).u for g, weight in enumerate_all(k))
    squares = (WEIGHTS @ ATOMS) ** 2 * 6.0 ** (k - 2)
    np.testing.assert_array_equal(total, squares if blocks else np.sum(squares))


@pytest.mark.parametrize("k", [2, 3])
def test_the_expectation_of_the_momentum_signal_is_the_direction_times_the_gradient(k):
    beta, correction, past = 0.75, 0.578125, np.array([7.0, -3.0, 2.0])  # the third step: 1 - beta^3
    signal = inner = 0.0
    gradient = WEIGHTS @ ATOMS / 6
    for g, weight in enumerate_all(k):
        found = statistics(g)
        signal += weight / 6**k * momentum_signal(past @ found.direction, found.u, beta, correction)
        inner += weight / 6**k * (beta * past + (1 - beta) * found.direction) @ gradient / correction
    assert signal == pytest.approx(inner, rel=1e-13, abs=0)


# Array libraries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", BLOCK_ARRAYS.values(), ids=BLOCK_ARRAYS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_every_array_library_gives_the_same_numbers_in_its_own_kind(library, dtype, estimator, blocks):
    """Sums of six numbers of order one, in another order."""
    expected = statistics(gradients(3), estimator=estimator, blocks=blocks)
    with namespace(library) as (make, kind):
        own_blocks = make(blocks) if isinstance(blocks, np.ndarray) else blocks
        found = statistics(make(gradients(3).astype(dtype)), estimator=estimator, blocks=own_blocks)
        for value, number in zip(found, expected, strict=True):
            assert isinstance(value, (kind, np.generic) if library == "numpy" else kind)
            assert str(value.dtype).endswith(dtype)
            np.testing.assert_allclose(np.asarray(value), number, rtol=0, atol=1e-14 if dtype == "float64" else 1e-5)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("function", ["loss", "derivative"])
def test_loss_and_derivative_work_on_arrays_of_every_library(function, library):
    eta, u, n = np.array([0.0, 0.1, 0.2]), np.array([1.0, -1.0, 2.0]), np.array([1.0, 2.0, 4.0])
    expected = [getattr(surrogate, function)(*v, 10.0) for v in zip(eta.tolist(), u.tolist(), n.tolist(), strict=True)]
    with namespace(library) as (make, kind):
        found = getattr(surrogate, function)(make(eta), make(u), make(n), 10.0)
        assert isinstance(found, kind)
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-15)


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "options", "message"),
    [
        *(
            (1, {"estimator": each}, "must hold at least 2 independent gradients along axis 0, got 1")
            for each in ESTIMATORS
        ),
        (2, {"estimator": "unbiased"}, r"estimator must be one of .*'symmetric'.*'paper'.*got 'unbiased'"),
        (2, {"blocks": np.zeros(6, int)}, r"blocks must have the shape of one gradient, \(2, 3\), got \(6,\)"),
        (2, {"blocks": "tensor"}, r'blocks must be None, "coordinate" or an integer array, got \'tensor\''),
    ],
)
def test_bad_input_is_refused_by_name_and_value_with_what_is_allowed(k, options, message):
    with pytest.raises(ValueError, match=message):
        statistics(gradients(k), **options)
