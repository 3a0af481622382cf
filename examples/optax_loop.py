"""optax: a batch, split into two microbatches by vmap, gives an update; the averaged parameters are evaluated."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

from sgdol.jax import averaged_params, diagnostics, microbatch_grads, sgdol

digits = load_digits()
shuffle, first, second, batches = jax.random.split(jax.random.key(0), 4)
order = jax.random.permutation(shuffle, len(digits.target))
images, labels = jnp.asarray(digits.data, jnp.float32)[order] / 16, jnp.asarray(digits.target)[order]


def model(params: Any, x: jax.Array) -> jax.Array:
    """A network with one hidden layer."""
    return jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """A mean over the samples, so that the mean over the microbatches is that of the batch."""
    return optax.softmax_cross_entropy_with_integer_labels(model(params, x), y).mean()


params = {
    "w1": jax.random.normal(first, (64, 64)) / 8,
    "b1": jnp.zeros(64),
    "w2": jax.random.normal(second, (64, 10)) / 8,
    "b2": jnp.zeros(10),
}
optimizer = sgdol(learning_rate=0.05, averaging=8)
state = optimizer.init(params)


@jax.jit
def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
    """One update."""
    grads = microbatch_grads(loss, 2)(params, x, y)  # stacked: a new first axis of length 2
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


for epoch in range(10):
    for rows in jax.random.permutation(jax.random.fold_in(batches, epoch), 1500)[: 46 * 32].reshape(46, 32):
        params, state = step(params, state, images[rows], labels[rows])
    predicted = model(averaged_params(state, params), images[1500:]).argmax(1)
    report = diagnostics(state)
    print(
        f"epoch {epoch}  test accuracy {(predicted == labels[1500:]).mean():.3f}  "
        f"step size {report['step_size'][0]:.4f}  noise scale {16 * report['noise_scale']:.0f} samples"
    )
