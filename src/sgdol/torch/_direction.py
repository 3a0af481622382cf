r"""From the gradients of a step to the direction d of its update and the numbers (u, n): momentum, hindsight, epochs.

With momentum, :math:`m_t = \beta m_{t-1} + (1 - \beta) \bar g_t` and w_t the sum of its weights,

.. math:: d_t = \frac{D_t^{-1} m_t}{w_t}, \qquad
    u_t = \frac{\beta \langle m_{t-1}, D_t^{-1} \bar g_t\rangle + (1 - \beta) u}{w_t}, \qquad
    n_t = \frac{\langle m_t, D_t^{-1} m_t\rangle}{w_t^2}.

Learners that use hindsight are also told what the last step was worth, :math:`\langle \bar g_t, d_{t-1}\rangle`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol._numbers import where
from sgdol.surrogate import momentum_signal
from sgdol.torch._gradients import Gradients
from sgdol.torch._update import Gate
from sgdol.torch._vectors import Layout, Section, Vector
from sgdol.torch._world import World

__all__ = ["Direction", "Directions", "uses_momentum"]


class Direction(NamedTuple):
    """What an update is made of."""

    sections: list[Section]
    d: Vector  # the direction of entry e is scales[e] * d[e]; not to be written to
    scales: list[Any]
    # One value per section.
    u: list[Any]  # the signal <d, grad f>
    n: list[Any]  # <d, D d>
    last: list[Any]  # <g_t, d_{t-1}>: what the last step turned out to be worth; None where no learner asks


class _Momentum(NamedTuple):
    """The momentum of a group in one update."""

    moves: bool  # whether the group has or has had momentum
    asks: bool  # whether the learner uses hindsight
    keeps: bool  # whether d_t is to be written to state["direction"]
    in_state: bool  # whether d_{t-1} is there; else it is the momentum, divided by `before`
    weight: Any  # of the gradient: 1 - beta
    before: Any  # what d_{t-1} was divided by; 1 before the first update
    after: Any  # what d_t is divided by


def uses_momentum(group: dict[str, Any]) -> bool:
    return bool(group["momentum"]) or "momentum_weight" in group  # has or has had


class Directions:
    """Makes directions of gradients, with the momenta that are kept in the optimizer's state.

    Args:
        groups: the parameter groups.
        hindsight: returns whether the learner of a group uses <g_t, d_{t-1}>.
        euclidean: returns whether the metric of a group is Euclid's.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        hindsight: Callable[[dict[str, Any]], bool],
        euclidean: Callable[[dict[str, Any]], bool],
    ) -> None:
        self._kinds = {id(group): (hindsight(group), euclidean(group)) for group in groups}

    def keeps_direction(self, group: dict[str, Any]) -> bool:
        """True if state["direction"] holds d_t. Hindsight needs it unless momentum in Euclid's norm equals it."""
        hindsight, euclidean = self._kinds[id(group)]
        return hindsight and not (uses_momentum(group) and euclidean)

    def make(self, gradients: Gradients, updates: Any, gate: Gate, world: World) -> Direction:
        """The direction of the update after so many others. It moves the momenta on."""
        layout, g, pooled = gradients.layout, gradients.g, isinstance(gradients.n[0], float)
        momenta = [self._momentum(group, float(group["momentum"]), layout, gate) for group in layout.groups]
        rows = [
            _move_momentum(layout, e, gradients.operators[e], g[e], momenta[entry.group], gate, pooled)
            for e, entry in enumerate(layout.entries)
        ]
        d, scales, *columns = map(list, zip(*rows, strict=True))
        products = [layout.joined(column, pooled) for column in columns]
        sections = layout.everything if pooled else layout.sections
        shared = [i for i, section in enumerate(sections) if not section.array]  # arrays are of this rank's coordinates
        if world.spread and any(column[i] is not None for column in products for i in shared):
            totals = world.total(layout.params, torch.stack([layout.totals(column) for column in products]))
            products = [layout.with_totals(column, row) for column, row in zip(products, totals, strict=True)]
        statistics = [
            _statistics(layout.groups[section.group], momenta[section.group], products_of_section, u, n, updates)
            for section, *products_of_section, u, n in zip(sections, *products, gradients.u, gradients.n, strict=True)
        ]
        return Direction(sections, d, scales, *map(list, zip(*statistics, strict=True)))

    def _momentum(self, group: dict[str, Any], beta: float, layout: Layout, gate: Gate) -> _Momentum:
        asks, euclidean = self._kinds[id(group)]
        # In Euclid's norm d_{t-1} is the momentum, once that has moved: it has a weight then. A group that got its
        # momentum after the last update still has its d_{t-1} in the state.
        moved = "momentum_weight" in group
        moves, in_state = bool(beta) or moved, asks and not (euclidean and moved)
        before = after = 1.0
        if moves:
            old = gate.number(group["momentum_weight"].to(layout.like)) if moved else 0.0
            new = beta * old + (1 - beta)  # not 1 - beta^t: schedulers may change beta
            group["momentum_weight"] = gate.kept(new, old, layout.like)
            if group["bias_correction"]:
                before, after = where(old > 0, old, 1.0), new
        keeps = asks and not (moves and euclidean)
        return _Momentum(moves, asks, keeps, in_state, gate.weight(1 - beta), before, after)


