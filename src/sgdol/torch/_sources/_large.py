"""Gradients one by one: each is measured when it arrives, because it is too large to be kept.

So are those that are small but are not alone: of parameters that ranks share, in a metric, or from several threads.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sgdol.torch._geometry import Geometry
from sgdol.torch._packs import LARGEST
from sgdol.torch._remarks import Remarks
from sgdol.torch._sources._measures import Measures, ratio
from sgdol.torch._sources._running import Running
from sgdol.torch._sources._samples import Samples
from sgdol.torch._sources._slots import Slot
from sgdol.torch._tensors import real_gradient
from sgdol.torch._world import World, local_gradient

__all__ = ["Large"]


class Large:
    """What is known of slots that are measured one by one.

    Args:
        slots: all slots of the recorder.
        geometry: how long gradients are.
        world: in which gradients arrive.
        remarks: tells the user what cannot be counted.
    """

    def __init__(self, slots: list[Slot], geometry: Geometry, world: World, remarks: Remarks) -> None:
        self._slots = slots
        self.measures = Measures(slots, geometry)
        self.world = world
        self._remarks = remarks
        self._samples = Samples()
        self.places: list[int] = []
        """Which slots they are now."""
        self.bent = False
        """Whether any was changed by more than a factor."""

    def reset(self) -> None:
        """Forget all gradients."""
        self._samples.clear()
        self.measures.reset()
        self.bent = False

    # While a backward runs --------------------------------------------------------------------------------------------

    def take(self, current: Running, index: int, gradient: Tensor, *, alone: bool) -> None:
        """The first gradient that a backward brings a slot."""
        slot = self._slots[index]
        if not slot.count:
            slot.forget()  # squares of a backward that raised half-way
            if not current.eager and not self.world.waits(slot.param):
                current.arrived[index] = None
                return
        if alone and self.world.ranks == 1:
            slot.expect(gradient)
        if slot.shared and slot.keep != "gradients":
            current.arrived[index] = None
            current.add(index, gradient)
        elif slot.keep == "norms" and gradient.numel() <= LARGEST:
            current.small[index], current.arrived[index] = gradient, None
        else:
            self._measure(current, index, gradient)

    @torch.no_grad()
    def _measure(self, current: Running, index: int, gradient: Tensor) -> None:
        slot = self._slots[index]
        current.arrived[index] = None
        if slot.keep == "gradients":
            if current.number < 2 and self.world.ranks == 1:
                current.arrived[index] = gradient.clone()
            return
        if slot.keep == "squares":
            self.measures.add_squares(slot, gradient)
        if gradient.numel() <= LARGEST:
            current.small[index] = gradient
        else:
            current.arrived[index] = self.measures.geometry.norm(slot.param, real_gradient(gradient))

    def again(self, current: Running, index: int, gradient: Tensor) -> None:
        """Another task of the same backward brings a gradient too: together they are one contribution."""
        slot = self._slots[index]
        slot.expected = None
        current.again.add(index)
        if index in current.sums:
            current.add(index, gradient)
        elif slot.lazy or (not slot.count and not current.eager and not self.world.waits(slot.param)):
            slot.shared = True  # from the next pass on its gradients are kept; of this one .grad will tell
        elif slot.keep == "gradients":
            kept = current.arrived.get(index) if index in current.arrived else slot.gradients.get(current.number)
            if kept is not None:
                kept.add_(gradient)
        elif slot.keep == "norms" and index in current.small:
            current.small[index] = current.small[index] + gradient
        else:
            slot.shared = True
            self._remarks.shared()

    def reduced(self, current: Running, index: int) -> None:
        """The gradient of a backward, averaged over the ranks, has been added to ``.grad`` of a piece."""
        slot = self._slots[index]
        if not slot.count:
            previous = slot.previous
            slot.forget()
            slot.previous = previous
        if slot.count == 0 and slot.previous is None:
            current.arrived[index] = None
        else:
            gradient = local_gradient(slot.param)
            self._measure(current, index, gradient if slot.previous is None else gradient - slot.previous)
        slot.previous = None

    @torch.no_grad()
    def count(self, done: Running, *, alone: bool) -> None:
        """A task has ended: what it brought is a contribution, or a part of one."""
        lengths: dict[int, Tensor] = {}
        for index, what in done.arrived.items():
            slot = self._slots[index]
            if not slot.count:
                slot.first = done.number
                slot.lazy = not (done.eager or self.world.waits(slot.param) or slot.previous is not None)
            slot.count += 1
            self.bent = (slot.expected is not None and slot.unexpected()) or self.bent
            if what is not None and slot.keep == "gradients":
                slot.gradients[done.number] = what
            elif what is not None:
                lengths[index] = what
        self.measures.add_lengths(lengths)
        self.measures.add(done.small)
        self._see({*done.arrived, *done.again}, alone=alone)
        done.again.clear()
        done.counted.update(done.arrived)
        done.arrived, done.small = {}, {}

    @torch.no_grad()
    def end(self, done: Running) -> None:
        """A backward has ended: what several of its tasks have brought is one contribution."""
        for index, total in done.sums.items():
            if self._slots[index].keep == "squares":
                self.measures.add_squares(self._slots[index], total)
        self.measures.add(done.sums)

    def _see(self, reached: Iterable[int], *, alone: bool) -> None:
        """Note what ``.grad`` is, of these slots and of all that were written to."""
        slots = self._slots
        stale = [i for i in self.places if slots[i].dense() and not slots[i].lazy and not slots[i].untouched()]
        if stale:
            self.measures.note(stale)
        for i in {*reached, *stale}:
            slots[i].see()
            if not alone:  # another may have written to it since
                slots[i].seen = None
        if stale:
            self._samples.take([slots[i] for i in self.places if slots[i].dense() and not slots[i].lazy])

    # Between backwards ------------------------------------------------------------------------------------------------

    def reconcile(self, busy: set[int]) -> None:
        """Before another backward: read off ``.grad`` what it tells, and see which gradients were written to.

        Args:
            busy: what backwards of other threads are writing to.
        """
        slots, measures = self._slots, self.measures
        free = [i for i in self.places if slots[i].count and i not in busy]
        for index in free:
            if slots[index].param.grad is None and not slots[index].untouched():
                measures.forget(index)
        lazy = [i for i in free if slots[i].lazy]
        touched = [i for i in free if slots[i].count and not slots[i].untouched()]
        changed = [i for i in touched if not slots[i].lazy]
        if changed:
            n, _ = measures.totals()
            self._look_for_bent([slots[i] for i in changed])
            rows = torch.stack([measures.norms([slots[i] for i in changed]), n[changed]])
            now, before = self.world.total([slots[i].param for i in changed], rows).unbind()
            for index, length, factor in zip(changed, now.tolist(), ratio(now, before), strict=True):
                if length == 0:
                    measures.forget(index)
                else:
                    measures.rescale(index, factor)
            self._see(changed, alone=not busy)
        if lazy:
            measures.read_off(lazy, touched, self.world)
            self._samples.clear()  # these are not among them

    def numbers(self, slots: list[Slot], others: list[int], before: Tensor, q: Tensor) -> Tensor:
        """||S||^2 now of some slots, of which those at ``others`` are measured here; their rows are put right."""
        lazy = [i for i in others if slots[i].lazy]
        n = before
        if len(lazy) == len(others):
            if lazy:
                n[lazy] = q[lazy] = self.measures.norms([slots[i] for i in lazy])
            return n
        rest = [slots[i] for i in others]
        if not all(slot.lazy or slot.untouched() for slot in rest) or self._samples.changed():
            n = before.clone()
            n[others] = self.measures.norms(rest)
            self._look_for_bent(rest)
        elif lazy:
            n[lazy] = self.measures.norms([slots[i] for i in lazy])
        if lazy:
            before[lazy] = q[lazy] = n[lazy]
        return n

    def _look_for_bent(self, slots: list[Slot]) -> None:
        self.bent = self.bent or self._samples.bent(slots)
