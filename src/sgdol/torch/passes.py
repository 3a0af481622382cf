"""Backward passes between two steps, each of them one independent gradient.

A hook on a leaf tensor sees every backward's own gradient before it is accumulated into ``.grad`` and before
DistributedDataParallel averages it over the ranks. From these contributions c_1, ..., c_k the optimizer needs, besides
their sum S = ``.grad``, only the sum of their squares: a number per tensor, or, for per-coordinate step sizes, a tensor
of squares.

What happens to ``.grad`` between backward and step (GradScaler's unscaling, ``clip_grad_norm_``) rescales S and so has
to rescale the squares. The squared norm of S is therefore taken at the end of each backward, together with the tensor's
version, which tells without a look at the data whether somebody has written to it since. GradScaler's kernel writes
without raising the version, so a few entries of the largest gradients are compared as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["BackwardPasses", "Contributions", "Keep", "real_view", "scalar_dtype", "squared_norms", "wide_dtype"]

Keep = Literal["norms", "squares", "gradients"]

SAMPLED = 2
ENTRIES = 64
"""How many gradients, and about how many entries of each, are compared to notice a silent rescaling."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The real type in which sums over a tensor of this type are kept: float32 or wider."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def real_view(tensor: Tensor) -> Tensor:
    """The tensor, complex numbers seen as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def squared_norms(tensors: list[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The squared norm of each tensor, as one vector."""
    norms = [torch.linalg.vector_norm(t, dtype=wide_dtype(t.dtype) if _is_narrow(t) else None) for t in tensors]
    return _stack(norms, device, dtype).square()


