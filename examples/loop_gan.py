"""A GAN's loop: two networks, two optimizers, and a loss that goes through both. Eight Gaussians on a circle.

The four lines marked "sgdol" are what changes in a loop that has Adam. --adamw trains with lr 1e-3, betas 0.5 and
0.999. Adversarial losses are not one objective, and SGDOLFree fails here: keep Adam for a GAN. The program shows it,
with the latest and with the averaged weights.
"""

import argparse
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgdol.torch import SGDOLFree, backward  # sgdol

parser = argparse.ArgumentParser()
parser.add_argument("--adamw", action="store_true")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=2000)
args = parser.parse_args()
torch.manual_seed(args.seed)

angles = torch.arange(8) * math.tau / 8
centres = torch.stack([angles.cos(), angles.sin()], 1)


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def judged(x: Tensor, real: int) -> Tensor:
    return F.binary_cross_entropy_with_logits(critic(x), torch.full((len(x), 1), float(real)))


def quality() -> str:
    """The share of samples within 3 standard deviations of a centre, and how many centres have samples."""
    with torch.no_grad():
        distance, nearest = torch.cdist(maker(torch.randn(2000, 4)), centres).min(1)
    close = distance < 0.15
    return f"share {close.float().mean():.2f} of the samples near {nearest[close].unique().numel()} of 8 centres"


maker, critic = network(4, 2), network(2, 1)
opt_maker: Any
opt_critic: Any
if args.adamw:
    opt_maker = torch.optim.AdamW(maker.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_critic = torch.optim.AdamW(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
else:
    opt_maker, opt_critic = SGDOLFree(maker.parameters()), SGDOLFree(critic.parameters())  # sgdol

for step in range(args.steps):
    real = centres[torch.randint(8, (64,))] + 0.05 * torch.randn(64, 2)
    noise = torch.randn(64, 4)
    fake = maker(noise).detach()
    opt_critic.zero_grad()
    backward(lambda real, fake: judged(real, 1) + judged(fake, 0), real, fake)  # sgdol: not one backward for each
    opt_critic.step()
    opt_maker.zero_grad()
    loss = backward(lambda noise: judged(maker(noise), 1), noise)  # sgdol
    opt_maker.step()
    if step % 500 == 0:
        print(f"step {step}  loss of the maker {loss:.2f}")

print(f"latest weights: {quality()}")
if not args.adamw:
    with opt_maker.averaged():
        print(f"averaged weights: {quality()}")
