"""What the optimizers say about themselves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from six_numbers import gradients, run

from sgdol.jax import diagnostics, microbatch_grads, sgdol, sgdol_free


def test_nothing_but_noise_is_never_shown_as_negative():
    """A pair that points opposite ways has u < 0 < n."""
    recorded = gradients(6, 2)
    recorded[:, 1] = -0.5 * recorded[:, 0]
    _, state = run(sgdol(0.1), recorded)
    now = diagnostics(state)
    assert now["signal_to_noise"] == 0
    assert now["noise_scale"] == np.inf


def test_a_gradient_without_noise_has_a_finite_ratio():
    recorded = gradients(6, 2)
    recorded[:, 1] = recorded[:, 0]
    _, state = run(sgdol(0.1), recorded)
    now = diagnostics(state)
    assert now["signal_to_noise"] == 2.0**52
    assert now["noise_scale"] == 0


def test_a_state_of_the_optimizer_without_m_is_read_too():
    def loss(x, noise):
        return jnp.sum(x**2) / 2 + jnp.mean(noise @ x)

    optimizer = optax.chain(sgdol_free())
    x = jnp.array([3.0, -1.0])
    state = optimizer.init(x)
    assert np.isnan(diagnostics(state)["signal_to_noise"])

    @jax.jit
    def step(x, state, noise):
        def evaluate(x):
            return microbatch_grads(loss, 2, value=True)(x, noise)

        value, grads = evaluate(x)
        updates, state = optimizer.update(grads, state, x, value=value, value_and_grads=evaluate)
        return optax.apply_updates(x, updates), state

    for key in jax.random.split(jax.random.key(0), 20):
        x, state = step(x, state, jax.random.normal(key, (4, 2)))
    now = diagnostics(state)
    assert now["updates"] == 20
    assert now["gradients"] == 2
    assert now["evaluations"] > 20
    assert now["smoothness"] > 0
    assert now["step_size"][0] > 0
    assert 0 <= now["signal_to_noise"] < np.inf
    assert now["noise_scale"] >= 0
