"""The reference itself: against numbers worked out by hand, and against what the paper says of it."""

import numpy as np
import pytest

from sgdol import reference

# By hand, one coordinate, M = 2, alpha = 1, the paper's estimator:
#   t   eta_t                                              g    g'    u = g g'   n = g^2   x_{t+1} = x_t - eta_t g
#   1   1 / (2 * 1) = 1/2                                  1     7        7         1        0 - 1/2     = -0.5
#   2   (1 + 7) / (2 (1 + 1)) = 2, above 2/M: 1            2    -8      -16         4     -0.5 - 2       = -2.5
#   3   (1 - 9) / (2 (1 + 5)) = -2/3, below 0: 0           3     4       12         9     -2.5 - 0       = -2.5
#   4   (1 + 3) / (2 (1 + 14)) = 2/15                     15     1       15       225     -2.5 - 2       = -4.5
PAPER = {
    "gradients": [[[1.0], [7.0]], [[2.0], [-8.0]], [[3.0], [4.0]], [[15.0], [1.0]]],
    "step_sizes": [0.5, 1.0, 0.0, 2 / 15],
    "u": [[7.0], [-16.0], [12.0], [15.0]],
    "n": [[1.0], [4.0], [9.0], [225.0]],
    "iterates": [[0.0], [-0.5], [-2.5], [-2.5], [-4.5]],
}

# By hand, two coordinates, M = 1, alpha = 2, the symmetric estimator of two gradients:
#   t   eta_t                               g        g'        mean      u = <g, g'>   n     x_{t+1}
#   1   1                                 (1, 0)   (1, 2)     (1, 1)         1         2    (-1, -1)
#   2   (2 + 1) / (2 + 2) = 3/4           (2, 0)   (-2, 4)    (0, 2)        -4         4    (-1, -2.5)
#   3   (2 - 3) / (2 + 6) < 0: 0          (4, 4)   (4, 4)     (4, 4)        32        32    (-1, -2.5)
#   4   (2 + 29) / (2 + 38) = 31/40       (0, 0)   (20, 40)   (10, 20)       0       500    (-8.75, -18)
SYMMETRIC = {
    "gradients": [[[1, 0], [1, 2]], [[2, 0], [-2, 4]], [[4, 4], [4, 4]], [[0, 0], [20, 40]]],
    "step_sizes": [1.0, 0.75, 0.0, 0.775],
    "u": [[1.0], [-4.0], [32.0], [0.0]],
    "n": [[2.0], [4.0], [32.0], [500.0]],
    "iterates": [[0.0, 0.0], [-1.0, -1.0], [-1.0, -2.5], [-1.0, -2.5], [-8.75, -18.0]],
}


def vectors(horizon: int = 12, k: int = 2, d: int = 3, seed: int = 0) -> np.ndarray:
    """Noisy gradients with a common mean, so that step sizes move and stay off the bounds most of the time."""
    return 1 + np.random.default_rng(seed).normal(size=(horizon, k, d))


@pytest.mark.parametrize("quantity", ["step_sizes", "u", "n", "iterates"])
def test_the_papers_estimator_by_hand_through_both_clips(quantity):
    run = reference.replay(PAPER["gradients"], [0.0], smoothness=2.0, alpha=1.0)
    # One rounding in 2/15; everything else is exact in binary.
    np.testing.assert_allclose(getattr(run, quantity), PAPER[quantity], rtol=2e-16)


@pytest.mark.parametrize("quantity", ["step_sizes", "u", "n", "iterates"])
def test_the_symmetric_estimator_by_hand(quantity):
    run = reference.replay(SYMMETRIC["gradients"], [0.0, 0.0], smoothness=1.0, alpha=2.0, estimator="symmetric")
    np.testing.assert_allclose(getattr(run, quantity), SYMMETRIC[quantity], rtol=2e-16)


def test_three_gradients_by_hand():
    """g = 1, 2, 6: the mean is 3 and the mean of the products 2, 6 and 12 is 20/3."""
    run = reference.replay([[[1.0], [2.0], [6.0]]], [0.0], smoothness=1.0, alpha=1.0, estimator="symmetric")
    assert (run.n[0, 0], run.iterates[1, 0]) == (9.0, -3.0)
    assert run.u[0, 0] == pytest.approx(20 / 3, rel=1e-15, abs=0)


@pytest.mark.parametrize("estimator", ["paper", "symmetric"])
@pytest.mark.parametrize("t", [0, 4, 10])
def test_a_step_size_sees_the_gradients_just_before_and_not_its_own_nor_later_ones(estimator, t):
    gradients = vectors()
    nearby, later = gradients.copy(), gradients.copy()
    nearby[t, 0] += 1
    later[t:] *= -3
    one, *others = (
        reference.replay(g, np.zeros(3), smoothness=4.0, alpha=1.0, estimator=estimator).step_sizes
        for g in (gradients, nearby, later)
    )
    for other in others:
        np.testing.assert_array_equal(one[: t + 1], other[: t + 1])
    assert one[t + 1] != others[0][t + 1]


def test_the_step_size_is_computed_before_the_gradients_are_received():
    """Round t draws exactly k gradients, at x_t: the order of the lines of Algorithm 1."""
    asked = []

    def oracle(x):
        asked.append(x.copy())
        return x - len(asked)

    run = reference.algorithm_1(oracle, [1.0, 2.0], 5, smoothness=2.0, alpha=1.0, k=3, estimator="symmetric")
    np.testing.assert_array_equal(asked, np.repeat(run.iterates[:5], 3, axis=0))


# The output -----------------------------------------------------------------------------------------------------------


