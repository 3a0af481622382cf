"""Generative models, tables, values of states and graphs."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality import data
from benchmarks.quality.data import Samples
from benchmarks.quality.kinds.generative import VAE, Noised
from benchmarks.quality.networks import MLP
from benchmarks.quality.objectives import Classifier, Finite, Objective, Supervised

__all__ = ["ddpm", "experts", "gnn", "temporal_difference", "vae"]


# Generative -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions with GroupNorm, a shift by the noise level, and a connection around them."""

    def __init__(self, before: int, after: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, before), nn.GroupNorm(4, after)
        self.conv1, self.conv2 = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.shift = nn.Linear(width, after)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.shift(level)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    """Two resolutions with a connection between the halves; it predicts the noise in an image."""

    def __init__(self, side: int, channels: int) -> None:
        super().__init__()
        self.side, c, width = side, channels, 4 * channels
        self.level = MLP((32, width, width), nn.SiLU)
        self.stem, self.head = nn.Conv2d(1, c, 3, padding=1), nn.Conv2d(c, 1, 3, padding=1)
        self.down, self.middle, self.up = Block(c, c, width), Block(c, 2 * c, width), Block(3 * c, c, width)
        self.norm = nn.GroupNorm(4, c)
        self.frequencies = torch.exp(torch.linspace(0.0, math.log(100.0), 16))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """The noise in images ``x`` (rows) at times in [0, 1] (a column)."""
        angles = time * self.frequencies
        level = self.level(torch.cat([angles.sin(), angles.cos()], 1))
        fine = self.down(self.stem(x.view(-1, 1, self.side, self.side)), level)
        coarse = self.middle(F.avg_pool2d(fine, 2), level)
        joined = torch.cat([fine, F.interpolate(coarse, scale_factor=2.0)], 1)
        return self.head(F.silu(self.norm(self.up(joined, level)))).flatten(1)


class DDPM(Noised):
    """The mean squared error of the predicted noise, at a time that is uniform in [0, 1], with the cosine schedule."""

    def __init__(self, samples: Samples, batch: int, channels: int) -> None:
        pixels = samples.inputs.shape[1]
        super().__init__(samples, batch, pixels + 1)
        self.network = UNet(math.isqrt(pixels), channels)

    def loss(self, x: Tensor, noise: Tensor) -> Tensor:
        time = torch.special.ndtr(noise[:, :1])  # of a Gaussian number: uniform
        noise, angle = noise[:, 1:], time * math.pi / 2
        return F.mse_loss(self.network(angle.cos() * (2 * x - 1) + angle.sin() * noise, time), noise)


def ddpm(seed: int, part: str, channels: int, batch: int) -> Objective:
    """A diffusion model of MNIST at 14 x 14."""
    return DDPM(data.mnist(part, size=14), batch, channels)


class DeepVAE(VAE):
    """A VAE with two hidden layers on each side."""

    def __init__(self, samples: Samples, batch: int, widths: tuple[int, int], latent: int) -> None:
        super().__init__(samples, batch, widths[0], latent)
        pixels = samples.inputs.shape[1]
        self.encoder = MLP((pixels, *widths, 2 * latent))
        self.decoder = MLP((latent, *widths[::-1], pixels))


def vae(seed: int, part: str, widths: tuple[int, int], latent: int, batch: int) -> Objective:
    """A VAE of MNIST at 14 x 14, each pixel black or white."""
    x = data.mnist(part, size=14)
    binary = Samples((x.inputs > 0.4).float(), x.targets, (x.test_inputs > 0.4).float(), x.test_targets)
    return DeepVAE(binary, batch, widths, latent)


