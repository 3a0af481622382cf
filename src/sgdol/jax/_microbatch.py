"""Independent gradients from one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sgdol.jax._axes import vary_over

__all__ = ["mean_of_microbatches", "microbatch_grads"]


def microbatch_grads(
    loss: Callable[..., Any], k: int = 2, *, value: bool = False, axis_name: Any = None
) -> Callable[..., Any]:
    r"""The gradients of ``k`` microbatches of one batch, stacked along a new leading axis of every leaf.

    The batch is cut into ``k`` equal parts and ``loss`` is differentiated on each, by ``vmap``: the k gradients are
    independent if the batch's samples are, and their mean is the batch's own gradient, so they cost what one gradient
    of the whole batch costs. ``update`` of :func:`sgdol.jax.sgdol` takes them as they are.

    Args:
        loss: ``loss(params, *batch)``, a scalar, a mean over the samples of the batch.
        k: how many microbatches, at least 2; with ``axis_name``, on each device, at least 1.
        value: return (the mean of the losses, the gradients) instead.
        axis_name: under ``shard_map`` or ``pmap``, the name of the devices: each gets the gradients of its own batch.
            ``shard_map`` would otherwise sum them.

    Returns:
        A function of ``(params, *batch)``. Every array in ``batch`` has the samples along its first axis, and their
        number is a multiple of ``k``.

    >>> import jax.numpy as jnp
    >>> def loss(params, x):
    ...     return jnp.mean(params * x)
    >>> microbatch_grads(loss, 2)(jnp.zeros(()), jnp.array([1.0, 3.0, 5.0, 7.0])).tolist()
    [2.0, 6.0]
    """
    least = 2 if axis_name is None else 1
    if isinstance(k, bool) or not isinstance(k, int) or k < least:
        reason = " (a step size needs independent gradients)" * (axis_name is None)
        raise ValueError(f"k must be an integer of at least {least}{reason}, got {k!r}")

    def gradients(params: Any, *batch: Any) -> Any:
        if axis_name is not None:
            params = vary_over(axis_name, params)
        over = (None, *(0 for _ in batch))
        losses, stacked = jax.vmap(jax.value_and_grad(loss), in_axes=over)(params, *jax.tree.map(split, batch))
        if not value:
            return stacked
        mean = jnp.mean(losses)
        return (mean if axis_name is None else jax.lax.pmean(mean, axis_name)), stacked

    def split(array: jax.Array) -> jax.Array:
        samples = array.shape[0] if array.ndim else 0
        if samples < k or samples % k:
            raise ValueError(
                f"the first axis of every array of the batch must be a positive multiple of k = {k}, got the shape "
                f"{array.shape}"
            )
        return array.reshape(k, samples // k, *array.shape[1:])

    return gradients


def mean_of_microbatches() -> optax.GradientTransformation:
    """The mean over the first axis of stacked gradients, for what is not SGDOL.

    In ``optax.partition``, every part gets stacked gradients, and only SGDOL knows what to do with them. In front of
    the others this makes ordinary gradients of them. ``update`` needs ``params``, whose shapes say what is stacked.

    >>> import jax.numpy as jnp
    >>> from sgdol.jax import sgdol
    >>> others = optax.chain(mean_of_microbatches(), optax.adam(1e-3))
    >>> optimizer = optax.partition({"sgdol": sgdol(0.1), "adam": others}, {"w": "sgdol", "b": "adam"})
    >>> params = {"w": jnp.zeros(2), "b": jnp.zeros(())}
    >>> stacked = {"w": jnp.ones((4, 2)), "b": jnp.ones(4)}
    >>> updates, _ = optimizer.update(stacked, optimizer.init(params), params)
    >>> [leaf.shape for leaf in jax.tree.leaves(updates)]
    [(), (2,)]
    """

    def mean(gradient: jax.Array, parameter: jax.Array) -> jax.Array:
        if jnp.shape(gradient)[1:] != jnp.shape(parameter) or jnp.ndim(gradient) != jnp.ndim(parameter) + 1:
            raise ValueError(
                "mean_of_microbatches takes gradients stacked along one new first axis, got the shape "
                f"{jnp.shape(gradient)} for a parameter of the shape {jnp.shape(parameter)}"
            )
        return jnp.mean(gradient, axis=0)

    def update(updates: Any, params: Any = None) -> Any:
        if params is None:
            raise ValueError("mean_of_microbatches needs the parameters: call update(grads, state, params)")
        return jax.tree.map(mean, updates, params)

    return optax.stateless(update)
