r"""From the gradients of a step to the direction d of its update and the numbers (u, n): momentum and metric.

With momentum, :math:`m_t = \beta m_{t-1} + (1 - \beta) \bar g_t` and w_t the sum of its weights,

.. math:: d_t = \frac{D_t^{-1} m_t}{w_t}, \qquad
    u_t = \frac{\beta \langle m_{t-1}, D_t^{-1} \bar g_t\rangle + (1 - \beta) u}{w_t}, \qquad
    n_t = \frac{\langle m_t, D_t^{-1} m_t\rangle}{w_t^2}.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol.surrogate import momentum_signal
from sgdol.torch._epochs import Epochs, in_epochs
from sgdol.torch._geometry import Geometry
from sgdol.torch._momentum import Products, advance, advance_in_metric, lerp, momentum_of, uses_momentum, weigh
from sgdol.torch._sources import Gradients, Signal
from sgdol.torch._tensors import wide_dtype
from sgdol.torch._world import World, like_parameter, local

__all__ = ["Coordinate", "Direction", "Statistics"]


class Coordinate(NamedTuple):
    """N and u of each coordinate of one tensor, and what the last step turned out to be worth."""

    left: Tensor
    right: Tensor
    scale: Any
    """n = scale^2 left right: a vector, and it or its direction."""
    signal: Signal
    last: Tensor | float
    """<gbar_t, d_{t-1}> of each coordinate, 0 without a last direction."""


class Direction(NamedTuple):
    """What an update is made of. The direction of parameter i is ``scales[i] * D^-1 vectors[i]``.

    In the groups of ``made``, whose directions are kept, ``vectors[i]`` is the direction itself.
    """

    k: int
    params: list[Tensor]
    vectors: list[Tensor]
    """Real tensors, this rank's pieces; not to be written to."""
    scales: list[Any]
    """The same within a parameter group: numbers, or tensors where the host must not wait."""
    n: Tensor
    """<d, D d> of each parameter, over all ranks."""
    squared: Tensor
    """<gbar, D^-1 gbar> of each parameter, over all ranks: what alpha is measured in."""
    u: Tensor
    """The signal <d, grad f> of each parameter, over all ranks."""
    last: Tensor
    """<gbar_t, d_{t-1}> of each parameter, over all ranks; 0 where nobody asks."""
    coordinates: dict[int, Coordinate]
    """The same per coordinate, by place, for which it was asked."""
    made: frozenset[int] = frozenset()
    """The places of groups whose vectors are directions already."""


class _Part(NamedTuple):
    """The parameters of one group that take part, which all are treated alike."""

    place: int
    group: dict[str, Any]
    rows: range
    moving: bool
    """Whether it has or has had momentum."""
    asking: bool
    """Whether its learner uses hindsight."""
    euclidean: bool
    kept: bool
    """Whether the last direction has been kept: hindsight needs it, and there was no momentum yet that is it."""
    keeps: bool
    """Whether this direction is to be kept: see :meth:`Statistics.keeps_direction`."""

    @property
    def beta(self) -> float:
        """The momentum."""
        return float(self.group["momentum"])

    @property
    def direct(self) -> bool:
        """Whether the learner sees the numbers of the direction."""
        return self.moving and self.group["statistics"] != "gradient"

    @property
    def counts(self) -> bool:
        """Whether anybody wants to know a product of its momenta or of its last directions."""
        return self.direct or self.asking


class _Found(NamedTuple):
    """What there is of a part before the numbers of all ranks are added up."""

    products: Products
    before: Any
    """By what the last direction has been divided."""
    after: Any
    """By what this one is."""


