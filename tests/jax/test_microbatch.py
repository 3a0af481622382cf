"""Independent gradients from one batch, whatever its size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgdol.jax import diagnostics, microbatch_grads, sgdol

pytestmark = pytest.mark.usefixtures("double_precision")


def loss(params, batch):
    return jnp.mean((batch["x"] @ params - batch["y"]) ** 2)


def batch_of(samples):
    rng = np.random.default_rng(0)
    return {"x": jnp.asarray(rng.normal(size=(samples, 3))), "y": jnp.asarray(rng.normal(size=samples))}


PARAMS = np.ones(3)


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize(("samples", "k", "parts"), [(12, 4, 4), (7, 3, 3), (3, 2, 2), (2, 4, 2)])
def test_the_mean_is_the_gradient_of_the_batch(samples, k, parts, one_by_one):
    batch = batch_of(samples)
    value, stacked = microbatch_grads(loss, k, value=True, one_by_one=one_by_one)(PARAMS, batch)
    assert stacked.shape == (parts, 3)
    np.testing.assert_allclose(stacked.mean(0), jax.grad(loss)(PARAMS, batch), atol=1e-14)
    np.testing.assert_allclose(value, loss(PARAMS, batch), atol=1e-14)


def test_a_part_is_its_own_gradient_times_its_share_of_the_samples():
    batch = batch_of(5)
    stacked = microbatch_grads(loss, 2)(PARAMS, batch)
    for gradient, rows in zip(stacked, (slice(0, 2), slice(2, 5)), strict=True):
        own = jax.grad(loss)(PARAMS, jax.tree.map(lambda a, rows=rows: a[rows], batch))
        np.testing.assert_allclose(gradient, own * (rows.stop - rows.start) * 2 / 5, atol=1e-14)


def test_the_gradient_of_a_single_sample_is_held():
    optimizer, batch = sgdol(0.1), batch_of(1)
    gradient = microbatch_grads(loss, 2)(PARAMS, batch)
    np.testing.assert_allclose(gradient, jax.grad(loss)(PARAMS, batch), atol=1e-14)
    updates, state = optimizer.update(gradient, optimizer.init(PARAMS), PARAMS)
    assert not updates.any()
    assert diagnostics(state)["pending"]


def test_what_the_loss_returns_besides_is_stacked():
    def with_aux(params, batch):
        return loss(params, batch), jnp.sum(batch["y"])

    batch = batch_of(6)
    grads, sums = microbatch_grads(with_aux, 3, has_aux=True)(PARAMS, batch)
    np.testing.assert_allclose(sums, batch["y"].reshape(3, 2).sum(1), atol=1e-14)
    (value, again), other = microbatch_grads(with_aux, 3, has_aux=True, value=True)(PARAMS, batch)
    np.testing.assert_allclose(value, loss(PARAMS, batch), atol=1e-14)
    np.testing.assert_array_equal(again, sums)
    np.testing.assert_array_equal(other, grads)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_key_is_split_and_a_number_is_shared(one_by_one):
    def noise(params, x, key, scale):
        return jnp.sum(params) * (scale * jax.random.normal(key)) + 0 * jnp.sum(x)

    grads = microbatch_grads(noise, 3, one_by_one=one_by_one)(PARAMS, jnp.zeros(5), jax.random.key(0), 2.0)
    sizes = np.array([1, 2, 2])
    expected = 2.0 * jnp.stack([jax.random.normal(key) for key in jax.random.split(jax.random.key(0), 3)])
    np.testing.assert_allclose(grads[:, 0] * 5 / (3 * sizes), expected, rtol=1e-14)


@pytest.mark.parametrize(
    "batch", [{"x": jnp.zeros((4, 3)), "y": jnp.zeros(3)}, {"x": jnp.zeros((0, 3))}, {"x": jnp.zeros(())}]
)
def test_a_batch_without_samples_or_with_different_numbers_of_them_is_refused(batch):
    with pytest.raises(ValueError, match="arrays of a batch must have the same number of samples, at least 1"):
        microbatch_grads(loss, 2)(PARAMS, batch)


def test_k_is_a_whole_number_of_at_least_two():
    for k in (1, 2.0, True):
        with pytest.raises(ValueError, match="k must be an integer of at least 2"):
            microbatch_grads(loss, k)


def test_in_a_flax_loop_it_stands_where_the_gradient_stood():
    import flax.linen as nn
    from flax.training.train_state import TrainState

    """With an uneven last batch, and a last batch of one sample."""
    model = nn.Dense(1)
    data = batch_of(25)
    target = data["x"] @ jnp.array([[1.0], [-2.0], [0.5]])

    def flax_loss(params, x, y):
        return jnp.mean((model.apply(params, x) - y) ** 2)

    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), data["x"]), tx=sgdol(0.1))
    step = jax.jit(lambda s, x, y: s.apply_gradients(grads=microbatch_grads(flax_loss)(s.params, x, y)))
    before = flax_loss(state.params, data["x"], target)
    for _ in range(6):
        for rows in (slice(0, 8), slice(8, 16), slice(16, 19), slice(24, 25)):
            state = step(state, data["x"][rows], target[rows])
    assert flax_loss(state.params, data["x"], target) < 0.5 * before
    assert diagnostics(state.opt_state)["updates"] == 18
