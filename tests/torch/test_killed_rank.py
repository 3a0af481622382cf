"""A rank that dies ends the job: the others stop with an error, and nothing is saved that not all of them agree on."""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import LIMIT, forks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sgdol import SGDOL

DIES, STEPS = 3, 8
"""Before which step one of the ranks is killed, and how many steps there would be."""


def worker(rank: int, world: int, folder: str, engine: str) -> None:
    torch.set_num_threads(1)
    # A closed connection is noticed at once; the limit is for a rank that would wait for ever, not for a slow machine.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=LIMIT / 2),
    )
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
    model = fully_shard(net) if engine == "fsdp" else DistributedDataParallel(net)
    opt = SGDOL(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    try:
        for step in range(STEPS):
            x = torch.randn(4, 5, generator=data, dtype=torch.float64)
            model(x).square().mean().backward()
            if step == DIES and rank == 1:
                # After its backward: the others have every gradient they need, and only the optimizer's sum is missing.
                os.kill(os.getpid(), signal.SIGKILL)
            opt.step()
            opt.zero_grad()
            Path(f"{folder}/{step}-{rank}").touch()
    except Exception as error:
        Path(f"{folder}/error-{rank}").write_text(str(error))
        sys.exit(1)


@pytest.mark.parametrize(("engine", "world"), [("ddp", 3), ("fsdp", 2)])
def test_the_others_stop_with_an_error_and_save_nothing_more(tmp_path, engine, world):
    context = forks()
    ranks = [context.Process(target=worker, args=(rank, world, str(tmp_path), engine)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=LIMIT)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes[1] == -signal.SIGKILL
    assert not {0, None} & set(codes), "each ends, and with an error: an exception, or gloo's own abort"
    saved = {path.name for path in tmp_path.iterdir() if path.name[0].isdigit()}
    assert saved == {f"{step}-{rank}" for step in range(DIES) for rank in range(world)}
    for rank in (0, 2)[: world - 1]:
        assert codes[rank] < 0 or (tmp_path / f"error-{rank}").read_text()