class Statistics:
    """Makes directions of gradients, with the momenta that are kept in the optimizer's state.

    Args:
        groups: the parameter groups.
        state: the optimizer's state.
        geometry: how long gradients are.
        world: gives the world that the optimizer is in.
        hindsight: whether the learner of a group wants to know what the last step was worth.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        state: dict[Any, Any],
        geometry: Geometry,
        world: Callable[[], World],
        hindsight: Callable[[dict[str, Any]], bool],
    ) -> None:
        self._groups = groups
        self._state = state
        self._geometry = geometry
        self._world = world
        self._hindsight = hindsight

    def direction(self, gradients: Gradients, group_of: list[int], made: Tensor, ok: Tensor | None) -> Direction:
        """The direction of an update, after ``made`` others, and what the momenta are after it."""
        epochs = None
        if any(group["epoch"] is not None for group in self._groups):
            gradients, epochs = in_epochs(gradients, [self._groups[g] for g in group_of], made)
        parts = self._parts(gradients.params, group_of)
        direction = Direction(
            gradients.k,
            gradients.params,
            gradients.vectors,
            [gradients.scale] * len(gradients.params),
            gradients.n,
            gradients.n,
            gradients.u,
            gradients.u,
            {i: self._coordinate(gradients, i, signal) for i, signal in gradients.signals.items()},
        )
        if not any(part.moving or part.asking for part in parts):
            return direction
        found = []
        for part in parts:
            if part.asking and direction.coordinates:
                direction = self._with_last(direction, gradients, part, epochs)
            if part.moving:
                direction, mine = self._with_momentum(direction, gradients, part, epochs, ok)
            else:
                mine = _Found(Products(*[self._with_kept(gradients, part)] * 3), 1.0, 1.0)
            found.append(mine)
        return self._with_numbers(direction, gradients, parts, found, epochs)

    def remember(self, direction: Direction, group_of: list[int], ok: Tensor | None) -> None:
        """Keep the direction of the update where hindsight will need it and nothing has kept it yet."""
        for part in self._parts(direction.params, group_of):
            if not part.keeps or part.moving:
                continue
            for i in part.rows:
                p = direction.params[i]
                d = self._geometry.sharp(p, direction.vectors[i])
                d = d.to(wide_dtype(d.dtype)) * direction.scales[i]
                kept = self._kept(p, d)
                kept.copy_(d if ok is None else torch.where(ok, d, kept))

    def keeps_direction(self, p: Tensor, group: dict[str, Any]) -> bool:
        """Whether the last direction of a parameter is kept: hindsight needs it, and the momentum is not it."""
        return self._hindsight(group) and not (uses_momentum(group) and self._geometry.euclidean(p))

    def _parts(self, params: list[Tensor], group_of: list[int]) -> list[_Part]:
        parts, start = [], 0
        while start < len(params):
            place = group_of[start]
            stop = start + group_of.count(place) if len(self._groups) > 1 else len(params)
            group, euclidean = self._groups[place], self._geometry.euclidean(params[start])
            moving, asking = uses_momentum(group), self._hindsight(group)
            kept = asking and not (euclidean and "momentum_weight" in group)
            keeps = self.keeps_direction(params[start], group)
            parts.append(_Part(place, group, range(start, stop), moving, asking, euclidean, kept, keeps))
            start = stop
        return parts

    def _kept(self, p: Tensor, like: Tensor) -> Tensor:
        """This rank's piece of the last direction of a parameter, to be written to; 0 before there is one."""
        state = self._state[p]
        if "direction" not in state:
            state["direction"] = like_parameter(torch.zeros_like(like, memory_format=torch.contiguous_format), p)
        return local(state["direction"])

    # One number per parameter -----------------------------------------------------------------------------------------

    def _with_kept(self, gradients: Gradients, part: _Part) -> Tensor:
        """<gbar_t, d_{t-1}> of each parameter whose last direction is kept, of this rank's pieces; else 0."""
        numbers = gradients.u.new_zeros(len(part.rows))
        known = [i for i in part.rows if "direction" in self._state.get(gradients.params[i], ())] if part.asking else []
        if known:
            directions = [local(self._state[gradients.params[i]]["direction"]) for i in known]
            pairings = self._geometry.pairings([gradients.vectors[i] for i in known], directions, numbers)
            numbers[[i - part.rows.start for i in known]] = pairings * gradients.scale
        return numbers

    def _with_momentum(
        self, direction: Direction, gradients: Gradients, part: _Part, epochs: Epochs | None, ok: Tensor | None
    ) -> tuple[Direction, _Found]:
        """Move the momenta of a part on."""
        some = slice(part.rows.start, part.rows.stop)
        params, like = gradients.params[some], gradients.u
        momenta = [momentum_of(self._state, p) for p in params]
        means = [_mean_gradient(v, gradients.scale, m) for v, m in zip(gradients.vectors[some], momenta, strict=True)]
        before, after = weigh(part.group, like, ok)
        mine = [i for i in part.rows if i in direction.coordinates] if part.direct else []
        signals = {}
        for i in mine:
            place = i - part.rows.start
            low = 0.0 if epochs is None else self._low(direction.coordinates[i], gradients, i, epochs)
            signals[i] = self._moved_signal(
                direction.coordinates[i].signal, params[place], momenta[place], means[place], part.beta, after, low
            )
        vectors, scale, made = momenta, 1 / after, direction.made
        if not part.counts:
            lerp(momenta, means, part.beta, ok)
            products = Products(*[like.new_zeros(len(params))] * 3)
        elif part.euclidean:
            products = advance(self._geometry, params, momenta, means, part.beta, like, ok)
            if part.kept:  # its first momentum
                products = products._replace(last=self._with_kept(gradients, part))
        else:
            kept = [self._kept(p, m) for p, m in zip(params, momenta, strict=True)] if part.keeps else None
            products = advance_in_metric(self._geometry, params, momenta, means, kept, part.beta, scale, like, ok)
            if kept is not None:
                vectors, made = kept, made | {part.place}
        coordinates = dict(direction.coordinates)
        for i in mine:
            m = momenta[i - part.rows.start]
            right = self._geometry.sharp(gradients.params[i], m)
            coordinates[i] = Coordinate(m, right, scale, signals[i], coordinates[i].last)
        scales = [1.0 if vectors is not momenta else scale] * len(params)
        direction = direction._replace(
            vectors=[*direction.vectors[: some.start], *vectors, *direction.vectors[some.stop :]],
            scales=[*direction.scales[: some.start], *scales, *direction.scales[some.stop :]],
            coordinates=coordinates,
            made=made,
        )
        return direction, _Found(products, before, after)

    def _with_numbers(
        self,
        direction: Direction,
        gradients: Gradients,
        parts: list[_Part],
        found: list[_Found],
        epochs: Epochs | None,
    ) -> Direction:
        """N, u and the worth of the last step over all ranks."""
        if not any(part.counts for part in parts):
            return direction
        products = [f.products for f in found]
        world = self._world()
        if world.spread:
            own = torch.cat([torch.stack(each) for each in products], dim=1)
            total = world.total(direction.params, own).split([len(part.rows) for part in parts], dim=1)
            products = [Products(*each.unbind()) for each in total]
        low = None if epochs is None else epochs.share * epochs.low
        n, u, worth = [], [], []
        for part, (cross, length, last), (_, before, after) in zip(parts, products, found, strict=True):
            some = slice(None) if len(parts) == 1 else slice(part.rows.start, part.rows.stop)
            n.append(length / (after * after) if part.direct else gradients.n[some])
            signal, product = gradients.u[some], cross if low is None else cross + low[some]
            u.append(momentum_signal(product, signal, part.beta, after) if part.direct else signal)
            value = last if part.kept else _quotient(last, before)
            value = value if low is None else value + low[some] / _positive(before)
            worth.append(value if part.asking else torch.zeros_like(value))
        return direction._replace(n=_joined(n), u=_joined(u), last=_joined(worth))

    # One number per coordinate ----------------------------------------------------------------------------------------

    def _coordinate(self, gradients: Gradients, i: int, signal: Signal) -> Coordinate:
        vector = gradients.vectors[i]
        return Coordinate(vector, self._geometry.sharp(gradients.params[i], vector), gradients.scale, signal, 0.0)

    def _with_last(self, direction: Direction, gradients: Gradients, part: _Part, epochs: Epochs | None) -> Direction:
        """What the last step was worth, of each coordinate."""
        coordinates = dict(direction.coordinates)
        name = "direction" if part.kept else "momentum"
        corrected = part.moving and part.group["bias_correction"]
        weight = part.group.get("momentum_weight", 0.0) if corrected else 1.0
        for i in part.rows:
            if i not in coordinates:
                continue
            p, g, last = gradients.params[i], gradients.vectors[i], coordinates[i].last
            if name in self._state.get(p, ()):
                d = local(self._state[p][name]).to(self._geometry.precision(p, g)) * gradients.scale
                last = g.to(d.dtype) * (d if part.kept else _quotient(d, weight))
            if epochs is not None:
                low = self._low(coordinates[i], gradients, i, epochs)
                last = last + low / _positive(weight if isinstance(weight, float) else weight.to(low))
            coordinates[i] = coordinates[i]._replace(last=last)
        return direction._replace(coordinates=coordinates)

    def _low(self, coordinate: Coordinate, gradients: Gradients, i: int, epochs: Epochs) -> Tensor:
        """By how much the product with the momentum is low, of each coordinate."""
        g = gradients.vectors[i].to(wide_dtype(gradients.vectors[i].dtype)) * gradients.scale
        n = self._geometry.products(gradients.params[i], g, g)
        factor = epochs.share[i] / (epochs.lengths[i] - 1)  # the signal has been corrected already
        return (n - _signal(coordinate.signal, n)) * factor.to(n)

    def _moved_signal(
        self, signal: Signal, p: Tensor, m: Tensor, g: Tensor, beta: float, weight: Any, low: Any
    ) -> Signal:
        u = _signal(signal, self._geometry.products(p, g, g) if signal.a else None)
        cross = self._geometry.products(p, m, g) + low
        weight = weight if isinstance(weight, float) else weight.to(u)
        return Signal(momentum_signal(cross, u, beta, weight), 0.0, 1.0)


def _signal(signal: Signal, n: Tensor | None) -> Tensor:
    """U of each coordinate."""
    base, a, b = signal
    u = base * b if b != 1.0 else base
    return u if n is None else u + n * a


def _mean_gradient(vector: Tensor, scale: float, m: Tensor) -> Tensor:
    return vector if vector.dtype == m.dtype and scale == 1.0 else vector.to(m.dtype) * scale


def _positive(weight: Any) -> Any:
    """A weight to divide by: that of no gradient at all is 0."""
    if isinstance(weight, float):
        return weight if weight > 0 else 1.0
    return torch.where(weight > 0, weight, torch.ones_like(weight))


def _quotient(value: Tensor, weight: Any) -> Tensor:
    """Value over weight; 0 where that is 0."""
    if isinstance(weight, float):
        return value / weight if weight > 0 else torch.zeros_like(value)
    weight = weight.to(value)
    return torch.where(weight > 0, value / _positive(weight), torch.zeros_like(value))


def _joined(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.cat(values)
