r"""From the gradients of a step to the direction d of its update and the numbers (u, n): momentum, hindsight, epochs.

With momentum, :math:`m_t = \beta m_{t-1} + (1 - \beta) \bar g_t` and w_t the sum of its weights,

.. math:: d_t = \frac{D_t^{-1} m_t}{w_t}, \qquad
    u_t = \frac{\beta \langle m_{t-1}, D_t^{-1} \bar g_t\rangle + (1 - \beta) u}{w_t}, \qquad
    n_t = \frac{\langle m_t, D_t^{-1} m_t\rangle}{w_t^2}.

Learners that use hindsight are also told what the last step was worth, :math:`\langle \bar g_t, d_{t-1}\rangle`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol._numbers import ratio, where
from sgdol.surrogate import momentum_signal
from sgdol.torch._gradients import Gradients
from sgdol.torch._update import Gate
from sgdol.torch._vectors import Layout, Numbers, Vector, as_number
from sgdol.torch._world import World

__all__ = ["Direction", "Directions", "uses_momentum"]


class Direction(NamedTuple):
    """What an update is made of."""

    d: Vector
    """The direction of entry e is ``scales[e] * d[e]``; not to be written to."""
    scales: list[Any]
    u: Numbers
    """The signal <d, grad f>."""
    n: Numbers
    """<d, D d>."""
    last: Numbers
    """<g_t, d_{t-1}>: what the last step turned out to be worth; 0 where no learner asks."""


PLANNED = ("momentum", "statistics", "bias_correction", "epoch", "learner", "metric")
"""The options that say how a direction is made."""


class _Plan(NamedTuple):
    """How the directions of a layout are made: what the options of its groups say, once for many updates."""

    layout: Layout
    key: Any
    groups: list[tuple[dict[str, Any], bool]]
    """The groups, and whether each has or has had momentum."""
    learns: bool
    """Whether any group has momentum or a learner that uses hindsight: else the direction is the gradient's."""
    epochs: bool
    shares: list[float]
    """1 - beta of each entry."""
    kept: list[bool]
    """Whether the last direction is in the state, by group."""
    keeps: list[bool]
    """Whether this one is to be kept."""
    options: list[Numbers]
    """beta, direct, asking and kept, as :func:`_numbers` takes them."""


def uses_momentum(group: dict[str, Any]) -> bool:
    """Whether a group has or has had momentum."""
    return bool(group["momentum"]) or "momentum_weight" in group


