"""The Kronecker metric: against the reference, in numpy, jax and torch, and what D promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from sgdol.metrics import RMS, Kronecker, Means
from sgdol.reference_kronecker import kronecker

SHAPES = [(4, 3), (3, 2, 2), (5,), (5, 6), (17, 2), (1, 4), (1,)]
"""Matrices, a convolution, a vector, a matrix too tall for its rows to be rotated, and two that are as in RMS."""
SIZES = [int(np.prod(shape)) for shape in SHAPES]
ENDS = np.cumsum(SIZES)[:-1]


def gradients(count, seed=0):
    """Correlated rows and columns, in scales that differ from tensor to tensor."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(sum(SIZES), sum(SIZES)))
    return rng.normal(size=(count, sum(SIZES))) @ mixing * np.repeat(10.0 ** rng.normal(size=len(SIZES)), SIZES)


def split(vector, make):
    pieces = np.split(np.asarray(vector), ENDS)
    return [make(piece.reshape(shape)) for piece, shape in zip(pieces, SHAPES, strict=True)]


def observed(past, make, metric=None, observe=None):
    """The states of all tensors after some gradients."""
    metric = metric or Kronecker()
    states = [metric.initial(zero) for zero in split(np.zeros(sum(SIZES)), make)]
    for g in past:
        parts = split(g, make)
        states = [(observe or metric.observe)(state, part) for state, part in zip(states, parts, strict=True)]
    return states


def operators(states, present, make, metric=None):
    """D of all tensors, with the means taken as a front end takes them."""
    metric, parts = metric or Kronecker(), split(present, make)
    means = [metric.mean_square(state, g) for state, g in zip(states, parts, strict=True)]
    overall = sum(mean * size for mean, size in zip(means, SIZES, strict=True)) / sum(SIZES)
    return [metric.operator(state, Means(mean, overall)) for state, mean in zip(states, means, strict=True)]


def sharp(D, g, make):
    parts = [np.asarray(d.sharp(part)).reshape(-1) for d, part in zip(D, split(g, make), strict=True)]
    return np.concatenate(parts)


LIBRARIES = {"numpy": np.asarray, "jax": jnp.asarray, "torch": torch.tensor}


@pytest.fixture(params=LIBRARIES)
def make(request):
    with jax.enable_x64(True):
        yield LIBRARIES[request.param]


@pytest.mark.parametrize("past", [0, 1, 3, 21])
def test_d_is_that_of_the_reference(make, past):
    recorded = gradients(past + 2)
    D, _ = kronecker(recorded[:past], recorded[past], SHAPES)
    found = operators(observed(recorded[:past], make), recorded[past], make)
    g = recorded[-1]
    np.testing.assert_allclose(sharp(found, g, make), np.linalg.solve(D, g), rtol=1e-10, atol=1e-10)
    flat = [np.asarray(d.flat(part)).reshape(-1) for d, part in zip(found, split(g, make), strict=True)]
    np.testing.assert_allclose(np.concatenate(flat), D @ g, rtol=1e-10, atol=1e-10)


def test_a_side_of_more_than_256_is_rotated_in_equal_blocks(make):
    """A side of 258 in two of 129: columns as in the reference, and rows as the columns of the transposed matrix.

    To 1e-5: of so few gradients most eigenvalues of a block are those of the ridge, and differ by 1e-4/n^2.
    """
    metric, recorded = Kronecker(), np.random.default_rng(4).normal(size=(4, 2, 258)) * np.logspace(0, 1, 258)
    one, other = metric.initial(make(np.zeros((33, 258)))), metric.initial(make(np.zeros((258, 33))))
    state, many = metric.initial(make(np.zeros((2, 258)))), np.random.default_rng(5).normal(size=(4, 33, 258))
    for g, rows in zip(recorded[:3], many[:3], strict=True):
        state = metric.observe(state, make(g))
        one, other = metric.observe(one, make(rows)), metric.observe(other, make(rows.T.copy()))
    assert state.right_basis.shape == other.left_basis.shape == (258, 129)
    mean = metric.mean_square(state, make(recorded[3]))
    found = np.asarray(metric.operator(state, Means(mean, mean)).sharp(make(recorded[3])))
    D, _ = kronecker(recorded[:3].reshape(3, -1), recorded[3].reshape(-1), [(2, 258)])
    np.testing.assert_allclose(found.reshape(-1), np.linalg.solve(D, recorded[3].reshape(-1)), rtol=1e-5)
    means = Means(metric.mean_square(one, make(many[3])), 1.0)
    sharp = np.asarray(metric.operator(one, means).sharp(make(many[3])))
    transposed = np.asarray(metric.operator(other, means).sharp(make(many[3].T.copy())))
    np.testing.assert_allclose(sharp, transposed.T, rtol=1e-5)


