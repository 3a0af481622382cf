"""Backward passes between two steps, each of them one independent gradient.

A hook in front of a leaf's gradient accumulator sees every backward's own gradient before it is added to ``.grad`` and
before DistributedDataParallel averages it over the ranks. From these contributions c_1, ..., c_k the optimizer needs,
besides their sum S = ``.grad``, only the sum of their squares: a number per tensor, or, for per-coordinate step sizes,
a tensor of squares.

What happens to ``.grad`` between backward and step (GradScaler's unscaling, ``clip_grad_norm_``) rescales S and so has
to rescale the squares. The squared norm of S is therefore taken at the end of each backward, together with the tensor's
version, which tells without a look at the data whether somebody has written to it since. GradScaler's kernel writes
without raising the version, so a few entries of the largest gradients are compared as well. Where anything changed,
all norms are taken again.

Reentrant activation checkpointing runs one backward as several graphs. A parameter's own count still tells the passes
apart, but two things are beyond it: a parameter that several reentrant segments share counts once for each of them,
and the paper's estimator cannot tell which graph belongs to which pass. ``use_reentrant=False`` has neither problem.

fully_shard writes ``.grad`` itself and computes with other leaves. Norms are then those of the gradients that arrive at
these leaves: the rank's own ones. Squares and gradients are kept of what each backward adds to the sharded ``.grad``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from sgdol.torch._shards import is_sharded, local, local_gradient, placed_like

__all__ = [
    "BackwardPasses",
    "Contributions",
    "Keep",
    "real_gradient",
    "real_view",
    "scalar_dtype",
    "squared_norms",
    "wide_dtype",
]

Keep = Literal["norms", "squares", "gradients"]

SAMPLED = 2
ENTRIES = 64
"""How many gradients, and about how many entries of each, are compared to notice a silent rescaling."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The real type in which sums over a tensor of this type are kept: float32 or wider."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def scalar_dtype(device: torch.device) -> torch.dtype:
    """The type of the sums over time: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def real_view(tensor: Tensor) -> Tensor:
    """The tensor, complex numbers seen as pairs of real ones; writing to the view writes to the tensor."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def real_gradient(gradient: Tensor) -> Tensor:
    """The same for a gradient, which autograd may leave as a lazy conjugate; not to be written to."""
    return real_view(gradient.resolve_conj())


