"""SGDOL once more, in numpy and float64, one coordinate after the other: it shares nothing with the package."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

CONSTANTS = {"rms": (0.99, 0.01, 1e-4), "adagrad": (1.0, 0.01, 1e-4)}


@dataclass
class Group:
    """A parameter group: the numbers of its tensors, and its own options."""

    tensors: list[int]
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    maximize: bool = False
    momentum_weight: float = 0.0


@dataclass
class Coordinate:
    """Everything that is known about one scalar."""

    tensor: int
    group: int
    block: Any
    x: float
    m: float = 0.0
    squares: float = 0.0
    seen: float = 0.0
    last: float = 0.0
    average: float | None = None


@dataclass
class Block:
    """A step size: its learner's sums."""

    u: float = 0.0
    n: float = 0.0
    h: float = 0.0
    u_last: float = 0.0
    s_last: float = 0.0


@dataclass
class Independent:
    """The optimizer, told each update's gradients as numbers."""

    groups: list[Group]
    tensors: list[np.ndarray]
    granularity: str
    estimator: str
    alpha: float | None
    kappa: float
    statistics: str
    metric: str
    learner: str
    averaging: float | None
    coordinates: list[Coordinate] = field(default_factory=list)
    blocks: dict[Any, Block] = field(default_factory=dict)
    first: float = 0.0
    updates: int = 0

    def __post_init__(self) -> None:
        group_of = {t: g for g, group in enumerate(self.groups) for t in group.tensors}
        for t, values in enumerate(self.tensors):
            for value in values.ravel():
                block = {"global": 0, "group": group_of[t], "tensor": t}.get(self.granularity, len(self.coordinates))
                self.coordinates.append(Coordinate(t, group_of[t], block, float(value)))
                self.blocks.setdefault(block, Block())

    def update(self, gradients: list[list[float]]) -> None:
        """One update from k independent gradients, each a list with a number for every coordinate."""
        if not np.all(np.isfinite(gradients)):
            return
        k = len(gradients)
        mean, signal = [], []
        for i in range(len(self.coordinates)):
            g = [gradient[i] for gradient in gradients]
            if self.estimator == "paper":
                mean.append(g[0])
                signal.append(g[0] * g[1])
            else:
                mean.append(sum(g) / k)
                signal.append((sum(g) ** 2 - sum(v * v for v in g)) / (k * (k - 1)))
        diagonal = self._diagonal(mean)
        length = []
        for group in self.groups:
            group.momentum_weight = group.momentum * group.momentum_weight + (1 - group.momentum)
        direction = []
        for i, c in enumerate(self.coordinates):
            group = self.groups[c.group]
            beta, w = group.momentum, group.momentum_weight
            u, n = signal[i] / diagonal[i], mean[i] ** 2 / diagonal[i]
            if self.statistics == "direction":
                u = (beta * c.m * mean[i] / diagonal[i] + (1 - beta) * u) / w
            c.m = beta * c.m + (1 - beta) * mean[i]
            d = c.m / w
            if self.statistics == "direction":
                n = d * d / diagonal[i]
            signal[i] = u
            length.append(n)
            direction.append(d / diagonal[i])
        self._learn_and_move(mean, signal, length, direction)

    def _diagonal(self, mean: list[float]) -> list[float]:
        if self.metric == "euclidean":
            return [1.0] * len(mean)
        decay, k0, k1 = CONSTANTS[self.metric]
        of_tensor: dict[int, list[float]] = {}
        for c, g in zip(self.coordinates, mean, strict=True):
            of_tensor.setdefault(c.tensor, []).append(c.squares / c.seen if c.seen else g * g)
        everything = [q for qs in of_tensor.values() for q in qs]
        overall = sum(everything) / len(everything)
        found = []
        for c, g in zip(self.coordinates, mean, strict=True):
            own = of_tensor[c.tensor]
            v = (c.squares + k0 * sum(own) / len(own)) / (c.seen + k0)
            found.append(((v / overall + k1) / (1 + k1)) ** 0.5 if overall > 0 else 1.0)
            c.squares, c.seen = decay * c.squares + g * g, decay * c.seen + 1
        return found

    def _learn_and_move(
        self, mean: list[float], signal: list[float], length: list[float], direction: list[float]
    ) -> None:
        members: dict[Any, list[int]] = {}
        for i, c in enumerate(self.coordinates):
            members.setdefault(c.block, []).append(i)
        multipliers = {}
        known = self.first
        if not self.first:
            self.first = self.kappa * sum(length) / len(length)
        for name, block in self.blocks.items():
            size = len(members[name])
            alpha = known * size if self.alpha is None else self.alpha
            s = self._multiplier(block, alpha)
            u, n = sum(signal[i] for i in members[name]), sum(length[i] for i in members[name])
            if self.learner == "measured":
                v = sum(mean[i] * self.coordinates[i].last for i in members[name])
                if block.s_last > 0:
                    block.h += (block.u_last - v) / block.s_last
                block.u += block.u_last
                block.u_last, block.s_last = u, s
            else:
                block.u, block.n = block.u + u, block.n + n
            multipliers[name] = s
        self.updates += 1
        for c, d in zip(self.coordinates, direction, strict=True):
            group = self.groups[c.group]
            step = group.lr * multipliers[c.block]
            c.x = c.x - step * (group.weight_decay * c.x + (-d if group.maximize else d))
            c.last = d
            if self.averaging is not None:
                before = c.x if c.average is None else c.average
                c.average = before + (self.averaging + 1) / (self.updates + self.averaging) * (c.x - before)

    def _multiplier(self, block: Block, alpha: float) -> float:
        if self.learner == "measured":
            gain = max(alpha + block.u, 0.0)
            cost = gain + 2.0 * max(block.h - block.u / 0.6, 0.0)
            return gain / cost if cost > 0 else 1.0
        cost = alpha + block.n
        return min(max((alpha + block.u) / cost, 0.0), 2.0) if cost > 0 else 1.0
