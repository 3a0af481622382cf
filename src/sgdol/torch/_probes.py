"""The batch of one step, evaluated at other points: at probes, at the average, before the last step.

:mod:`sgdol.free` decides when, and what follows; here are the points.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol import free, probing
from sgdol.free import Settings, State
from sgdol.torch._operators import EUCLID, Operators
from sgdol.torch._passes import Passes
from sgdol.torch._rerun import Rerun
from sgdol.torch._vectors import Layout, Vector

__all__ = ["Evaluation", "Probes", "loss_of"]


class Evaluation(NamedTuple):
    """What one evaluation of the batch gave."""

    loss: float
    """The mean over the ranks of what the closure returned; negative if it is maximised."""
    k: int
    """How many independent gradients there were."""
    layout: Layout
    operators: Operators
    """D of the step."""
    g: Vector
    """Their mean, as it is in ``.grad``; not to be written to."""
    norm: float
    """||g||, in the metric..."""
    squares: float
    """...and the root of the sum of the squared norms of the k contributions to it."""

    @property
    def finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.norm) and math.isfinite(self.squares)


class Probes:
    """Evaluates the batch of a step, and decides where the step starts from.

    Args:
        params: all parameters.
        passes: records the backward passes.
        sign: 1 to descend, -1 to ascend.
        layout_of: the layout of the parameters that take part, once a closure has left gradients: a method.
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
        self._rerun = Rerun({p.device for p in self._params})
        self.count = 0
        """How many evaluations there were in this step."""

    # One evaluation ---------------------------------------------------------------------------------------------------

    def first(self, closure: Callable[[], Any]) -> Any:
        """Call the closure for the first time in a step: what it returned."""
        self.count = 0
        self._begin()
        with torch.enable_grad():
            return self._rerun.first(closure)

    def again(self, closure: Callable[[], Any]) -> Evaluation:
        """Evaluate the same batch where the parameters are now, so that nobody notices."""
        self._begin()
        with torch.enable_grad():
            loss = loss_of(self._rerun.again(closure))
        return self.evaluation(loss)

    def _begin(self) -> None:
        changed = self._passes.layout.reshaped()
        if changed is not None:
            index = next(i for i, p in enumerate(self._params) if p is changed[0])
            raise RuntimeError(
                f"parameter {index} is of {changed[0].shape} now, and what is known of it of {changed[1]}: call "
                "opt.restart(), which forgets everything, to go on with the new one"
            )
        for p in self._params:
            p.grad = None
        self._passes.reset(used=True)
        self.count += 1

    def undo(self) -> None:
        """Take back what the first call did to buffers."""
        self._rerun.undo()

    def evaluation(self, loss: float) -> Evaluation:
        """What the last call left, which returned this loss."""
        layout_of = self._layout_of()
        assert layout_of is not None
        layout, world = layout_of(), self._passes.world
        passes = self._passes.k
        if self._passes.thrown_away:
            raise RuntimeError(
                "gradients were set to zero between the backward passes of the closure, so that .grad is not their "
                "sum: call opt.zero_grad() once, before the first"
            )
        if passes * world.ranks < 2:
            raise RuntimeError(
                f"SGDOLFree needs at least two independent gradients per step, the closure ran backward() {passes} "
                "time(s). Split the batch: for x, y in zip(inputs.chunk(2), targets.chunk(2)): "
                "(loss_fn(model(x), y) / 2).backward()"
            )
        found = self._passes.take(layout, pooled=world.ranks == 1 and not world.spread)
        squared, signal, k = float(found.squared), float(found.signal), found.k
        # The next backward may write to memory that ranks share gradients in.
        g = layout.copy(found.g) if world.ranks > 1 else found.g
        # Q = n - u (k - 1)/k, which rounding may make negative where all but one contribution are 0.
        squares = max(0.0, squared - signal * (k - 1) / k) if math.isfinite(signal) else math.nan
        loss = world.mean(loss * self._sign)
        return Evaluation(loss, k, layout, found.operators, g, root(squared), root(squares))

    @contextmanager
    def _elsewhere(self, now: Evaluation) -> Iterator[tuple[Vector, list[bool]]]:
        """Inside, the parameters may be moved; afterwards they are back, with their gradients, unless that is said."""
        x, gradients, stays = now.layout.point(), [(p, p.grad) for p in self._params], [False]
        if self._passes.world.ranks > 1:
            gradients = [(p, None if g is None else g.clone()) for p, g in gradients]
        try:
            yield x, stays
        finally:
            if not stays[0]:
                now.layout.put(x)
                for p, gradient in gradients:
                    p.grad = gradient

    # Where the step starts from ---------------------------------------------------------------------------------------

    def advance(
        self, state: State, now: Evaluation, closure: Callable[[], Any], vector: Callable[[str], Vector]
    ) -> tuple[State, Evaluation]:
        """Decide where to step from. The parameters are there afterwards, and its gradient is in ``.grad``.

        Args:
            state: what has been learned.
            now: the batch where the parameters are.
            closure: evaluates it.
            vector: the optimizer's vector of this name: "average", "previous".
        """
        if state.updates == 0:
            if not now.finite or now.norm == 0:
                return state, now
            state = self._first_point(state, now, closure)
        elif free.alarm(state, now.loss, self._settings):
            state, now = self._guard(state, now, closure, vector("average"))
        state, looks = free.wants_look_back(state, now.norm if now.finite else math.nan, self._settings)
        return self._look_back(state, now, closure, vector("previous")) if looks else (state, now)

    def _first_point(self, state: State, now: Evaluation, closure: Callable[[], Any]) -> State:
        """Check the closure, and measure M along the gradient by a difference of gradients."""
        layout, D = now.layout, now.operators
        with self._elsewhere(now) as (x, _):
            self._refuse_another_batch(now, self.again(closure))
            direction = D.sharp(now.g)
            size = root(*self.products(layout, (x, D.flat(x))))
            bracket = probing.first_probe(now.norm, size, now.loss)
            while not bracket.told and bracket.count < probing.DEFAULTS.probes:
                share = -self._sign * bracket.length / now.norm
                layout.put([torch.add(a, b, alpha=share) for a, b in zip(x, direction, strict=True)])
                probed = self.again(closure)
                change = self._distance(probed, now) / now.norm if probed.finite else math.inf
                bracket = probing.next_probe(bracket, change)
        return free.begin(state, bracket.curvature * now.norm, now.norm)

    def _guard(
        self, state: State, now: Evaluation, closure: Callable[[], Any], average: Vector
    ) -> tuple[State, Evaluation]:
        """The loss has jumped: go back to the average if this batch is fine there."""
        with self._elsewhere(now) as (_, stays):
            now.layout.put(average)
            found = self.again(closure)
            stays[0] = found.finite and bool(free.confirms(state, now.loss, found.loss, self._settings))
        return (free.roll_back(state, self._settings), found) if stays[0] else (state, now)

    def _look_back(
        self, state: State, now: Evaluation, closure: Callable[[], Any], previous: Vector
    ) -> tuple[State, Evaluation]:
        """Evaluate this batch before the last step as well, and stay there if the step was too long."""
        layout, D = now.layout, now.operators
        with self._elsewhere(now) as (x, stays):
            layout.put(previous)
            found = self.again(closure)
            s, y = _difference(x, previous), _difference(now.g, found.g)
            ys, qs, ss, yy = self.products(layout, (y, s), (found.g, s), (s, D.flat(s)), (y, D.sharp(y)))
            length = root(ss)
            if math.isfinite(found.loss) and math.isfinite(qs):
                per = self._sign / length if length > 0 else 0.0
                along = ys * per if now.finite else math.nan
                state, rejected = free.look_back(state, along, root(yy), length, qs * per, self._settings)
                stays[0] = bool(rejected)
        return (state, found) if stays[0] else (state, now)

    def _refuse_another_batch(self, now: Evaluation, again: Evaluation) -> None:
        """Two evaluations at one point must be the same."""
        share = self._distance(again, now) / now.norm
        if not share <= max(_tolerance(p) for p in now.layout.params):
            raise RuntimeError(
                "the closure does not evaluate the same batch each time: called twice at the same point, with the same "
                f"random numbers of torch, its gradients differ by {share:.2g} of their length. Draw the batch before "
                "step(), outside the closure; random augmentation that does not use torch's global generator belongs "
                "outside too"
            )

    def _distance(self, a: Evaluation, b: Evaluation) -> float:
        """||g_a - g_b||, in the metric of b."""
        y = _difference(a.g, b.g)
        return root(*self.products(b.layout, (y, b.operators.sharp(y))))

    def products(self, layout: Layout, *pairs: tuple[Vector, Vector]) -> list[float]:
        """<a, b> of pairs of vectors, over all tensors and ranks."""
        world = self._passes.world
        if not world.spread:
            return [layout.total(a, b, EUCLID) for a, b in pairs]
        rows = torch.stack([layout.totals(layout.products(a, b)) for a, b in pairs])
        return world.total(layout.params, rows).sum(1).tolist()


def _difference(a: Vector, b: Vector) -> Vector:
    return [torch.sub(x, y) for x, y in zip(a, b, strict=True)]


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
