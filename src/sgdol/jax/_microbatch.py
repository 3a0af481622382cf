"""Independent gradients from one batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sgdol.jax import _axes
from sgdol.jax._blocks import add
from sgdol.jax._checks import shown

__all__ = ["mean_of_microbatches", "microbatch_grads"]


def microbatch_grads(
    loss: Callable[..., Any],
    k: int = 2,
    *,
    value: bool = False,
    has_aux: bool = False,
    one_by_one: bool = False,
    axis_name: Any = None,
) -> Callable[..., Any]:
    r"""The gradients of ``k`` microbatches of one batch, stacked along a new leading axis of every leaf.

    The batch is cut into ``k`` parts and ``loss`` is differentiated on each: the k gradients are independent if the
    batch's samples are, and their mean is the batch's own gradient, so they cost what one gradient of the whole batch
    costs. ``update`` of :func:`sgdol.jax.sgdol` takes them as they are, and so does a flax ``TrainState``::

        grads = microbatch_grads(loss)(state.params, x, y)  # in place of jax.grad(loss)(state.params, x, y)
        state = state.apply_gradients(grads=grads)

    A number of samples that is no multiple of k is cut as evenly as can be, and with :math:`b_i` of the b samples in
    part i its gradient is multiplied by :math:`k b_i / b`, so that the mean stays the batch's. Of fewer samples than k
    each is a part, and the gradient of a single sample comes without the new axis: ``update`` holds it. Every other
    shape of a batch is compiled anew, as always under ``jax.jit``.

    Args:
        loss: ``loss(params, *batch)``, a scalar, a mean over the samples that it is given.
        k: how many microbatches, at least 2; with ``axis_name``, on each device, at least 1.
        value: return (the loss of the batch, the gradients) instead.
        has_aux: ``loss`` returns (the scalar, something else), as for ``jax.grad``: return (the gradients, that of all
            parts stacked), or with ``value`` ((the loss of the batch, that of all parts stacked), the gradients).
        one_by_one: True to compute the parts one after the other, which needs memory for the activations of one part
            only, as gradient accumulation does; False for all at once, by ``vmap``.
        axis_name: under ``shard_map`` or ``pmap``, the name of the axis of devices. Each device then gets the gradients
            of its own batch; without the name ``shard_map`` sums them.

    Returns:
        A function of ``(params, *batch)``. Arrays in ``batch``, which may be a tree, have the samples along their first
        axis. A random key is split, one for each part, so that noise such as dropout's is independent, too; other
        scalars go to every part as they are.

    >>> import jax.numpy as jnp
    >>> def loss(params, x):
    ...     return jnp.mean(params * x)
    >>> microbatch_grads(loss, 2)(jnp.zeros(()), jnp.array([1.0, 3.0, 5.0, 7.0])).tolist()
    [2.0, 6.0]
    >>> [round(float(g), 3) for g in microbatch_grads(loss, 2)(jnp.zeros(()), jnp.array([3.0, 6.0, 9.0]))]  # 2/3, 4/3
    [2.0, 10.0]
    """
    least = 2 if axis_name is None else 1
    if isinstance(k, bool) or not isinstance(k, int) or k < least:
        reason = " (a step size needs independent gradients)" * (axis_name is None)
        raise ValueError(f"k must be an integer of at least {least}{reason}, got {shown(k)}")
    axes = () if axis_name is None else _axes.names(axis_name)
    differentiate = jax.value_and_grad(loss, has_aux=has_aux)

    def gradients(params: Any, *batch: Any) -> Any:
        if axes:
            params = _axes.vary_over(axis_name, params)
        sizes = _sizes(batch, k)
        results, stacked = _on_parts(functools.partial(differentiate, params), batch, sizes, one_by_one)
        losses, aux = results if has_aux else (results, None)
        if len(set(sizes)) > 1:
            weights = np.array(sizes) * len(sizes) / sum(sizes)
            losses, stacked = jax.tree.map(lambda g: _times(g, weights), (losses, stacked))
        if sizes == [1] and not axes:
            stacked = jax.tree.map(lambda g: g[0], stacked)
        if value:
            mean = jnp.mean(losses)
            mean = _axes.mean_over(axes, mean) if axes else mean
            return ((mean, aux) if has_aux else mean), stacked
        return (stacked, aux) if has_aux else stacked

    return gradients


def _sizes(batch: Any, k: int) -> list[int]:
    """How many samples each part of the batch has."""
    lengths = {leaf.shape[0] for leaf in map(jnp.asarray, jax.tree.leaves(batch)) if leaf.ndim}
    if len(lengths) != 1 or 0 in lengths:
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
        raise ValueError(
            f"the arrays of a batch must have the same number of samples, at least 1, along their first axis, got the "
            f"shapes {shown(shapes)}"
        )
    samples = lengths.pop()
    parts = min(k, samples)
    return [(samples + i) // parts for i in range(parts)]


def _on_parts(function: Callable[..., Any], batch: Any, sizes: list[int], one_by_one: bool) -> Any:
    """The function of every part, stacked: at once for all parts that have the same size."""
    leaves, tree = jax.tree.flatten(batch)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    is_key = [leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    shared = [leaf.ndim == 0 and not key for leaf, key in zip(leaves, is_key, strict=True)]
    leaves = [jax.random.split(leaf, len(sizes)) if key else leaf for leaf, key in zip(leaves, is_key, strict=True)]
    own = [i for i, same in enumerate(shared) if not same]

    def of_part(mine: list[Any]) -> Any:
        given = [*leaves]
        for i, value in zip(own, mine, strict=True):
            given[i] = value
        return function(*jax.tree.unflatten(tree, given))

    outcomes, part, begin = [], 0, 0
    for size in sorted(set(sizes)):
        count = sizes.count(size)
        rows = [
            leaves[i][part : part + count]
            if is_key[i]
            else leaves[i][begin : begin + count * size].reshape(count, size, *leaves[i].shape[1:])
            for i in own
        ]
        outcomes.append(jax.lax.map(of_part, rows) if one_by_one else jax.vmap(of_part)(rows))
        part, begin = part + count, begin + count * size
    return outcomes[0] if len(outcomes) == 1 else jax.tree.map(lambda *each: jnp.concatenate(each), *outcomes)


def _times(stacked: jax.Array, weights: Any) -> jax.Array:
    return stacked * jnp.asarray(weights, jnp.finfo(stacked.dtype).dtype).reshape(-1, *[1] * (stacked.ndim - 1))


def mean_of_microbatches() -> optax.GradientTransformation:
    """Turn stacked gradients into ordinary ones, by their mean over the first axis.

    In ``optax.partition`` with SGDOL in it, every optimizer is given the stacked gradients. Put this transformation in
    front of the optimizers that expect ordinary gradients. ``update`` needs ``params``, whose shapes tell stacked
    gradients from ordinary ones.

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
        wide = gradient.astype(jnp.result_type(gradient, jnp.float32))
        return (add(wide) / gradient.shape[0]).astype(gradient.dtype)

    def update(updates: Any, params: Any = None) -> Any:
        if params is None:
            raise ValueError("mean_of_microbatches needs the parameters: call update(grads, state, params)")
        return jax.tree.map(mean, updates, params)

    return optax.stateless(update)
