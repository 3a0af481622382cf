"""Data-parallel ranks, each of them one independent gradient.

Under DistributedDataParallel every rank computes the gradient of its own data, and backward leaves their mean in
``.grad``. The hooks have seen the rank's own gradient before that, so all the optimizer still needs from the other
ranks is the sum of their squares: one number per step size.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Ranks"]


class Ranks:
    """The processes that average the gradients of these parameters; one if nothing does."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._group: dist.ProcessGroup | None = None
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if several:
            wrapper = _wrapper_of({id(p) for p in params})
            self._group = None if wrapper is None else wrapper.process_group
        self.unwrapped = several and self._group is None
        """Whether there are other ranks, but nothing that averages gradients over them."""
        self.count = 1 if self._group is None else dist.get_world_size(self._group)

    def sum_of_squares(self, q: Tensor) -> Tensor:
        """Q over the contributions of all ranks, in the scale of their mean."""
        if self._group is None:
            return q
        q = q.contiguous()
        dist.all_reduce(q, group=self._group)
        return q / self.count**2

    def sums_of_squares(self, squares: list[Tensor], q: Tensor) -> tuple[list[Tensor], Tensor]:
        """The same per coordinate, and per tensor: one all-reduce of the size of the gradient."""
        if self._group is None:
            return squares, q
        everything = [*(s.reshape(-1) for s in squares), q]
        flat = self.sum_of_squares(torch.cat([t.to(squares[0].device) for t in everything]))
        *pieces, q_sum = flat.split([t.numel() for t in everything])
        return [piece.view(s.shape).to(s) for piece, s in zip(pieces, squares, strict=True)], q_sum.to(q)


def _wrapper_of(ids: set[int]) -> DistributedDataParallel | None:
    """The DistributedDataParallel module that owns these parameters.

    It leaves no mark on a parameter, and an optimizer is given parameters, not modules. The garbage collector knows
    every live module; it is asked once.
    """
    for candidate in gc.get_objects():
        if issubclass(type(candidate), DistributedDataParallel) and any(
            id(p) in ids for p in candidate.module.parameters()
        ):
            return candidate
    return None
