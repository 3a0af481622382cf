"""Several ranks at once, in processes that gloo connects, and what they communicate."""

import faulthandler
import gc
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from processes import LIMIT, NotEndedError, forks


def on_ranks(program: Callable[..., Any], world: int, *arguments: Any, connected: bool = True) -> list[Any]:
    """What program(rank, world, *arguments) returns on each of so many ranks, which gloo connects.

    An error on one of them is raised here. Ranks that wait for each other for ever are killed, and where they waited is
    what the error says.

    Args:
        program: a function of a module, which every rank imports.
        world: how many ranks there are.
        arguments: are given to it.
        connected: False if the program itself connects the ranks.
    """
    forks()
    with tempfile.TemporaryDirectory() as folder:
        ranks = torch.multiprocessing.start_processes(
            _rank, (world, folder, program, arguments, connected), nprocs=world, join=False, start_method="forkserver"
        )
        end = time.monotonic() + LIMIT
        try:
            while not ranks.join(timeout=1):
                if time.monotonic() > end:
                    stacks = "\n".join(path.read_text() for path in sorted(Path(folder).glob("stack-*")))
                    raise NotEndedError(f"{program.__name__} had not ended on {world} ranks after {LIMIT} s\n{stacks}")
        finally:
            for process in ranks.processes:
                process.kill()
        return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(world)]


def _rank(rank: int, world: int, folder: str, program: Callable[..., Any], arguments: Any, connected: bool) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what has been imported is neither garbage nor a model that an optimizer would look for
    with open(f"{folder}/stack-{rank}", "w") as stack:
        faulthandler.dump_traceback_later(LIMIT - 20, file=stack)
        if connected:
            connect(f"{folder}/rendezvous", rank, world)
        try:
            torch.save(program(rank, world, *arguments), f"{folder}/{rank}.pt")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def connect(path: str, rank: int, world: int) -> None:
    """Join the process group whose ranks meet at a file, which no other group has, as it might have a port."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)


@contextmanager
def reductions() -> Iterator[list[int]]:
    """How many numbers each all-reduce inside has that is asked for by Python: those of the optimizer."""
    numbers, all_reduce = [], dist.all_reduce

    def counted(tensor: torch.Tensor, *rest: Any, **options: Any) -> Any:
        numbers.append(tensor.numel())
        return all_reduce(tensor, *rest, **options)

    with mock.patch.object(dist, "all_reduce", counted):
        yield numbers


def tensors(tree) -> list[torch.Tensor]:
    """All tensors in nested dictionaries and lists, in their order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict | list):
        children = tree.values() if isinstance(tree, dict) else tree
        return list(itertools.chain.from_iterable(map(tensors, children)))
    return []
