"""The backward passes in one call of a closure, each of them one independent gradient, as vectors.

Nothing is measured while passes run. The hooks in front of the gradient accumulators keep what a pass brings until it
has ended, from the second pass on: what is in ``.grad`` without that is what the first has brought. Where ranks average
their gradients ``.grad`` does not tell, and the first pass is kept too. Memory: one vector while there are two passes,
two while there are more, and what a pass brings for as long as it runs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from sgdol.torch._listening import COMPILED, Listening, after_backward, compiled_autograd, graph_task, outermost
from sgdol.torch._tensors import wide_dtype
from sgdol.torch._vectors import APART, Space, Vector, largest, multiply, same
from sgdol.torch._world import Finder, Tap, World

__all__ = ["Contributions", "Found"]


class Found(NamedTuple):
    """What one call of the closure left on this rank."""

    passes: int
    g: Vector
    """The sum of the contributions: what is in ``.grad``, times the factor."""
    squares: Vector | None = None
    """The sum of the squares of this rank's own contributions, coordinate by coordinate..."""
    second: Vector | None = None
    """...or, if there are two and they are the sum, the second."""
    bent: bool = False
    """Whether gradients have been changed, after their backward, by more than a factor for each tensor."""


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
        self._own: dict[int, Tensor] = {}
        self._keeps = [False]
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
        self._own.clear()
        self._keeps[0] = self._waits
        self._passes = 0
        self._open: FrameType | None = None
        self._ended, self._before = True, [*self._counts]
        self._noted: list[tuple[Tensor, Tensor | None, int]] = []
        self._nonzero: Tensor | None = None
        self._edited = self._overlap = self._bent = False
        self._expected: list[tuple[Tensor, Tensor]] = []
        self._last: tuple[Space, Vector] | None = None
        self._second: Vector | None = None  # what the second of two passes has brought, in the space of the last
        self._squares: tuple[Space, Vector] | None = None
        self._left: list[tuple[Tensor, Tensor, int]] = []

    def _attach(self) -> None:
        """Be in front of all accumulators: a parameter whose data change kind has got a new one."""
        world = self._finder.world
        kinds = [(p.dtype, p.device, p.requires_grad, None if is_lazy(p) else p.shape) for p in self._params]
        if world is not self._attached_to or kinds != self._kinds:
            for index, (before, now) in enumerate(zip(self._kinds, kinds, strict=False)):
                if before[-1] not in (None, now[-1]):
                    raise RuntimeError(
                        f"parameter {index} is of {now[-1]} now, and what is known of it of {before[-1]}: call "
                        "opt.restart(), which forgets everything, to go on with the new one"
                    )
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
        if self._space is None or (
            self._space.given is not params and [*map(id, self._space.given)] != [*map(id, params)]
        ):
            self._space = Space(params)
        return self._space

    def found(self, space: Space) -> Found:
        """What the passes have brought the parameters of this space."""
        if COMPILED in self._running:
            raise compiled_autograd("SGDOLFree")
        self._end()
        passes = max(self._counts)
        if self._edited:
            raise RuntimeError(
                "the gradients were changed or set to zero between the backward passes of the closure, so that .grad "
                "is not their sum: call opt.zero_grad() once, before the first, and clip after the last"
            )
        if self._last is None or self._overlap:
            return Found(max(passes, 2 * self._overlap), space.gradients(self.factor, self._name))
        untouched = self._last[0] is space and self._untouched()
        # These are the gradients themselves: whoever sets them to None wants their memory back.
        self._left, self._noted = [], []
        if untouched and self._second is not None:
            return Found(passes, self._last[1], second=self._second, bent=self._bent)
        self._square()
        if self._squares is None:
            return Found(passes, space.gradients(self.factor, self._name))
        squares, last = space.taken_from(*self._squares), space.taken_from(*self._last)
        if untouched:
            return Found(passes, last, squares, bent=self._bent)
        g = space.gradients(self.factor, f"{self._name}, rescaled")
        bent = not same(g, last) and space.rescale(squares, last, g)
        return Found(passes, g, squares, bent=bent or self._bent)

    def _untouched(self) -> bool:
        """Whether ``.grad`` is what the last backward left: by the versions, and GradScaler writes without raising."""
        assert self._last is not None
        space, last = self._last
        if not all(p.grad is g and g._version == version for p, g, version in self._left):
            return False
        return all(x.device.type == "cpu" for x in last) and space.has_gradient(last, self.factor)

    # While a backward runs --------------------------------------------------------------------------------------------

    def arrived(self, index: int, gradient: Tensor) -> None:
        """This rank's own gradient of a parameter arrives in the backward that runs now, and will not stay as it is."""
        self._counts[index] += 1
        task = graph_task()
        if task not in self._running:
            self._begin_task(task)
        _keep(self._own, id(self._params[index]), gradient.to(wide_dtype(gradient.dtype), copy=True))

    def begun(self, index: int) -> None:
        """Of sharded parameters, which are refused."""

    def reduced(self, index: int) -> None:
        """Of sharded parameters, which are refused."""

    def _begin_task(self, task: int) -> None:
        """A graph task has reached its first parameter: a backward's own, or one that reentrant checkpointing began."""
        if torch.compiler.is_compiling():  # compiled autograd traces this
            self._running.add(COMPILED)
            return
        call, inside = outermost()
        if not self._running and (call is None or self._open is not call):
            self._end()
            self._keeps[0] = self._waits or self._passes > 0
            self._edited |= self._passes > 0 and self._changed()
            self._ended = False
            if self._passes > 0 and not self._waits:
                self._expected = [(p, g.clone()) for p in self._params if (g := p.grad) is not None and _is_hooked(p)]
        self._overlap |= self._open not in (None, call)  # in another thread
        self._open = call
        self._running.add(task)
        if self._waits:  # for what the ranks do at the end of a backward
            after_backward(lambda: after_backward(lambda: self._close(task, inside)))
        else:
            after_backward(lambda: self._close(task, inside))

    def _close(self, task: int, inside: bool) -> None:
        """The end of a graph task, after the ranks' gradients have been averaged."""
        self._running.discard(task)
        if self._running:  # it was part of another
            return
        self._note()
        if not inside:  # the end of the backward that this one was inside of is not told unless that brings something
            self._end()

    def _end(self) -> None:
        """The backward that was open has ended: what it brought a parameter, in one task or in several, counts once."""
        if self._ended:
            return
        self._counts[:] = [min(now, before + 1) for now, before in zip(self._counts, self._before, strict=True)]
        self._ended, self._open, self._before = True, None, [*self._counts]
        self._passes += 1
        if self._keeps[0]:
            self._bent |= any(_differs(p, g, self._own_of(p)) for p, g in self._expected)
            self._look()
            self._own.clear()

    def _note(self) -> None:
        """What a backward has left, to be compared when the next begins: versions, and whether something is not 0."""
        self._noted = [(p, g, -1 if g is None else g._version) for p in self._params for g in [p.grad]]
        self._nonzero = next((p for p in self._params if _is_nonzero(p)), None)

    def _changed(self) -> bool:
        """Whether ``.grad`` is not what the last backward left. Writing to ``.grad.data`` leaves the version alone."""
        if any(p.grad is not g or (g is not None and g._version != version) for p, g, version in self._noted):
            return True
        return self._nonzero is not None and not _is_nonzero(self._nonzero)

    @torch.no_grad()
    def _look(self) -> None:
        """See what is in ``.grad``, and what has been added to it."""
        left = [(p, g, g._version) for p in self._params if (g := p.grad) is not None]
        if not left or any(g.layout != torch.strided for _, g, _ in left):
            return
        self._square()
        space = self.space_of(self._params if len(left) == len(self._params) else [p for p, _, _ in left])
        now = space.gradients(1.0, f"{self._name}, {self._passes % 2}")
        own = space.collect(self._own_of, 1.0, "own")
        if self._chooses and self._last is None:
            # All ranks have the same mean; what they had of their own would give each a factor of its own.
            self.factor = self._sign * _unit(now if self._waits else now + own)
        if self.factor != 1.0:
            now, own = [x.mul_(self.factor) for x in now], [x.mul_(self.factor) for x in own]
        if self._last is None and not self._waits:
            self._second = own
        else:
            self._add(space, own)
        self._last, self._left = (space, now), left

    def _own_of(self, p: Tensor) -> Tensor | None:
        return self._own.get(id(p))

    def _square(self) -> None:
        """Square what two passes have brought, if that has not been done."""
        if self._second is not None and self._last is not None:
            (space, both), second, self._second = self._last, self._second, None
            self._add(space, second)
            self._add(space, [torch.sub(a, b, out=b) for a, b in zip(both, second, strict=True)])

    def _add(self, space: Space, c: Vector) -> None:
        if self._squares is None:
            self._squares = (space, multiply(c, c, space.empty("squares")))
            return
        squares = space.taken_from(*self._squares)
        self._squares = (space, [q.addcmul_(x, x) for q, x in zip(squares, c, strict=True)])


