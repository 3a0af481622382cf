"""SGDOL inside what optax wraps around it: the same iterates as without, and the state that one expects."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from six_numbers import BLOCKS, flat, gradients, granular, loop, reference, run, tree

from sgdol.jax import averaged_params, diagnostics, mean_of_microbatches, sgdol
from sgdol.learners import FTRL
from sgdol.reference import polynomial_average

pytestmark = pytest.mark.usefixtures("double_precision")


# Transformations of jax -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["group", "coordinate"])
def test_the_second_call_traces_nothing(granularity):
    optimizer = sgdol(0.1, momentum=0.5, weight_decay=0.1, averaging=8, **granular(granularity))
    traces = []

    @jax.jit
    def update(stack, state, params):
        traces.append(None)
        return optimizer.update(stack, state, params)

    params = jax.tree.map(
        lambda p: p.tolist() if p.ndim == 0 else p, tree(np.zeros(6))
    )  # a Python number is a leaf too
    state = optimizer.init(params)
    for gradient in gradients(3, 1):
        _, state = update(tree(gradient[0]), state, params)
    assert len(traces) == 1
    assert all(not leaf.weak_type for leaf in jax.tree.leaves(state))


def test_vmap_over_seeds_and_over_rates():
    recorded = np.stack([gradients(10, 2, seed) for seed in range(3)])
    rates = np.array([0.1, 0.5])

    def final(rate, stacks):
        optimizer = sgdol(rate, momentum=0.5)
        params = tree(np.zeros(6))
        return loop(optimizer, stacks, params, optimizer.init(params))

    many = jax.vmap(jax.vmap(final, (None, 0)), (0, None))
    state, path = jax.jit(many)(jnp.asarray(rates), tree(recorded))
    numbers = diagnostics(state)
    for i, rate in enumerate(rates):
        for j in range(3):
            expected = reference(recorded[j], smoothness=0.5 / rate, momentum=0.5)
            np.testing.assert_allclose(flat(path)[i, j], expected.iterates[1:], rtol=0, atol=1e-12)
            shown = np.asarray(numbers["step_size"])[i, j]
            np.testing.assert_allclose(shown, 0.5 * expected.step_sizes[-1], atol=1e-12)
    assert np.shape(numbers["regret"]) == (2, 3)


# Hyperparameters ------------------------------------------------------------------------------------------------------


def test_inject_hyperparams_moves_the_rate_and_the_momentum():
    optimizer = optax.inject_hyperparams(sgdol)(learning_rate=0.1, momentum=0.5, averaging=8, learner=FTRL())
    params = tree(np.zeros(6))
    state = optimizer.init(params)
    recorded = gradients(3, 2)
    x, m, w, u_sum, n_sum, alpha = np.zeros(6), np.zeros(6), 0.0, 0.0, 0.0, 0.0
    for pair, rate, beta in zip(recorded, [0.1, 0.3, 0.2], [0.5, 0.9, 0.0], strict=True):
        state.hyperparams["learning_rate"] = jnp.asarray(rate)
        state.hyperparams["momentum"] = jnp.asarray(beta)
        updates, state = optimizer.update(tree(pair), state, params)
        params = optax.apply_updates(params, updates)
        s = np.clip((alpha + u_sum) / (alpha + n_sum), 0, 2) if alpha else 1.0
        mean, old, w = pair.mean(0), m, beta * w + (1 - beta)
        m = beta * m + (1 - beta) * mean
        d = m / w
        alpha = alpha or mean @ mean
        u_sum += (beta * old @ mean + (1 - beta) * pair[0] @ pair[1]) / w
        n_sum += d @ d
        x = x - rate / (1 - beta) * s * d
        np.testing.assert_allclose(flat(params), x, rtol=0, atol=1e-12)
    assert flat(averaged_params(state, params)).any()


def test_a_schedule_is_a_function_of_the_calls():
    """Those that hold a gradient are calls, too: what a training loop counts is batches."""
    recorded = gradients(6, 2)
    schedule = optax.linear_schedule(0.1, 0.0, 12)
    iterates, state = run(sgdol(schedule), recorded.reshape(12, 6))
    expected = reference(recorded)
    multipliers, moves = expected.step_sizes * 4, np.diff(expected.iterates, axis=0)
    x = np.zeros(6)
    for t, move in enumerate(moves):
        x = x + schedule(2 * t + 1) / (1 - 0.9) * 4 * move
        np.testing.assert_allclose(iterates[2 * t + 2], x, rtol=0, atol=1e-6)  # the schedule itself is in float32
    assert diagnostics(state)["step_size"] == pytest.approx([float(schedule(11)) * multipliers[-1]])


# Wrappers -------------------------------------------------------------------------------------------------------------


def test_multi_steps_alternates_between_means_of_its_mini_steps():
    """Four batches in two means make one update, with k = 2."""
    recorded = gradients(5, 4)
    inner = sgdol(smoothness=4.0, averaging=0, momentum=0.5)
    multi = optax.MultiSteps(inner, every_k_schedule=2, accumulator_dtype=jnp.float64)
    iterates, state = run(multi.gradient_transformation(), recorded.reshape(20, 6))
    means = recorded.reshape(5, 2, 2, 6).mean(2)
    expected = reference(means, momentum=0.5)
    np.testing.assert_allclose(iterates[::4], expected.iterates, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(iterates[3::4], iterates[:-1:4])  # nothing moves in between
    assert diagnostics(state)["gradients"] == 2
    np.testing.assert_allclose(
        flat(averaged_params(state, tree(np.zeros(6)))), expected.iterates[1:].mean(0), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("way", ["stacked", "others", "alternating"])
def test_a_mask_leaves_out_what_it_masks(way):
    recorded = gradients(8, 2)
    optimizer = optax.masked(sgdol(smoothness=4.0, averaging=0), {"a": True, "b": False, "c": True})
    params = tree(np.zeros(6))
    state = optimizer.init(params)
    for pair in recorded:
        if way == "stacked":
            updates, state = optimizer.update(tree(pair), state, params)
        elif way == "others":  # all of it: optax masks the updates only
            updates, state = optimizer.update(tree(pair[0]), state, params, others=tree(pair[1]))
        else:
            for gradient in pair:
                updates, state = optimizer.update(tree(gradient), state, params)
        params = optax.apply_updates(params, {**updates, "b": jnp.zeros((1, 3))})
    seen = [0, 1, 5]
    expected = reference(recorded[..., seen])
    np.testing.assert_allclose(flat(params)[seen], expected.iterates[-1], rtol=0, atol=1e-12)
    average = averaged_params(state, {**params, "b": jnp.full((1, 3), 7.0)})
    np.testing.assert_allclose(flat(average)[seen], expected.iterates[1:].mean(0), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(average["b"], np.full((1, 3), 7.0))


def test_a_mask_that_leaves_nothing_is_no_error():
    optimizer = optax.masked(sgdol(0.1, granularity="tensor"), {"a": False, "b": False, "c": False})
    params = tree(np.zeros(6))
    updates, _ = optimizer.update(tree(np.ones(6)), optimizer.init(params), params)
    np.testing.assert_array_equal(flat(updates), np.ones(6))


def test_partition_gives_each_part_its_own():
    """One SGDOL each is one step size per group, but alpha is then each group's own."""
    parts = {"one": sgdol(smoothness=4.0, alpha=1.0, averaging=8), "two": sgdol(smoothness=4.0, alpha=1.0, averaging=8)}
    optimizer = optax.partition(parts, {"a": "one", "b": "two", "c": "one"})
    recorded = gradients(10, 2)
    iterates, state = run(optimizer, recorded)
    expected = reference(recorded, alpha=1.0, blocks=BLOCKS["group"])
    np.testing.assert_allclose(iterates, expected.iterates, rtol=0, atol=1e-12)
    average = flat(averaged_params(state, tree(np.zeros(6))))
    np.testing.assert_allclose(average, polynomial_average(expected.iterates[1:], 8), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"one at a time. Found: .*\['one'\].*\['two'\]"):
        diagnostics(state)
    assert diagnostics(state.inner_states["one"])["updates"] == 10