def _entries(tensor: Tensor) -> Tensor:
    """A few entries of a tensor, spread over it."""
    stride = max(1, tensor.numel() // ENTRIES)
    return tensor.view(-1)[::stride] if tensor.is_contiguous() else tensor.flatten()[::stride]


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


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
    gradients: list[list[Tensor]]
    """The first two contributions themselves, in the scale of S now (``keep="gradients"``)."""


class _Slot:
    """One watched parameter."""

    __slots__ = ("before", "count", "fresh", "gradients", "handle", "param", "seen", "seen_version", "squares")

    def __init__(self, param: Tensor) -> None:
        self.param = param
        self.handle: Any = None
        self.seen: Any = None
        self.seen_version = -1
        self.before: tuple[int, int] | None = None
        self.squares: Tensor | None = None
        self.forget()

    def forget(self) -> None:
        self.count = 0
        self.fresh = True  # the memory of the squares stays: allocating it anew costs more than filling it
        self.gradients: list[Tensor] = []

    def add_squares(self, gradient: Tensor) -> None:
        g = real_view(gradient)
        if self.squares is None or self.squares.shape != g.shape:
            self.squares = torch.empty_like(g, dtype=wide_dtype(g.dtype), memory_format=torch.contiguous_format)
        if self.fresh:
            torch.mul(g, g, out=self.squares) if g.dtype == self.squares.dtype else self.squares.copy_(g).square_()
        else:
            g = g.to(self.squares.dtype)
            self.squares.addcmul_(g, g)
        self.fresh = False

    def settled_squares(self, factor: Tensor | None) -> Tensor:
        g = real_view(_gradient(self.param)) if self.param.grad is not None else real_view(self.param)
        if self.squares is None or self.fresh:
            return torch.zeros_like(g, dtype=wide_dtype(g.dtype), memory_format=torch.contiguous_format)
        return self.squares if factor is None else self.squares.mul_(factor)

    def see(self) -> None:
        grad = self.param.grad
        self.seen = None if grad is None else weakref.ref(grad)
        self.seen_version = -1 if grad is None else grad._version

    def untouched(self) -> bool:
        """Whether ``.grad`` is still what the last backward left."""
        grad = self.param.grad
        return grad is not None and self.seen is not None and self.seen() is grad and self.seen_version == grad._version

    def identity(self) -> tuple[int, int] | None:
        grad = self.param.grad
        return None if grad is None else (id(grad), grad._version)


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
        self._handles: list[Any] = []
        self._task = -1
        self._arrived: dict[int, Tensor] = {}
        self._q: Tensor | None = None
        self._n: Tensor | None = None
        self._samples: list[tuple[_Slot, Tensor]] = []
        self.watch(params)
        weakref.finalize(self, _remove_all, self._handles)

    def watch(self, params: Iterable[Tensor]) -> None:
        """Watch more parameters, or those that did not require a gradient before."""
        for param in params:
            if param not in self._index:
                self._index[param] = len(self._slots)
                self._slots.append(_Slot(param))
            slot = self._slots[self._index[param]]
            if slot.handle is None and param.requires_grad and param.is_leaf:
                slot.handle = param.register_hook(_hook(weakref.ref(self), self._index[param]))
                self._handles.append(slot.handle)

    def reset(self) -> None:
        """Forget the passes: their gradients have been used or thrown away."""
        for slot in self._slots:
            slot.forget()
        if self._q is not None:
            self._q = torch.zeros_like(self._q)  # contributions() has given the old one away
        self._arrived.clear()

    @property
    def count(self) -> int:
        """How many passes have left a gradient since the last reset.

        The largest count of any parameter rather than the number of graphs: activation checkpointing may run one
        backward as several graphs, each of which reaches its own parameters.
        """
        return max((slot.count for slot in self._slots if slot.param.grad is not None), default=0)

    def contributions(self, params: list[Tensor], device: torch.device, dtype: torch.dtype) -> Contributions:
        """Everything that is known about the gradients of these parameters."""
        self._close()
        slots = [self._slots[self._index[p]] for p in params]
        rows = [self._index[p] for p in params]
        n, q = self._totals(device, dtype)
        if rows != list(range(len(self._slots))):
            n, q = n[rows], q[rows]
        touched = [i for i, slot in enumerate(slots) if not slot.untouched()]
        factors: list[Tensor | None] = [None] * len(slots)
        silent = self._silent_rescaling(device, dtype)
        if silent is not None:
            n, q, factors = n * silent, q * silent, [silent] * len(slots)
        if touched:
            before, n = n, n.clone()
            n[touched] = squared_norms([_gradient(slots[i].param) for i in touched], device, dtype)
            written = _ratio(n, before)
            q = q * written
            for i in touched:
                factors[i] = written[i] if silent is None else written[i] * silent
        squares, gradients = [], []
        for slot, factor in zip(slots, factors, strict=True):
            if self._keep == "squares":
                squares.append(slot.settled_squares(factor))
            gradients.append(slot.gradients if factor is None else [g * factor.sqrt() for g in slot.gradients])
        return Contributions(max((slot.count for slot in slots), default=0), n, q, squares, gradients)

    def _silent_rescaling(self, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """The factor by which squares of gradients changed although no version says so; None if they did not."""
        sampled = [(slot, before) for slot, before in self._samples if slot.untouched()]
        if not sampled:
            return None
        now = squared_norms([_entries(_gradient(slot.param)) for slot, _ in sampled], device, dtype).sum()
        factor = _ratio(now, torch.stack([before for _, before in sampled]).sum())
        return None if factor.device.type == "cpu" and factor.tolist() == 1.0 else factor

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
    def _measure(self, index: int, gradient: Tensor) -> None:
        """One parameter's gradient arrives in the backward that runs now."""
        if gradient.layout != torch.strided:
            return
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._open(task)
        slot = self._slots[index]
        if self._keep == "gradients":
            self._arrived[index] = gradient.clone() if slot.count < 2 else gradient.new_empty(0)
            return
        if self._keep == "squares":
            slot.add_squares(gradient)
        dtype = wide_dtype(gradient.dtype) if _is_narrow(gradient) else None
        self._arrived[index] = torch.linalg.vector_norm(gradient, dtype=dtype)

    # The engine runs final callbacks in the order in which they were queued. DistributedDataParallel queues its own,
    # which waits for the all-reduce, in the middle of backward; a callback queued by a callback runs after it.

    def _open(self, task: int) -> None:
        """The first gradient of a new backward: note how things stand before anything is accumulated."""
        self._task = task
        self._arrived.clear()  # of a backward that raised half-way
        for index, slot in enumerate(self._slots):
            if slot.count and not slot.untouched():
                self._reconcile(index, slot)
            slot.before = slot.identity()
        torch.autograd.Variable._execution_engine.queue_callback(self._requeue)

    def _requeue(self) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._close)

    def _reconcile(self, index: int, slot: _Slot) -> None:
        """``.grad`` was written to after the last pass: thrown away, or rescaled."""
        grad = slot.param.grad
        if grad is None or not bool(grad.any()):
            slot.forget()
            if self._q is not None:
                self._q[index] = 0
            return
        if self._q is None or self._n is None:
            return
        now = squared_norms([grad], self._q.device, self._q.dtype)[0]
        factor = _ratio(now, self._n[index])
        self._q[index] *= factor
        if slot.squares is not None:
            slot.squares.mul_(factor)
        slot.gradients = [g * factor.sqrt() for g in slot.gradients]

    @torch.no_grad()
    def _close(self) -> None:
        """The end of a backward, after every rank's gradients have been averaged."""
        self._task = -1
        arrived, self._arrived = self._arrived, {}
        landed = []
        for index, value in sorted(arrived.items(), key=lambda item: item[0]):
            slot = self._slots[index]
            if slot.identity() != slot.before:
                landed.append(index)
                slot.count += 1
                if self._keep == "gradients" and slot.count <= 2:
                    slot.gradients.append(value)
            elif self._keep == "squares":
                # torch.autograd.grad ran through this parameter: the gradient was measured but went elsewhere.
                # The squares cannot be taken back, so what is in .grad counts as a single gradient.
                slot.fresh, slot.count = True, min(slot.count, 1)
        if not landed:
            return
        stale = [i for i, slot in enumerate(self._slots) if slot.param.grad is not None and not slot.untouched()]
        first = self._slots[0].param
        device, dtype = first.device, scalar_dtype(first.device)
        n, q = self._totals(device, dtype)
        if self._keep != "gradients":
            _add_rows(q, landed, _stack([arrived[i] for i in landed], device, dtype).square())
        dense = [i for i in stale if _is_dense(self._slots[i].param)]
        _set_rows(n, dense, squared_norms([_gradient(self._slots[i].param) for i in dense], device, dtype))
        for i in stale:
            self._slots[i].see()
        largest = sorted(dense, key=lambda i: self._slots[i].param.numel())[-SAMPLED:]
        entries = squared_norms([_entries(_gradient(self._slots[i].param)) for i in largest], device, dtype)
        self._samples = [(self._slots[i], before) for i, before in zip(largest, entries.unbind(), strict=True)]


def scalar_dtype(device: torch.device) -> torch.dtype:
    """The type of the sums over time: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _ratio(now: Tensor, before: Tensor) -> Tensor:
    return torch.where(before > 0, now / before, torch.ones_like(before))


def _gradient(param: Tensor) -> Tensor:
    grad = param.grad
    assert grad is not None
    return grad


def _is_dense(param: Tensor) -> bool:
    return param.grad is not None and param.grad.layout == torch.strided


def _add_rows(vector: Tensor, rows: list[int], values: Tensor) -> None:
    if len(rows) == len(vector):
        vector += values
    else:
        vector.index_add_(0, torch.tensor(rows, device=vector.device), values)


def _set_rows(vector: Tensor, rows: list[int], values: Tensor) -> None:
    if len(rows) == len(vector):
        vector.copy_(values)
    elif rows:
        vector[torch.tensor(rows, device=vector.device)] = values


def _hook(passes: weakref.ref[BackwardPasses], index: int) -> Any:
    @torch.utils.hooks.unserializable_hook
    def on_gradient(gradient: Tensor) -> None:
        recorder = passes()
        if recorder is not None:
            recorder._measure(index, gradient)

    return on_gradient


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
