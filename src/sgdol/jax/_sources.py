"""Where independent gradients come from, and one record that all sources leave."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sgdol.jax import _axes
from sgdol.jax._blocks import Blocks, add, as_real
from sgdol.surrogate import Estimator

__all__ = ["Gradients", "refuse_integers", "take"]


class Gradients(NamedTuple):
    """The gradients of one call of ``update``: all that the statistics know of where they came from."""

    mean: list[jax.Array]
    """The gradient that the update follows: the mean of all, for the paper's estimator the first. Real, in float32 or
    wider."""
    others: list[jax.Array]
    """What u is made of: for the paper's estimator the second gradient. Else a vector, or several along a new first
    axis, whose squares add up to those of g_i - mean, of this device's gradients g_i."""
    k: int
    """How many gradients there are, over all devices."""
    axes: tuple[Any, ...]
    """The named axes over whose devices they are spread; none if all are here."""
    dtypes: list[Any]
    """The types of the leaves as they were given."""
    waiting: Any = None
    """The gradient that is held if none is held yet, like the parameters; None from a source that always has enough."""


def take(updates: Any, others: Any, held: Any, estimator: Estimator, axis_name: Any, blocks: Blocks) -> Gradients:
    """The gradients of a call, from the source that their shapes tell.

    Args:
        updates: what ``update`` was given: a gradient, or several stacked.
        others: a second gradient, or None.
        held: the gradient that is held, or zeros; of the shape of the parameters.
        estimator: the paper's counts the gradients of all devices as one, their mean.
        axis_name: of the devices that have gradients of their own, or None.
        blocks: how vectors lie in arrays.
    """
    axes, devices, waiting = (), 1, None
    stacked = _is_stacked(updates, held, "updates", least=2 if axis_name is None else 1)
    if others is not None:
        others = _where_not_masked(updates, others)
        if stacked or _is_stacked(others, held, "others", least=2):
            raise ValueError("others completes one gradient: give either others or stacked gradients, not both")
    if axis_name is not None:
        updates, others, axes = _of_devices(updates, others, axis_name, estimator)
        devices = _axes.size_of(axes)
        if stacked and not axes and jax.tree.leaves(updates)[0].shape[0] == 1:
            updates, stacked = jax.tree.map(lambda g: g[0], updates), False
    if others is not None:
        updates = _pair(updates, others)
    elif axes and not stacked:  # one on each device
        updates = jax.tree.map(lambda g: jnp.asarray(g)[None], updates)
    elif not stacked:  # calls alternate: the gradient that is held and this one; if none is held, this one waits
        waiting = jax.tree.map(lambda g, h: jnp.asarray(g, h.dtype), updates, held)
        updates = _pair(held, updates)
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(updates)]
    here, several = leaves[0].shape[0], [as_real(leaf) for leaf in leaves]
    if estimator == "paper":
        mean, others_ = (blocks.join([g[i] for g in several]) for i in range(2))
    elif here == 2 and not axes:  # g_1 - mean = -(g_2 - mean): one vector, which is 0 to the last bit if they are equal
        mean = blocks.join([(g[0] + g[1]) / 2 for g in several])
        others_ = blocks.join([(g[0] - g[1]) * 0.5**0.5 for g in several])
    else:
        mean = _axes.mean_over(axes, [add(g) / here for g in blocks.join(several)])
        others_ = [g - m for g, m in zip(blocks.join(several), mean, strict=True)]
    return Gradients(mean, others_, here * devices, axes, [leaf.dtype for leaf in leaves], waiting)


def _of_devices(updates: Any, others: Any, axis_name: Any, estimator: Estimator) -> tuple[Any, Any, tuple[Any, ...]]:
    """Each device's own gradients and the axes; or their mean and no axes where that counts as one gradient."""
    _axes.refuse_shared(axis_name, updates if others is None else (updates, others))
    axes = _axes.names(axis_name)
    if estimator == "paper" or _axes.size_of(axes) == 1:
        return _axes.mean_over(axes, updates), _axes.mean_over(axes, others), ()
    return updates, others, axes


def _pair(first: Any, second: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.stack([jnp.asarray(a), jnp.asarray(b)]), first, second)


# Shapes ---------------------------------------------------------------------------------------------------------------


def refuse_integers(params: Any) -> None:
    """Refuse leaves that have no gradient."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"params must be floating-point or complex: params{jax.tree_util.keystr(path)} is "
                f"{jnp.result_type(leaf)}; leave it out with optax.masked or optax.partition"
            )


def _where_not_masked(updates: Any, others: Any) -> Any:
    """``others``, without what a mask has taken out of ``updates``: ``optax.masked`` only masks the latter."""

    def masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    if not any(masked(node) for node in jax.tree.leaves(updates, is_leaf=masked)):
        return others
    try:
        return jax.tree.map(lambda g, other: g if masked(g) else other, updates, others, is_leaf=masked)
    except ValueError:
        return others  # which _is_stacked refuses in words


def _is_stacked(tree: Any, like: Any, name: str, least: int) -> bool:
    """Whether every leaf has one leading axis more than its parameter; an error for anything but all or none."""
    given: Any = jax.tree.structure(tree)
    expected: Any = jax.tree.structure(like)
    if given != expected:
        raise ValueError(f"{name} must have the tree structure of the parameters, {expected}, got {given}")
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(like)[0]]
    shapes = [(jnp.shape(g), jnp.shape(p)) for g, p in zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True)]
    if all(g == p for g, p in shapes):
        return False
    fit = [g[1:] == p and len(g) == len(p) + 1 and g[0] >= least for g, p in shapes]
    if all(fit) and len({g[0] for g, _ in shapes}) == 1:
        return True
    wrong = [f"{name}{path} has the shape {g}, its parameter {p}" for path, (g, p) in zip(paths, shapes, strict=True)]
    raise ValueError(
        f"every leaf of {name} must have the shape of its parameter, or every leaf that shape after one new first axis "
        f"of the same length k >= {least}: {'; '.join(wrong[:5])}{'; ...' * (len(wrong) > 5)}"
    )