def test_eigenvectors_are_determined_also_where_a_factor_is_zero(make):
    """Of one gradient of 2 x 9, the 9 x 9 factor has 7 eigenvalues of 0: libraries would choose their own vectors."""
    g, metric = np.random.default_rng(3).normal(size=(2, 9)), Kronecker()
    state = metric.observe(metric.initial(make(np.zeros((2, 9)))), make(g))
    mean = metric.mean_square(state, make(g))
    found = np.asarray(metric.operator(state, Means(mean, mean)).sharp(make(np.ones((2, 9)))))
    D, _ = kronecker([g.reshape(-1)], g.reshape(-1), [(2, 9)])
    np.testing.assert_allclose(found.reshape(-1), np.linalg.solve(D, np.ones(18)), rtol=1e-7)


def test_the_usual_length_of_a_gradient_is_that_of_the_reference(make):
    recorded, metric = gradients(8), Kronecker()
    states = observed(recorded[:-1], make)
    D = operators(states, recorded[-1], make)
    usual = sum(float(metric.past_square(state, d)) for state, d in zip(states, D, strict=True))
    assert usual == pytest.approx(kronecker(recorded[:-1], recorded[-1], SHAPES)[1], rel=1e-10)


def test_a_compiled_update_is_that_of_numpy_and_is_compiled_once():
    with jax.enable_x64(True):
        recorded, metric, traces = gradients(25), Kronecker(), []

        @jax.jit
        def observe(state, g):
            traces.append(None)
            return metric.observe(state, g)

        one = jax.tree.map(jnp.asarray, metric.initial(jnp.zeros((4, 3))))
        other = metric.initial(np.zeros((4, 3)))
        for g in recorded:
            part = g[:12].reshape(4, 3)
            one, other = observe(one, jnp.asarray(part)), metric.observe(other, part)
        assert len(traces) == 1
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), one, other)


def test_bases_follow_after_updates_one_two_four_eight_and_every_tenth():
    metric = Kronecker()
    state, renewed = metric.initial(np.zeros((4, 3))), []
    for t, g in enumerate(gradients(45), start=1):
        before, state = state, metric.observe(state, g[:12].reshape(4, 3))
        if not np.array_equal(before.left_basis, state.left_basis):
            renewed.append(t)
    assert renewed == [1, 2, 4, 8, 10, 20, 30, 40]


def test_the_mean_square_of_d_is_one():
    recorded = gradients(9)
    D = operators(observed(recorded, np.asarray), recorded[0], np.asarray)
    squares = [np.sum(d.values**2) for d in D]
    assert sum(squares) / sum(SIZES) == pytest.approx(1, rel=1e-12)


def test_the_first_update_has_a_constant_in_each_tensor(make):
    g = gradients(1)[0]
    D = operators(observed([], make), g, make)
    for d, part in zip(D, split(g, np.asarray), strict=True):
        ratios = np.asarray(d.sharp(make(part))) / part
        np.testing.assert_allclose(ratios, ratios.reshape(-1)[0], rtol=1e-12)


