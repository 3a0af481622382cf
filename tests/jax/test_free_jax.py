"""SGDOL without M for optax: against the reference, in other units, under jit, scan and vmap, and misused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sgdol.jax import averaged_params, microbatch_grads, sgdol_free
from sgdol.reference_free import sgdol_free as reference

D = 6
STEPS = 40
START = np.array([0.5, -0.4, 0.3, -0.2, 0.1, 0.6])
SHIFTS = 0.3 * np.random.default_rng(0).normal(size=(STEPS, 2, D))
CURVATURES = np.logspace(0, 2, D)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def quadratic(x, t, shift):
    return jnp.sum(CURVATURES * x * x) / 2 + shift @ x


def cliff(x, t, shift):
    """From the 25th batch on there is a wall: the guard has to act."""
    value = quadratic(x, t, shift)
    return jnp.where(t < 25, value, 40 * value + jnp.sum(jnp.exp(jnp.minimum(30 * jnp.abs(x), 600.0))))


def ledge(x, t, shift):
    """A slope that ends at a wall: steps into it are rejected."""
    wall = 300 * jnp.sum(jnp.maximum(x - 3, 0) ** 2)
    return jnp.sum(x * x) / 200 - jnp.sum(x) + wall + 0.1 * shift @ x


PROBLEMS = {"quadratic": (quadratic, STEPS), "cliff": (cliff, STEPS), "ledge": (ledge, 12)}


@functools.cache
def run(problem, scale_f=1.0, scale_x=1.0, **options):
    loss, steps = PROBLEMS[problem]
    optimizer = sgdol_free(**options)

    def step(carry, batch):
        x, state = carry
        t, shifts = batch

        def evaluate(x):
            def parts(x, shift):
                return scale_f * loss(x / scale_x, t, shift)

            losses, gradients = jax.vmap(jax.value_and_grad(parts), in_axes=(None, 0))(x, shifts)
            return jnp.mean(losses), gradients

        value, gradients = evaluate(x)
        updates, state = optimizer.update(gradients, state, x, value=value, value_and_grads=evaluate)
        x = optax.apply_updates(x, updates)
        return (x, state), (x, state.learned)

    x = jnp.asarray(scale_x * START)
    batches = (jnp.arange(steps), jnp.asarray(SHIFTS[:steps]))
    (x, state), (iterates, learned) = jax.jit(lambda c: jax.lax.scan(step, c, batches))((x, optimizer.init(x)))
    return np.asarray(iterates), np.asarray(averaged_params(state, x)), learned


def oracle_of(problem):
    loss = PROBLEMS[problem][0]
    one = jax.jit(jax.value_and_grad(loss))

    def oracle(t, x):
        parts = [one(jnp.asarray(x), t, jnp.asarray(shift)) for shift in SHIFTS[t]]
        return float(np.mean([p[0] for p in parts])), np.array([p[1] for p in parts])

    return oracle


OTHERS = {"momentum": 0.5, "averaging": 2.0, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("problem", "options"), [("quadratic", {}), ("cliff", {}), ("ledge", {}), ("quadratic", OTHERS)], ids=str
)
def test_agrees_with_the_reference(problem, options):
    expected = reference(oracle_of(problem), START, PROBLEMS[problem][1], **options)
    iterates, average, learned = run(problem, **options)
    np.testing.assert_allclose(iterates, expected.iterates[1:], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(average, expected.averages[-1], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(learned.smoothness, expected.smoothness, rtol=1e-9)
    for name in ("rejections", "rollbacks", "skipped"):
        assert getattr(learned, name)[-1] == getattr(expected, name), name
    assert learned.evaluations[-1] == expected.evaluations - 1  # a function needs no check that it is one
    if not options:
        assert {"quadratic": True, "cliff": expected.rollbacks, "ledge": expected.rejections}[problem]


@pytest.mark.parametrize("problem", list(PROBLEMS))
def test_powers_of_two_change_nothing_but_the_scale(problem):
    scale_f, scale_x = 2.0**20, 2.0**-20
    one, other = run(problem), run(problem, scale_f, scale_x)
    np.testing.assert_array_equal(other[0], scale_x * one[0])
    np.testing.assert_array_equal(other[1], scale_x * one[1])
    np.testing.assert_array_equal(other[2].step_size, one[2].step_size * scale_x**2 / scale_f)


def regression():
    x = np.random.default_rng(0).normal(size=(60, 16, 3)).astype(np.float32)
    return x, (x @ np.array([1.0, -2.0, 0.5], np.float32))[..., None]


def loss(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def train(key: int, dtype=jnp.float32):
    optimizer = sgdol_free()
    params = {"w": jax.random.normal(jax.random.key(key), (3, 1), dtype), "b": jnp.zeros((1,), dtype)}

    def step(carry, batch):
        params, state = carry

        def evaluate(p):
            return microbatch_grads(loss, 2, value=True)(p, *batch)

        value, grads = evaluate(params)
        updates, state = optimizer.update(grads, state, params, value=value, value_and_grads=evaluate)
        return (optax.apply_updates(params, updates), state), value

    batches = jax.tree.map(lambda a: jnp.asarray(a, dtype), regression())
    (params, state), losses = jax.lax.scan(step, (params, optimizer.init(params)), batches)
    return averaged_params(state, params), losses, state


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_pytrees_of_narrow_parameters_learn(dtype):
    with jax.enable_x64(False):
        average, losses, state = jax.jit(lambda: train(0, dtype))()
    assert losses[-1] < 0.01 * losses[0]
    assert average["w"].dtype == dtype
    assert state.learned.signal.dtype == jnp.float32
    assert state.trace["w"].dtype == jnp.float32


def test_vmap_is_a_loop():
    with jax.enable_x64(False):
        together = jax.jit(jax.vmap(train))(jnp.arange(2))
        apart = [jax.jit(train)(key) for key in range(2)]
    for i, (average, losses, _) in enumerate(apart):
        np.testing.assert_allclose(together[0]["w"][i], average["w"], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(together[1][i][:20], losses[:20], rtol=1e-3, atol=1e-5)


def test_a_batch_that_is_not_finite_is_skipped():
    optimizer = sgdol_free()

    @jax.jit
    def step(x, state, factor):
        def evaluate(x):
            return factor * jnp.sum(x * x), jnp.stack([2 * factor * x] * 2)

        value, grads = evaluate(x)
        return optimizer.update(grads, state, x, value=value, value_and_grads=evaluate)

    x = jnp.asarray(START)
    state = optimizer.init(x)
    for factor in (1.0, 1.0, np.nan, 1.0):
        updates, state = step(x, state, factor)
        assert np.isnan(factor) == (not np.any(updates))
        x = optax.apply_updates(x, updates)
    assert state.learned.skipped == 1
    assert state.learned.updates == 3
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_it_does_not_compile_twice():
    optimizer = sgdol_free()
    traces = []

    @jax.jit
    def step(x, state):
        traces.append(1)

        def evaluate(x):
            return jnp.sum(x * x), jnp.stack([2 * x, 2 * x])

        value, grads = evaluate(x)
        updates, state = optimizer.update(grads, state, x, value=value, value_and_grads=evaluate)
        return optax.apply_updates(x, updates), state

    x = jnp.asarray(START)
    state = optimizer.init(x)
    for _ in range(3):
        x, state = step(x, state)
    assert len(traces) == 1


def test_misuse_is_named():
    optimizer = sgdol_free()
    x = jnp.asarray(START)
    state = optimizer.init(x)
    with pytest.raises(ValueError, match="value_and_grads"):
        optimizer.update(jnp.stack([x, x]), state, x)
    with pytest.raises(ValueError, match="k >= 2 independent gradients"):
        optimizer.update(x, state, x, value=1.0, value_and_grads=lambda p: (1.0, p))
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\), got 1.0"):
        sgdol_free(momentum=1.0)
