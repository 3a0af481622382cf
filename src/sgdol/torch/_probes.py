"""The batch of one step, evaluated at other points: at probes, at the average, before the last step.

:mod:`sgdol.free` decides when, and what follows; here are the points.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol import free, probing
from sgdol.free import Settings, State
from sgdol.torch._operators import Operators
from sgdol.torch._passes import Passes
from sgdol.torch._rerun import Replay
from sgdol.torch._vectors import Layout, Vector

__all__ = ["MOVED", "Batch", "Evaluation", "Probes", "loss_of"]

MOVED = (
    "the parameters were changed by something else since the last step of SGDOLFree, which compares gradients at the "
    "points of its own steps. If the change was on purpose, call opt.moved() after clipping or projecting weights, and "
    "opt.restart() after loading other weights"
)


class Evaluation(NamedTuple):
    """What one evaluation of the batch gave."""

    loss: float
    """The mean over the ranks of the batch's loss; negative if it is maximised."""
    k: int
    """How many independent gradients there were."""
    layout: Layout
    operators: Operators
    """D of the step."""
    g: Vector
    """Their mean, as it is in ``.grad``; not to be written to..."""
    h: Vector
    """...and in the coordinates of D."""
    norm: float
    """||g||, in the metric..."""
    squares: float
    """...and the root of the sum of the squared norms of the k contributions to it."""
    clipped: float = 1.0
    """What the user has multiplied ``.grad`` by, if it was shortened after the passes; g is as it was before."""

    @property
    def signal(self) -> float:
        """u, an unbiased estimate of the square of the norm of the objective's gradient."""
        return (self.norm**2 - self.squares**2) * self.k / (self.k - 1)

    @property
    def finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.norm) and math.isfinite(self.squares)


ROUNDING = 1e-3
"""A GradScaler's factor is known to this share at least."""


class Batch:
    """The batch of one step, as calls that can be made again.

    Args:
        replays: the calls.
        closure: whether there is one, a closure that step() has been given; else they are calls of ``backward``.
    """

    def __init__(self, replays: list[Replay], *, closure: bool) -> None:
        self.replays, self.closure = replays, closure
        self.unit = 1.0
        """What the gradients of another evaluation are to be multiplied by: a GradScaler has divided the first."""

    @property
    def loss(self) -> Any:
        """What the first evaluation returned."""
        return _sum([replay.loss for replay in self.replays])

    def again(self) -> Any:
        """Evaluate it once more: the loss."""
        return _sum([replay.again() for replay in self.replays])

    def undo(self) -> None:
        """Take back what the first evaluation did to buffers."""
        for replay in reversed(self.replays):
            replay.undo()


