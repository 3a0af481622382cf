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
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

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
    squares: list[Tensor]
    """The same per coordinate (``keep="squares"``); may be written to."""
    gradients: list[dict[int, Tensor]]
    """The first two contributions themselves, by number, in the scale of S now (``keep="gradients"``)."""
    seen: list[bool]
    """Whether any pass reached the parameter: else ``.grad``, if there is one, was written by hand."""


class _Slot:
    """One watched parameter."""

    __slots__ = ("count", "fresh", "gradients", "handle", "kind", "node", "param", "seen", "seen_version", "squares")

    def __init__(self, param: Tensor) -> None:
        self.param = param
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

    def settled_squares(self, factor: Tensor | None) -> Tensor:
        if self.squares is None or self.fresh:
            like = real_view(self.param)
            return torch.zeros_like(like, dtype=wide_dtype(like.dtype), memory_format=torch.contiguous_format)
        return self.squares if factor is None else self.squares.mul_(factor)

    def see(self) -> None:
        grad = self.param.grad
        self.seen = None if grad is None else weakref.ref(grad)
        self.seen_version = -1 if grad is None else grad._version

    def untouched(self) -> bool:
        """Whether ``.grad`` is, as far as its version tells, still what the last backward left."""
        grad = self.param.grad
        return grad is not None and self.seen is not None and self.seen() is grad and self.seen_version == grad._version


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
    """

    def __init__(self, params: Iterable[Tensor], keep: Keep) -> None:
        self._keep = keep
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
            kind = (param.dtype, param.device)  # a parameter whose data change kind gets a new accumulator
            if slot.kind != kind:
                if slot.handle is not None:
                    slot.handle.remove()
                slot.kind, slot.node = kind, get_gradient_edge(param).node
                slot.handle = slot.node.register_prehook(_hook(weakref.ref(self), index))
            if new and _is_dense(param):
                self._adopt(index, slot)

    def reset(self) -> None:
        """Forget the passes: their gradients have been used or thrown away."""
        for slot in self._slots:
            slot.forget()
        if self._q is not None:
            self._q = torch.zeros_like(self._q)  # contributions() has given the old one away
        self._running.clear()

    @torch.no_grad()
    def contributions(self, params: list[Tensor], device: torch.device, dtype: torch.dtype) -> Contributions:
        """Everything that is known about the gradients of these parameters."""
        self._running.clear()  # backwards that raised half-way
        rows = [self._index[p] for p in params]
        slots = [self._slots[i] for i in rows]
        n, q = self._totals(device, dtype)
        n, q = (n.clone(), q) if rows == list(range(len(self._slots))) else (n[rows], q[rows])
        factors: list[Tensor | None] = [None] * len(slots)
        if not all(slot.untouched() for slot in slots) or self._silently_written(device, dtype):
            before, n = n, squared_norms([_gradient(slot.param) for slot in slots], device, dtype)
            ratio = _ratio(n, before)
            q, factors = q * ratio, list(ratio.unbind())
        return Contributions(
            max((slot.count for slot in slots), default=0),
            n,
            q,
            [slot.settled_squares(f) for slot, f in zip(slots, factors, strict=True)]
            if self._keep == "squares"
            else [],
            [_scaled(slot.gradients, f) for slot, f in zip(slots, factors, strict=True)],
            [slot.count > 0 for slot in slots],
        )

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
        grad = _gradient(slot.param)
        n, q = self._totals(self._slots[0].param.device, scalar_dtype(self._slots[0].param.device))
        n[index] = q[index] = squared_norms([grad], n.device, n.dtype)[0]
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
        task, slot = torch._C._current_graph_task_id(), self._slots[index]
        if task not in self._running:
            self._reconcile()
            self._running[task] = _Pass(max(s.count for s in self._slots), {})
            _after_backward(lambda: _after_backward(lambda: self._close(task)))
        current = self._running[task]
        if not slot.count:
            slot.forget()  # squares of a backward that raised half-way
        if self._keep == "gradients":
            current.arrived[index] = gradient.clone() if current.number < 2 else gradient.new_empty(0)
            return
        if self._keep == "squares":
            slot.add_squares(gradient)
        current.arrived[index] = _norm(gradient)

    def _reconcile(self) -> None:
        """See which gradients were written to after the last pass: thrown away, or rescaled."""
        busy = {i for running in self._running.values() for i in running.arrived}
        for index, slot in enumerate(self._slots):
            if not slot.count or slot.untouched():
                continue
            assert self._q is not None
            assert self._n is not None
            grad = slot.param.grad
            if grad is None or not bool(grad.any()):
                slot.forget()
                self._q[index] = 0
                continue
            if index in busy:  # written to by the backward around this one
                continue
            factor = _ratio(squared_norms([grad], self._q.device, self._q.dtype)[0], self._n[index])
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
        _put(n, stale, squared_norms([_gradient(self._slots[i].param) for i in stale], device, dtype), add=False)
        for i in stale:
            self._slots[i].see()
        largest = sorted(stale, key=lambda i: self._slots[i].param.numel())[-SAMPLED:]
        entries = squared_norms([_entries(self._slots[i]) for i in largest], device, dtype)
        self._samples = [(self._slots[i], before) for i, before in zip(largest, entries.unbind(), strict=True)]


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


def _gradient(param: Tensor) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad


def _entries(slot: _Slot) -> Tensor:
    """A few entries of a gradient, spread over it."""
    grad = _gradient(slot.param)
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


def _hook(passes: weakref.ref[BackwardPasses], index: int) -> Any:
    def on_gradient(gradients: tuple[Tensor | None, ...]) -> None:
        recorder = passes()
        if recorder is not None:
            recorder._measure(index, gradients[0])

    return on_gradient


def _remove_hooks(slots: list[_Slot]) -> None:
    for slot in slots:
        if slot.handle is not None:
            slot.handle.remove()
