"""DistributedDataParallel with gloo: equality over ranks to the bit, with one process to rounding."""

import itertools
from contextlib import nullcontext
from unittest import mock

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


def train(rank: int, world: int, microbatches: int = 1, clip: float | None = None, ddp=None, **options) -> dict:
    net = DistributedDataParallel(model(), **(ddp or {}))
    opt = SGDOL(net.parameters(), lr=0.1, **options)
    reduced: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        reduced.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    step_sizes = []
    with mock.patch.object(dist, "all_reduce", counted):
        for step in range(STEPS):
            mine = batches(step, world * microbatches)[rank::world]
            for i, x in enumerate(mine):
                with nullcontext() if i + 1 == microbatches else net.no_sync():
                    (objective(net, x) / microbatches).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            opt.step()
            opt.zero_grad()
            step_sizes.append(float(opt.param_groups[0]["step_size"]))
    return {
        "params": [p.detach().clone() for p in net.parameters()],
        "state": opt.state_dict(),
        "step_sizes": step_sizes,
        "reduced": reduced,
        "gradients": opt.diagnostics()["gradients"],
    }


def worker(rank: int, world: int, folder: str, cases: dict[str, dict]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        torch.save({name: train(rank, world, **case) for name, case in cases.items()}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def tensors(tree) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return list(itertools.chain.from_iterable(tensors(v) for v in tree.values()))
    if isinstance(tree, list):
        return list(itertools.chain.from_iterable(tensors(v) for v in tree))
    return []


SIZE = sum(p.numel() for p in model().parameters())

CASES: dict[int, dict[str, tuple[dict, int]]] = {
    2: {
        "global": ({}, 1),
        "global, two microbatches on each rank": ({"microbatches": 2}, 1),
        "bucket views, clipped": ({"ddp": {"gradient_as_bucket_view": True}, "microbatches": 2, "clip": 0.5}, 1),
        "tensor, momentum": ({"granularity": "tensor", "momentum": 0.9}, 4),
        "coordinate": ({"granularity": "coordinate", "weight_decay": 0.1}, SIZE + 4),
    },
    4: {
        "global, clipped": ({"clip": 0.5}, 1),
        "coordinate": ({"granularity": "coordinate"}, SIZE + 4),
    },
}
"""For each number of ranks: the settings of a run, and how many numbers it may communicate in a step."""


@pytest.fixture(scope="module", params=list(CASES))
def results(request, tmp_path_factory) -> tuple[int, list[dict]]:
    """All runs of one world size in one set of processes: starting them is what takes the time."""
    world, folder = request.param, tmp_path_factory.mktemp("ddp")
    cases = {name: settings for name, (settings, _) in CASES[world].items()}
    mp.spawn(worker, (world, str(folder), cases), nprocs=world)
    return world, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def test_all_ranks_hold_the_same_bits(results):
    world, ranks = results
    for name in CASES[world]:
        for other in ranks[1:]:
            for a, b in zip(tensors(ranks[0][name]), tensors(other[name]), strict=True):
                assert torch.equal(a, b), name


def test_ranks_are_the_microbatches_of_one_process(results):
    world, ranks = results
    for name, (settings, _) in CASES[world].items():
        options = {k: v for k, v in settings.items() if k not in ("microbatches", "clip", "ddp")}
        microbatches = settings.get("microbatches", 1)
        params, step_sizes = single_process(world, microbatches, settings.get("clip"), options)
        found = ranks[0][name]
        assert found["gradients"] == world * microbatches, name
        torch.testing.assert_close(found["params"], params, rtol=1e-10, atol=1e-12)
        assert found["step_sizes"] == pytest.approx(step_sizes, rel=1e-10), name
        assert step_sizes[-1] < 0.99 * step_sizes[0], "there is no noise to be seen"


def test_the_extra_communication_is_one_small_sum(results):
    world, ranks = results
    for name, (_, numbers) in CASES[world].items():
        assert ranks[0][name]["reduced"] == [numbers] * STEPS, name