class Probes:
    """Evaluates the batch of a step, and decides where the step starts from.

    Args:
        params: all parameters.
        passes: records the backward passes.
        sign: 1 to descend, -1 to ascend.
        layout_of: the layout of the parameters that take part, once a batch has left gradients: a method.
        settings: the constants.
    """

    def __init__(
        self,
        params: list[Tensor],
        passes: Passes,
        sign: float,
        layout_of: Callable[[], Layout],
        settings: Settings,
    ) -> None:
        self._passes, self._sign = passes, sign
        self._layout_of, self._settings = weakref.WeakMethod(layout_of), settings
        self._params = params
        self.count = 0
        """How many evaluations there were in this step."""

    # One evaluation ---------------------------------------------------------------------------------------------------

    def first(self, batch: Batch) -> None:
        """Evaluate the batch for the first time in a step, unless that has been done."""
        self.count = 0
        self._refuse_reshaped()
        if batch.closure:
            self._begin()
            with torch.enable_grad():
                batch.replays[0].first()
        else:
            self.count, self._passes.contributions.thrown_away = 1, False  # what was thrown away was an earlier batch

    def again(self, batch: Batch) -> Evaluation:
        """Evaluate the same batch where the parameters are now, so that nobody notices."""
        self._refuse_reshaped()
        self._begin()
        with torch.enable_grad():
            loss = loss_of(batch.again())
        if batch.unit != 1:
            torch._foreach_mul_([p.grad for p in self._params if p.grad is not None], batch.unit)
        return self.evaluation(loss)

    def given(self, batch: Batch, moved: bool) -> Evaluation:
        """The first evaluation, with what has happened to ``.grad`` between ``backward`` and ``step``.

        That was multiplied by a factor f = unit * clipped. With losses that were multiplied by s > 1 (GradScaler) and
        f s <= 1, the unit is 1/s, in which other evaluations have to be measured too; shorter gradients were clipped.

        Args:
            batch: of the step.
            moved: whether something else has moved this rank's parameters since the last step.
        """
        now = self.evaluation(loss_of(batch.loss), moved)
        factor, alike = (1.0, True) if batch.closure else self._passes.contributions.multiplied()
        if factor == 1 or not now.finite:
            return now
        if not alike:
            raise RuntimeError(
                "gradients of different tensors were multiplied by different factors between backward() and step(), as "
                "clipping tensor by tensor does, which SGDOLFree cannot repeat when it evaluates the batch at another "
                "point. clip_grad_norm_ of all parameters at once is right"
            )
        scale = batch.replays[0].scale
        if scale > 1 and factor * scale <= 1 + ROUNDING:
            batch.unit = 1 / scale
        elif factor > 1:
            batch.unit = factor
        clipped = factor / batch.unit
        if batch.unit != 1 and clipped > 1 - ROUNDING:
            return now
        g, h = ([x / clipped for x in v] for v in (now.g, now.h))
        return now._replace(g=g, h=h, norm=now.norm / clipped, squares=now.squares / clipped, clipped=clipped)

    def _refuse_reshaped(self) -> None:
        changed = self._passes.layout.reshaped()
        if changed is not None:
            index = next(i for i, p in enumerate(self._params) if p is changed[0])
            raise RuntimeError(
                f"parameter {index} is of {changed[0].shape} now, its saved state of {changed[1]}: call opt.restart(), "
                "which discards everything learned, to go on with the new shape"
            )

    def _begin(self) -> None:
        for p in self._params:
            p.grad = None
        self._passes.reset(used=True)
        self.count += 1

    def evaluation(self, loss: float, moved: bool = False) -> Evaluation:
        """What the last evaluation left, with this loss.

        Args:
            loss: of this rank's batch.
            moved: whether something else has moved this rank's parameters since the last step.
        """
        layout_of = self._layout_of()
        assert layout_of is not None
        passes = self._passes.finish()
        layout, world = layout_of(), self._passes.world
        if self._passes.contributions.thrown_away:
            raise RuntimeError(
                "gradients were set to zero between the backward passes of the closure, so that .grad is not their "
                "sum: call opt.zero_grad() once, before the first"
            )
        if passes * world.ranks < 2:
            raise RuntimeError(
                f"SGDOLFree needs at least two independent gradients per step, the closure ran backward() {passes} "
                "time(s). Split the batch: for x, y in zip(inputs.chunk(2), targets.chunk(2)): "
                "(criterion(model(x), y) / 2).backward()"
            )
        found = self._passes.contributions.take(layout, world, pooled=world.alone)
        squared, signal, k = float(found.squared), float(found.signal), found.k
        g = layout.copy(found.g) if world.overwrites else found.g
        # Q = n - u (k - 1)/k, which rounding may make negative where all but one contribution are 0.
        squares = max(0.0, squared - signal * (k - 1) / k) if math.isfinite(signal) else math.nan
        loss, anywhere = world.mean(loss * self._sign, float(moved))
        if anywhere:
            raise RuntimeError(MOVED)
        h = found.operators.turned(found.g)
        for operator, x in zip(found.operators, found.g, strict=True):
            if operator.turns:
                operator.hold(x, None)  # a vector that would be kept alive
        if g is not found.g:
            h = [copied if turned is x else turned for copied, turned, x in zip(g, h, found.g, strict=True)]
        return Evaluation(loss, k, layout, found.operators, g, h, root(squared), root(squares))

    @contextmanager
    def _elsewhere(self, go_back: Callable[[], None]) -> Iterator[list[bool]]:
        """Inside, the parameters may be moved; afterwards they go back, with their gradients, unless that is said."""
        gradients, stays = [(p, p.grad) for p in self._params], [False]
        if self._passes.world.overwrites:
            gradients = [(p, None if g is None else g.clone()) for p, g in gradients]
        try:
            yield stays
        finally:
            if not stays[0]:
                go_back()
                for p, gradient in gradients:
                    p.grad = gradient

    def _put(self, layout: Layout, x: Iterable[Tensor]) -> None:
        """Move the parameters to a point, of which one entry after the other is made."""
        own = layout.own()
        for e, part in enumerate(x):
            torch._foreach_copy_(own[layout.rows(e)], layout.parts(e, part))
        self._passes.world.reshard()

    def _swap(self, layout: Layout, kept: Vector) -> None:
        """Exchange where the parameters are and a point that is kept, one entry after the other."""
        own = layout.own()
        for e, x in enumerate(kept):
            point, rows = x.clone(), layout.rows(e)
            x.copy_(layout.entry([p.detach() for p in layout.params[rows]], e))
            torch._foreach_copy_(own[rows], layout.parts(e, point))
        self._passes.world.reshard()

    # Where the step starts from ---------------------------------------------------------------------------------------

    def advance(
        self, state: State, now: Evaluation, batch: Batch, vector: Callable[[str], Vector]
    ) -> tuple[State, Evaluation]:
        """Decide where to step from. The parameters are there afterwards, and its gradient is in ``.grad``.

        Args:
            state: what has been learned.
            now: the batch where the parameters are.
            batch: evaluates it again.
            vector: the optimizer's vector of this name: "average", "previous".
        """
        if state.updates == 0:
            if not now.finite or now.norm == 0:
                return state, now
            state = self._first_point(state, now, batch)
        elif free.alarm(state, now.loss, self._settings):
            state, now = self._guard(state, now, batch, vector("average"))
        state = free.judge_first(state, now.norm if now.finite else math.nan, self._settings)
        state, looks = free.wants_look_back(state, now.norm if now.finite else math.nan, self._settings)
        return self._look_back(state, now, batch, vector("previous")) if looks else (state, now)

    def _first_point(self, state: State, now: Evaluation, batch: Batch) -> State:
        """Check that the batch can be evaluated again, and measure M by differences of gradients along the first."""
        layout, D, x = now.layout, now.operators, now.layout.point()
        with self._elsewhere(lambda: self._put(layout, x)):
            self._refuse_another_batch(now, self.again(batch), batch)
            (square,) = self.products(layout, lambda e: [(x[e], D[e].flat(x[e]))])
            bracket = probing.first_probe(now.norm, root(square), now.loss)
            while not bracket.told and bracket.count < probing.DEFAULTS.probes:
                share = -self._sign * bracket.length / now.norm
                directions = (operator.back(operator.divided(h)) for operator, h in zip(D, now.h, strict=True))
                self._put(layout, (torch.add(a, b, alpha=share) for a, b in zip(x, directions, strict=True)))
                bracket = probing.next_probe(bracket, self._change(self.again(batch), now))
        return free.begin(state, bracket.curvature * now.norm, now.norm)

    def _guard(self, state: State, now: Evaluation, batch: Batch, average: Vector) -> tuple[State, Evaluation]:
        """The loss has jumped: go back to the average if this batch is fine there."""
        layout, x = now.layout, now.layout.point()
        with self._elsewhere(lambda: self._put(layout, x)) as stays:
            self._put(layout, average)
            found = self.again(batch)
            stays[0] = found.finite and bool(free.confirms(state, now.loss, found.loss, self._settings))
        return (free.roll_back(state, self._settings), found) if stays[0] else (state, now)

    def _look_back(self, state: State, now: Evaluation, batch: Batch, previous: Vector) -> tuple[State, Evaluation]:
        """Evaluate this batch before the last step as well, and stay there if the step was too long."""
        layout, D, x = now.layout, now.operators, previous
        self._swap(layout, previous)  # the memory of one point is enough for both: x is there now
        with self._elsewhere(lambda: self._swap(layout, previous)) as stays:
            found = self.again(batch)
            here = layout.gather([p.detach() for p in layout.params])

            def pairs(e: int) -> Iterator[tuple[Tensor, Tensor]]:
                s, y = torch.sub(x[e], here[e]), torch.sub(now.g[e], found.g[e])
                yield y, s
                yield found.g[e], s
                z = torch.sub(now.h[e], found.h[e]) if D[e].turns else y
                yield z, D[e].divided(z)
                t = D[e].turned(s)
                yield t, D[e].multiplied(t)

            ys, qs, yy, ss = self.products(layout, pairs)
            length = root(ss)
            if math.isfinite(found.loss) and math.isfinite(qs):
                per = self._sign / length if length > 0 else 0.0
                along = ys * per if now.finite else math.nan
                state, rejected = free.look_back(state, along, root(yy), length, qs * per, self._settings)
                stays[0] = bool(rejected)
        if not stays[0]:
            return state, now
        for kept, point in zip(previous, here, strict=True):
            kept.copy_(point)
        return state, found

    def _refuse_another_batch(self, now: Evaluation, again: Evaluation, batch: Batch) -> None:
        """Two evaluations at one point must be the same."""
        share = self._change(again, now)
        if not share <= max(_tolerance(p) for p in now.layout.params):
            who = "the closure" if batch.closure else "loss_fn, the function that backward() was given,"
            raise RuntimeError(
                f"{who} does not evaluate the same batch each time: called twice at the same point, with the same "
                f"random numbers of torch, its gradients differ by {share:.2g} of their length. Draw the batch outside "
                "of it; random augmentation that does not use torch's global generator belongs outside too, and what "
                "it reads besides its arguments must not change before step()"
            )

    def _change(self, a: Evaluation, b: Evaluation) -> float:
        """||g_a - g_b||/||g_b||, in the metric of b."""
        if not a.finite:
            return math.inf

        def pairs(e: int) -> Iterator[tuple[Tensor, Tensor]]:
            y = torch.sub(a.h[e], b.h[e])
            yield y, b.operators[e].divided(y)

        return root(*self.products(b.layout, pairs)) / b.norm

    def products(self, layout: Layout, pairs: Callable[[int], Iterable[tuple[Tensor, Tensor]]]) -> list[float]:
        """<a, b> of pairs of vectors, over all tensors and ranks.

        Args:
            layout: the parameters.
            pairs: makes the pairs of one entry: they are needed one after the other.
        """
        world = self._passes.world
        alone = not world.spread
        rows = [[layout.number(e, a, b, alone) for a, b in pairs(e)] for e in range(len(layout.entries))]
        columns = list(zip(*rows, strict=True))
        if alone:
            return [sum(column) for column in columns]
        return world.total(layout.params, torch.stack([torch.cat(column) for column in columns])).sum(1).tolist()


def _sum(losses: list[Any]) -> Any:
    return losses[0] if len(losses) == 1 else sum(losses[1:], losses[0])


def root(square: float) -> float:
    """The square root; of what is no square it is not a number."""
    return math.sqrt(square) if square >= 0 else math.nan


def loss_of(result: Any) -> float:
    """What a closure returned, as a number."""
    if isinstance(result, Tensor) and result.numel() == 1:
        return float(result.detach())
    if isinstance(result, Real) and not isinstance(result, bool):
        return float(result)
    raise TypeError(f"the closure must return the loss of the batch, a number or a tensor with one, got {result!r}")


def _tolerance(p: Tensor) -> float:
    """By how much two gradients of the same batch may differ: kernels on accelerators add in any order."""
    rounding = math.sqrt(torch.finfo(p.dtype).eps)
    return rounding if p.device.type == "cpu" else max(rounding, 0.01)
