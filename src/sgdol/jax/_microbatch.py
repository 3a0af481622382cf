"""Independent gradients from one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

__all__ = ["microbatch_grads"]


def microbatch_grads(loss: Callable[..., jax.Array], k: int = 2) -> Callable[..., Any]:
    r"""The gradients of ``k`` microbatches of one batch, stacked along a new leading axis of every leaf.

    The batch is cut into ``k`` equal parts and ``loss`` is differentiated on each, by ``vmap``: the k gradients are
    independent if the batch's samples are, and their mean is the batch's own gradient, so they cost what one gradient
    of the whole batch costs. ``update`` of :func:`sgdol.jax.sgdol` takes them as they are.

    Args:
        loss: ``loss(params, *batch)``, a scalar, a mean over the samples of the batch.
        k: how many microbatches, at least 2.

    Returns:
        A function of ``(params, *batch)``. Every array in ``batch`` has the samples along its first axis, and their
        number is a multiple of ``k``.

    >>> import jax.numpy as jnp
    >>> def loss(params, x):
    ...     return jnp.mean(params * x)
    >>> microbatch_grads(loss, 2)(jnp.zeros(()), jnp.array([1.0, 3.0, 5.0, 7.0])).tolist()
    [2.0, 6.0]
    """
    if not isinstance(k, int) or k < 2:
        raise ValueError(f"k must be an integer of at least 2 (a step size needs independent gradients), got {k!r}")

    def gradients(params: Any, *batch: Any) -> Any:
        return jax.vmap(jax.grad(loss), in_axes=(None, *(0 for _ in batch)))(params, *jax.tree.map(split, batch))

    def split(array: jax.Array) -> jax.Array:
        samples = array.shape[0] if array.ndim else 0
        if samples < k or samples % k:
            raise ValueError(
                f"the first axis of every array of the batch must be a positive multiple of k = {k}, got the shape "
                f"{array.shape}"
            )
        return array.reshape(k, samples // k, *array.shape[1:])

    return gradients
