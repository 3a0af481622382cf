"""The optax front end does what the reference does, and behaves as optax users expect."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from six_numbers import ALGORITHM, BLOCKS, LABELS, flat, gradients, granular, reference, run, tree

from sgdol.jax import diagnostics, scale_by_sgdol, sgdol
from sgdol.learners import FTRL, MeasuredCurvature
from sgdol.reference import replay

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.mark.parametrize("estimator", ["paper", "symmetric"])
def test_equals_the_reference_where_both_clips_are_hit(estimator):
    g = np.zeros((9, 2, 6))
    g[:, 0, 0] = 1
    g[:, 1, 0] = [3, 9, 3, 9, -90, 1, 1, 1, 1]
    g[0, 0, 0] = 0.1  # of little weight: with the symmetric estimator, u <= n, so that 2/M is out of reach
    expected = replay(g, np.zeros(6), smoothness=2.0, alpha=0.1, estimator=estimator)
    assert expected.step_sizes.min() == 0.0
    assert expected.step_sizes.max() == (1.0 if estimator == "paper" else 0.5)
    iterates, _ = run(sgdol(smoothness=2.0, alpha=0.1, estimator=estimator, **ALGORITHM), g)
    np.testing.assert_allclose(iterates, expected.iterates, rtol=0, atol=1e-12)


def test_gradients_that_vanish_at_first_leave_the_default_alpha_open():
    recorded = gradients(10, 2)
    recorded[:3] = 0
    iterates, _ = run(sgdol(smoothness=3.0), recorded)
    np.testing.assert_allclose(iterates, reference(recorded, smoothness=3.0).iterates, rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ["paper", "symmetric"])
@pytest.mark.parametrize(("options", "rounding"), [(ALGORITHM, 0.0), ({}, 1e-15)], ids=["algorithm", "defaults"])
def test_the_three_ways_to_give_a_pair_are_one(estimator, options, rounding):
    """To the last bit without momentum, whose sums the compiler fuses in one program and not in another."""
    recorded = gradients(20, 2)
    optimizer = sgdol(0.02, estimator=estimator, **options)
    stacked, _ = run(optimizer, recorded)
    alternating, _ = run(optimizer, recorded.reshape(40, 6))
    np.testing.assert_allclose(alternating[::2], stacked, rtol=0, atol=rounding)
    np.testing.assert_array_equal(alternating[1::2], alternating[:-1:2])  # the call that holds does not move
    params = tree(np.zeros(6))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for pair, expected in zip(recorded, stacked[1:], strict=True):
        updates, state = update(tree(pair[0]), state, params, others=tree(pair[1]))
        params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(flat(params), expected)


@pytest.mark.parametrize(("way", "bad"), [("stacked", np.nan), ("others", np.inf), ("stacked", 1e200)])
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
    assert diagnostics(after)["skipped"] == 1
    before = state[0]._replace(counts=state[0].counts.at[2].add(1))
    jax.tree.map(np.testing.assert_array_equal, after[0], before)


@pytest.mark.parametrize("position", [0, 1])
def test_a_gradient_that_is_not_finite_spoils_its_pair_and_nothing_else(position):
    optimizer = sgdol(0.1)
    good, spoilt = gradients(3, 2), gradients(1, 2, seed=1)[0]
    spoilt[position] = np.nan
    clean, _ = run(optimizer, good.reshape(6, 6))
    path, state = run(optimizer, np.concatenate([good[0], spoilt, good[1], good[2]]))
    np.testing.assert_array_equal(path[-1], clean[-1])
    np.testing.assert_array_equal(path[4], path[2])
    assert not state[0].pending


def test_a_held_gradient_is_dropped_when_the_parameters_move():
    optimizer = sgdol(0.1)
    params = tree(np.zeros(6))
    first, second = gradients(2, 2)
    _, state = optimizer.update(tree(second[0]), optimizer.init(params), params)
    assert state[0].pending
    dropped, state = optimizer.update(tree(first), state, params)
    assert not state[0].pending
    alone, other = optimizer.update(tree(first), optimizer.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, dropped, alone)
    for gradient in second:  # the next pair is these two
        dropped, state = optimizer.update(tree(gradient), state, params)
        alone, other = optimizer.update(tree(gradient), other, params)
        jax.tree.map(np.testing.assert_array_equal, dropped, alone)


def test_the_learning_rate_is_that_of_optax_sgd():
    """Step by step, as long as the learner leaves s at 1; composed or not, with a schedule or not."""
    recorded, schedule = 1.0 + 0.1 * gradients(20, 2), optax.linear_schedule(1e-3, 0.0, 40)
    for rate in (1e-3, schedule):
        theirs, _ = run(optax.sgd(rate, momentum=0.9), recorded.mean(1))
        composed = optax.chain(scale_by_sgdol(), optax.scale_by_learning_rate(rate))
        for ours in (sgdol(rate), composed):
            np.testing.assert_allclose(run(ours, recorded)[0], theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("granularity", "make"), [("tensor", sgdol), ("coordinate", optax.inject_hyperparams(sgdol))])
def test_weight_decay_is_decoupled_and_scaled_by_the_learned_step_size(granularity, make):
    """Whether it is a number or traced."""
    recorded, x = gradients(10, 2), np.ones(6)
    iterates, _ = run(make(smoothness=10.0, weight_decay=0.3, granularity=granularity), recorded, x=x)
    expected = reference(recorded, smoothness=10.0, blocks=BLOCKS[granularity])
    for move, eta, after in zip(np.diff(expected.iterates, axis=0), expected.step_sizes, iterates[1:], strict=True):
        x = x + move - eta * 0.3 * x
        np.testing.assert_allclose(after, x, rtol=0, atol=1e-14)


def test_add_decayed_weights_before_it_is_an_l2_penalty():
    """Part of the objective, so that the statistics see it; alternating and stacked."""
    composed, plain = optax.chain(optax.add_decayed_weights(0.3), sgdol(0.1)), sgdol(0.1)
    recorded = gradients(10, 2)
    alternating, _ = run(composed, recorded.reshape(20, 6), x=np.ones(6))
    stacked, _ = run(composed, recorded, x=np.ones(6))
    np.testing.assert_allclose(alternating[::2], stacked, rtol=0, atol=1e-14)
    params = tree(np.ones(6))
    state, update = plain.init(params), jax.jit(plain.update)
    for pair, expected in zip(recorded, stacked[1:], strict=True):
        updates, state = update(tree(pair + 0.3 * flat(params)), state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(flat(params), expected, rtol=0, atol=1e-14)


class FollowTheAverage:
    """A learner of a user's own, with a state that is no named tuple."""

    def initial(self, zero):
        return {"sums": (zero, zero)}

    def predict(self, state, alpha):
        u, n = state["sums"]
        return (alpha + abs(u)) / (alpha + n)

    def observe(self, state, multiplier, u, n, alpha):
        u_sum, n_sum = state["sums"]
        return {"sums": (u_sum + u * multiplier, n_sum + n)}


