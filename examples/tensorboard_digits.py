"""TensorBoard in two lines, and the same as a figure. Look at it with ``tensorboard --logdir FOLDER``."""

import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.tensorboard import SummaryWriter

import sgdol

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
torch.set_num_threads(1)
torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
groups = [
    {"params": model[0].parameters(), "name": "first layer"},
    {"params": model[2].parameters(), "name": "last layer"},
]
opt = sgdol.SGDOL(groups, lr=0.05, granularity="group")
with SummaryWriter(folder) as writer:
    log = sgdol.torch.Log(writer, every=10)
    for _ in range(500):
        for rows in torch.randint(len(images), (2, 16)):
            (torch.nn.functional.cross_entropy(model(images[rows]), labels[rows]) / 2).backward()
        opt.step()
        opt.zero_grad()
        log(opt)

sgdol.plot(log).savefig(folder / "learned.png", dpi=100)
print(f"{len(log.history)} records in {folder}")
print({name: round(value, 4) for name, value in log.history[-1].items()})
