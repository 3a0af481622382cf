"""Batches that each belong to one of two tasks: a table of docs/explanation/without_smoothness.md.

    python scripts/measure_two_tasks.py

A network with a head for scikit-learn's digits and one for three sums over their pixels. The squared error of the sums
is 300 times the cross-entropy at first, or as large as it (a scale of 1/15). 800 evaluations; the sum of both losses on
the training samples, at the average of SGDOLFree and the last point of AdamW, by seed.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from sgdol import SGDOLFree
from sgdol.torch import backward

STEPS, SAMPLES, BATCH, SEEDS = 800, 1400, 48, (11, 12, 13, 14)
digits = load_digits()
x = torch.tensor(digits.images / 16).float().view(-1, 64)[:SAMPLES]
labels = torch.tensor(digits.target)[:SAMPLES]
sums = torch.stack([x.sum(1), (x * torch.arange(64)).sum(1) / 16, 10 * x.amax(1)], 1)


def end(name: str, scale: float, seed: int) -> float:
    """The loss of both tasks at the end."""
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 160), nn.GELU(), nn.Linear(160, 160), nn.GELU(), nn.Linear(160, 160), nn.GELU()]
    net, heads = nn.Sequential(*layers), [nn.Linear(160, 10), nn.Linear(160, 3)]
    params = list(nn.ModuleList([net, *heads]).parameters())
    tasks = [
        lambda i: cross_entropy(heads[0](net(x[i])), labels[i]),
        lambda i: mse_loss(heads[1](net(x[i])), scale * sums[i]),
    ]
    rate = None if name == "SGDOLFree" else float(name.split()[1])
    opt = SGDOLFree(params) if rate is None else torch.optim.AdamW(params, lr=rate)
    schedule = rate and torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    step = 0
    while step < STEPS:
        task, rows = tasks[int(torch.randint(2, ()))], torch.randint(SAMPLES, (BATCH,))
        if rate is None:
            backward(task, rows)
        else:
            task(rows).backward()
        opt.step()
        opt.zero_grad()
        if schedule:
            schedule.step()
        step = opt.diagnostics()["evaluations"] if rate is None else step + 1

    def both() -> float:
        with torch.no_grad():
            return float(sum((task(torch.arange(SAMPLES)) for task in tasks), Tensor([0.0])))

    if rate is not None:
        return both()
    with opt.averaged():
        return both()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for scale in (1.0, 1 / 15):
        for name in ("SGDOLFree", "AdamW 1e-3", "AdamW 3e-3", "AdamW 1e-2"):
            row = "".join(f"{end(name, scale, seed):10.3g}" for seed in SEEDS)
            print(f"scale {scale:<6.2g}{name:12s}{row}", flush=True)
