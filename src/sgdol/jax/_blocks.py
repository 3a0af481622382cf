"""Blocks of coordinates that share a step size.

The four granularities are the same surrogate on blocks of coordinates. What there is one of per block (a sum, alpha, a
multiplier) is a *list of arrays*: of one scalar for ``"global"``, of one vector with an entry per block for ``"group"``
and ``"tensor"``, of one array per leaf for ``"coordinate"``. In the optimizer's state it is packed: the scalar or the
vector itself, or a tree like the parameters, which shards as they do.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

__all__ = ["GRANULARITIES", "Blocks", "Granularity", "add", "as_real", "as_real_dtype", "dot", "is_complex", "total"]

Granularity = Literal["global", "group", "tensor", "coordinate"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)

Labels = Any | Callable[[Any], Any]

_ONE: Any = jax.tree.structure(0)
"""The structure of a tree that is a leaf."""

_SMALL = 2**14
"""Arrays of at most so many entries are added up together."""


class Blocks:
    """How the coordinates of some parameters share step sizes.

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
        self._shapes = [(*jnp.shape(leaf), 2) if is_complex(leaf) else jnp.shape(leaf) for leaf in leaves]
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self.dtypes = [as_real_dtype(leaf) for leaf in leaves]
        """The types of the leaves: real, at least float32."""
        self.dtype = jnp.result_type(jnp.float32, *self.dtypes)
        """The widest of them: that of sums over several leaves."""
        labels = list(range(len(leaves))) if granularity == "tensor" else [0] * len(leaves)
        if granularity == "group" and leaves:
            labels = _labels(param_labels, params)
        numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
        self._block_of = [numbers[label] for label in labels]
        self._count = len(numbers)

    def zeros(self) -> list[jax.Array]:
        """A zero for each block, in a type that sums can be kept in."""
        if self.per_coordinate:
            return [jnp.zeros(shape, dtype) for shape, dtype in zip(self._shapes, self.dtypes, strict=True)]
        return [jnp.zeros(() if self.granularity == "global" else self._count, self.dtype)]

    def products(self, a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
        """The products of two lists of arrays like the leaves, summed over each block.

        Several arrays may lie along a new first axis of every leaf: their products are added, too.
        """
        if self.per_coordinate:
            each = [x * y for x, y in zip(a, b, strict=True)]
            return [add(v) if v.ndim > len(shape) else v for v, shape in zip(each, self._shapes, strict=True)]
        sums = [dot(*part, self.dtype) for part in zip(self._members(a), self._members(b), strict=True)]
        return sums if self.granularity == "global" else [jnp.stack(sums)]

    def _members(self, per_leaf: list[Any]) -> list[list[Any]]:
        """One thing per leaf, as a list for each block."""
        parts: list[list[Any]] = [[] for _ in range(self._count)]
        for number, thing in zip(self._block_of, per_leaf, strict=True):
            parts[number].append(thing)
        return parts

    def spread(self, values: list[jax.Array]) -> list[jax.Array]:
        """One number per block, for each leaf: what its coordinates have."""
        if self.per_coordinate:
            return values
        if self.granularity == "global":
            return values * len(self._sizes)
        return [values[0][number] for number in self._block_of]

    def shares(self) -> list[Any]:
        """By how much each block shares in the coordinates of all."""
        total = max(sum(self._sizes), 1)
        if self.granularity == "global":
            return [1.0]
        if self.per_coordinate:
            return [1.0 / total] * len(self._sizes)
        return [jnp.asarray([sum(part) for part in self._members(self._sizes)], self.dtype) / total]

    def pack(self, values: list[Any], kind: Any = _ONE) -> Any:
        """A list of arrays, or of a learner's states of this tree structure, as it stands in the optimizer's state."""
        if not self.per_coordinate:
            return values[0]
        rows = [kind.flatten_up_to(value) for value in values]
        columns = [jax.tree.unflatten(self.tree, [row[i] for row in rows]) for i in range(kind.num_leaves)]
        return jax.tree.unflatten(kind, columns)

    def unpack(self, state: Any, kind: Any = _ONE) -> list[Any]:
        """The list again."""
        if not self.per_coordinate:
            return [state]
        columns = [self.tree.flatten_up_to(part) for part in kind.flatten_up_to(state)]
        return [jax.tree.unflatten(kind, list(row)) for row in zip(*columns, strict=True)]


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
    # Small arrays end to end: on a CPU, a reduction of its own costs each of them several kernels.
    alone = _on_one_cpu()
    small = [alone and v.size <= _SMALL and v.dtype == dtype for v in a]
    sums = [jnp.sum(x * y, dtype=dtype) for x, y, s in zip(a, b, small, strict=True) if not s]
    if any(small):
        ends = [jnp.concatenate([v.reshape(-1) for v, s in zip(c, small, strict=True) if s]) for c in (a, b)]
        sums.append(jnp.vdot(*ends, precision=jax.lax.Precision.HIGHEST))
    return total(sums)


def total(values: list[Any]) -> Any:
    """The sum of all entries of some arrays or numbers."""
    parts = [jnp.sum(v) if jnp.ndim(v) else v for v in values]
    if len(parts) <= 2:
        return sum(parts[1:], parts[0])
    # Without the barrier, XLA makes a chain of additions of this and repeats it in every kernel that uses the sum: with
    # as many parts as leaves, the program grows with their square.
    return jnp.sum(jax.lax.optimization_barrier(jnp.stack([jnp.asarray(part) for part in parts])))


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
    if is_complex(array):
        array = jnp.stack([array.real, array.imag], axis=-1)
    return array.astype(as_real_dtype(array))


def as_real_dtype(leaf: Any) -> Any:
    """The type of :func:`as_real`."""
    dtype = jnp.result_type(leaf)
    return jnp.result_type(jnp.finfo(dtype).dtype, jnp.float32)
