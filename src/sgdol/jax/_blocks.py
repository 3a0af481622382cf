"""Vectors in few pieces, and blocks of coordinates that share a step size.

A *vector* (a gradient, a momentum) is a list of arrays: on one CPU, the small leaves of a block lie end to end in one
array, because there every array of its own costs several kernels; each other leaf is an array by itself. Only
:meth:`Blocks.join` and :meth:`Blocks.split` know of it. In the optimizer's state, a vector is a tree like the
parameters, which shards as they do.

The four granularities are the same surrogate on blocks of coordinates. What there is one of per block (a sum, alpha, a
multiplier) is a list of arrays, too: of one scalar for ``"global"``, of one array with an entry per block for
``"group"`` and ``"tensor"``, of one array per leaf for ``"coordinate"``.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["GRANULARITIES", "Blocks", "Granularity", "add", "as_real", "dot", "is_complex", "numbers", "total"]

Granularity = Literal["global", "group", "tensor", "coordinate"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)

Labels = Any | Callable[[Any], Any]

_SMALL = 2**14
"""Leaves of at most so many entries lie end to end."""


class Blocks:
    """How the coordinates of some parameters share step sizes, and how their vectors lie in arrays.

    Args:
        granularity: what shares a step size.
        params: the parameters, or anything with their shapes and types.
        param_labels: for ``"group"``, the label of each leaf: a tree of labels that is a prefix of the parameters'
            tree, or a function of the parameters that returns one. Groups are numbered as their labels first occur.
    """

    def __init__(self, granularity: Granularity, params: Any, param_labels: Labels = None) -> None:
        leaves: list[Any] = jax.tree.leaves(params)
        self.tree: Any = jax.tree.structure(params)
        self.granularity = granularity
        self.per_coordinate = granularity == "coordinate"
        # Complex numbers are pairs of real ones; types are real, and at least float32.
        kinds = [jnp.result_type(leaf) for leaf in leaves]
        pairs = [(2,) * bool(jnp.issubdtype(kind, jnp.complexfloating)) for kind in kinds]
        self.shapes = [(*jnp.shape(leaf), *pair) for leaf, pair in zip(leaves, pairs, strict=True)]
        self.dtypes = [jnp.result_type(jnp.finfo(kind).dtype, jnp.float32) for kind in kinds]
        self.dtype = jnp.result_type(jnp.float32, *self.dtypes)
        """The widest of the types: that of sums over several leaves."""
        largest_power = jnp.finfo(self.dtype).maxexp
        self.holds_squares = largest_power >= 1024
        """Whether the type holds every square that matters beside a given alpha, as float64 does."""
        self.largest = 2.0 ** (3 * largest_power // 4)
        """What alpha need not exceed: no sum of squares ever counts beside it, and it can still be multiplied."""
        self._sizes = [math.prod(shape) for shape in self.shapes]
        labels = list(range(len(leaves))) if granularity == "tensor" else [0] * len(leaves)
        if granularity == "group" and leaves:
            labels = _labels(param_labels, params)
        order = {label: number for number, label in enumerate(dict.fromkeys(labels))}
        self.block_of = [order[label] for label in labels]
        """The number of the block that each leaf is in."""
        self.count = len(order)
        """The number of blocks."""
        self.zeros = [jnp.zeros(() if granularity == "global" else self.count, self.dtype)]
        """A zero for each block, in a type that sums can be kept in."""
        if self.per_coordinate:
            self.zeros = [jnp.zeros(shape, dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]
        counts = [0] * self.count
        for number, size in zip(self.block_of, self._sizes, strict=True):
            counts[number] += size
        whole = max(sum(counts), 1)
        self.shares: list[Any] = [1.0] if granularity == "global" else [np.array(counts) / whole]
        """By how much each block shares in the coordinates of all."""
        if self.per_coordinate:
            self.shares = [1.0 / whole] * len(leaves)
        pieces: dict[Any, list[int]] = {}
        for i, (size, dtype) in enumerate(zip(self._sizes, self.dtypes, strict=True)):
            joins = size <= _SMALL and dtype == self.dtype and not self.per_coordinate and _on_one_cpu()
            pieces.setdefault(self.block_of[i] if joins else (i,), []).append(i)
        self._pieces = list(pieces.values())
        """The leaves in each array of a vector."""

    def join(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """The vector with these leaves, or several of them along a new first axis of every leaf."""
        return [
            leaves[piece[0]]
            if len(piece) == 1
            else jnp.concatenate(
                [leaves[i].reshape(*leaves[i].shape[: leaves[i].ndim - len(self.shapes[i])], -1) for i in piece], -1
            )
            for piece in self._pieces
        ]

    def split(self, vector: list[jax.Array]) -> list[jax.Array]:
        """The leaves of a vector, or of several."""
        leaves: dict[int, jax.Array] = {}
        for piece, array in zip(self._pieces, vector, strict=True):
            begin = 0
            for i in piece:
                if len(piece) == 1:
                    leaves[i] = array
                else:
                    leaves[i] = array[..., begin : begin + self._sizes[i]].reshape(*array.shape[:-1], *self.shapes[i])
                begin += self._sizes[i]
        return [leaves[i] for i in range(len(leaves))]

    def products(self, a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
        """The products of two vectors, summed over each block.

        Several vectors may lie along a new first axis of every array: their products are added, too.
        """
        if self.per_coordinate:
            each = [x * y for x, y in zip(a, b, strict=True)]
            return [add(v) if v.ndim > len(shape) else v for v, shape in zip(each, self.shapes, strict=True)]
        if self.granularity == "global":
            return [dot(a, b, self.dtype)]
        blocks = [self.block_of[piece[0]] for piece in self._pieces]
        parts = [[i for i, number in enumerate(blocks) if number == block] for block in range(self.count)]
        return [jnp.stack([dot([a[i] for i in part], [b[i] for i in part], self.dtype) for part in parts])]


def _labels(param_labels: Labels, params: Any) -> list[Any]:
    labels = param_labels(params) if callable(param_labels) else param_labels
    try:
        full = jax.tree.map(lambda label, part: jax.tree.map(lambda _: label, part), labels, params)
        found = jax.tree.leaves(full)
    except ValueError as error:
        raise ValueError(
            f"param_labels must be a prefix of the tree of the parameters, {jax.tree.structure(params)}, got {labels!r}"
        ) from error
    return found


def dot(a: list[jax.Array], b: list[jax.Array], dtype: Any) -> jax.Array:
    """<a, b> of two lists of arrays, as a number of this type."""
    # Of small arrays, vdot is faster on a CPU; sums of large ones run on several threads.
    alone = _on_one_cpu()
    return total(
        [
            jnp.vdot(x, y, precision=jax.lax.Precision.HIGHEST)
            if alone and x.dtype == dtype and x.size <= 64 * _SMALL
            else jnp.sum(x * y, dtype=dtype)
            for x, y in zip(a, b, strict=True)
        ]
    )


def total(values: list[Any]) -> Any:
    """The sum of all entries of some arrays or numbers."""
    parts = [jnp.sum(v) if jnp.ndim(v) else v for v in values]
    if len(parts) <= 2:
        return sum(parts[1:], parts[0])
    # Without the barrier, XLA makes a chain of additions of this and repeats it in every kernel that uses the sum: with
    # as many parts as leaves, the program grows with their square.
    return jnp.sum(jax.lax.optimization_barrier(jnp.stack([jnp.asarray(part) for part in parts])))


def numbers(values: list[Any], dtype: Any) -> jax.Array:
    """Numbers, or arrays of one shape, along a new last axis of one array.

    >>> numbers([1.0, 2.0], jnp.float32).tolist()
    [1.0, 2.0]
    """
    # XLA for CPUs makes a kernel of every operand of a concatenation, and one kernel of this. The masks are numpy's,
    # constants of the program: jax.numpy's are computed anew in every step if there is a loop in the program.
    values = [jnp.asarray(value, dtype)[..., None] for value in values]
    places = np.arange(len(values))
    return functools.reduce(lambda all_, i: jnp.where(places == i, values[i], all_), range(len(values)), values[0])


def add(stacked: jax.Array) -> jax.Array:
    """The sum over the first axis."""
    # XLA for CPUs takes 20 to 80 times as long for jnp.sum over a first axis as for the sum of slices.
    if not _on_one_cpu() or stacked.shape[0] > 64:
        return jnp.sum(stacked, axis=0)
    return functools.reduce(operator.add, [stacked[i] for i in range(stacked.shape[0])])


def _on_one_cpu() -> bool:
    """Whether there is one device, a CPU: nothing is spread over devices, and each kernel costs its own time."""
    return jax.default_backend() == "cpu" and jax.device_count() == 1


# Complex numbers are pairs of real ones -------------------------------------------------------------------------------


def is_complex(leaf: Any) -> bool:
    """Whether it is an array of complex numbers."""
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating))


def as_real(array: jax.Array) -> jax.Array:
    """Real, in float32 or wider; complex numbers as pairs along a new last axis."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    return array.astype(jnp.result_type(array.dtype, jnp.float32))
