"""Networks on graphs that are made here."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality.data import Samples
from benchmarks.quality.networks import MLP
from benchmarks.quality.objectives import Classifier, Objective, Supervised

__all__ = ["communities", "walks"]


class _Convolution(nn.Module):
    """Two graph convolutions (Kipf and Welling 2017) on one graph; the inputs are the numbers of its nodes."""

    spread: Tensor
    features: Tensor

    def __init__(self, adjacency: Tensor, features: Tensor, hidden: int, classes: int) -> None:
        super().__init__()
        degree = adjacency.sum(1).rsqrt()
        self.register_buffer("spread", degree[:, None] * adjacency * degree)
        self.register_buffer("features", features)
        self.first, self.second = nn.Linear(features.shape[1], hidden), nn.Linear(hidden, classes)

    def forward(self, nodes: Tensor) -> Tensor:
        h = F.relu(self.spread @ self.first(self.features))
        return self.spread[nodes] @ self.second(h)


def communities(
    seed: int, nodes: int, classes: int, features: int, noise: float, hidden: int, batch: int, data_seed: int
) -> Objective:
    """To which community a node of a stochastic block model belongs, from noisy features and its neighbours."""
    generator = torch.Generator().manual_seed(data_seed)
    label = torch.arange(nodes) % classes
    likely = torch.where(label[:, None] == label, 0.08, 0.01)
    edges = (torch.rand(nodes, nodes, generator=generator) < likely).triu(1).float()
    centres = torch.randn(classes, features, generator=generator)
    x = centres[label] + noise * torch.randn(nodes, features, generator=generator)
    order = torch.randperm(nodes, generator=generator)
    train, kept = order[: nodes // 2], order[nodes // 2 :]
    network = _Convolution(edges + edges.T + torch.eye(nodes), x, hidden, classes)
    return Classifier(network, Samples(train, label[train], kept, label[kept]), batch)


class _Messages(nn.Module):
    """Rounds of h <- h + MLP(h, sum of the neighbours' h), and a linear layer on the sum over the nodes."""

    def __init__(self, width: int, rounds: int) -> None:
        super().__init__()
        self.embed = nn.Linear(1, width)
        self.rounds = nn.ModuleList(MLP((2 * width, width, width)) for _ in range(rounds))
        self.head = MLP((width, width, 1))

    def forward(self, adjacency: Tensor) -> Tensor:
        h = torch.tanh(self.embed(adjacency.sum(2, keepdim=True)))
        for layer in self.rounds:
            h = h + layer(torch.cat([h, adjacency @ h], 2))
        return self.head(h.sum(1))


def walks(seed: int, nodes: int, width: int, rounds: int, batch: int, data_seed: int) -> Objective:
    """How many walks of three steps a random graph has: the root of it, as a standardised number."""
    generator = torch.Generator().manual_seed(data_seed)
    density = 0.1 + 0.5 * torch.rand(1280, 1, 1, generator=generator)
    upper = (torch.rand(1280, nodes, nodes, generator=generator) < density).float().triu(1)
    adjacency = upper + upper.mT
    count = (adjacency @ adjacency @ adjacency).sum((1, 2))[:, None].sqrt()
    targets = (count - count[:1024].mean()) / count[:1024].std(correction=0)
    samples = Samples(adjacency[:1024], targets[:1024], adjacency[1024:], targets[1024:])
    return Supervised(_Messages(width, rounds), samples, batch, F.mse_loss, 1.0)
