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
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from sgdol.surrogate import symmetric_signal
from sgdol.torch._contributions import Contributions, quotient, scaled
from sgdol.torch._gradients import Gradients
from sgdol.torch._hooks import Listener, after_backward, graph_task, outermost, remove, short_hook
from sgdol.torch._metric import Metrics
from sgdol.torch._vectors import Layout, Numbers, Vector, sample
from sgdol.torch._world import ORDINARY, Finder, Own, Tap, World, piece_of

__all__ = ["Passes"]


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

    _counts: list[int]
    """How many passes have reached each tensor."""
    _known: Contributions
    _used: bool

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
        self._world: World = finder.here
        self._lay_out()
        self._compiled = False
        self.reset()
        self.watch()
        for i, p in enumerate(self.layout.params):
            # A gradient that is there before anybody watches is one contribution. Of one that is already averaged over
            # the ranks nobody knows any more what each rank had.
            if is_dense(p) and p.requires_grad and not (self._world.reduces(p) and self._world.waits(p)):
                self._counts[i] = 1
        if earlier is not None and any(earlier._counts):
            self._go_on_from(earlier)
        weakref.finalize(self, remove, self._taps)

    @torch.no_grad()
    def _go_on_from(self, earlier: Passes) -> None:
        """Take over what another recorder knows of the parameters that both have."""
        earlier._finish()
        counts = dict(zip(earlier.layout.params, earlier._counts, strict=True))
        self._counts = [counts.get(p, n) for p, n in zip(self.layout.params, self._counts, strict=True)]
        self._used, self._world = earlier._used, earlier._world
        self._known.go_on_from(earlier._known)

    def _lay_out(self) -> None:
        make = self._make_layout()
        assert make is not None
        self.layout = make()
        self._rows = {id(p): i for i, p in enumerate(self.layout.params)}
        self._entry_of = [e for e, entry in enumerate(self.layout.entries) for _ in entry.sizes]
        self._reduces = [self._finder.here.reduces(p) for p in self.layout.params]
        self._counts = [0] * len(self.layout.params)
        self._known = Contributions(self.layout, self._metrics)
        self._kinds = self._kinds_now()

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
        return self._kinds != self._kinds_now()

    def _kinds_now(self) -> list[Any]:
        return [(p.dtype, p.device, None if is_lazy(p) else p.shape) for p in self._params]

    def reset(self, *, used: bool = False) -> None:
        """Forget the passes: their gradients have been used, and may be there still, or were thrown away."""
        self._used, self.left_over = used, False
        self.thrown_away = not used and any(self._counts)
        """Whether gradients of passes were thrown away."""
        self.overlapping = False
        """Whether backward passes ran in several threads at the same time."""
        self._calls: dict[int, FrameType | None] = {}  # of autograd's engine, by thread
        self._counts = [0] * len(self.layout.params)
        self._known.forget()
        self._clear()

    @property
    def world(self) -> World:
        """The world in which the last backward ran."""
        return self._world

    @property
    def bent(self) -> bool:
        """Whether a gradient was changed, after a backward, by more than a factor."""
        return self._known.bent

    def _clear(self) -> None:
        """No backward is running."""
        self._tasks: set[int] = set()
        self._open: Any = None
        self._told = False  # whether the end of the backward that is running will be told
        self._keeping = False
        self._reached: dict[int, None] = {}
        self._own: dict[int, Tensor] = {}  # what it has brought, by tensor
        self._lengths: dict[int, Tensor] = {}  # <c, D^-1 c> of what it has brought to large tensors
        self._previous: dict[int, Tensor] = {}  # .grad of sharded tensors before it
        self._expected: dict[int, Tensor] = {}  # a sample of what .grad will be, of tensors with hooks
        self._noted = False

    @property
    def k(self) -> int:
        """How many passes there have been."""
        self._finish()
        return max(self._counts, default=0)

    def unseen(self, params: Sequence[Tensor]) -> bool:
        """Whether one of these has a gradient that no hook has seen: it is new, unfrozen or of another type."""
        if len(params) == len(self._counts) and all(self._counts):
            return False
        seen = {p for n, p in zip(self._counts, self.layout.params, strict=True) if n}
        return any(p.grad is not None and p not in seen for p in params)

    def refuse_uncounted(self, name: str) -> None:
        """Raise if passes went by uncounted: autograd was compiled, or several ran at the same time."""
        if self._compiled:
            self._compiled = False
            self.reset()
            raise NotImplementedError(
                f"{name} does not run under compiled autograd, which hides from hooks where a backward() ends: switch "
                "it off (torch._dynamo.config.compiled_autograd = False). torch.compile of the model itself is fine"
            )
        if self.overlapping:
            self.reset()
            raise RuntimeError(
                "backward() ran in several threads at the same time, so that what each of them has added to .grad "
                "cannot be told: run the backward passes of one step one after the other"
            )

    # The gradients of a step ------------------------------------------------------------------------------------------

    def take(self, layout: Layout, *, pooled: bool = False) -> Gradients:
        """All gradients of these parameters, of all that are watched or of some, in the metric of the step.

        Args:
            layout: the parameters that take part.
            pooled: whether sums over all tensors are enough: numbers are Python's then.
        """
        self._finish()
        if not any(self._counts):  # gradients that were written by hand
            self._world = self._finder.world
        watched, known = self.layout, self._known
        s = watched.gradients()
        pieces = self._follow(s, final=True)
        k = max(*self._counts, 1) * self._world.ranks
        operators = self._metrics.operators(watched, s, layout.params)
        known.adopt(s, self._single(), operators)
        # ||S||^2 of large tensors was measured when the last backward ended, and is known not to have changed since.
        lengths = known.lengths if operators.euclidean and not self._world.spread else []
        if pooled and layout is watched:
            total = watched.total(s, s, operators, lengths)
            signal = symmetric_signal(total, known.total(operators), k)
            return Gradients(k, layout, operators, s, [total], [signal], total, signal)
        counts, q = self._counts, known.squares(operators)
        if layout is watched:
            n = watched.products(s, s, operators, lengths)
        else:
            s = layout.gradients()
            operators = self._metrics.operators(layout, s)
            n = layout.products(s, s, operators)
            q = layout.remapped(watched, q, n)  # of a parameter that nobody has watched: a single contribution
            rows = {p: i for i, p in enumerate(watched.params)}
            counts = [counts[rows[p]] if p in rows else 0 for p in layout.params]
            if pieces is not None:
                blank = torch.zeros_like(pieces[:, 0])
                pieces = torch.stack([pieces[:, rows[p]] if p in rows else blank for p in layout.params], dim=1)
        n, q, (square, squares) = self._over_ranks(layout, counts, n, q, pieces)
        u = [symmetric_signal(a, b, k) for a, b in zip(n, q, strict=True)]
        return Gradients(k, layout, operators, s, n, u, square, symmetric_signal(square, squares, k))

    def _follow(self, s: Vector, *, final: bool = False) -> Tensor | None:
        """Follow what has happened to ``.grad`` since the last backward; see :meth:`Contributions.follow`."""
        if not any(self._counts):
            return None
        gone, pieces = self._known.follow(s, self._counts, self._world, final=final)
        if any(gone):
            self.thrown_away = True
            self._counts = [0 if away else n for n, away in zip(self._counts, gone, strict=True)]
        return pieces

    def _single(self) -> list[bool]:
        """Which tensors have a single contribution, which is ``.grad``, or a gradient that was written by hand."""
        if min(self._counts, default=0) > 1:
            return [False] * len(self._counts)
        waits = self._world.waits
        return [n <= 1 and not waits(p) for n, p in zip(self._counts, self.layout.params, strict=True)]

    def _over_ranks(
        self, layout: Layout, counts: Sequence[int], n: Numbers, q: Numbers, pieces: Tensor | None
    ) -> tuple[Numbers, Numbers, tuple[Tensor, Tensor]]:
        """(n, Q) over all ranks, in the scale of ``.grad``, and their sums over everything.

        Args:
            layout: the parameters that take part.
            counts: how many passes have reached each.
            n: of this rank's pieces.
            q: of this rank's contributions.
            pieces: None, or [now, before], ||S||^2 of pieces, by whose ratio over all ranks Q is still to be scaled.
        """
        world = self._world
        if world.ranks == 1 and not world.spread:
            return n, q, (layout.totals(n).sum(), layout.totals(q).sum())
        rows = layout.totals(n)[None] if pieces is None else torch.cat([layout.totals(n)[None], pieces])
        seen = rows.new_tensor([min(count, 1) for count in counts])
        shared = world.share(layout.params, Own(rows, layout.totals(q), seen, list(q[1:]), max(self._counts)))
        # A gradient that no pass made on any rank, or that nobody averages over the ranks, is a single contribution.
        alone = shared.seen == 0
        if world.spread:
            alone |= ~torch.tensor([world.averages(p) for p in layout.params], device=alone.device)
        factor = torch.ones_like(seen) if pieces is None else quotient(shared.rows[1], shared.rows[2])
        whole_n = shared.rows[0]
        whole_q = torch.where(alone, whole_n, shared.q * factor)
        arrays = scaled(layout, [whole_q[layout.numbered], *shared.squares], factor)[1:]
        n, q = [whole_n[layout.numbered], *n[1:]], [whole_q[layout.numbered], *arrays]
        return n, q, (whole_n.sum(), whole_q.sum())

    # While a backward runs --------------------------------------------------------------------------------------------

    def _admit(self, index: int) -> None:
        """A lazy parameter has got its shape since: it joins the layout, in the middle of its first backward."""
        reached = [self.layout.params[i] for i in self._reached]
        if any(self._counts):
            raise self._reshaped()
        self._lay_out()
        self._reached = {self._rows[id(p)]: None for p in reached}

    def _reshaped(self) -> RuntimeError:
        return RuntimeError(
            "parameters or their gradients got another shape or type between the backward passes of one step: call "
            "zero_grad() of the optimizer after replacing a parameter's data"
        )

    def arrived(self, index: int, gradient: Tensor) -> None:
        """This rank's own gradient arrives in the backward that runs now, and is about to be accumulated."""
        if gradient.layout != torch.strided:
            return
        task = graph_task()
        if task not in self._tasks:
            self._begin(task, index)
        if index not in self._rows:
            self._admit(index)
        index = self._rows[index]
        again = index in self._reached
        self._reached[index] = None
        if self._keeping:
            # A gradient that somebody holds is copied to .grad, not moved there, where DistributedDataParallel writes.
            self._keep(index, gradient.detach() if gradient.requires_grad else gradient, again)

    def begun(self, index: int) -> None:
        """A backward has reached a sharded parameter, whose gradient comes later."""
        task = graph_task()
        if task not in self._tasks:
            self._begin(task, index)

    def reduced(self, index: int) -> None:
        """A sharded parameter's gradient, averaged over the ranks, has been added to ``.grad``."""
        task = graph_task()
        if task not in self._tasks:
            self._counts[self._rows[index]] = 0  # through a leaf that nobody told of: what was added is not known
            self._begin(task, index)
        index = self._rows[index]
        p = self.layout.params[index]
        gradient, previous = piece_of(p.grad, p), self._previous.get(index)  # type: ignore[arg-type]
        again = index in self._reached
        self._reached[index] = None
        if self._keeping:
            self._keep(index, gradient if previous is None else gradient - previous, again)

    def _keep(self, index: int, gradient: Tensor, again: bool) -> None:
        """Keep what is needed of a contribution: the gradient until the pass ends, or, of a large one, its length."""
        p: Any = self.layout.params[index]
        if not self._counts[index] and not self._world.waits(p):
            return  # the first: it is .grad
        if p._post_accumulate_grad_hooks and is_dense(p) and self._world.ranks == 1 and not self._world.spread:
            # Such a hook may change .grad in the middle of a backward, where nothing else tells of it.
            self._expected[index] = sample(piece_of(p.grad.detach(), p)) + sample(piece_of(gradient, p))
        e = self._entry_of[index]
        if self._known.keeps(e):
            known = self._own.get(index)
            self._own[index] = gradient if known is None else known + gradient
            return
        c = piece_of(gradient, p).to(self.layout.entries[e].dtype)
        length = self._metrics.operators(self.layout)[e].inner(c, c)
        if again and index in self._lengths:
            length = self._lengths[index] + length
            warn = self._warn()
            if warn is not None and not self.overlapping:
                warn(SHARED)
        self._lengths[index] = length

    def _begin(self, task: int, index: int) -> None:
        """A graph task has reached its first parameter: a backward's own, or one that reentrant checkpointing began."""
        if torch.compiler.is_compiling():  # compiled autograd traces this
            self._compiled = True
            return
        call, inside = outermost()
        if self._open is None or call is None or self._open is not call:
            # Before looking at other threads, so that of two that begin at the same time at least one sees the other.
            self._calls[threading.get_ident()] = call
            if self._overlaps():
                self.overlapping = True
            if torch.is_grad_enabled():  # create_graph=True: .grad may have a graph
                with torch.no_grad():
                    self._finish()
                    self._start(index)
            else:
                self._finish()
                self._start(index)
            self._open = call or True
        self._tasks.add(task)
        self._told |= not inside
        close: Callable[[], None] = lambda: self._ended(task, inside)  # noqa: E731
        if self._world.ranks > 1 or self._world.spread:
            # The wrapper queues its wait for the all-reduce in the middle of backward: a callback that is queued by a
            # callback runs after it.
            first = close
            close = lambda: after_backward(first)  # noqa: E731
        after_backward(close)

    def _overlaps(self) -> bool:
        """Whether another thread is inside of a backward that has brought something."""
        others = [call for thread, call in self._calls.items() if thread != threading.get_ident() and call is not None]
        for frame in sys._current_frames().values() if others else ():
            there: FrameType | None = frame
            while there is not None:
                if any(there is call for call in others):
                    return True
                there = there.f_back
        return False

    def _start(self, index: int) -> None:
        """A backward begins."""
        self._world = world = self._finder.world
        if any(self._counts):
            if self.layout.reshaped() is not None:
                raise self._reshaped()
            s = self.layout.gradients()
            self._follow(s)
        if any(self._counts):
            # The only contribution to a tensor is what is in .grad, until the second comes.
            operators = None if self._known.late else self._metrics.operators(self.layout)
            self._known.adopt(s, self._single(), operators)
        else:
            self._known.forget()
            self._known.late = not self._metrics.known(self.layout.params)
            if self._used:
                first: Any = self.layout.params[self._rows.get(index, 0)]
                self.left_over = is_dense(first) and first.is_cpu and bool(piece_of(first.grad.detach(), first).any())
        self._keeping = world.ranks > 1 or world.spread or any(self._counts)
        if world.spread:
            for i, p in enumerate(self.layout.params):
                if self._reduces[i] and p.grad is not None and not world.waits(p):
                    self._previous[i] = piece_of(p.grad, p).clone()

    def _ended(self, task: int, inside: bool) -> None:
        """A graph task has ended, after every rank's gradients have been averaged."""
        if not inside:
            self._calls.pop(threading.get_ident(), None)
        if task not in self._tasks:
            return
        with torch.no_grad():
            if not inside:
                self._close()
            elif self._keeping:
                # The end of the outermost is told only if it brings something itself: this may be the last.
                self._known.note()
                self._noted = True

    def _finish(self) -> None:
        """A backward that has not told its end has ended if all came from inside; else it raised half-way."""
        if self._open is not None:
            if self._told:
                self._clear()
            else:
                self._close()

    def _close(self) -> None:
        """A backward has ended: what it brought is a contribution to each tensor that it has reached."""
        for i, expected in self._expected.items():
            p: Any = self.layout.params[i]
            error = (sample(piece_of(p.grad, p)) - expected).abs().max()
            self._known.bent |= bool(error > 64 * torch.finfo(expected.dtype).eps * expected.abs().max())
        if self._keeping:
            self._known.add(self._own, self._lengths)
        for i in self._reached:
            self._counts[i] += 1
        if not self._noted or self._told:
            self._known.note(measure=self._keeping)
        self._clear()


SHARED = (
    "a large parameter is used in several segments of reentrant activation checkpointing, so that one backward() "
    "brought it several gradients and the noise of this step is measured wrong. "
    "Use checkpoint(..., use_reentrant=False)."
)


def is_dense(p: Tensor) -> bool:
    """Whether a parameter has an ordinary gradient."""
    return p.grad is not None and p.grad.layout == torch.strided