def test_vectors_scalars_and_single_rows_are_as_in_rms():
    recorded = gradients(12)
    D = operators(observed(recorded, np.asarray), recorded[0], np.asarray)
    same = operators(observed(recorded, np.asarray, RMS()), recorded[0], np.asarray, RMS())
    for i in (2, 5, 6):
        np.testing.assert_allclose(D[i].values, same[i].values, rtol=1e-12)


@pytest.mark.parametrize(
    ("shape", "left", "right"),
    [
        ((4, 3), True, True),
        ((600, 3), False, True),
        ((3, 600), True, False),
        ((17, 2), False, True),
        ((16, 2), True, True),
    ],
)
def test_a_side_that_is_too_long_or_too_tall_is_not_rotated(shape, left, right):
    state = Kronecker().initial(np.zeros(shape))
    assert isinstance(state.left_basis, np.ndarray) == left
    assert isinstance(state.right_basis, np.ndarray) == right


def test_a_matrix_of_which_no_side_is_rotated_is_as_in_rms():
    assert Kronecker().initial(np.zeros((600, 513))).square.shape == (600, 513)


@pytest.mark.parametrize("observed_after", [0, 1])
def test_signs_and_order_of_the_eigenvectors_do_not_matter(observed_after):
    """For D now, and after one more update, at which the bases are renewed."""
    rng, metric = np.random.default_rng(1), Kronecker()
    recorded = rng.normal(size=(9, 4, 3))
    state = metric.initial(np.zeros((4, 3)))
    for g in recorded[:7]:
        state = metric.observe(state, g)
    order, signs = np.array([2, 0, 3, 1]), np.array([1.0, -1.0, -1.0, 1.0])
    other = state._replace(left_basis=signs * state.left_basis[:, order], rows=state.rows[order])
    for g in recorded[7 : 7 + observed_after]:
        state, other = metric.observe(state, g), metric.observe(other, g)
    means = Means(metric.mean_square(state, recorded[0]), metric.mean_square(state, recorded[0]))
    one, two = (metric.operator(s, means).sharp(recorded[8]) for s in (state, other))
    np.testing.assert_allclose(one, two, rtol=1e-12)


def test_d_does_not_change_with_the_unit_of_the_gradients():
    recorded = gradients(12)
    for scale in (2.0**-50, 2.0**50):
        one, other = (
            sharp(operators(observed(s * recorded, np.asarray), s * recorded[0], np.asarray), recorded[1], np.asarray)
            for s in (1.0, scale)
        )
        np.testing.assert_array_equal(one, other)


def test_matrices_of_one_shape_may_be_stacked(make):
    metric, recorded = Kronecker(), np.random.default_rng(2).normal(size=(9, 3, 4, 5))
    apart = [metric.initial(make(np.zeros((4, 5)))) for _ in range(3)]
    together = type(apart[0])(*(v if not hasattr(v, "ndim") else make(np.stack([np.asarray(v)] * 3)) for v in apart[0]))
    for g in recorded:
        apart = [metric.observe(state, make(part)) for state, part in zip(apart, g, strict=True)]
        together = metric.observe(together, make(g))
    means = metric.mean_square(together, make(recorded[0]))
    assert means.shape == (3,)
    found = np.asarray(metric.operator(together, Means(means, means[0])).sharp(make(recorded[0])))
    for i, state in enumerate(apart):
        mean = metric.mean_square(state, make(recorded[0, i]))
        expected = metric.operator(state, Means(mean, means[0])).sharp(make(recorded[0, i]))
        np.testing.assert_allclose(found[i], np.asarray(expected), rtol=1e-9)


def test_a_tensor_that_has_had_no_gradient_stays_in_bounds():
    recorded = gradients(5)
    recorded[:, :12] = 0
    D = operators(observed(recorded, np.asarray), recorded[0], np.asarray)
    np.testing.assert_allclose(D[0].values, RMS().floor, rtol=1e-12)
    g = gradients(1, seed=1)[0]
    expected = np.linalg.solve(kronecker(recorded, recorded[0], SHAPES)[0], g)
    np.testing.assert_allclose(sharp(D, g, np.asarray), expected, rtol=1e-10)