def outputs(horizon: int, seeds: range) -> list[int]:
    return [
        reference.algorithm_1(lambda x: x, [1.0], horizon, smoothness=1.0, alpha=1.0, seed=seed).output
        for seed in seeds
    ]


def test_the_output_is_uniform():
    # Pearson's chi-square with 3 degrees of freedom: above 16.27 with probability 0.1 % if uniform. The seeds are
    # fixed, so it never fails by chance; an output that favours one end by a fifth has an expected value beyond it, and
    # x_{T+1}, at which no gradient was taken, would add 250.
    counts = np.bincount(outputs(4, range(1000)))
    assert np.sum((counts - 250) ** 2 / 250) < 16.27


def test_the_seed_decides_the_output_and_nothing_else():
    one, same, other = (
        reference.algorithm_1(lambda x: x, [1.0], 300, smoothness=1.0, alpha=1.0, seed=seed) for seed in (3, 3, 4)
    )
    assert one.output == same.output != other.output
    np.testing.assert_array_equal(one.iterates, other.iterates)


def test_no_rounds_return_the_first_point():
    run = reference.algorithm_1(lambda x: x, [1.0], 0, smoothness=1.0, alpha=1.0)
    assert run.iterates[run.output] == [1.0]


# Blocks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_of", [[1, 0, 1, 1, 0], range(5)], ids=["two", "one per coordinate"])
@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("estimator", ["paper", "symmetric"])
def test_blocks_are_one_run_each(estimator, k, block_of):
    gradients, x1, block_of = vectors(d=5, k=k), np.arange(5.0), np.array(block_of)
    options = {"smoothness": 4.0, "alpha": 0.5, "estimator": estimator}
    together = reference.replay(gradients, x1, blocks=block_of, **options)
    for b in set(block_of):
        alone = reference.replay(gradients[:, :, block_of == b], x1[block_of == b], **options)
        # Sums over coordinates may be taken in another order.
        np.testing.assert_allclose(together.iterates[:, block_of == b], alone.iterates, rtol=1e-13, atol=1e-13)


def test_a_single_block_is_the_global_step_size():
    gradients = vectors()
    one = reference.replay(gradients, np.zeros(3), smoothness=4.0, alpha=0.5)
    other = reference.replay(gradients, np.zeros(3), smoothness=4.0, alpha=0.5, blocks=[0, 0, 0])
    np.testing.assert_array_equal(one.iterates, other.iterates)


# alpha=None -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["paper", "symmetric"])
def test_alpha_none_is_the_first_squared_direction(estimator):
    gradients = vectors()
    found = reference.replay(gradients, np.zeros(3), smoothness=4.0, alpha=None, estimator=estimator)
    expected = reference.replay(gradients, np.zeros(3), smoothness=4.0, alpha=found.n[0, 0], estimator=estimator)
    # The share of the only block, n * d / d, may round.
    np.testing.assert_allclose(found.iterates, expected.iterates, rtol=1e-13, atol=1e-13)


def test_alpha_none_gives_every_block_its_share_by_size():
    gradients, block_of = vectors(d=4), np.array([0, 1, 1, 1])
    found = reference.replay(gradients, np.zeros(4), smoothness=4.0, alpha=None, blocks=block_of)
    for b, share in ((0, 1 / 4), (1, 3 / 4)):
        alpha = share * np.sum(gradients[0, 0] ** 2)
        alone = reference.replay(
            gradients[:, :, block_of == b], np.zeros(np.sum(block_of == b)), smoothness=4.0, alpha=alpha
        )
        np.testing.assert_allclose(found.iterates[:, block_of == b], alone.iterates, rtol=1e-13, atol=1e-13)


def test_alpha_none_waits_for_a_direction_that_is_not_zero():
    gradients = vectors()
    late = np.concatenate([np.zeros((3, 2, 3)), gradients])
    found = reference.replay(late, np.zeros(3), smoothness=4.0, alpha=None)
    expected = reference.replay(gradients, np.zeros(3), smoothness=4.0, alpha=None)
    np.testing.assert_array_equal(found.step_sizes[:3], 0.25)
    # Sums over the rounds may be taken in another order.
    np.testing.assert_allclose(found.iterates[3:], expected.iterates, rtol=1e-13, atol=1e-13)


# FTRL -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("u", "n", "expected"),
    [
        ([], [], 0.5),
        ([7.0], [1.0], 1.0),
        ([7.0, -16.0], [1.0, 4.0], 0.0),
        ([7.0, -16.0, 12.0], [1.0, 4.0, 9.0], 2 / 15),
    ],
)
def test_the_closed_form_and_the_numerical_argmin_by_hand(u, n, expected):
    """M = 2, alpha = 1: the table at the top."""
    assert reference.step_size(u, n, smoothness=2.0, alpha=1.0) == pytest.approx(expected, rel=1e-15, abs=0)
    # Values of order 10 near the minimum tell the minimiser apart to about sqrt(10 eps) = 5e-8.
    assert reference.minimise_with_ftrl(u, n, smoothness=2.0, alpha=1.0) == pytest.approx(expected, abs=2e-7)


@pytest.mark.parametrize("target", [-1.0, 0.0, 0.3, 2.0, 5.0])
def test_argmin_finds_the_minimiser_inside_and_at_the_ends(target):
    found = reference.argmin(lambda v: (v - target) ** 2, 0.0, 2.0)
    # Where the least value is 0 the search goes on to its own tolerance; beyond an end values of up to 25 remain.
    assert found == pytest.approx(min(max(target, 0.0), 2.0), abs=1e-7)
