"""Backward passes between two steps, each of them one independent gradient: one recorder for both optimizers.

A hook in front of a leaf's gradient accumulator sees what every backward brings before it is added to ``.grad`` and
before DistributedDataParallel averages it over the ranks. Of these contributions c_1, ..., c_k only their sum
S = ``.grad`` and Q = sum <c_i, D^-1 c_i> are needed. The first contribution *is* ``.grad`` until the second comes, so a
loop with one backward per step pays for nothing. (Where ranks average their gradients it is not, and is measured too.)

Whatever multiplies ``.grad`` afterwards (GradScaler, ``clip_grad_norm_``) multiplies the contributions: ||S||^2 is taken
when a backward ends and again before it is used, and Q follows their ratio, which is exactly 1 if nobody wrote to
``.grad``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from sgdol.surrogate import symmetric_signal
from sgdol.torch._gradients import Gradients
from sgdol.torch._metric import Metrics, Operators
from sgdol.torch._vectors import Layout, Numbers, Vector, dot, sample
from sgdol.torch._world import ORDINARY, Finder, Own, Tap, World, piece_of

__all__ = ["Passes"]

_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_task_id = torch._C._current_graph_task_id

BENT = 1e-3
"""By how much the squared cosine of a gradient with what it was may miss 1: rounding in bfloat16 makes 1e-5."""


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
        self._lay_out()
        self._world: World = finder.here
        self._compiled = False
        self.reset()
        self.watch()
        for i, p in enumerate(self.layout.params):
            # A gradient that is there before anybody watches is one contribution. Of one that is already averaged over
            # the ranks nobody knows any more what each rank had.
            if _dense(p) and p.requires_grad and not (self._world.reduces(p) and self._world.waits(p)):
                self._counts[i] = 1
        if earlier is not None and any(earlier._counts):
            self._go_on_from(earlier)
        weakref.finalize(self, _remove, self._taps)

    @torch.no_grad()
    def _go_on_from(self, earlier: Passes) -> None:
        """Take over what another recorder knows of the parameters that both have."""
        earlier._finish()
        source, layout = earlier.layout, self.layout
        counts = dict(zip(source.params, earlier._counts, strict=True))
        self._counts = [counts.get(p, n) for p, n in zip(layout.params, self._counts, strict=True)]
        self._used, self._late, self._world = earlier._used, earlier._late, earlier._world
        squares = {}
        vectors: dict[Tensor, list[Tensor]] = {}
        for e, entry in enumerate(source.entries):
            params = source.params[entry.start : entry.stop]
            squares.update(dict.fromkeys(params, earlier._q.get(e)))
            for c in earlier._c.get(e, []):
                for p, part in zip(params, source.parts(e, c), strict=True):
                    vectors.setdefault(p, []).append(part)
        for e, entry in enumerate(layout.entries):
            params = layout.params[entry.start : entry.stop]
            if squares.get(params[0]) is not None:
                self._q[e] = squares[params[0]]
            count = max((len(vectors.get(p, ())) for p in params), default=0)
            parts = [[(vectors.get(p, []) + [None] * count)[i] for p in params] for i in range(count)]
            if count:
                self._c[e] = [layout.copied(e, layout.entry(some, e)) for some in parts]
        self._note()

    def _lay_out(self) -> None:
        make = self._make_layout()
        assert make is not None
        self.layout = make()
        self._rows = {id(p): i for i, p in enumerate(self.layout.params)}
        self._entry_of = [e for e, entry in enumerate(self.layout.entries) for _ in entry.sizes]
        self._reduces = [self._finder.here.reduces(p) for p in self.layout.params]
        self._counts = [0] * len(self.layout.params)
        self._kinds = self._kinds_now()

    def watch(self) -> None:
        """Be in front of all accumulators: a parameter that was frozen or changed its type has a new one."""
        here = self._finder.here
        for p, tap in zip(self._params, self._taps, strict=True):
            if type(p) in ORDINARY and p.requires_grad and p.is_leaf and not here.spread:
                tap.attach(p, _hook(self, id(p)))
            else:
                here.tap(p, tap, _Listener(self, id(p)))

    def remove(self) -> None:
        """Stop watching."""
        _remove(self._taps)

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
        self.bent = False
        """Whether a gradient was changed, after a backward, by more than a factor."""
        self._counts = [0] * len(self.layout.params)
        self._forget()
        self._clear()

    def _forget(self) -> None:
        """Nothing is known of contributions. They are kept as vectors where that is cheap, else as squares."""
        self._c: dict[int, list[Tensor]] = {}  # the contributions to small tensors, or to all while D is not known
        self._q: dict[int, Tensor] = {}  # <c, D^-1 c> of the other entries, summed over the contributions
        self._left: list[tuple[Tensor, Tensor]] = []  # what the last backward left: a sample, and ||S||^2 if large
        self._versions: list[tuple[int, int]] = []
        self._late = False  # whether D of the step is not known before its gradients are

    def _clear(self) -> None:
        """No backward is running."""
        self._tasks: set[int] = set()
        self._open: Any = None
        self._told = False  # whether the end of the backward that is running will be told
        self._keeping = False
        self._reached: dict[int, None] = {}
        self._own: dict[int, Tensor] = {}
        self._lengths: dict[int, Tensor] = {}
        self._previous: dict[int, Tensor] = {}
        self._expected: dict[int, Tensor] = {}
        self._noted = False

    @property
    def k(self) -> int:
        """How many passes there have been."""
        if self._open is not None:
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
                f"{name} does not run under compiled autograd, which hides from hooks where a backward() ends: switch it "
                "off (torch._dynamo.config.compiled_autograd = False). torch.compile of the model itself is fine"
            )
        if self.overlapping:
            self.reset()
            raise RuntimeError(
                "backward() ran in several threads at the same time, so that what each of them has added to .grad cannot "
                "be told: run the backward passes of one step one after the other"
            )

    # The gradients of a step ------------------------------------------------------------------------------------------

    def take(self, layout: Layout, *, pooled: bool = False) -> Gradients:
        """All gradients of these parameters, of all that are watched or of some, in the metric of the step.

        Args:
            layout: the parameters that take part.
            pooled: whether sums over all tensors are enough: numbers are Python's then.
        """
        if self._open is not None:
            self._finish()
        if not any(self._counts):  # gradients that were written by hand
            self._world = self._finder.world
        watched, world = self.layout, self._world
        s = watched.gradients()
        ratio = self._reconcile(s, final=True)
        k = max(*self._counts, 1) * world.ranks
        operators = self._metrics.operators(watched, s)
        self._adopt(s, operators)
        if pooled and layout is watched:
            left = self._left if operators.euclidean else []  # what was measured when the last backward ended
            n = watched.total(s, s, operators, [length for _, length in left])
            q = sum(self._entry_squares(e, operators) for e in range(len(s)))
            u = symmetric_signal(n, q, k)
            return Gradients(k, layout, operators, s, [n], [u], n, u)
        n, q = watched.products(s, s, operators), self._squares(operators)
        counts = self._counts
        if layout is not watched:
            s = layout.gradients()
            operators = self._metrics.operators(layout, s)
            n = layout.products(s, s, operators)
            q = layout.remapped(watched, q, n)  # of a parameter that nobody has watched: a single contribution
            rows = () if ratio is None else ratio
            known = dict(zip(watched.params, zip(counts, *rows, strict=True), strict=True))
            counts, *rows = zip(*(known.get(p, (0, *(layout.like for _ in rows))) for p in layout.params), strict=True)
            ratio = torch.stack([torch.stack(row) for row in rows]) if rows else None
        n, q, totals = self._over_ranks(layout, counts, n, q, ratio)
        u = [symmetric_signal(a, b, k) for a, b in zip(n, q, strict=True)]
        return Gradients(k, layout, operators, s, n, u, totals[0], symmetric_signal(*totals, k))

    def _entry_squares(self, e: int, operators: Operators) -> float:
        """Q of one entry, summed over its tensors."""
        if e in self._q:
            return self._q[e].sum().item()
        operator = operators[e]
        return sum(dot(c, operator.sharp(c)).item() for c in self._c.get(e, ()))

    def _squares(self, operators: Operators) -> Numbers:
        """Q of each tensor, and of each coordinate where these have step sizes of their own."""
        layout = self.layout
        numbers: list[Tensor] = []
        arrays: list[Tensor] = []
        for e, entry in enumerate(layout.entries):
            found = self._q.get(e)
            for c in self._c.get(e, ()):
                wide = layout.precision(e, c) if entry.coordinates else layout.like.dtype
                product = c.to(wide) * operators[e].sharp(c.to(wide) if entry.coordinates else c).to(wide)
                product = product if entry.coordinates else layout.sums(e, product)
                found = product if found is None else found + product
            if found is None:
                blank = torch.zeros(entry.shape, dtype=entry.dtype, device=entry.device)
                found = blank if entry.coordinates else layout.like.new_zeros(len(entry.sizes))
            (arrays if entry.coordinates else numbers).append(found)
        return [torch.cat(numbers) if numbers else layout.like.new_zeros(0), *arrays]

    def _over_ranks(
        self, layout: Layout, counts: Sequence[int], n: Numbers, q: Numbers, ratio: Tensor | None
    ) -> tuple[Numbers, Numbers, list[Tensor]]:
        """(n, Q) over all ranks, in the scale of ``.grad``, and their sums over everything.

        Args:
            layout: the parameters that take part.
            counts: how many passes have reached each.
            n: of this rank's pieces.
            q: of this rank's contributions.
            ratio: None, or [now, before], ||S||^2 of the pieces, by whose ratio over all ranks Q is still to be scaled.
        """
        world = self._world
        if world.ranks == 1 and not world.spread:
            return n, q, [layout.totals(x).sum() for x in (n, q)]
        rows = layout.totals(n)[None] if ratio is None else torch.cat([layout.totals(n)[None], ratio])
        seen = rows.new_tensor([min(count, 1) for count in counts])
        shared = world.share(layout.params, Own(rows, layout.totals(q), seen, list(q[1:]), max(self._counts)))
        # A gradient that no pass made on any rank, or that nobody averages over the ranks, is a single contribution.
        alone = shared.seen == 0
        if world.spread:
            alone |= ~torch.tensor([world.averages(p) for p in layout.params], device=alone.device)
        factor = torch.ones_like(seen) if ratio is None else _quotient(*shared.rows[1:])
        whole_n = shared.rows[0]
        whole_q = torch.where(alone, whole_n, shared.q * factor)
        arrays = _scaled(layout, [whole_q[layout.numbered], *shared.squares], factor)[1:]
        numbers = [[whole_n[layout.numbered], *n[1:]], [whole_q[layout.numbered], *arrays]]
        return *numbers, [whole_n.sum(), whole_q.sum()]

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
        task = _task_id()
        if task not in self._tasks:
            self._begin(task, index)
        if index not in self._rows:
            self._admit(index)
        index = self._rows[index]
        again = index in self._reached
        self._reached[index] = None
        if self._keeping:
            # A gradient that somebody holds is copied to .grad, not moved there: DistributedDataParallel overwrites that.
            self._keep(index, gradient.detach() if gradient.requires_grad else gradient, again)

    def begun(self, index: int) -> None:
        """A backward has reached a sharded parameter, whose gradient comes later."""
        task = _task_id()
        if task not in self._tasks:
            self._begin(task, index)

    def reduced(self, index: int) -> None:
        """A sharded parameter's gradient, averaged over the ranks, has been added to ``.grad``."""
        task = _task_id()
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
        p = self.layout.params[index]
        if not self._counts[index] and not self._world.waits(p):
            return  # the first: it is .grad
        if p._post_accumulate_grad_hooks and _dense(p) and self._world.ranks == 1 and not self._world.spread:
            # Such a hook may change .grad in the middle of a backward, where nothing else tells of it.
            self._expected[index] = sample(piece_of(p.grad.detach(), p)) + sample(piece_of(gradient, p))  # type: ignore[union-attr]
        e = self._entry_of[index]
        entry = self.layout.entries[e]
        if self._late or entry.merged or entry.coordinates:
            known = self._own.get(index)
            self._own[index] = gradient if known is None else known + gradient
            return
        c = piece_of(gradient, p).to(entry.dtype)
        length = self._metrics.operators(self.layout)[e].inner(c, c)
        if again and index in self._lengths:
            length = self._lengths[index] + length
            self._say(SHARED)
        self._lengths[index] = length

    def _begin(self, task: int, index: int) -> None:
        """A graph task has reached its first parameter: a backward's own, or one that reentrant checkpointing began."""
        if torch.compiler.is_compiling():  # compiled autograd traces this
            self._compiled = True
            return
        call, inside = _outermost()
        if self._open is None or call is None or self._open is not call:
            self.overlapping = self.overlapping or self._overlaps(call)
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
            close = lambda: _after_backward(first)  # noqa: E731
        _after_backward(close)

    def _overlaps(self, call: FrameType | None) -> bool:
        """Whether a backward begins while one of another thread has not ended."""
        if call is None or not isinstance(self._open, FrameType):
            return False
        for frame in sys._current_frames().values():
            there: FrameType | None = frame
            while there is not None and there is not self._open:
                there = there.f_back
            if there is not None:
                return True
        return False

    def _start(self, index: int) -> None:
        """A backward begins."""
        self._world = world = self._finder.world
        if any(self._counts):
            if self.layout.reshaped() is not None:
                raise self._reshaped()
            s = self.layout.gradients()
            # .grad.data.zero_() leaves the version as it is: then all is 0.
            if max(self._counts) > 1 or not self._untouched() or world.spread or not any(map(_nonzero, s)):
                self._reconcile(s)
        if any(self._counts):
            # The only contribution to a tensor is what is in .grad, until the second comes.
            self._adopt(s, None if self._late else self._metrics.operators(self.layout))
        else:
            self._forget()
            first = self.layout.params[self._rows.get(index, 0)]
            self.left_over = (
                self._used and _dense(first) and first.is_cpu and _nonzero(piece_of(first.grad.detach(), first))
            )
            self._late = not self._metrics.known(self.layout.params)
        self._keeping = world.ranks > 1 or world.spread or any(self._counts)
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
            elif (
                self._keeping
            ):  # the end of the outermost is told only if it brings something itself: this may be the last
                self._note()
                self._noted = True

    def _finish(self) -> None:
        """A backward that has not told its end has ended if all it brought came from inside; else it raised half-way."""
        if self._open is not None:
            if self._told:
                self._clear()
            else:
                self._close()

    def _close(self) -> None:
        """A backward has ended: what it brought is a contribution to each tensor that it has reached."""
        layout, counts = self.layout, self._counts
        for i, expected in self._expected.items():
            error = (sample(piece_of(layout.params[i].grad, layout.params[i])) - expected).abs().max()
            self.bent = self.bent or bool(error > 64 * torch.finfo(expected.dtype).eps * expected.abs().max())
        if self._keeping:
            self._add()
        for i in self._reached:
            counts[i] += 1
        noted, keeping = self._noted and not self._told, self._keeping
        self._clear()
        if keeping and not noted:
            self._note()
        elif not keeping:  # a first pass is not measured
            self._versions = [_version(p) for p in layout.params]

    def _add(self) -> None:
        """Add what the pass has brought to what is known of contributions."""
        layout = self.layout
        for e, entry in enumerate(layout.entries):
            if not entry.merged and entry.start in self._lengths:
                length = self._lengths[entry.start].to(layout.like.device).reshape(1)
                self._q[e] = self._q[e] + length if e in self._q else length
            elif any(i in self._own for i in range(entry.start, entry.stop)):
                c = layout.entry([self._own.get(i) for i in range(entry.start, entry.stop)], e)
                if entry.merged or self._late:
                    self._c.setdefault(e, []).append(layout.copied(e, c))
                else:
                    self._add_square(e, c, self._metrics.operators(layout))

    def _add_square(self, e: int, c: Tensor, operators: Operators) -> None:
        """Add <c, D^-1 c> of a large entry, of each coordinate if these have step sizes of their own."""
        layout = self.layout
        if layout.entries[e].coordinates:
            wide = layout.precision(e, c)
            square = c.to(wide) * operators[e].sharp(c.to(wide))
        else:
            square = operators[e].inner(c, c).to(layout.like.device).reshape(1)
        self._q[e] = self._q[e] + square if e in self._q else square

    def _note(self) -> None:
        """Note what a backward has left in ``.grad``: all of small gradients; a sample and the length of large ones."""
        layout = self.layout
        s = layout.gradients()
        lengths = [layout.like if entry.merged else dot(x, x) for entry, x in zip(layout.entries, s, strict=True)]
        self._left = list(zip(layout.sample(s), lengths, strict=True))
        self._versions = [_version(p) for p in layout.params]

    # Between backwards ------------------------------------------------------------------------------------------------

    def _untouched(self) -> bool:
        """Whether ``.grad`` is what the last backward left, as far as versions tell."""
        return self._versions == [_version(p) for p in self.layout.params]

    def _reconcile(self, s: Vector, *, final: bool = False) -> Tensor | None:
        """See what has happened to ``.grad`` since the last backward: a factor, or it has been thrown away.

        Args:
            s: what is in ``.grad``.
            final: whether no other backward follows. Sharded pieces are then left to the sum over all ranks that follows
                as well: returns [now, before] for it.
        """
        layout, world = self.layout, self._world
        host = layout.like.device.type == "cpu"
        if not world.spread and not self._changed(s):
            return None
        now = self._lengths_of(s)
        before = self._lengths_before(now)
        if host:
            self.bent = self.bent or self._is_bent(s)
        if world.spread:
            if final and not self._late:
                return torch.stack([now, before])
            now, before = world.total(layout.params, torch.stack([now, before])).unbind()
        ratio = _quotient(now, before)
        for e, entry in enumerate(layout.entries):
            mine = layout.spread(e, ratio[layout.rows(e)])
            if e in self._q:
                self._q[e] = self._q[e] * (mine.to(self._q[e]) if entry.coordinates else mine)
            for c in self._c.get(e, ()):
                c.mul_(mine.sqrt().to(c))
        if host:
            # A sum of contributions may be 0 by itself: it was thrown away if that is new.
            single = [n == 1 and not self._left for n in self._counts]
            rows = zip(self._counts, now.tolist(), before.tolist(), single, strict=True)
            gone = [n > 0 == square and (was > 0 or alone) for n, square, was, alone in rows]
            self._left = []  # it is not what the last backward left
            if any(gone):
                self.thrown_away = True
                self._counts = [0 if away else n for n, away in zip(self._counts, gone, strict=True)]
                for e, entry in enumerate(layout.entries):
                    if any(gone[entry.start : entry.stop]):
                        self._q.pop(e, None)
                        kept = torch.tensor([not away for away in gone[entry.start : entry.stop]], device=entry.device)
                        for c in self._c.get(e, ()):
                            c.mul_(layout.spread(e, kept))
        return None

    def _changed(self, s: Vector) -> bool:
        """Whether ``.grad`` is not what the last backward left."""
        if not self._left:
            return any(self._counts) and not (self._untouched() and any(map(_nonzero, s)))
        for (kept, length), x, entry in zip(self._left, s, self.layout.entries, strict=True):
            if kept.device.type != "cpu" or not torch.equal(kept, x if entry.merged else sample(x)):
                return True
            # Kernels that write without raising the version show in the sample, unless that is all 0.
            same = entry.merged or self._versions[entry.start] == _version(self.layout.params[entry.start])
            if not same or (not entry.merged and not kept.any() and not torch.equal(length, dot(x, x))):
                return True
        return False

    def _lengths_of(self, s: Vector) -> Tensor:
        """||S||^2 of each tensor, of this rank's pieces."""
        layout = self.layout
        rows = [
            layout.sums(e, x.to(layout.like.dtype).square()) if entry.merged else dot(x, x).to(layout.like.device)[None]
            for e, (entry, x) in enumerate(zip(layout.entries, s, strict=True))
        ]
        return torch.cat(rows)

    def _lengths_before(self, now: Tensor) -> Tensor:
        """The same of what the last backward left; that of a single contribution is what it is now."""
        layout = self.layout
        if not self._left:
            return now
        rows = [
            layout.sums(e, kept.to(layout.like.dtype).square()) if layout.entries[e].merged else length.to(now)[None]
            for e, (kept, length) in enumerate(self._left)
        ]
        return torch.cat(rows)

    def _adopt(self, s: Vector, operators: Operators | None) -> None:
        """Take what is in ``.grad`` of tensors with a single contribution, or written by hand, for that contribution."""
        layout, world, counts = self.layout, self._world, self._counts
        if min(counts, default=0) > 1:
            return
        for e, entry in enumerate(layout.entries):
            rows = range(entry.start, entry.stop)
            single = [counts[i] <= 1 and not (world.waits(layout.params[i]) and counts[i]) for i in rows]
            if not any(single):
                continue
            if not entry.merged and not self._late:
                self._q.pop(e, None)
                self._add_square(e, s[e], operators)  # type: ignore[arg-type]
            elif all(single):
                self._c[e] = [layout.copied(e, s[e])]
            else:
                mask = layout.spread(e, torch.tensor(single, device=entry.device))
                for number, c in enumerate(self._c.setdefault(e, [torch.zeros_like(s[e])])):
                    c.copy_(torch.where(mask, s[e] if number == 0 else torch.zeros_like(c), c))

    def _is_bent(self, s: Vector) -> bool:
        """Whether any gradient is no longer a multiple of what the last backward left. Only the host looks."""
        for e, ((old, _), new) in enumerate(zip(self._left, self.layout.sample(s), strict=False)):
            a, b = old.double(), new.double()
            entry = self.layout.entries[e]
            sums = [self.layout.sums(e, x) if entry.merged else x.sum().reshape(1) for x in (a * b, a * a, b * b)]
            cross, before, after = sums
            if bool(((cross.square() < (1 - BENT) * before * after) | ((before == 0) & (after > 0))).any()):
                return True
        return False

    def _say(self, message: str) -> None:
        warn = self._warn()
        if warn is not None:
            warn(message)


