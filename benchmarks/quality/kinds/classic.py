"""Test functions, regressions on data, and the usual networks on small images and text."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.quality import data, networks, objectives
from benchmarks.quality.objectives import Objective

__all__ = [
    "adult", "breast_cancer", "cnn", "factorisation", "large_digits", "least_squares", "mlp", "quadratic", "resnet",
    "rosenbrock", "softmax", "transformer",
]  # fmt: skip


def rosenbrock(seed: int, **options: Any) -> Objective:
    return objectives.Rosenbrock(**options)


def quadratic(seed: int, **options: Any) -> Objective:
    return objectives.Quadratic(**options)


def least_squares(seed: int, **options: Any) -> Objective:
    return objectives.LeastSquares(**options)


def factorisation(seed: int, **options: Any) -> Objective:
    return objectives.MatrixFactorisation(seed=seed, **options)


def adult(seed: int, part: str, batch: int) -> Objective:
    return objectives.Adult(data.adult(part), batch)


def breast_cancer(seed: int, part: str, batch: int, ridge: float) -> Objective:
    return objectives.Logistic(data.breast_cancer(part), batch, ridge)


def large_digits(seed: int, part: str, batch: int, ridge: float) -> Objective:
    """Logistic regression: is the digit at least 5?"""
    samples = data.digits(part, torch.float64)
    x, y, tx, ty = samples
    ones = (torch.ones(len(x), 1, dtype=x.dtype), torch.ones(len(tx), 1, dtype=x.dtype))
    two = data.Samples(
        torch.hstack([x, ones[0]]), 2.0 * (y > 4).double() - 1, torch.hstack([tx, ones[1]]), 2.0 * (ty > 4).double() - 1
    )
    return objectives.Logistic(two, batch, ridge)


def softmax(seed: int, source: str, part: str, batch: int, ridge: float) -> Objective:
    samples = getattr(data, source)(part, torch.float64)
    network = nn.Linear(samples.inputs.shape[1], 10, dtype=torch.float64)
    nn.init.zeros_(network.weight)
    nn.init.zeros_(network.bias)
    return objectives.Classifier(network, samples, batch, ridge)


def mlp(
    seed: int,
    source: str,
    part: str,
    batch: int,
    hidden: tuple[int, ...],
    activation: str = "ReLU",
    dropout: float = 0.0,
) -> Objective:
    samples = getattr(data, source)(part)
    widths = (samples.inputs.shape[1], *hidden, 10)
    return objectives.Classifier(networks.MLP(widths, getattr(nn, activation), dropout), samples, batch)


def _images(source: str, part: str) -> tuple[data.Samples, int]:
    return (data.digits(part), 8) if source == "digits" else (data.mnist(part, size=14), 14)


def cnn(seed: int, source: str, part: str, batch: int, channels: tuple[int, ...]) -> Objective:
    samples, size = _images(source, part)
    return objectives.Classifier(networks.CNN(size, channels), samples, batch)


def resnet(seed: int, source: str, part: str, batch: int, channels: tuple[int, ...], stem_stride: int = 1) -> Objective:
    samples, size = _images(source, part)
    return objectives.Classifier(networks.ResNet(size, channels, stem_stride), samples, batch)


def transformer(
    seed: int, part: str, batch: int, length: int, layers: int, width: int = 32, heads: int = 2, dropout: float = 0.0
) -> Objective:
    samples = data.text(part, length)
    tokens = 1 + int(max(samples.inputs.max(), samples.targets.max(), samples.test_targets.max()))
    network = networks.Transformer(tokens, length, width, heads, layers, dropout)
    return objectives.Classifier(network, samples, batch)
