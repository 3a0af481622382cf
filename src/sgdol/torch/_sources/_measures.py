"""What is known of contributions in numbers: one row, or one tensor, for every watched parameter."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol.torch._geometry import Geometry
from sgdol.torch._sources._slots import Slot, wide_like
from sgdol.torch._tensors import real_gradient, real_view, scalar_dtype, stacked
from sgdol.torch._world import World, local, local_gradient, real_gradients

__all__ = ["Found", "Measures", "put", "ratio"]


class Found(NamedTuple):
    """What the backward passes since the last step left on this rank, for some parameters."""

    k: int
    """How many passes there were; 0 if ``.grad`` was only written by hand."""
    n: Tensor
    """||S||^2 of each parameter's gradient as it is now."""
    q: Tensor
    """The sum of the squared norms of its contributions, in the scale of ``before``."""
    before: Tensor
    """What ||S||^2 was at the end of the last backward: what is known of contributions is in its scale."""
    squares: dict[int, Tensor]
    """The same as q per coordinate, by place, where ``keep="squares"``; may be written to."""
    gradients: dict[int, dict[int, Tensor]]
    """The first two contributions themselves, by place and number, where ``keep="gradients"``."""
    seen: list[bool]
    """Whether any pass reached the parameter: else ``.grad``, if there is one, was written by hand."""


class Measures:
    """The sums over contributions to the slots.

    Args:
        slots: of the recorder, which adds to them.
        geometry: how long gradients are.
    """

    def __init__(self, slots: list[Slot], geometry: Geometry) -> None:
        self._slots = slots
        self.geometry = geometry
        self._q = torch.zeros(0)
        self._n = torch.zeros(0)

    def totals(self) -> tuple[Tensor, Tensor]:
        """The vectors (n, q), one row per slot."""
        device = self._slots[0].param.device
        missing = len(self._slots) - len(self._n)
        if missing or self._n.device != device:
            blank = torch.zeros(missing, device=device, dtype=scalar_dtype(device))
            self._n = torch.cat([self._n.to(blank), blank])
            self._q = torch.cat([self._q.to(blank), blank])
        return self._n, self._q

    def reset(self) -> None:
        """Forget Q: :class:`Found` has given the old one away."""
        self._q = torch.zeros_like(self._q)

    def norms(self, slots: list[Slot]) -> Tensor:
        """||S||^2 of these."""
        gradients = real_gradients([slot.param for slot in slots])
        return self.geometry.norms([slot.param for slot in slots], gradients, self.totals()[0])

    def write(self, rows: list[int], n: Tensor, q: Tensor) -> None:
        """What is known of these slots otherwise."""
        for vector, values in zip(self.totals(), (n, q), strict=True):
            put(vector, rows, values.to(vector), add=False)

    def note(self, rows: list[int]) -> None:
        """Take ||S||^2 of these slots as it is now."""
        put(self.totals()[0], rows, self.norms([self._slots[i] for i in rows]), add=False)

    def add(self, gradients: dict[int, Tensor]) -> None:
        """Add the squares of contributions, by slot."""
        if gradients:
            rows = sorted(gradients)
            params = [self._slots[i].param for i in rows]
            n, q = self.totals()
            put(q, rows, self.geometry.norms(params, [real_gradient(gradients[i]) for i in rows], n), add=True)

    def add_lengths(self, lengths: dict[int, Tensor]) -> None:
        """Add the squares of these lengths of contributions."""
        if lengths:
            rows = sorted(lengths)
            n, q = self.totals()
            put(q, rows, stacked([lengths[i] for i in rows], n).square_(), add=True)

    def forget(self, index: int) -> None:
        """Contributions to a slot have been thrown away."""
        self._slots[index].forget()
        self.totals()[1][index] = 0

    def rescale(self, index: int, factor: Tensor) -> None:
        """Contributions to the scale of ``.grad`` now; the factor is that of squares."""
        slot = self._slots[index]
        self._q[index] *= factor
        if slot.squares is not None:
            slot.squares.mul_(factor)
        slot.gradients = {i: g * factor.sqrt().to(g) for i, g in slot.gradients.items()}

    def read_off(self, lazy: list[int], touched: list[int], world: World) -> None:
        """What ``.grad`` is before it is added to is the first contribution, unless it has been thrown away."""
        lengths = self.norms([self._slots[i] for i in lazy])
        if touched:
            whole = world.total([self._slots[i].param for i in lazy], lengths.unsqueeze(0))[0]
            zero = {i for i, length in zip(lazy, whole.tolist(), strict=True) if length == 0 and i in touched}
            for i in zero:
                self.forget(i)
            kept = [place for place, i in enumerate(lazy) if i not in zero]
            lazy, lengths = [lazy[place] for place in kept], lengths[kept]
        put(self._q, lazy, lengths, add=False)
        put(self._n, lazy, lengths, add=False)
        for index in lazy:
            slot = self._slots[index]
            slot.lazy = False
            slot.see()
            if slot.keep == "squares":
                self.add_squares(slot, local_gradient(slot.param))
            elif slot.keep == "gradients" and slot.first < 2:
                slot.gradients[slot.first] = local_gradient(slot.param).clone()

    # Per coordinate, and gradients themselves -------------------------------------------------------------------------

    def add_squares(self, slot: Slot, gradient: Tensor) -> None:
        """Add the squares of a contribution, coordinate by coordinate."""
        g = real_gradient(gradient)
        euclidean = self.geometry.sharp(slot.param, g) is g
        products = g if euclidean else self.geometry.products(slot.param, g, g)
        slot.add_squares(products, g, self.geometry.precision(slot.param, g))

    def settled_squares(self, slot: Slot) -> Tensor:
        """Their sum."""
        if slot.lazy:
            slot.fresh = True
            self.add_squares(slot, local_gradient(slot.param))
            slot.fresh = True
        elif slot.squares is None or slot.fresh:
            piece = real_view(local(slot.param))
            return torch.zeros_like(wide_like(piece, self.geometry.precision(slot.param, torch.zeros_like(piece))))
        assert slot.squares is not None
        return slot.squares

    def per_coordinate(self, slots: list[Slot]) -> dict[str, Any]:
        """The fields of :class:`Found` that are tensors per parameter."""
        squares = {i: self.settled_squares(slot) for i, slot in enumerate(slots) if slot.keep == "squares"}
        gradients = {i: _first_two(slot) for i, slot in enumerate(slots) if slot.keep == "gradients"}
        return {"squares": squares, "gradients": gradients}


def _first_two(slot: Slot) -> dict[int, Tensor]:
    if slot.lazy and slot.first < 2:
        return {slot.first: local_gradient(slot.param).clone()}
    return slot.gradients


def ratio(now: Tensor, before: Tensor) -> Tensor:
    """By how much squares have been scaled."""
    return torch.where(before > 0, now / torch.where(before > 0, before, 1), torch.ones_like(before))


def put(vector: Tensor, rows: list[int], values: Tensor, *, add: bool) -> None:
    """Add to or overwrite some rows, which are in order."""
    if len(rows) == len(vector):
        vector.add_(values) if add else vector.copy_(values)
    elif rows:
        where = torch.tensor(rows, device=vector.device)
        vector.index_add_(0, where, values) if add else vector.index_copy_(0, where, values)
