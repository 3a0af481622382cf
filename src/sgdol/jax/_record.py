"""What the optimizer has learned, as sums over the updates and as numbers that people look at."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sgdol import summary, surrogate
from sgdol.jax._blocks import Blocks, total

__all__ = ["Statistics", "after_update", "empty", "plain", "report"]


class Statistics(NamedTuple):
    """What an update is made of; gradients in units, products in their squares, of each block."""

    d: list[jax.Array]
    """The direction: real, in float32 or wider."""
    u: list[jax.Array]
    """The signal that the learner sees..."""
    n: list[jax.Array]
    """...and the squared length."""
    own_u: list[jax.Array]
    """The same two of the gradients themselves..."""
    own_n: list[jax.Array]
    """...which without momentum are those above."""
    last: list[jax.Array]
    """<gbar_t, d_{t-1}>, if the learner uses hindsight; else zeros."""


def empty(blocks: Blocks, rate: Any) -> jax.Array:
    """The record before any update, in the unit of the optimizer's products.

    Five sums over the updates, weighted by the base rate lr/(1 - beta): of the surrogate losses at the step sizes that
    were played, of u and of n; then moving averages of u and n. Then lr s of the last update, before the first lr; for
    ``"group"``, of each group.
    """
    shape = blocks.zeros()[0].shape if blocks.granularity == "group" else (1,)
    return jnp.concatenate([jnp.zeros(5, blocks.dtype), jnp.broadcast_to(jnp.asarray(rate, blocks.dtype), shape)])


def after_update(
    record: jax.Array, blocks: Blocks, seen: Statistics, multipliers: list[jax.Array], rate: Any, share: Any
) -> tuple[list[jax.Array], jax.Array]:
    """The numbers of the record after one more update, and whether it had the same gradient twice (u = n, rounded).

    Args:
        record: the one before.
        blocks: which coordinates share a step size.
        seen: the statistics of the update.
        multipliers: s of each block.
        rate: lr.
        share: 1 - beta.
    """
    rate = jnp.asarray(rate, blocks.dtype)
    base = rate / share
    signal, length = base * total(seen.u), base * total(seen.n)
    losses = [surrogate.loss(s, u, n, 1.0) for s, u, n in zip(multipliers, seen.u, seen.n, strict=True)]
    before = [record[..., i] for i in range(5)]
    sums = [a + b for a, b in zip(before, [base * total(losses), signal, length], strict=False)]
    sums += [summary.recent(a, b) for a, b in zip(before[3:], [signal, length], strict=True)]
    s = multipliers[0]
    if blocks.granularity in ("tensor", "coordinate"):
        # One number for all: the length of the move over that of the direction, so that what stays does not count.
        lengths = blocks.products(seen.d, seen.d) if blocks.per_coordinate else seen.n
        move = total([s * s * squared for s, squared in zip(multipliers, lengths, strict=True)])
        whole = total(lengths)
        s = jnp.sqrt(jnp.where(whole > 0, move / jnp.where(whole > 0, whole, 1), 1)).astype(blocks.dtype)
    steps = [rate * s] if s.ndim == 0 else [rate * s[i] for i in range(s.shape[0])]
    own_u, own_n = total(seen.own_u), total(seen.own_n)
    identical = (own_n > 0) & (jnp.abs(own_n - own_u) <= 8 * jnp.finfo(blocks.dtype).eps * own_n)
    return [*sums, *steps], identical


def report(state: Any) -> dict[str, Any]:
    """The record of a state as plain numbers, or as arrays of them if the state is one of many."""
    numbers = np.asarray(state.numbers, np.float64)
    updates, pending, skipped, identical, k = (np.asarray(state.counts)[..., i] for i in range(5))
    unit, sums, steps = numbers[..., 1], numbers[..., 2:7], numbers[..., 7:]
    square = np.where(unit > 0, unit, 1.0) ** 2
    losses, signal, length = (square * sums[..., i] for i in range(3))
    recent = sums[..., 3], sums[..., 4]
    return {
        "step_size": steps.tolist() if steps.ndim == 1 else steps[..., 0] if steps.shape[-1] == 1 else steps,
        "pending": plain(pending > 0),
        "signal_to_noise": plain(summary.signal_to_noise(*recent)),
        "noise_scale": plain(summary.noise_scale(*recent, k)),
        "updates": plain(updates),
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
