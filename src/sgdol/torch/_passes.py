"""Records the backward passes between two steps, each of which is one independent gradient, for both optimizers.

A hook in front of a leaf's gradient accumulator sees what every backward contributes, before it is added to ``.grad``
and before DistributedDataParallel averages it over the ranks. :class:`Contributions` keeps what is needed of it. The
first contribution *is* ``.grad`` until the second comes, so a loop with one backward per step pays for nothing. (Where
ranks average their gradients it is not, and is measured too.)
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from sgdol.torch._contributions import RESHAPED, Contributions
from sgdol.torch._metric import Metrics
from sgdol.torch._rerun import RUNNING, Replay
from sgdol.torch._vectors import Layout, sample
from sgdol.torch._world import Finder, Tap, World, is_distributed, piece_of

__all__ = ["Passes"]

graph_task = torch._C._current_graph_task_id
after_backward = torch.autograd.Variable._execution_engine.queue_callback
set_grad_enabled = torch._C._set_grad_enabled

_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_kind: Callable[[Tensor], Any] = attrgetter("dtype", "device", "shape")
_user_hooks: Callable[[Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")

SHARED = (
    "a large parameter is used in several segments of reentrant activation checkpointing, so that one backward() "
    "brought it several gradients and the noise of this step is measured wrong. "
    "Use checkpoint(..., use_reentrant=False)."
)


def without_graph(method: Callable[..., None]) -> Callable[..., None]:
    """As ``torch.no_grad()``, which takes longer than the rest of a hook; with create_graph=True .grad has a graph."""

    def inner(*arguments: Any) -> None:
        enabled = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            method(*arguments)
        finally:
            set_grad_enabled(enabled)

    return inner


class Passes:
    """Counts the backward passes that reach some parameters, and measures what each of them contributes.

    Reentrant activation checkpointing runs backward passes inside of a backward pass. Autograd calls each of them a
    graph task; all graph tasks inside one outermost call of the engine are one pass here.

    Args:
        params: all parameters, also lazy ones, which have no shape before their first forward.
        layout: a method that makes the layout of the parameters that have a shape and may get a gradient.
        finder: finds the world: how gradients arrive.
        metrics: the metrics in which contributions are measured.
        warn: a method that warns the user.
        earlier: a recorder of other parameters, whose passes this one continues.
    """

    contributions: Contributions
    origins: list[Replay | None]  # the call of sgdol.torch.backward that each pass belongs to: how to run it again
    left_over: bool  # True if .grad was not zeroed between the last step and the first backward of this one

    def __init__(
        self,
        params: list[Tensor],
        layout: Callable[[], Layout],
        finder: Finder,
        metrics: Metrics,
        warn: Callable[[str], None],
        earlier: Passes | None = None,
    ) -> None:
        # Both are methods of the optimizer that has this recorder, which must not keep it alive.
        self._make_layout, self._warn = weakref.WeakMethod(layout), weakref.WeakMethod(warn)
        self._params, self._finder, self._metrics = params, finder, metrics
        self._taps = [Tap() for _ in params]
        self.world: World = finder.here  # the world in which the last backward ran
        self._thread, self._lock = 0, threading.RLock()
        self._lay_out()
        self.compiled = False  # True if compiled autograd ran a backward
        self._after_step = False
        self._end_pass()
        self.reset()
        self.watch()
        # A gradient that is there before anybody watches is one contribution. Of one that is already averaged over the
        # ranks nobody knows any more what each rank had.
        reached: dict[int, Tensor | None] = {
            i: None
            for i, p in enumerate(self.layout.params)
            if is_dense(p) and p.requires_grad and not (self.world.reduces(p) and self.world.waits(p))
        }
        with torch.no_grad():
            if reached:
                self.contributions.add(reached, {}, ends_now=True)
            if earlier is not None and any(earlier.contributions.counts):
                earlier.finish()
                self._after_step, self.world, self.origins = earlier._after_step, earlier.world, earlier.origins
                self.contributions.take_over(earlier.contributions)
        self.remove = weakref.finalize(self, remove, self._taps)  # runs once: when called, or when this is deleted

    def _lay_out(self) -> None:
        make = self._make_layout()
        assert make is not None
        self.layout = make()
        self._rows = {id(p): i for i, p in enumerate(self.layout.params)}
        self._entry_of = [e for e, entry in enumerate(self.layout.entries) for _ in entry.sizes]
        merged = [self.layout.entries[e].merged for e in self._entry_of]
        self._large_rows = {i for i in range(len(merged)) if not merged[i]}
        self.contributions = Contributions(self.layout, self._metrics)
        # A lazy parameter has no shape, and asking each whether it is lazy takes as long as everything else here.
        self._kind = _kind_of_lazy if any(map(is_lazy, self._params)) else _kind
        self._kinds = list(map(self._kind, self._params))

    def watch(self) -> None:
        # Called again for parameters that were frozen or changed their type: they have new accumulators.
        here = self._finder.here
        for p, tap in zip(self._params, self._taps, strict=True):
            if here.reduces(p):
                here.tap(p, Listener(self, id(p)))
            elif p.requires_grad and p.is_leaf:
                tap.attach(p, Listener(self, id(p)))

    def parameters_changed(self) -> bool:
        """True if a parameter's shape or type changed since :meth:`watch`, as when a lazy module was initialised."""
        return self._kinds != list(map(self._kind, self._params))

    def reset(self, *, used: bool = False) -> None:
        # used: a step has used the gradients, which may still be in .grad. Not used: somebody has zeroed them.
        self._after_step, self.left_over = used, False
        self.contributions.thrown_away = not used and any(self.contributions.counts)
        self.overlapping = False  # True if backward passes ran in several threads at the same time
        self.origins = []
        if not self.contributions.is_empty:
            self.contributions.forget()
        if self._engine_call is not None:
            self._end_pass()

    def _end_pass(self) -> None:
        self._engine_call: Any = None  # the frame of the outermost engine call; True if there is a pass but no frame
        self._tasks: set[int] = set()  # graph tasks that have not ended
        self._to_measure: set[int] = set()  # rows of the parameters whose contributions _measure() looks at
        self._keeps = False  # whether the others are kept until the pass ends
        self._arrived: dict[int, Tensor | None] = {}  # by row: contributions that are to be copied; None for others
        self._measured: dict[int, Tensor] = {}  # by entry: what contributions to large tensors add to P or Q
        self._before: dict[int, Tensor] = {}  # .grad of sharded tensors before this backward
        self._expected: dict[int, Tensor] = {}  # samples of what .grad will be, of tensors with user hooks

    def finish(self) -> int:
        """The number of passes. A pass that has not been closed has ended by now, or has raised."""
        if self._engine_call is not None:
            if self._tasks:  # one has not ended: the backward has raised half-way
                self._end_pass()
            else:  # all contributions came from reentrant segments: nothing tells of the end of the outermost call
                self._close()
        passes = max(self.contributions.counts, default=0)
        if not passes:  # gradients that were written by hand
            self.world = self._finder.world
        return passes

    def unseen(self, params: Sequence[Tensor]) -> bool:
        """Whether one of these has a gradient that no hook has seen: it is new, unfrozen or of another type."""
        seen = {p for n, p in zip(self.contributions.counts, self.layout.params, strict=True) if n}
        return any(p.grad is not None and p not in seen for p in params)

    def refuse_uncounted(self, name: str) -> None:
        if self.compiled:
            self.compiled = False
            self.reset()
            raise NotImplementedError(
                f"{name} does not run under compiled autograd, which hides from hooks where a backward() ends: switch "
                "it off (torch._dynamo.config.compiled_autograd = False). torch.compile of the model itself is fine"
            )
        if self.overlapping:
            self.reset()
            raise RuntimeError(
                "backward() ran in several threads at the same time, so their contributions to .grad cannot be "
                "separated: run the backward passes of one step one after the other"
            )

    # While a backward runs --------------------------------------------------------------------------------------------

    def arrived(self, index: int, gradient: Tensor) -> None:
        if gradient.layout != torch.strided:
            return
        task = graph_task()
        if task not in self._tasks:
            self._begin(task, index)
        if index not in self._rows:
            # A lazy parameter has got its shape since: it joins the layout, in the middle of its first backward.
            reached = [self.layout.params[i] for i in self._arrived]
            if any(self.contributions.counts):
                raise RuntimeError(RESHAPED)
            self._lay_out()
            self._arrived = {self._rows[id(p)]: None for p in reached}
        row = self._rows[index]
        if row in self._to_measure:
            # Autograd copies a gradient that somebody else holds to .grad. One that nobody holds it moves there, where
            # DistributedDataParallel would overwrite it.
            self._measure(row, gradient.detach() if gradient.requires_grad else gradient)
        else:
            self._arrived[row] = gradient if self._keeps else None

    def begun(self, index: int) -> None:
        task = graph_task()
        if task not in self._tasks:
            self._begin(task, index)

    def reduced(self, index: int) -> None:
        row = self._rows[index]
        if graph_task() not in self._tasks:
            # It came through a leaf that begun() was not called for, so .grad before it is not known.
            self.contributions.counts[row] = 0
            self.begun(index)
        p = self.layout.params[row]
        gradient, before = piece_of(p.grad, p), self._before.get(row)  # type: ignore[arg-type]
        self._measure(row, gradient if before is None else gradient - before)

    def _measure(self, row: int, gradient: Tensor) -> None:
        """Measure a contribution to a large tensor; keep one to a small tensor until the pass ends."""
        p: Any = self.layout.params[row]
        e, again, earlier = self._entry_of[row], row in self._arrived, self._arrived.setdefault(row, None)
        gradient = piece_of(gradient, p)
        before = piece_of(p.grad.detach(), p) if self.world.alone and is_dense(p) else None
        if before is not None and p._post_accumulate_grad_hooks:
            # Such a hook may change .grad in the middle of a backward, where no snapshot tells of it.
            self._expected[row] = sample(before) + sample(gradient)
        if self.world.alone and self.layout.entries[e].merged:
            return
        if self.contributions.keeps_copies(e):
            self._arrived[row] = gradient if earlier is None else earlier + gradient
            return
        if before is None and self.world.alone:
            return  # the first contribution to this tensor
        value = self.contributions.measure(e, gradient, before)
        if again and e in self._measured:
            # Their sum is not that of the whole contribution, whose first part is gone.
            value = self._measured[e] + value
            warn = self._warn()
            if warn is not None and not self.overlapping:
                warn(SHARED)
        self._measured[e] = value

    def _begin(self, task: int, index: int) -> None:
        """A graph task has reached its first parameter: a pass begins, or a reentrant segment of the one that runs."""
        if torch.compiler.is_compiling():  # compiled autograd traces this
            self.compiled = True
            return
        with self._lock:  # two threads may begin or end a pass at the same time
            call, is_inner = outermost_engine_call()
            if self._engine_call is None or call is None or self._engine_call is not call:
                # Set before anything else, so that of two threads that begin at the same time one sees the other.
                earlier, thread = self._engine_call, self._thread
                self._engine_call, self._thread = call or True, threading.get_ident()
                if earlier is not None:
                    self.overlapping |= thread != self._thread and earlier is not True and is_running(earlier)
                    self.finish()
                    self._engine_call = call or True  # finish() has reset it
                self._start(index)
            elif self._keeps:  # reentrant segments may bring several gradients to a parameter
                self._to_measure = set(range(len(self.layout.params)))
            self._tasks.add(task)
            close: Callable[[], None] = lambda: self._task_ended(task, is_inner)  # noqa: E731
            if not self.world.alone:
                # DistributedDataParallel queues its wait for the all-reduce in the middle of backward, after this. A
                # callback that a callback queues runs after all that were queued before, so after that wait.
                first = close
                close = lambda: after_backward(first)  # noqa: E731
            after_backward(close)

    @without_graph
    def _start(self, index: int) -> None:
        # Nothing has been added to .grad yet.
        self.world = world = self._finder.world if is_distributed() else self._finder.here
        again, params = self.contributions.begin(world), self.layout.params
        if not again:
            self.origins = []  # of gradients that were thrown away
            if self._after_step:
                first: Any = params[self._rows.get(index, 0)]
                self.left_over = is_dense(first) and first.is_cpu and bool(piece_of(first.grad.detach(), first).any())
        self.origins.append(RUNNING.get(self._thread))
        if world.spread or (again and any(map(_user_hooks, params))):
            self._to_measure = set(range(len(params)))
        elif again or not world.alone:
            self._to_measure = self._large_rows
        self._keeps = not world.alone
        if world.spread:
            for i, p in enumerate(params):
                if p.grad is not None and world.reduces(p) and not world.waits(p):
                    self._before[i] = piece_of(p.grad, p).clone()

    @without_graph
    def _task_ended(self, task: int, is_inner: bool) -> None:
        with self._lock:
            if task not in self._tasks:
                return
            self._tasks.remove(task)  # the gradients of all ranks are averaged now
            # Also after an inner task: if the outermost one reaches no parameter itself, no callback tells of its end,
            # and the user may change .grad after it.
            if is_inner:
                self.contributions.take_snapshot()
            else:
                self._close(ends_now=True)

    def _close(self, *, ends_now: bool = False) -> None:
        """A pass has ended: what arrived is a contribution to each tensor that it has reached."""
        for i, expected in self._expected.items():
            p: Any = self.layout.params[i]
            error = (sample(piece_of(p.grad, p)) - expected).abs().max()
            self.contributions.distorted |= bool(
                error > 64 * torch.finfo(expected.dtype).eps * expected.abs().max()  # more than rounding
            )
        arrived, measured = self._arrived, self._measured
        self._end_pass()
        self.contributions.add(arrived, measured, ends_now=ends_now)