class Directions:
    """Makes directions of gradients, with the momenta that are kept in the optimizer's state.

    Args:
        hindsight: whether the learner of a group wants to know what the last step was worth.
        euclidean: whether the metric of a group is Euclid's.
        world: gives the world that the optimizer is in.
    """

    def __init__(
        self,
        hindsight: Callable[[dict[str, Any]], bool],
        euclidean: Callable[[dict[str, Any]], bool],
        world: Callable[[], World],
    ) -> None:
        self._hindsight, self._euclidean, self._world = hindsight, euclidean, world
        self._plan: _Plan | None = None

    def keeps_direction(self, group: dict[str, Any]) -> bool:
        """Whether the last direction is kept: hindsight needs it, unless a momentum in Euclid's norm equals it."""
        return self._hindsight(group) and not (uses_momentum(group) and self._euclidean(group))

    def make(self, gradients: Gradients, updates: Tensor, gate: Gate) -> Direction:
        """The direction of an update, after so many others; momenta move on."""
        layout, D, n, u = gradients.layout, gradients.operators, gradients.n, gradients.u
        entries = layout.entries
        key = [(*map(group.get, PLANNED), "momentum_weight" in group) for group in layout.groups]
        plan = self._plan
        if plan is None or plan.layout is not layout or plan.key != key:
            plan = self._plan = self._planned(layout, key)
        g = gradients.g if gate.host else gate.finite(gradients.g)
        pooled = isinstance(n[0], float)

        nothing: Numbers = [0.0] * len(u)
        low = nothing
        if plan.epochs:
            u, low = _corrected_for_epochs(layout, n, u, gate.number(updates))
        if not plan.learns:
            return Direction(D.sharp(g), [1.0] * len(g), u, n, nothing)
        last = nothing
        if True in plan.kept:  # d_{t-1} is in the state, unless it is a momentum in Euclid's norm that has moved before
            before = [
                layout.vector("direction", e)
                if plan.kept[entry.group] and (plan.keeps[entry.group] or layout.has_state("direction", e))
                else torch.zeros_like(g[e])
                for e, entry in enumerate(entries)
            ]
            last = layout.products(g, before, pooled=pooled)
        weights = [_weigh(group, layout, gate) if moves else (1.0, 1.0) for group, moves in plan.groups]
        # Momenta move on. Where there is none, the gradient stands in for both the old and the new one.
        crosses, squares, d, scales = [], [], [], []
        for e, entry in enumerate(entries):
            m = layout.vector("momentum", e) if plan.groups[entry.group][1] else g[e]
            share = plan.shares[e] if gate.host else gate.weight(plan.shares[e])
            cross, sharp, square = _advance(layout, e, D[e], m, g[e], share, pooled)
            crosses.append(cross)
            squares.append(square)
            d.append(sharp)
            scales.append(1 / weights[entry.group][1])
            if plan.keeps[entry.group]:
                held, new = layout.vector("direction", e), sharp * scales[e]
                d[e], scales[e] = held.copy_(gate.choose(new, held)), 1.0
        if pooled:
            cross_, square_ = [sum(crosses)], [sum(squares)]
        else:
            cross_, square_ = layout.joined(crosses), layout.joined(squares)
            if self._world().spread:
                cross_, square_, last = self._over_ranks(layout, cross_, square_, last)
        divisors = [layout.by_group(values) for values in zip(*weights, strict=True)]
        rows = zip(*plan.options, *divisors, cross_, square_, last, u, n, low, strict=True)
        return Direction(d, scales, *map(list, zip(*(_numbers(*row) for row in rows), strict=True)))

    def _planned(self, layout: Layout, key: Any) -> _Plan:
        groups = layout.groups
        moving, asking = [uses_momentum(group) for group in groups], [self._hindsight(group) for group in groups]
        betas = [float(group["momentum"]) if moves else 0.0 for group, moves in zip(groups, moving, strict=True)]
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"momentum must be at least 0 and less than 1, parameter groups have {betas}")
        direct = [moves and group["statistics"] != "gradient" for group, moves in zip(groups, moving, strict=True)]

        def flags(values: list[bool]) -> Numbers:  # one flag for all, or a boolean for each tensor
            return [value > 0 if isinstance(value, Tensor) else value for value in layout.by_group(values)]

        was = [self._euclidean(group) and "momentum_weight" in group for group in groups]
        kept = [asks and not equal for asks, equal in zip(asking, was, strict=True)]
        return _Plan(
            layout,
            key,
            list(zip(groups, moving, strict=True)),
            any(moving) or any(asking),
            any(group["epoch"] is not None for group in groups),
            [1 - betas[entry.group] for entry in layout.entries],
            kept,
            [self.keeps_direction(group) for group in groups],
            [layout.by_group(betas), *map(flags, (direct, asking, kept))],
        )

    def _over_ranks(self, layout: Layout, *products: Numbers) -> list[Numbers]:
        """Products of this rank's pieces, added up over all of them: one message."""
        world = self._world()
        params = [layout.params[i] for i in layout.numbered]
        own = torch.stack([p[0] if isinstance(p[0], Tensor) else layout.like.expand(len(params)) for p in products])
        return [[row, *p[1:]] for row, p in zip(world.total(params, own), products, strict=True)]


