"""Image classifiers of other kinds: transformers on patches, few and wrong labels, a teacher's answers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality import data
from benchmarks.quality.networks import CNN, MLP, TransformerLayer
from benchmarks.quality.objectives import Classifier, Objective

__all__ = ["few_and_wrong", "tasks", "vision_transformer"]


class VisionTransformer(nn.Module):
    """A transformer on the patches of a square image, with the mean over them for the class."""

    def __init__(self, side: int, patch: tuple[int, int], width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.side, self.patch = side, patch
        count = (side // patch[0]) * (side // patch[1])
        self.embed = nn.Linear(patch[0] * patch[1], width)
        self.position = nn.Parameter(0.02 * torch.randn(count, width))
        self.layers = nn.ModuleList(TransformerLayer(width, heads, 0.0) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        self.register_buffer("mask", torch.zeros(count, count), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.patch
        tiles = x.view(-1, self.side // a, a, self.side // b, b).transpose(2, 3).reshape(len(x), -1, a * b)
        h = self.embed(tiles) + self.position
        for layer in self.layers:
            h = layer(h, self.mask)
        return self.head(self.norm(h).mean(1))


def vision_transformer(
    seed: int, source: str, part: str, patch: tuple[int, int], width: int, heads: int, layers: int, batch: int
) -> Objective:
    """On the digits or on MNIST at 14 x 14."""
    samples = data.digits(part) if source == "digits" else data.mnist(part, size=14)
    side = math.isqrt(samples.inputs.shape[1])
    return Classifier(VisionTransformer(side, patch, width, heads, layers), samples, batch)


def few_and_wrong(seed: int, part: str, digit: int, wrong: float, hidden: tuple[int, ...], batch: int) -> Objective:
    """Is it this digit? One in ten is, and a share of the answers to train on is wrong."""
    samples = data.digits(part)
    truth, kept = (samples.targets == digit).long(), (samples.test_targets == digit).long()
    flip = torch.rand(len(truth), generator=torch.Generator().manual_seed(digit)) < wrong
    noisy = samples._replace(targets=torch.where(flip, 1 - truth, truth), test_targets=kept)
    return Classifier(MLP((64, *hidden, 2)), noisy, batch)


class Tasks(Classifier):
    """The digit, and times ``weight`` where its ink is: two losses of different size on one trunk."""

    def __init__(self, samples: data.Samples, channels: tuple[int, ...], weight: float, batch: int) -> None:
        side = math.isqrt(samples.inputs.shape[1])
        super().__init__(CNN(side, channels, 12), samples, batch)
        self.weight = weight
        line = torch.linspace(-1, 1, side)
        ink = samples.inputs.view(-1, side, side) / samples.inputs.sum(1)[:, None, None]
        self.centres = torch.stack([(ink.sum(2) * line).sum(1), (ink.sum(1) * line).sum(1)], 1)
        assert self.constant is not None
        self.constant += weight * float(self.centres.var(0, correction=0).mean())

    def logits(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)[:, :10]

    def forward(self, rows: Tensor) -> Tensor:
        outputs = self.network(self.samples.inputs[rows])
        where = F.mse_loss(outputs[:, 10:], self.centres[rows])
        return F.cross_entropy(outputs[:, :10], self.samples.targets[rows]) + self.weight * where


def tasks(seed: int, part: str, channels: tuple[int, ...], weight: float, batch: int) -> Objective:
    """See :class:`Tasks`; on the 8 x 8 digits."""
    return Tasks(data.digits(part), channels, weight, batch)
