r"""The independent gradients of one update, reduced to the direction and the numbers (u, n) of every block.

Over the devices of a named axis the k gradients of a step are those of all devices, and what is communicated is the
mean of the gradients, which data parallel training needs anyway, and one number per block,

.. math:: Q = \sum_i \|g_i\|^2, \qquad u = \frac{k}{k-1} \left(\|\bar g\|^2 - \frac{Q}{k^2}\right).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sgdol import surrogate
from sgdol.jax._blocks import Blocks, as_real

__all__ = ["Draw", "draw", "mean_over", "refuse_shared", "vary_over", "with_momentum"]


class Draw(NamedTuple):
    """What an update is made of."""

    directions: list[jax.Array]
    """d of each leaf: real, in float32 or wider."""
    u: list[jax.Array]
    """The signal of each block."""
    n: list[jax.Array]
    """The squared length of each block."""
    k: int
    """How many gradients there were."""


def draw(stacks: list[jax.Array], blocks: Blocks, estimator: surrogate.Estimator, axis_name: Any, count: int) -> Draw:
    """Reduce k gradients.

    Args:
        stacks: of each leaf, its gradients along the first axis.
        blocks: which coordinates share a step size.
        estimator: the symmetric one uses all the gradients, the paper's the first two.
        axis_name: of the devices, with the symmetric estimator, each of which has such stacks of its own; or None.
        count: how many devices there are.
    """
    wide = [as_real(stack) for stack in stacks]
    k = stacks[0].shape[0] * count
    if (k == 2 and count == 1) or estimator == "paper":  # <g_1, g_2> itself: for equal ones u = n to the last bit
        pairs = [(g[0], g[1]) for g in wide]
        directions = [first if estimator == "paper" else (first + second) / 2 for first, second in pairs]
        u = blocks.sums([first * second for first, second in pairs])
        return Draw(directions, u, blocks.sums([d * d for d in directions]), k)
    if blocks.per_coordinate:
        squares = [jnp.sum(g * g, axis=0) for g in wide]
    else:
        squares = blocks.gather([jnp.sum(g * g) for g in wide])
    directions = [jnp.sum(g, axis=0) / g.shape[0] for g in wide]
    if axis_name is not None:
        directions, squares = jax.lax.pmean(directions, axis_name), jax.lax.psum(squares, axis_name)
    n = blocks.sums([d * d for d in directions])
    u = [surrogate.symmetric_signal(length, q / k**2, k) for length, q in zip(n, squares, strict=True)]
    return Draw(directions, u, n, k)


def with_momentum(
    drawn: Draw,
    blocks: Blocks,
    trace: list[jax.Array],
    weight: jax.Array,
    beta: Any,
    statistics: surrogate.MomentumStatistics,
) -> tuple[Draw, list[jax.Array]]:
    r"""The draw of the direction m_t / w_t, and the momentum m_t.

    Args:
        drawn: that of the gradients themselves.
        blocks: which coordinates share a step size.
        trace: m_{t-1} of each leaf.
        weight: w_t, the sum of the weights in m_t: :math:`1 - \beta^t` if beta stays the same.
        beta: the momentum.
        statistics: whether (u, n) are those of the momentum direction or stay the gradients' own.
    """
    pairs = list(zip(trace, drawn.directions, strict=True))
    after = [beta.astype(m.dtype) * m + (1 - beta.astype(m.dtype)) * g for m, g in pairs]
    directions = [m / weight.astype(m.dtype) for m in after]
    if statistics == "gradient":
        return drawn._replace(directions=directions), after
    crosses = blocks.sums([m * g for m, g in pairs])
    u = [
        surrogate.momentum_signal(cross, own, beta.astype(own.dtype), weight.astype(own.dtype))
        for cross, own in zip(crosses, drawn.u, strict=True)
    ]
    return Draw(directions, u, blocks.sums([d * d for d in directions]), drawn.k), after


# Named axes -----------------------------------------------------------------------------------------------------------


def mean_over(axis_name: Any, tree: Any) -> Any:
    """The mean over the devices."""
    return jax.tree.map(lambda leaf: jax.lax.pmean(leaf, axis_name), tree)


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
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    return all(name in varying for name in names)


def _vary(axis_name: Any, leaf: Any) -> Any:
    lax: Any = jax.lax
    return lax.pcast(leaf, axis_name, to="varying") if hasattr(lax, "pcast") else lax.pvary(leaf, axis_name)
