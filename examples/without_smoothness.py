"""No learning rate and no smoothness constant: SGDOLFree measures what it needs. Experimental.

backward() runs the two halves of a batch and leaves how to run them again: about every tenth step does that, at the
point before the last step.
"""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from sgdol import SGDOLFree
from sgdol.torch import backward

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train, test = torch.randperm(len(images)).split([1500, len(images) - 1500])
loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=32, shuffle=True, drop_last=True)

model = torch.nn.Sequential(
    torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10)
)
criterion = torch.nn.CrossEntropyLoss()
opt = SGDOLFree(model.parameters())


for epoch in range(10):
    model.train()
    for inputs, targets in loader:
        backward(lambda x, y: criterion(model(x), y), inputs, targets)
        opt.step()
        opt.zero_grad()
    with opt.averaged():  # evaluate, and save, the averaged weights
        torch.optim.swa_utils.update_bn(images[train].split(500), model)
        model.eval()
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    report = opt.diagnostics()
    print(
        f"epoch {epoch}  test accuracy {accuracy:.3f}  step size {report['step_size'][0]:.3f}  "
        f"smoothness {report['smoothness']:.2f}  gradients per step {report['evaluations'] / report['updates']:.2f}"
    )
