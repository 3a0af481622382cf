"""Draw the README's picture, docs/first_picture.png: a network on digits, with and without a learning rate.

    python scripts/draw_first_picture.py

Left: the training loss after 25 epochs against the base rate, for a constant step, a cosine schedule and SGDOL, all
with momentum 0.9. Right: the loss over the epochs without any learning rate (SGDOLFree) beside AdamW at its default and
the best constant and cosine runs of the left panel. Lines are geometric means over five seeds, bands their range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits

from sgdol import SGDOL, SGDOLFree
from sgdol.torch import backward

SEEDS = range(5)
EPOCHS, BATCH = 25, 64
RATES = (0.25, 0.5, 1, 2, 4, 8, 16)
FIGURE = Path(__file__).parents[1] / "docs" / "first_picture.png"
COLOURS = {"constant step": "#8C6D31", "cosine": "#0072B2", "SGDOL": "#D55E00", "AdamW, lr 1e-3": "#E69F00"}


def train(make: Callable[[Any], torch.optim.Optimizer], seed: int, *, cosine: bool = False) -> list[float]:
    """The training loss after every epoch; at the average for SGDOLFree, which says to evaluate there."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    opt = make(model.parameters())
    loss_fn = torch.nn.CrossEntropyLoss()
    steps = EPOCHS * math.ceil(len(x) / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps) if cosine else None
    losses = []
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):

            def closure(rows: torch.Tensor = rows) -> torch.Tensor:
                opt.zero_grad()
                return backward(lambda a, b: loss_fn(model(a), b), x[rows], y[rows])

            opt.step(closure)  # type: ignore[arg-type]
            if schedule is not None:
                schedule.step()
        with torch.no_grad():
            if isinstance(opt, SGDOLFree):
                with opt.averaged():
                    losses.append(loss_fn(model(x), y).item())
            else:
                losses.append(loss_fn(model(x), y).item())
    return [min(max(loss, 1e-6), 10.0) if math.isfinite(loss) else 10.0 for loss in losses]


def main() -> None:
    """Train everything and draw."""
    torch.set_num_threads(1)
    contenders: dict[str, Callable[[float], dict[str, Any]]] = {
        # torch's momentum sums gradients, SGDOL's averages them: the same step is lr (1 - 0.9) there.
        "constant step": lambda lr: {"make": lambda p: torch.optim.SGD(p, lr=lr / 10, momentum=0.9)},
        "cosine": lambda lr: {"make": lambda p: torch.optim.SGD(p, lr=lr / 10, momentum=0.9), "cosine": True},
        "SGDOL": lambda lr: {"make": lambda p: SGDOL(p, lr=lr)},
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.5), layout="constrained")
    best: dict[str, np.ndarray] = {}
    for name, options in contenders.items():
        runs = {lr: np.log([train(**options(lr), seed=s) for s in SEEDS]) for lr in RATES}
        ends = np.array([runs[lr][:, -1] for lr in RATES])
        left.plot(RATES, np.exp(ends.mean(1)), "o-", color=COLOURS[name], label=name, markersize=4)
        left.fill_between(RATES, np.exp(ends.min(1)), np.exp(ends.max(1)), color=COLOURS[name], alpha=0.15, lw=0)
        best[name] = runs[min(runs, key=lambda lr: runs[lr][:, -1].mean())]
        for lr in RATES:
            print(f"{name}, lr {lr:g}: {np.exp(runs[lr][:, -1].mean()):.3g}")
    curves = {
        "SGDOLFree, no learning rate": (np.log([train(SGDOLFree, s) for s in SEEDS]), "#D55E00"),
        "AdamW, lr 1e-3": (
            np.log([train(lambda p: torch.optim.AdamW(p, lr=1e-3), s) for s in SEEDS]),
            COLOURS["AdamW, lr 1e-3"],
        ),
        "constant step, best rate": (best["constant step"], COLOURS["constant step"]),
        "cosine, best rate": (best["cosine"], COLOURS["cosine"]),
    }
    epochs = np.arange(1, EPOCHS + 1)
    for name, (logs, colour) in curves.items():
        right.plot(epochs, np.exp(logs.mean(0)), color=colour, label=name, lw=2.2 if "Free" in name else 1.4)
        right.fill_between(epochs, np.exp(logs.min(0)), np.exp(logs.max(0)), color=colour, alpha=0.15, lw=0)
        print(f"{name}: {np.exp(logs[:, -1].mean()):.3g}")
    left.set(xscale="log", yscale="log", xlabel="base rate lr", ylabel="training loss after 25 epochs")
    right.set(yscale="log", xlabel="epoch", ylabel="training loss")
    for axis in (left, right):
        axis.grid(visible=True, color="#dddddd", linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(FIGURE, dpi=150)


if __name__ == "__main__":
    main()
