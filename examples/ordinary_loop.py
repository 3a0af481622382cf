"""An ordinary training loop: SGDOL for torch.optim.SGD, and ``backward`` for the two lines of loss and backward.

``sgdol.torch.backward`` runs each batch in two halves, whose gradients tell signal from noise; it costs what one
backward costs. lr is that of SGD with momentum 0.9.
"""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import sgdol

torch.set_num_threads(1)
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train, test = torch.randperm(len(images)).split([1500, len(images) - 1500])
loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=32, shuffle=True)

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
opt = sgdol.SGDOL(model.parameters(), lr=0.05)


def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean loss of a batch, or of a part of it."""
    return torch.nn.functional.cross_entropy(model(x), y)


for epoch in range(10):
    total = 0.0
    for x, y in loader:
        opt.zero_grad()
        total += len(x) * float(sgdol.torch.backward(loss_fn, x, y))  # was: loss_fn(x, y).backward()
        opt.step()
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    step_size = opt.param_groups[0]["step_size"]
    print(f"epoch {epoch}  loss {total / len(train):.3f}  test accuracy {accuracy:.3f}  step size {step_size:.4f}")
