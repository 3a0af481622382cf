"""Products of gradients in a metric, and learners that hear what the last step was worth, as the reference has them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dense_metric import Dense, Products, dense
from six_numbers import ALGORITHM, BLOCKS, gradients, granular, overshooting, reference, replicate, run, tree

from sgdol.jax import diagnostics, scale_by_sgdol, sgdol, sgdol_free
from sgdol.learners import FTRL, MeasuredCurvature
from sgdol.metrics import RMS, AdaGrad
from sgdol.reference import diagonal

pytestmark = pytest.mark.usefixtures("double_precision")


def expected(recorded, granularity="global", **options):
    """The reference for a learning rate of 1/3, which knows what a tensor is."""
    return reference(recorded, smoothness=3.0, tensors=BLOCKS["tensor"], blocks=BLOCKS[granularity], **options)


# Every pair of values of two options that may be together occurs in one of these. Without momentum there is no choice
# of statistics nor of the correction, and the correction for epochs belongs to the symmetric estimator.
NAMES = ("metric", "granularity", "k", "estimator", "momentum", "statistics", "learner")
NAMES += ("bias_correction", "epoch", "kappa")
CASES = [
    ("euclidean", "global", 3, "paper", 0.0, "direction", "ftrl", True, None, 0.5),
    ("rms", "tensor", 2, "symmetric", 0.9, "gradient", "measured", False, 7, 0.5),
    ("adagrad", "group", 2, "paper", 0.9, "direction", "measured", False, None, 10.0),
    ("adagrad", "global", 3, "symmetric", 0.9, "gradient", "measured", True, 7, 10.0),
    ("rms", "coordinate", 2, "symmetric", 0.9, "direction", "ftrl", False, 7, 10.0),
    ("euclidean", "tensor", 3, "symmetric", 0.9, "gradient", "ftrl", False, None, 10.0),
    ("rms", "group", 3, "paper", 0.0, "direction", "ftrl", True, None, 10.0),
    ("euclidean", "coordinate", 2, "symmetric", 0.0, "direction", "measured", True, None, 10.0),
    ("adagrad", "tensor", 3, "symmetric", 0.0, "direction", "ftrl", True, 7, 10.0),
    ("adagrad", "coordinate", 3, "paper", 0.9, "gradient", "measured", True, None, 0.5),
    ("euclidean", "group", 2, "symmetric", 0.9, "gradient", "ftrl", True, 7, 0.5),
    ("rms", "global", 2, "paper", 0.9, "gradient", "ftrl", False, None, 0.5),
    ("adagrad", "tensor", 3, "paper", 0.9, "direction", "measured", False, None, 10.0),
    # alpha instead of kappa, and no momentum at all
    ("euclidean", "group", 3, "paper", None, "direction", "ftrl", True, None, None),
    ("rms", "coordinate", 2, "symmetric", None, "direction", "ftrl", True, None, None),
    ("adagrad", "tensor", 2, "symmetric", 0.9, "direction", "measured", False, 7, None),
    # a metric whose D is no diagonal
    ("dense", "global", 2, "symmetric", 0.9, "direction", "measured", False, None, 0.5),
    ("dense", "global", 2, "symmetric", 0.0, "direction", "measured", True, None, 10.0),
    ("dense", "tensor", 3, "symmetric", 0.9, "direction", "measured", True, None, 10.0),
    ("dense", "group", 3, "symmetric", 0.9, "direction", "ftrl", True, None, 10.0),
    ("dense", "tensor", 2, "paper", 0.0, "direction", "ftrl", True, None, 10.0),
    # and what people use: epochs with the default learner
    ("euclidean", "global", 2, "symmetric", 0.9, "direction", "measured", False, 7, 0.5),
    ("euclidean", "global", 2, "symmetric", 0.9, "direction", "measured", True, 7, 0.5),
]
LEARNERS = {"ftrl": FTRL(), "measured": MeasuredCurvature()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_equals_the_reference(case):
    """Two gradients are given in two calls, three in a stack."""
    options = dict(zip(NAMES, case, strict=True))
    granularity, k, learner = (options.pop(name) for name in ("granularity", "k", "learner"))
    words = {**options, "momentum": options["momentum"] or 0.0}
    if options["kappa"] is None:
        options["alpha"] = words["alpha"] = 0.5
        del words["kappa"]
    if options["metric"] == "dense":
        options["metric"], words["metric"] = Dense(), dense
    recorded = overshooting(40, k)
    truth = expected(recorded, granularity, learner=learner, **words)
    optimizer = sgdol(smoothness=3.0, learner=LEARNERS[learner], **options, **granular(granularity))
    iterates, _ = run(optimizer, recorded if k > 2 else recorded.reshape(-1, 6))
    np.testing.assert_allclose(iterates[:: 1 if k > 2 else 2], truth.iterates, rtol=0, atol=1e-12)
    assert np.ptp(3 * truth.step_sizes) > 0.05  # it learned something
    last = truth.diagonals[-1]
    assert last.ndim == 1 or np.abs(last - np.diag(np.diag(last))).max() > 0.1  # D is no diagonal


def test_a_full_matrix_that_is_diagonal_is_the_diagonal_metric_of_the_reference():
    recorded = gradients(20, 2)

    def matrix(past, present, tensors):
        return np.diag(diagonal(past, present, tensors))

    one, other = expected(recorded, metric=matrix), expected(recorded, metric="rms")
    np.testing.assert_allclose(one.iterates, other.iterates, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("learner", "suggested"),
    [
        (MeasuredCurvature(), {"kappa": 10.0, "bias_correction": False}),
        (FTRL(), {"kappa": 1.0, "bias_correction": True}),
    ],
    ids=["measured", "ftrl"],
)
def test_the_learner_suggests_alpha_and_the_correction(learner, suggested):
    recorded = overshooting(20, 2)
    by_default, _ = run(sgdol(0.25, learner=learner), recorded)
    given, _ = run(sgdol(0.25, learner=learner, **suggested), recorded)
    np.testing.assert_array_equal(by_default, given)


@pytest.mark.parametrize("learner", ["ftrl", "measured"])
def test_alpha_is_a_squared_gradient_also_with_momentum(learner):
    """Not a squared direction, which without bias correction is 1/100 of that at first."""
    recorded = gradients(3, 2)
    optimizer = scale_by_sgdol(learner=LEARNERS[learner], bias_correction=False, kappa=3.0)
    _, state = optimizer.update(tree(recorded[0]), optimizer.init(tree(np.zeros(6))))
    mean = recorded[0].mean(0)
    assert float(state.alpha) == pytest.approx(3.0 * mean @ mean, rel=1e-14)


def test_an_epoch_may_be_a_traced_number():
    """As optax.inject_hyperparams makes one of every number."""
    recorded = overshooting(20, 2)
    iterates, state = run(optax.inject_hyperparams(sgdol)(smoothness=4.0, epoch=5, kappa=0.5), recorded)
    assert set(state.hyperparams) == {"smoothness", "momentum", "epoch", "kappa"}
    np.testing.assert_allclose(iterates, reference(recorded, epoch=5, kappa=0.5).iterates, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_epoch_changes_no_type(dtype):
    params = jax.tree.map(lambda p: p.astype(dtype), tree(np.zeros(6)))
    stack = jax.tree.map(lambda p: jnp.ones((2, *p.shape), dtype), params)
    for epoch in (5, np.int64(5), jnp.array(5), jnp.array(5.0)):
        optimizer = sgdol(0.25, epoch=epoch)
        state = optimizer.init(params)
        updates, after = jax.eval_shape(optimizer.update, stack, state, params)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(updates)} == {dtype}
        assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(lambda leaf: leaf.dtype, state)


def test_a_metric_of_ones_own_constants_is_an_object():
    recorded = gradients(20, 2)
    constants = {"decay": 0.5, "tensor": 1.0, "overall": 0.1}
    iterates, _ = run(sgdol(smoothness=3.0, metric=RMS(**constants)), recorded)
    np.testing.assert_allclose(iterates, expected(recorded, metric=constants).iterates, rtol=0, atol=1e-12)


def test_tensors_that_have_no_gradient_at_first_stay_in_bounds():
    recorded = gradients(20, 2)
    recorded[:5, :, 2:5] = 0
    iterates, _ = run(sgdol(smoothness=3.0, metric="rms"), recorded)
    np.testing.assert_allclose(iterates, expected(recorded, metric="rms").iterates, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("metric", "message"), [("l2", "metric must be one of 'euclidean'"), (RMS, "metric must be a name or an object")]
)
def test_what_is_no_metric_is_refused(metric, message):
    with pytest.raises((TypeError, ValueError), match=message):
        sgdol(0.1, metric=metric)


# The state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64"])
def test_what_the_metric_remembers_is_in_float32_or_wider(dtype):
    optimizer = sgdol(0.1, metric="rms", learner=MeasuredCurvature(), averaging=8)
    params = jax.tree.map(lambda p: p.astype(dtype), tree(np.ones(6)))
    state = optimizer.init(params)
    kinds = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    stack = jax.tree.map(lambda p: jnp.full((2, *p.shape), 300, dtype), params)
    _, state = jax.eval_shape(optimizer.update, stack, state, params)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == kinds
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state[0].metric)} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state[0].direction)} == {"float32"}


def test_the_squares_shard_like_the_parameters_and_the_weights_do_not():
    optimizer = sgdol(0.25, metric="adagrad", learner=MeasuredCurvature())
    state = optimizer.init(tree(np.zeros(6)))
    seen = optax.tree_map_params(optimizer, lambda _: "like", state, transform_non_params=lambda _: "unlike")
    assert seen[0].metric.square == seen[0].direction == {"a": "like", "b": "like", "c": "like"}
    assert seen[0].metric.weight == "unlike"


def test_the_last_direction_is_kept_only_where_nothing_else_tells_it():
    params = tree(np.zeros(6))
    hindsight = {"learner": MeasuredCurvature()}
    assert scale_by_sgdol().init(params).direction == ()
    assert scale_by_sgdol(**ALGORITHM).init(params).direction == ()
    assert scale_by_sgdol(momentum=0.9, **hindsight).init(params).direction == ()
    assert scale_by_sgdol(momentum=None, **hindsight).init(params).direction != ()
    assert scale_by_sgdol(momentum=0.9, metric="rms", **hindsight).init(params).direction != ()
    assert scale_by_sgdol(momentum=0.9, metric="rms", learner=FTRL()).init(params).direction == ()


def test_a_state_without_the_metric_or_the_direction_is_refused():
    params = tree(np.zeros(6))
    plain = sgdol(0.1, **ALGORITHM)
    with pytest.raises(ValueError, match="state was made without a metric and this optimizer is with"):
        sgdol(0.1, metric="rms", **ALGORITHM).update(params, plain.init(params), params)
    with pytest.raises(ValueError, match="state was made without a learner that uses hindsight"):
        sgdol(0.1, momentum=None).update(params, plain.init(params), params)


def test_an_update_that_is_skipped_leaves_the_metric_and_the_direction_as_they_were():
    recorded = gradients(6, 2)
    recorded[3, 0, 2] = np.nan
    options = {"metric": "rms", "learner": MeasuredCurvature(), "momentum": 0.9}
    path, state = run(sgdol(0.1, **options), recorded.reshape(12, 6))
    clean, _ = run(sgdol(0.1, **options), np.delete(recorded, 3, axis=0))
    np.testing.assert_allclose(path[-1], clean[-1], rtol=0, atol=1e-13)
    assert diagnostics(state)["skipped"] == 1


# Devices --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"metric": AdaGrad(), "epoch": 3, **granular("group")},
        {"metric": AdaGrad(), "epoch": 3, **granular("coordinate")},
        {"metric": Dense()},
    ],
    ids=["group", "coordinate", "dense"],
)
def test_devices_stay_the_independent_gradients(options):
    """As vmap with an axis name, which is how to try it on one device."""
    recorded = gradients(5, 4)
    last, states = replicate(sgdol(0.25, axis_name="replicas", **options), recorded)
    for leaf in jax.tree.leaves(states):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[0], leaf.shape))
    iterates, _ = run(sgdol(0.25, **options), recorded)
    np.testing.assert_allclose(last, iterates[-1], rtol=0, atol=1e-13)


# A metric whose D is a full matrix ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: sgdol(0.25, metric=Dense()), lambda: sgdol_free(metric=Dense())])
def test_a_state_that_is_a_factor_is_kept_for_each_tensor_and_not_taken_for_something_like_the_parameters(make):
    optimizer = make()
    state = optimizer.init(tree(np.zeros(6)))
    seen = optax.tree_map_params(optimizer, lambda _: "like", state, transform_non_params=lambda _: "unlike")
    seen, state = (each if hasattr(each, "metric") else each[0] for each in (seen, state))
    assert isinstance(state.metric, Products)
    assert [factor.shape for factor in state.metric.outer] == [(2, 2), (3, 3), (1, 1)]
    assert seen.metric.outer == "unlike"
    assert seen.trace == {"a": "like", "b": "like", "c": "like"}


def test_a_step_size_for_each_coordinate_needs_a_diagonal_metric():
    with pytest.raises(
        ValueError, match=r'granularity="coordinate" needs a metric whose D is a diagonal.*\'rms\'.*got metric=Dense\('
    ):
        sgdol(0.25, metric=Dense(), granularity="coordinate")
    with pytest.raises(ValueError, match=r"got metric=Kronecker\("):
        sgdol(0.25, metric="kronecker", granularity="coordinate")
    sgdol(0.25, metric=RMS(), granularity="coordinate")
