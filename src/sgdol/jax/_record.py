"""What the optimizer has learned, as sums over the updates and as numbers that people look at."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sgdol import surrogate
from sgdol.jax._blocks import Blocks
from sgdol.jax._draw import Draw

__all__ = ["Record", "after_skip", "after_update", "empty", "report"]

RECENT = 0.99
"""The signal-to-noise ratio and the noise scale are averages over about the last 1 / (1 - RECENT) updates."""


class Record(NamedTuple):
    """Sums over the updates, weighted by the base rate."""

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


def after_skip(record: Record) -> Record:
    """The record after an update that was skipped."""
    return record._replace(skipped=record.skipped + 1)


def after_update(
    record: Record, blocks: Blocks, drawn: Draw, raw: Draw, multipliers: list[jax.Array], rate: Any
) -> Record:
    """The record after one more update.

    Args:
        record: the one before.
        blocks: which coordinates share a step size.
        drawn: what the learner saw.
        raw: the draw of the gradients themselves.
        multipliers: s of each block.
        rate: lr.
    """
    rate = jnp.asarray(rate, blocks.dtype)
    losses = [surrogate.loss(s, u, n, 1.0) for s, u, n in zip(multipliers, drawn.u, drawn.n, strict=True)]
    signal, length = rate * total(drawn.u), rate * total(drawn.n)
    noise = jnp.abs(total(raw.n) - total(raw.u))
    same = (total(raw.n) > 0) & (noise <= 8 * jnp.finfo(blocks.dtype).eps * total(raw.n))
    return Record(
        step_size=rate * _multiplier(blocks, drawn, multipliers),
        skipped=record.skipped,
        identical=record.identical + same,
        gradients=jnp.full((), drawn.k, jnp.int32),
        surrogate=record.surrogate + rate * total(losses),
        signal=record.signal + signal,
        length=record.length + length,
        recent_signal=signal + RECENT * (record.recent_signal - signal),
        recent_length=length + RECENT * (record.recent_length - length),
    )


def _multiplier(blocks: Blocks, drawn: Draw, multipliers: list[jax.Array]) -> jax.Array:
    """One number for all: the length of the move over that of the direction, so that what stays does not count."""
    if blocks.granularity in ("global", "group"):
        return multipliers[0]
    lengths = [d * d for d in drawn.directions] if blocks.per_coordinate else drawn.n
    pairs = zip(multipliers, lengths, strict=True)
    move = total([jnp.sum(s * s * squared).astype(blocks.dtype) for s, squared in pairs])
    length = total([jnp.sum(squared).astype(blocks.dtype) for squared in lengths])
    return jnp.sqrt(jnp.where(length > 0, move / jnp.where(length > 0, length, 1), 1))


def total(values: list[jax.Array]) -> jax.Array:
    """The sum over all blocks."""
    parts = [jnp.sum(v) if v.ndim else v for v in values]
    return sum(parts[1:], parts[0])


def report(record: Record, count: Any, pending: Any) -> dict[str, Any]:
    """The record as plain numbers, or as arrays of them if the state is one of many."""
    values = {name: np.asarray(value, dtype=np.float64) for name, value in record._asdict().items()}
    signal, noise, k = values["recent_signal"], values["recent_length"] - values["recent_signal"], values["gradients"]
    seen = values["length"] > 0
    best = np.where(seen, np.clip(values["signal"] / np.where(seen, values["length"], 1), 0, 2), 1)
    steps = values["step_size"]
    return {
        "step_size": np.atleast_1d(steps).tolist() if steps.ndim == k.ndim + 1 or not k.ndim else steps,
        "pending": _plain(np.asarray(pending)),
        "signal_to_noise": _quotient(signal, noise),
        "noise_scale": _quotient(k * noise, signal),
        "updates": _plain(np.asarray(count)),
        "skipped": _plain(np.asarray(record.skipped)),
        "identical": _plain(np.asarray(record.identical)),
        "gradients": _plain(np.asarray(record.gradients)),
        "cumulative_surrogate": _plain(values["surrogate"]),
        "regret": _plain(values["surrogate"] - surrogate.loss(best, values["signal"], values["length"], 1.0)),
    }


def _quotient(numerator: Any, denominator: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        # + 0.0 turns a negative zero into zero: x / 0 has the sign of x
        return _plain(np.asarray(numerator) / (np.asarray(denominator) + 0.0))


def _plain(array: Any) -> Any:
    return array.item() if array.ndim == 0 else array
