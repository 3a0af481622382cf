"""The loop of a variational autoencoder, whose loss is a sum over the samples: digits of 8 x 8.

The four lines marked "sgdol" are what changes in a loop that has Adam. --adamw trains with AdamW, lr 1e-3.
"""

import argparse
from contextlib import nullcontext
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from sgdol.torch import SGDOLFree, backward  # sgdol

parser = argparse.ArgumentParser()
parser.add_argument("--adamw", action="store_true")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--epochs", type=int, default=40)
args = parser.parse_args()

images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = images[order[:1500]], images[order[1500:]]


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 128), nn.Linear(8, 128)
        self.mean, self.logvar, self.pixels = nn.Linear(128, 8), nn.Linear(128, 8), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.inner(x))
        mean, logvar = self.mean(h), self.logvar(h)
        z = mean + torch.randn_like(mean) * (logvar / 2).exp()
        return self.pixels(F.relu(self.outer(z))), mean, logvar


def loss_function(x: Tensor) -> Tensor:
    """Reconstruction and KL divergence, summed over all samples."""
    pixels, mean, logvar = model(x)
    divergence = -0.5 * torch.sum(1 + logvar - mean.square() - logvar.exp())
    return F.binary_cross_entropy_with_logits(pixels, x, reduction="sum") + divergence


torch.manual_seed(args.seed)
model = VAE()
opt: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
if not args.adamw:
    opt = SGDOLFree(model.parameters())  # sgdol

for epoch in range(args.epochs):
    total = 0.0
    for x in train[torch.randperm(len(train))].split(50):
        opt.zero_grad()
        total += backward(loss_function, x, reduction="sum").item()  # sgdol: in place of loss.backward()
        opt.step()
    if epoch % 10 == 0:
        print(f"epoch {epoch}  loss {total / len(train):.2f}")

torch.manual_seed(0)
with torch.no_grad(), nullcontext() if args.adamw else opt.averaged():  # sgdol
    print(f"test loss {sum(loss_function(test).item() for _ in range(20)) / 20 / len(test):.2f}")
