"""Data-parallel ranks, each of them one independent gradient.

Under DistributedDataParallel every rank computes the gradient of its own data, and backward leaves their mean in
``.grad``. The hooks have seen the rank's own gradient before that, so all the optimizer still needs from the other
ranks is the sum of their squares: one number per step size.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Ranks", "check_counts"]

FAITHFUL = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")
"""Communication hooks that return the mean of what the ranks had, up to rounding."""


class Ranks:
    """The processes that average the gradients of these parameters; one if nothing does.

    Args:
        params: the parameters.
        optimizer: whose they are.
    """

    def __init__(self, params: Iterable[Tensor], optimizer: object) -> None:
        self._group: dist.ProcessGroup | None = None
        self.unknown_hook: str | None = None
        """The name of a communication hook that may do anything to the gradients."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if several:
            wrapper = _wrapper_of({id(p) for p in params}, optimizer)
            if wrapper is not None:
                self._group = wrapper.process_group
                hooks = [getattr(hook, "__name__", repr(hook)) for hook, _ in getattr(wrapper, "_comm_hooks", ())]
                self.unknown_hook = next((name for name in hooks if name not in FAITHFUL), None)
        self.unwrapped = several and self._group is None
        """Whether there are other ranks, but nothing that averages gradients over them."""
        self.count = 1 if self._group is None else dist.get_world_size(self._group)

    def sum_of_squares(self, q: Tensor, passes: int) -> Tensor:
        """Q over the contributions of all ranks, in the scale of their mean; each had so many passes."""
        if self._group is None:
            return q
        flat = torch.cat([q.reshape(-1), q.new_tensor([passes, passes**2])])
        dist.all_reduce(flat, group=self._group)
        check_counts(flat[-2:], self.count)
        return flat[:-2].view(q.shape) / self.count**2

    def sums_of_squares(self, squares: list[Tensor], q: Tensor, passes: int) -> tuple[list[Tensor], Tensor]:
        """The same per coordinate, and per tensor: one all-reduce of the size of the gradient."""
        if self._group is None:
            return squares, q
        flat = self.sum_of_squares(torch.cat([s.reshape(-1).to(squares[0].device) for s in squares]), passes)
        pieces = flat.split([s.numel() for s in squares])
        q = torch.stack([piece.sum(dtype=q.dtype) for piece in pieces]).to(q)
        return [piece.view(s.shape).to(s) for piece, s in zip(pieces, squares, strict=True)], q


def check_counts(sums: Tensor, ranks: int) -> None:
    """See that all ranks had the same number of passes, from the sums of the numbers and of their squares.

    All ranks come to the same conclusion. An accelerator is not waited for.
    """
    if sums.device.type != "cpu":
        return
    total, squares = sums.tolist()
    if round(ranks * squares) != round(total) ** 2:
        raise RuntimeError(
            f"all ranks must run the same number of backward passes before step(): {ranks} ranks ran {round(total)} in "
            f"all, not the same number each"
        )


def _wrapper_of(ids: set[int], optimizer: object) -> DistributedDataParallel | None:
    """The DistributedDataParallel module that owns these parameters.

    It leaves no mark on a parameter, and an optimizer is given parameters, not modules. The garbage collector knows
    every live module; it is asked once.
    """
    found = None
    zero = _imported("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
    flat = _imported("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
    for candidate in gc.get_objects():
        if issubclass(type(candidate), DistributedDataParallel):
            if any(id(p) in ids for p in candidate.module.parameters()):
                found = candidate
        elif issubclass(type(candidate), zero) and getattr(candidate, "optim", None) is optimizer:
            raise NotImplementedError(
                "SGDOL does not run inside ZeroRedundancyOptimizer: every rank would see the gradients of its own "
                "parameters only, and learn a step size of its own. fully_shard (FSDP2) spreads the optimizer's state "
                "over the ranks too, and is supported"
            )
        elif issubclass(type(candidate), flat) and any(id(p) in ids for p in candidate.parameters()):
            raise NotImplementedError(
                "SGDOL does not support FullyShardedDataParallel (FSDP1), whose parameters do not tell what they are "
                "pieces of: use fully_shard (FSDP2)"
            )
    return found


def _imported(module: str, name: str) -> tuple[type, ...]:
    """A class, if the program has imported it."""
    return (getattr(sys.modules[module], name),) if module in sys.modules else ()
