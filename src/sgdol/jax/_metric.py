r"""The metric of vectors, the unit of gradients, and how a metric's states stand in an optimizer's state.

:math:`\langle a, b\rangle = a^\top D^{-1} b` of two gradients. Squares leave the range of floats long before gradients
do, so gradients are divided by a *unit*, a power of two, before anything is made of them. :func:`choose_unit` makes it
1 unless the first gradients are very large or very small.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from sgdol.jax._blocks import Blocks, total
from sgdol.metrics import Euclidean, Means, Metric, Operator

__all__ = ["Memory", "Norm", "choose_unit", "divided", "in_unit"]


class Norm:
    """The norm of one step: D of each leaf, for vectors.

    Args:
        metric: makes D.
        states: what the metric remembers, of each leaf.
        gradient: that of this update, for leaves without a past.
        blocks: how vectors lie in arrays.
    """

    def __init__(self, metric: Metric, states: list[Any], gradient: list[jax.Array], blocks: Blocks) -> None:
        self._blocks = blocks
        self.operators: list[Operator] | None = None
        """D of each leaf; None for D = 1."""
        if isinstance(metric, Euclidean):
            return
        leaves = blocks.split(gradient)
        squares = [metric.mean_square(state, g) for state, g in zip(states, leaves, strict=True)]
        sizes = [g.size for g in leaves]
        weighted = [size / sum(sizes) * square for size, square in zip(sizes, squares, strict=True) if size]
        overall = total(weighted) if weighted else 1.0
        self.operators = [metric.operator(s, Means(mean, overall)) for s, mean in zip(states, squares, strict=True)]

    def sharp(self, gradient: list[jax.Array], several: bool = False) -> list[jax.Array]:
        """D^-1 g, of one gradient or of several along a new first axis."""
        if self.operators is None:
            return gradient
        turned = []
        for operator, g in zip(self.operators, self._blocks.split(gradient), strict=True):
            turned.append((jax.vmap(operator.sharp) if several else operator.sharp)(g).astype(g.dtype))
        return self._blocks.join(turned)

    def factors(self, gradient: list[jax.Array], several: bool = False) -> tuple[list[jax.Array], list[jax.Array]]:
        """Two vectors, linear in the gradient, whose product is <g, D^-1 g>: D^(-1/2) g twice, or g and D^-1 g.

        The first costs half as much where D is not diagonal.
        """
        if self.operators is None:
            return gradient, gradient
        pairs = []
        for operator, g in zip(self.operators, self._blocks.split(gradient), strict=True):
            half: Any = getattr(operator, "half", None)
            turn = half or operator.sharp
            turned = (jax.vmap(turn) if several else turn)(g).astype(g.dtype)
            pairs.append((turned if half else g, turned))
        return self._blocks.join([a for a, _ in pairs]), self._blocks.join([b for _, b in pairs])

    def flat(self, vector: list[jax.Array]) -> list[jax.Array]:
        """D v."""
        if self.operators is None:
            return vector
        pairs = zip(self.operators, self._blocks.split(vector), strict=True)
        return self._blocks.join([operator.flat(v).astype(v.dtype) for operator, v in pairs])


class Memory:
    """How the states of a metric, one for each leaf, stand in the optimizer's state: field by field.

    A field that has the tensor's shape becomes a tree like the parameters, which shards as they do; a number becomes a
    vector with an entry per leaf; anything else, such as a factor of n x n, a tuple with an entry per leaf.

    Args:
        metric: whose states they are.
    """

    def __init__(self, metric: Metric) -> None:
        # The shapes of two tensors tell which field is which, also for optax.tree_map_params, which inits no leaves.
        shapes = [(2, 3), (64, 48)]
        probes = [jax.eval_shape(lambda shape=shape: metric.initial(jnp.zeros(shape))) for shape in shapes]
        columns = list(zip(*map(_fields, probes), strict=True))
        seen = [[getattr(field, "shape", None) for field in column] for column in columns]
        self._kinds = ["like" if s == shapes else "number" if s == [(), ()] else "own" for s in seen]
        self.is_empty = not self._kinds
        """Whether the metric remembers nothing."""
        self._structure: Any = jax.tree.structure(probes[0], is_leaf=lambda part: part is not probes[0])

    def pack(self, states: list[Any], tree: Any, dtypes: list[Any]) -> Any:
        """The states as they stand in the optimizer's state.

        Args:
            states: one for each leaf.
            tree: the tree structure of the parameters.
            dtypes: of the leaves, float32 or wider.
        """
        rows = [
            [jax.tree.map(lambda v, dtype=dtype: jnp.asarray(v, dtype), field) for field in _fields(state)]
            for state, dtype in zip(states, dtypes, strict=True)
        ]
        columns = [[row[i] for row in rows] for i in range(len(self._kinds))]
        return jax.tree.unflatten(
            self._structure, [_pack(k, c, tree) for k, c in zip(self._kinds, columns, strict=True)]
        )

    def unpack(self, packed: Any, tree: Any, dtypes: list[Any]) -> list[Any]:
        """The states of the leaves again."""
        columns = [
            tree.flatten_up_to(field) if kind == "like" else field
            for kind, field in zip(self._kinds, self._structure.flatten_up_to(packed), strict=True)
        ]
        numbers = [kind == "number" for kind in self._kinds]
        return [
            jax.tree.unflatten(
                self._structure, [c[i].astype(dtype) if n else c[i] for c, n in zip(columns, numbers, strict=True)]
            )
            for i, dtype in enumerate(dtypes)
        ]


def _fields(state: Any) -> list[Any]:
    """What stands in the first level of a state."""
    return jax.tree.leaves(state, is_leaf=lambda part: part is not state)


def _pack(kind: str, column: list[Any], tree: Any) -> Any:
    if kind == "like":
        return jax.tree.unflatten(tree, column)
    if kind == "number":
        return jnp.asarray(column, jnp.result_type(jnp.float32, *column))
    return tuple(column) if column else jnp.zeros(())  # never an empty tuple: optax matches the two structures


# The unit -------------------------------------------------------------------------------------------------------------


def choose_unit(gradient: list[jax.Array], dtype: Any) -> jax.Array:
    """The unit that brings the largest entry into the range where sums of squares are safe; 0 if that is 0 or infinite.

    Bounds are in terms of the type's largest power of two, 2^e: from 2^(-5e/16), where a coordinate's even share of the
    square is still a normal number, to 2^(e/4), whose square can be added up 2^(e/2) times.

    >>> float(jnp.log2(choose_unit([jnp.array([3.0, -1e20])], jnp.float32)))
    34.0
    """
    top = jnp.max(jnp.stack([jnp.max(jnp.abs(g), initial=0.0).astype(dtype) for g in gradient]))
    info = jnp.finfo(dtype)
    found = (top > 0) & jnp.isfinite(top)
    # The nearest power of two, by taking away the mantissa; divided by the nearest one within the bounds.
    power = jax.lax.reduce_precision(jnp.where(found, top, 1.0), info.nexp, 0)
    power = jnp.minimum(power, 2.0 ** (info.maxexp - 1))
    unit = power / jnp.clip(power, 2.0 ** (-5 * info.maxexp // 16), 2.0 ** (info.maxexp // 4))
    return jnp.where(found, unit, 0.0)


def divided(leaves: list[jax.Array], unit: jax.Array) -> list[jax.Array]:
    """The leaves in units of the unit."""
    # The reciprocal of the smallest unit is not finite in every type.
    return [v * jnp.minimum(1 / unit, float(jnp.finfo(v.dtype).max)).astype(v.dtype) for v in leaves]


def in_unit(square: Any, unit: jax.Array) -> jax.Array:
    """A positive number in units of the square of a unit, of the unit's type, and at most ``Blocks.largest``.

    A Python number may be out of that type's range, as long as the result is not.

    >>> round(float(in_unit(3e60, jnp.asarray(2.0**100))), 4)
    1.8669
    """
    mantissa, exponent = jnp.frexp(square) if isinstance(square, jax.Array) else math.frexp(square)
    power = exponent - 2 * (jnp.frexp(unit)[1] - 1)
    limit = 3 * jnp.finfo(unit.dtype).maxexp // 4
    return jnp.ldexp(jnp.asarray(mantissa, unit.dtype), jnp.minimum(power, limit))
