"""Several ranks at once: processes that are forked from one that has imported torch, which takes seconds each else."""

import itertools
import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

import torch
import torch.multiprocessing

IMPORTED = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "sgdol.torch", "pytest"]


def processes() -> ForkServerContext:
    """Where such processes come from: a server without threads, which this process has for itself."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    return multiprocessing.get_context("forkserver")


def launch(worker: Callable[..., None], arguments: tuple[Any, ...], world: int) -> None:
    """Run worker(rank, *arguments) on so many ranks, to their end; an error in one of them is raised here."""
    processes()
    torch.multiprocessing.start_processes(worker, arguments, nprocs=world, start_method="forkserver")


def tensors(tree) -> list[torch.Tensor]:
    """All tensors in nested dictionaries and lists, in their order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict | list):
        children = tree.values() if isinstance(tree, dict) else tree
        return list(itertools.chain.from_iterable(map(tensors, children)))
    return []
