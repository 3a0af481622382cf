"""What SGDOL costs over torch.optim.SGD: time of step(), of a whole training step, and memory.

All contenders run interleaved in one process on one thread, so that a slow moment of the machine hits them alike, and
what is timed is the time of the CPU. Each round times every contender once; a row's ratio is the median over rounds of
the contender's time over the baseline's in the same round, with the quartiles as its spread.

    python -m benchmarks.cost [--rounds 15] [--quick]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import machine, table, timed
from sgdol import SGDOL, SGDOLFree
from sgdol.learners import FTRL

OUT = Path(__file__).parent / "results" / "cost.md"
TENSORS, SIZE = 60, 333_334
PLAIN: dict[str, Any] = {"momentum": 0.0, "learner": FTRL()}
"""Without momentum, as SGD is: the paper's learner."""
MANY, FEW = 500, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="how often each contender is timed")
    parser.add_argument("--quick", action="store_true", help="three rounds, nothing is written")
    arguments = parser.parse_args()
    rounds = 3 if arguments.quick else arguments.rounds
    torch.set_num_threads(1)
    lines = [
        "# Cost of SGDOL over SGD",
        "",
        f"Made by `make bench`: {rounds} interleaved rounds on one thread, CPU time, median and quartiles of the ratio "
        f"in each round. {machine()}",
        "",
        f"## step() alone: {TENSORS} tensors, {TENSORS * SIZE / 1e6:.0f} million float32 parameters",
        "",
        *table(timed(_steps(TENSORS, SIZE), rounds), "SGD(foreach=True)"),
        "",
        f"## step() alone: {MANY} tensors of {FEW} numbers, where Python is what costs",
        "",
        *table(timed(_steps(MANY, FEW), 10 * rounds), "SGD(foreach=True)"),
        "",
        "PLAIN is momentum=0, learner=FTRL(): the direction that SGD has. SGDOL() has momentum 0.9: compare it with "
        "SGD(momentum=0.9).",
        "",
        "`step()` does not contain the norms that SGDOL takes during backward; what follows does.",
        "",
        f"## Two backward passes and step(): {TENSORS} tensors, {TENSORS * SIZE / 1e6:.0f} million float32 parameters",
        "",
        "The passes of sum(p * w), which cost next to nothing by themselves: the least favourable model.",
        "",
        *table(timed(_steps(TENSORS, SIZE, whole=True), rounds), "SGD(foreach=True)"),
    ]
    for name, (build, contenders, about, times) in _trainings().items():
        # Where Python is what costs, a batch in two parts costs more by itself: that is not the optimizer's.
        baseline = "SGD(foreach=True)" + (", two microbatches" if build is _small_mlp else "")
        measured = timed(contenders, times * rounds)
        lines += ["", f"## A whole training step: {name}", "", about, "", *table(measured, baseline)]
    lines += _small_networks(rounds)
    lines += ["", "## Memory that grows with the model, beyond parameters and gradients", "", *_memory()]
    text = "\n".join(lines) + "\n"
    print(text)
    if not arguments.quick:
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(text)
        print(f"written to {OUT.relative_to(Path.cwd()) if OUT.is_relative_to(Path.cwd()) else OUT.name}")


# step() alone ---------------------------------------------------------------------------------------------------------


def _steps(tensors: int, size: int, *, whole: bool = False) -> dict[str, Iterator[float]]:
    """The time of step(), or of two backward passes and step()."""

    def contender(make: Callable[[list[nn.Parameter]], Any], passes: int) -> Iterator[float]:
        params = [nn.Parameter(torch.randn(size)) for _ in range(tensors)]
        weights = [torch.randn(size) for _ in range(4)]
        optimizer = make(params)
        for turn in range(1_000_000):
            start = time.process_time()
            for i in range(passes):
                torch.stack([(p * weights[(turn + i) % 4]).sum() for p in params]).sum().backward()
            start = start if whole else time.process_time()
            optimizer.step()
            yield time.process_time() - start
            optimizer.zero_grad()

    return {
        "SGD(foreach=True)": contender(lambda p: torch.optim.SGD(p, lr=1e-3, foreach=True), 2),
        "SGDOL(**PLAIN)": contender(lambda p: SGDOL(p, lr=1e-3, **PLAIN), 2),
        'SGDOL(granularity="tensor", **PLAIN)': contender(
            lambda p: SGDOL(p, lr=1e-3, granularity="tensor", **PLAIN), 2
        ),
        "SGDOL(**PLAIN), two step() calls per update": _pairs(contender(lambda p: SGDOL(p, lr=1e-3, **PLAIN), 1)),
        "SGD(momentum=0.9, foreach=True)": contender(
            lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=True), 2
        ),
        "SGDOL()": contender(lambda p: SGDOL(p, lr=1e-3), 2),
        'SGDOL(metric="rms")': contender(lambda p: SGDOL(p, lr=1e-3, metric="rms"), 2),
        "Adam(foreach=True)": contender(lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True), 2),
        'SGDOL(granularity="coordinate", **PLAIN)': contender(
            lambda p: SGDOL(p, lr=1e-3, granularity="coordinate", **PLAIN), 2
        ),
    }


