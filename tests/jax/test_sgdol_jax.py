"""The optax front end does what the reference does, and behaves as optax users expect."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sgdol.jax import microbatch_grads, scale_by_sgdol, sgdol
from sgdol.learners import FTRL, OnlineGradientDescent, OptimisticFTRL
from sgdol.reference import replay

BLOCKS = {"global": None, "coordinate": range(6), "tensor": [0, 0, 1, 1, 1, 1]}


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def tree(vector):
    """Six numbers along the last axis, as a vector and a matrix."""
    vector = np.asarray(vector)
    return {"a": jnp.asarray(vector[..., :2]), "b": jnp.asarray(vector[..., 2:].reshape(*vector.shape[:-1], 2, 2))}


def flat(params):
    return np.concatenate([np.asarray(params["a"]), np.asarray(params["b"]).ravel()])


def gradients(steps, k, seed=0):
    """Signal and noise that take the multiplier to both of its bounds."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(size=(steps, 1, 1)))
    signal = np.where(np.arange(steps) < steps // 2, 1.0, -1.0)[:, None, None] * rng.normal(size=(steps, 1, 6))
    return scale * (signal * 0.5 + rng.normal(size=(steps, k, 6)))


def run(optimizer, stacks, x=None):
    """All the iterates, and the last state."""

    def step(carry, stack):
        params, state = carry
        updates, state = optimizer.update(stack, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    params = tree(np.zeros(6) if x is None else x)
    (_, state), path = jax.jit(lambda carry, xs: jax.lax.scan(step, carry, xs))(
        (params, optimizer.init(params)), tree(np.asarray(stacks))
    )
    steps = np.concatenate([np.asarray(path["a"]), np.asarray(path["b"]).reshape(len(stacks), 4)], axis=1)
    return np.concatenate([[flat(params)], steps]), state


def test_the_second_call_does_not_compile_again():
    optimizer = sgdol(0.1, momentum=0.5, weight_decay=0.1)
    update = jax.jit(optimizer.update)
    params = tree(np.zeros(6))
    state = optimizer.init(params)
    for gradient in gradients(4, 1):
        _, state = update(tree(gradient[0]), state, params)
    assert update._cache_size() == 1


@pytest.mark.parametrize("estimator", ["paper", "symmetric"])
@pytest.mark.parametrize("granularity", BLOCKS)
@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize("k", [2, 5])
def test_equals_the_reference_on_recorded_gradients(estimator, granularity, alpha, k):
    recorded = gradients(60, k)
    expected = replay(
        recorded, np.zeros(6), smoothness=3.0, alpha=alpha, estimator=estimator, blocks=BLOCKS[granularity]
    )
    optimizer = sgdol(smoothness=3.0, alpha=alpha, estimator=estimator, granularity=granularity)
    iterates, _ = run(optimizer, recorded)
    np.testing.assert_allclose(iterates, expected.iterates, rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ["paper", "symmetric"])
def test_equals_the_reference_where_both_clips_are_hit(estimator):
    g = np.zeros((9, 2, 6))
    g[:, 0, 0] = 1
    g[:, 1, 0] = [3, 9, 3, 9, -90, 1, 1, 1, 1]
    g[0, 0, 0] = 0.1  # of little weight: with the symmetric estimator, u <= n, so that 2/M is out of reach
    expected = replay(g, np.zeros(6), smoothness=2.0, alpha=0.1, estimator=estimator)
    assert expected.step_sizes.min() == 0.0
    assert expected.step_sizes.max() == (1.0 if estimator == "paper" else 0.5)
    iterates, _ = run(sgdol(smoothness=2.0, alpha=0.1, estimator=estimator), g)
    np.testing.assert_allclose(iterates, expected.iterates, rtol=0, atol=1e-12)


def test_gradients_that_vanish_at_first_leave_the_default_alpha_open():
    recorded = gradients(10, 2)
    recorded[:3] = 0
    expected = replay(recorded, np.zeros(6), smoothness=3.0, alpha=None, estimator="symmetric")
    iterates, _ = run(sgdol(smoothness=3.0), recorded)
    np.testing.assert_allclose(iterates, expected.iterates, rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ["paper", "symmetric"])
def test_the_three_ways_to_give_a_pair_are_one(estimator):
    recorded = gradients(20, 2)
    optimizer = sgdol(0.2, estimator=estimator)
    stacked, _ = run(optimizer, recorded)
    alternating, _ = run(optimizer, recorded.reshape(40, 6))
    np.testing.assert_array_equal(alternating[::2], stacked)
    np.testing.assert_array_equal(alternating[1::2], stacked[:-1])  # the call that holds does not move
    params = tree(np.zeros(6))
    state = optimizer.init(params)
    for pair, expected in zip(recorded, stacked[1:], strict=True):
        updates, state = optimizer.update(tree(pair[0]), state, params, others=tree(pair[1]))
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(flat(params), expected, rtol=0, atol=1e-15)


def test_the_multiplier_does_not_see_the_gradients_of_its_own_step():
    recorded = gradients(5, 2)
    changed = recorded.copy()
    changed[-1] *= -7.0
    for estimator in ("paper", "symmetric"):
        states = [run(sgdol(0.1, estimator=estimator), g)[1][0] for g in (recorded, changed)]
        assert states[0].multiplier[0] == states[1].multiplier[0]


def test_runs_inside_scan_and_under_vmap_over_rates():
    recorded = gradients(30, 2)

    def final(rate):
        optimizer = sgdol(rate, alpha=1.0, estimator="paper")
        params = jnp.zeros(6)

        def step(carry, pair):
            params, state = carry
            updates, state = optimizer.update(pair[0], state, params, others=pair[1])
            return (params + updates, state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), jnp.asarray(recorded))[0][0]

    rates = jnp.array([0.1, 0.5])
    for rate, x in zip(rates.tolist(), jax.jit(jax.vmap(final))(rates), strict=True):
        expected = replay(recorded, np.zeros(6), smoothness=1 / rate, alpha=1.0).iterates[-1]
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
@pytest.mark.parametrize("way", ["stacked", "others"])
def test_a_gradient_that_is_not_finite_changes_nothing(bad, way):
    optimizer = sgdol(0.1, momentum=0.5)
    params = tree(np.ones(6))
    _, state = optimizer.update(tree(gradients(1, 2)[0]), optimizer.init(params), params)
    broken = gradients(1, 2, seed=1)[0]
    broken[1, 3] = bad
    if way == "stacked":
        updates, after = optimizer.update(tree(broken), state, params)
    else:
        updates, after = optimizer.update(tree(broken[0]), state, params, others=tree(broken[1]))
    assert all(not leaf.any() for leaf in jax.tree.leaves(updates))
    jax.tree.map(np.testing.assert_array_equal, after, state)


def test_a_gradient_that_is_not_finite_is_not_held_and_does_not_break_a_pair():
    optimizer = sgdol(0.1)
    good = gradients(1, 2)[0]
    broken = np.full(6, np.nan)
    clean, _ = run(optimizer, good)
    spoilt, state = run(optimizer, [broken, good[0], broken, good[1]])
    np.testing.assert_array_equal(spoilt[-1], clean[-1])
    assert not state[0].pending


def test_a_held_gradient_is_dropped_when_the_parameters_move():
    optimizer = sgdol(0.1)
    params = tree(np.zeros(6))
    pair = gradients(1, 2)[0]
    _, state = optimizer.update(tree(pair[0]), optimizer.init(params), params)
    assert state[0].pending
    _, state = optimizer.update(tree(pair), state, params)
    assert not state[0].pending
    assert not any(leaf.any() for leaf in jax.tree.leaves(state[0].held))


@pytest.mark.parametrize("granularity", BLOCKS)
def test_momentum_uses_the_unbiased_signal(granularity):
    recorded, beta = gradients(40, 2), 0.9
    iterates, _ = run(sgdol(0.25, alpha=1.0, momentum=beta, granularity=granularity), recorded)
    block = np.zeros(6, int) if BLOCKS[granularity] is None else np.array(BLOCKS[granularity])
    x, m = np.zeros(6), np.zeros(6)
    u_sum, n_sum = np.zeros(block.max() + 1), np.zeros(block.max() + 1)
    for t, (a, b) in enumerate(recorded, start=1):
        eta = 0.25 * np.clip((1 + u_sum) / (1 + n_sum), 0, 2)
        mean, correction = (a + b) / 2, 1 - beta**t
        u = (beta * m * mean + (1 - beta) * a * b) / correction
        m = beta * m + (1 - beta) * mean
        d = m / correction
        x = x - eta[block] * d
        np.add.at(u_sum, block, u)
        np.add.at(n_sum, block, d * d)
        np.testing.assert_allclose(iterates[t], x, rtol=0, atol=1e-12)


def test_weight_decay_is_the_gradient_of_an_l2_penalty():
    optimizer, plain = sgdol(0.1, weight_decay=0.3), sgdol(0.1)
    recorded = gradients(10, 2)
    iterates, _ = run(optimizer, recorded, x=np.ones(6))
    params = tree(np.ones(6))
    state = plain.init(params)
    for pair, expected in zip(recorded, iterates[1:], strict=True):
        updates, state = plain.update(tree(pair + 0.3 * flat(params)), state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(flat(params), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("learner", [FTRL(strength=2.0), OptimisticFTRL(), OnlineGradientDescent()])
def test_any_learner_of_the_core_plugs_in(learner):
    recorded = gradients(20, 2)
    iterates, _ = run(sgdol(0.3, alpha=1.0, learner=learner, estimator="paper"), recorded)
    x, state = np.zeros(6), learner.initial(0.0)
    for t, (g, other) in enumerate(recorded, start=1):
        s = learner.predict(state, 1.0)
        state = learner.observe(state, s, float(g @ other), float(g @ g), 1.0)
        x = x - 0.3 * s * g
        np.testing.assert_allclose(iterates[t], x, rtol=0, atol=1e-12)


def test_sums_are_kept_in_float32_or_wider_and_updates_in_the_parameters_own_type():
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    optimizer = sgdol(0.1, momentum=0.5)
    state = optimizer.init(params)
    updates, state = optimizer.update({"w": jnp.ones((2, 3), jnp.bfloat16)}, state, params)
    assert updates["w"].dtype == jnp.bfloat16
    assert state[0].learner[0].u_sum.dtype == jnp.float32
    assert state[0].trace["w"].dtype == jnp.float32


def test_inject_hyperparams_exposes_the_rate():
    optimizer = optax.inject_hyperparams(sgdol)(learning_rate=0.1)
    params = jnp.zeros(2)
    state = optimizer.init(params)
    _, state = optimizer.update(jnp.ones((2, 2)), state, params)
    state.hyperparams["learning_rate"] = jnp.asarray(0.2)
    updates, _ = optimizer.update(jnp.ones((2, 2)), state, params)
    np.testing.assert_allclose(updates, [-0.2, -0.2])


def test_multi_transform_gives_each_group_its_step_size():
    params = tree(np.zeros(6))
    optimizer = optax.multi_transform(
        {"one": sgdol(smoothness=3.0, alpha=1.0), "two": sgdol(smoothness=3.0, alpha=1.0)}, {"a": "one", "b": "two"}
    )
    recorded = gradients(20, 2)
    state = optimizer.init(params)
    for stack in recorded:
        updates, state = optimizer.update(tree(stack), state, params)
        params = optax.apply_updates(params, updates)
    expected = replay(recorded, np.zeros(6), smoothness=3.0, alpha=1.0, estimator="symmetric", blocks=BLOCKS["tensor"])
    np.testing.assert_allclose(flat(params), expected.iterates[-1], rtol=0, atol=1e-12)


def test_a_mask_that_leaves_nothing_is_no_error():
    optimizer = optax.masked(sgdol(0.1, granularity="tensor"), {"a": False, "b": False})
    params = tree(np.zeros(6))
    updates, _ = optimizer.update(tree(np.ones(6)), optimizer.init(params), params)
    np.testing.assert_array_equal(flat(updates), np.ones(6))


def test_microbatch_gradients_average_to_the_gradient_of_the_batch():
    def loss(params, x, y):
        return jnp.mean((x @ params - y) ** 2)

    rng = np.random.default_rng(0)
    x, y, params = jnp.asarray(rng.normal(size=(12, 3))), jnp.asarray(rng.normal(size=12)), jnp.ones(3)
    stacked = microbatch_grads(loss, 4)(params, x, y)
    assert stacked.shape == (4, 3)
    np.testing.assert_allclose(stacked.mean(0), jax.grad(loss)(params, x, y), atol=1e-14)
    with pytest.raises(ValueError, match=r"multiple of k = 5, got the shape \(12, 3\)"):
        microbatch_grads(loss, 5)(params, x, y)
    with pytest.raises(ValueError, match="k must be an integer of at least 2"):
        microbatch_grads(loss, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of the two, got neither"),
        ({"learning_rate": 0.1, "smoothness": 10.0}, "exactly one"),
        ({"learning_rate": -1.0}, "learning_rate must be positive and finite, got -1.0"),
        ({"smoothness": float("nan")}, "smoothness must be positive and finite, got nan"),
        ({"learning_rate": 0.1, "alpha": 0.0}, "alpha must be positive and finite, or None, got 0.0"),
        ({"learning_rate": 0.1, "momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"learning_rate": 0.1, "weight_decay": -1.0}, "weight_decay must be finite and at least 0, got -1.0"),
        ({"learning_rate": 0.1, "estimator": "mean"}, "estimator must be one of .*, got 'mean'"),
        ({"learning_rate": 0.1, "granularity": "group"}, "multi_transform"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        sgdol(**arguments)


def test_bad_gradients_are_named():
    optimizer = scale_by_sgdol(weight_decay=0.1)
    params = tree(np.zeros(6))
    state = optimizer.init(params)
    good = tree(np.zeros(6))
    with pytest.raises(ValueError, match="tree structure"):
        optimizer.update({"a": good["a"]}, state, params)
    with pytest.raises(ValueError, match="k >= 2"):
        optimizer.update({"a": good["a"], "b": good["b"][None]}, state, params)
    with pytest.raises(ValueError, match="k >= 2"):
        optimizer.update(tree(np.zeros((1, 6))), state, params)
    with pytest.raises(ValueError, match="not both"):
        optimizer.update(tree(np.zeros((2, 6))), state, params, others=good)
    with pytest.raises(ValueError, match="weight_decay needs the parameters"):
        optimizer.update(good, state)
    with pytest.raises(TypeError, match="complex"):
        optimizer.init(jnp.zeros(2, complex))
    with pytest.raises(TypeError, match="learner"):
        sgdol(0.1, learner="ftrl")
