r"""From the gradients of a step to the direction d of its update and the numbers (u, n): momentum and metric.

With momentum, :math:`m_t = \beta m_{t-1} + (1 - \beta) \bar g_t` and w_t the sum of its weights,

.. math:: d_t = \frac{D_t^{-1} m_t}{w_t}, \qquad
    u_t = \frac{\beta \langle m_{t-1}, D_t^{-1} \bar g_t\rangle + (1 - \beta) u}{w_t}, \qquad
    n_t = \frac{\langle m_t, D_t^{-1} m_t\rangle}{w_t^2}.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol.surrogate import momentum_signal
from sgdol.torch._geometry import Geometry
from sgdol.torch._sources import Gradients, Signal
from sgdol.torch._tensors import real_view, stacked, wide_dtype
from sgdol.torch._world import World, like_parameter, local

__all__ = ["Coordinate", "Direction", "Statistics", "momentum_of"]


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
    """What an update is made of. The direction of parameter i is ``scales[i] * D^-1 vectors[i]``."""

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
        gradients, epochs = self._in_epochs(gradients, group_of, made)
        with_momentum = {g for g, group in enumerate(self._groups) if uses_momentum(group)}
        with_hindsight = {g for g, group in enumerate(self._groups) if self._hindsight(group)}
        moving = [i for i, g in enumerate(group_of) if g in with_momentum] if with_momentum else []
        asking = [i for i, g in enumerate(group_of) if g in with_hindsight] if with_hindsight else []
        plain = Direction(
            gradients.k,
            gradients.params,
            gradients.vectors,
            [gradients.scale] * len(gradients.params),
            gradients.n,
            gradients.n,
            gradients.u,
            torch.zeros_like(gradients.u) if asking else gradients.u,
            {i: self._coordinate(gradients, i, signal) for i, signal in gradients.signals.items()},
        )
        if not moving and not asking:
            return plain
        last = self._last(gradients, epochs, asking, group_of) if asking else plain.last
        plain = plain._replace(last=last, coordinates=self._with_last(plain, gradients, epochs, asking, group_of))
        return self._with_momentum(plain, gradients, epochs, moving, group_of, ok) if moving else plain

    def _in_epochs(self, gradients: Gradients, group_of: list[int], made: Tensor) -> tuple[Gradients, _Epochs | None]:
        """The gradients of batches that are drawn without replacement, with the signal that they really have."""
        groups = [self._groups[g] for g in group_of]
        if all(group["epoch"] is None for group in groups):
            return gradients, None
        n, u = gradients.n, gradients.u
        lengths = n.new_tensor([group["epoch"] or math.inf for group in groups])
        betas = n.new_tensor([float(group["momentum"]) for group in groups])
        share = 1 - betas ** torch.where(lengths.isinf(), 0.0, torch.remainder(made, lengths))
        epochs = _Epochs(lengths, share, (n - u) / lengths)
        signals = {
            i: Signal(s.base, s.a + (1 - s.a) / groups[i]["epoch"], s.b - s.b / groups[i]["epoch"])
            if groups[i]["epoch"]
            else s
            for i, s in gradients.signals.items()
        }
        return gradients._replace(u=u + epochs.low, signals=signals), epochs

    def remember(self, direction: Direction, group_of: list[int], ok: Tensor | None) -> None:
        """Keep the direction of the update where hindsight will need it and the momentum is not it."""
        if not any(map(self._hindsight, self._groups)):
            return
        for i, p in enumerate(direction.params):
            group = self._groups[group_of[i]]
            if not self.keeps_direction(p, group):
                continue
            d = self._geometry.sharp(p, direction.vectors[i])
            d = d.to(wide_dtype(d.dtype)) * direction.scales[i]
            state = self._state[p]
            if "direction" not in state:
                state["direction"] = like_parameter(torch.zeros_like(d, memory_format=torch.contiguous_format), p)
            kept = local(state["direction"])
            kept.copy_(d if ok is None else torch.where(ok, d, kept))

    def keeps_direction(self, p: Tensor, group: dict[str, Any]) -> bool:
        """Whether the last direction of a parameter is kept: hindsight needs it, and the momentum is not it."""
        return self._hindsight(group) and not self._momentum_is_direction(p, group)

    # Hindsight --------------------------------------------------------------------------------------------------------

    def _momentum_is_direction(self, p: Tensor, group: dict[str, Any]) -> bool:
        return uses_momentum(group) and self._geometry.euclidean(p)

    def _last_direction(self, p: Tensor, group: dict[str, Any]) -> tuple[Tensor, Any] | None:
        """D_{t-1} as a vector and what it is to be divided by; None if there is none."""
        state = self._state.get(p, {})
        if self._momentum_is_direction(p, group):
            weight = group.get("momentum_weight")
            if weight is None or "momentum" not in state:
                return None
            return local(state["momentum"]), weight if group["bias_correction"] else None
        return (local(state["direction"]), None) if "direction" in state else None

    def _last(self, gradients: Gradients, epochs: _Epochs | None, asking: list[int], group_of: list[int]) -> Tensor:
        numbers = [torch.zeros_like(gradients.u[0])] * len(gradients.params)
        for i in asking:
            p = gradients.params[i]
            found = self._last_direction(p, self._groups[group_of[i]])
            if found is not None:
                value = self._geometry.pairing(gradients.vectors[i], found[0]).to(gradients.u) * gradients.scale
                numbers[i] = value if found[1] is None else _quotient(value, found[1])
        last = self._world().total(gradients.params, torch.stack(numbers).unsqueeze(0))[0]
        if epochs is None:
            return last
        weights = [self._weight_before(self._groups[g], last) for g in group_of]
        return last + epochs.share * epochs.low / torch.stack(weights)

    def _weight_before(self, group: dict[str, Any], like: Tensor) -> Tensor:
        """What the last direction has been divided by."""
        weight = torch.as_tensor(group.get("momentum_weight", 0.0)).to(like)
        one = torch.ones_like(weight)
        return torch.where(weight > 0, weight, one) if group["bias_correction"] and group["momentum"] else one

    def _with_last(
        self,
        plain: Direction,
        gradients: Gradients,
        epochs: _Epochs | None,
        asking: list[int],
        group_of: list[int],
    ) -> dict[int, Coordinate]:
        coordinates = dict(plain.coordinates)
        for i in set(asking) & coordinates.keys():
            found = self._last_direction(gradients.params[i], self._groups[group_of[i]])
            if found is not None:
                g = gradients.vectors[i]
                d = found[0].to(self._geometry.precision(gradients.params[i], g)) * gradients.scale
                d = d if found[1] is None else _quotient(d, found[1].to(d))
                last = g.to(d.dtype) * d
                if epochs is not None:
                    weight = self._weight_before(self._groups[group_of[i]], gradients.u)
                    last = last + self._low(coordinates[i], gradients, i, epochs) / weight.to(last)
                coordinates[i] = coordinates[i]._replace(last=last)
        return coordinates

    def _low(self, coordinate: Coordinate, gradients: Gradients, i: int, epochs: _Epochs) -> Tensor:
        """By how much the product with the momentum is low, of each coordinate."""
        g = gradients.vectors[i].to(wide_dtype(gradients.vectors[i].dtype)) * gradients.scale
        n = self._geometry.products(gradients.params[i], g, g)
        factor = epochs.share[i] / (epochs.lengths[i] - 1)  # the signal has been corrected already
        return (n - _signal(coordinate.signal, n)) * factor.to(n)

    # Momentum ---------------------------------------------------------------------------------------------------------

    def _coordinate(self, gradients: Gradients, i: int, signal: Signal) -> Coordinate:
        vector = gradients.vectors[i]
        return Coordinate(vector, self._geometry.sharp(gradients.params[i], vector), gradients.scale, signal, 0.0)

    def _with_momentum(
        self,
        plain: Direction,
        gradients: Gradients,
        epochs: _Epochs | None,
        moving: list[int],
        group_of: list[int],
        ok: Tensor | None,
    ) -> Direction:
        like, scale = plain.n, gradients.scale
        params = [plain.params[i] for i in moving]
        groups = [self._groups[group_of[i]] for i in moving]
        momenta = [momentum_of(self._state, p) for p in params]
        means = [_mean_gradient(plain.vectors[i], scale, m) for i, m in zip(moving, momenta, strict=True)]
        weights = self._weights({group_of[i] for i in moving}, like, ok)
        inverses = {g: 1 / w for g, w in weights.items()}
        vectors, scales, coordinates = list(plain.vectors), list(plain.scales), dict(plain.coordinates)
        crosses = [like.new_zeros(())] * len(moving)
        for place, (i, p, m, g, group) in enumerate(zip(moving, params, momenta, means, groups, strict=True)):
            beta, raw = float(group["momentum"]), group["statistics"] == "gradient"
            if i in coordinates and not raw:
                low = 0.0 if epochs is None else self._low(coordinates[i], gradients, i, epochs)
                coordinates[i] = self._moved_signal(coordinates[i], p, m, g, beta, weights[group_of[i]], low)
            if not raw:
                crosses[place] = self._geometry.inner([p], [m], [g], like)[0]
            m.lerp_(g, 1 - beta) if ok is None else m.copy_(torch.where(ok, torch.lerp(m, g, 1 - beta), m))
            vectors[i], scales[i] = m, inverses[group_of[i]]
            if i in coordinates and not raw:
                coordinates[i] = coordinates[i]._replace(
                    left=m, right=self._geometry.sharp(p, m), scale=inverses[group_of[i]]
                )
        direct = [place for place, group in enumerate(groups) if group["statistics"] != "gradient"]
        if not direct:
            return plain._replace(vectors=vectors, scales=scales, coordinates=coordinates)
        lengths = self._geometry.norms([params[j] for j in direct], [momenta[j] for j in direct], like)
        rows = torch.stack([stacked([crosses[j] for j in direct], like), lengths])
        cross, lengths = self._world().total([params[j] for j in direct], rows).unbind()
        betas = like.new_tensor([float(groups[j]["momentum"]) for j in direct])
        weight = _vector([weights[group_of[moving[j]]] for j in direct], like)
        where = [moving[j] for j in direct]
        n, u = plain.n.clone(), plain.u.clone()
        n[where] = lengths / weight.square()
        if epochs is not None:
            cross = cross + (epochs.share * epochs.low)[where]
        u[where] = momentum_signal(cross, plain.u[where], betas, weight)
        return plain._replace(vectors=vectors, scales=scales, n=n, u=u, coordinates=coordinates)

    def _moved_signal(
        self, coordinate: Coordinate, p: Tensor, m: Tensor, g: Tensor, beta: float, weight: Any, low: Any
    ) -> Coordinate:
        u = _signal(coordinate.signal, self._geometry.products(p, g, g) if coordinate.signal.a else None)
        cross = self._geometry.products(p, m, g) + low
        weight = weight if isinstance(weight, float) else weight.to(u)
        return coordinate._replace(signal=Signal(momentum_signal(cross, u, beta, weight), 0.0, 1.0))

    def _weights(self, taking_part: set[int], like: Tensor, ok: Tensor | None) -> dict[int, Any]:
        """How much weight the gradients so far have in each group's momentum; schedulers may move beta."""
        weights: dict[int, Any] = {}
        for i in sorted(taking_part):
            group = self._groups[i]
            beta, old = float(group["momentum"]), torch.as_tensor(group.get("momentum_weight", 0.0)).to(like)
            new = beta * old + (1 - beta)
            group["momentum_weight"] = new if ok is None else torch.where(ok, new, old)
            used = new if group["bias_correction"] else torch.ones_like(new)
            weights[i] = used.tolist() if ok is None else used
        return weights