def test_partition_with_another_optimizer_takes_the_mean_of_the_microbatches_there():
    others = optax.chain(mean_of_microbatches(), optax.sgd(0.5))
    optimizer = optax.partition(
        {"sgdol": sgdol(smoothness=4.0), "sgd": others}, {"a": "sgdol", "b": "sgd", "c": "sgdol"}
    )
    recorded = gradients(6, 3)
    iterates, _ = run(optimizer, recorded)
    expected = -0.5 * recorded.mean(1).cumsum(0)
    np.testing.assert_allclose(iterates[1:, 2:5], expected[:, 2:5], rtol=0, atol=1e-12)
    seen = [0, 1, 5]
    own = reference(recorded[..., seen])
    np.testing.assert_allclose(iterates[:, seen], own.iterates, rtol=0, atol=1e-12)


def test_apply_if_finite_leaves_out_the_call_and_so_keeps_the_held_gradient():
    recorded = gradients(4, 2)
    calls = np.insert(recorded.reshape(8, 6), 3, np.nan, axis=0)
    iterates, _ = run(optax.apply_if_finite(sgdol(smoothness=4.0), max_consecutive_errors=3), calls)
    np.testing.assert_allclose(iterates[-1], reference(recorded).iterates[-1], rtol=0, atol=1e-12)


