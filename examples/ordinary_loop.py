"""An ordinary training loop: replace torch.optim.SGD by SGDOL and leave the rest as it is.

One backward per step(): SGDOL holds the first gradient and updates at the second call, with both batches.
"""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from sgdol import SGDOL

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train, test = torch.randperm(len(images)).split([1500, len(images) - 1500])
loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=16, shuffle=True)

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
loss_fn = torch.nn.CrossEntropyLoss()
opt = SGDOL(model.parameters(), lr=0.5)  # lr = 1/M: a rate at which plain SGD would still make progress

for epoch in range(10):
    for x, y in loader:
        opt.zero_grad()
        loss_fn(model(x), y).backward()
        opt.step()
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    print(f"epoch {epoch}  test accuracy {accuracy:.3f}  step size {opt.param_groups[0]['step_size']:.4f}")
