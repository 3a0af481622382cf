"""Calling a closure, and measuring what it leaves: the loss, the gradient, and how long its contributions are."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol.torch._contributions import Contributions, Found
from sgdol.torch._rerun import Rerun
from sgdol.torch._vectors import Space, Vector, dot, multiply, norm, numbers, total
from sgdol.torch._world import Finder, Own

__all__ = ["Evaluation", "Evaluator", "Here", "Kept", "loss_of", "root"]


class Evaluation(NamedTuple):
    """What one call of the closure gave."""

    loss: float
    """The mean over the ranks of what the closure returned; negative if it is maximised."""
    g: Vector
    """The mean gradient, times the factor that brings it into range..."""
    squared: Vector | None
    """...and its square, coordinate by coordinate; None in Euclid's norm, where nobody needs it."""
    norm: float
    """||g|| in the metric..."""
    squares: float
    """...and the root of the sum of the squared norms of the k contributions to it."""
    k: int

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm) and math.isfinite(self.squares)


class Here(NamedTuple):
    """The point of this step, and the norm that is used there."""

    space: Space
    x: Vector
    inverse: Vector | None = None
    """1/D; None for Euclid's norm."""
    usual: float | None = None
    """The root of the mean of the past ||g||^2, all in this norm; None if the metric does not remember them."""

    def sharp(self, g: Vector, name: str = "scratch") -> Vector:
        """From a gradient to a direction: D^-1 g, in the memory of this name, or g itself if D is 1."""
        return g if self.inverse is None else multiply(g, self.inverse, self.space.empty(name))

    def square(self, g: Vector, name: str) -> tuple[Tensor, Vector | None]:
        """||g||^2 of a gradient, in D^-1, still on the device; and g^2 in the memory of this name, unless D is 1."""
        if self.inverse is None:
            return dot(g, g), None
        squared = multiply(g, g, self.space.empty(name))
        return dot(squared, self.inverse), squared

    def length(self, s: Vector) -> float:
        """||s|| of a difference of points: in D."""
        if self.inverse is not None:
            roots = zip(s, self.inverse, self.space.empty("scratch"), strict=True)
            s = [torch.rsqrt(inverse, out=out).mul_(a) for a, inverse, out in roots]
        return norm(s)

    def difference(self, a: Vector, b: Vector, name: str) -> Vector:
        """The difference, in the memory of this name."""
        return [torch.sub(x, y, out=z) for x, y, z in zip(a, b, self.space.empty(name), strict=True)]


class Kept(NamedTuple):
    """What was in ``.grad``, to be put there again."""

    gradients: list[tuple[Tensor, Tensor | None]]

    def put_back(self) -> None:
        """Put it there."""
        for p, gradient in self.gradients:
            p.grad = gradient