@pytest.mark.parametrize("learner", [FTRL(strength=2.0), FollowTheAverage()], ids=["strong", "own"])
def test_any_learner_plugs_in(learner):
    recorded = gradients(20, 2)
    options = {"alpha": 1.0, "learner": learner, "estimator": "paper", "momentum": None}
    together, _ = run(sgdol(0.3, **options), recorded)
    apart, _ = run(sgdol(0.3, granularity="coordinate", **options), recorded)
    x, state = np.zeros(6), learner.initial(0.0)
    y, states = np.zeros(6), learner.initial(np.zeros(6))
    for t, (g, other) in enumerate(recorded, start=1):
        s, each = learner.predict(state, 1.0), learner.predict(states, np.ones(6))
        state = learner.observe(state, s, float(g @ other), float(g @ g), 1.0)
        states = learner.observe(states, each, g * other, g * g, np.ones(6))
        x, y = x - 0.3 * s * g, y - 0.3 * each * g
        np.testing.assert_allclose(together[t], x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(apart[t], y, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("granularity", "dtype", "learner"),
    [
        ("global", "bfloat16", FTRL()),
        ("coordinate", "float16", FTRL()),
        ("global", "float32", MeasuredCurvature()),
        ("coordinate", "complex64", FTRL()),
        ("coordinate", "bfloat16", MeasuredCurvature()),
        ("global", "float16", MeasuredCurvature()),
    ],
)
def test_every_type_keeps_its_own_and_sums_are_kept_in_float32(granularity, dtype, learner):
    options = {"learner": learner, "bias_correction": True, "momentum": 0.5, "weight_decay": 0.1, "averaging": 8}
    optimizer = sgdol(smoothness=10.0, **options, **granular(granularity))
    params = jax.tree.map(lambda p: p.astype(dtype), tree(np.ones(6)))
    state = optimizer.init(params)
    kinds = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    large = jax.tree.map(lambda p: jnp.full((2, *p.shape), 300, dtype), params)  # its square is too large for float16
    updates, state = jax.jit(optimizer.update)(large, state, params)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == kinds
    field = list(learner.initial(0.0)._fields).index("n_sum" if isinstance(learner, FTRL) else "u_last")
    learned = state[0].learner
    squares = learned[field] if granularity == "coordinate" else learned[..., field]
    for update, square in zip(jax.tree.leaves(updates), jax.tree.leaves(squares), strict=False):
        assert update.dtype == dtype
        assert square.dtype == jnp.float32
        assert jnp.max(square) >= 90_000
        np.testing.assert_allclose(np.asarray(update, complex), -0.1 * (300 + 0.1), rtol=0.01)


@pytest.mark.parametrize(("parameter", "gradient"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_gradients_of_another_type_do_not_change_the_state(parameter, gradient):
    optimizer = sgdol(0.1)
    params = jnp.ones(3, parameter)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(3):
        updates, state = update(jnp.ones(3, gradient), state, params)
    assert state[0].held.dtype == parameter
    assert updates.dtype == jnp.float32
    assert update._cache_size() == 1


def test_without_double_precision_everything_is_float32():
    with jax.enable_x64(False):
        optimizer = sgdol(0.1, momentum=0.5, averaging=8, granularity="coordinate")
        params = np.ones(3)
        updates, state = jax.eval_shape(optimizer.update, np.ones((2, 3)), optimizer.init(params), params)
        assert updates.dtype == jnp.float32
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32"}


@pytest.mark.parametrize("granularity", ["global", "tensor", "coordinate"])
def test_leaves_that_hold_nothing_change_nothing(granularity):
    recorded = gradients(5, 2)
    optimizer = sgdol(smoothness=4.0, granularity=granularity)
    params = {"empty": jnp.zeros((0, 3)), "none": None, "x": jnp.zeros(6)}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for pair in recorded:
        grads = {"empty": jnp.zeros((2, 0, 3)), "none": None, "x": jnp.asarray(pair)}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    blocks = range(6) if granularity == "coordinate" else None
    expected = reference(recorded, blocks=blocks)
    np.testing.assert_allclose(params["x"], expected.iterates[-1], rtol=0, atol=1e-12)
    assert updates["none"] is None


@pytest.mark.parametrize("granularity", ["global", "tensor", "coordinate"])
def test_no_parameters_at_all_are_no_error(granularity):
    optimizer = sgdol(0.1, granularity=granularity, momentum=0.5, averaging=8)
    updates, _ = optimizer.update({}, optimizer.init({}), {})
    assert updates == {}


@pytest.mark.parametrize("granularity", ["group", "coordinate"])
def test_a_state_can_be_donated(granularity):
    optimizer = sgdol(0.1, momentum=0.5, averaging=8, **granular(granularity))
    params = tree(np.zeros(6))
    state, update = optimizer.init(params), jax.jit(optimizer.update, donate_argnums=1)
    for pair in gradients(2, 2):
        _, state = update(tree(pair), state, params)
    assert state[0].count == 2


def test_a_state_of_another_configuration_is_refused():
    params = tree(np.zeros(6))
    plain, momentum, average = sgdol(0.1, momentum=None), sgdol(0.1), sgdol(0.1, momentum=None, averaging=8)
    for here, saved, what in (
        (momentum, plain, "without momentum and this optimizer is with"),
        (plain, momentum, "with momentum and this optimizer is without"),
        (average, plain, "without averaging and this optimizer is with"),
    ):
        with pytest.raises(ValueError, match=f"state was made {what}"):
            here.update(params, saved.init(params), params)


@pytest.mark.parametrize(
    "param_labels",
    [LABELS, lambda params: {name: "b" if name == "b" else "ac" for name in params}],
    ids=["tree", "function"],
)
def test_groups_are_named_by_labels_or_by_a_function(param_labels):
    recorded = gradients(10, 2)
    expected = reference(recorded, blocks=BLOCKS["group"])
    iterates, state = run(sgdol(smoothness=4.0, granularity="group", param_labels=param_labels), recorded)
    np.testing.assert_allclose(iterates, expected.iterates, rtol=0, atol=1e-12)
    shown = (1 - 0.9) * expected.step_sizes[-1][[0, 2]]
    assert diagnostics(state)["step_size"] == pytest.approx(shown.tolist(), abs=1e-12)


def test_a_label_stands_for_everything_below_it():
    params = {"encoder": {"w": jnp.zeros(2), "b": jnp.zeros(1)}, "head": jnp.zeros(3)}
    optimizer = sgdol(smoothness=4.0, granularity="group", param_labels={"encoder": "slow", "head": "fast"})
    assert optimizer.init(params)[0].multiplier.shape == (2,)
    wrong = sgdol(smoothness=4.0, granularity="group", param_labels={"encoder": "slow"})
    with pytest.raises(ValueError, match="param_labels must be a prefix of the tree of the parameters"):
        wrong.init(params)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of the two, got neither"),
        ({"learning_rate": 0.1, "smoothness": 10.0}, "exactly one"),
        ({"learning_rate": 0.1, "alpha": 0.0}, "alpha must be positive and finite, or None, got 0.0"),
        ({"learning_rate": 0.1, "momentum": 1.0}, "momentum must be at least 0 and less than 1, or None, got 1.0"),
        ({"learning_rate": 0.1, "estimator": "mean"}, "estimator must be one of .*, got 'mean'"),
        ({"learning_rate": 0.1, "granularity": "layer"}, "granularity must be one of 'global', .*, got 'layer'"),
        ({"learning_rate": 0.1, "granularity": "group"}, "param_labels belongs to granularity=.*param_labels=None"),
        ({"learning_rate": 0.1, "param_labels": "a"}, "param_labels belongs to granularity=.group., got .*'global'"),
        ({"learning_rate": 0.1, "statistics": "both"}, "statistics must be one of 'direction', 'gradient', got 'both'"),
        ({"learning_rate": 0.1, "kappa": 0.0}, "kappa must be positive and finite, or None, got 0.0"),
        (
            {"learning_rate": 0.1, "kappa": 2.0, "alpha": 1.0},
            "give alpha or kappa, not both: got alpha=1.0 and kappa=2.0",
        ),
        ({"learning_rate": 0.1, "epoch": 1}, "epoch must be a whole number of updates, at least 2, or None, got 1"),
        ({"learning_rate": 0.1, "epoch": 2.5}, "epoch must be a whole number of updates, .*, got 2.5"),
        ({"learning_rate": 0.1, "epoch": np.inf}, "epoch must be a whole number of updates, .*, got inf"),
        ({"learning_rate": 0.1, "epoch": 10**400}, "epoch must be a whole number of updates, .*, got 1000"),
        ({"learning_rate": 0.1, "epoch": jnp.array(1)}, "epoch must be a whole number of updates, .*, got Array"),
        (
            {"learning_rate": 0.1, "epoch": 9, "estimator": "paper"},
            'epoch corrects estimator="symmetric", got estimator="paper"',
        ),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        sgdol(**arguments)


def test_bad_gradients_are_named():
    optimizer, averaging = scale_by_sgdol(weight_decay=0.1), sgdol(0.1, averaging=8)
    params = good = tree(np.zeros(6))
    state = optimizer.init(params)
    for call, error, message in (
        (lambda: optimizer.update({"a": good["a"]}, state, params), ValueError, "tree structure"),
        (lambda: optimizer.update({**good, "b": good["b"][None]}, state, params), ValueError, "k >= 2"),
        (lambda: optimizer.update(tree(np.zeros((1, 6))), state, params), ValueError, "k >= 2"),
        (lambda: optimizer.update(tree(np.zeros((2, 6))), state, params, others=good), ValueError, "not both"),
        (lambda: optimizer.update(good, state), ValueError, "weight_decay needs the parameters"),
        (lambda: averaging.update(good, averaging.init(params)), ValueError, "averaging needs the parameters"),
        (
            lambda: optimizer.init({"n": jnp.zeros(2, int), "w": jnp.zeros(2)}),
            TypeError,
            r"params\['n'\] is int64; leave",
        ),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": 0.1, "learner": "ftrl"}, "learner must be an object with initial, predict and observe"),
        ({"learning_rate": 0.1, "learner": FTRL}, "learner must be an object"),
        ({"learning_rate": 0.1, "bias_correction": 1}, "bias_correction must be True, False or None, got 1"),
        ({"learning_rate": 0.1, "bias_correction": "no"}, "bias_correction must be True, False or None, got 'no'"),
        ({"learning_rate": 0.1, "epoch": True}, "epoch must be a number, a whole number of updates, .*, got True"),
        ({"learning_rate": 0.1, "epoch": "9"}, "epoch must be a number, a whole number of updates, .*, got '9'"),
        ({"learning_rate": 0.1, "record": 1}, "record must be True or False, got 1"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(arguments, message):
    with pytest.raises(TypeError, match=message):
        sgdol(**arguments)
