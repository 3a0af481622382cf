"""What tests here share: six numbers as a tree, gradients that take the multiplier everywhere, and a loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sgdol.learners import FTRL
from sgdol.reference import replay

BLOCKS = {"global": None, "group": [0, 0, 1, 1, 1, 0], "tensor": [0, 0, 1, 1, 1, 2], "coordinate": range(6)}
"""The block of each of the six numbers, as the reference numbers them."""

LABELS = {"a": "ends", "b": "middle", "c": "ends"}

ALGORITHM = {"learner": FTRL(), "momentum": None}
"""Algorithm 1 with FTRL instead of the defaults, which are past the paper."""

DEFAULTS = {
    "smoothness": 4.0,
    "alpha": None,
    "kappa": 10.0,
    "estimator": "symmetric",
    "momentum": 0.9,
    "bias_correction": False,
    "learner": "measured",
}
"""The defaults for a base rate of 1/4, in the words of the reference."""


def reference(recorded, **options):
    """What the defaults do, from zero; or what they do with other options."""
    recorded = np.asarray(recorded)
    return replay(recorded, np.zeros(recorded.shape[-1]), **{**DEFAULTS, **options})


def granular(granularity):
    """The options for a granularity."""
    return {"granularity": granularity, **({"param_labels": LABELS} if granularity == "group" else {})}


def tree(vector):
    """Six numbers along the last axis, as a vector, a matrix and a scalar."""
    v = np.asarray(vector)
    b = v[..., 2:5].reshape(*v.shape[:-1], 1, 3)
    return {"a": jnp.asarray(v[..., :2]), "b": jnp.asarray(b), "c": jnp.asarray(v[..., 5])}


def flat(params):
    """The six numbers again."""
    a, b, c = (np.asarray(params[name]) for name in "abc")
    return np.concatenate([a, b.reshape(*a.shape[:-1], 3), c[..., None]], axis=-1)


def gradients(steps, k, seed=0):
    """Signal and noise that take the multiplier to both of its bounds."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(size=(steps, 1, 1)))
    signal = np.where(np.arange(steps) < steps // 2, 1.0, -1.0)[:, None, None] * rng.normal(size=(steps, 1, 6))
    return scale * (signal * 0.5 + rng.normal(size=(steps, k, 6)))


def overshooting(steps, k):
    """Each gradient points back, as after steps that are too long: what a learner with hindsight answers to."""
    back = 3 * (-1.0) ** np.arange(steps)[:, None, None] * np.random.default_rng(5).normal(size=6)
    return gradients(steps, k) + back


def run(optimizer, stacks, x=None):
    """All the iterates, and the last state."""
    params = tree(np.zeros(6) if x is None else x)
    state, path = loop(optimizer, tree(np.asarray(stacks)), params, optimizer.init(params))
    return np.concatenate([[flat(params)], flat(path)]), state


def loop(optimizer, stacks, params, state):
    """The last state and the iterates, compiled."""

    def step(carry, stack):
        params, state = carry
        updates, state = optimizer.update(stack, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    (_, state), path = jax.jit(lambda carry, xs: jax.lax.scan(step, carry, xs))((params, state), stacks)
    return state, path


def replicate(optimizer, recorded):
    """The last iterate and the states of all replicas, each with one of the gradients: devices as vmap has them."""
    update = jax.jit(jax.vmap(optimizer.update, in_axes=(0, None, None), out_axes=0, axis_name="replicas"))
    params = tree(np.zeros(6))
    state = optimizer.init(params)
    for stack in recorded:
        updates, states = update(tree(stack), state, params)
        params = jax.tree.map(lambda p, u: p + u[0], params, updates)
        state = jax.tree.map(lambda leaf: leaf[0], states)
    return flat(params), states
