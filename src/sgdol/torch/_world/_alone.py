"""The world of a single process, which is the base class of every other one, and the hooks that see gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy

__all__ = ["LocalSums", "Tap", "World"]


class Tap:
    """A hook in front of a leaf's gradient accumulator: it sees the gradient of each backward before it is added up.

    The tap holds the accumulator, because autograd drops one that nobody holds, and the hook with it. A leaf whose
    shape, type or device changes gets another accumulator.
    """

    __slots__ = ("_handle", "_kind", "_node")

    def __init__(self) -> None:
        self._kind: Any = None
        self._node: Any = None
        self._handle: Any = None

    def attach(self, leaf: Tensor, hook: Any) -> None:
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
        return self._kind is None or self._kind == self._kind_of(leaf)

    @staticmethod
    def _kind_of(leaf: Tensor) -> tuple[Any, ...]:
        return id(leaf), leaf.dtype, leaf.device, None if is_lazy(leaf) else leaf.shape

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._kind = self._handle = self._node = None


class LocalSums(NamedTuple):
    """Sums of one rank over its contributions to some parameters; :meth:`World.share` makes them sums over all ranks.

    Each has one column, or one tensor, per parameter.
    """

    rows: Tensor  # shape (any, parameters): any sums over this rank's pieces of tensors
    q: Tensor  # sum of the squared norms of the contributions; after share() in the scale of .grad
    seen: Tensor  # 1 where a backward pass has reached the parameter, else 0; after share() the number of such ranks
    squares: list[Tensor]  # q per coordinate, for the parameters for which it is known
    passes: int  # backward passes; must be the same on all ranks


class World:
    """The ranks that share the parameters: which of them have gradients of their own, and sums over all of them.

    This class is the world of a single process.
    """

    ranks: int = 1  # ranks that have an independent gradient in each backward
    alone: bool = True  # no other rank has gradients or pieces of these parameters
    overwrites: bool = False  # a backward may write to the memory of an earlier .grad
    spread: bool = False  # parameters are in pieces on several ranks
    # For the user, once, when several backward passes are counted as independent gradients.
    warnings: tuple[str, ...] = ()

    def tap(self, param: Tensor, listener: Any) -> None:
        """Tell the listener (``_passes.Listener``) of all gradients of a parameter that this world :meth:`reduces`."""

    def reduces(self, param: Tensor) -> bool:
        """Whether ``.grad`` of this parameter is written by an engine, which may hold back what is not reduced yet."""
        return False

    def waits(self, param: Tensor) -> bool:
        """Whether ``.grad`` after a backward is the mean over the ranks, not this rank's contribution."""
        return False

    def total(self, params: list[Tensor], rows: Tensor) -> Tensor:
        """Sums over whole tensors from sums over this rank's pieces, both of shape (any, parameters)."""
        return rows

    def share(self, params: list[Tensor], sums: LocalSums) -> LocalSums:
        """The sums of this rank -> the sums of all ranks, in one message."""
        return sums

    def mean(self, *values: float) -> list[float]:
        """Means over the ranks of numbers that each has computed from its own data."""
        return list(values)

    def averages(self, param: Tensor) -> bool:
        """Whether ``.grad`` of this parameter is a mean over ranks (of a single process: over itself)."""
        return True

    def reshard(self) -> None:
        """To be called after writing to the parameters: engines drop the copies that they have of them."""
