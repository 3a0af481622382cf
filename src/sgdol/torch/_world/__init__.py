"""Who shares the parameters: nobody, data-parallel ranks (DDP), or ranks that have pieces of them (FSDP2).

A new engine is one file here, with a :class:`World` that sums over its ranks, and a line in :class:`Finder`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from sgdol.torch._world._alone import LocalSums, Tap, World
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
    shard_of,
)

__all__ = [
    "ORDINARY",
    "Finder",
    "LocalSums",
    "Measured",
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
    "shard_of",
]

_ALONE = World()

# Builds of torch without torch.distributed have no is_initialized(); bool() is False.
is_distributed: Callable[[], bool] = dist.is_initialized if dist.is_available() else bool


def several() -> bool:
    return is_distributed() and dist.get_world_size() > 1


class Finder:
    """Finds the world of an optimizer, and finds it again when it may have changed.

    A model may be wrapped before or after its optimizer is constructed, and process groups are created and destroyed.

    Args:
        params: all parameters of the optimizer.
        measured: what is measured of sharded gradients (see ``_fsdp``).
        optimizer: the optimizer; it is not kept alive.
    """

    def __init__(self, params: list[Tensor], measured: Measured, optimizer: object) -> None:
        self._params = params
        self._optimizer = weakref.ref(optimizer)
        self._name = type(optimizer).__name__
        self._wrappings = -1
        self._sharded: World | None = Sharded(params, measured, self._name) if any(map(is_sharded, params)) else None
        self._found: World | None = self._sharded
        # The world whose hooks see gradients arrive. It is known at once: DistributedDataParallel needs no other
        # hooks than a single process.
        self.here: World = _ALONE if self._sharded is None else self._sharded

    @property
    def world(self) -> World:
        if not several():
            return self.here
        if self._wrappings != wrappings():  # the search is slow: it asks the garbage collector
            self._wrappings = wrappings()
            self._found = self._find()
        assert self._found is not None
        return self._found

    def _find(self) -> World:
        wrapper = find_wrapper(self._params, self._optimizer(), self._name)
        if self._sharded is not None:
            if wrapper is not None:
                raise NotImplementedError(
                    f"{self._name} does not support DTensor parameters inside DistributedDataParallel: use fully_shard "
                    "on a two-dimensional mesh, whose first dimension replicates"
                )
            return self._sharded
        return Unwrapped(self._name) if wrapper is None else DataParallel(wrapper, self._name)