def _advance(
    layout: Layout, e: int, operator: Any, m: Tensor, g: Tensor, weight: Any, pooled: bool
) -> tuple[Any, Tensor, Any]:
    """Move the momentum of an entry on: <m_{t-1}, D^-1 g>, D^-1 m_t and <m_t, D^-1 m_t>.

    Where m is g there is no momentum.
    """
    entry = layout.entries[e]
    if entry.merged or entry.coordinates:
        sharp = g if operator.is_identity else operator.sharp(g)
        cross = square = layout.number(e, m, sharp, pooled)
        if m is not g:
            m.lerp_(g, weight)
            sharp = m if operator.is_identity else operator.sharp(m)
            square = layout.number(e, m, sharp, pooled)
        return cross, sharp, square
    if m is g:
        sharp, cross = operator.sharp(g), operator.inner(g, g)
        square = cross
    else:
        cross, sharp, square = operator.advance(m, g, weight)
    if pooled:
        return cross.item(), sharp, square.item()
    like = layout.like
    return cross.to(like.device).reshape(1), sharp, square.to(like.device).reshape(1)


def _numbers(
    beta: Any, direct: Any, asking: Any, kept: Any, before: Any, after: Any,
    cross: Any, square: Any, last: Any, u: Any, n: Any, low: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(u, n, last) of the direction, of tensors or of coordinates.

    Args:
        beta: the momentum.
        direct: whether the learner sees the numbers of the direction, or those of the gradients alone.
        asking: whether it uses hindsight.
        kept: whether ``last`` is <g_t, d_{t-1}>; else it is made of ``cross``.
        before: by what the last direction was divided, w_{t-1}.
        after: by what this one is.
        cross: <m_{t-1}, D^-1 g_t>.
        square: <m_t, D^-1 m_t>.
        last: <g_t, d_{t-1}>, where directions are kept.
        u: the signal of the gradients.
        n: their squared length.
        low: by how much ``cross`` is low because batches are drawn without replacement.
    """
    worth = 0.0
    if asking is not False:
        worth = last if kept is True else ratio(cross, before, 0.0 * cross)
        if isinstance(kept, Tensor):
            worth = where(kept, last, worth)
        if isinstance(low, Tensor) or low:
            worth = worth + low / where(before > 0, before, 1.0)
        if asking is not True:
            worth = where(asking, worth, 0.0)
    if direct is False:
        return u, n, worth
    signal, length = momentum_signal(cross + low, u, beta, after), square / (after * after)
    if direct is True:
        return signal, length, worth
    return where(direct, signal, u), where(direct, length, n), worth


def _weigh(group: dict[str, Any], layout: Layout, gate: Gate) -> tuple[Any, Any]:
    """The weights by which the group's last and its new momentum are divided; schedulers may move beta."""
    beta, old = float(group["momentum"]), group.get("momentum_weight", layout.like)
    old = old.item() if gate.host else old.to(layout.like)
    new = beta * old + (1 - beta)
    new = new if gate.host else gate.choose(new, old)
    group["momentum_weight"] = as_number(new, layout.like)
    return (old, new) if group["bias_correction"] else (1.0, 1.0)


def _corrected_for_epochs(layout: Layout, n: Numbers, u: Numbers, updates: Any) -> tuple[Numbers, Numbers]:
    """The signal, and by how much products with the momentum are low, where batches are drawn without replacement.

    Two gradients of one epoch of T updates repel each other: their product is low by (n - u)/T. The momentum before
    this update has 1 - beta^j of its weight from this epoch, j updates old.
    """
    groups = layout.groups
    lengths = [float(group["epoch"] or math.inf) for group in groups]
    ages = [0.0 if math.isinf(length) else updates % length for length in lengths]
    shares = [1 - float(group["momentum"]) ** age for group, age in zip(groups, ages, strict=True)]
    each = zip(n, u, layout.by_group(lengths), layout.by_group(shares), strict=True)
    pairs = [(b + (a - b) / length, share * (a - b) / length) for a, b, length, share in each]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