class _Epochs(NamedTuple):
    """What drawing without replacement does to products of gradients, of each parameter."""

    lengths: Tensor
    """How many updates an epoch has; infinite with replacement."""
    share: Tensor
    """The weight of this epoch's gradients in the momentum before this update."""
    low: Tensor
    """By how much a product of two gradients of one epoch is low: (n - u) over the length."""


def _signal(signal: Signal, n: Tensor | None) -> Tensor:
    """U of each coordinate."""
    base, a, b = signal
    u = base * b if b != 1.0 else base
    return u if n is None else u + n * a


def uses_momentum(group: dict[str, Any]) -> bool:
    """Whether a group has or has had momentum."""
    return bool(group["momentum"]) or "momentum_weight" in group


def momentum_of(state: dict[Any, Any], p: Tensor) -> Tensor:
    """This rank's piece of m_{t-1} of a parameter, to be written to."""
    held = state[p]
    if "momentum" not in held:
        like = real_view(local(p))
        held["momentum"] = like_parameter(torch.zeros_like(like, dtype=wide_dtype(like.dtype)), p)
    return local(held["momentum"])


def _mean_gradient(vector: Tensor, scale: float, m: Tensor) -> Tensor:
    return vector if vector.dtype == m.dtype and scale == 1.0 else vector.to(m.dtype) * scale


def _quotient(value: Tensor, weight: Tensor) -> Tensor:
    positive = weight > 0
    return torch.where(positive, value / torch.where(positive, weight, 1), torch.zeros_like(value))


def _vector(numbers: list[Any], like: Tensor) -> Tensor:
    return like.new_tensor(numbers) if isinstance(numbers[0], float) else stacked(numbers, like)