def _kind_of_lazy(p: Tensor) -> Any:
    return p.dtype, p.device, None if is_lazy(p) else p.shape


def is_dense(p: Tensor) -> bool:
    return p.grad is not None and p.grad.layout == torch.strided


class Listener:
    """Tells a recorder of the gradients of one parameter; does not keep it alive, because accumulators outlive it."""

    __slots__ = ("_index", "_recorder")

    def __init__(self, recorder: Any, index: int) -> None:
        self._recorder, self._index = weakref.ref(recorder), index

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Hook in front of the accumulator: a backward is about to add a gradient of this rank alone to ``.grad``."""
        recorder = self._recorder()
        if recorder is not None and gradients[0] is not None:
            recorder.arrived(self._index, gradients[0])

    def begun(self, *_: Any) -> None:
        """A backward is about to reach the parameter; its gradient will be known after :meth:`reduced`."""
        recorder = self._recorder()
        if recorder is not None:
            recorder.begun(self._index)

    def reduced(self, *_: Any) -> None:
        """The gradient, averaged over the ranks, was added to ``.grad``."""
        recorder = self._recorder()
        if recorder is not None:
            recorder.reduced(self._index)


def outermost_engine_call() -> tuple[FrameType | None, bool]:
    """The frame of the outermost call of autograd's engine on this thread, and whether another call is inside of it.

    Reentrant checkpointing nests calls. A graph task does not tell which other it is inside of; Python's stack does.
    On an accelerator hooks run in a thread of the device, whose stack begins there: reentrant segments count as passes
    of their own.
    """
    found, depth, frame = None, 0, sys._getframe(1)
    while frame is not None:
        if frame.f_code is _ENGINE:
            found, depth = frame, depth + 1
        frame = frame.f_back  # type: ignore[assignment]
    return found, depth > 1


def is_running(call: FrameType) -> bool:
    for frame in sys._current_frames().values():
        outer: FrameType | None = frame
        while outer is not None:
            if outer is call:
                return True
            outer = outer.f_back
    return False


def remove(taps: Sequence[Tap]) -> None:
    for tap in taps:
        tap.remove()
