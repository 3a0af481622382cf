"""SGDOLFree's weight decay beside AdamW's: the same values on networks that see few samples, and on a regression.

    make bench-weight-decay

AdamW has the best of three constant rates for each network, by validation loss at seed 0 and weight decay 0.01.
SGDOLFree has no rate and is evaluated at its average.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from benchmarks.quality import data
from benchmarks.quality.kinds.images import VisionTransformer
from benchmarks.quality.networks import CNN
from benchmarks.timing import machine
from sgdol import SGDOLFree
from sgdol.torch import backward

RESULTS = Path(__file__).parent / "results"
DECAYS = (0.0, 0.01, 0.1, 1.0)
RATES = (1e-3, 3e-3, 1e-2)
SEEDS = (1, 2, 3)
IMAGES, STEPS, BATCH = 300, 300, 50
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "CNN": lambda: CNN(14, (16, 32)),
    "ViT": lambda: VisionTransformer(14, (2, 7), 32, 4, 2),
}


class End(NamedTuple):
    """Validation loss and accuracy, the norm of the weights, and what weight_decay was multiplied by in all steps."""

    loss: float
    accuracy: float
    norm: float
    multiplier: float


def optimizer(model: nn.Module, decay: float, lr: float | None) -> torch.optim.Optimizer:
    """AdamW at this rate, SGDOLFree without one."""
    if lr is None:
        return SGDOLFree(model.parameters(), weight_decay=decay)
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)


def train(network: str, decay: float, lr: float | None, seed: int) -> End:
    """One run on the first ``IMAGES`` images, drawn with replacement."""
    torch.manual_seed(seed)
    samples, model = data.mnist("even", size=14), NETWORKS[network]()
    opt, multiplier = optimizer(model, decay, lr), 0.0
    for _ in range(STEPS):
        rows = torch.randint(IMAGES, (BATCH,))
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        backward(lambda x, y: cross_entropy(model(x), y), samples.inputs[rows], samples.targets[rows])
        opt.step()
        opt.zero_grad()
        moved = nn.utils.parameters_to_vector(model.parameters()).detach() - before
        multiplier += moved.square().mean().sqrt().item() if lr is None else lr
    with torch.no_grad(), opt.averaged() if isinstance(opt, SGDOLFree) else nullcontext():
        outputs = model(samples.test_inputs)
        loss = cross_entropy(outputs, samples.test_targets).item()
        right = (outputs.argmax(1) == samples.test_targets).float().mean().item()
        norm = nn.utils.parameters_to_vector(model.parameters()).norm().item()
    return End(loss, right, norm, multiplier)


def regression(decay: float, scale: float, seed: int) -> tuple[float, torch.Tensor]:
    """The loss of SGDOLFree on a noiseless regression after 600 steps, and its weights; ``scale`` times the loss."""
    torch.manual_seed(seed)
    x = torch.randn(512, 10)
    y = torch.sin(x @ torch.randn(10, 1) / math.sqrt(10))
    model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1))
    opt = SGDOLFree(model.parameters(), weight_decay=decay)
    for _ in range(600):
        rows = torch.randint(512, (64,))
        backward(lambda a, b: scale * mse_loss(model(a), b), x[rows], y[rows])
        opt.step()
        opt.zero_grad()
    with torch.no_grad(), opt.averaged():
        return mse_loss(model(x), y).item(), nn.utils.parameters_to_vector(model.parameters()).clone()


def _mean(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    torch.set_num_threads(1)
    lines = [
        "# Weight decay of SGDOLFree beside AdamW's",
        "",
        f"Made by `make bench-weight-decay`: {IMAGES} MNIST images of 14 x 14, {STEPS} steps with batches of {BATCH}, "
        f"seeds {SEEDS}, validation on 500 other images: mean and range. AdamW has a constant rate, the best of "
        f"{RATES} by validation loss at seed 0. The last column is the sum over the steps of what weight_decay is "
        "multiplied by (AdamW: lr; SGDOLFree: step_size rms(d), measured as the root mean square of each step). "
        f"{machine()}",
        "",
        "| network | optimizer | weight_decay | validation loss | accuracy | norm of the weights | sum |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for network in NETWORKS:
        best = min(RATES, key=lambda lr: train(network, 0.01, lr, 0).loss)
        for label, lr in ((f"AdamW, {best:g}", best), ("SGDOLFree", None)):
            for decay in DECAYS:
                ends = [train(network, decay, lr, seed) for seed in SEEDS]
                cells = [network, label, f"{decay:g}", _mean([end.loss for end in ends])]
                cells.append(f"{100 * statistics.mean(end.accuracy for end in ends):.1f} %")
                cells.append(f"{statistics.mean(end.norm for end in ends):.1f}")
                cells.append(f"{statistics.mean(end.multiplier for end in ends):.2f}")
                lines.append(f"| {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    lines += [
        "",
        "A regression (600 steps, a tanh network, no noise in the targets), SGDOLFree: training loss, and the largest "
        "difference between its weights and those of the same run with the loss times 1024.",
        "",
        "| weight_decay | training loss | difference |",
        "|---:|---:|---:|",
    ]
    for decay in DECAYS:
        runs = [(regression(decay, 1.0, seed), regression(decay, 1024.0, seed)) for seed in SEEDS]
        apart = max((a[1] - b[1]).abs().max().item() for a, b in runs)
        lines.append(f"| {decay:g} | {statistics.mean(a[0] for a, _ in runs):.2g} | {apart:.2g} |")
        print(lines[-1], flush=True)
    (RESULTS / "weight-decay.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
