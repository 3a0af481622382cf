"""Backward passes between two steps, each of them one independent gradient: one recorder for both optimizers.

A hook in front of a leaf's gradient accumulator sees what every backward brings before it is added to ``.grad`` and
before DistributedDataParallel averages it over the ranks. Of these contributions c_1, ..., c_k only their sum
S = ``.grad`` and Q = sum <c_i, D^-1 c_i> are needed (:mod:`sgdol.torch._contributions`). The first contribution *is*
``.grad`` until the second comes, so a loop with one backward per step pays for nothing. (Where ranks average their
gradients it is not, and is measured too.)
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
from sgdol.torch._world import ORDINARY, Finder, Tap, World, is_distributed, piece_of

__all__ = ["Passes"]

graph_task = torch._C._current_graph_task_id
after_backward = torch.autograd.Variable._execution_engine.queue_callback

_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_DENSE = torch.strided
_kind: Callable[[Tensor], Any] = attrgetter("dtype", "device", "shape")


class Passes:
    """Counts the backward passes that reach some parameters, and adds up the squares of what each of them brings.

    Args:
        params: all parameters, also lazy ones, which have no shape before their first forward.
        layout: makes the layout of those that have a shape and a gradient to come: a method.
        finder: knows the world, and so how gradients arrive.
        metrics: in which gradients are measured.
        warn: tells the user of a reentrant segment that cannot be measured: a method.
        earlier: a recorder of other parameters, whose passes this one goes on with.
    """

    known: Contributions
    """What is known of the contributions."""
    _used: bool
    origins: list[Replay | None]
    """The call of :func:`sgdol.torch.backward` that each pass belongs to: how to run it again."""

    def __init__(
        self,
        params: list[Tensor],
        layout: Callable[[], Layout],
        finder: Finder,
        metrics: Metrics,
        warn: Callable[[str], None],
        earlier: Passes | None = None,
    ) -> None:
        # Methods of an optimizer that has this recorder: it must not be kept alive by it.
        self._make_layout, self._warn = weakref.WeakMethod(layout), weakref.WeakMethod(warn)
        self._params, self._finder, self._metrics = params, finder, metrics
        self._taps = [Tap() for _ in params]
        self.world: World = finder.here
        """The world in which the last backward ran."""
        self._thread = 0
        self._lay_out()
        self.compiled = False
        self._clear()
        self.reset()
        self.watch()
        for i, p in enumerate(self.layout.params):
            # A gradient that is there before anybody watches is one contribution. Of one that is already averaged over
            # the ranks nobody knows any more what each rank had.
            if is_dense(p) and p.requires_grad and not (self.world.reduces(p) and self.world.waits(p)):
                self.known.found(i)
        if earlier is not None and any(earlier.known.counts):
            self._go_on_from(earlier)
        weakref.finalize(self, remove, self._taps)

    @torch.no_grad()
    def _go_on_from(self, earlier: Passes) -> None:
        """Take over what another recorder knows of the parameters that both have."""
        earlier.finish()
        self._used, self.world, self.origins = earlier._used, earlier.world, earlier.origins
        self.known.go_on_from(earlier.known)

    def _lay_out(self) -> None:
        make = self._make_layout()
        assert make is not None
        self.layout = make()
        self._rows = {id(p): i for i, p in enumerate(self.layout.params)}
        self._entry_of = [e for e, entry in enumerate(self.layout.entries) for _ in entry.sizes]
        merged = [self.layout.entries[e].merged for e in self._entry_of]
        self._merged = {key: i for key, i in self._rows.items() if merged[i]}
        self._reduces = [self._finder.here.reduces(p) for p in self.layout.params]
        self.known = Contributions(self.layout, self._metrics)
        # A lazy parameter has no shape, and asking each whether it is lazy takes as long as everything else here.
        self._kind = _kind_of_lazy if any(map(is_lazy, self._params)) else _kind
        self._kinds = list(map(self._kind, self._params))

    def watch(self) -> None:
        """Be in front of all accumulators: a parameter that was frozen or changed its type has a new one."""
        here = self._finder.here
        for p, tap in zip(self._params, self._taps, strict=True):
            if type(p) in ORDINARY and p.requires_grad and p.is_leaf and not here.spread:
                tap.attach(p, short_hook(self, id(p)))
            else:
                here.tap(p, tap, Listener(self, id(p)))

    def remove(self) -> None:
        """Stop watching."""
        remove(self._taps)

    def parameters_changed(self) -> bool:
        """True if a parameter's shape or type changed since :meth:`watch`, as when a lazy module was initialised."""
        return self._kinds != list(map(self._kind, self._params))

    def reset(self, *, used: bool = False) -> None:
        """Forget the passes: their gradients have been used, and may be there still, or were thrown away."""
        self._used, self.left_over = used, False
        self.known.thrown_away = not used and any(self.known.counts)
        self.overlapping = False
        """Whether backward passes ran in several threads at the same time."""
        self.origins = []
        if not self.known.fresh:
            self.known.forget()
        if self._open is not None:
            self._clear()

    def _clear(self) -> None:
        """No backward is running."""
        self._tasks: set[int] = set()
        self._task = -1  # the first of them
        self._open: Any = None
        self._told = False  # whether the end of the backward that is running will be told
        self._keeping = False
        self._direct: dict[int, int] = {}  # the rows of parameters whose gradients need no more than to be noted
        self._brought: dict[int, Tensor | None] = {}  # what it has brought, by row; None where .grad will tell
        self._lengths: dict[int, Tensor] = {}  # <c, D^-1 c> of what it has brought to large tensors
        self._previous: dict[int, Tensor] = {}  # .grad of sharded tensors before it
        self._expected: dict[int, Tensor] = {}  # a sample of what .grad will be, of tensors with hooks
        self._noted = False

    def finish(self) -> int:
        """How many passes there have been. A backward that has not told its end has ended by now, or has raised."""
        if self._open is not None:
            if self._told:  # it was to tell its end, so it has raised half-way
                self._clear()
            else:  # all that it has brought came from reentrant segments, whose ends tell nothing of its own
                self._close()
        passes = max(self.known.counts, default=0)
        if not passes:  # gradients that were written by hand
            self.world = self._finder.world
        return passes

    def unseen(self, params: Sequence[Tensor]) -> bool:
        """Whether one of these has a gradient that no hook has seen: it is new, unfrozen or of another type."""
        seen = {p for n, p in zip(self.known.counts, self.layout.params, strict=True) if n}
        return any(p.grad is not None and p not in seen for p in params)

    def refuse_uncounted(self, name: str) -> None:
        """Raise if passes went by uncounted: autograd was compiled, or several ran at the same time."""
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

    def _admit(self, index: int) -> None:
        """A lazy parameter has got its shape since: it joins the layout, in the middle of its first backward."""
        reached = [self.layout.params[i] for i in self._brought]
        if any(self.known.counts):
            raise RuntimeError(RESHAPED)
        self._lay_out()
        self._brought = {self._rows[id(p)]: None for p in reached}

    def arrived(self, index: int, gradient: Tensor) -> None:
        """This rank's own gradient arrives in the backward that runs now, and is about to be accumulated."""
        if gradient.layout != torch.strided:
            return
        task = graph_task()
        if task not in self._tasks:
            self._begin(task, index)
        if index not in self._rows:
            self._admit(index)
        row = self._rows[index]
        if not self._keeping or index in self._direct:
            self._brought[row] = gradient if self._keeping else None
        else:
            # A gradient that somebody holds is copied to .grad, not moved there, where DistributedDataParallel writes.
            self._keep(row, gradient.detach() if gradient.requires_grad else gradient)

    def begun(self, index: int) -> None:
        """A backward has reached a sharded parameter, whose gradient comes later."""
        task = graph_task()
        if task not in self._tasks:
            self._begin(task, index)

    def reduced(self, index: int) -> None:
        """A sharded parameter's gradient, averaged over the ranks, has been added to ``.grad``."""
        task = graph_task()
        if task not in self._tasks:
            self.known.counts[self._rows[index]] = 0  # through a leaf that nobody told of: what was added is not known
            self._begin(task, index)
        index = self._rows[index]
        p = self.layout.params[index]
        gradient, previous = piece_of(p.grad, p), self._previous.get(index)  # type: ignore[arg-type]
        if self._keeping:
            self._keep(index, gradient if previous is None else gradient - previous)
        else:
            self._brought[index] = None

    def _keep(self, index: int, gradient: Tensor) -> None:
        """Keep what is needed of a contribution: the gradient until the pass ends, or, of a large one, its length."""
        p: Any = self.layout.params[index]
        again = index in self._brought
        earlier = self._brought.setdefault(index, None)
        if not self.known.counts[index] and not self.world.waits(p):
            return  # the first: it is .grad
        if p._post_accumulate_grad_hooks and is_dense(p) and self.world.alone:
            # Such a hook may change .grad in the middle of a backward, where nothing else tells of it.
            self._expected[index] = sample(piece_of(p.grad.detach(), p)) + sample(piece_of(gradient, p))
        e = self._entry_of[index]
        if self.known.keeps(e):
            self._brought[index] = gradient if earlier is None else earlier + gradient
            return
        dtype = self.layout.entries[e].dtype
        before = piece_of(p.grad.detach(), p).to(dtype) if self.world.alone and is_dense(p) else None
        if before is None and self.world.alone:
            return  # nothing to be added to
        length = self.known.measure(e, piece_of(gradient, p).to(dtype), before=before)
        if again and index in self._lengths:
            length = self._lengths[index] + length
            warn = self._warn()
            if warn is not None and not self.overlapping:
                warn(SHARED)
        self._lengths[index] = length

    def _begin(self, task: int, index: int) -> None:
        """A graph task has reached its first parameter: a backward's own, or one that reentrant checkpointing began."""
        if torch.compiler.is_compiling():  # compiled autograd traces this
            self.compiled = True
            return
        call, inside = outermost()
        if self._open is None or call is None or self._open is not call:
            # Noted before anything else, so that of two threads that begin at the same time one sees the other.
            earlier, thread = self._open, self._thread
            self._open, self._thread = call or True, threading.get_ident()
            if earlier is not None:
                self.overlapping |= thread != self._thread and earlier is not True and is_running(earlier)
                with torch.no_grad():
                    self.finish()
                self._open = call or True
            with torch.no_grad():  # with create_graph=True .grad may have a graph
                self._start(index)
        if self._tasks:
            self._direct = {}  # reentrant segments may bring several gradients to a parameter
        else:
            self._task = task
        self._tasks.add(task)
        self._told |= not inside
        close: Callable[[], None] = lambda: self._ended(task, inside)  # noqa: E731
        if not self.world.alone:
            # The wrapper queues its wait for the all-reduce in the middle of backward: a callback that is queued by a
            # callback runs after it.
            first = close
            close = lambda: after_backward(first)  # noqa: E731
        after_backward(close)

    def _start(self, index: int) -> None:
        """A backward begins."""
        self.world = world = self._finder.world if is_distributed() else self._finder.here
        again = self.known.begin(world)
        if not again:
            self.origins = []  # of gradients that were thrown away
            if self._used:
                first: Any = self.layout.params[self._rows.get(index, 0)]
                self.left_over = is_dense(first) and first.is_cpu and bool(piece_of(first.grad.detach(), first).any())
        self.origins.append(RUNNING.get(threading.get_ident()))
        self._keeping = again or not world.alone
        if not self._keeping:
            self._direct = self._rows
        elif not world.spread and not any(p._post_accumulate_grad_hooks for p in self.layout.params):
            self._direct = self._merged
        if world.spread:
            for i, p in enumerate(self.layout.params):
                if self._reduces[i] and p.grad is not None and not world.waits(p):
                    self._previous[i] = piece_of(p.grad, p).clone()

    def _ended(self, task: int, inside: bool) -> None:
        """A graph task has ended, after every rank's gradients have been averaged."""
        if task not in self._tasks:
            return
        with torch.no_grad():
            if not inside:
                self._close()
            elif self._keeping:
                # The end of the outermost is told only if it brings something itself: this may be the last.
                self.known.note()
                self._noted = True

    def _close(self) -> None:
        """A backward has ended: what it brought is a contribution to each tensor that it has reached."""
        for i, expected in self._expected.items():
            p: Any = self.layout.params[i]
            error = (sample(piece_of(p.grad, p)) - expected).abs().max()
            self.known.bent |= bool(error > 64 * torch.finfo(expected.dtype).eps * expected.abs().max())
        brought, lengths, keeping, note = self._brought, self._lengths, self._keeping, not self._noted or self._told
        self._clear()
        self.known.add(brought, lengths, measure=keeping)
        if note:
            self.known.note(measure=keeping)


