"""Blocks of coordinates that share a step size.

The four granularities are the same surrogate on blocks of coordinates. What there is one of per block (a sum, alpha, a
multiplier) is a *list of arrays*: of one scalar for ``"global"``, of one vector with an entry per block for ``"group"``
and ``"tensor"``, of one array per leaf for ``"coordinate"``. In the optimizer's state it is packed: the scalar or the
vector itself, or a tree like the parameters, which shards as they do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

__all__ = ["GRANULARITIES", "Blocks", "Granularity", "as_real", "as_real_dtype", "is_complex"]

Granularity = Literal["global", "group", "tensor", "coordinate"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)

Labels = Any | Callable[[Any], Any]


class Blocks:
    """How the coordinates of some parameters share step sizes.

    Args:
        granularity: what shares a step size.
        params: the parameters, or anything with their shapes and types.
        param_labels: for ``"group"``, the label of each leaf: a tree of labels that is a prefix of the parameters'
            tree, or a function of the parameters that returns one. Groups are numbered as their labels first occur.
    """

    def __init__(self, granularity: Granularity, params: Any, param_labels: Labels = None) -> None:
        leaves = jax.tree.leaves(params)
        self._tree: Any = jax.tree.structure(params)
        self.granularity = granularity
        self._shapes = [as_real_shape(leaf) for leaf in leaves]
        self._dtypes = [as_real_dtype(leaf) for leaf in leaves]
        self._sizes = [_product(shape) for shape in self._shapes]
        if granularity == "group":
            labels = _labels(param_labels, params) if leaves else []
            numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
            self._block_of = [numbers[label] for label in labels]
        else:
            self._block_of = list(range(len(leaves))) if granularity == "tensor" else [0] * len(leaves)
        self._count = max(self._block_of, default=-1) + 1

    @property
    def per_coordinate(self) -> bool:
        """Whether every coordinate is a block."""
        return self.granularity == "coordinate"

    def zeros(self) -> list[jax.Array]:
        """A zero for each block, in a type that sums can be kept in."""
        if self.per_coordinate:
            return [jnp.zeros(shape, dtype) for shape, dtype in zip(self._shapes, self._dtypes, strict=True)]
        return [jnp.zeros(() if self.granularity == "global" else self._count, self.dtype)]

    @property
    def dtypes(self) -> list[Any]:
        """The types of the leaves: real, at least float32."""
        return self._dtypes

    @property
    def dtype(self) -> Any:
        """The widest type of the leaves, at least float32: that of sums over several leaves."""
        return jnp.result_type(jnp.float32, *self._dtypes)

    def sums(self, values: list[jax.Array]) -> list[jax.Array]:
        """Arrays like the leaves, summed over each block."""
        return values if self.per_coordinate else self.gather([jnp.sum(v) for v in values])

    def gather(self, scalars: list[jax.Array]) -> list[jax.Array]:
        """One number per leaf, summed over each block; not for coordinates."""
        numbers = [scalar.astype(self.dtype) for scalar in scalars]
        if self.granularity == "global":
            return [sum(numbers[1:], numbers[0])]
        if self.granularity == "tensor":
            return [jnp.stack(numbers)]
        return [jnp.stack([sum(part[1:], part[0]) for part in self.members(numbers)])]

    def members(self, per_leaf: list[Any]) -> list[list[Any]]:
        """One thing per leaf, as a list for each group."""
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
        return [jnp.asarray([sum(part) for part in self.members(self._sizes)], self.dtype) / total]

    def tree(self, values: list[Any]) -> Any:
        """One thing per leaf, as a tree like the parameters."""
        return jax.tree.unflatten(self._tree, values)

    def leaves(self, tree: Any) -> list[Any]:
        """The list again."""
        return self._tree.flatten_up_to(tree)

    def pack(self, values: list[Any]) -> Any:
        """A list of arrays as it stands in the optimizer's state."""
        return self.tree(values) if self.per_coordinate else values[0]

    def unpack(self, state: Any) -> list[Any]:
        """The list of arrays again."""
        return self.leaves(state) if self.per_coordinate else [state]

    def pack_states(self, states: list[Any], kind: Any) -> Any:
        """A learner's states, all of the tree structure ``kind``, as one state whose leaves are packed."""
        columns = [jax.tree.leaves(state) for state in states]
        return jax.tree.unflatten(kind, [self.pack([c[i] for c in columns]) for i in range(kind.num_leaves)])

    def unpack_states(self, state: Any, kind: Any) -> list[Any]:
        """The learner's states again."""
        columns = [self.unpack(part) for part in kind.flatten_up_to(state)]
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


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


# Complex numbers are pairs of real ones -------------------------------------------------------------------------------


def is_complex(leaf: Any) -> bool:
    """Whether it is an array of complex numbers."""
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating))


def as_real(array: jax.Array) -> jax.Array:
    """Real, in float32 or wider; complex numbers as pairs along a new last axis."""
    if is_complex(array):
        array = jnp.stack([array.real, array.imag], axis=-1)
    return array.astype(as_real_dtype(array))


def as_real_shape(leaf: Any) -> tuple[int, ...]:
    """The shape of :func:`as_real`."""
    return (*jnp.shape(leaf), 2) if is_complex(leaf) else jnp.shape(leaf)


def as_real_dtype(leaf: Any) -> Any:
    """The type of :func:`as_real`."""
    dtype = jnp.result_type(leaf)
    return jnp.result_type(jnp.finfo(dtype).dtype, jnp.float32)