def _is_nonzero(p: Tensor) -> bool:
    """Whether the first numbers of a gradient are not all 0; of an accelerator's, which nobody waits for, no."""
    g = p.grad
    if g is None or g.layout != torch.strided or g.device.type != "cpu" or not g.numel():
        return False
    return g[(0,) * g.dim()].item() != 0 or bool(g.detach().reshape(-1)[:16].any())  # the first alone is quick


def _is_hooked(p: Tensor) -> bool:
    """Whether something runs as soon as a gradient has been accumulated, and may change it."""
    return bool(p._post_accumulate_grad_hooks) and p.grad is not None and p.grad.layout == torch.strided


@torch.no_grad()
def _differs(p: Tensor, before: Tensor, own: Tensor | None) -> bool:
    """Whether ``.grad`` is something else than the sum of what was there and what a backward has brought."""
    expected = before if own is None else before + own
    return p.grad is not None and bool((p.grad - expected).norm() > APART * expected.norm())


def _keep(own: dict[int, Tensor], key: int, gradient: Tensor) -> None:
    """Keep what a backward brings a parameter, to which it may bring more."""
    before = own.get(key)
    own[key] = gradient if before is None else before.detach() + gradient.detach()


def _counting(recorder: Contributions, index: int) -> Callable[[Any], None]:
    """A hook that counts, and keeps what a backward brings if that is wanted. It is called often, so it is short."""
    counts, running, keeps, own = recorder._counts, recorder._running, recorder._keeps, recorder._own
    owner, key = weakref.ref(recorder), id(recorder._params[index])

    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        counts[index] += 1
        task = graph_task()
        if task not in running:
            alive = owner()
            if alive is not None:
                alive._begin_task(task)
        if keeps[0] and gradients[0] is not None:
            _keep(own, key, gradients[0])

    return hook


def _unit(g: Vector) -> float:
    """1, or a power of two that brings gradients to about 1 if their squares would leave the range of their type."""
    top = largest(g)
    bound = min(math.frexp(torch.finfo(x.dtype).max)[1] for x in g) // 4
    exponent = math.frexp(top)[1] if math.isfinite(top) else 0
    return 1.0 if abs(exponent) <= bound else 2.0**-exponent


def _remove(taps: list[Tap]) -> None:
    for tap in taps:
        tap.remove()
