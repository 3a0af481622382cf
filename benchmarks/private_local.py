"""Local privacy on the adult data: every person sends one noised gradient, once, and the server learns the step size.

20,839 people, 40 steps of about 521 of them, softmax regression on inputs of length 1, reports of length at most 1. SGD
takes the mean of the same reports with a constant step.

    python -m benchmarks.private_local       # writes results/private-local.md
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.private import DELTA, RESULTS, load
from benchmarks.timing import machine
from sgdol.private import LocalSGDOL, local_epsilon, randomize

EPSILONS = (2.0, 4.0, 8.0)
RATES = (0.3, 1.0, 2.0, 5.0, 20.0)
BASE = 2.0  # the number of classes, as in benchmarks.private
SEEDS = 2
STEPS = 40


@functools.cache
def noise_for(epsilon: float) -> float:
    """The noise multiplier whose epsilon, for one report, is this; by bisection."""
    low, high = 0.1, 100.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if local_epsilon(middle, DELTA) > epsilon else (low, middle)
    return high


def reports(weight: Tensor, rows: Tensor, noise: float, generator: torch.Generator) -> list[Tensor]:
    """What each of these people sends: the gradient of its own loss, clipped and noised."""
    inputs, targets = (part[rows] for part in load("adult").train)
    slopes = torch.softmax(inputs @ weight.T, -1) - torch.nn.functional.one_hot(targets, 2)
    return [
        randomize([torch.outer(b, a)], max_grad_norm=1.0, noise_multiplier=noise, generator=generator)[0]
        for a, b in zip(inputs, slopes, strict=True)
    ]


def run(epsilon: float, lr: float, learned: bool, seed: int) -> float:
    data = load("adult")
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.zeros(2, data.train[0].shape[1]))
    server = LocalSGDOL([weight], lr=lr)
    for rows in torch.randperm(len(data.train[1]), generator=generator).chunk(STEPS):
        sent = reports(weight.detach(), rows, noise_for(epsilon), generator)
        if learned:
            for report in sent:
                server.receive([report])
            server.step()
        else:
            with torch.no_grad():
                weight.sub_(lr * torch.stack(sent).mean(0))
    inputs, targets = data.test
    return float(((inputs @ weight.detach().T).argmax(1) == targets).float().mean())


def table() -> str:
    lines = [
        "# Local privacy on the adult data",
        "",
        f"Test accuracy in per cent at delta = {DELTA:g}, mean over {SEEDS} seeds, by "
        "`python -m benchmarks.private_local`: SGD with that constant step / SGDOL with that base rate. "
        f"Everyone reports once; SGDOL's base rate by rule is {BASE:g}. The larger class is 75.6 % of the test set.",
        "",
        "| rate | " + " | ".join(f"ε = {e:g} (σ = {noise_for(e):.1f})" for e in EPSILONS) + " |",
        "|---|" + "---:|" * len(EPSILONS),
    ]
    for lr in RATES:
        cells = []
        for epsilon in EPSILONS:
            pair = [sum(100 * run(epsilon, lr, learned, s) for s in range(SEEDS)) / SEEDS for learned in (False, True)]
            cells.append(" / ".join(f"{value:.1f}" for value in pair))
        lines.append(f"| {lr:g} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", machine()]) + "\n"


def main(out: Path = RESULTS) -> None:
    torch.set_num_threads(1)
    (out / "private-local.md").write_text(table())


if __name__ == "__main__":
    main()
