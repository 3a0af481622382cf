"""Recurrent networks, written out step by step: the library's fused ones have no second derivative."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality import data
from benchmarks.quality.data import Samples
from benchmarks.quality.objectives import Classifier, Objective, Supervised

__all__ = ["Recurrent", "adding", "flow_of_time", "recall", "text"]

Cell = Literal["elman", "gru", "lstm"]
GATES = {"elman": 1, "gru": 3, "lstm": 4}


class Recurrent(nn.Module):
    """One recurrent layer and a linear one, at the last position or at every one.

    ``tokens`` inputs are embedded; otherwise they are vectors of ``inputs`` numbers.
    """

    def __init__(
        self, cell: Cell, inputs: int, width: int, outputs: int, tokens: int | None = None, every: bool = False
    ) -> None:
        super().__init__()
        self.cell, self.width, self.every = cell, width, every
        self.embedding = nn.Identity() if tokens is None else nn.Embedding(tokens, inputs)
        self.into = nn.Linear(inputs, GATES[cell] * width)
        self.back = nn.Parameter(torch.empty(width, GATES[cell] * width).uniform_(-1, 1) / math.sqrt(width))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.into(self.embedding(x))
        h = c = inputs.new_zeros(len(x), self.width)
        states = []
        for i in inputs.unbind(1):
            h, c = self._step(i, h, c)
            states.append(h)
        return self.head(torch.stack(states, 1) if self.every else h)

    def _step(self, i: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        r = h @ self.back
        if self.cell == "elman":
            return torch.tanh(i + r), c
        w = self.width
        if self.cell == "gru":
            reset, update = torch.sigmoid(i[:, : 2 * w] + r[:, : 2 * w]).chunk(2, 1)
            new = torch.tanh(i[:, 2 * w :] + reset * r[:, 2 * w :])
            return new + update * (h - new), c
        gates = i + r
        keep, write, out = torch.sigmoid(gates[:, : 3 * w]).chunk(3, 1)
        c = keep * c + write * torch.tanh(gates[:, 3 * w :])
        return out * torch.tanh(c), c


def adding(seed: int, length: int, width: int, batch: int, data_seed: int) -> Objective:
    """The sum of the two marked numbers of a sequence (Hochreiter and Schmidhuber 1997), by a GRU."""
    generator = torch.Generator().manual_seed(data_seed)
    rows = 1280
    values = torch.rand(rows, length, generator=generator)
    first = torch.randint(length // 2, (rows,), generator=generator)
    second = torch.randint(length // 2, length, (rows,), generator=generator)
    marks = torch.zeros(rows, length)
    everyone = torch.arange(rows)
    marks[everyone, first] = marks[everyone, second] = 1.0
    targets = (values * marks).sum(1, keepdim=True)
    inputs = torch.stack([values, marks], -1)
    samples = Samples(inputs[:1024], targets[:1024], inputs[1024:], targets[1024:])
    constant = float(samples.targets.var(correction=0))
    return Supervised(Recurrent("gru", 2, width, 1), samples, batch, F.mse_loss, constant)


def recall(seed: int, length: int, symbols: int, width: int, batch: int, data_seed: int) -> Objective:
    """Which symbol came first, asked after ``length`` others, of an Elman network: a long horizon."""
    generator = torch.Generator().manual_seed(data_seed)
    inputs = torch.randint(symbols, (1280, length), generator=generator)
    samples = Samples(inputs[:1024], inputs[:1024, 0], inputs[1024:], inputs[1024:, 0])
    network = Recurrent("elman", 8, width, symbols, tokens=symbols)
    nn.init.orthogonal_(network.back)
    return Classifier(network, samples, batch)


def text(seed: int, cell: Cell, part: str, length: int, width: int, batch: int) -> Objective:
    """A language model on characters."""
    samples = data.text(part, length)
    tokens = 1 + int(max(samples.inputs.max(), samples.targets.max(), samples.test_targets.max()))
    return Classifier(Recurrent(cell, 16, width, tokens, tokens, every=True), samples, batch)


class _Field(nn.Module):
    """x(T) of dx/dt = a small network of x, by the classical Runge-Kutta method, at every step."""

    def __init__(self, width: int, steps: int, duration: float) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2, width), nn.Linear(width, 2)
        self.steps, self.h = steps, duration / steps

    def _field(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))

    def forward(self, x: Tensor) -> Tensor:
        points = []
        for _ in range(self.steps):
            x = _runge_kutta(self._field, x, self.h)
            points.append(x)
        return torch.stack(points, 1)


def _runge_kutta(field: Callable[[Tensor], Tensor], x: Tensor, h: float) -> Tensor:
    a = field(x)
    b = field(x + h / 2 * a)
    c = field(x + h / 2 * b)
    d = field(x + h * c)
    return x + h / 6 * (a + 2 * b + 2 * c + d)


def flow_of_time(seed: int, width: int, steps: int, duration: float, batch: int, data_seed: int) -> Objective:
    """A differential equation learned from its paths: Van der Pol's oscillator."""
    generator = torch.Generator().manual_seed(data_seed)
    starts = 4 * torch.rand(640, 2, generator=generator) - 2

    def oscillator(x: Tensor) -> Tensor:
        return torch.stack([x[:, 1], (1 - x[:, 0] ** 2) * x[:, 1] - x[:, 0]], 1)

    x, path, fine = starts, [], 10
    for _ in range(steps):
        for _ in range(fine):
            x = _runge_kutta(oscillator, x, duration / steps / fine)
        path.append(x)
    targets = torch.stack(path, 1)
    samples = Samples(starts[:512], targets[:512], starts[512:], targets[512:])
    constant = float(samples.targets.var((0, 1), correction=0).mean())
    return Supervised(_Field(width, steps, duration), samples, batch, F.mse_loss, constant)
