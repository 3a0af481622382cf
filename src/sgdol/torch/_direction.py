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

    d: Vector  # the direction of entry e is scales[e] * d[e]; not to be written to
    scales: list[Any]
    u: Numbers  # the signal <d, grad f>
    n: Numbers  # <d, D d>
    last: Numbers  # <g_t, d_{t-1}>: what the last step turned out to be worth; 0 where no learner asks


PLANNED = ("momentum", "statistics", "bias_correction", "epoch", "learner", "metric")  # options that _Plan is made of


class _Plan(NamedTuple):
    """What the options of the groups say about the directions of a layout: made once for many updates."""

    layout: Layout
    options: Any  # those that it was made of
    has_momentum: list[tuple[dict[str, Any], bool]]  # each group, and whether it has or has had momentum
    is_gradient: bool  # True if d = D^-1 g, and no learner uses hindsight
    has_epochs: bool
    weights: list[float]  # 1 - beta of each entry
    has_last: list[bool]  # of each group: whether d_{t-1} is in the state
    keeps: list[bool]  # of each group: whether d_t is to be written there
    by_tensor: list[Numbers]  # beta, of_direction, asks and has_last, as _learner_numbers takes them


def uses_momentum(group: dict[str, Any]) -> bool:
    return bool(group["momentum"]) or "momentum_weight" in group  # has or has had


class Directions:
    """Makes directions of gradients, with the momenta that are kept in the optimizer's state.

    Args:
        hindsight: whether the learner of a group uses <g_t, d_{t-1}>.
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
        """True if state["direction"] holds d_t. Hindsight needs it unless momentum in Euclid's norm equals it."""
        return self._hindsight(group) and not (uses_momentum(group) and self._euclidean(group))

    def make(self, gradients: Gradients, updates: Tensor, gate: Gate) -> Direction:
        """The direction of the update after so many others. It moves the momenta on."""
        layout, D, n, u = gradients.layout, gradients.operators, gradients.n, gradients.u
        entries = layout.entries
        options = [(*map(group.get, PLANNED), "momentum_weight" in group) for group in layout.groups]
        plan = self._plan
        if plan is None or plan.layout is not layout or plan.options != options:
            plan = self._plan = self._make_plan(layout, options)
        g = gradients.g if gate.host else gate.finite(gradients.g)
        pooled = isinstance(n[0], float)

        zeros: Numbers = [0.0] * len(u)
        epoch_bias = zeros
        if plan.has_epochs:
            u, epoch_bias = _corrected_for_epochs(layout, n, u, gate.number(updates))
        if plan.is_gradient:
            return Direction(D.sharp(g), [1.0] * len(g), u, n, zeros)
        last = zeros
        if True in plan.has_last:
            # In Euclid's norm d_{t-1} is the momentum, and <m_{t-1}, g_t> is computed below: here it counts as 0. A
            # group that got its momentum after the last update still has its d_{t-1} in the state.
            before = [
                layout.vector("direction", e)
                if plan.has_last[entry.group] and (plan.keeps[entry.group] or layout.has_state("direction", e))
                else torch.zeros_like(g[e])
                for e, entry in enumerate(entries)
            ]
            last = layout.products(g, before, pooled=pooled)
        weights = [
            _move_weight(group, layout, gate) if has_momentum else (1.0, 1.0)
            for group, has_momentum in plan.has_momentum
        ]
        crosses, squares, d, scales = [], [], [], []
        for e, entry in enumerate(entries):
            # Without momentum, the gradient stands in for both the old and the new one.
            m = layout.vector("momentum", e) if plan.has_momentum[entry.group][1] else g[e]
            weight = plan.weights[e] if gate.host else gate.weight(plan.weights[e])
            cross, sharp, square = _move_momentum(layout, e, D[e], m, g[e], weight, pooled)
            crosses.append(cross)
            squares.append(square)
            d.append(sharp)
            scales.append(1 / weights[entry.group][1])
            if plan.keeps[entry.group]:
                old, new = layout.vector("direction", e), sharp * scales[e]
                d[e], scales[e] = old.copy_(gate.choose(new, old)), 1.0
        if pooled:
            cross_, square_ = [sum(crosses)], [sum(squares)]
        else:
            cross_, square_ = layout.joined(crosses), layout.joined(squares)
            if self._world().spread:
                cross_, square_, last = self._over_ranks(layout, cross_, square_, last)
        divisors = [layout.by_group(values) for values in zip(*weights, strict=True)]
        rows = zip(*plan.by_tensor, *divisors, cross_, square_, last, u, n, epoch_bias, strict=True)
        return Direction(d, scales, *map(list, zip(*(_learner_numbers(*row) for row in rows), strict=True)))

    def _make_plan(self, layout: Layout, options: Any) -> _Plan:
        groups = layout.groups
        has_momentum, asks = [uses_momentum(group) for group in groups], [self._hindsight(group) for group in groups]
        betas = [float(group["momentum"]) if moves else 0.0 for group, moves in zip(groups, has_momentum, strict=True)]
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"momentum must be at least 0 and less than 1, parameter groups have {betas}")
        of_direction = [
            moves and group["statistics"] != "gradient" for group, moves in zip(groups, has_momentum, strict=True)
        ]

        def flags(values: list[bool]) -> Numbers:  # one flag for all, or a boolean for each tensor
            return [value > 0 if isinstance(value, Tensor) else value for value in layout.by_group(values)]

        # In Euclid's norm d_{t-1} is the momentum, once that has moved: it has a weight then.
        is_momentum = [self._euclidean(group) and "momentum_weight" in group for group in groups]
        has_last = [a and not same for a, same in zip(asks, is_momentum, strict=True)]
        return _Plan(
            layout,
            options,
            list(zip(groups, has_momentum, strict=True)),
            not (any(has_momentum) or any(asks)),
            any(group["epoch"] is not None for group in groups),
            [1 - betas[entry.group] for entry in layout.entries],
            has_last,
            [self.keeps_direction(group) for group in groups],
            [layout.by_group(betas), *map(flags, (of_direction, asks, has_last))],
        )

    def _over_ranks(self, layout: Layout, *products: Numbers) -> list[Numbers]:
        world = self._world()
        params = [layout.params[i] for i in layout.numbered]
        # One message for all products. A product that is 0 for all tensors is a float.
        own = torch.stack([p[0] if isinstance(p[0], Tensor) else layout.like.expand(len(params)) for p in products])
        return [[row, *p[1:]] for row, p in zip(world.total(params, own), products, strict=True)]


