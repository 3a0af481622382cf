"""Backward passes between two steps, each of them one independent gradient: counted, and measured as they come.

A hook in front of a leaf's gradient accumulator sees every backward's own gradient before it is added to ``.grad`` and
before DistributedDataParallel averages it over the ranks. From these contributions c_1, ..., c_k the optimizer needs,
besides their sum S = ``.grad``, only the sum of their squares Q: a number per tensor, or, for per-coordinate step
sizes, a tensor of squares; the paper's estimator needs the first two themselves.

The first contribution to a parameter is ``.grad`` until the second comes, so nothing is measured of it before: a loop
with one backward per step pays for nothing. (Where ranks average their gradients it is not, and is measured at once;
so are gradients that come from other threads, because several backwards may add to ``.grad`` at the same time.)

What happens to ``.grad`` between backward and step (GradScaler's unscaling, ``clip_grad_norm_``) rescales S and so has
to rescale the squares. The squared norm of S is therefore taken at the end of each backward, together with the tensor's
version, which tells without a look at the data whether somebody has written to it since. GradScaler's kernel writes
without raising the version, so a few entries of every gradient are compared as well. Where anything changed, all
norms are taken again. Of small gradients every entry is compared (``_small``).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from sgdol.torch._geometry import Geometry
from sgdol.torch._listening import COMPILED, Listening, after_backward, compiled_autograd, graph_task, outermost
from sgdol.torch._remarks import Remarks
from sgdol.torch._sources._large import Large
from sgdol.torch._sources._measures import Found
from sgdol.torch._sources._running import Quick, Running, quick_hook, thread
from sgdol.torch._sources._slots import Keep, Slot
from sgdol.torch._sources._small import Small
from sgdol.torch._world import Finder, local

__all__ = ["Recorder"]


class Recorder:
    """Counts the backward passes that reach some parameters and keeps what the estimators need of each.

    Args:
        finder: knows the world, and so how gradients arrive.
        geometry: how long gradients are.
        remarks: tells the user what cannot be counted.
    """

    def __init__(self, finder: Finder, geometry: Geometry, remarks: Remarks) -> None:
        self._finder = finder
        self._remarks = remarks
        self._slots: list[Slot] = []
        self._index: dict[Tensor, int] = {}
        self._kinds: list[Any] = []
        self._large = Large(self._slots, geometry, finder.here, remarks)
        self._small, self._together, self._outdated = Small(), False, True
        self._all: list[int] = []
        self._not_small: list[int] = []
        self._large.places = self._all
        self._lock = threading.RLock()
        self._tasks: dict[int, Running] = {}  # by graph task: reentrant checkpointing nests them
        self._quick: Quick = {}
        self._running: list[Running] = []
        self._home = thread()
        self._crowded = False
        self._keeps_gradients = False
        self._used = False
        self.left_over = False
        """Whether the first pass since the last step found that step's gradients, which nobody had zeroed."""
        self._known: tuple[list[Tensor], list[Slot]] = ([], [])
        weakref.finalize(self, _remove_taps, self._slots)

    def watch(self, params: Iterable[tuple[Tensor, Keep]]) -> None:
        """Watch more parameters, and those that did not require a gradient or had another type before."""
        world, self._outdated = self._finder.here, True
        for param, keep in params:
            index = self._index.get(param)
            new = index is None
            if index is None:
                index = self._index[param] = len(self._slots)
                self._slots.append(Slot(param, keep))
                self._all.append(index)
                self._not_small.append(index)
                self._keeps_gradients |= keep == "gradients"
            slot = self._slots[index]
            listening = Listening(self, index)
            if slot.ordinary and not world.spread and param.requires_grad and param.is_leaf:
                slot.tap.attach(param, quick_hook(self._quick, index, slot, listening))
            else:
                world.tap(param, slot.tap, listening)
            slot.reduces = world.reduces(param)
            if new and param.requires_grad and param.is_leaf and slot.dense():
                self._adopt(slot)
        self._kinds = self._kinds_now()

    def moulted(self) -> bool:
        """Whether a parameter has got another shape or type: lazy ones get their first in their first forward."""
        return self._kinds != self._kinds_now() and not all(slot.tap.current(slot.param) for slot in self._slots)

    def _kinds_now(self) -> list[Any]:
        params = [slot.param for slot in self._slots]
        return [(p.dtype, None if is_lazy(p) else p.shape) for p in params]

    def rebase(self, finder: Finder, geometry: Geometry) -> None:
        """Go on with another finder and geometry: the parameters are more, or their state is another."""
        self._finder, self._large.world, self._large.measures.geometry = finder, finder.here, geometry

    def refuse_compiled(self) -> None:
        """Raise if passes went by uncounted because autograd was compiled."""
        if COMPILED in self._quick:
            self.reset()
            raise compiled_autograd("SGDOL")

    def unseen(self, params: list[Tensor]) -> bool:
        """Whether there are gradients that no hook has seen: parameters that are new, unfrozen, or of another type."""
        if params is not self._known[0] and any(p not in self._index for p in params):
            return True
        return any(not slot.count and slot.param.grad is not None for slot in self._slots_of(params))

    def reset(self, *, used: bool = False) -> None:
        """Forget the passes: their gradients have been used, and are there still, or thrown away."""
        with self._lock:
            self._used, self.left_over = used, False
            together = self._together
            for slot in self._slots:
                if together and slot.together:
                    slot.count = 0
                elif slot.count or slot.previous is not None:
                    slot.forget()
            if len(self._small.places) < len(self._slots) or not self._together:
                self._large.reset()
            self._small.reset()
            self._go_together(False)
            self._tasks.clear()
            self._quick.clear()
            self._running.clear()
            self._home = thread()  # where the training loop is

    def found(self, params: list[Tensor]) -> Found:
        """Everything that is known about the gradients of these parameters on this rank. To be called without grad."""
        with self._lock:
            self._end_all()
            slots = self._slots_of(params)
            n, q, before = self._numbers(slots, params)
            k = max((slot.count for slot in slots), default=0)
            seen = [slot.count > 0 for slot in slots]
            return Found(k, n, q, before, seen=seen, **self._large.measures.per_coordinate(slots))

    def _numbers(self, slots: list[Slot], params: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(n, q, before) of :class:`Found`."""
        measures = self._large.measures
        if self._together:
            n, q = self._small.measured()
            if slots is self._slots and not self._large.places:
                return n, q, n
            measures.write(self._small.places, n, q)
        n_all, q_all = measures.totals()
        rows = slice(None) if slots is self._slots else [self._index[p] for p in params]
        before, q = n_all[rows].clone(), q_all[rows].clone()
        others = [i for i, slot in enumerate(slots) if not (self._together and slot.together)]
        return self._large.numbers(slots, others, before, q), q, before

    @property
    def bent(self) -> bool:
        """Whether gradients have been changed, since their backward, by more than a factor each."""
        return self._small.bent or self._large.bent

    @property
    def keeps_gradients(self) -> bool:
        """Whether the contributions to any parameter are kept themselves."""
        return self._keeps_gradients

    def count(self, params: list[Tensor]) -> int:
        """How many passes there have been."""
        return max((slot.count for slot in self._slots_of(params)), default=0)

    def _slots_of(self, params: list[Tensor]) -> list[Slot]:
        if params is not self._known[0] or len(self._known[1]) != len(params):
            slots = [self._slots[self._index[p]] for p in params]
            same = len(slots) == len(self._slots) and all(a is b for a, b in zip(slots, self._slots, strict=True))
            self._known = (params, self._slots if same else slots)
        return self._known[1]

    # While a backward runs ------------------------------------------------------------------------------------------

    def arrived(self, index: int, gradient: Tensor) -> None:
        """One parameter's gradient arrives in the backward that runs now, and is about to be accumulated."""
        if gradient.layout != torch.strided:
            return
        if gradient.requires_grad:
            gradient = gradient.detach()
        with self._lock:
            current = self._tasks.get(graph_task()) or self._begin(index)
            slot = self._slots[index]
            if self._together and slot.together:
                known = current.together.get(index, self)
                if known is self:
                    current.together[index] = None if self._small.first else gradient
                elif known is not None:
                    current.together[index] = known + gradient  # type: ignore[operator]
            elif index in current.arrived or index in current.counted:
                self._large.again(current, index, gradient)
            else:
                self._large.take(current, index, gradient, alone=len(self._running) == 1)

    def begun(self, index: int) -> None:
        """A backward has reached this slot's parameter, whose gradient comes later."""
        with self._lock:
            if graph_task() not in self._tasks:
                self._begin(index)

    def _begin(self, index: int) -> Running:
        """The backward that runs now, of which a new graph task has reached this slot."""
        call, inside = outermost()
        current = next((one for one in self._running if one.runs_in(call, inside)), None)
        if current is None:
            current = self._start(index, call)
        current.call = call if inside and not current.told else None
        current.told |= not inside
        task = graph_task()
        self._tasks[task] = current
        if self._together:
            self._quick[task] = (current.together, not self._small.first)
        if self._large.world.ranks == 1 and not self._large.world.spread:
            after_backward(lambda: self._close(task, inside))
        else:
            after_backward(lambda: after_backward(lambda: self._close(task, inside)))
        return current

    def _start(self, index: int, call: Any) -> Running:
        self._large.world = self._finder.world
        self._end_all(thread())
        device = self._slots[index].param.device.type
        eager = self._crowded or bool(self._running) or (thread() != self._home and device == "cpu")
        if eager and (self._together or self._running):
            self._overlap()
        number = max([slot.count for slot in self._slots])
        if number:
            self._reconcile()
            number = max([slot.count for slot in self._slots])
        if not number:  # also after gradients have been thrown away: a GAN's generator leaves some
            self.left_over = self._used and not self._slots[index].zeroed()
            self._go_together(not eager and self._may_go_together())
        current = Running(number, call, eager)
        self._running.append(current)
        if self._large.world.spread:
            for slot in self._slots:
                if slot.reduces and slot.param.grad is not None and not self._large.world.waits(slot.param):
                    slot.previous = local(slot.param.grad).clone()
        return current

    def _may_go_together(self) -> bool:
        if self._large.world.ranks > 1 or self._large.world.spread or not self._large.measures.geometry.plain:
            return False
        if self._outdated:
            self._small.choose(self._slots)
            self._not_small = [i for i, slot in enumerate(self._slots) if not slot.together]
            self._outdated = False
        self._small.reset()
        return bool(self._small.places)

    def _go_together(self, together: bool) -> None:
        """Measure the small ones together, or not."""
        self._together = together
        self._large.places = self._not_small if together else self._all

    @torch.no_grad()
    def _overlap(self) -> None:
        """Gradients come from several threads: the small ones go the long way from here on."""
        if self._running:
            self._crowded = True
            if any(not one.eager for one in self._running):
                self._remarks.threads()
        if not self._together:
            return
        for one in self._running:
            one.small.update({i: g for i, g in one.together.items() if g is not None})
            one.arrived.update({i: None for i in one.together if i not in one.counted})
            one.together, one.eager = {}, True
        self._quick.clear()
        slots = [self._slots[i] for i in self._small.places]
        if not self._running:
            self._small.fold()
        if self._small.first:
            for slot in slots:
                slot.lazy = slot.count > 0
        else:
            self._large.measures.write(self._small.places, *self._small.measured(look=not self._running))
        for slot in slots:
            slot.see()
        self._go_together(False)

    @torch.no_grad()
    def reduced(self, index: int) -> None:
        """fully_shard has added the gradient of the backward that runs now, averaged over the ranks, to ``.grad``."""
        with self._lock:
            current = self._tasks.get(graph_task())
            if current is None:
                if self._slots[index].count:  # through a leaf that nobody told of: what was added to what is not known
                    self._slots[index].forget()
                current = self._begin(index)
            self._large.reduced(current, index)

    @torch.no_grad()
    def _reconcile(self) -> None:
        """Before another backward: see what has happened to gradients since the last."""
        if self._together:
            self._small.fold()
        self._large.reconcile({i for one in self._running for i in (*one.arrived, *one.counted)})

    def _close(self, task: int, inside: bool) -> None:
        """The end of a graph task, after every rank's gradients have been averaged."""
        with self._lock:
            done = self._tasks.pop(task, None)
            self._quick.pop(task, None)
            if done is None:
                return
            if done.together:
                self._count_together(done)
            if done.arrived or done.again:
                self._large.count(done, alone=len(self._running) == 1)
            if not inside:
                self._end(done)
                if done.together:
                    self._small.ended()

    def _count_together(self, done: Running) -> None:
        for index in done.together:
            if index not in done.counted:
                slot = self._slots[index]
                if not slot.count:
                    done.new.append(index)
                slot.count += 1
        done.counted.update(done.together)
        self._small.closed(done.together, done.new)

    def _end(self, done: Running) -> None:
        self._running.remove(done)
        if done.sums:
            self._large.end(done)

    def _end_all(self, here: int | None = None) -> None:
        """Backwards of this thread, or of all, that have not told their end have ended, or raised half-way."""
        for one in [one for one in self._running if here is None or (one.thread == here and one.outer)]:
            if one.call is None:
                self._running.remove(one)
            else:
                self._end(one)
            self._tasks = {task: other for task, other in self._tasks.items() if other is not one}

    @torch.no_grad()
    def _adopt(self, slot: Slot) -> None:
        """A gradient that was there before anybody watched is one contribution."""
        if slot.reduces and self._finder.here.waits(slot.param):
            return  # nobody knows any more what each rank had; a parameter without passes counts as one gradient
        slot.count, slot.lazy = 1, True
        slot.see()


def _remove_taps(slots: list[Slot]) -> None:
    for slot in slots:
        slot.tap.remove()
