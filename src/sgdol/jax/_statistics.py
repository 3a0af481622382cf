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

__all__ = ["Statistics", "of_gradients", "with_momentum"]


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


def of_gradients(found: Gradients, geometry: Geometry, blocks: Blocks, estimator: surrogate.Estimator) -> Statistics:
    """Those of the gradients alone; the symmetric estimator uses all of them, the paper's the first two."""
    n = blocks.sums(geometry.inner(found.mean, found.mean))
    directions = geometry.sharp(found.mean)
    if (found.k == 2 and not found.axes) or estimator == "paper":  # for equal ones u = n to the last bit
        u = blocks.sums(geometry.inner([g[0] for g in found.vectors], [g[1] for g in found.vectors]))
        return Statistics(directions, u, n, found.k)
    squares = geometry.inner(found.vectors, found.vectors)
    own = [jnp.sum(q, axis=0) for q in squares] if blocks.per_coordinate else blocks.sums(squares)
    k, all_squares = found.k, _axes.sum_over(found.axes, own)
    u = [surrogate.symmetric_signal(length, q / k**2, k) for length, q in zip(n, all_squares, strict=True)]
    return Statistics(directions, u, n, k)


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
        weight: w_t, the sum of the weights in m_t: :math:`1 - \beta^t` if beta stays the same.
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
        surrogate.momentum_signal(cross, own, beta.astype(own.dtype), weight.astype(own.dtype))
        for cross, own in zip(crosses, raw.u, strict=True)
    ]
    return Statistics(directions, u, blocks.sums(geometry.inner(means, means)), raw.k), after
