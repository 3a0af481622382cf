"""What the optimizer has learned, as sums over the updates and as numbers that people look at."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sgdol import summary, surrogate
from sgdol.jax._blocks import Blocks
from sgdol.jax._statistics import Statistics

__all__ = ["Record", "after_skip", "after_update", "empty", "plain", "report", "total"]


class Record(NamedTuple):
    """Sums over the updates, weighted by the base rate; in the unit of the optimizer's products."""

    step_size: jax.Array
    """Eta of the last update, before the first the base rate; for ``"group"``, of each group."""
    skipped: jax.Array
    """How many updates were skipped because a gradient was not finite."""
    identical: jax.Array
    """How many updates had the same gradient twice: u = n up to rounding."""
    gradients: jax.Array
    """K of the last update."""
    surrogate: jax.Array
    """The surrogate losses at the step sizes that were played."""
    signal: jax.Array
    """The sum of u."""
    length: jax.Array
    """The sum of n."""
    recent_signal: jax.Array
    """A moving average of u."""
    recent_length: jax.Array
    """A moving average of n."""


def empty(blocks: Blocks, rate: Any) -> Record:
    """The record before any update."""
    like = blocks.zeros()[0] if blocks.granularity == "group" else jnp.zeros((), blocks.dtype)
    integer, number = jnp.zeros((), jnp.int32), jnp.zeros((), blocks.dtype)
    return Record(jnp.broadcast_to(jnp.asarray(rate, blocks.dtype), like.shape), *[integer] * 3, *[number] * 5)


def after_skip(record: Record, skipped: jax.Array) -> Record:
    """The record after a call that made no update: one was skipped, or a gradient was held."""
    return record._replace(skipped=record.skipped + skipped)


def after_update(
    record: Record,
    blocks: Blocks,
    seen: Statistics,
    raw: Statistics,
    multipliers: list[jax.Array],
    lengths: list[jax.Array],
    rate: Any,
) -> Record:
    """The record after one more update.

    Args:
        record: the one before.
        blocks: which coordinates share a step size.
        seen: what the learner saw.
        raw: the statistics of the gradients themselves.
        multipliers: s of each block.
        lengths: the squared length of the direction in each block.
        rate: lr.
    """
    rate = jnp.asarray(rate, blocks.dtype)
    losses = [surrogate.loss(s, u, n, 1.0) for s, u, n in zip(multipliers, seen.u, seen.n, strict=True)]
    signal, length = rate * total(seen.u), rate * total(seen.n)
    noise = jnp.abs(total(raw.n) - total(raw.u))
    same = (total(raw.n) > 0) & (noise <= 8 * jnp.finfo(blocks.dtype).eps * total(raw.n))
    return Record(
        step_size=rate * _multiplier(blocks, lengths, multipliers),
        skipped=record.skipped,
        identical=record.identical + same,
        gradients=jnp.full((), seen.k, jnp.int32),
        surrogate=record.surrogate + rate * total(losses),
        signal=record.signal + signal,
        length=record.length + length,
        recent_signal=summary.recent(record.recent_signal, signal),
        recent_length=summary.recent(record.recent_length, length),
    )


def _multiplier(blocks: Blocks, lengths: list[jax.Array], multipliers: list[jax.Array]) -> jax.Array:
    """One number for all: the length of the move over that of the direction, so that what stays does not count."""
    if blocks.granularity in ("global", "group"):
        return multipliers[0]
    pairs = zip(multipliers, lengths, strict=True)
    move = total([jnp.sum(s * s * squared).astype(blocks.dtype) for s, squared in pairs])
    length = total([jnp.sum(squared).astype(blocks.dtype) for squared in lengths])
    return jnp.sqrt(jnp.where(length > 0, move / jnp.where(length > 0, length, 1), 1))


def total(values: list[jax.Array]) -> jax.Array:
    """The sum over all blocks."""
    parts = [jnp.sum(v) if v.ndim else v for v in values]
    return sum(parts[1:], parts[0])


def report(record: Record, count: Any, pending: Any, unit: Any) -> dict[str, Any]:
    """The record as plain numbers, or as arrays of them if the state is one of many."""
    values = {name: np.asarray(value, dtype=np.float64) for name, value in record._asdict().items()}
    square = np.where(np.asarray(unit, np.float64) > 0, np.asarray(unit, np.float64), 1.0) ** 2
    k, steps = values["gradients"], values["step_size"]
    losses, signal, length = (square * values[name] for name in ("surrogate", "signal", "length"))
    recent = values["recent_signal"], values["recent_length"]
    return {
        "step_size": np.atleast_1d(steps).tolist() if steps.ndim == k.ndim + 1 or not k.ndim else steps,
        "pending": plain(pending),
        "signal_to_noise": plain(summary.signal_to_noise(*recent)),
        "noise_scale": plain(summary.noise_scale(*recent, k)),
        "updates": plain(count),
        "skipped": plain(record.skipped),
        "identical": plain(record.identical),
        "gradients": plain(record.gradients),
        "cumulative_surrogate": plain(losses),
        "regret": plain(summary.regret(losses, signal, length)),
    }


def plain(value: Any) -> Any:
    """A number of Python's, or a numpy array."""
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array
