"""Data-parallel ranks, each of them one independent gradient.

Under DistributedDataParallel every rank computes the gradient of its own data, and backward leaves their mean in
``.grad``. The hooks have seen the rank's own gradient before that, so all the optimizer still needs from the other
ranks is the sum of their squares: a number per tensor.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from sgdol.torch._world._alone import Own, World

__all__ = ["DataParallel", "Unwrapped", "check_counts", "find_wrapper", "wrappings"]

FAITHFUL = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")
"""Communication hooks that return the mean of what the ranks had, up to rounding."""


class DataParallel(World):
    """The processes that average the gradients of the parameters.

    Args:
        wrapper: the module that does.
        name: of the optimizer, for what the user is told.
    """

    overwrites = True  # gradients may be views of buckets

    def __init__(self, wrapper: DistributedDataParallel, name: str) -> None:
        self._group = wrapper.process_group
        self._name = name
        self._wrapper = weakref.ref(wrapper)
        self.ranks = dist.get_world_size(self._group)
        self.alone = self.ranks == 1
        hooks = [getattr(hook, "__name__", repr(hook)) for hook, _ in getattr(wrapper, "_comm_hooks", ())]
        unknown = next((hook for hook in hooks if hook not in FAITHFUL), None)
        if unknown is not None:
            self.warnings = (
                f"DistributedDataParallel averages gradients with the communication hook {unknown}. {name} "
                "measures noise on what the ranks had before, which is right if the hook returns their mean, as "
                "fp16_compress_hook and bf16_compress_hook do up to rounding. PowerSGD and others that leave part of "
                "the gradient out, or add what they left out before, bias the step size.",
            )

    def waits(self, param: Tensor) -> bool:
        """``.grad`` is the mean over the ranks, not what this one had."""
        return True

    def share(self, params: list[Tensor], own: Own) -> Own:
        """One all-reduce: of two numbers per tensor, or of the size of the gradient. All ranks have the same rows."""
        self._refuse_join()
        counts = own.q.new_tensor([own.passes, own.passes**2])
        parts = [own.q, own.seen, counts]
        if own.squares:
            like = own.squares[0]
            parts = [part.to(like) for part in (*(s.reshape(-1) for s in own.squares), *parts)]
        flat = torch.cat(parts)
        dist.all_reduce(flat, group=self._group)
        check_counts(flat[-2:], self.ranks)
        *squares, q, seen, _ = flat.split([part.numel() for part in parts])
        squares = [(s / self.ranks**2).view(o.shape).to(o) for s, o in zip(squares, own.squares, strict=True)]
        return own._replace(q=(q / self.ranks**2).to(own.q), seen=seen.to(own.q), squares=squares)

    def mean(self, *values: float) -> list[float]:
        """One all-reduce of a few numbers."""
        self._refuse_join()
        device = next(self._wrapper().parameters()).device  # type: ignore[union-attr]
        total = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=self._group)
        return (total / self.ranks).tolist()

    def _refuse_join(self) -> None:
        """Ranks that have run out of inputs answer for DistributedDataParallel, not for this sum: it would hang."""
        config = getattr(self._wrapper(), "_join_config", None)
        if config is not None and config.enable and not config.throw_on_early_termination:
            raise NotImplementedError(
                f"{self._name} does not run under DistributedDataParallel's join(), where ranks run out of inputs: "
                "give every rank the same number of batches (DistributedSampler does), or use "
                "join(throw_on_early_termination=True)"
            )


class Unwrapped(World):
    """One of several ranks, but nothing that averages gradients over them."""

    def __init__(self, name: str) -> None:
        self.warnings = (
            f"{name} runs on several ranks without DistributedDataParallel around its parameters, so the noise that "
            "it sees is that of its own rank's microbatches. If gradients are averaged by hand, the ranks will "
            "drift apart: use DistributedDataParallel, or one backward() per step(). If every rank trains a model "
            "of its own, all is well.",
        )


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


def find_wrapper(params: list[Tensor], optimizer: object, name: str) -> DistributedDataParallel | None:
    """The DistributedDataParallel module that owns these parameters.

    It leaves no mark on a parameter, and an optimizer is given parameters, not modules. The garbage collector knows
    every live module; it is asked once, and again when a model has been wrapped since.
    """
    found = _wrappers_and_refusals(params, optimizer, name)
    if len(found) > 1:  # one that has been replaced may be garbage which is not collected yet
        found.clear()
        gc.collect()
        found = _wrappers_and_refusals(params, optimizer, name)
    return max(found, key=lambda wrapper: _ORDER.get(wrapper, 0), default=None)


def _wrappers_and_refusals(params: list[Tensor], optimizer: object, name: str) -> list[DistributedDataParallel]:
    ids = {id(p) for p in params}
    found = []
    zero = _imported("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
    flat = _imported("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
    for candidate in gc.get_objects():
        if issubclass(type(candidate), DistributedDataParallel):
            if any(id(p) in ids for p in candidate.module.parameters()):
                found.append(candidate)
        elif issubclass(type(candidate), zero) and getattr(candidate, "optim", None) is optimizer:
            raise NotImplementedError(
                f"{name} does not run inside ZeroRedundancyOptimizer: every rank would see the gradients of its own "
                "parameters only, and learn a step size of its own. fully_shard (FSDP2) spreads the optimizer's state "
                "over the ranks too, and is supported"
            )
        elif issubclass(type(candidate), flat) and any(id(p) in ids for p in candidate.parameters()):
            raise NotImplementedError(
                f"{name} does not support FullyShardedDataParallel (FSDP1), whose parameters do not tell what they are "
                "pieces of: use fully_shard (FSDP2)"
            )
    return found


_WRAPPED = [0]
_ORDER: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
_WATCHING: list[Any] = []


def wrappings() -> int:
    """How many modules have been wrapped in DistributedDataParallel since the first time that this was asked."""
    if not _WATCHING:
        _WATCHING.append(register_module_module_registration_hook(_note))
    return _WRAPPED[0]


def _note(module: torch.nn.Module, name: str, submodule: torch.nn.Module) -> None:
    if name == "module" and isinstance(module, DistributedDataParallel):
        _WRAPPED[0] += 1
        _ORDER[module] = _WRAPPED[0]


def _imported(module: str, name: str) -> tuple[type, ...]:
    """A class, if the program has imported it."""
    return (getattr(sys.modules[module], name),) if module in sys.modules else ()
