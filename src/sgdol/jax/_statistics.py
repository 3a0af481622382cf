r"""From independent gradients to the direction and the numbers (u, n) of every block.

Over the devices of a named axis the k gradients of a step are those of all devices, and what is communicated is the
mean of the gradients, which data parallel training needs anyway, and one number per block,

.. math:: Q = \sum_i \|g_i\|^2, \qquad u = \frac{k}{k-1} \left(\|\bar g\|^2 - \frac{Q}{k^2}\right).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sgdol import surrogate
from sgdol.jax import _axes
from sgdol.jax._blocks import Blocks
from sgdol.jax._geometry import Geometry
from sgdol.jax._sources import Gradients

__all__ = ["Statistics", "in_epochs", "of_gradients", "with_momentum"]


class Statistics(NamedTuple):
    """What an update is made of."""

    directions: list[jax.Array]
    """d of each leaf: real, in float32 or wider."""
    u: list[jax.Array]
    """The signal of each block."""
    n: list[jax.Array]
    """The squared length of each block."""
    k: int
    """How many gradients there were."""
    low: list[jax.Array]
    """By how much products with earlier gradients in the momentum are low, of each block: see :func:`in_epochs`."""


def of_gradients(found: Gradients, geometry: Geometry, blocks: Blocks, estimator: surrogate.Estimator) -> Statistics:
    """Those of the gradients alone; the symmetric estimator uses all of them, the paper's the first two."""
    n = blocks.sums(geometry.inner(found.mean, found.mean))
    directions = geometry.sharp(found.mean)
    if (found.k == 2 and not found.axes) or estimator == "paper":  # for equal ones u = n to the last bit
        u = blocks.sums(geometry.inner([g[0] for g in found.vectors], [g[1] for g in found.vectors]))
        return Statistics(directions, u, n, found.k, _nothing(n))
    squares = geometry.inner(found.vectors, found.vectors)
    own = [jnp.sum(q, axis=0) for q in squares] if blocks.per_coordinate else blocks.sums(squares)
    k, all_squares = found.k, _axes.sum_over(found.axes, own)
    u = [surrogate.symmetric_signal(length, q / k**2, k) for length, q in zip(n, all_squares, strict=True)]
    return Statistics(directions, u, n, k, _nothing(n))


def _nothing(like: list[jax.Array]) -> list[jax.Array]:
    return [jnp.zeros_like(value) for value in like]


def in_epochs(raw: Statistics, epoch: Any, count: jax.Array, beta: Any) -> Statistics:
    r"""The statistics of gradients that are drawn without replacement, in epochs of so many updates.

    Products of two gradients of one epoch are low by a number of which :math:`c = (n - u)/B` is an unbiased estimate.
    It is added to u; and of :math:`m_{t-1}` a share of :math:`1 - \beta^p`, p the updates since the epoch began, is of
    the same epoch.

    Args:
        raw: those of the gradients alone.
        epoch: B, None if they are drawn with replacement.
        count: how many updates there have been.
        beta: the momentum.
    """
    if epoch is None:
        return raw
    low = [(n - u) / jnp.asarray(epoch, u.dtype) for u, n in zip(raw.u, raw.n, strict=True)]
    share = 1 - jnp.asarray(beta) ** jnp.mod(count, jnp.asarray(epoch, count.dtype))
    return raw._replace(
        u=[u + c for u, c in zip(raw.u, low, strict=True)], low=[share.astype(c.dtype) * c for c in low]
    )


def with_momentum(
    raw: Statistics,
    found: Gradients,
    geometry: Geometry,
    blocks: Blocks,
    trace: list[jax.Array],
    weight: jax.Array,
    beta: Any,
    statistics: surrogate.MomentumStatistics,
) -> tuple[Statistics, list[jax.Array]]:
    r"""Those of the direction D^-1 m_t / w_t, and the momentum m_t.

    Args:
        raw: those of the gradients themselves.
        found: the gradients.
        geometry: the metric.
        blocks: which coordinates share a step size.
        trace: m_{t-1} of each leaf.
        weight: w_t, the sum of the weights in m_t: :math:`1 - \beta^t` if beta stays the same; 1 without bias
            correction.
        beta: the momentum.
        statistics: whether (u, n) are those of the momentum direction or stay the gradients' own.
    """
    pairs = list(zip(trace, found.mean, strict=True))
    after = [beta.astype(m.dtype) * m + (1 - beta.astype(m.dtype)) * g for m, g in pairs]
    means = [m / weight.astype(m.dtype) for m in after]
    directions = geometry.sharp(means)
    if statistics == "gradient":
        return raw._replace(directions=directions), after
    crosses = blocks.sums(geometry.inner(trace, found.mean))
    u = [
        surrogate.momentum_signal(cross + low, own, beta.astype(own.dtype), weight.astype(own.dtype))
        for cross, low, own in zip(crosses, raw.low, raw.u, strict=True)
    ]
    return raw._replace(directions=directions, u=u, n=blocks.sums(geometry.inner(means, means))), after