class Evaluator:
    """Calls closures over some parameters.

    Vectors of gradients are multiplied by :attr:`factor`: by 1, or by a power of two if their squares would leave the
    range; negative to ascend. All numbers are in the gradients' own units.

    Args:
        params: the parameters.
        finder: knows who shares them.
        sign: 1 to descend, -1 to ascend.
        unit: the size of the factor, if it has been chosen before.
    """

    def __init__(self, params: list[Tensor], finder: Finder, sign: float, unit: float) -> None:
        self._contributions = Contributions(params, finder)
        self._rerun = Rerun({p.device for p in params})
        self._finder = finder
        self._sign = sign
        self._name = "now"
        self.count = 0
        """How many calls there were in this step."""
        self.unit = unit

    @property
    def factor(self) -> float:
        """What vectors of gradients are multiplied by."""
        return self._sign * self.unit

    def first(self, closure: Callable[[], Any], choose: bool) -> Any:
        """Call the closure for the first time in a step: what it returned.

        Args:
            closure: evaluates the batch.
            choose: whether to choose the unit anew.
        """
        self._name = "now"
        self._contributions.begin(self._sign, None if choose else self.unit, self._name)
        self.count = 1
        if torch.is_grad_enabled():
            result = self._rerun.first(closure)
        else:
            with torch.enable_grad():
                result = self._rerun.first(closure)
        self.unit = abs(self._contributions.factor)
        return result

    def again(self, closure: Callable[[], Any]) -> float:
        """Evaluate the same batch where the parameters are now, so that nobody notices: the loss."""
        self._name = "again"
        self._contributions.begin(self._sign, self.unit, self._name)
        self.count += 1
        with torch.enable_grad():
            return loss_of(self._rerun.again(closure))

    def kept(self, here: Here, now: Evaluation) -> Kept:
        """What is in ``.grad`` now. Ranks may have it in memory that the next backward writes to: theirs is copied."""
        if self._finder.world.ranks > 1:
            here.space.put_gradients(now.g, self.factor)
        return Kept([(p, p.grad) for p in here.space.params])

    def undo(self) -> None:
        """Take back what the first call did to buffers."""
        self._rerun.undo()

    def space_of(self, params: list[Tensor]) -> Space:
        """The vectors over these parameters."""
        return self._contributions.space_of(params)

    def measure(self, here: Here, loss: float) -> Evaluation:
        """What the last call left, which returned this loss; in the metric of this step."""
        return self.measure_found(here, loss, self.gradient(here))

    def gradient(self, here: Here) -> Found:
        """The gradient that the last call left, nothing of which is measured yet."""
        return self._contributions.found(here.space)

    def measure_found(self, here: Here, loss: float, found: Found) -> Evaluation:
        """The same of a gradient that has been looked at before."""
        loss, world = loss * self._sign, self._finder.world
        k = found.passes * world.ranks
        if k < 2:
            raise RuntimeError(
                f"SGDOLFree needs at least two independent gradients per step, the closure ran backward() "
                f"{found.passes} time(s). Split the batch: for x, y in zip(inputs.chunk(2), targets.chunk(2)): "
                "(loss_fn(model(x), y) / 2).backward()"
            )
        n, squared = here.square(found.g, f"{self._name}, squared")
        if found.second is not None:
            # Two gradients and their sum: the squares of the sum and of the difference, halved.
            pairs = zip(found.g, found.second, strict=True)
            nn, rest = numbers(n, here.square([torch.sub(g, c, alpha=2, out=c) for g, c in pairs], "scratch")[0])
            qq = (nn + rest) / 2
        elif found.squares is None:
            raise RuntimeError(
                "the backward passes of the closure run at the same time: what each of them has added to .grad cannot "
                "be told. Run them one after the other"
            )
        else:
            q = total(found.squares) if here.inverse is None else dot(found.squares, here.inverse)
            if world.ranks == 1:
                nn, qq = numbers(n, q)
            else:  # n is that of the mean gradient, which every rank has; Q and the loss in one all-reduce
                own = Own(q.new_zeros(0, 1), q.double().reshape(1), q.double().new_tensor([loss]), [], found.passes)
                shared = world.share(here.space.params[:1], own)
                nn, qq, loss = numbers(n, shared.q[0], shared.seen[0] / world.ranks)
        return Evaluation(loss, found.g, squared, root(nn) / self.unit, root(qq) / self.unit, k)

    def norm(self, here: Here, g: Vector) -> float:
        """||g|| of a vector of gradients: in D^-1."""
        return root(numbers(dot(g, here.sharp(g)))[0]) / self.unit

    def refuse_another_batch(self, here: Here, now: Evaluation, again: Evaluation) -> None:
        """Two evaluations at one point must be the same."""
        share = self.norm(here, here.difference(now.g, again.g, "y")) / now.norm
        allowed = max(_tolerance(p) for p in here.space.params)
        if not share <= allowed:
            raise RuntimeError(
                "the closure does not evaluate the same batch each time: called twice at the same point, with the same "
                f"random numbers of torch, its gradients differ by {share:.2g} of their length. Draw the batch before "
                "step(), outside the closure; random augmentation that does not use torch's global generator belongs "
                "outside too"
            )


def root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan


def loss_of(result: Any) -> float:
    if isinstance(result, Tensor) and result.numel() == 1:
        return float(result.detach())
    if isinstance(result, Real) and not isinstance(result, bool):
        return float(result)
    raise TypeError(f"the closure must return the loss of the batch, a number or a tensor with one, got {result!r}")


def _tolerance(p: Tensor) -> float:
    """By how much two gradients of the same batch may differ: kernels on accelerators add in any order."""
    rounding = math.sqrt(torch.finfo(p.dtype).eps)
    return rounding if p.device.type == "cpu" else max(rounding, 0.01)