def _pairs(steps: Iterator[float]) -> Iterator[float]:
    """The mean time of a call that holds and one that updates."""
    while True:
        yield (next(steps) + next(steps)) / 2


# Whole training steps -------------------------------------------------------------------------------------------------


def _trainings() -> dict[str, tuple[Callable[[], nn.Module], dict[str, Iterator[float]], str, int]]:
    torch.manual_seed(0)
    images, labels = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    tokens, following = torch.randint(96, (16, 65)).split([64, 1], dim=1)
    following = torch.cat([tokens[:, 1:], following], dim=1)
    features, classes = torch.randn(256, 784), torch.randint(10, (256,))
    return {
        "MLP": (_mlp, _contenders(_mlp, features, classes), "784-1024-1024-10, batch 256.", 1),
        "CNN": (
            _cnn,
            _contenders(_cnn, images, labels),
            "Four convolutions to 128 channels, 32 x 32 images, batch 64.",
            1,
        ),
        "transformer": (
            _Transformer,
            _contenders(_Transformer, tokens, following),
            "Four layers of width 256, 64 tokens, batch 16.",
            1,
        ),
        "small MLP": (
            _small_mlp,
            _contenders(_small_mlp, features[:64, :64], classes[:64]),
            "64-64-10, batch 64: a fixed price of Python.",
            20,
        ),
    }


def _contenders(build: Callable[[], nn.Module], x: Tensor, y: Tensor) -> dict[str, Iterator[float]]:
    def contender(make: Callable[[Any], Any], parts: int) -> Iterator[float]:
        torch.manual_seed(0)
        net = build()
        optimizer = make(net.parameters())
        criterion = nn.CrossEntropyLoss()
        while True:
            start = time.process_time()
            for inputs, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
                output = net(inputs)
                (criterion(output.flatten(0, -2), targets.flatten()) / parts).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield time.process_time() - start

    return {
        "SGD(foreach=True)": contender(lambda p: torch.optim.SGD(p, lr=1e-3, foreach=True), 1),
        "SGD(foreach=True), two microbatches": contender(lambda p: torch.optim.SGD(p, lr=1e-3, foreach=True), 2),
        "SGD(momentum=0.9, foreach=True), two microbatches": contender(
            lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=True), 2
        ),
        "SGDOL(**PLAIN), two microbatches": contender(lambda p: SGDOL(p, lr=1e-3, **PLAIN), 2),
        "SGDOL(), two microbatches": contender(lambda p: SGDOL(p, lr=1e-3), 2),
        'SGDOL(granularity="coordinate", **PLAIN), two microbatches': contender(
            lambda p: SGDOL(p, lr=1e-3, granularity="coordinate", **PLAIN), 2
        ),
        "Adam(foreach=True)": contender(lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True), 1),
    }


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def _small_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _cnn() -> nn.Module:
    widths = [3, 32, 64, 128, 128]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


class _Transformer(nn.Module):
    """A causal language model on characters."""

    def __init__(self, characters: int = 96, width: int = 256, inner: int = 1024, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        layer = nn.TransformerEncoderLayer(width, 4, inner, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))


# SGDOLFree on small networks ------------------------------------------------------------------------------------------

TOGETHER = 24
"""So many steps are timed at once: every twelfth of SGDOLFree's looks back."""


