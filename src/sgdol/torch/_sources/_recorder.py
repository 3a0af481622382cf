"""Backward passes between two steps, each of them one independent gradient: counted, and measured as they come.

A hook in front of a leaf's gradient accumulator sees every backward's own gradient before it is added to ``.grad`` and
before DistributedDataParallel averages it over the ranks. From these contributions c_1, ..., c_k the optimizer needs,
besides their sum S = ``.grad``, only the sum of their squares Q: a number per tensor, or, for per-coordinate step
sizes, a tensor of squares; the paper's estimator needs the first two themselves.

The first contribution to a parameter is ``.grad`` until the second comes, so nothing is measured of it before: a loop
with one backward per step pays for nothing. (Where ranks average their gradients it is not, and is measured at once.)

What happens to ``.grad`` between backward and step (GradScaler's unscaling, ``clip_grad_norm_``) rescales S and so has
to rescale the squares. The squared norm of S is therefore taken at the end of each backward, together with the tensor's
version, which tells without a look at the data whether somebody has written to it since. GradScaler's kernel writes
without raising the version, so a few entries of every gradient are compared as well. Where anything changed, all
norms are taken again.

Reentrant activation checkpointing runs one backward as several graphs. A parameter's own count still tells the passes
apart, but two things are beyond it: a parameter that several reentrant segments share counts once for each of them,
and the paper's estimator cannot tell which graph belongs to which pass. ``use_reentrant=False`` has neither problem.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol.torch._geometry import Geometry
from sgdol.torch._listening import Listening, after_backward
from sgdol.torch._sources._samples import Samples
from sgdol.torch._sources._slots import Keep, Slot, wide_like
from sgdol.torch._tensors import real_gradient, real_view, scalar_dtype, stacked
from sgdol.torch._world import Finder, local, local_gradient

__all__ = ["Found", "Recorder", "ratio"]

FEW = 1 << 12
"""Gradients of at most so many entries are kept until the end of their backward and measured all at once."""


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


class _Pass(NamedTuple):
    """A backward that is running."""

    number: int
    """How many have left a gradient before it."""
    arrived: dict[int, Tensor | None]
    """What has been kept of the gradients so far, by slot; None where ``.grad`` will say."""
    small: dict[int, Tensor]
    """Gradients that will be measured at the end."""


class Recorder:
    """Counts the backward passes that reach some parameters and keeps what the estimators need of each.

    Args:
        finder: knows the world, and so how gradients arrive.
        geometry: how long gradients are.
    """

    def __init__(self, finder: Finder, geometry: Geometry) -> None:
        self._finder = finder
        self._world = finder.here
        self._geometry = geometry
        self._slots: list[Slot] = []
        self._index: dict[Tensor, int] = {}
        self._running: dict[int, _Pass] = {}  # by graph task: reentrant checkpointing nests them
        self._q = torch.zeros(0)
        self._n = torch.zeros(0)
        self._samples = Samples()
        self._keeps_gradients = False
        self._used = False
        self.left_over = False
        """Whether the first pass since the last step found that step's gradients, which nobody had zeroed."""
        self.bent = False
        """Whether gradients have been changed, since their backward, by more than a factor each."""
        self._known: tuple[list[Tensor], list[Slot]] = ([], [])
        weakref.finalize(self, _remove_taps, self._slots)

    def watch(self, params: Iterable[tuple[Tensor, Keep]]) -> None:
        """Watch more parameters, and those that did not require a gradient or had another type before."""
        world = self._finder.here
        for param, keep in params:
            index = self._index.get(param)
            if index is None:
                index = self._index[param] = len(self._slots)
                self._slots.append(Slot(param, keep))
                self._keeps_gradients |= keep == "gradients"
                new = True
            else:
                new = False
            slot = self._slots[index]
            world.tap(param, slot.tap, Listening(self, index))
            slot.reduces = world.reduces(param)
            if new and param.requires_grad and param.is_leaf and slot.dense():
                self._adopt(slot)

    def moulted(self) -> bool:
        """Whether a parameter has got another shape or type: lazy ones get their first in their first forward."""
        return not all(slot.tap.current(slot.param) for slot in self._slots)

    def rebase(self, finder: Finder, geometry: Geometry) -> None:
        """Go on with another finder and geometry: the parameters are more, or their state is another."""
        self._finder, self._world, self._geometry = finder, finder.here, geometry

    def unseen(self, params: list[Tensor]) -> bool:
        """Whether there are gradients that no hook has seen: parameters that are new, unfrozen, or of another type."""
        if params is not self._known[0] and any(p not in self._index for p in params):
            return True
        return any(not slot.count and slot.param.grad is not None for slot in self._slots_of(params))

    def reset(self, *, used: bool = False) -> None:
        """Forget the passes: their gradients have been used, and are there still, or thrown away."""
        self._used, self.left_over, self.bent = used, False, False
        self._samples.clear()
        for slot in self._slots:
            if slot.count or slot.previous is not None:
                slot.forget()
        self._q = torch.zeros_like(self._q)  # found() has given the old one away
        self._running.clear()

    @torch.no_grad()
    def found(self, params: list[Tensor]) -> Found:
        """Everything that is known about the gradients of these parameters on this rank."""
        self._running.clear()  # backwards that raised half-way
        slots = self._slots_of(params)
        n_all, q_all = self._totals()
        if slots is self._slots:
            n, q = n_all.clone(), q_all
        else:
            rows = [self._index[p] for p in params]
            n, q = n_all[rows], q_all[rows]
        lazy = [i for i, slot in enumerate(slots) if slot.lazy]
        before = n
        if len(lazy) == len(slots):
            n = before = q = self._norms(slots)
        elif not all(s.lazy or s.untouched() for s in slots) or self._samples.changed():
            n = self._norms(slots)
            self._look_for_bent(slots)
        elif lazy:
            before = n = n.clone()
            n[lazy] = self._norms([slots[i] for i in lazy])
        if lazy and len(lazy) < len(slots):
            before, q = before.clone(), q.clone()
            before[lazy] = q[lazy] = n[lazy]
        return Found(
            max((slot.count for slot in slots), default=0),
            n,
            q,
            before,
            {i: self._settled_squares(slot) for i, slot in enumerate(slots) if slot.keep == "squares"},
            {i: self._first_two(slot) for i, slot in enumerate(slots) if slot.keep == "gradients"},
            [slot.count > 0 for slot in slots],
        )

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
        current, slot = self._begin(index), self._slots[index]
        if not slot.count:
            slot.forget()  # squares of a backward that raised half-way
            if not self._world.waits(slot.param):
                current.arrived[index] = None
                return
        elif slot.lazy:  # brought by a graph inside of the backward that runs
            self._read_off([index], [])
        if self._world.ranks == 1:
            slot.expect(gradient)
        if slot.keep == "norms" and gradient.numel() <= FEW:
            current.small[index], current.arrived[index] = gradient, None
        else:
            self._measure(current, index, gradient)

    @torch.no_grad()
    def _measure(self, current: _Pass, index: int, gradient: Tensor) -> None:
        slot = self._slots[index]
        current.arrived[index] = None
        if slot.keep == "gradients":
            if current.number < 2 and self._world.ranks == 1:
                current.arrived[index] = gradient.clone()
            return
        if slot.keep == "squares":
            self._add_squares(slot, gradient)
        if gradient.numel() <= FEW:
            current.small[index] = gradient
        else:
            current.arrived[index] = self._geometry.norm(slot.param, real_gradient(gradient))

    def begun(self, index: int) -> None:
        """A backward has reached this slot's parameter, whose gradient comes later."""
        self._begin(index)

    def _begin(self, index: int) -> _Pass:
        """The backward that runs now, which has reached this slot."""
        task = torch._C._current_graph_task_id()
        running = self._running.get(task)
        return self._start(task, index) if running is None else running

    @torch.no_grad()
    def _start(self, task: int, index: int) -> _Pass:
        self._world = self._finder.world
        self._reconcile()
        running = self._running[task] = _Pass(max(s.count for s in self._slots), {}, {})
        if not running.number:  # also after gradients have been thrown away: a GAN's generator leaves some
            self.left_over = self._used and not self._slots[index].zeroed()
        after_backward(lambda: after_backward(lambda: self._close(task)))
        for slot in self._slots:
            if slot.reduces and slot.param.grad is not None and not self._world.waits(slot.param):
                slot.previous = local(slot.param.grad).clone()
        return running

    @torch.no_grad()
    def reduced(self, index: int) -> None:
        """fully_shard has added the gradient of the backward that runs now, averaged over the ranks, to ``.grad``."""
        slot = self._slots[index]
        begun = torch._C._current_graph_task_id() in self._running
        if slot.count and not begun:  # through a leaf that nobody told of: what was added to what is not known
            slot.forget()
        current = self._begin(index)
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

    def _reconcile(self) -> None:
        """Before another backward: read off ``.grad`` what it tells, and see which gradients were written to."""
        for index, slot in enumerate(self._slots):
            if slot.count and slot.param.grad is None and not slot.untouched():
                self._forget(index)
        busy = {i for running in self._running.values() for i in running.arrived}
        lazy = [i for i, slot in enumerate(self._slots) if slot.lazy]
        touched = [i for i, slot in enumerate(self._slots) if slot.count and not slot.untouched()]
        changed = [i for i in touched if not self._slots[i].lazy]
        if not lazy and not changed:
            return
        n, _ = self._totals()
        if changed:
            self._look_for_bent([self._slots[i] for i in changed if i not in busy])
            now = self._norms([self._slots[i] for i in changed])
            rows = torch.stack([now, n[changed]])
            now, before = self._world.total([self._slots[i].param for i in changed], rows).unbind()
            for index, length, factor in zip(changed, now.tolist(), ratio(now, before), strict=True):
                if length == 0:
                    self._forget(index)
                elif index not in busy:  # else written to by the backward around this one
                    self._rescale(index, factor)
        if lazy:
            self._read_off(lazy, touched)

    def _forget(self, index: int) -> None:
        self._slots[index].forget()
        self._totals()[1][index] = 0

    def _rescale(self, index: int, factor: Tensor) -> None:
        """Contributions to the scale of ``.grad`` now; the factor is that of squares."""
        slot = self._slots[index]
        self._q[index] *= factor
        if slot.squares is not None:
            slot.squares.mul_(factor)
        slot.gradients = {i: g * factor.sqrt().to(g) for i, g in slot.gradients.items()}

    @torch.no_grad()
    def _read_off(self, lazy: list[int], touched: list[int]) -> None:
        """What ``.grad`` is before it is added to is the first contribution, unless it has been thrown away."""
        lengths = self._norms([self._slots[i] for i in lazy])
        if touched:
            whole = self._world.total([self._slots[i].param for i in lazy], lengths.unsqueeze(0))[0]
            zero = {i for i, length in zip(lazy, whole.tolist(), strict=True) if length == 0 and i in touched}
            for i in zero:
                self._forget(i)
            kept = [place for place, i in enumerate(lazy) if i not in zero]
            lazy, lengths = [lazy[place] for place in kept], lengths[kept]
        put(self._q, lazy, lengths, add=False)
        put(self._n, lazy, lengths, add=False)
        for index in lazy:
            slot = self._slots[index]
            slot.lazy = False
            slot.see()
            if slot.keep == "squares":
                self._add_squares(slot, local_gradient(slot.param))
            elif slot.keep == "gradients" and slot.first < 2:
                slot.gradients[slot.first] = local_gradient(slot.param).clone()

    @torch.no_grad()
    def _close(self, task: int) -> None:
        """The end of a backward, after every rank's gradients have been averaged."""
        done = self._running.pop(task, None)
        if done is None:
            return
        n, q = self._totals()
        measured = []
        for index, what in done.arrived.items():
            slot = self._slots[index]
            if slot.lazy:  # two graphs of one backward: one contribution
                continue
            if not slot.count:
                slot.first = done.number
                slot.lazy = not self._world.waits(slot.param) and slot.previous is None
            slot.count += 1
            self.bent = (slot.expected is not None and slot.unexpected()) or self.bent
            if what is not None and slot.keep == "gradients":
                slot.gradients[done.number] = what
            elif what is not None:
                measured.append(index)
        if measured:
            put(q, sorted(measured), self._stack([done.arrived[i] for i in sorted(measured)]), add=True)
        if done.small:
            small = sorted(done.small)
            slots = [self._slots[i].param for i in small]
            lengths = self._geometry.norms(slots, [real_gradient(done.small[i]) for i in small], n)
            put(q, small, lengths, add=True)
        stale = [i for i, slot in enumerate(self._slots) if slot.dense() and not slot.lazy and not slot.untouched()]
        if stale:
            put(n, stale, self._norms([self._slots[i] for i in stale]), add=False)
        for i in done.arrived.keys() | set(stale):
            self._slots[i].see()
        if stale:
            self._samples.take([slot for slot in self._slots if slot.dense() and not slot.lazy])

    # Measuring ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _adopt(self, slot: Slot) -> None:
        """A gradient that was there before anybody watched is one contribution."""
        if slot.reduces and self._finder.here.waits(slot.param):
            return  # nobody knows any more what each rank had; a parameter without passes counts as one gradient
        slot.count, slot.lazy = 1, True
        slot.see()

    def _add_squares(self, slot: Slot, gradient: Tensor) -> None:
        g = real_gradient(gradient)
        euclidean = self._geometry.sharp(slot.param, g) is g
        products = g if euclidean else self._geometry.products(slot.param, g, g)
        slot.add_squares(products, g, self._geometry.precision(slot.param, g))

    def _settled_squares(self, slot: Slot) -> Tensor:
        if slot.lazy:
            slot.fresh = True
            self._add_squares(slot, local_gradient(slot.param))
            slot.fresh = True
        elif slot.squares is None or slot.fresh:
            piece = real_view(local(slot.param))
            return torch.zeros_like(wide_like(piece, self._geometry.precision(slot.param, torch.zeros_like(piece))))
        assert slot.squares is not None
        return slot.squares

    def _first_two(self, slot: Slot) -> dict[int, Tensor]:
        if slot.lazy and slot.first < 2:
            return {slot.first: local_gradient(slot.param).clone()}
        return slot.gradients

    def _norms(self, slots: list[Slot]) -> Tensor:
        gradients = [real_gradient(local_gradient(slot.param)) for slot in slots]
        return self._geometry.norms([slot.param for slot in slots], gradients, self._n)

    def _stack(self, lengths: list[Any]) -> Tensor:
        return stacked(lengths, self._n).square_()

    def _look_for_bent(self, slots: list[Slot]) -> None:
        self.bent = self.bent or self._samples.bent(slots)

    def _totals(self) -> tuple[Tensor, Tensor]:
        """The vectors (n, q), one row per slot."""
        device = self._slots[0].param.device
        missing = len(self._slots) - len(self._n)
        if missing or self._n.device != device:
            blank = torch.zeros(missing, device=device, dtype=scalar_dtype(device))
            self._n = torch.cat([self._n.to(blank), blank])
            self._q = torch.cat([self._q.to(blank), blank])
        return self._n, self._q


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


def _remove_taps(slots: list[Slot]) -> None:
    for slot in slots:
        slot.tap.remove()