SHARED = (
    "a large parameter is used in several segments of reentrant activation checkpointing, so that one backward() brought "
    "it several gradients and the noise of this step is measured wrong. Use checkpoint(..., use_reentrant=False)."
)


class _Listener:
    """What one parameter's hooks call; does not keep the recorder alive."""

    __slots__ = ("_index", "_recorder")

    def __init__(self, recorder: Passes, index: int) -> None:
        self._recorder, self._index = weakref.ref(recorder), index

    def arrived(self, gradient: Tensor) -> None:
        recorder = self._recorder()
        if recorder is not None:
            recorder.arrived(self._index, gradient)

    def begun(self) -> None:
        recorder = self._recorder()
        if recorder is not None:
            recorder.begun(self._index)

    def reduced(self) -> None:
        recorder = self._recorder()
        if recorder is not None:
            recorder.reduced(self._index)


def _scaled(layout: Layout, q: Numbers, ratio: Tensor) -> Numbers:
    """Squares, multiplied by a ratio for each tensor."""
    factors = [ratio[layout.numbered], *(layout.spread(e, ratio[layout.rows(e)]) for e in layout.coordinates)]
    return [a * f.to(a) for a, f in zip(q, factors, strict=True)]


def _quotient(now: Tensor, before: Tensor) -> Tensor:
    """By what squares have been multiplied."""
    return torch.where(before > 0, now / torch.where(before > 0, before, 1), torch.ones_like(now))


