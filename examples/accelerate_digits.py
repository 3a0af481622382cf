"""Accelerate: prepare SGDOL like any optimizer; each batch that is accumulated is one gradient.

Saves in the middle, and resumes. At the end the same without a learning rate: Microbatches makes the steps of
SGDOLFree, AveragedWeights puts its average in.
"""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from sgdol import SGDOL, SGDOLFree
from sgdol.trainers.accelerate import AveragedWeights, Microbatches, StepSizeMonitor

set_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train, test = torch.randperm(len(images)).split([1504, len(images) - 1504])
loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=16, shuffle=True)  # 94 batches

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
opt = SGDOL(model.parameters(), lr=0.05)
model, prepared, loader = accelerator.prepare(model, opt, loader)
monitor = StepSizeMonitor(accelerator, every=47)  # and to accelerator's trackers, if it has any
accelerator.register_for_checkpointing(monitor)


def train_an_epoch() -> None:
    """As in Accelerate's documentation; the monitor is the only line that knows SGDOL."""
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 5.0)
            prepared.step()
            prepared.zero_grad()
            monitor(prepared)


for epoch in range(10):
    train_an_epoch()
    if epoch == 4:
        checkpoint = accelerator.save_state(tempfile.mkdtemp())  # a place of your own, in earnest
finished = [p.detach().clone() for p in model.parameters()]

accelerator.load_state(checkpoint)
for _ in range(5, 10):
    train_an_epoch()

for row in monitor.history:  # sgdol.plot(monitor) draws it
    print(f"step {row['step']:3.0f}  step size {row['step_size']:.4f}  {row['gradients']:.0f} gradients per update")
accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
same = all(torch.equal(p, q) for p, q in zip(model.parameters(), finished, strict=True))
print(f"test accuracy {accuracy:.3f}  resumed and uninterrupted runs are the same to the last bit: {same}")

accelerator = Accelerator(cpu=True)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
net, free, loader = accelerator.prepare(net, SGDOLFree(net.parameters()), loader)
microbatches = Microbatches(accelerator, net, free)
averaged = AveragedWeights(accelerator, net, free)  # accelerator.save_state saves the average, and what resumes exactly


def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean loss of some samples: half a batch."""
    return torch.nn.functional.cross_entropy(net(x), y)


for _ in range(5):
    for x, y in loader:
        microbatches.step(loss_fn, x, y)
with averaged:
    accuracy = (net(images[test]).argmax(1) == labels[test]).float().mean()
print(f"without a learning rate: test accuracy {accuracy:.3f}")
