"""Microbatches: the batch you had, split in two, so that every batch gives an update.

Any two or more backward passes before step() will do; gradient accumulation has them anyway.
"""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from sgdol import SGDOL

torch.set_num_threads(1)
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train, test = torch.randperm(len(images)).split([1500, len(images) - 1500])
loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=32, shuffle=True, drop_last=True)

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
criterion = torch.nn.CrossEntropyLoss()
opt = SGDOL(model.parameters(), lr=0.05)

for epoch in range(10):
    for inputs, targets in loader:
        for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
            (criterion(model(x), y) / 2).backward()
        opt.step()
        opt.zero_grad()
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    report = opt.diagnostics()
    print(
        f"epoch {epoch}  test accuracy {accuracy:.3f}  step size {report['step_size'][0]:.4f}  "
        f"noise scale {16 * report['noise_scale']:.0f} samples"
    )
