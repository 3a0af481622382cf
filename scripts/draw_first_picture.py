"""Draw the README's picture, docs/first_picture.png: SGDOLFree beside AdamW at eight learning rates.

    python scripts/draw_first_picture.py

A network on scikit-learn's digits, 30 epochs in batches of 64. AdamW has a constant learning rate, or the usual
schedule: a linear warmup over the first tenth of the run, then a cosine to zero. Left: the training loss after every
epoch, for SGDOLFree, for AdamW at its default rate, and for both kinds of AdamW at their best rate. Right: the training
loss at the end against the learning rate. Lines are geometric means over five seeds, bands the range of the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits

from sgdol import SGDOLFree
from sgdol.torch import backward

SEEDS = range(5)
EPOCHS, BATCH = 30, 64
RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
DEFAULT = 0.001
FIGURE = Path(__file__).parents[1] / "docs" / "first_picture.png"
OURS, CONSTANT, SCHEDULED = "#D55E00", "#E69F00", "#0072B2"


def train(make: Callable[[Any], torch.optim.Optimizer], seed: int, *, schedule: bool = False) -> list[float]:
    """The training loss after every epoch; SGDOLFree is evaluated at its average, as its documentation asks."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    opt = make(model.parameters())
    cross_entropy = torch.nn.CrossEntropyLoss()
    steps = EPOCHS * math.ceil(len(x) / BATCH)
    warmup = steps // 10

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2

    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, factor) if schedule else None
    losses = []
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            backward(lambda a, b: cross_entropy(model(a), b), x[rows], y[rows])
            opt.step()
            opt.zero_grad()
            if scheduler is not None:
                scheduler.step()
        with opt.averaged() if isinstance(opt, SGDOLFree) else nullcontext(), torch.no_grad():
            losses.append(cross_entropy(model(x), y).item())
    return [min(max(loss, 1e-6), 10.0) if math.isfinite(loss) else 10.0 for loss in losses]


def adamw(lr: float, schedule: bool) -> np.ndarray:
    """The logarithms of the losses at one rate: a row per seed."""
    return np.log([train(lambda p: torch.optim.AdamW(p, lr=lr), seed, schedule=schedule) for seed in SEEDS])


def main() -> None:
    """Train everything and draw."""
    torch.set_num_threads(1)
    free = np.log([train(SGDOLFree, seed) for seed in SEEDS])
    constant = {lr: adamw(lr, schedule=False) for lr in RATES}
    scheduled = {lr: adamw(lr, schedule=True) for lr in RATES}
    for name, runs in {"AdamW": constant, "AdamW, warmup + cosine": scheduled, "SGDOLFree": {1.0: free}}.items():
        print(name, {lr: f"{np.exp(logs[:, -1].mean()):.2g}" for lr, logs in runs.items()})

    figure, (first, second) = plt.subplots(1, 2, figsize=(9.6, 4), layout="constrained", width_ratios=(1, 1.05))
    epochs = np.arange(1, EPOCHS + 1)
    best = {id(runs): min(runs, key=lambda lr: runs[lr][:, -1].mean()) for runs in (constant, scheduled)}
    _line(first, epochs, constant[DEFAULT], CONSTANT, f"AdamW, default rate {DEFAULT:g}", ls=":")
    _line(first, epochs, constant[best[id(constant)]], CONSTANT, f"AdamW, best of 8 rates ({best[id(constant)]:g})")
    label = f"AdamW, warmup + cosine, best of 8 rates ({best[id(scheduled)]:g})"
    _line(first, epochs, scheduled[best[id(scheduled)]], SCHEDULED, label)
    _line(first, epochs, free, OURS, "SGDOLFree, no learning rate", lw=2.6)
    for runs, colour, label in ((constant, CONSTANT, "AdamW"), (scheduled, SCHEDULED, "AdamW, warmup + cosine")):
        ends = np.array([runs[lr][:, -1] for lr in RATES]).T
        _line(second, np.array(RATES), ends, colour, label, marker="o", markersize=4)
        tuned = best[id(runs)]
        second.plot(tuned, np.exp(runs[tuned][:, -1].mean()), "*", color=colour, markersize=17, mec="white", zorder=4)
    second.plot([], [], "*", color="#808080", markersize=13, ls="none", label="best rate")
    _line(second, np.array([RATES[0], RATES[-1]]), free[:, [-1, -1]], OURS, "SGDOLFree, no learning rate", lw=2.6)

    first.set_title("Training loss", loc="left", fontsize=11)
    first.set(xlabel="epoch", yscale="log", xlim=(0, EPOCHS), ylim=(None, 60))  # room for the legend
    second.set_title("Training loss at the end, by learning rate", loc="left", fontsize=11)
    second.set(xlabel="learning rate of AdamW", xscale="log", yscale="log", ylim=first.get_ylim())
    second.set_xticks(RATES, [f"{rate:g}" if rate >= 0.001 else f"{rate:.0e}".replace("-0", "-") for rate in RATES])
    for axis in (first, second):
        axis.minorticks_off()
        axis.grid(visible=True, color="#e6e6e6", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8.5, loc="upper right")
    figure.savefig(FIGURE, dpi=150)


def _line(axis: Any, x: np.ndarray, logs: np.ndarray, colour: str, label: str, **style: Any) -> None:
    """The geometric mean over seeds, in front of a band from the smallest to the largest."""
    axis.plot(x, np.exp(logs.mean(0)), color=colour, label=label, **{"lw": 1.7, **style})
    axis.fill_between(x, np.exp(logs.min(0)), np.exp(logs.max(0)), color=colour, alpha=0.13, lw=0)


if __name__ == "__main__":
    main()
