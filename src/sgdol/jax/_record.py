"""What the optimizer has learned, as sums over the updates and as numbers that people look at."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sgdol import summary, surrogate
from sgdol.jax._blocks import Blocks, total

__all__ = ["Record", "after_update", "empty", "plain", "report"]


class Record(NamedTuple):
    """Sums over the updates, weighted by the base rate; in the unit of the optimizer's products.

    Few arrays, because every array of a state costs a compiled step about as much as a layer's update.
    """

    step_size: jax.Array
    """Eta of the last update, before the first the base rate; for ``"group"``, of each group."""
    counts: jax.Array
    """Updates that were skipped because a gradient was not finite; updates that had the same gradient twice, u = n up
    to rounding; k of the last update."""
    sums: jax.Array
    """Of the surrogate losses at the step sizes that were played, of u and of n; then moving averages of u and n."""


def empty(blocks: Blocks, rate: Any) -> Record:
    """The record before any update."""
    shape = blocks.zeros()[0].shape if blocks.granularity == "group" else ()
    step_size = jnp.broadcast_to(jnp.asarray(rate, blocks.dtype), shape)
    return Record(step_size, jnp.zeros(3, jnp.int32), jnp.zeros(5, blocks.dtype))


def after_update(
    record: Record, blocks: Blocks, seen: Any, multipliers: list[jax.Array], rate: Any, moved: Any, skipped: Any
) -> Record:
    """The record after one more call.

    Args:
        record: the one before.
        blocks: which coordinates share a step size.
        seen: the statistics of the update (``_core.Statistics``).
        multipliers: s of each block.
        rate: lr.
        moved: whether there was an update at all.
        skipped: whether one was skipped.
    """
    rate = jnp.asarray(rate, blocks.dtype)
    losses = [surrogate.loss(s, u, n, 1.0) for s, u, n in zip(multipliers, seen.u, seen.n, strict=True)]
    own_u, own_n = total(seen.own_u), total(seen.own_n)
    same = (own_n > 0) & (jnp.abs(own_n - own_u) <= 8 * jnp.finfo(blocks.dtype).eps * own_n)
    signal, length = rate * total(seen.u), rate * total(seen.n)
    new = jnp.stack([rate * total(losses), signal, length, signal, length])
    recent = np.array([False] * 3 + [True] * 2)
    sums = jnp.where(recent, summary.recent(record.sums, new), record.sums + new)
    counts = record.counts.at[1].add(same).at[2].set(seen.k)
    return Record(
        step_size=jnp.where(moved, rate * _multiplier(blocks, seen, multipliers), record.step_size),
        counts=jnp.where(moved, counts, record.counts.at[0].add(skipped)),
        sums=jnp.where(moved, sums, record.sums),
    )


def _multiplier(blocks: Blocks, seen: Any, multipliers: list[jax.Array]) -> jax.Array:
    """One number for all: the length of the move over that of the direction, so that what stays does not count."""
    if blocks.granularity in ("global", "group"):
        return multipliers[0]
    lengths = blocks.products(seen.d, seen.d) if blocks.per_coordinate else seen.n
    move = total([s * s * squared for s, squared in zip(multipliers, lengths, strict=True)])
    length = total(lengths)
    return jnp.sqrt(jnp.where(length > 0, move / jnp.where(length > 0, length, 1), 1)).astype(blocks.dtype)


def report(record: Record, count: Any, pending: Any, unit: Any) -> dict[str, Any]:
    """The record as plain numbers, or as arrays of them if the state is one of many."""
    steps, sums = (np.asarray(value, np.float64) for value in (record.step_size, record.sums))
    skipped, identical, k = (np.asarray(record.counts)[..., i] for i in range(3))
    square = np.where(np.asarray(unit, np.float64) > 0, np.asarray(unit, np.float64), 1.0) ** 2
    losses, signal, length = (square * sums[..., i] for i in range(3))
    recent = sums[..., 3], sums[..., 4]
    return {
        "step_size": np.atleast_1d(steps).tolist() if steps.ndim == k.ndim + 1 or not k.ndim else steps,
        "pending": plain(pending),
        "signal_to_noise": plain(summary.signal_to_noise(*recent)),
        "noise_scale": plain(summary.noise_scale(*recent, k)),
        "updates": plain(count),
        "skipped": plain(skipped),
        "identical": plain(identical),
        "gradients": plain(k),
        "cumulative_surrogate": plain(losses),
        "regret": plain(summary.regret(losses, signal, length)),
    }


def plain(value: Any) -> Any:
    """A number of Python's, or a numpy array."""
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array
