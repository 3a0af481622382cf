"""Data-parallel ranks, each of them one independent gradient.

Under DistributedDataParallel every rank computes the gradient of its own data, and backward leaves the mean of them in
``.grad``. The optimizer's hooks see the rank's own gradient before it is averaged. What the optimizer needs from the
other ranks is the sum of their squared norms: one number per tensor.
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

from sgdol.torch._world._alone import LocalSums, World

__all__ = ["DataParallel", "Unwrapped", "check_counts", "find_wrapper", "wrappings"]

# Communication hooks of torch that return the mean over the ranks, up to rounding.
FAITHFUL = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")


class DataParallel(World):
    """The ranks of a DistributedDataParallel module.

    Args:
        wrapper: the module.
        name: the name of the optimizer, for messages.
    """

    overwrites = True  # .grad may be a view of a bucket, which the next backward fills

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
        return True

    def share(self, params: list[Tensor], sums: LocalSums) -> LocalSums:
        self._refuse_join()
        counts = sums.q.new_tensor([sums.passes, sums.passes**2])
        parts = [sums.q, sums.seen, counts]
        if sums.squares:  # as large as the gradient: one message of their type
            like = sums.squares[0]
            parts = [part.to(like) for part in (*(s.reshape(-1) for s in sums.squares), *parts)]
        flat = torch.cat(parts)
        dist.all_reduce(flat, group=self._group)
        check_counts(flat[-2:], self.ranks)
        *squares, q, seen, _ = flat.split([part.numel() for part in parts])
        # A contribution to the mean is 1/ranks of a rank's gradient. The rows are sums over .grad, equal on all ranks.
        squares = [(s / self.ranks**2).view(o.shape).to(o) for s, o in zip(squares, sums.squares, strict=True)]
        return sums._replace(q=(q / self.ranks**2).to(sums.q), seen=seen.to(sums.q), squares=squares)

    def mean(self, *values: float) -> list[float]:
        self._refuse_join()
        device = next(self._wrapper().parameters()).device  # type: ignore[union-attr]
        total = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=self._group)
        return (total / self.ranks).tolist()

    def _refuse_join(self) -> None:
        # Inside join() ranks without inputs take part in the all-reduces of DistributedDataParallel, not in ours, which
        # would wait for ever.
        config = getattr(self._wrapper(), "_join_config", None)
        if config is not None and config.enable and not config.throw_on_early_termination:
            raise NotImplementedError(
                f"{self._name} does not run under DistributedDataParallel's join(), where ranks run out of inputs: "
                "give every rank the same number of batches (DistributedSampler does), or use "
                "join(throw_on_early_termination=True)"
            )


class Unwrapped(World):
    """One of several ranks whose gradients no engine averages."""

    def __init__(self, name: str) -> None:
        self.warnings = (
            f"{name} runs on several ranks without DistributedDataParallel around its parameters, so the noise that "
            "it sees is that of its own rank's microbatches. If gradients are averaged by hand, the ranks will "
            "drift apart: use DistributedDataParallel, or one backward() per step(). Ignore this if every rank trains "
            "a model of its own.",
        )


def check_counts(sums: Tensor, ranks: int) -> None:
    """Raise unless all ranks ran the same number of passes, given the sums of these numbers and of their squares."""
    if sums.device.type != "cpu":  # an accelerator is not waited for
        return
    total, squares = sums.tolist()
    # Equality in Cauchy and Schwarz: r sum n^2 = (sum n)^2. All ranks have the same sums, so all raise or none.
    if round(ranks * squares) != round(total) ** 2:
        raise RuntimeError(
            f"all ranks must run the same number of backward passes before step(): {ranks} ranks ran {round(total)} in "
            f"all, not the same number each"
        )


def find_wrapper(params: list[Tensor], optimizer: object, name: str) -> DistributedDataParallel | None:
    """The DistributedDataParallel module of these parameters, or None.

    A wrapper leaves no mark on a parameter, and an optimizer is given parameters, not modules: the garbage collector,
    which knows every live object, is asked for the module.
    """
    wrappers = _find_wrappers(params, optimizer, name)
    if len(wrappers) > 1:  # one that the program has replaced may not be collected yet
        wrappers.clear()
        gc.collect()
        wrappers = _find_wrappers(params, optimizer, name)
    return max(wrappers, key=lambda wrapper: _ORDER.get(wrapper, 0), default=None)


def _find_wrappers(params: list[Tensor], optimizer: object, name: str) -> list[DistributedDataParallel]:
    # Raises for engines that are not supported.
    ids = {id(p) for p in params}
    wrappers = []
    zero = _imported("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
    flat = _imported("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
    for candidate in gc.get_objects():
        if issubclass(type(candidate), DistributedDataParallel):
            if any(id(p) in ids for p in candidate.module.parameters()):
                wrappers.append(candidate)
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
    return wrappers


_WRAPPED = [0]  # how often a model was wrapped in DistributedDataParallel since wrappings() was first called
_ORDER: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()  # the last wrapper is in use
_WATCHING: list[Any] = []  # the handle of the hook below


def wrappings() -> int:
    if not _WATCHING:
        _WATCHING.append(register_module_module_registration_hook(_note))
    return _WRAPPED[0]


def _note(module: torch.nn.Module, name: str, submodule: torch.nn.Module) -> None:
    if name == "module" and isinstance(module, DistributedDataParallel):
        _WRAPPED[0] += 1
        _ORDER[module] = _WRAPPED[0]


def _imported(module: str, name: str) -> tuple[type, ...]:
    # The class, if the program has imported it, for issubclass(): importing it here would take time.
    return (getattr(sys.modules[module], name),) if module in sys.modules else ()