def squared_norms(tensors: list[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The squared norm of each tensor, as one vector."""
    return _stack([_norm(t) for t in tensors], device, dtype).square()


def _norm(tensor: Tensor) -> Tensor:
    narrow = tensor.dtype in (torch.float16, torch.bfloat16)
    return torch.linalg.vector_norm(tensor, dtype=torch.float32 if narrow else None)


def _stack(scalars: list[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    if not scalars:
        return torch.zeros(0, device=device, dtype=dtype)
    return torch.stack([s.to(device=device, dtype=dtype) for s in scalars])


class Contributions(NamedTuple):
    """What the backward passes since the last step left, for some parameters."""

    k: int
    """How many passes there were; 0 if ``.grad`` was only written by hand."""
    n: Tensor
    """||S||^2 of each parameter's gradient as it is now."""
    q: Tensor
    """The sum of the squared norms of the contributions, in the scale of S now (but for ``keep="gradients"``)."""
    before: Tensor
    """What ||S||^2 was at the end of the last backward: what is measured of contributions is in its scale until
    :meth:`rescaled`."""
    squares: list[Tensor]
    """The same per coordinate (``keep="squares"``); may be written to."""
    gradients: list[dict[int, Tensor]]
    """The first two contributions themselves, by number, in the scale of S now (``keep="gradients"``)."""
    seen: list[bool]
    """Whether any pass reached the parameter: else ``.grad``, if there is one, was written by hand."""

    def rescaled(self, n: Tensor, before: Tensor, q: Tensor) -> Contributions:
        """These contributions, from their scale at the end of the last backward to that of S now."""
        ratio = _ratio(n, before)
        squares = [s.mul_(f.to(s)) for s, f in zip(self.squares, ratio.unbind(), strict=True)] if self.squares else []
        gradients = [_scaled(gs, f) for gs, f in zip(self.gradients, ratio.unbind(), strict=True)]
        return self._replace(n=n, q=q * ratio, before=n, squares=squares, gradients=gradients)


class _Slot:
    """One watched parameter."""

    __slots__ = (
        "count",
        "fresh",
        "gradients",
        "handle",
        "kind",
        "managed",
        "node",
        "param",
        "previous",
        "seen",
        "seen_version",
        "squares",
    )

    def __init__(self, param: Tensor) -> None:
        self.param = param
        self.managed = False  # by fully_shard
        self.previous: Tensor | None = None  # of a managed one: its gradient before the backward that runs
        self.kind: Any = None
        self.node: Any = None  # autograd keeps it only as long as somebody does
        self.handle: Any = None
        self.seen: Any = None
        self.seen_version = -1
        self.squares: Tensor | None = None
        self.forget()

    def forget(self) -> None:
        self.count = 0
        self.fresh = True  # the memory of the squares stays: allocating it anew costs more than filling it
        self.previous = None
        self.gradients: dict[int, Tensor] = {}

    def add_squares(self, gradient: Tensor) -> None:
        g = real_gradient(gradient)
        if self.squares is None or self.squares.shape != g.shape or self.squares.dtype != wide_dtype(g.dtype):
            self.squares = torch.empty_like(g, dtype=wide_dtype(g.dtype), memory_format=torch.contiguous_format)
            self.fresh = True
        if self.fresh:
            torch.mul(g, g, out=self.squares) if g.dtype == self.squares.dtype else self.squares.copy_(g).square_()
        else:
            g = g.to(self.squares.dtype)
            self.squares.addcmul_(g, g)
        self.fresh = False

    def settled_squares(self) -> Tensor:
        if self.squares is None or self.fresh:
            like = real_view(local(self.param))
            return torch.zeros_like(like, dtype=wide_dtype(like.dtype), memory_format=torch.contiguous_format)
        return self.squares

    def see(self) -> None:
        grad = self.param.grad
        self.seen = None if grad is None else weakref.ref(grad)
        self.seen_version = -1 if grad is None else _version(grad)

    def untouched(self) -> bool:
        """Whether ``.grad`` is, as far as its version tells, still what the last backward left."""
        grad = self.param.grad
        if grad is None or self.seen is None:
            # fully_shard keeps what it has not reduced yet to itself.
            return self.managed and grad is None and self.seen is None
        return self.seen() is grad and self.seen_version == _version(grad)


class _Pass(NamedTuple):
    """A backward that is running."""

    number: int
    """How many have left a gradient before it."""
    arrived: dict[int, Tensor]
    """What has been kept of the gradients so far, by slot."""


class BackwardPasses:
    """Counts the backward passes that reach some parameters and keeps what the estimator needs of each.

    Args:
        params: the parameters to watch.
        keep: ``"norms"`` (a number per tensor), ``"squares"`` (a tensor of squares per tensor) or ``"gradients"`` (the
            first two contributions as they are, for the paper's estimator).
        managed: those of the parameters that fully_shard manages.
        total: sums numbers, one column for each of some parameters, over the ranks that have pieces of them.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        keep: Keep,
        managed: Collection[Tensor] = (),
        total: Callable[[list[Tensor], Tensor], Tensor] | None = None,
    ) -> None:
        self._keep = keep
        self._managed = managed
        self._total = total
        self._slots: list[_Slot] = []
        self._index: dict[Tensor, int] = {}
        self._running: dict[int, _Pass] = {}  # by graph task: reentrant checkpointing nests them
        self._q: Tensor | None = None
        self._n: Tensor | None = None
        self._samples: list[tuple[_Slot, Tensor]] = []
        self.watch(params)
        weakref.finalize(self, _remove_hooks, self._slots)

    def watch(self, params: Iterable[Tensor]) -> None:
        """Watch more parameters, and those that did not require a gradient or had another type before."""
        for param in params:
            new = param not in self._index
            if new:
                self._index[param] = len(self._slots)
                self._slots.append(_Slot(param))
            if not (param.requires_grad and param.is_leaf):
                continue
            index = self._index[param]
            slot = self._slots[index]
            if param in self._managed:
                if new and self._keep != "norms":
                    slot.handle = param.register_post_accumulate_grad_hook(_hook_reduced(weakref.ref(self), index))
                slot.managed = True
            else:
                self._attach(index, param, (param.dtype, param.device))
            if new and _is_dense(param):
                self._adopt(index, slot)

    def follow(self, leaf: Tensor, param: Tensor) -> None:
        """Take the gradients that arrive at this leaf for the parameter's: fully_shard computes with such leaves."""
        index = self._index[param]
        if leaf.requires_grad and self._keep == "norms":
            self._attach(index, leaf, (id(leaf), leaf.dtype, leaf.device))
        elif leaf.requires_grad and self._slots[index].kind != id(leaf):
            slot = self._slots[index]
            slot.kind, slot.node = id(leaf), get_gradient_edge(leaf).node
            slot.node.register_prehook(_hook_begin(weakref.ref(self)))

    def _attach(self, index: int, leaf: Tensor, kind: Any) -> None:
        slot = self._slots[index]
        if slot.kind != kind:  # a leaf whose data change kind gets a new accumulator
            if slot.handle is not None:
                slot.handle.remove()
            slot.kind, slot.node = kind, get_gradient_edge(leaf).node
            slot.handle = slot.node.register_prehook(_hook(weakref.ref(self), index, _owner(leaf)))

    def reset(self) -> None:
        """Forget the passes: their gradients have been used or thrown away."""
        for slot in self._slots:
            slot.forget()
        if self._q is not None:
            self._q = torch.zeros_like(self._q)  # contributions() has given the old one away
        self._running.clear()

    @torch.no_grad()
    def contributions(self, params: list[Tensor], device: torch.device, dtype: torch.dtype) -> Contributions:
        """Everything that is known about the gradients of these parameters.

        Of DTensors it is what this rank knows, and what contributions were is in the scale of ``before``.
        """
        self._running.clear()  # backwards that raised half-way
        rows = [self._index[p] for p in params]
        slots = [self._slots[i] for i in rows]
        n, q = self._totals(device, dtype)
        n, q = (n.clone(), q) if rows == list(range(len(self._slots))) else (n[rows], q[rows])
        before = n
        if not all(slot.untouched() for slot in slots) or self._silently_written(device, dtype):
            n = squared_norms([local_gradient(slot.param) for slot in slots], device, dtype)
        found = Contributions(
            max((slot.count for slot in slots), default=0),
            n,
            q,
            before,
            [slot.settled_squares() for slot in slots] if self._keep == "squares" else [],
            [slot.gradients for slot in slots],
            [slot.count > 0 for slot in slots],
        )
        return found if n is before or self._total is not None else found.rescaled(n, before, q)

    def _silently_written(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether entries changed although no version says so, or whether it cannot be told without a wait."""
        if device.type != "cpu" or not self._samples:
            return True
        now = squared_norms([_entries(slot) for slot, _ in self._samples], device, dtype).tolist()
        return 0 in now or now != [before.tolist() for _, before in self._samples]

    def _totals(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The vectors (n, q), one row per slot."""
        if self._n is None or self._q is None:
            self._n = torch.zeros(0, device=device, dtype=dtype)
            self._q = torch.zeros(0, device=device, dtype=dtype)
        missing = len(self._slots) - len(self._n)
        if missing or self._n.device != device:
            self._n = torch.cat([self._n.to(device), torch.zeros(missing, device=device, dtype=dtype)])
            self._q = torch.cat([self._q.to(device), torch.zeros(missing, device=device, dtype=dtype)])
        return self._n, self._q

    @torch.no_grad()
    def _adopt(self, index: int, slot: _Slot) -> None:
        """A gradient that was there before anybody watched is one contribution."""
        grad = local_gradient(slot.param)
        n, q = self._totals(self._slots[0].param.device, scalar_dtype(self._slots[0].param.device))
        n[index] = q[index] = squared_norms([grad], n.device, n.dtype)[0]
        if slot.managed and self._keep == "norms":
            q[index] = 0  # nobody knows any more what each rank had; a parameter without passes counts as one gradient
            return
        slot.count = 1
        if self._keep == "squares":
            slot.add_squares(grad)
        elif self._keep == "gradients":
            slot.gradients[0] = grad.clone()
        slot.see()

    @torch.no_grad()
    def _measure(self, index: int, gradient: Tensor | None) -> None:
        """One parameter's gradient arrives in the backward that runs now, and is about to be accumulated."""
        if gradient is None or gradient.layout != torch.strided:
            return
        current, slot = self._begin(), self._slots[index]
        if not slot.count:
            slot.forget()  # squares of a backward that raised half-way
        if self._keep == "gradients":
            current.arrived[index] = gradient.clone() if current.number < 2 else gradient.new_empty(0)
            return
        if self._keep == "squares":
            slot.add_squares(gradient)
        current.arrived[index] = _norm(gradient)

    @torch.no_grad()
    def _begin(self) -> _Pass:
        """The backward that runs now."""
        task = torch._C._current_graph_task_id()
        if task not in self._running:
            self._reconcile()
            self._running[task] = _Pass(max(s.count for s in self._slots), {})
            _after_backward(lambda: _after_backward(lambda: self._close(task)))
            if self._keep != "norms":
                for slot in self._slots:
                    if slot.managed and slot.param.grad is not None:
                        slot.previous = local(slot.param.grad).clone()
        return self._running[task]

    @torch.no_grad()
    def _measure_reduced(self, index: int) -> None:
        """fully_shard has added the gradient of the backward that runs now, averaged over the ranks, to ``.grad``."""
        slot = self._slots[index]
        begun = torch._C._current_graph_task_id() in self._running
        if slot.count and not begun:  # through a leaf that nobody told of: what was added to what is not known
            slot.forget()
        gradient = local_gradient(slot.param)
        self._measure(index, gradient if slot.previous is None else gradient - slot.previous)
        slot.previous = None

    def _reconcile(self) -> None:
        """See which gradients were written to after the last pass: thrown away, or rescaled."""
        busy = {i for running in self._running.values() for i in running.arrived}
        touched = [i for i, slot in enumerate(self._slots) if slot.count and not slot.untouched()]
        if not touched:
            return
        assert self._q is not None
        assert self._n is not None
        for index in [i for i in touched if self._slots[i].param.grad is None]:
            self._slots[index].forget()
            self._q[index] = 0
            touched.remove(index)
        if not touched:
            return
        now = squared_norms([local_gradient(self._slots[i].param) for i in touched], self._q.device, self._q.dtype)
        before = self._n[touched]
        if self._total is not None:
            now, before = self._total([self._slots[i].param for i in touched], torch.stack([now, before])).unbind()
        for index, norm, factor in zip(touched, now.tolist(), _ratio(now, before), strict=True):
            slot = self._slots[index]
            if norm == 0:
                slot.forget()
                self._q[index] = 0
                continue
            if index in busy:  # written to by the backward around this one
                continue
            self._q[index] *= factor
            if slot.squares is not None:
                slot.squares.mul_(factor)
            slot.gradients = _scaled(slot.gradients, factor)

    @torch.no_grad()
    def _close(self, task: int) -> None:
        """The end of a backward, after every rank's gradients have been averaged."""
        done = self._running.pop(task, None)
        if done is None:
            return
        landed = sorted(done.arrived)
        for index in landed:
            self._slots[index].count += 1
            if self._keep == "gradients" and done.number < 2:
                self._slots[index].gradients[done.number] = done.arrived[index]
        device, dtype = self._slots[0].param.device, scalar_dtype(self._slots[0].param.device)
        n, q = self._totals(device, dtype)
        if self._keep != "gradients":
            _put(q, landed, _stack([done.arrived[i] for i in landed], device, dtype).square(), add=True)
        stale = [i for i, slot in enumerate(self._slots) if _is_dense(slot.param) and not slot.untouched()]
        _put(n, stale, squared_norms([local_gradient(self._slots[i].param) for i in stale], device, dtype), add=False)
        for i in [*stale, *(i for i in landed if self._slots[i].param.grad is None)]:
            self._slots[i].see()
        largest = sorted(stale, key=lambda i: local(self._slots[i].param).numel())[-SAMPLED:]
        entries = squared_norms([_entries(self._slots[i]) for i in largest], device, dtype)
        self._samples = [(self._slots[i], before) for i, before in zip(largest, entries.unbind(), strict=True)]


def _version(grad: Tensor) -> int:
    """How often it was written to; of a DTensor, both as a whole and this rank's piece behind its back."""
    return grad._version if type(grad) is Tensor or not is_sharded(grad) else grad._version + local(grad)._version


def _after_backward(callback: Any) -> None:
    """Run this when the backward that runs now has finished, after what has been queued so far.

    DistributedDataParallel queues its wait for the all-reduce in the middle of backward, so that a callback which is
    queued by a callback runs after it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _ratio(now: Tensor, before: Tensor) -> Tensor:
    return torch.where(before > 0, now / before, torch.ones_like(before))


def _scaled(gradients: dict[int, Tensor], factor: Tensor | None) -> dict[int, Tensor]:
    """Gradients whose squares are to be multiplied by this factor."""
    return gradients if factor is None else {i: g * factor.sqrt().to(g) for i, g in gradients.items()}


def _entries(slot: _Slot) -> Tensor:
    """A few entries of a gradient, spread over it."""
    grad = torch.zeros_like(slot.param) if slot.param.grad is None else slot.param.grad
    grad = local(grad)
    if not grad.is_contiguous():
        return grad.select(0, 0)
    return grad.view(-1)[:: max(1, grad.numel() // ENTRIES)]


def _is_dense(param: Tensor) -> bool:
    return param.grad is not None and param.grad.layout == torch.strided


def _put(vector: Tensor, rows: list[int], values: Tensor, *, add: bool) -> None:
    """Add to or overwrite some rows."""
    if len(rows) == len(vector):
        vector.add_(values) if add else vector.copy_(values)
    elif rows:
        where = torch.tensor(rows, device=vector.device)
        vector.index_add_(0, where, values) if add else vector.index_copy_(0, where, values)


def _owner(leaf: Tensor) -> weakref.ref[Tensor] | None:
    """Whose placements a gradient is to have; None for ordinary tensors."""
    return weakref.ref(leaf) if is_sharded(leaf) else None


def _hook(passes: weakref.ref[BackwardPasses], index: int, owner: weakref.ref[Tensor] | None) -> Any:
    @torch.no_grad()
    def on_gradient(gradients: tuple[Tensor | None, ...]) -> None:
        recorder, gradient = passes(), gradients[0]
        if recorder is not None:
            leaf = None if owner is None else owner()
            if leaf is not None and gradient is not None:
                gradient = placed_like(gradient, leaf)
            recorder._measure(index, gradient)

    return on_gradient


def _hook_begin(passes: weakref.ref[BackwardPasses]) -> Any:
    def on_gradient(_: tuple[Tensor | None, ...]) -> None:
        recorder = passes()
        if recorder is not None:
            recorder._begin()

    return on_gradient


def _hook_reduced(passes: weakref.ref[BackwardPasses], index: int) -> Any:
    def on_gradient(_: Tensor) -> None:
        recorder = passes()
        if recorder is not None:
            recorder._measure_reduced(index)

    return on_gradient


def _remove_hooks(slots: list[_Slot]) -> None:
    for slot in slots:
        if slot.handle is not None:
            slot.handle.remove()
