"""DistributedDataParallel with gloo: equality over ranks to the bit, with one process to rounding."""

import copy
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from sgdol import SGDOL

STEPS = 6
BATCH = 4


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()


def batches(step: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return list(torch.randn(count, BATCH, 5, generator=generator, dtype=torch.float64).unbind())


def objective(net, x):
    return (net(x) - x.sum(1, keepdim=True)).square().mean()


def single_process(world: int, microbatches: int, clip: float | None, options: dict) -> tuple[list, list]:
    net = model()
    opt = SGDOL(net.parameters(), lr=0.1, **options)
    step_sizes = []
    for step in range(STEPS):
        every = batches(step, world * microbatches)
        for x in every:
            (objective(net, x) / len(every)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        opt.step()
        opt.zero_grad()
        step_sizes.append(float(opt.param_groups[0]["step_size"]))
    return [p.detach() for p in net.parameters()], step_sizes


def worker(rank: int, world: int, folder: str, microbatches: int, clip: float | None, ddp: dict, options: dict) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        net = DistributedDataParallel(model(), **ddp)
        opt = SGDOL(net.parameters(), lr=0.1, **options)
        reduced: list[int] = []
        all_reduce = dist.all_reduce

        def counted(tensor, *args, **kwargs):
            reduced.append(tensor.numel())
            return all_reduce(tensor, *args, **kwargs)

        dist.all_reduce = counted
        step_sizes = []
        for step in range(STEPS):
            mine = batches(step, world * microbatches)[rank::world]
            for i, x in enumerate(mine):
                value = objective(net, x) / microbatches
                if i + 1 < microbatches:
                    with net.no_sync():
                        objective_again = objective(net, x) / microbatches
                        objective_again.backward()
                else:
                    value.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            opt.step()
            opt.zero_grad()
            step_sizes.append(float(opt.param_groups[0]["step_size"]))
        dist.all_reduce = all_reduce
        torch.save(
            {
                "params": [p.detach().clone() for p in net.parameters()],
                "state": opt.state_dict(),
                "step_sizes": step_sizes,
                "reduced": reduced,
                "gradients": opt.diagnostics()["gradients"],
            },
            f"{folder}/{rank}.pt",
        )
    finally:
        dist.destroy_process_group()


def run(tmp_path: Path, world: int, microbatches=1, clip=None, ddp=None, **options) -> list[dict]:
    mp.spawn(worker, (world, str(tmp_path), microbatches, clip, ddp or {}, options), nprocs=world)
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(world)]


def tensors(tree) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return list(itertools.chain.from_iterable(tensors(v) for v in tree.values()))
    if isinstance(tree, list):
        return list(itertools.chain.from_iterable(tensors(v) for v in tree))
    return []


SIZE = sum(p.numel() for p in model().parameters())

CASES = [
    pytest.param(2, {}, 1, id="global, 2 ranks"),
    pytest.param(4, {"clip": 0.5}, 1, id="global, 4 ranks, clipped"),
    pytest.param(2, {"microbatches": 2}, 1, id="global, 2 ranks with 2 microbatches each"),
    pytest.param(
        2, {"ddp": {"gradient_as_bucket_view": True}, "microbatches": 2, "clip": 0.5}, 1, id="bucket views, clipped"
    ),
    pytest.param(2, {"granularity": "tensor", "momentum": 0.9}, 4, id="tensor, momentum"),
    pytest.param(2, {"granularity": "coordinate", "weight_decay": 0.1}, SIZE + 4, id="coordinate"),
]


@pytest.mark.parametrize(("world", "settings", "numbers"), CASES)
def test_ranks_are_independent_gradients(tmp_path, world, settings, numbers):
    ranks = run(tmp_path, world, **copy.deepcopy(settings))
    for other in ranks[1:]:
        for a, b in zip(tensors(ranks[0]), tensors(other), strict=True):
            assert torch.equal(a, b)
    options = {k: v for k, v in settings.items() if k not in ("microbatches", "clip", "ddp")}
    microbatches = settings.get("microbatches", 1)
    params, step_sizes = single_process(world, microbatches, settings.get("clip"), options)
    assert ranks[0]["gradients"] == world * microbatches
    torch.testing.assert_close(ranks[0]["params"], params, rtol=1e-10, atol=1e-12)
    assert ranks[0]["step_sizes"] == pytest.approx(step_sizes, rel=1e-10)
    assert step_sizes[-1] < 0.99 * step_sizes[0]  # there is noise to be seen
    assert ranks[0]["reduced"] == [numbers] * STEPS
