"""sgdol and sgdol_free in the Kronecker metric, against the references."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sgdol.jax import averaged_params, sgdol, sgdol_free
from sgdol.learners import FTRL
from sgdol.reference import replay
from sgdol.reference_free import sgdol_free as reference_free
from sgdol.reference_kronecker import kronecker

pytestmark = pytest.mark.usefixtures("double_precision")

SHAPES = [(4,), (2, 2, 2), (3, 4)]
SIZES = [4, 8, 12]
D = sum(SIZES)


def tree(vector):
    """A vector's entries, along the last axis, as parameters of these shapes."""
    vector = jnp.asarray(vector)
    pieces = jnp.split(vector, np.cumsum(SIZES)[:-1], axis=-1)
    return [p.reshape(*vector.shape[:-1], *shape) for p, shape in zip(pieces, SHAPES, strict=True)]


def flat(params):
    return jnp.concatenate([p.reshape(-1) for p in params])


def matrix(past, present, tensors):
    return kronecker(past, present, SHAPES)[0]


def gradients(steps, k):
    """Correlated coordinates, with a mean that turns around."""
    rng = np.random.default_rng(0)
    mean = 2 * (-1.0) ** (np.arange(steps) // 5)[:, None, None] * rng.normal(size=D)
    return (mean + rng.normal(size=(steps, k, D))) @ rng.normal(size=(D, D)) / 5


@pytest.mark.parametrize(
    ("k", "options", "words"),
    [
        (2, {}, {"kappa": 10.0, "momentum": 0.9, "bias_correction": False, "learner": "measured"}),
        (3, {"momentum": None, "learner": FTRL()}, {"kappa": 1.0}),
    ],
    ids=["defaults", "k=3"],
)
def test_sgdol_equals_the_reference(k, options, words):
    recorded = gradients(24, k)
    tensors = np.repeat(range(3), SIZES)
    start = np.zeros(D)
    truth = replay(
        recorded, start, smoothness=4.0, alpha=None, estimator="symmetric", metric=matrix, tensors=tensors, **words
    )
    optimizer = sgdol(smoothness=4.0, metric="kronecker", **options)
    params = tree(start)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for t, stack in enumerate(recorded):
        updates, state = update(tree(stack), state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(flat(params), truth.iterates[t + 1], rtol=0, atol=1e-10)
    assert update._cache_size() == 1


def test_sgdol_free_equals_the_reference():
    """Also where the first batch is an outlier."""
    rng = np.random.default_rng(1)
    mixing = rng.normal(size=(D, D)) / D**0.5 * np.logspace(0, 1, D)
    shifts, start = 0.3 * rng.normal(size=(30, 2, D)), rng.normal(size=D)
    optimizer = sgdol_free(metric="kronecker")

    def loss(x, shift, scale):
        return scale * (jnp.sum((x @ mixing) ** 2) / 2 + shift @ x)

    one = jax.jit(jax.value_and_grad(loss))

    @jax.jit
    def step(params, state, shift, scale):
        def evaluate(params):
            one = jax.value_and_grad(lambda p, s: loss(flat(p), s, scale))
            values, grads = jax.vmap(one, (None, 0))(params, shift)
            return jnp.mean(values), grads

        value, grads = evaluate(params)
        updates, state = optimizer.update(grads, state, params, value=value, value_and_grads=evaluate)
        return optax.apply_updates(params, updates), state

    for scales in (np.ones(30), np.array([100.0, *np.ones(29)])):

        def oracle(t, x, scales=scales):
            values, grads = zip(*(one(x, shift, scales[t]) for shift in shifts[t]), strict=True)
            return float(np.mean(values)), np.array(grads)

        truth = reference_free(oracle, start, 30, tensors=SIZES, metric=lambda *a: kronecker(*a[:2], SHAPES))
        params = tree(start)
        state = optimizer.init(params)
        for t, shift in enumerate(shifts):
            params, state = step(params, state, shift, scales[t])
            np.testing.assert_allclose(flat(params), truth.iterates[t + 1], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(flat(averaged_params(state, params)), truth.averages[-1], rtol=1e-9, atol=1e-9)
        assert state.rule.evaluations == truth.evaluations - 1


def test_gradients_whose_squares_leave_the_range_give_the_same_run():
    """In float32, gradients of 1e-30 and 1e30."""
    recorded = gradients(12, 2).astype(np.float32)
    with jax.enable_x64(False):
        optimizer = optax.inject_hyperparams(sgdol)(0.25, metric="kronecker")
        update, runs = jax.jit(optimizer.update), []
        for scale in (1.0, 2.0**-100, 2.0**100):
            params = tree(np.zeros(D, np.float32))
            state = optimizer.init(params)
            state.hyperparams["learning_rate"] = jnp.asarray(0.25 / scale, jnp.float32)
            for stack in recorded:
                updates, state = update(tree(stack * np.float32(scale)), state, params)
                params = optax.apply_updates(params, updates)
            runs.append(np.asarray(flat(params)))
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


def test_factors_of_half_precision_parameters_are_in_float32():
    optimizer = sgdol(0.1, metric="kronecker")
    params = [p.astype(jnp.bfloat16) for p in tree(np.ones(D))]
    state = optimizer.init(params)
    kinds = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    stack = [jnp.ones((2, *p.shape), jnp.bfloat16) for p in params]
    updates, state = jax.eval_shape(optimizer.update, stack, state, params)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == kinds
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state[0].metric)} == {"float32"}
    assert {update.dtype.name for update in updates} == {"bfloat16"}


def test_a_restored_run_goes_on_bit_for_bit(tmp_path):
    import orbax.checkpoint as ocp

    optimizer, params = sgdol(0.25, metric="kronecker"), tree(np.zeros(D))
    update = jax.jit(optimizer.update)
    fresh = saved = optimizer.init(params)
    recorded = gradients(9, 2)
    for stack in recorded[:7]:
        _, saved = update(tree(stack), saved, params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", saved)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "checkpoint", fresh)
    for stack in recorded[7:]:
        (one, saved), (other, restored) = (update(tree(stack), state, params) for state in (saved, restored))
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_sgdol_free_learns_in_half_precision():
    """Matrices, a convolution, and a vector."""
    shapes = [(3, 2, 5), (40, 4), (6,)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = [jax.random.normal(key, shape, "bfloat16") for key, shape in zip(keys, shapes, strict=True)]
    optimizer, values = sgdol_free(), []
    state = optimizer.init(params)

    def loss(params, shift):
        return sum(jnp.mean((p + shift) ** 2) for p in params)

    @jax.jit
    def step(params, state, shifts):
        def evaluate(params):
            values, grads = jax.vmap(jax.value_and_grad(loss), (None, 0))(params, shifts)
            return jnp.mean(values), grads

        value, grads = evaluate(params)
        updates, state = optimizer.update(grads, state, params, value=value, value_and_grads=evaluate)
        return optax.apply_updates(params, updates), state, value

    for shifts in 0.1 * jax.random.normal(jax.random.key(1), (12, 2), "bfloat16"):
        params, state, value = step(params, state, shifts)
        values.append(float(value))
    assert values[-1] < 0.5 * values[0]
