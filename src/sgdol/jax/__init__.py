"""SGDOL for optax.

``sgdol_free`` needs no learning rate; ``sgdol`` is SGD with momentum that learns its step size, ``scale_by_sgdol`` the
same without the learning rate; ``microbatch_grads`` computes their independent gradients from one batch.

>>> import jax.numpy as jnp
>>> import optax
>>> from sgdol.jax import microbatch_grads, sgdol
>>> def loss(params, x, y):
...     return jnp.mean((x @ params - y) ** 2)
>>> optimizer = sgdol(learning_rate=0.1)
>>> params = jnp.zeros(2)
>>> state = optimizer.init(params)
>>> x, y = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0]]), jnp.array([1.0, 2.0, 3.0, -1.0])
>>> for _ in range(100):
...     grads = microbatch_grads(loss, 2)(params, x, y)  # one batch, split into two independent halves
...     updates, state = optimizer.update(grads, state, params)
...     params = optax.apply_updates(params, updates)
>>> bool(jnp.allclose(params, jnp.array([1.0, 2.0]), atol=0.01))
True
"""

# ruff: noqa: E402  # what is missing is said before anything needs it
from __future__ import annotations

from sgdol._extras import require

require("sgdol.jax", "jax", "jax", "optax")

from sgdol.jax._averaging import PolynomialAverageState, averaged_params
from sgdol.jax._blocks import GRANULARITIES
from sgdol.jax._core import ScaleBySGDOLState
from sgdol.jax._diagnostics import diagnostics
from sgdol.jax._free import SGDOLFreeState, sgdol_free
from sgdol.jax._microbatch import mean_of_microbatches, microbatch_grads
from sgdol.jax._sgdol import scale_by_sgdol, sgdol

__all__ = [
    "GRANULARITIES",
    "PolynomialAverageState",
    "SGDOLFreeState",
    "ScaleBySGDOLState",
    "averaged_params",
    "diagnostics",
    "mean_of_microbatches",
    "microbatch_grads",
    "scale_by_sgdol",
    "sgdol",
    "sgdol_free",
]
