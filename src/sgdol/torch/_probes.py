"""Evaluations of the batch of one step: where the parameters are, at probes, at the average, before the last step.

:mod:`sgdol.free` decides when the batch is evaluated at another point and what follows from the result. This module
moves the parameters there, runs the batch again, and moves them back.
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
from sgdol.torch._vectors import Layout, Vector, product

__all__ = ["MOVED", "Batch", "Evaluation", "Probes", "loss_of"]

MOVED = (
    "the parameters were changed by something else since the last step of SGDOLFree, which compares gradients at the "
    "points of its own steps. If the change was on purpose, call opt.moved() after clipping or projecting weights, and "
    "opt.restart() after loading other weights"
)


class Evaluation(NamedTuple):
    """The result of one evaluation of the batch."""

    loss: float  # mean over the ranks; with maximize, times -1
    k: int  # independent gradients
    layout: Layout
    operators: Operators  # D of the step
    g: Vector  # the mean of the k gradients; read-only, it may share memory with .grad
    h: Vector  # g in the coordinates of D
    norm: float  # ||g|| = <g, D^-1 g>^(1/2)
    squares: float  # Q^(1/2), where Q is the sum of ||c_i||^2 over the k contributions c_i to g
    clipped: float = 1.0  # the factor by which the user has shortened .grad after the passes; g is without it

    @property
    def signal(self) -> float:
        """Signal u = (||g||^2 - Q) k/(k - 1), an unbiased estimate of the squared norm of the objective's gradient."""
        return (self.norm**2 - self.squares**2) * self.k / (self.k - 1)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm) and math.isfinite(self.squares)


ROUNDING = 1e-3  # relative error up to which the measured factor of .grad is that of a GradScaler


class Batch:
    """The batch of one step, as calls that can be repeated.

    Args:
        replays: calls of :func:`sgdol.torch.backward`, or the single call of the closure.
        closure: True if ``step()`` was given a closure.
    """

    def __init__(self, replays: list[Replay], *, closure: bool) -> None:
        self.replays, self.closure = replays, closure
        # Gradients of further evaluations are multiplied by this, as a GradScaler's unscale_() did with the first.
        self.unit = 1.0

    @property
    def loss(self) -> Any:
        first, *others = [replay.loss for replay in self.replays]
        return sum(others, first)

    def again(self) -> Any:
        first, *others = [replay.again() for replay in self.replays]
        return sum(others, first)

    def undo(self) -> None:
        # Buffers go back to what they were before the first evaluation.
        for replay in reversed(self.replays):
            replay.undo()


