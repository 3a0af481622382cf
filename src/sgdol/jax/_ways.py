"""The three ways in which ``update`` gets its independent gradients, told apart by their shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sgdol import surrogate
from sgdol.jax._draw import mean_over, refuse_shared

__all__ = ["Gradients", "gradients", "refuse_integers"]


class Gradients(NamedTuple):
    """The gradients of a call of ``update``."""

    stacked: Any
    """All that there are, along a new first axis of every leaf."""
    partner: Any
    """The gradient itself, if there was only one, which is stacked after the one that is held; else None."""
    axis_name: Any
    """Of the devices that have such gradients of their own; else None."""
    devices: int
    """How many those are."""


def gradients(updates: Any, held: Any, others: Any, estimator: surrogate.Estimator, axis_name: Any) -> Gradients:
    """Tell the ways apart.

    Args:
        updates: what ``update`` was given: a gradient, or several stacked.
        held: the gradient that is held, or zeros; of the shape of the parameters.
        others: a second gradient, or None.
        estimator: the paper's counts the gradients of all devices as one, their mean.
        axis_name: of the devices, or None.
    """
    devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    stacked = _is_stacked(updates, held, "updates", least=1 if axis_name is not None else 2)
    if others is not None:
        others = _where_not_masked(updates, others)
        if stacked or _is_stacked(others, held, "others", least=2):
            raise ValueError("others completes one gradient: give either others or stacked gradients, not both")
    if axis_name is not None:
        refuse_shared(axis_name, updates if others is None else (updates, others))
        if estimator == "paper" or devices == 1:
            updates, others = mean_over(axis_name, updates), mean_over(axis_name, others)
            devices, axis_name = 1, None
        if stacked and devices * jax.tree.leaves(updates)[0].shape[0] == 1:
            updates, stacked = jax.tree.map(lambda g: g[0], updates), False
    if others is not None:
        return Gradients(_pair(updates, others), None, axis_name, devices)
    if stacked:
        return Gradients(updates, None, axis_name, devices)
    if devices > 1:
        return Gradients(jax.tree.map(lambda g: jnp.asarray(g)[None], updates), None, axis_name, devices)
    partner = jax.tree.map(jnp.asarray, updates)
    return Gradients(_pair(held, partner), partner, None, 1)


def refuse_integers(params: Any) -> None:
    """Refuse leaves that have no gradient."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"params must be floating-point or complex: params{jax.tree_util.keystr(path)} is "
                f"{jnp.result_type(leaf)}; leave it out with optax.masked or optax.partition"
            )


def _pair(first: Any, second: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.stack([jnp.asarray(a), jnp.asarray(b)]), first, second)


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
