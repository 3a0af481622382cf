"""The backward passes in one call of a closure, each of them one independent gradient, as vectors.

Whoever calls the closure knows where its passes begin and end, so that nothing has to be measured while they run: what
a pass has added to ``.grad`` is seen at its end. Where ranks average their gradients that is not what this rank had,
and the hooks in front of the gradient accumulators keep it. Memory: one vector while there are two passes, two while
there are more; with ranks, the rank's own gradients for as long as a backward runs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol.torch._listening import Listening, after_backward
from sgdol.torch._tensors import wide_dtype
from sgdol.torch._vectors import Space, Vector, largest, multiply
from sgdol.torch._world import Finder, Tap, World

__all__ = ["Contributions", "Found"]


class Found(NamedTuple):
    """What one call of the closure left on this rank."""

    passes: int
    g: Vector
    """The sum of the contributions: what is in ``.grad``, times the factor."""
    squares: Vector | None
    """The sum of the squares of this rank's own contributions, coordinate by coordinate; None if there is only one."""


class Contributions:
    """Watches parameters and sums up what backward passes bring them, times :attr:`factor`.

    Args:
        params: the parameters.
        finder: knows how gradients arrive.
    """

    def __init__(self, params: list[Tensor], finder: Finder) -> None:
        self._params = params
        self._finder = finder
        self.factor = 1.0
        self._attached_to: World | None = None
        self._kinds: list[Any] = []
        self._waits = False
        self._counts = [0] * len(params)
        self._running: set[int] = set()
        self._taps = [Tap() for _ in params]
        self._space: Space | None = None
        self.begin(1.0, 1.0, "now")
        weakref.finalize(self, _remove, self._taps)

    def begin(self, sign: float, unit: float | None, name: str) -> None:
        """The closure is about to be called: forget what was before, gradients included.

        Args:
            sign: of the factor.
            unit: its size; None to choose it by the first pass's gradient.
            name: of the memory that what is found will be in.
        """
        self._name = name
        for p in self._params:
            p.grad = None
        self._attach()
        self._sign, self._chooses, self.factor = sign, unit is None, sign * (unit or 1.0)
        self._counts[:] = [0] * len(self._params)
        self._running.clear()
        self._own: dict[Tensor, Tensor] = {}
        self._passes = 0
        self._last: tuple[Space, Vector] | None = None
        self._squares: tuple[Space, Vector] | None = None
        self._versions: list[tuple[int, int]] = []

    def _attach(self) -> None:
        """Be in front of all accumulators: a parameter whose data change kind has got a new one."""
        world = self._finder.world
        kinds = [(p.dtype, p.device, p.requires_grad) for p in self._params]
        if world is not self._attached_to or kinds != self._kinds:
            self._waits = world.ranks > 1
            for index, (p, tap) in enumerate(zip(self._params, self._taps, strict=True)):
                if world is not self._attached_to:
                    tap.remove()
                if self._waits:
                    world.tap(p, tap, Listening(self, index))
                elif p.requires_grad and p.is_leaf:
                    tap.attach(p, _counting(self, index))
            self._attached_to, self._kinds = world, kinds

    def space_of(self, params: list[Tensor]) -> Space:
        """The vectors over these parameters; the same object while they stay the same."""
        if self._space is None or [*map(id, self._space.given)] != [*map(id, params)]:
            self._space = Space(params)
        return self._space

    def found(self, space: Space) -> Found:
        """What the passes have brought the parameters of this space."""
        passes = max(self._counts)
        if self._squares is None or self._last is None:
            return Found(passes, space.gradients(self.factor, self._name), None)
        squares = space.taken_from(*self._squares)
        last = space.taken_from(*self._last)
        if self._last[0] is space and self._untouched():
            return Found(passes, last, squares)
        g = space.gradients(self.factor, f"{self._name}, rescaled")
        if not all(torch.equal(a, b) for a, b in zip(g, last, strict=True)):
            space.rescale(squares, last, g)
        return Found(passes, g, squares)

    def _untouched(self) -> bool:
        """Whether ``.grad`` is what the last backward left: by the versions, and GradScaler writes without raising."""
        assert self._last is not None
        space, last = self._last
        if self._versions != _versions(space.params) or any(x.device.type != "cpu" for x in last):
            return False
        return space.has_gradient(last, self.factor)

    # While a backward runs --------------------------------------------------------------------------------------------

    def arrived(self, index: int, gradient: Tensor) -> None:
        """This rank's own gradient of a parameter arrives in the backward that runs now."""
        self._counts[index] += 1
        task = torch._C._current_graph_task_id()
        if task not in self._running:
            self._begin_pass(task)
        p = self._params[index]
        before = self._own.get(p)
        self._own[p] = gradient.to(wide_dtype(gradient.dtype), copy=True) if before is None else before + gradient

    def begun(self, index: int) -> None:
        """Of sharded parameters, which are refused."""

    def reduced(self, index: int) -> None:
        """Of sharded parameters, which are refused."""

    def _begin_pass(self, task: int) -> None:
        if self._passes == 1 and self._last is None and not self._running:
            self._look()  # the first pass alone is worth looking at only now
        self._running.add(task)
        after_backward(lambda: after_backward(lambda: self._close(task)))

    def _close(self, task: int) -> None:
        """The end of a backward, after the ranks' gradients have been averaged."""
        self._running.discard(task)
        self._passes += 1
        if self._passes > 1 or self._waits:
            self._look()

    @torch.no_grad()
    def _look(self) -> None:
        """See what has been added to ``.grad``."""
        params = [p for p in self._params if p.grad is not None]
        if not params or any(p.grad.layout != torch.strided for p in params):  # type: ignore[union-attr]
            return
        space = self.space_of(params)
        now = space.gradients(1.0, f"{self._name}, {self._passes % 2}")
        if self._chooses and self._last is None:
            self.factor = self._sign * _unit(now)
        if self.factor != 1.0:
            now = [x.mul_(self.factor) for x in now]
        if self._waits:
            own = [x.mul_(self.factor) for x in space.collect(self._own_of, "own")]
            self._own = {}
            self._add(space, own)
        elif self._last is not None:
            before = space.taken_from(*self._last)
            if self._squares is None:
                self._add(space, before)
            self._add(space, [torch.sub(a, b, out=b) for a, b in zip(now, before, strict=True)])
        self._last = (space, now)
        self._versions = _versions(space.params)

    def _own_of(self, p: Tensor) -> Tensor:
        own = self._own.get(p)
        return torch.zeros_like(p) if own is None else own

    def _add(self, space: Space, c: Vector) -> None:
        if self._squares is None:
            self._squares = (space, multiply(c, c, space.empty("squares")))
            return
        squares = space.taken_from(*self._squares)
        self._squares = (space, [q.addcmul_(x, x) for q, x in zip(squares, c, strict=True)])


def _counting(recorder: Contributions, index: int) -> Callable[[Any], None]:
    """A hook that only counts: what a backward has brought is seen at its end. It is called often, so it is short."""
    counts, running, owner = recorder._counts, recorder._running, weakref.ref(recorder)
    current = torch._C._current_graph_task_id

    def hook(_: Any) -> None:
        counts[index] += 1
        task = current()
        if task not in running:
            alive = owner()
            if alive is not None:
                alive._begin_pass(task)

    return hook


def _versions(params: list[Tensor]) -> list[tuple[int, int]]:
    return [(id(p.grad), p.grad._version) for p in params]  # type: ignore[union-attr]


def _unit(g: Vector) -> float:
    """1, or a power of two that brings gradients to about 1 if their squares would leave the range of their type."""
    top = largest(g)
    bound = min(math.frexp(torch.finfo(x.dtype).max)[1] for x in g) // 4
    exponent = math.frexp(top)[1] if math.isfinite(top) else 0
    return 1.0 if abs(exponent) <= bound else 2.0**-exponent


def _remove(taps: list[Tap]) -> None:
    for tap in taps:
        tap.remove()
