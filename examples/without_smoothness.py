"""No learning rate and no smoothness constant: SGDOLFree measures what it needs. Experimental.

The closure evaluates one batch in two halves and returns its loss. It is called once per step, and about every tenth
step once more, at the point before the last step: so the batch is drawn outside.
"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from sgdol import SGDOLFree

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train, test = torch.randperm(len(images)).split([1500, len(images) - 1500])
loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=32, shuffle=True, drop_last=True)

model = torch.nn.Sequential(
    torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10)
)
loss_fn = torch.nn.CrossEntropyLoss()
opt = SGDOLFree(model.parameters())


def backward(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of the batch, in two halves: two independent gradients."""
    opt.zero_grad()
    total = torch.zeros(())
    for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
        loss = loss_fn(model(x), y) / 2
        loss.backward()
        total += loss.detach()
    return total


for epoch in range(10):
    model.train()
    for inputs, targets in loader:
        opt.step(partial(backward, inputs, targets))
    with opt.averaged():  # evaluate, and save, the averaged weights
        torch.optim.swa_utils.update_bn(images[train].split(500), model)
        model.eval()
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    report = opt.diagnostics()
    print(
        f"epoch {epoch}  test accuracy {accuracy:.3f}  step size {report['step_size'][0]:.3f}  "
        f"smoothness {report['smoothness']:.2f}  gradients per step {report['evaluations'] / report['updates']:.2f}"
    )
