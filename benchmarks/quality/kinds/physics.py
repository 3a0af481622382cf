"""Physics-informed networks: the loss is how badly a network solves a differential equation."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from benchmarks.quality.networks import MLP
from benchmarks.quality.objectives import Evaluation, Finite, Objective

__all__ = ["derivatives", "differential_equation"]


def derivatives(network: MLP, x: Tensor) -> tuple[Tensor, Tensor]:
    """The first and second derivatives of a network of linear layers and tanh along each axis, carried through it."""
    rows, axes = x.shape
    first = torch.eye(axes)[:, None].expand(axes, rows, axes)
    second = torch.zeros(axes, rows, axes)
    for layer in network:
        if isinstance(layer, nn.Linear):
            x, first, second = layer(x), first @ layer.weight.T, second @ layer.weight.T
        else:
            x = torch.tanh(x)
            slope = 1 - x * x
            second = slope * (second - 2 * x * first * first)
            first = slope * first
    return first, second


class _Poisson:
    r"""u'' = f on [0, 1] with u(0) = u(1) = 0, where u = sin(2 pi x) + x (1 - x)."""

    dimension = 1

    def solution(self, x: Tensor) -> Tensor:
        return torch.sin(2 * math.pi * x) + x * (1 - x)

    def residual(self, network: MLP, x: Tensor) -> Tensor:
        force = -4 * math.pi**2 * torch.sin(2 * math.pi * x) - 2
        return (derivatives(network, x)[1][0] - force) / 10

    def boundary(self, generator: torch.Generator, rows: int) -> Tensor:
        return torch.randint(2, (rows, 1), generator=generator).float()


class _Heat:
    r"""u_t = u_xx / 10 on [0, 1]^2, with u(x, 0) = sin(pi x) and u = 0 at the ends."""

    dimension = 2

    def solution(self, x: Tensor) -> Tensor:
        return torch.exp(-(math.pi**2) / 10 * x[:, 1:]) * torch.sin(math.pi * x[:, :1])

    def residual(self, network: MLP, x: Tensor) -> Tensor:
        first, second = derivatives(network, x)
        return first[1] - second[0] / 10

    def boundary(self, generator: torch.Generator, rows: int) -> Tensor:
        points = torch.rand(rows, 2, generator=generator)
        points[::2, 1] = 0.0
        points[1::2, 0] = (points[1::2, 0] > 0.5).float()
        return points


class DifferentialEquation(Finite):
    """Mean squares of the residual inside and, times ``weight``, of the error at the boundary; f* = 0."""

    def __init__(self, equation: _Poisson | _Heat, hidden: tuple[int, ...], weight: float, batch: int) -> None:
        rows = 1024
        super().__init__(rows, batch)
        self.equation, self.weight = equation, weight
        generator = torch.Generator().manual_seed(11)
        self.inside = torch.rand(rows, equation.dimension, generator=generator)
        self.edge = equation.boundary(generator, rows)
        self.kept = torch.rand(rows, equation.dimension, generator=generator)
        self.network = MLP((equation.dimension, *hidden, 1), nn.Tanh)
        self.constant = self._of_constants()

    def _of_constants(self) -> float:
        """The least loss of a constant u: a parabola in u."""
        zero = MLP((self.equation.dimension, 1))
        with torch.no_grad():
            for p in zero.parameters():
                p.zero_()
            inside = self.equation.residual(zero, self.inside).square().mean()
            edge = self.equation.solution(self.edge).var(correction=0)
        return float(inside + self.weight * edge)

    def forward(self, rows: Tensor) -> Tensor:
        edge = self.edge[rows]
        error = self.network(edge) - self.equation.solution(edge)
        residual = self.equation.residual(self.network, self.inside[rows])
        return residual.square().mean() + self.weight * error.square().mean()

    def evaluate(self) -> Evaluation:
        """The validation loss is the mean squared error of the solution."""
        with torch.no_grad():
            error = self.network(self.kept) - self.equation.solution(self.kept)
            return Evaluation(float(self.full()), validation=float(error.square().mean()))


def differential_equation(
    seed: int, equation: Literal["poisson", "heat"], hidden: tuple[int, ...], weight: float, batch: int
) -> Objective:
    """A network that solves Poisson's equation on a line, or the heat equation on a square."""
    chosen = _Poisson() if equation == "poisson" else _Heat()
    return DifferentialEquation(chosen, hidden, weight, batch)
