r"""Lengths and inner products of gradients: a metric on the parameters.

With the diagonal :math:`D` of :mod:`sgdol.metrics`, gradients are measured in :math:`D^{-1}` and points in
:math:`D`. Everything that multiplies two gradients does it here; Euclid's norm, D = 1, has its own short way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sgdol.metrics import Metric
from sgdol.torch._diagonals import Diagonals
from sgdol.torch._packs import Pack, pack
from sgdol.torch._tensors import inner, norm, product_dtype, squared_norms, stacked, wide_dtype
from sgdol.torch._world import World

__all__ = ["Geometry"]


class Geometry:
    """How long the gradients of an optimizer's parameters are.

    Args:
        metrics: the metric of each parameter that is not measured by Euclid's.
        state: the optimizer's state, where the metrics' own is kept.
        world: gives the world that the optimizer is in.
    """

    def __init__(self, metrics: dict[Tensor, Metric], state: dict[Any, Any], world: Callable[[], World]) -> None:
        self.diagonals = Diagonals(metrics, state, world)
        self._state = state
        self._world = world
        self._precisions: dict[Tensor, torch.dtype] = {}

    @property
    def plain(self) -> bool:
        """Whether all lengths are Euclid's."""
        return not self.diagonals

    def euclidean(self, param: Tensor) -> bool:
        """Whether this parameter's are."""
        return param not in self.diagonals

    # One number per parameter -----------------------------------------------------------------------------------------

    def norm(self, param: Tensor, gradient: Tensor) -> Tensor:
        """The length of a gradient of this parameter, of this rank's piece; see :meth:`Diagonals.settled`."""
        diagonal = self.diagonals.of(param)
        if diagonal is None:
            return norm(gradient)
        wide = gradient.to(wide_dtype(gradient.dtype))
        return norm(wide / diagonal.of(wide).sqrt())

    def norms(self, params: Sequence[Tensor], gradients: Sequence[Tensor], like: Tensor) -> Tensor:
        """<g, D^-1 g> of each parameter's gradient, of this rank's pieces."""
        return self._taken(params, gradients, None, like)

    def inner(self, params: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor], like: Tensor) -> Tensor:
        """<a, D^-1 b> of each parameter, of this rank's pieces, rounded alike whether b is a or equal to it."""
        return self._taken(params, a, b, like)

    def pairings(self, gradients: Sequence[Tensor], directions: Sequence[Tensor], like: Tensor) -> Tensor:
        """<g, d> of each parameter's gradient and direction, of this rank's pieces: D has no part in it."""
        return stacked([inner(g, d) for g, d in zip(gradients, directions, strict=True)], like)

    def laid(self, params: Sequence[Tensor], packed: Pack) -> Tensor | None:
        """D of small tensors laid end to end, in float64; None if D of any of them is not made of a root."""
        found = self.diagonals.laid(packed.chosen(params))
        if found is None:
            return None
        roots, a, c = found
        roots.mul_(packed.repeated(a)).square_()
        return roots.add_(packed.repeated(c).square_()).sqrt_()

    def _taken(self, params: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor] | None, like: Tensor) -> Tensor:
        """<a, D^-1 b> of each parameter; without b, <a, D^-1 a>."""
        packed, others = pack(a, like)
        diagonal = None if packed is None or self.plain else self.laid(params, packed)
        if packed is None or (diagonal is None and not self.plain):
            return self._taken_one_by_one(params, a, b, like)
        x = packed.laid(packed.chosen(a), torch.float64)
        y = x if b is None else packed.laid(packed.chosen(b), torch.float64)
        small = packed.sums(x, y if diagonal is None else y / diagonal)
        if not others:
            return small
        ps, xs = [params[i] for i in others], [a[i] for i in others]
        ys = None if b is None else [b[i] for i in others]
        return packed.merged(small, self._taken_one_by_one(ps, xs, ys, like), others)

    def _taken_one_by_one(
        self, params: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor] | None, like: Tensor
    ) -> Tensor:
        if b is None:
            if self.plain:
                return squared_norms(a, like)
            return stacked([self.norm(p, g) for p, g in zip(params, a, strict=True)], like).square_()
        # One by one: D^-1 y is new memory, which must not grow with the model.
        return stacked([inner(x, self.sharp(p, y)) for p, x, y in zip(params, a, b, strict=True)], like)

    # One number per coordinate ----------------------------------------------------------------------------------------

    def products(self, param: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """A D^-1 b of each coordinate, in float32 or wider, in new memory."""
        wide = self.precision(param, a)
        return torch.mul(a.to(wide), self.sharp(param, b.to(wide)))

    def precision(self, param: Tensor, gradient: Tensor) -> torch.dtype:
        """The type of products of single entries: that of what has been learned from them, or what the first needs.

        Where several ranks have one parameter they have to agree on it, so that it is what the parameter's type says.
        """
        wide = wide_dtype(gradient.dtype)
        if wide == torch.float64 or param.device.type != "cpu":
            return wide
        known = self._precisions.get(param)
        if known is None:
            world = self._world()
            held = self._state.get(param, {})
            learned = next((v.dtype for key, v in held.items() if key.startswith("learner.") and v.dim()), None)
            alone = world.ranks == 1 and not world.spread
            known = learned or (product_dtype(gradient) if alone else wide)
            if known is None:
                return wide
            self._precisions[param] = known
        return known

    # From gradients to directions -------------------------------------------------------------------------------------

    def sharp(self, param: Tensor, gradient: Tensor) -> Tensor:
        """From a gradient to a direction: D^-1 g, in new memory, or the gradient itself if D is 1."""
        diagonal = self.diagonals.of(param)
        if diagonal is None:
            return gradient
        wide = gradient.to(wide_dtype(gradient.dtype))
        return wide / diagonal.of(wide)

    def reciprocal(self, param: Tensor, like: Tensor) -> Tensor:
        """1/D of a parameter that has a metric, of the shape and type of ``like``, in new memory."""
        diagonal = self.diagonals.of(param)
        assert diagonal is not None
        return diagonal.reciprocal(like)
