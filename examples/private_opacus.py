"""Differential privacy with Opacus: the step size is learned from what is released anyway, at no cost in epsilon.

One line after make_private. Needs the extra private: pip install 'sgdol[private]'.
"""

import warnings

import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from sgdol.private import PrivateSGDOL

warnings.filterwarnings("ignore", category=UserWarning)  # Opacus says that its noise is not cryptographic here
torch.set_num_threads(1)
torch.manual_seed(0)
digits = load_digits()
images = torch.nn.functional.normalize(
    torch.tensor(digits.data, dtype=torch.float32)
)  # length 1: M is public, see below
labels = torch.tensor(digits.target)
train, test = torch.randperm(len(images)).split([1500, len(images) - 1500])
loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=250)

model = torch.nn.Linear(64, 10)
criterion = torch.nn.CrossEntropyLoss()
epochs = 20
engine = PrivacyEngine(accountant="rdp")
# On inputs of length 1, softmax regression with 10 classes starts with a curvature of at most 1/10 (1/5 with the bias).
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=5.0),
    data_loader=loader,
    target_epsilon=3.0,
    target_delta=1e-5,
    epochs=epochs,
    max_grad_norm=1.0,
)
optimizer = PrivateSGDOL(optimizer)

for epoch in range(epochs):
    for inputs, targets in loader:
        criterion(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    if epoch % 5 == 4:
        with torch.no_grad():  # else Opacus takes the test images for training samples
            accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
        step_size = float(optimizer.param_groups[0]["step_size"])
        epsilon = engine.get_epsilon(1e-5)
        print(f"epoch {epoch}  test accuracy {accuracy:.3f}  step size {step_size:.4f}  epsilon {epsilon:.2f}")