SHARED = (
    "a large parameter is used in several segments of reentrant activation checkpointing, so that one backward() "
    "brought it several gradients and the noise of this step is measured wrong. "
    "Use checkpoint(..., use_reentrant=False)."
)


def _kind_of_lazy(p: Tensor) -> Any:
    """What :data:`_kind` says of a parameter, of which some are lazy: these have no shape yet."""
    return p.dtype, p.device, None if is_lazy(p) else p.shape


def is_dense(p: Tensor) -> bool:
    """Whether a parameter has an ordinary gradient."""
    return p.grad is not None and p.grad.layout == torch.strided


# Hooks ----------------------------------------------------------------------------------------------------------------


class Listener:
    """What one parameter's hooks call; does not keep the recorder alive."""

    __slots__ = ("_index", "_recorder")

    def __init__(self, recorder: Passes, index: int) -> None:
        self._recorder, self._index = weakref.ref(recorder), index

    def arrived(self, gradient: Tensor) -> None:
        """A gradient arrives."""
        recorder = self._recorder()
        if recorder is not None:
            recorder.arrived(self._index, gradient)

    def begun(self) -> None:
        """A backward has begun."""
        recorder = self._recorder()
        if recorder is not None:
            recorder.begun(self._index)

    def reduced(self) -> None:
        """A gradient has been reduced."""
        recorder = self._recorder()
        if recorder is not None:
            recorder.reduced(self._index)


