r"""The metric on the leaves of a tree: the only place where two gradients are multiplied.

With D the metric's diagonal, :math:`\langle a, b\rangle = a^\top D^{-1} b` of two gradients. All products are in units
of the square of a *unit*, a power of two, because squares leave the range of floats long before gradients do.
:func:`choose_unit` makes it 1 unless the first gradients are very large or very small; what is learned from the
products are ratios.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from sgdol.jax._blocks import Blocks
from sgdol.metrics import Means, Metric, is_scale_free

__all__ = ["Geometry", "choose_unit", "in_unit", "largest", "pack", "unpack"]


def choose_unit(gradient: list[jax.Array], dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The unit that brings the largest entry into the range where sums of squares are safe; and whether there is one.

    Bounds are in terms of the type's largest power of two, 2^e: from 2^(-5e/16), where a coordinate's even share of the
    square is still a normal number, to 2^(e/4), whose square can be added up 2^(e/2) times.

    >>> unit, found = choose_unit([jnp.array([3.0, -1e20])], jnp.float32)
    >>> float(jnp.log2(unit)), bool(found)
    (35.0, True)
    """
    top = jnp.max(jnp.stack([jnp.max(jnp.abs(g), initial=0.0).astype(dtype) for g in gradient]))
    top_power = jnp.finfo(dtype).maxexp
    found = (top > 0) & jnp.isfinite(top)
    exponent = jnp.where(found, jnp.frexp(jnp.where(found, top, 1.0))[1], 0)
    excess = exponent - jnp.clip(exponent, -5 * top_power // 16, top_power // 4)
    return jnp.ldexp(jnp.ones((), dtype), excess), found


def largest(dtype: Any) -> float:
    """What alpha need not exceed: no sum of squares ever counts beside it, and it can still be multiplied."""
    return 2.0 ** (3 * jnp.finfo(dtype).maxexp // 4)


def in_unit(square: Any, unit: jax.Array) -> jax.Array:
    """A positive number in units of the square of a unit, of the unit's type, and no larger than :func:`largest`.

    A Python number may be out of that type's range, as long as the result is not.

    >>> round(float(in_unit(3e60, jnp.asarray(2.0**100))), 4)
    1.8669
    """
    mantissa, exponent = jnp.frexp(square) if isinstance(square, jax.Array) else math.frexp(square)
    power = exponent - 2 * (jnp.frexp(unit)[1] - 1)
    limit = 3 * jnp.finfo(unit.dtype).maxexp // 4
    return jnp.ldexp(jnp.asarray(mantissa, unit.dtype), jnp.minimum(power, limit))


class Geometry:
    """The metric of one update.

    Args:
        metric: makes D of past gradients.
        states: what it remembers of each leaf.
        gradient: that of this update, of which D is made where there is no past.
        unit: of the products.
    """

    def __init__(self, metric: Metric, states: list[Any], gradient: list[jax.Array], unit: jax.Array) -> None:
        self._metric = metric
        self._states = states
        self._unit = unit
        seen = self._seen(gradient)
        squares = [metric.mean_square(state, g) for state, g in zip(states, seen, strict=True)]
        weighted = [g.size * square for g, square in zip(seen, squares, strict=True) if g.size]
        overall = sum(weighted) / max(sum(g.size for g in seen), 1)
        self._means = [Means(square, overall) for square in squares]

    def inner(self, a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
        """<a, b> of two gradients, coordinate by coordinate; several gradients may lie along a new first axis."""
        return self.products(a, self.sharp(b))

    def products(self, gradient: list[jax.Array], direction: list[jax.Array]) -> list[jax.Array]:
        """<g, d> of a gradient and a direction, coordinate by coordinate: no metric is in that."""
        return [self._scaled(g) * self._scaled(d) for g, d in zip(gradient, direction, strict=True)]

    def sharp(self, gradient: list[jax.Array]) -> list[jax.Array]:
        """From gradients to directions: D^-1 g."""
        leaves = zip(self._states, self._means, gradient, strict=True)
        return [self._metric.sharp(state, means, g).astype(g.dtype) for state, means, g in leaves]

    def observe(self, gradient: list[jax.Array]) -> list[Any]:
        """What the metric remembers after the update."""
        return [self._metric.observe(s, g) for s, g in zip(self._states, self._seen(gradient), strict=True)]

    def _seen(self, gradient: list[jax.Array]) -> list[jax.Array]:
        """Gradients as the metric sees them: in units, if that is nothing to it."""
        return [self._scaled(g) for g in gradient] if is_scale_free(self._metric) else gradient

    def _scaled(self, leaf: jax.Array) -> jax.Array:
        inverse = jnp.minimum(1 / self._unit, jnp.asarray(jnp.finfo(leaf.dtype).max, self._unit.dtype))
        return leaf * inverse.astype(leaf.dtype)


# The metric's state: what is like a tensor is a tree like the parameters, which shards as they do; of numbers there is
# one vector, with an entry per tensor.


def pack(metric: Metric, states: list[Any], blocks: Blocks) -> Any:
    """What the metric remembers of each leaf, as it stands in the optimizer's state."""
    kind, like = _columns(metric)
    rows = [jax.tree.leaves(state) for state in states]
    columns = [[row[i] for row in rows] for i in range(len(like))]
    packed = [
        blocks.tree([jnp.asarray(v, dtype) for v, dtype in zip(column, blocks.dtypes, strict=True)])
        if tensor
        else jnp.asarray([jnp.asarray(v, blocks.dtype) for v in column], blocks.dtype)
        for column, tensor in zip(columns, like, strict=True)
    ]
    return jax.tree.unflatten(kind, packed)


def unpack(metric: Metric, packed: Any, blocks: Blocks) -> list[Any]:
    """The states of the leaves again."""
    kind, like = _columns(metric)
    parts = zip(kind.flatten_up_to(packed), like, strict=True)
    columns = [blocks.leaves(part) if tensor else part for part, tensor in parts]
    return [
        jax.tree.unflatten(kind, [column[i].astype(dtype) for column in columns])
        for i, dtype in enumerate(blocks.dtypes)
    ]


def _columns(metric: Metric) -> tuple[Any, list[bool]]:
    """The tree structure of the metric's state of one tensor, and which of its leaves have the tensor's shape."""
    shape = (2, 3)
    state = jax.eval_shape(lambda: metric.initial(jnp.zeros(shape)))
    leaves = jax.tree.leaves(state)
    if any(leaf.shape not in (shape, ()) for leaf in leaves):
        raise TypeError(
            f"the state of a metric must be made of numbers and of arrays like the tensor, got {state} for the shape "
            f"{shape}"
        )
    return jax.tree.structure(state), [leaf.shape == shape for leaf in leaves]
