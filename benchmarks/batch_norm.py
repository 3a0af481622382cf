"""SGDOL beside SGD + momentum at the same rate, on small CNNs with and without BatchNorm.

    make bench-batch-norm

Both optimizers get the same batches, split into the same two halves, so that BatchNorm sees the same samples. Training
loss and validation accuracy are measured after the last step, in eval mode, with BatchNorm's statistics estimated anew
from the training samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.quality import data
from benchmarks.timing import machine
from sgdol import SGDOL
from sgdol.torch import backward

RESULTS = Path(__file__).parent / "results"
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
SEEDS = (4, 5, 6, 7, 8)
STEPS, BATCH = 300, 64


class End(NamedTuple):
    """Where a run ended."""

    loss: float
    accuracy: float
    multiplier: float
    """The last step size over lr: 1 for SGD."""


def cnn(side: int, channels: tuple[int, ...], norm: bool) -> nn.Sequential:
    """Convolutions of 3 x 3, each with BatchNorm if asked for, ReLU and pooling, on images given as rows."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, side, side))]
    for before, after in zip((1, *channels), channels, strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=not norm)]
        layers += [nn.BatchNorm2d(after)] * norm + [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * (side >> len(channels)) ** 2, 10))


NETWORKS: dict[str, tuple[data.Samples, Callable[[], nn.Module]]] = {
    "digits": (data.digits("even"), lambda: cnn(8, (16, 32), norm=False)),
    "digits, BatchNorm": (data.digits("even"), lambda: cnn(8, (16, 32), norm=True)),
    "MNIST": (data.mnist("even", size=14), lambda: cnn(14, (8, 16, 32), norm=False)),
    "MNIST, BatchNorm": (data.mnist("even", size=14), lambda: cnn(14, (8, 16, 32), norm=True)),
}
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor], float], torch.optim.Optimizer]] = {
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "SGDOL": lambda params, lr: SGDOL(params, lr=lr),
}


def train(network: str, make: Callable[[Any, float], torch.optim.Optimizer], lr: float, seed: int) -> End:
    """One run: the same initial weights and batches for every optimizer of a seed."""
    torch.manual_seed(seed)
    samples, build = NETWORKS[network]
    model = build()
    opt = make(model.parameters(), lr)
    for _ in range(STEPS):
        rows = torch.randint(len(samples.targets), (BATCH,))
        backward(lambda x, y: cross_entropy(model(x), y), samples.inputs[rows], samples.targets[rows])
        opt.step()
        opt.zero_grad()
    return evaluate(model, samples)._replace(multiplier=float(opt.param_groups[0].get("step_size", lr)) / lr)


@torch.no_grad()
def evaluate(model: nn.Module, samples: data.Samples) -> End:
    torch.optim.swa_utils.update_bn(samples.inputs.split(BATCH), model)
    model.eval()
    loss = cross_entropy(model(samples.inputs), samples.targets).item()
    right = (model(samples.test_inputs).argmax(1) == samples.test_targets).float().mean().item()
    return End(loss if math.isfinite(loss) else math.inf, right, 1.0)


def compared(runs: dict[str, list[End]]) -> str:
    """Whether the mean log training losses differ by more than the seeds do (the pooled standard deviation)."""
    constant, learned = ([math.log(end.loss) for end in runs[name]] for name in OPTIMIZERS)
    spread = math.sqrt((statistics.variance(constant) + statistics.variance(learned)) / 2)
    difference = statistics.mean(learned) - statistics.mean(constant)
    return "worse" if difference > spread else "better" if -difference > spread else "level"


def main() -> None:
    torch.set_num_threads(1)
    lines = [
        "# SGDOL beside SGD + momentum at the same rate, with and without BatchNorm",
        "",
        f"Made by `make bench-batch-norm`: small CNNs, {STEPS} steps with batches of {BATCH} in two halves, seeds "
        f"{SEEDS}. Training loss (median, and range over seeds), mean validation accuracy, and the median of SGDOL's "
        'last step size over lr. SGDOL is "worse" or "better" if the mean log training losses differ by more '
        f"than their standard deviation over seeds. Chance is a loss of {math.log(10):.2f} and 10 %. {machine()}",
        "",
        "| network | lr | SGD: loss | accuracy | SGDOL: loss | accuracy | step over lr | SGDOL is |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for network in NETWORKS:
        for lr in RATES:
            runs = {name: [train(network, make, lr, seed) for seed in SEEDS] for name, make in OPTIMIZERS.items()}
            cells = [network, f"{lr:g}"]
            for ends in runs.values():
                losses = sorted(end.loss for end in ends)
                cells.append(f"{statistics.median(losses):.2g} ({losses[0]:.2g} to {losses[-1]:.2g})")
                cells.append(f"{100 * statistics.mean(end.accuracy for end in ends):.0f} %")
            cells.append(f"{statistics.median(end.multiplier for end in runs['SGDOL']):.2f}")
            lines.append(f"| {' | '.join([*cells, compared(runs)])} |")
            print(lines[-1], flush=True)
    (RESULTS / "batch-norm.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