def short_hook(recorder: Passes, key: int) -> Callable[[tuple[Tensor | None, ...]], None]:
    """The hook of an ordinary leaf. It is called more often than anything else, so its usual way is short."""
    reference = weakref.ref(recorder)

    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        here, gradient = reference(), gradients[0]
        if here is None or gradient is None:
            return
        row = here._direct.get(key)
        if row is None or graph_task() != here._task or gradient.layout is not _DENSE:
            here.arrived(key, gradient)
        else:
            here._brought[row] = gradient if here._keeping else None

    return hook


def outermost() -> tuple[FrameType | None, bool]:
    """The outermost call of autograd's engine on this thread, and whether there is another inside of it.

    Reentrant checkpointing nests calls, and a graph task does not tell which other it is inside of; Python's stack
    does. (On an accelerator hooks run in a thread of the device, whose stack begins there: reentrant segments count as
    passes of their own.)
    """
    found, depth, frame = None, 0, sys._getframe(1)
    while frame is not None:
        if frame.f_code is _ENGINE:
            found, depth = frame, depth + 1
        frame = frame.f_back  # type: ignore[assignment]
    return found, depth > 1


def is_running(call: FrameType) -> bool:
    """Whether a call is on the stack of any thread."""
    for frame in sys._current_frames().values():
        there: FrameType | None = frame
        while there is not None:
            if there is call:
                return True
            there = there.f_back
    return False


def remove(taps: Sequence[Tap]) -> None:
    """Take hooks away."""
    for tap in taps:
        tap.remove()