class Probes:
    """Evaluates the batch of a step at one or more points, and decides where the step starts from.

    Args:
        params: all parameters of the optimizer.
        passes: the recorder of backward passes.
        sign: 1 to descend, -1 to ascend.
        layout_of: a method of the optimizer that returns the layout of the parameters which take part in the step. It
            is called when the batch has left gradients.
        settings: the constants of the algorithm.
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
        # Weak, because the optimizer has this object: a cycle would keep its memory until the garbage is collected.
        self._layout_of, self._settings = weakref.WeakMethod(layout_of), settings
        self._params = params
        self.count = 0  # evaluations in this step

    # One evaluation ---------------------------------------------------------------------------------------------------

    def run_first(self, batch: Batch) -> None:
        self.count = 0
        if batch.closure:
            self._refuse_reshaped()
            self._begin()
            with torch.enable_grad():
                batch.replays[0].first()
        else:  # backward() has evaluated it; if gradients were thrown away, they were those of an earlier batch
            self.count, self._passes.contributions.thrown_away = 1, False

    def evaluate_again(self, batch: Batch) -> Evaluation:
        """Evaluate the batch where the parameters are now, with the random numbers and buffers of the first time."""
        self._refuse_reshaped()
        self._begin()
        with torch.enable_grad():
            loss = loss_of(batch.again())
        if batch.unit != 1:
            torch._foreach_mul_([p.grad for p in self._params if p.grad is not None], batch.unit)
        return self._evaluation(loss)

    def first_evaluation(self, batch: Batch, moved: bool) -> Evaluation:
        """The result of the first evaluation, whose gradients were multiplied by f before ``step()`` was called.

        f = unit * clipped. A GradScaler multiplies losses by s > 1, which further evaluations repeat, and gradients by
        unit = 1/s, which they have to repeat, too. The rest of f is clipping, which concerns the step alone.

        Args:
            batch: the batch of the step.
            moved: True if something else moved this rank's parameters since the last step.
        """
        now = self._evaluation(loss_of(batch.loss), moved)
        # A closure clips within each evaluation, if it does.
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

    def _evaluation(self, loss: float, moved: bool = False) -> Evaluation:
        # Of the passes that have just run. The arguments are this rank's.
        layout_of = self._layout_of()
        assert layout_of is not None
        passes = self._passes.finish()
        layout, world = layout_of(), self._passes.world
        if layout is not self._passes.layout:
            self._refuse_reshaped()
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
        gradients = self._passes.contributions.take(layout, world, pooled=world.alone)
        squared, signal, k = float(gradients.squared), float(gradients.signal), gradients.k
        # DistributedDataParallel's next backward writes to the memory of .grad.
        g = layout.copy(gradients.g) if world.overwrites else gradients.g
        # Q = n - u (k - 1)/k, which rounding may make negative where all but one contribution are 0.
        squares = max(0.0, squared - signal * (k - 1) / k) if math.isfinite(signal) else math.nan
        loss, moved_anywhere = world.mean(loss * self._sign, float(moved))
        if moved_anywhere:  # known to all ranks: if one of them raised alone, the others would wait for it
            raise RuntimeError(MOVED)
        h = gradients.operators.turned(gradients.g)
        for operator, x in zip(gradients.operators, gradients.g, strict=True):
            if operator.turns:
                operator.cache_turned(x, None)  # the cache would keep a vector of the model's size alive
        if g is not gradients.g:  # where D does not rotate, h is g, and has to be the copy of it
            h = [copied if turned is x else turned for copied, turned, x in zip(g, h, gradients.g, strict=True)]
        return Evaluation(loss, k, layout, gradients.operators, g, h, root(squared), root(squares))

    @contextmanager
    def _parameters_moved(self, move_back: Callable[[], None]) -> Iterator[list[bool]]:
        """Context manager: inside, the parameters are moved; at the end they and their gradients are put back.

        It yields a list: set ``stay[0] = True`` to leave the parameters and gradients as they are at the end.
        """
        gradients, stay = [(p, p.grad) for p in self._params], [False]
        if self._passes.world.overwrites:
            gradients = [(p, None if g is None else g.clone()) for p, g in gradients]
        try:
            yield stay
        finally:
            if not stay[0]:
                move_back()
                for p, gradient in gradients:
                    p.grad = gradient

    def _put(self, layout: Layout, x: Iterable[Tensor]) -> None:
        layout.put(x)
        self._passes.world.reshard()

    def _step_back(self, layout: Layout, step: Vector) -> None:
        """The parameters x and the last step s become x - s and x: so x is kept, and no other vector is needed."""

        def points() -> Iterator[Tensor]:
            for e, s in enumerate(step):
                x = layout.here(e)
                before = torch.sub(x, s)
                s.copy_(x)  # now, because x may be the memory that is written to next
                yield before

        self._put(layout, points())

    def _step_forth(self, layout: Layout, x: Vector) -> None:
        """The reverse: the parameters are x again, to the last bit, and x becomes the step from where they were."""

        def points() -> Iterator[Tensor]:
            for e, point in enumerate(x):
                s = torch.sub(point, layout.here(e))
                yield point
                point.copy_(s)

        self._put(layout, points())

    # Where the step starts from ---------------------------------------------------------------------------------------

    def choose_start(self, state: State, now: Evaluation, batch: Batch) -> tuple[State, Evaluation]:
        """Decide where the step starts from, move the parameters there, and leave the gradient there in ``.grad``.

        Args:
            state: what has been learned so far.
            now: the batch evaluated where the parameters are.
            batch: the batch, to be evaluated again.

        Returns:
            The new state, and the batch evaluated where the parameters are afterwards.
        """
        if state.updates == 0:
            if not now.finite or now.norm == 0:
                return state, now
            state = self._first_point(state, now, batch)
        elif free.alarm(state, now.loss, self._settings):
            state, now = self._try_average(state, now, batch)
        norm = now.norm if now.finite else math.nan
        if state.updates <= 1 or state.past != 1:
            state = free.judge_first(state, norm, self._settings)
        state, looks = free.wants_look_back(state, norm, self._settings)
        return self._look_back(state, now, batch) if looks else (state, now)

    def _first_point(self, state: State, now: Evaluation, batch: Batch) -> State:
        """Check that the batch is the same when it is evaluated again; measure M along the first gradient."""
        layout, D, x = now.layout, now.operators, now.layout.point()
        with self._parameters_moved(lambda: self._put(layout, x)):
            self._refuse_another_batch(now, self.evaluate_again(batch), batch)
            (square,) = self.products(layout, lambda e: [(x[e], D[e].flat(x[e]))])
            bracket = probing.first_probe(now.norm, root(square), now.loss)
            # Probes at x - length D^-1 g/||g||, of lengths that probing finds, until g has changed by about an eighth.
            while not bracket.told and bracket.count < probing.DEFAULTS.probes:
                share = -self._sign * bracket.length / now.norm
                directions = (operator.back(operator.divided(h)) for operator, h in zip(D, now.h, strict=True))
                self._put(layout, (torch.add(a, b, alpha=share) for a, b in zip(x, directions, strict=True)))
                bracket = probing.next_probe(bracket, self._change(self.evaluate_again(batch), now))
        return free.begin(state, bracket.curvature * now.norm, now.norm)

    def _try_average(self, state: State, now: Evaluation, batch: Batch) -> tuple[State, Evaluation]:
        """The loss has jumped: return to the average of the weights if the loss of this batch is low there."""
        layout, x = now.layout, now.layout.point()
        average = [layout.vector("average", e, here) for e, here in enumerate(x)]  # of a new parameter its value
        with self._parameters_moved(lambda: self._put(layout, x)) as stay:
            self._put(layout, average)
            there = self.evaluate_again(batch)
            stay[0] = there.finite and bool(free.confirms(state, now.loss, there.loss, self._settings))
            if stay[0]:
                state = free.roll_back(state, *self._way(now, x, there)[:3], self._settings)
        return (state, there) if stay[0] else (state, now)

    def _look_back(self, state: State, now: Evaluation, batch: Batch) -> tuple[State, Evaluation]:
        """Evaluate the batch before the last step as well; if that step was much too long, stay there."""
        layout = now.layout
        x = step = [layout.vector("last_step", e) for e in range(len(layout.entries))]
        self._step_back(layout, step)
        with self._parameters_moved(lambda: self._step_forth(layout, step)) as stay:
            before = self.evaluate_again(batch)
            y_along, y_norm, s_norm, q_along = self._way(now, x, before)
            if math.isfinite(before.loss) and math.isfinite(q_along):
                state, rejected = free.look_back(state, y_along, y_norm, s_norm, q_along, self._settings)
                stay[0] = bool(rejected)
        if not stay[0]:
            return state, now
        for e, s in enumerate(step):
            layout.store("last_step", e, s.zero_())
        return state, before

    def _way(self, now: Evaluation, x: Vector, there: Evaluation) -> tuple[float, float, float, float]:
        """<y, s>/||s||, ||y||, ||s|| and <q, s>/||s|| of the way s from where the parameters are to x.

        y is the change of the batch's gradient along it, from q; ||y||^2 = <y, D^-1 y> and ||s||^2 = <s, D s>.
        """
        layout, D, here = now.layout, now.operators, now.layout.parameters()

        def pairs(e: int) -> Iterator[tuple[Tensor, Tensor]]:  # a generator, so that one temporary is alive at a time
            s, y = torch.sub(x[e], here[e]), torch.sub(now.g[e], there.g[e])
            yield y, s
            yield there.g[e], s
            z = torch.sub(now.h[e], there.h[e]) if D[e].turns else y
            yield z, D[e].divided(z)
            t = D[e].turned(s)
            yield t, D[e].multiplied(t)

        ys, qs, yy, ss = self.products(layout, pairs)
        length = root(ss)
        per = self._sign / length if length > 0 else 0.0
        return ys * per if now.finite else math.nan, root(yy), length, qs * per

    def _refuse_another_batch(self, now: Evaluation, again: Evaluation, batch: Batch) -> None:
        share = self._change(again, now)
        # Written so that a share which is not a number is refused, too.
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
        """<a, b> of several pairs of vectors, over all tensors and ranks.

        Args:
            layout: the parameters.
            pairs: ``pairs(e)`` yields entry e of a and b of each pair.
        """
        world, entries = self._passes.world, range(len(layout.entries))
        if not world.spread:
            rows = [[product(a, b) for a, b in pairs(e)] for e in entries]
            return [sum(column) for column in zip(*rows, strict=True)]
        columns = zip(*[[layout.number(e, a, b) for a, b in pairs(e)] for e in entries], strict=True)
        return world.total(layout.params, torch.stack([torch.cat(column) for column in columns])).sum(1).tolist()


def root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan  # nan for nan, too


def loss_of(result: Any) -> float:
    if isinstance(result, Tensor) and result.numel() == 1:
        return float(result.detach())
    if isinstance(result, Real) and not isinstance(result, bool):
        return float(result)
    raise TypeError(f"the closure must return the loss of the batch, a number or a tensor with one, got {result!r}")


def _tolerance(p: Tensor) -> float:
    # The relative difference of two gradients of one batch that is taken for rounding: some kernels of accelerators add
    # in another order each time.
    rounding = math.sqrt(torch.finfo(p.dtype).eps)
    return rounding if p.device.type == "cpu" else max(rounding, 0.01)