def _move_momentum(
    layout: Layout, e: int, operator: Any, g: Tensor, momentum: _Momentum, gate: Gate, pooled: bool
) -> tuple[Tensor, Any, Any, Any, Any]:
    """The direction of an entry, its scale, and three products; None where nobody asks for one.

    The products are <m_{t-1}, D^-1 g>, <m_t, D^-1 m_t> and, for hindsight, <g, d_{t-1}>. If d_{t-1} is not in the
    state, it is the momentum, and the first product stands for it.
    """
    cross = square = last = None
    if momentum.in_state and (momentum.keeps or layout.has_state("direction", e)):
        last = layout.number(e, g, layout.vector("direction", e), pooled)
    d = g
    if momentum.moves:
        m = layout.vector("momentum", e)
        if layout.entries[e].merged or layout.entries[e].coordinates:
            cross = layout.number(e, m, g if operator.is_identity else operator.sharp(g), pooled)
            m.lerp_(g, momentum.weight)
            d = m if operator.is_identity else operator.sharp(m)
            square = layout.number(e, m, d, pooled)
        else:
            cross, d, square = operator.advance(m, g, momentum.weight)
            # A float if pooled, else a tensor of one number.
            cross, square = (x.item() if pooled else x.to(layout.like.device).reshape(1) for x in (cross, square))
        last = cross if last is None and momentum.asks else last
    elif not operator.is_identity:
        d = operator.sharp(g)
    scale = 1 / momentum.after
    if not momentum.keeps:
        return d, scale, cross, square, last
    old, new = layout.vector("direction", e), d * scale
    return old.copy_(gate.choose(new, old)), 1.0, cross, square, last


def _statistics(
    group: dict[str, Any], momentum: _Momentum, products: list[Any], u: Any, n: Any, updates: Any
) -> tuple[Any, Any, Any]:
    """(u, n, last) as the learner takes them, of all tensors together, of each tensor, or of each coordinate.

    ``products`` is what :func:`_move_momentum` returned; u and n are those of the gradients.
    """
    cross, square, last = products
    if last is not None and not momentum.in_state:
        last = last / momentum.before
    if group["epoch"] is not None:
        # The product of two gradients of an epoch of T updates is too low by (n - u)/T, because a sample drawn for one
        # cannot be drawn for the other. After j updates of it, the momentum has 1 - beta^j of its weight from it.
        low = (n - u) / group["epoch"]
        u = u + low
        low = low * (1 - float(group["momentum"]) ** (updates % group["epoch"]))
        cross, last = (None if x is None else x + y for x, y in ((cross, low), (last, low / momentum.before)))
    if momentum.moves and group["statistics"] != "gradient":
        beta, w = float(group["momentum"]), momentum.after
        u, n = momentum_signal(cross, u, beta, w), square / (w * w)
    return u, n, last