def _hook(recorder: Passes, key: int) -> Callable[[tuple[Tensor | None, ...]], None]:
    """The hook of an ordinary leaf. It is called more often than anything else, so its usual way is short."""
    reference = weakref.ref(recorder)

    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        here, gradient = reference(), gradients[0]
        if here is None or gradient is None:
            return
        if here._keeping or _task_id() not in here._tasks or key not in here._rows:
            here.arrived(key, gradient)
        else:
            here._reached[here._rows[key]] = None

    return hook


def _version(p: Tensor) -> tuple[int, int]:
    """Which tensor ``.grad`` is, and how often it was written to."""
    grad = p.grad
    return (0, 0) if grad is None else (id(grad), grad._version)


def _dense(p: Tensor) -> bool:
    return p.grad is not None and p.grad.layout == torch.strided


def _nonzero(x: Tensor) -> bool:
    """Whether a gradient is not 0; an accelerator is not waited for."""
    return x.device.type != "cpu" or bool(x[(slice(0, 16),) * min(x.dim(), 1)].any()) or bool(x.any())


def _after_backward(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _outermost() -> tuple[FrameType | None, bool]:
    """The outermost call of autograd's engine on this thread, and whether there is another inside of it.

    Reentrant checkpointing nests calls, and a graph task does not tell which other it is inside of; Python's stack does.
    (On an accelerator hooks run in a thread of the device, whose stack begins there: reentrant segments count as passes
    of their own.)
    """
    found, depth, frame = None, 0, sys._getframe(1)
    while frame is not None:
        if frame.f_code is _ENGINE:
            found, depth = frame, depth + 1
        frame = frame.f_back  # type: ignore[assignment]
    return found, depth > 1


def _remove(taps: Sequence[Tap]) -> None:
    for tap in taps:
        tap.remove()
