"""Who shares a parameter: nobody, data-parallel ranks, or ranks that have pieces of it.

A new engine is one file here: a :class:`World` that knows its ranks and sums over them, and a line in :class:`Finder`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from sgdol.torch._world._alone import Alone, Listener, Own, Tap, World
from sgdol.torch._world._ddp import DataParallel, Unwrapped, find_wrapper, wrappings
from sgdol.torch._world._fsdp import Measured, Sharded
from sgdol.torch._world._pieces import (
    ORDINARY,
    fitted,
    is_sharded,
    like_parameter,
    local,
    piece_of,
    real_view,
)

__all__ = [
    "ORDINARY",
    "Finder",
    "Listener",
    "Measured",
    "Own",
    "Tap",
    "World",
    "fitted",
    "is_distributed",
    "is_sharded",
    "like_parameter",
    "local",
    "piece_of",
    "real_view",
    "several",
]

_ALONE = Alone()

is_distributed: Callable[[], bool] = dist.is_initialized if dist.is_available() else bool
"""Whether there is a process group. (Builds of torch without torch.distributed have none.)"""


def several() -> bool:
    """Whether there are other ranks."""
    return is_distributed() and dist.get_world_size() > 1


class Finder:
    """Finds out in which world an optimizer is, and again when that may have changed.

    A model is usually wrapped after its optimizer was made, or the other way round; process groups come and go.

    Args:
        params: all parameters of the optimizer.
        measured: what is measured of gradients that are in pieces (see ``_fsdp``).
        optimizer: whose they are.
    """

    def __init__(self, params: list[Tensor], measured: Measured, optimizer: object) -> None:
        self._params = params
        self._optimizer = weakref.ref(optimizer)
        self._name = type(optimizer).__name__
        self._wrappings = -1
        self._sharded: World | None = Sharded(params, measured, self._name) if any(map(is_sharded, params)) else None
        self._found: World | None = self._sharded
        self.here: World = _ALONE if self._sharded is None else self._sharded
        """Where gradients arrive: as far as can be told before any has."""

    @property
    def world(self) -> World:
        """Where the optimizer is now."""
        if not several():
            return self.here
        if self._wrappings != wrappings():
            self._wrappings = wrappings()
            self._found = self._look()
        assert self._found is not None
        return self._found

    def _look(self) -> World:
        wrapper = find_wrapper(self._params, self._optimizer(), self._name)
        if self._sharded is not None:
            if wrapper is not None:
                raise NotImplementedError(
                    f"{self._name} does not support DTensor parameters inside DistributedDataParallel: use fully_shard "
                    "on a two-dimensional mesh, whose first dimension replicates"
                )
            return self._sharded
        return Unwrapped(self._name) if wrapper is None else DataParallel(wrapper, self._name)