def _move_momentum(
    layout: Layout, e: int, operator: Any, m: Tensor, g: Tensor, weight: Any, pooled: bool
) -> tuple[Any, Tensor, Any]:
    """m_t = m_{t-1} + weight (g - m_{t-1}), in place. Returns <m_{t-1}, D^-1 g>, D^-1 m_t and <m_t, D^-1 m_t>.

    If m is g, nothing moves.
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


def _learner_numbers(
    beta: Any, of_direction: Any, asks: Any, has_last: Any, before: Any, after: Any,
    cross: Any, square: Any, last: Any, u: Any, n: Any, epoch_bias: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(u, n, last) as the learner takes them: of all tensors together, of each tensor, or of each coordinate.

    Args:
        beta: the momentum.
        of_direction: True for (u, n) of the direction, False for those of the gradients alone.
        asks: whether the learner uses hindsight.
        has_last: whether the argument ``last`` is <g_t, d_{t-1}>; else that is cross/before.
        before: what the last direction was divided by, w_{t-1}.
        after: what this direction is divided by, w_t.
        cross: <m_{t-1}, D^-1 g_t>.
        square: <m_t, D^-1 m_t>.
        last: see has_last.
        u: the signal of the gradients.
        n: their squared length.
        epoch_bias: by how much ``cross`` is too low because batches are drawn without replacement.
    """
    # A flag is a bool if it is the same for all tensors: then nothing is computed of the other case.
    hindsight = 0.0
    if asks is not False:
        hindsight = last if has_last is True else ratio(cross, before, 0.0 * cross)
        if isinstance(has_last, Tensor):
            hindsight = where(has_last, last, hindsight)
        if isinstance(epoch_bias, Tensor) or epoch_bias:
            hindsight = hindsight + epoch_bias / where(before > 0, before, 1.0)
        if asks is not True:
            hindsight = where(asks, hindsight, 0.0)
    if of_direction is False:
        return u, n, hindsight
    signal, length = momentum_signal(cross + epoch_bias, u, beta, after), square / (after * after)
    if of_direction is True:
        return signal, length, hindsight
    return where(of_direction, signal, u), where(of_direction, length, n), hindsight


def _move_weight(group: dict[str, Any], layout: Layout, gate: Gate) -> tuple[Any, Any]:
    """(w_{t-1}, w_t), where w_t = beta w_{t-1} + 1 - beta is kept in the group; (1, 1) without bias correction."""
    beta, old = float(group["momentum"]), group.get("momentum_weight", layout.like)
    old = old.item() if gate.host else old.to(layout.like)
    new = beta * old + (1 - beta)  # not 1 - beta^t: schedulers may change beta
    new = new if gate.host else gate.choose(new, old)
    group["momentum_weight"] = as_number(new, layout.like)
    return (old, new) if group["bias_correction"] else (1.0, 1.0)


def _corrected_for_epochs(layout: Layout, n: Numbers, u: Numbers, updates: Any) -> tuple[Numbers, Numbers]:
    """(u + (n - u)/T, (1 - beta^j) (n - u)/T) in update j of an epoch of T updates without replacement.

    The product of two gradients of one epoch is too low by (n - u)/T, because a sample drawn for one cannot be drawn
    for the other. The momentum has 1 - beta^j of its weight from this epoch.
    """
    groups = layout.groups
    lengths = [float(group["epoch"] or math.inf) for group in groups]
    ages = [0.0 if math.isinf(length) else updates % length for length in lengths]
    shares = [1 - float(group["momentum"]) ** age for group, age in zip(groups, ages, strict=True)]
    each = zip(n, u, layout.by_group(lengths), layout.by_group(shares), strict=True)
    pairs = [(b + (a - b) / length, share * (a - b) / length) for a, b, length, share in each]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
