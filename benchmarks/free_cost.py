"""What SGDOLFree costs over AdamW with the same microbatches: CPU time of whole training steps, and memory.

All contenders of a network run interleaved in one process on one thread. A round times STEPS steps of each contender,
with the look-backs and the refreshes of bases that fall into them; a row has the fastest round.

    python -m benchmarks.free_cost [--rounds 5] [--quick] [--only GPT]
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.timing import machine
from sgdol import SGDOLFree
from sgdol.torch import backward

OUT = Path(__file__).parent / "results" / "free-cost.md"
SETTLED = 150
"""From this step on look-backs are 24 steps apart."""

Make = Callable[[Any], Any]


def main() -> None:
    """Print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="how often each contender is timed")
    parser.add_argument("--quick", action="store_true", help="two rounds, nothing is written")
    parser.add_argument("--only", default="", help="networks whose name contains this; nothing is written")
    arguments = parser.parse_args()
    rounds = 2 if arguments.quick else arguments.rounds
    torch.set_num_threads(1)
    lines = [
        "# Cost of SGDOLFree over AdamW",
        "",
        f"Made by `make bench-free`: whole training steps with two microbatches each, CPU time on one thread, the "
        f"fastest of {rounds} interleaved rounds (of four times as many for MLPs). {machine()}",
    ]
    for name, (build, batch, steps) in _networks().items():
        if arguments.only in name:
            lines += ["", f"## {name}", "", *_table(build, batch, steps, rounds)]
    if arguments.only in "memory":
        lines += ["", "## Memory", "", *_memory()]
    text = "\n".join(lines) + "\n"
    print(text)
    if not arguments.quick and not arguments.only:
        OUT.write_text(text)


# Time -----------------------------------------------------------------------------------------------------------------


def _networks() -> dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, Tensor], int]]:
    torch.manual_seed(0)
    classes = torch.randint(10, (128,))
    tokens = torch.randint(96, (16, 65))
    text = tokens[:, :-1], tokens[:, 1:]
    return {
        "MLP 64-128-10, batch 128, 10^4 parameters": (lambda: _mlp(64, 128, 10), (torch.randn(128, 64), classes), 120),
        "MLP 64-64-64-10, batch 128, 10^4 parameters": (
            lambda: _mlp(64, 64, 64, 10),
            (torch.randn(128, 64), classes),
            120,
        ),
        "MLP 784-128-10, batch 128, 10^5 parameters": (
            lambda: _mlp(784, 128, 10),
            (torch.randn(128, 784), classes),
            120,
        ),
        "GPT of width 256, 2 layers, 1024 tokens, 1.6 x 10^6 parameters": (lambda: GPT(256, 2), text, 30),
        "GPT of width 128, 8 layers, 1024 tokens, 1.6 x 10^6 parameters": (lambda: GPT(128, 8), text, 30),
    }


def _table(build: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], steps: int, rounds: int) -> list[str]:
    makers: dict[str, Make] = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
        "SGDOLFree": SGDOLFree,
        'SGDOLFree(metric="rms")': lambda p: SGDOLFree(p, metric="rms"),
        'SGDOLFree(metric="euclidean")': lambda p: SGDOLFree(p, metric="euclidean"),
    }
    contenders = {name: _training(build, batch, make, steps) for name, make in makers.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds * (4 if steps > 100 else 1)):  # small networks more often
        for name, contender in contenders.items():
            times[name].append(next(contender))
    best = {name: min(seconds) for name, seconds in times.items()}
    rows = ["| | ms | over AdamW | over rms |", "|---|---:|---:|---:|"]
    for name, seconds in best.items():
        over = seconds / best["AdamW"], seconds / best['SGDOLFree(metric="rms")']
        rows.append(f"| {name} | {seconds * 1e3:.2f} | {over[0]:.2f} | {over[1]:.2f} |")
    return rows


def _training(build: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], make: Make, steps: int) -> Iterator[float]:
    torch.manual_seed(0)
    net = build()
    step = _step(net, make(net.parameters()))
    for _ in range(SETTLED):
        step(*(part[:4] for part in batch))
    while True:
        start = time.process_time()
        for _ in range(steps):
            step(*batch)
        yield (time.process_time() - start) / steps


def _step(net: nn.Module, optimizer: Any) -> Callable[[Tensor, Tensor], None]:
    """One step of the usual loop: two halves of the batch, and SGDOLFree's ``backward``."""
    criterion = nn.CrossEntropyLoss()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return criterion(net(x).flatten(0, -2), y.flatten())

    def step(x: Tensor, y: Tensor) -> None:
        if isinstance(optimizer, SGDOLFree):
            backward(loss, x, y)
        else:
            for inputs, targets in zip(x.chunk(2), y.chunk(2), strict=True):
                (loss(inputs, targets) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class GPT(nn.Module):
    """A causal language model on 96 characters, with heads of 64 numbers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(96, width), nn.Linear(width, 96)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next character."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.inner(self.between(x))


# Memory ---------------------------------------------------------------------------------------------------------------


def _memory() -> list[str]:
    rows = [
        "Bytes per float32 parameter, which has 4 itself: what is kept between steps, without gradients, and the most "
        "that is allocated at any time, gradients included. Six matrices of 256 x 256 with few activations.",
        "",
        "| | kept | most |",
        "|---|---:|---:|",
    ]
    for name, make in _remembering().items():
        kept, peak = _bytes(make)
        rows.append(f"| {name} | {kept:.0f} | {peak:.0f} |")
    return rows


def _remembering() -> dict[str, Make]:
    found: dict[str, Make] = {
        "SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    }
    for name, module, optimizer in (
        ("Prodigy", "prodigyopt", "Prodigy"),
        ("Schedule-Free AdamW", "schedulefree", "AdamWScheduleFree"),
    ):
        if importlib.util.find_spec(module):
            found[name] = getattr(importlib.import_module(module), optimizer)
    found["SGDOLFree"] = SGDOLFree
    found['SGDOLFree(metric="rms")'] = lambda p: SGDOLFree(p, metric="rms")
    found['SGDOLFree(metric="euclidean")'] = lambda p: SGDOLFree(p, metric="euclidean")
    for metric in ("kronecker", "rms", "euclidean"):
        narrow = partial(SGDOLFree, metric=metric, state_dtype=torch.bfloat16)
        found[f'SGDOLFree(metric="{metric}", state_dtype=torch.bfloat16)'] = narrow
    return found


def _bytes(make: Make) -> tuple[float, float]:
    """Bytes beyond the parameters, per parameter: kept after some steps, and the most that there were at any time."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    optimizer = make(net.parameters())
    if hasattr(optimizer, "train"):  # Schedule-Free
        optimizer.train()
    step = _step(net, optimizer)
    batch = torch.randn(4, 256), torch.randint(256, (4,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(12):
            step(*batch)
        gc.collect()
    found: Any = profiler.profiler.kineto_results.events()
    events = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(found) if e.name() == "[memory]")
    totals = list(itertools.accumulate(nbytes for _, _, nbytes in events))
    count = sum(p.numel() for p in net.parameters())
    return totals[-1] / count, max(totals) / count


if __name__ == "__main__":
    main()
