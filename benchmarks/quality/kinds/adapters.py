"""Low-rank adapters on frozen networks: one factor starts at zero, so that the other has no gradient at first."""

from __future__ import annotations

import functools
import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality import data
from benchmarks.quality.networks import MLP
from benchmarks.quality.objectives import Classifier, Objective

__all__ = ["adapters"]


class _Adapted(nn.Module):
    """A frozen linear layer plus B A, with B = 0 at first."""

    weight: Tensor
    bias: Tensor

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.register_buffer("weight", layer.weight.detach().clone())
        self.register_buffer("bias", layer.bias.detach().clone())
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) / math.sqrt(layer.in_features))
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + x @ self.a.T @ self.b.T


def _samples(source: str, part: str) -> data.Samples:
    return data.digits(part) if source == "digits" else data.mnist(part, size=14)


@functools.cache
def _pretrained(source: str, part: str, hidden: tuple[int, ...]) -> MLP:
    """A network that knows the digits the right way up."""
    samples = _samples(source, part)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same numbers in every process
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(7)
        network = MLP((samples.inputs.shape[1], *hidden, 10))
        optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
        for _ in range(50):
            optimizer.zero_grad()
            F.cross_entropy(network(samples.inputs), samples.targets).backward()
            optimizer.step()
    torch.set_num_threads(threads)
    return network


def adapters(
    seed: int,
    source: str,
    part: str,
    hidden: tuple[int, ...],
    rank: int,
    change: Literal["turned", "mirrored"],
    batch: int,
) -> Objective:
    """Adapts a network to digits that lie on their side, or that are seen in a mirror."""
    pretrained = _pretrained(source, part, hidden)
    layers = [_Adapted(m, rank) if isinstance(m, nn.Linear) else nn.ReLU() for m in pretrained]
    samples = _samples(source, part)
    side = math.isqrt(samples.inputs.shape[1])

    def changed(x: Tensor) -> Tensor:
        square = x.view(-1, side, side)
        return (square.rot90(1, (1, 2)) if change == "turned" else square.flip(2)).flatten(1)

    moved = samples._replace(inputs=changed(samples.inputs), test_inputs=changed(samples.test_inputs))
    return Classifier(nn.Sequential(*layers), moved, batch)
