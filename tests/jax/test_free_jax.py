"""SGDOL without M for optax: against the reference, in other units, under jit, scan and vmap, and misused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dense_metric import Dense, dense

from sgdol.jax import averaged_params, diagnostics, microbatch_grads, sgdol_free
from sgdol.reference_free import sgdol_free as reference

D = 6
STEPS = 40
START = np.array([0.5, -0.4, 0.3, -0.2, 0.1, 0.6])
SHIFTS = 0.3 * np.random.default_rng(0).normal(size=(STEPS, 2, D))
CURVATURES = np.logspace(0, 2, D)


pytestmark = pytest.mark.usefixtures("double_precision")


def quadratic(x, t, shift):
    return jnp.sum(CURVATURES * x * x) / 2 + shift @ x


def cliff(x, t, shift, steepness=20.0):
    """From the 30th batch on there is a wall: the guard has to act."""
    value = quadratic(x, t, shift)
    return jnp.where(t < 30, value, 40 * value + jnp.sum(jnp.exp(jnp.minimum(steepness * jnp.abs(x), 600.0))))


def burst(x, t, shift):
    """Three batches have three hundred times the noise: their gradients are clipped."""
    return quadratic(x, t, jnp.where((t == 4) | (t == 22) | (t == 31), 300.0, 1.0) * shift)


def outlier(x, t, shift):
    """The first batch counts a hundred times: its gradient is shortened once the second is known."""
    return quadratic(x, t, shift) * jnp.where(t == 0, 100.0, 1.0)


def ledge(x, t, shift):
    """A slope that ends at a wall: steps into it are rejected."""
    wall = 300 * jnp.sum(jnp.maximum(x - 3, 0) ** 2)
    return jnp.sum(x * x) / 200 - jnp.sum(x) + wall + 0.1 * shift @ x


def hole(x, t, shift):
    """Some batches are not finite anywhere, the first among them, and a tensor has no gradient at first."""
    product = (x[0] - 0.5) * x[3:] + x[:3]
    value = jnp.sum((product - jnp.array([1.0, -1.0, 0.5])) ** 2) / 2 + shift[:3] @ x[:3]
    return value * jnp.where((t == 0) | (t == 3) | (t == 20), jnp.nan, 1.0)


PROBLEMS = {
    "quadratic": (quadratic, STEPS),
    "burst": (burst, STEPS),
    "outlier": (outlier, STEPS),
    "cliff": (cliff, 34),  # behind the wall, roundings grow
    "gentle cliff": (functools.partial(cliff, steepness=10.0), 34),
    "ledge": (ledge, 12),
    "hole": (hole, STEPS),
}


SHAPES = {"a": (3,), "b": (1, 2), "c": ()}
SIZES = [3, 2, 1]


def tree_of(x):
    parts = jnp.split(jnp.asarray(x), np.cumsum(SIZES)[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}


def flat(tree):
    return jnp.concatenate([tree[name].reshape(-1) for name in SHAPES])


@functools.cache
def program(dtype, scheduled, **options):
    """One compiled program for all problems, scales and rates: after every step the iterate, the average, the rule."""

    @jax.jit
    def run(problem, scale_f, scale_x, rates):
        optimizer = sgdol_free(**options, **({"learning_rate": lambda t: rates[t]} if scheduled else {}))
        losses = [lambda *a, f=f: jnp.asarray(f(*a), float) for f, _ in PROBLEMS.values()]

        def step(carry, batch):
            params, state = carry
            t, shifts = batch

            def evaluate(params):
                def parts(params, shift):
                    return scale_f * jax.lax.switch(problem, losses, flat(params) / scale_x, t, shift)

                values, gradients = jax.vmap(jax.value_and_grad(parts), in_axes=(None, 0))(params, shifts)
                return jnp.mean(values), gradients

            value, gradients = evaluate(params)
            updates, state = optimizer.update(gradients, state, params, value=value, value_and_grads=evaluate)
            params = optax.apply_updates(params, updates)
            return (params, state), (flat(params), flat(averaged_params(state, params)), state.rule)

        params = tree_of(scale_x * jnp.asarray(START, dtype))
        batches = (jnp.arange(STEPS), jnp.asarray(SHIFTS, dtype))
        return jax.lax.scan(step, (params, optimizer.init(params)), batches)[1]

    return run


def run(problem, scale_f=1.0, scale_x=1.0, dtype=np.float64, rates=None, **options):
    found = program(dtype, rates is not None, **options)(
        list(PROBLEMS).index(problem), *np.array([scale_f, scale_x], dtype), np.zeros(0) if rates is None else rates
    )
    iterates, averages, rule = jax.tree.map(lambda v: np.asarray(v)[: PROBLEMS[problem][1]], found)
    return iterates, averages[-1], rule


@functools.cache
def oracle_of(problem):
    one = jax.jit(jax.value_and_grad(PROBLEMS[problem][0]))

    def oracle(t, x):
        parts = [one(jnp.asarray(x), t, jnp.asarray(shift)) for shift in SHIFTS[t]]
        return float(np.mean([p[0] for p in parts])), np.array([p[1] for p in parts])

    return oracle


def equals_the_reference(problem, found, **options):
    """What the reference has found."""
    expected = reference(oracle_of(problem), START, PROBLEMS[problem][1], tensors=SIZES, **options)
    iterates, average, rule = found
    np.testing.assert_allclose(iterates, expected.iterates[1:], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(average, expected.averages[-1], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(rule.smoothness, expected.smoothness, rtol=1e-11)
    for name in ("rejections", "rollbacks", "skipped"):
        assert getattr(rule, name)[-1] == getattr(expected, name), name
    assert rule.evaluations[-1] == expected.evaluations - 1  # a function needs no check that it is one
    return expected


OTHERS = {"momentum": 0.5, "averaging": 2.0, "weight_decay": 0.1}
EUCLID = {"metric": "euclidean"}


@pytest.mark.parametrize(
    ("problem", "options"),
    [
        *((name, {}) for name in PROBLEMS),
        *((name, EUCLID) for name in ("burst", "gentle cliff", "ledge")),
        *((name, {"metric": Dense()}) for name in PROBLEMS),
    ],
    ids=str,
)
def test_agrees_with_the_reference(problem, options):
    words = {"metric": dense} if options.get("metric") == Dense() else options
    expected = equals_the_reference(problem, run(problem, **options), **words)
    reached = {
        "burst": expected.clipped,
        "cliff": expected.rollbacks or "metric" in options,
        "gentle cliff": expected.rollbacks or options != EUCLID,
        "ledge": expected.rejections,
        "hole": expected.skipped,
    }
    assert reached.get(problem, True)


def test_a_constant_learning_rate_multiplies_the_steps_as_in_the_reference():
    """And the other options are those of the reference."""
    found = run("quadratic", learning_rate=0.5, **OTHERS)
    equals_the_reference("quadratic", found, rates=lambda t: np.full(D, 0.5), **OTHERS)


@pytest.mark.parametrize("problem", list(PROBLEMS))
def test_a_schedule_multiplies_the_steps_as_in_the_reference(problem):
    t = np.arange(STEPS)
    table = np.minimum(t / 8, 1.0) * (1 - t / 128)
    equals_the_reference(problem, run(problem, rates=table), rates=lambda t: np.full(D, table[t]))


@pytest.mark.parametrize("problem", ["cliff", "ledge"])
def test_powers_of_two_change_nothing_but_the_scale(problem):
    scale_f, scale_x = 2.0**21, 2.0**-20
    one, other = run(problem), run(problem, scale_f, scale_x)
    np.testing.assert_array_equal(other[0], scale_x * one[0])
    np.testing.assert_array_equal(other[1], scale_x * one[1])
    np.testing.assert_array_equal(other[2].step_size, one[2].step_size * scale_x**2 / scale_f)


@pytest.mark.parametrize("exponent", [-104, 110])
def test_gradients_whose_squares_leave_the_range_give_the_same_run(exponent):
    """In float32, gradients of 10^33 and 10^-31.

    Below 2^-107, differences of a batch's two gradients fall under 2^-126, the smallest normal number, and are flushed:
    the first number of the rule that differs is the noise, by 6e-7 of it.
    """
    scale = 2.0**exponent
    one, other = run("quadratic", dtype=np.float32), run("quadratic", scale, dtype=np.float32)
    np.testing.assert_array_equal(other[0], one[0])
    np.testing.assert_array_equal(other[2].smoothness / np.float32(scale), one[2].smoothness)


def regression():
    x = np.random.default_rng(0).normal(size=(80, 16, 3)).astype(np.float32)
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


@functools.cache
def six_runs(dtype):
    with jax.enable_x64(False):
        return jax.jit(jax.vmap(lambda key: train(key, dtype)))(jnp.arange(6))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_pytrees_of_narrow_parameters_learn(dtype):
    """From six starts, 2 away: single runs end within 0.15 and the middle one within 0.1 of the solution."""
    average, losses, state = six_runs(dtype)
    assert np.median(losses[:, -1] / losses[:, 0]) < 0.1
    errors = np.abs(np.asarray(average["w"], np.float32)[..., 0] - [1.0, -2.0, 0.5]).max(-1)
    assert errors.max() < 0.2
    assert np.median(errors) < 0.1
    assert average["w"].dtype == dtype
    assert state.rule.signal.dtype == jnp.float32
    assert state.trace["w"].dtype == jnp.float32


MIXED = {"a": jnp.float64, "b": jnp.float32, "c": jnp.bfloat16}


def pieces():
    """An optimizer, parameters of three types, its state, and a compiled update for a batch."""
    optimizer = sgdol_free()
    params = {name: jnp.linspace(-1, 1, 6).reshape(2, 3).astype(kind) for name, kind in MIXED.items()}

    def loss(params, noise):
        return sum(jnp.sum((p - noise.mean()) ** 2).astype(jnp.float32) for p in params.values())

    @jax.jit
    def update(params, state, noise):
        def evaluate(params):
            return microbatch_grads(loss, 2, value=True)(params, noise)

        value, grads = evaluate(params)
        return optimizer.update(grads, state, params, value=value, value_and_grads=evaluate)

    return update, params, optimizer.init(params)


def test_a_learning_rate_of_another_optimizer_draws_a_warning():
    with pytest.warns(UserWarning, match=r"learning_rate=0\.001 .* another optimizer's.* 1,000 times too short"):
        sgdol_free(1e-3)


def test_diagnostics_count_what_happened_also_parameters_that_something_else_has_moved():
    update, params, state = pieces()
    assert np.isnan(diagnostics((state,))["signal_to_noise"])  # in a tuple, as in the state of a chain
    whole = jax.jit(
        lambda params, *rest: (lambda u, state: (optax.apply_updates(params, u), state))(*update(params, *rest))
    )
    batches = 0.1 * np.random.default_rng(0).normal(size=(60, 4))
    batches[5] = np.nan
    for noise in batches[:30]:  # nothing else moves them, in one program...
        params, state = whole(params, state, noise)
    for noise in batches[30:40]:  # ...and in two
        updates, state = update(params, state, noise)
        params = optax.apply_updates(params, updates)
    now = diagnostics((state,))
    assert (now["updates"], now["gradients"], now["skipped"], now["moved"]) == (39, 2, 1, 0)
    assert now["evaluations"] > 40
    assert min(now["smoothness"], now["step_size"][0]) > 0
    assert 0 <= now["signal_to_noise"] < np.inf
    assert now["noise_scale"] >= 0
    params["c"] = params["c"].at[1, 2].add(0.5)
    for noise in batches[40:45]:
        params, state = whole(params, state, noise)
    assert diagnostics(state)["moved"] == 1
    for noise in batches[45:50]:  # as optax.scale(0.1) behind it does
        updates, state = update(params, state, noise)
        params = optax.apply_updates(params, jax.tree.map(lambda u: 0.1 * u, updates))
    assert diagnostics(state)["moved"] == 5
    params, state = whole(params, state, batches[50])
    assert diagnostics(state)["moved"] == 6
    assert whole._cache_size() == 1  # the second call compiles nothing


@pytest.mark.parametrize("metric", ["euclidean", Dense()], ids=str)
def test_parameters_and_state_may_both_be_donated(metric):
    optimizer = sgdol_free(metric=metric)

    def step(params, state):
        def evaluate(p):
            return jnp.sum(p["a"] ** 2), jax.tree.map(lambda v: jnp.stack([v, v]), p)

        value, grads = evaluate(params)
        updates, state = optimizer.update(grads, state, params, value=value, value_and_grads=evaluate)
        return optax.apply_updates(params, updates), state

    params = tree_of(np.arange(6.0))
    state = optimizer.init(params)
    donating = jax.jit(step, donate_argnums=(0, 1))
    for _ in range(3):
        params, state = donating(params, state)
    assert state.rule.updates == 3


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
