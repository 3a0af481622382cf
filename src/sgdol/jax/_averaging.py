"""The polynomial average of the iterates (:mod:`sgdol.averaging`), which the optimizer keeps in its state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sgdol import averaging
from sgdol.jax._search import find

__all__ = ["PolynomialAverageState", "averaged_params", "follow", "start"]


class PolynomialAverageState(NamedTuple):
    """The average of the iterates so far."""

    average: Any
    """Like the parameters, in float32 or wider."""


def start(params: Any) -> PolynomialAverageState:
    """Before any update the average is where the parameters are."""
    return PolynomialAverageState(jax.tree.map(lambda p: jnp.array(p, dtype=_wide(p)), params))


def follow(
    state: PolynomialAverageState, params: Any, updates: Any, power: Any, count: jax.Array, moved: jax.Array
) -> PolynomialAverageState:
    """The average after one more call of ``update``.

    Args:
        state: the average before.
        params: where the parameters are.
        updates: where they go from there, as ``optax.apply_updates`` will add them.
        power: a.
        count: how many updates there were, this one included.
        moved: whether this call is an update at all.
    """

    def one(average: jax.Array, x: jax.Array) -> jax.Array:
        real = jnp.finfo(average.dtype).dtype
        t, a = count.astype(real), jnp.asarray(power, real)
        weight = jnp.where(moved, averaging.weight(t, a), 0.0)
        return jnp.where(weight > 0, average + weight * (x.astype(average.dtype) - average), average)

    return PolynomialAverageState(jax.tree.map(one, state.average, optax.apply_updates(params, updates)))


def averaged_params(state: Any, params: Any) -> Any:
    """The averaged parameters, for evaluation or saving; train on with the parameters themselves.

    Args:
        state: the state of an optimizer that has ``sgdol(..., averaging=a)`` in it, however deep: in a chain, in
            ``inject_hyperparams``, ``MultiSteps``, ``masked``, ``apply_if_finite``; with ``partition``
            (``multi_transform``), every part has an average of its own.
        params: the parameters. They give the dtypes of the result, and the values of parameters that a mask excludes
            from the average.

    Raises:
        ValueError: if there is no average in the state.

    >>> import jax.numpy as jnp
    >>> from sgdol.jax import sgdol
    >>> optimizer = sgdol(0.5, momentum=None, averaging=0)  # the uniform average
    >>> params = jnp.array([4.0])
    >>> state = optimizer.init(params)
    >>> for _ in range(2):
    ...     updates, state = optimizer.update(jnp.array([[2.0], [2.0]]), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> params.tolist(), averaged_params(state, params).tolist()  # 3, then 2
    ([2.0], [2.5])
    """
    found = find(state, PolynomialAverageState)
    if not found:
        raise ValueError(
            "state holds no average: construct the optimizer as sgdol(..., averaging=8), and give the state that its "
            f"init or update returned, got {type(state).__name__}"
        )
    for _, holder in found:
        params = _put(holder.average, params)
    return params


def _put(average: Any, params: Any) -> Any:
    """The parameters, with the average in the place of what it follows."""

    def masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    try:
        return jax.tree.map(
            lambda a, p: p if masked(a) else jnp.asarray(a, jnp.result_type(p)), average, params, is_leaf=masked
        )
    except ValueError as error:
        raise ValueError(
            f"params must have the tree structure of the parameters that were averaged, {jax.tree.structure(average)}, "
            f"got {jax.tree.structure(params)}"
        ) from error


def _wide(leaf: Any) -> Any:
    return jnp.result_type(leaf, jnp.float32)
