"""optax, data parallel: each device's gradient is one of the independent ones, so k = 4 on four devices.

Besides the mean of the gradients, which data parallel training needs anyway, one number is communicated.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # four devices out of one CPU

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

from sgdol.jax import diagnostics, microbatch_grads, sgdol

digits = load_digits()
shuffle, batches = jax.random.split(jax.random.key(0))
order = jax.random.permutation(shuffle, len(digits.target))
images, labels = jnp.asarray(digits.data, jnp.float32)[order] / 16, jnp.asarray(digits.target)[order]

mesh = jax.make_mesh((len(jax.devices()),), ("data",))
everywhere, rows = PartitionSpec(), PartitionSpec("data")


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Softmax regression."""
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"] + params["b"], y).mean()


params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
optimizer = sgdol(learning_rate=0.2, axis_name="data")
state = optimizer.init(params)


def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
    """One update, on every device at once: it sees its own rows of the batch, and all get the same parameters."""
    grads = microbatch_grads(loss, 1, axis_name="data")(params, x, y)  # this device's own, not yet averaged
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


parallel_step = jax.jit(
    jax.shard_map(step, mesh=mesh, in_specs=(everywhere, everywhere, rows, rows), out_specs=everywhere)
)

for epoch in range(10):
    for batch in jax.random.permutation(jax.random.fold_in(batches, epoch), 1500)[: 46 * 32].reshape(46, 32):
        x, y = jax.device_put((images[batch], labels[batch]), NamedSharding(mesh, rows))
        params, state = parallel_step(params, state, x, y)
    predicted = (images[1500:] @ params["w"] + params["b"]).argmax(1)
    report = diagnostics(state)
    print(
        f"epoch {epoch}  test accuracy {(predicted == labels[1500:]).mean():.3f}  "
        f"step size {report['step_size'][0]:.4f}  {report['gradients']} gradients per update"
    )
