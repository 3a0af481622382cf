"""Named axes of devices, each of which has gradients of its own."""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["mean_over", "names", "refuse_shared", "size_of", "sum_over", "vary_over"]


def names(axis_name: Any) -> tuple[Any, ...]:
    """The axes that it names, none for None.

    >>> names(None), names("data"), names(("data", "model"))
    ((), ('data',), ('data', 'model'))
    """
    if axis_name is None:
        return ()
    return tuple(axis_name) if isinstance(axis_name, tuple) else (axis_name,)


def mean_over(axes: tuple[Any, ...], tree: Any) -> Any:
    """The mean over the devices of the axes, if there are any."""
    return jax.lax.pmean(tree, axes) if axes else tree


def sum_over(axes: tuple[Any, ...], tree: Any) -> Any:
    """The sum over the devices of the axes."""
    return jax.lax.psum(tree, axes)


def size_of(axes: tuple[Any, ...]) -> int:
    """How many devices there are along the axes."""
    return int(jax.lax.axis_size(axes)) if axes else 1


def vary_over(axis_name: Any, tree: Any) -> Any:
    """The same values, as ones that may differ between devices.

    ``shard_map`` sums the gradient with respect to anything that all devices share; with respect to this, every device
    gets its own. Elsewhere it changes nothing.
    """
    return jax.tree.map(lambda leaf: leaf if _varies(axis_name, leaf) else _vary(axis_name, leaf), tree)


def refuse_shared(axis_name: Any, tree: Any) -> None:
    """An error where ``shard_map`` knows that every device has the same gradient."""
    if _varies(axis_name, jax.lax.axis_index(axis_name)):  # only then does it keep track
        for leaf in jax.tree.leaves(tree):
            if not _varies(axis_name, leaf):
                raise ValueError(
                    f"the gradients must be each device's own, but over axis_name={axis_name!r} they are the same: "
                    "shard_map has summed them. Differentiate with sgdol.jax.microbatch_grads(loss, k, "
                    "axis_name=...), or with respect to jax.lax.pcast(params, axis_name, to='varying'), or use "
                    "shard_map(..., check_vma=False)"
                )


def _varies(axis_name: Any, leaf: Any) -> bool:
    kind = jax.typeof(leaf)
    varying = kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else getattr(kind, "vma", frozenset())
    return all(name in varying for name in names(axis_name))


def _vary(axis_name: Any, leaf: Any) -> Any:
    lax: Any = jax.lax
    return lax.pcast(leaf, axis_name, to="varying") if hasattr(lax, "pcast") else lax.pvary(leaf, axis_name)
