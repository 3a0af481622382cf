"""How the cost of SGDOL grows with parameters, microbatches and ranks.

Time of step() against torch.optim.SGD for growing models, of a training step for more microbatches, and of a step under
DistributedDataParallel and fully_shard with the bytes that step() itself communicates. Interleaved as in
benchmarks.cost.

    python -m benchmarks.scale [--rounds 15] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cost import PLAIN
from benchmarks.timing import machine, timed
from sgdol import SGDOL

OUT = Path(__file__).parent / "results" / "scale.md"
GRANULARITIES = ("global", "tensor", "coordinate")
TENSORS = 50
SIZES = (100_000, 1_000_000, 10_000_000, 50_000_000)
MICROBATCHES = (2, 4, 8, 16)
WORLDS = (2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="how often each contender is timed")
    parser.add_argument("--quick", action="store_true", help="three rounds of small cases, nothing is written")
    arguments = parser.parse_args()
    rounds = 3 if arguments.quick else arguments.rounds
    torch.set_num_threads(1)
    lines = [
        "# How the cost of SGDOL grows",
        "",
        f"Made by `python -m benchmarks.scale --rounds {rounds}` (`make bench-scale`): "
        f"{rounds} interleaved rounds, one thread per process; medians (quartiles) of the "
        f"ratio to SGD in each round. {machine()}",
        "",
        f"## Parameters: step() alone, {TENSORS} float32 tensors, two microbatches",
        "",
        *_parameters(SIZES[:2] if arguments.quick else SIZES, rounds),
        "",
        "## Microbatches: a training step of an MLP (784-1024-1024-10, batch 256) with k of them",
        "",
        *_microbatches(MICROBATCHES[:2] if arguments.quick else MICROBATCHES, rounds),
        "",
        "## Ranks: a data-parallel step of the same MLP (batch 64 on each), gloo, all ranks on this machine's cores",
        "",
        *_ranks(WORLDS[:1] if arguments.quick else WORLDS, rounds),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if not arguments.quick:
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(text)


def _ratio(seconds: list[float], baseline: list[float]) -> str:
    low, middle, high = statistics.quantiles([a / b for a, b in zip(seconds, baseline, strict=True)], n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


# Parameters -----------------------------------------------------------------------------------------------------------


def _parameters(sizes: tuple[int, ...], rounds: int) -> list[str]:
    rows = [
        f"| parameters | SGD, ms | {' | '.join(GRANULARITIES)} | Adam |",
        "|---:|---:|" + "---:|" * (len(GRANULARITIES) + 1),
    ]
    for size in sizes:
        contenders = {"SGD": _step(size, lambda p: torch.optim.SGD(p, lr=1e-3, foreach=True))}
        for name in GRANULARITIES:
            contenders[name] = _step(size, lambda p, name=name: SGDOL(p, lr=1e-3, granularity=name, **PLAIN))  # type: ignore[misc]
        contenders["Adam"] = _step(size, lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True))
        times = timed(contenders, rounds)
        sgd = times.pop("SGD")
        ratios = " | ".join(_ratio(seconds, sgd) for seconds in times.values())
        rows.append(f"| {size:,} | {statistics.median(sgd) * 1e3:.2f} | {ratios} |")
    return rows


def _step(size: int, make: Callable[[list[nn.Parameter]], Any]) -> Iterator[float]:
    """The time of step() by itself, after two backward passes."""
    params = [nn.Parameter(torch.randn(size // TENSORS)) for _ in range(TENSORS)]
    weights = [torch.randn(size // TENSORS) for _ in range(4)]
    optimizer = make(params)
    turn = 0
    while True:
        for i in range(2):
            torch.stack([(p * weights[(turn + i) % 4]).sum() for p in params]).sum().backward()
        start = time.perf_counter()
        optimizer.step()
        yield time.perf_counter() - start
        optimizer.zero_grad()
        turn += 1


# Microbatches ---------------------------------------------------------------------------------------------------------


def _microbatches(counts: tuple[int, ...], rounds: int) -> list[str]:
    rows = ["| k | SGD with k microbatches, ms | SGDOL with k, ratio | per coordinate |", "|---:|---:|---:|---:|"]
    for k in counts:
        times = timed(
            {
                "SGD": _training(k, lambda p: torch.optim.SGD(p, lr=1e-3, foreach=True)),
                "global": _training(k, lambda p: SGDOL(p, lr=1e-3, **PLAIN)),
                "coordinate": _training(k, lambda p: SGDOL(p, lr=1e-3, granularity="coordinate", **PLAIN)),
            },
            rounds,
        )
        sgd = times.pop("SGD")
        ratios = " | ".join(_ratio(seconds, sgd) for seconds in times.values())
        rows.append(f"| {k} | {statistics.median(sgd) * 1e3:.1f} | {ratios} |")
    return rows


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def _training(k: int, make: Callable[[Any], Any]) -> Iterator[float]:
    net, criterion = _mlp(), nn.CrossEntropyLoss()
    x, y = torch.randn(256, 784), torch.randint(10, (256,))
    optimizer = make(net.parameters())
    while True:
        start = time.perf_counter()
        for inputs, targets in zip(x.chunk(k), y.chunk(k), strict=True):
            (criterion(net(inputs), targets) / k).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield time.perf_counter() - start


# Ranks ----------------------------------------------------------------------------------------------------------------


def _ranks(worlds: tuple[int, ...], rounds: int) -> list[str]:
    rows = [
        "| ranks | engine | granularity | SGD, ms | SGDOL, ratio | collectives in step() | bytes | gradient's bytes |",
        "|---:|---|---|---:|---:|---:|---:|---:|",
    ]
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (world, rounds, folder), nprocs=world)
            for row in torch.load(Path(folder, "rows.pt")):
                rows.append(f"| {world} | {' | '.join(row)} |")
    return rows


def _rank(rank: int, world: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    sent: list[int] = []
    _count_bytes(sent)
    names = ("SGD", *GRANULARITIES)
    gradient = sum(p.numel() * 4 for p in _mlp().parameters())
    rows = []
    for engine in ("DistributedDataParallel", "fully_shard"):
        contenders = {name: _distributed_training(rank, engine, name, sent) for name in names}
        times = timed({name: _seconds(steps) for name, steps in contenders.items()}, rounds)
        for name in GRANULARITIES:
            _, sizes = next(contenders[name])
            seconds, ratio = statistics.median(times["SGD"]) * 1e3, _ratio(times[name], times["SGD"])
            rows.append((engine, name, f"{seconds:.1f}", ratio, str(len(sizes)), f"{sum(sizes):,}", f"{gradient:,}"))
    if rank == 0:
        torch.save(rows, Path(folder, "rows.pt"))
    dist.destroy_process_group()


def _distributed_training(rank: int, engine: str, name: str, sent: list[int]) -> Iterator[tuple[float, list[int]]]:
    net = _mlp()
    if engine == "fully_shard":
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    else:
        net = DistributedDataParallel(net)  # type: ignore[assignment]
    torch.manual_seed(rank)
    x, y, criterion = torch.randn(64, 784), torch.randint(10, (64,)), nn.CrossEntropyLoss()
    if name == "SGD":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, foreach=True)
    else:
        optimizer = SGDOL(net.parameters(), lr=1e-3, granularity=name, **PLAIN)  # type: ignore[arg-type]
    while True:
        start = time.perf_counter()
        criterion(net(x), y).backward()
        sent.clear()
        optimizer.step()
        optimizer.zero_grad()
        yield time.perf_counter() - start, list(sent)


def _seconds(steps: Iterator[tuple[float, list[int]]]) -> Iterator[float]:
    for seconds, _ in steps:
        yield seconds


def _count_bytes(sent: list[int]) -> None:
    """Note the size of every all-reduce that Python starts; DistributedDataParallel's own start in C++."""
    all_reduce = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **options: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *args, **options)

    dist.all_reduce = counted


if __name__ == "__main__":
    main()
