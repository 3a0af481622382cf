"""Gradients and arguments that are very large, very small, or no numbers at all."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dense_metric import Dense
from six_numbers import flat, gradients, granular, loop, run, tree

from sgdol.jax import diagnostics, scale_by_sgdol, sgdol
from sgdol.learners import FTRL, MeasuredCurvature

# Gradients -----------------------------------------------------------------------------------------------------------


def program(dtype, **options):
    """A compiled function: the iterates if the objective is multiplied by 2^exponent, the base rate divided by it."""

    @jax.jit
    def run(rate, stacks):
        optimizer = sgdol(rate, **options)
        params = jax.tree.map(lambda p: p.astype(dtype), tree(np.zeros(6)))
        return loop(optimizer, stacks, params, optimizer.init(params))

    def path(recorded, exponent):
        stacks = jax.tree.map(lambda g: jnp.asarray(g, dtype), tree(recorded * 2.0**exponent))
        state, iterates = run(0.25 * 2.0**-exponent, stacks)
        return flat(iterates), state

    return path


def path(recorded, exponent, dtype, **options):
    return program(dtype, **options)(recorded, exponent)


CONFIGURATIONS = [
    {"momentum": 0.9},
    {"metric": "rms", "learner": MeasuredCurvature(), **granular("group")},
    {"metric": "adagrad", "momentum": 0.5, **granular("coordinate")},
    {"estimator": "paper", **granular("tensor")},
    {"metric": Dense()},
]


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=["momentum", "rms", "adagrad", "paper", "dense"])
@pytest.mark.parametrize(("dtype", "exponents"), [("float32", (-100, 100)), ("float64", (-500, 500))])
def test_multiplying_the_objective_by_a_power_of_two_changes_no_bit(options, dtype, exponents):
    """2^100 is 1e30, 2^500 is 3e150."""
    with jax.enable_x64(dtype == "float64"):
        recorded, path = gradients(12, 3), program(dtype, **options)
        expected, state = path(recorded, 0)
        told = diagnostics(state)
        for exponent in exponents:
            scaled, state = path(recorded, exponent)
            np.testing.assert_array_equal(scaled, expected)
            now = diagnostics(state)
            assert now["signal_to_noise"] == told["signal_to_noise"]
            assert now["regret"] * 2.0**-exponent == told["regret"]


def test_a_given_alpha_is_scaled_with_the_objective_also_where_the_type_does_not_hold_it():
    recorded = gradients(12, 2)
    expected, _ = path(recorded, 0, "float32", alpha=3.0)
    scaled, _ = path(recorded, 100, "float32", alpha=3.0 * 2.0**200)
    np.testing.assert_array_equal(scaled, expected)


@pytest.mark.parametrize("exponent", [-100, 100])
def test_a_given_alpha_beside_which_the_gradients_are_nothing_or_everything(exponent):
    """s stays 1, or is that of follow the leader."""
    recorded = gradients(12, 2)
    scaled, _ = path(recorded, exponent, "float32", alpha=10.0)
    expected, _ = path(recorded, 0, "float32", alpha=1e-12 if exponent > 0 else 1e30)
    np.testing.assert_allclose(scaled, expected, rtol=1e-5, atol=1e-6)


def test_gradients_may_grow_by_twenty_orders_after_a_tiny_first_one():
    recorded = gradients(8, 2)
    recorded[0] *= 1e-20
    with jax.enable_x64(False):
        iterates, state = path(recorded, 0, "float32")
    assert diagnostics(state)["skipped"] == 0
    assert np.isfinite(iterates).all()


def test_gradients_that_cancel_at_first_still_count():
    """Their mean is zero, so that there is no direction and no unit; their signal is negative."""
    with jax.enable_x64(True):
        recorded, path = gradients(6, 2), program("float64")
        recorded[0, 1] = -recorded[0, 0]
        (expected, state), (iterates, scaled) = path(recorded, 0), path(recorded, 40)
        for found in (state, scaled):
            assert diagnostics(found)["updates"] == 6
            assert float(found[0].unit) == 1.0
        np.testing.assert_array_equal(iterates, expected)


def test_a_state_of_another_learner_or_granularity_is_refused():
    params, stack = tree(np.zeros(6)), tree(gradients(1, 2)[0])
    with pytest.raises(ValueError, match=r"made with another learner: it has 2 numbers, and MeasuredCurvature has 4"):
        scale_by_sgdol().update(stack, scale_by_sgdol(learner=FTRL()).init(params), params)
    with pytest.raises(ValueError, match=r'made with granularity="coordinate" and this optimizer is without'):
        scale_by_sgdol().update(stack, scale_by_sgdol(granularity="coordinate").init(params), params)


@pytest.mark.parametrize("kappa", [1e308, 1e-308])
def test_a_kappa_at_the_edge_gives_numbers(kappa):
    for x64 in (False, True):
        with jax.enable_x64(x64):
            iterates, state = path(gradients(6, 2), 0, "float64" if x64 else "float32", kappa=kappa)
            assert np.isfinite(iterates).all()
            if kappa > 1:
                assert diagnostics(state)["step_size"] == pytest.approx([0.25])


# Arguments -----------------------------------------------------------------------------------------------------------

GOOD = [np.float16(0.5), np.float32(0.5), np.float64(0.5), np.longdouble(0.5), np.array(0.5), Fraction(1, 2)]


@pytest.mark.parametrize("half", GOOD, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", ["learning_rate", "smoothness", "alpha", "kappa", "momentum", "weight_decay"])
def test_a_number_is_a_number_of_whatever_type(name, half):
    others = {} if name in ("learning_rate", "smoothness") else {"learning_rate": 0.1}
    expected = sgdol(**others, **{name: 0.5}).init(jnp.ones(2))
    state = sgdol(**others, **{name: half}).init(jnp.ones(2))
    jax.tree.map(np.testing.assert_array_equal, state, expected)


@pytest.mark.parametrize("integer", [np.int8(1), np.uint64(1), 1, jnp.array(1), jnp.array(1.0)])
def test_integers_and_arrays_are_numbers_too(integer):
    assert sgdol(integer, alpha=integer, weight_decay=integer, averaging=integer).init(jnp.ones(2))


NOT_NUMBERS = [True, np.True_, 1j, np.complex64(1), jnp.array(1j), jnp.array(True), "0.1", b"1", [0.1], object()]
NOT_NUMBERS += [np.array([0.1, 0.2]), np.array([0.1]), jnp.array([0.1, 0.2]), np.array("a")]
NUMBERS = ["learning_rate", "smoothness", "alpha", "kappa", "momentum", "weight_decay", "averaging"]


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda value: f"{type(value).__name__}")
def test_what_is_no_number_is_refused_by_the_name_of_the_argument(value):
    for name in NUMBERS:
        others = {} if name in ("learning_rate", "smoothness") else {"learning_rate": 0.1}
        with pytest.raises(TypeError, match=f"^{name} must be a number, "):
            sgdol(**others, **{name: value})


BAD = [-1.0, np.nan, np.inf, 10**400, -(10**5000), np.float32(-1), jnp.array(-1.0), jnp.array(jnp.nan), Fraction(-1, 2)]


@pytest.mark.parametrize("value", BAD, ids=lambda value: type(value).__name__)
def test_a_number_out_of_range_is_refused_at_construction_also_in_an_array(value):
    for name in NUMBERS:
        others = {} if name in ("learning_rate", "smoothness") else {"learning_rate": 0.1}
        with pytest.raises(ValueError, match=f"^{name} must be .*, got ") as caught:
            sgdol(**others, **{name: value})
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(("name", "value"), [("learning_rate", 1e-60), ("smoothness", 1e60), ("weight_decay", 1e60)])
def test_a_number_that_the_default_type_does_not_hold_is_refused(name, value):
    others = {} if name in ("learning_rate", "smoothness") else {"learning_rate": 0.1}
    with jax.enable_x64(False), pytest.raises(ValueError, match=f"^{name} must be .*in float32"):
        sgdol(**others, **{name: value})
    with jax.enable_x64(True):
        sgdol(**others, **{name: value})


def test_a_traced_number_is_let_through():
    updates = jax.jit(lambda beta: sgdol(0.1, momentum=beta).init(jnp.ones(2)))(-1.0)
    assert updates is not None
    with pytest.raises(TypeError, match="momentum must be a number"):
        jax.jit(lambda beta: sgdol(0.1, momentum=beta).init(jnp.ones(2)))(jnp.ones(2))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("betas", "momentum=0.9 does what the first of Adam's betas does"),
        ("nesterov", "there is no other kind"),
        ("lr", "it is learning_rate here"),
        ("momentun", "perhaps momentum is meant"),
        ("fused", "It takes learning_rate, smoothness, alpha, kappa, estimator, granularity, momentum, "),
    ],
)
def test_an_unknown_argument_is_answered_in_a_sentence(name, hint):
    with pytest.raises(TypeError, match=rf"^sgdol\(\) has no argument '{name}'.*{hint}"):
        sgdol(0.1, **{name: 1})


def test_inject_hyperparams_sees_the_signature():
    optimizer = optax.inject_hyperparams(sgdol)(0.1, momentum=0.9, metric="rms")
    state = optimizer.init(jnp.ones(2))
    assert set(state.hyperparams) == {"learning_rate", "momentum"}
    _, state = run(optimizer, gradients(3, 2))
    assert diagnostics(state)["updates"] == 3
