"""A metric whose D is a full matrix: nobody but the metric may know what D looks like.

Of SGDOL against the reference, see ``test_metric_and_hindsight.py``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dense_metric import Dense, Products, dense
from six_numbers import gradients, replicate, run, tree
from test_free_jax import PROBLEMS, equals_the_reference
from test_free_jax import run as run_free

from sgdol.jax import sgdol, sgdol_free
from sgdol.metrics import RMS

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.mark.parametrize("problem", PROBLEMS)
def test_sgdol_free_equals_the_reference(problem):
    equals_the_reference(problem, run_free(problem, metric=Dense()), metric=dense)


def test_gradients_of_any_size_give_the_same_run():
    recorded = gradients(12, 2)
    one, _ = run(sgdol(0.25, metric=Dense()), recorded)
    for exponent in (-400, 400):
        other, _ = run(sgdol(0.25 * 2.0**-exponent, metric=Dense()), recorded * 2.0**exponent)
        np.testing.assert_array_equal(other, one)


def test_devices_stay_the_independent_gradients():
    recorded = gradients(5, 4)
    last, _ = replicate(sgdol(0.25, axis_name="replicas", metric=Dense()), recorded)
    iterates, _ = run(sgdol(0.25, metric=Dense()), recorded)
    np.testing.assert_allclose(last, iterates[-1], rtol=0, atol=1e-13)


# The state ------------------------------------------------------------------------------------------------------------


def test_a_state_that_is_a_factor_is_kept_for_each_tensor():
    _, state = run(sgdol(0.25, metric=Dense()), gradients(3, 2))
    assert isinstance(state[0].metric, Products)
    assert [factor.shape for factor in state[0].metric.outer] == [(2, 2), (3, 3), (1, 1)]


@pytest.mark.parametrize("make", [lambda: sgdol(0.25, metric=Dense()), lambda: sgdol_free(metric=Dense())])
def test_a_factor_is_not_taken_for_something_like_the_parameters(make):
    optimizer = make()
    state = optimizer.init(tree(np.zeros(6)))
    seen = optax.tree_map_params(optimizer, lambda _: "like", state, transform_non_params=lambda _: "unlike")
    inner = seen if hasattr(seen, "metric") else seen[0]
    assert inner.metric.outer == "unlike"
    assert inner.trace == {"a": "like", "b": "like", "c": "like"}


def test_a_step_size_for_each_coordinate_needs_a_diagonal_metric():
    with pytest.raises(
        ValueError, match=r'granularity="coordinate" needs a metric whose D is a diagonal.*\'rms\'.*got metric=Dense\('
    ):
        sgdol(0.25, metric=Dense(), granularity="coordinate")
    with pytest.raises(ValueError, match=r"got metric=Kronecker\("):
        sgdol(0.25, metric="kronecker", granularity="coordinate")
    sgdol(0.25, metric=RMS(), granularity="coordinate")


@pytest.mark.parametrize("metric", ["euclidean", Dense()], ids=str)
def test_parameters_and_state_of_sgdol_free_may_both_be_donated(metric):
    optimizer = sgdol_free(metric=metric)

    def step(params, state):
        def evaluate(p):
            return jnp.sum(p["a"] ** 2), jax.tree.map(lambda v: jnp.stack([v, v]), p)

        value, grads = evaluate(params)
        updates, state = optimizer.update(grads, state, params, value=value, value_and_grads=evaluate)
        return optax.apply_updates(params, updates), state

    params = tree(np.arange(6.0))
    state = optimizer.init(params)
    donating = jax.jit(step, donate_argnums=(0, 1))
    for _ in range(3):
        params, state = donating(params, state)
    assert state.rule.updates == 3
