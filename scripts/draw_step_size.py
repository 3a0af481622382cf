"""Draw docs/step_size.png: the learned step size of softmax regression on handwritten digits, at three batch sizes.

A fifth of the labels are wrong, so that gradients stay noisy at the minimum.

python scripts/draw_step_size.py [PATH]
"""

import sys
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits

from sgdol import SGDOL

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"
LR = 2.0
UPDATES = 3000


def train(batch: int, learn: bool) -> tuple[list[float], list[float]]:
    """Step size and training loss after every update, for SGDOL or for SGD with the same lr."""
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    wrong = torch.rand(len(labels)) < 0.2
    labels = torch.where(wrong, torch.randint(10, labels.shape), labels)
    model = torch.nn.Linear(64, 10)
    opt = (SGDOL if learn else torch.optim.SGD)(model.parameters(), lr=LR)
    step_sizes, losses = [], []
    for _ in range(UPDATES):
        for rows in torch.randint(len(images), (2, batch // 2)):
            (torch.nn.functional.cross_entropy(model(images[rows]), labels[rows]) / 2).backward()
        opt.step()
        opt.zero_grad()
        step_sizes.append(float(opt.param_groups[0]["step_size"]) if learn else LR)
        with torch.no_grad():
            losses.append(torch.nn.functional.cross_entropy(model(images), labels).item())
    return step_sizes, losses


def main() -> None:
    """Train and draw."""
    torch.set_num_threads(1)
    out = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent / "docs" / "step_size.png")
    mpl.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    updates = range(1, UPDATES + 1)
    for batch, colour, style in ((128, BLUE, "-"), (32, ORANGE, "--"), (8, GREEN, "-.")):
        step_sizes, losses = train(batch, learn=True)
        left.plot(updates, step_sizes, style, color=colour, label=f"batch {batch}")
        if batch == 8:
            right.plot(updates, losses, style, color=colour, label="SGDOL, lr = 2")
    _, losses = train(8, learn=False)
    right.plot(updates, losses, ":", color=GREY, linewidth=1, label="SGD, lr = 2", zorder=0)
    left.axhline(LR, color=GREY, linewidth=1, linestyle=":")
    left.annotate("lr", (1.2, LR), xytext=(0, 3), textcoords="offset points", color=GREY)
    left.set(xscale="log", ylim=(0, 2.25), xlabel="update", title="the step size that SGDOL uses")
    right.set(xscale="log", yscale="log", xlabel="update", title="training loss at batch 8")
    left.legend(frameon=False)
    right.legend(frameon=False)
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
