"""Draw the README's picture, docs/first_picture.png: a network on digits, with and without a learning rate.

    python scripts/draw_first_picture.py

Left: the loss over the epochs without any learning rate (SGDOLFree) beside AdamW at its default and the best constant
and cosine runs of the right panel. Right: the training loss after 25 epochs against the base rate, for a constant step,
a cosine schedule and SGDOL, all with momentum 0.9. Lines are geometric means over five seeds, bands their range.
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
COLOURS = {"SGD, constant": "#0072B2", "SGD, cosine": "#56B4E9", "SGDOL": "#D55E00", "AdamW": "#E69F00"}


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
        "SGD, constant": lambda lr: {"make": lambda p: torch.optim.SGD(p, lr=lr / 10, momentum=0.9)},
        "SGD, cosine": lambda lr: {"make": lambda p: torch.optim.SGD(p, lr=lr / 10, momentum=0.9), "cosine": True},
        "SGDOL": lambda lr: {"make": lambda p: SGDOL(p, lr=lr)},
    }
    figure, (first, second) = plt.subplots(1, 2, figsize=(9, 3.9), layout="constrained")
    best: dict[str, tuple[float, np.ndarray]] = {}
    for name, options in contenders.items():
        runs = {lr: np.log([train(**options(lr), seed=s) for s in SEEDS]) for lr in RATES}
        _line(second, RATES, np.array([runs[lr][:, -1] for lr in RATES]).T, COLOURS[name], name, marker="o")
        best[name] = min(runs.items(), key=lambda found: found[1][:, -1].mean())
        for lr in RATES:
            print(f"{name}, lr {lr:g}: {np.exp(runs[lr][:, -1].mean()):.3g}")
    curves = {
        "SGDOLFree, no learning rate": (np.log([train(SGDOLFree, s) for s in SEEDS]), COLOURS["SGDOL"]),
        "AdamW, lr 1e-3": (
            np.log([train(lambda p: torch.optim.AdamW(p, lr=1e-3), s) for s in SEEDS]),
            COLOURS["AdamW"],
        ),
    } | {
        f"{name}, best of {len(RATES)} rates": (best[name][1], COLOURS[name])
        for name in ("SGD, constant", "SGD, cosine")
    }
    for name, (logs, colour) in curves.items():
        _line(first, np.arange(1, EPOCHS + 1), logs, colour, name)
        print(f"{name}: {np.exp(logs[:, -1].mean()):.3g}")
    first.set_title("Without a learning rate", loc="left", fontsize=11)
    first.set(yscale="log", xlabel="epoch", ylabel="training loss")
    second.set_title("With one, right or wrong (momentum 0.9)", loc="left", fontsize=11)
    second.set(xscale="log", yscale="log", xlabel="base rate lr", ylabel="training loss after 25 epochs")
    second.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    second.minorticks_off()
    for axis in (first, second):
        axis.grid(visible=True, color="#e6e6e6", linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8.5)
    figure.savefig(FIGURE, dpi=150)


def _line(axis: Any, x: Any, logs: np.ndarray, colour: str, label: str, marker: str = "") -> None:
    """The geometric mean over seeds, in front of a band from the smallest to the largest."""
    ours = label.startswith("SGDOL")
    axis.plot(
        x, np.exp(logs.mean(0)), color=colour, label=label, lw=2.4 if ours else 1.6, marker=marker, markersize=4,
        zorder=3 if ours else 2,
    )  # fmt: skip
    axis.fill_between(x, np.exp(logs.min(0)), np.exp(logs.max(0)), color=colour, alpha=0.13, lw=0)


if __name__ == "__main__":
    main()