def _small_networks(rounds: int) -> list[str]:
    torch.manual_seed(0)
    digits, images, classes = torch.randn(128, 64), torch.randn(128, 784), torch.randint(10, (128,))
    small, tokens = torch.randn(64, 1, 14, 14), torch.randint(64, (16, 16))
    mlps: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
        "MLP 64-128-10, 10^4 parameters": (lambda: _layers(64, 128, 10), digits),
        "MLP 64-64-64-10, 10^4 parameters": (lambda: _layers(64, 64, 64, 10), digits),
        "MLP 784-128-10, 10^5 parameters": (lambda: _layers(784, 128, 10), images),
    }
    cases = {
        f"{name}, batch {size}": (build, x[:size], classes[:size])
        for name, (build, x) in mlps.items()
        for size in (64, 128)
    }
    cases["CNN, 2 x 10^4 parameters, batch 64"] = (_small_cnn, small, classes[:64])
    cases["transformer, 2 x 10^4 parameters, batch 16"] = (_small_transformer, tokens, (5 * tokens + 1) % 64)
    how = f"Two microbatches for all; a mean over {TOGETHER} steps. The default metric is in `free-cost.md`."
    lines = ["", "## SGDOLFree on small networks", "", how]
    for name, (build, x, y) in cases.items():
        contenders = {
            "AdamW": _closure_contender(build, x, y, lambda p: torch.optim.AdamW(p, lr=1e-3)),
            "AdamW(fused=True)": _closure_contender(build, x, y, lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)),
            'SGDOLFree(metric="rms")': _closure_contender(build, x, y, lambda p: SGDOLFree(p, metric="rms")),
            'SGDOLFree(metric="euclidean")': _closure_contender(
                build, x, y, lambda p: SGDOLFree(p, metric="euclidean")
            ),
        }
        lines += ["", f"### {name}", "", *table(timed(contenders, rounds), "AdamW")]
    return lines


def _closure_contender(build: Callable[[], nn.Module], x: Tensor, y: Tensor, make: Callable[[Any], Any]) -> Any:
    torch.manual_seed(0)
    net = build()
    optimizer, criterion = make(net.parameters()), nn.CrossEntropyLoss()

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for inputs, targets in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = criterion(net(inputs).flatten(0, -2), targets.flatten()) / 2
            loss.backward()
            total += loss.detach()
        return total

    while True:
        start = time.process_time()
        for _ in range(TOGETHER):
            optimizer.step(closure)
        yield (time.process_time() - start) / TOGETHER


def _layers(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(800, 10)
    )


def _small_transformer() -> nn.Module:
    return _Transformer(characters=64, width=32, inner=64, layers=2)


# Memory ---------------------------------------------------------------------------------------------------------------


def _memory() -> list[str]:
    rows = ["| optimizer | kept between steps | gradients per step |", "|---|---|---|"]
    cases: list[tuple[str, Callable[[Any], Any], int]] = [
        ("SGD", lambda p: torch.optim.SGD(p, lr=1e-3), 1),
        ("SGDOL(**PLAIN), microbatches", lambda p: SGDOL(p, lr=1e-3, **PLAIN), 2),
        ("SGDOL(**PLAIN), one backward per step()", lambda p: SGDOL(p, lr=1e-3, **PLAIN), 1),
        ("SGDOL(), microbatches", lambda p: SGDOL(p, lr=1e-3), 2),
        ("Adam", lambda p: torch.optim.Adam(p, lr=1e-3), 1),
        (
            'SGDOL(granularity="coordinate", **PLAIN), microbatches',
            lambda p: SGDOL(p, lr=1e-3, granularity="coordinate", **PLAIN),
            2,
        ),
    ]
    for name, make, passes in cases:
        rows.append(f"| {name} | {_kept(make, passes):.2f} x the parameters | {passes} |")
    return rows


def _kept(make: Callable[[Any], Any], passes: int) -> float:
    """Bytes of tensors that exist after a few steps and did not before, without the gradients, over the parameters'."""

    def alive() -> int:
        gc.collect()
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if issubclass(type(t), Tensor)
        }
        return sum(storages.values())

    params = [nn.Parameter(torch.randn(1000, 100)) for _ in range(8)]
    before = alive()
    optimizer = make(params)
    for turn in range(3):
        for i in range(passes):
            torch.stack([(p * float(turn + i + 1)).sum() for p in params]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (alive() - before) / sum(p.nbytes for p in params)


if __name__ == "__main__":
    main()