def test_lookahead_synchronises_with_it():
    recorded = gradients(4, 2)
    optimizer = optax.lookahead(sgdol(smoothness=4.0), sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(tree(np.zeros(6)))
    state = optimizer.init(params)
    for pair in recorded:
        updates, state = optimizer.update(tree(pair), state, params)
        params = optax.apply_updates(params, updates)
    path = reference(recorded).iterates
    np.testing.assert_allclose(flat(params.slow), 0.5 * path[4], rtol=0, atol=1e-12)


@pytest.mark.parametrize("granularity", BLOCKS)
def test_state_that_is_like_the_parameters_is_known_as_such(granularity):
    """optax.tree_map_params, by which people shard a state as they shard the parameters."""
    optimizer = sgdol(smoothness=4.0, momentum=0.5, averaging=8, **granular(granularity))
    state = optimizer.init(tree(np.zeros(6)))
    seen = optax.tree_map_params(optimizer, lambda _: "like", state, transform_non_params=lambda _: "unlike")
    likes = {"a": "like", "b": "like", "c": "like"}
    assert seen[0].held == seen[0].trace == seen[2].average == likes
    expected = likes if granularity == "coordinate" else "unlike"
    learned = (*seen[0].blocks[:2], seen[0].blocks.learner.u_sum) if granularity == "coordinate" else [seen[0].blocks]
    assert all(part == expected for part in learned)
    assert seen[0].counts == seen[0].numbers == "unlike"


# Averages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0, 8, 2.5])
def test_the_average_is_polynomial_and_does_not_count_held_calls(power):
    recorded = gradients(12, 2)
    recorded[4, 1] = np.nan  # skipped, which is no iterate either
    iterates, state = run(sgdol(smoothness=4.0, averaging=power, weight_decay=0.1), recorded.reshape(24, 6))
    points = np.delete(iterates[2::2], 4, axis=0)
    average = flat(averaged_params(state, tree(np.zeros(6))))
    np.testing.assert_allclose(average, polynomial_average(points, power), rtol=0, atol=1e-12)


def test_before_any_update_the_average_is_where_the_parameters_are():
    optimizer = sgdol(smoothness=4.0, averaging=8)
    params = tree(np.arange(6.0))
    _, state = optimizer.update(tree(np.ones(6)), optimizer.init(params), params)
    np.testing.assert_array_equal(flat(averaged_params(state, params)), np.arange(6.0))


def test_the_average_of_low_precision_parameters_is_kept_in_float32():
    optimizer = sgdol(2.0**-9, averaging=0, alpha=1.0, momentum=None)
    params = jnp.ones(1, jnp.bfloat16)
    state = optimizer.init(params)
    for _ in range(8):  # the parameter does not move: half of its last bit is 2^-9
        updates, state = optimizer.update(jnp.full((2, 1), -1.0, jnp.bfloat16), state, params)
        params = optax.apply_updates(params, updates)
    assert state[2].average.dtype == jnp.float32
    assert state[2].average == params.astype(jnp.float32)
    assert averaged_params(state, params).dtype == jnp.bfloat16


def test_a_state_without_an_average_is_refused():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), sgdol(smoothness=4.0))
    params = tree(np.zeros(6))
    with pytest.raises(ValueError, match=r"state holds no average: construct the optimizer as sgdol\(..., averaging=8"):
        averaged_params(optimizer.init(params), params)
    averaging = sgdol(smoothness=4.0, averaging=8)
    with pytest.raises(ValueError, match="params must have the tree structure of the parameters that were averaged"):
        averaged_params(averaging.init(params), {"a": params["a"]})


# Diagnostics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 3, 4])
def test_the_same_gradient_twice_is_counted(k):
    optimizer = sgdol(0.1, momentum=0.5)
    params = jnp.zeros(10_000, jnp.float32)
    gradient = jax.random.normal(jax.random.key(0), params.shape, params.dtype)
    _, state = jax.jit(optimizer.update)(jnp.stack([gradient] * k), optimizer.init(params), params)
    assert diagnostics(state)["identical"] == 1
    different = jnp.stack([gradient] * (k - 1) + [gradient.at[0].add(3.0)])
    _, state = jax.jit(optimizer.update)(different, state, params)
    assert diagnostics(state)["identical"] == 1


def test_a_state_without_a_record_is_refused():
    params = tree(np.zeros(6))
    with pytest.raises(ValueError, match="keeps no record: it was constructed with record=False"):
        diagnostics(sgdol(0.1, record=False).init(params))
    with pytest.raises(ValueError, match="Found: none in tuple"):
        diagnostics(optax.sgd(0.1).init(params))
