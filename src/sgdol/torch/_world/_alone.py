"""One process that has its parameters and their gradients to itself; what every other world is in part."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy

from sgdol.torch._world._pieces import is_sharded, placed_like, plain

__all__ = ["Alone", "Listener", "Own", "Tap", "World"]


class Listener(Protocol):
    """Who wants to know of gradients on their way to one parameter."""

    def arrived(self, gradient: Tensor) -> None:
        """This rank's own gradient is there, and is about to be added to ``.grad``."""

    def begun(self) -> None:
        """A backward is about to reach the parameter, but what it brings will be known only after :meth:`reduced`."""

    def reduced(self) -> None:
        """The gradient, averaged over the ranks, has been added to ``.grad``."""


class Tap:
    """A hook in front of a leaf's gradient accumulator, which sees each backward's own gradient.

    Autograd keeps an accumulator only as long as somebody does, and gives a leaf whose data change kind a new one.
    """

    __slots__ = ("_handle", "_kind", "_node")

    def __init__(self) -> None:
        self._kind: Any = None
        self._node: Any = None
        self._handle: Any = None

    def attach(self, leaf: Tensor, hook: Any) -> None:
        """Be in front of this leaf, if not so already."""
        kind = self._kind_of(leaf)
        if kind == self._kind:
            return
        self.remove()
        self._kind = kind
        with torch._C.DisableTorchFunctionSubclass():  # a subclass has views of its own, which are no accumulators
            if is_lazy(leaf):
                # It has no shape and so no accumulator yet. A hook on the leaf stands in until it has: that runs before
                # hooks which users add later, and in torch.autograd.grad as well.
                self._handle = leaf.register_hook(lambda gradient: hook((gradient,)))
            else:
                self._node = get_gradient_edge(leaf).node
                self._handle = self._node.register_prehook(hook)

    def current(self, leaf: Tensor) -> bool:
        """Whether the leaf is still of the kind in front of which this is."""
        return self._kind is None or self._kind == self._kind_of(leaf)

    @staticmethod
    def _kind_of(leaf: Tensor) -> tuple[Any, ...]:
        return id(leaf), leaf.dtype, leaf.device, None if is_lazy(leaf) else leaf.shape

    def remove(self) -> None:
        """Take the hook away."""
        if self._handle is not None:
            self._handle.remove()
        self._kind = self._handle = self._node = None  # an accumulator that nobody keeps is made anew


class Own(NamedTuple):
    """What one rank knows of the contributions to some parameters; one column, or one tensor, for each of them."""

    rows: Tensor
    """Shape (any, parameters): sums over this rank's pieces; over whole tensors, when shared."""
    q: Tensor
    """The sum of the squared norms of its own contributions; over all ranks in the scale of ``.grad``, when shared."""
    seen: Tensor
    """1 where a backward pass has reached the parameter, else 0; on how many ranks, when shared."""
    squares: list[Tensor]
    """The same as q per coordinate, of those parameters for which it is known."""
    passes: int
    """How many backward passes there were: on all ranks the same number, or it is an error."""


class World:
    """Who shares the parameters: how many ranks have gradients of their own, and how to sum over all of them.

    This one is alone.
    """

    ranks: int = 1
    """How many ranks have an independent gradient in each backward."""
    alone: bool = True
    """Whether neither gradients nor pieces of parameters are on other ranks."""
    overwrites: bool = False
    """Whether a backward may write to the memory of gradients that earlier ones have left."""
    spread: bool = False
    """Whether parameters are in pieces on several ranks."""
    warnings: tuple[str, ...] = ()
    """What the user should be told, once, when backward passes are taken for independent gradients."""

    def tap(self, param: Tensor, tap: Tap, listener: Listener) -> None:
        """Let the listener know of this parameter's gradients from now on."""
        if param.requires_grad and param.is_leaf:
            tap.attach(param, arriving(listener, param))

    def reduces(self, param: Tensor) -> bool:
        """Whether somebody writes ``.grad`` who may keep back what is not reduced over the ranks yet."""
        return False

    def waits(self, param: Tensor) -> bool:
        """Whether the contribution of a backward cannot be read off ``.grad`` when it has ended."""
        return False

    def total(self, params: list[Tensor], rows: Tensor) -> Tensor:
        """Sums over whole tensors, from sums over this rank's pieces: shape (any, parameters)."""
        return rows

    def share(self, params: list[Tensor], own: Own) -> Own:
        """Everything that sums over ranks need, in one message: all that this rank knows becomes what all know."""
        return own

    def mean(self, *values: float) -> list[float]:
        """The means over the ranks of numbers that each has of its own data: on all ranks the same."""
        return list(values)

    def averages(self, param: Tensor) -> bool:
        """Whether ``.grad`` is the mean of what the ranks had."""
        return True

    def reshard(self) -> None:
        """Let everybody who keeps a copy of the parameters fetch them anew: they have been written to."""


Alone = World


class _Arriving:
    """The hook of one leaf; a DTensor's gradient is cut as the leaf is."""

    __slots__ = ("_cut", "_leaf", "_listener")

    def __init__(self, listener: Listener, leaf: Tensor, cut: list[tuple[int, int, int]] | None) -> None:
        self._listener, self._cut = listener, cut
        self._leaf = weakref.ref(leaf) if is_sharded(leaf) else None

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[0]
        if gradient is None:
            return
        leaf = None if self._leaf is None else self._leaf()
        piece = plain(gradient) if leaf is None else placed_like(gradient, leaf)
        if self._cut is not None:
            for dimension, start, length in self._cut:
                piece = piece.narrow(dimension, start, length)
            piece = piece.clone()  # a view would keep the whole gradient alive
        self._listener.arrived(piece)


def arriving(listener: Listener, leaf: Tensor, cut: list[tuple[int, int, int]] | None = None) -> Any:
    """The hook that tells the listener of gradients that arrive at this leaf, or of a piece of them.

    Args:
        listener: who wants to know.
        leaf: where they arrive.
        cut: (dimension, start, length) of each cut that leaves the piece; None for all of the gradient.
    """
    return _Arriving(listener, leaf, cut)