# Tables ---------------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A mixture of experts of which a gate chooses two for each sample."""

    def __init__(self, features: int, experts: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.gate = nn.Linear(features, experts)
        self.experts = nn.ModuleList(MLP((features, hidden, classes)) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        second = scores.topk(2, dim=1).values[:, -1:]
        weights = scores.masked_fill(scores < second, -math.inf).softmax(1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)  # of all on every sample: they are small
        return (weights[:, :, None] * outputs).sum(1)


def experts(seed: int, part: str, experts: int, hidden: int, batch: int) -> Objective:
    """A mixture of experts on the adult data."""
    x = data.adult(part, torch.float32)
    samples = x._replace(targets=(x.targets > 0).long(), test_targets=(x.test_targets > 0).long())
    return Classifier(Experts(x.inputs.shape[1], experts, hidden, 2), samples, batch)


# Values of states -----------------------------------------------------------------------------------------------------


class TemporalDifference(Finite):
    """TD(0) for the values of states, with a target network that is copied every ``copy`` batches.

    xi is the number of the batch and numbers of transitions. What is evaluated is not the loss of the batches, whose
    targets move, but what it is for: the mean squared error of the values, relative to their variance; the values are
    those of simulated returns.
    """

    def __init__(self, network: nn.Module, walk: Walk, transitions: int, batch: int, copy_every: int) -> None:
        super().__init__(transitions, batch)
        self.network, self.discount, self.copy_every, self.copied = network, walk.discount, copy_every, 0
        self.target = [copy.deepcopy(network).requires_grad_(False)]  # in a list: no part of this module
        self.states, kept = walk.states(transitions), walk.states(512)
        self.following, self.rewards = walk.step(self.states)
        self.samples = Samples(self.states, walk.values(self.states), kept, walk.values(kept))

    def draw(self, generator: torch.Generator, steps: int) -> Tensor:
        rows = super().draw(generator, steps)
        return torch.stack([rows, torch.arange(steps)[:, None].expand_as(rows)], -1)

    def forward(self, rows: Tensor) -> Tensor:
        numbers, step = rows[:, 0], int(rows[0, 1])
        if step >= self.copied + self.copy_every:
            self.copied = step - step % self.copy_every
            self.target[0].load_state_dict(self.network.state_dict())
        with torch.no_grad():
            wanted = self.rewards[numbers] + self.discount * self.target[0](self.following[numbers])
        return F.mse_loss(self.network(self.states[numbers]), wanted)

    def full(self) -> Tensor:
        values = self.samples.targets[self.everything]
        return F.mse_loss(self.network(self.samples.inputs[self.everything]), values) / values.var()


class Walk:
    """A random walk of the state that is pulled to the origin, with rewards near some places."""

    def __init__(self, dimension: int, discount: float, data_seed: int) -> None:
        self.generator = torch.Generator().manual_seed(data_seed)
        self.dimension, self.discount = dimension, discount
        self.places = torch.randn(8, dimension, generator=self.generator)
        self.prizes = torch.randn(8, 1, generator=self.generator)
        turn = torch.randn(dimension, dimension, generator=self.generator)
        self.matrix = torch.matrix_exp(0.3 * (turn - turn.T) / math.sqrt(dimension)) * 0.95

    def states(self, count: int) -> Tensor:
        """Random ones."""
        return torch.randn(count, self.dimension, generator=self.generator)

    def step(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The next states, and the rewards in these."""
        rewards = torch.exp(-torch.cdist(states, self.places).square() / 4) @ self.prizes
        return states @ self.matrix + 0.2 * self.states(len(states)), rewards

    def values(self, states: Tensor, runs: int = 32, steps: int = 60) -> Tensor:
        """The mean discounted return of simulated runs from each state."""
        total, now = torch.zeros(len(states), 1), states.repeat(runs, 1)
        for t in range(steps):
            now, rewards = self.step(now)
            total += self.discount**t * rewards.view(runs, -1, 1).mean(0)
        return total


def temporal_difference(
    seed: int, dimension: int, hidden: tuple[int, ...], transitions: int, batch: int, copy_every: int, data_seed: int
) -> Objective:
    """Values of a random walk, from TD(0) with a target network."""
    network = MLP((dimension, *hidden, 1))
    return TemporalDifference(network, Walk(dimension, 0.9, data_seed), transitions, batch, copy_every)


# Graphs ---------------------------------------------------------------------------------------------------------------


class GraphNetwork(nn.Module):
    """Rounds of messages between neighbours; the inputs are an adjacency matrix and a column of marks, side by side."""

    def __init__(self, width: int, rounds: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(2, width)
        self.rounds = nn.ModuleList(MLP((2 * width, width, width)) for _ in range(rounds))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(rounds))
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        adjacency, marks = inputs[:, :, :-1], inputs[:, :, -1:]
        degree = adjacency.sum(2, keepdim=True)
        h = self.embedding(torch.cat([marks, degree / 4], 2))
        for layer, norm in zip(self.rounds, self.norms, strict=True):
            h = h + layer(torch.cat([norm(h), adjacency @ h / (degree + 1)], 2))
        return self.head(h)


def gnn(
    seed: int, nodes: int, graphs: int, degree: float, width: int, rounds: int, batch: int, data_seed: int
) -> Objective:
    """How long a random walk from each node takes to the marked one of a random graph (log, standardised)."""
    generator = torch.Generator().manual_seed(data_seed)
    upper = (torch.rand(graphs, nodes, nodes, generator=generator) < degree / nodes).float().triu(1)
    ring = torch.eye(nodes).roll(1, 0)  # so that every node can be reached
    adjacency = ((upper + upper.mT + ring + ring.mT) > 0).float()
    walk = adjacency / adjacency.sum(2, keepdim=True)
    walk[:, 0] = 0.0  # node 0 is the marked one: the walk ends there
    times = torch.linalg.solve(torch.eye(nodes) - walk, torch.ones(graphs, nodes, 1))
    marks = F.one_hot(torch.zeros(graphs, dtype=torch.long), nodes).float()[:, :, None]
    targets = times.log()
    targets = (targets - targets.mean()) / targets.std()
    inputs, kept = torch.cat([adjacency, marks], 2), graphs // 5
    samples = Samples(inputs[:-kept], targets[:-kept], inputs[-kept:], targets[-kept:])
    return Supervised(GraphNetwork(width, rounds), samples, batch, F.mse_loss, 1.0)
