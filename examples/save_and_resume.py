"""Saving and resuming: everything is in state_dict(), also the gradient that is held in the middle of a pair."""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits

from sgdol import SGDOL

torch.set_num_threads(1)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)


def build() -> tuple[torch.nn.Module, SGDOL]:
    """The model and its optimizer, as at the start of a program."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    return model, SGDOL(model.parameters(), lr=0.05)


def train(model: torch.nn.Module, opt: SGDOL, start: int, stop: int) -> None:
    """Steps start to stop, each with the batch that belongs to it."""
    for step in range(start, stop):
        rows = torch.randint(len(images), (16,), generator=torch.Generator().manual_seed(step))
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        opt.step()


model, opt = build()
train(model, opt, 0, 101)
checkpoint = Path(tempfile.mkdtemp()) / "checkpoint.pt"
torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, checkpoint)
print(f"saved after 101 steps, in the middle of a pair: {opt.pending}")
train(model, opt, 101, 200)

resumed, resumed_opt = build()
saved = torch.load(checkpoint, weights_only=True)
resumed.load_state_dict(saved["model"])
resumed_opt.load_state_dict(saved["opt"])
train(resumed, resumed_opt, 101, 200)

same = all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))
print(f"resumed and uninterrupted runs are the same to the last bit: {same}")
