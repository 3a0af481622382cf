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
    momentum: float
    weight_decay: float
    maximize: bool
    granularity: str
    estimator: str
    alpha: float | None
    kappa: float | None
    statistics: str
    metric: str
    learner: str
    averaging: float | None
    bias_correction: bool
    epoch: int | None
    momentum_weight: float = 0.0
    moving: bool = False
    """Whether it has or has had momentum."""


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

    group: Group
    size: int = 0
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
    coordinates: list[Coordinate] = field(default_factory=list)
    blocks: dict[Any, Block] = field(default_factory=dict)
    first: float = 0.0
    updates: int = 0

    def __post_init__(self) -> None:
        group_of = {t: g for g, group in enumerate(self.groups) for t in group.tensors}
        for t, values in enumerate(self.tensors):
            group = self.groups[group_of[t]]
            for value in values.ravel():
                block: Any = {
                    "global": (group.learner, group.alpha, group.kappa),
                    "group": ("group", group_of[t]),
                    "tensor": ("tensor", t),
                    "coordinate": len(self.coordinates),
                }[group.granularity]
                self.coordinates.append(Coordinate(t, group_of[t], block, float(value)))
                self.blocks.setdefault(block, Block(group)).size += 1

    def update(self, gradients: list[list[float]], present: set[int]) -> None:
        """One update from k independent gradients, each a list with a number for every coordinate.

        Args:
            gradients: the numbers; those of tensors that take no part do not count.
            present: the tensors that take part.
        """
        taking = [i for i, c in enumerate(self.coordinates) if c.tensor in present]
        gradients = [[g[i] for i in taking] for g in gradients]
        if not taking or not np.all(np.isfinite(gradients)):
            return
        k, coordinates = len(gradients), [self.coordinates[i] for i in taking]
        mean, signal = [], []
        for i, c in enumerate(coordinates):
            g = [gradient[i] for gradient in gradients]
            if self.groups[c.group].estimator == "paper":
                mean.append(g[0])
                signal.append(g[0] * g[1])
            else:
                mean.append(sum(g) / k)
                signal.append((sum(g) ** 2 - sum(v * v for v in g)) / (k * (k - 1)))
        diagonal = self._diagonal(coordinates, mean)
        squared = sum(g * g / d for g, d in zip(mean, diagonal, strict=True))
        length = []
        before = [group.momentum_weight for group in self.groups]
        for group in self.groups:
            if not present & set(group.tensors):
                continue
            group.moving = group.moving or group.momentum > 0
            if group.moving:
                group.momentum_weight = group.momentum * group.momentum_weight + (1 - group.momentum)
        direction, hindsight = [], []
        for i, c in enumerate(coordinates):
            group = self.groups[c.group]
            beta, w = group.momentum, group.momentum_weight if group.moving and group.bias_correction else 1.0
            u, n = signal[i] / diagonal[i], mean[i] ** 2 / diagonal[i]
            low = 0.0
            if group.epoch is not None:
                low = (n - u) / group.epoch
                u += low
                low *= 1 - beta ** (self.updates % group.epoch)
            divided = before[c.group] if group.bias_correction and before[c.group] else 1.0
            if (
                before[c.group] and group.metric == "euclidean"
            ):  # of a tensor that was away, the last direction as it would be now
                c.last = c.m / divided
            hindsight.append(mean[i] * c.last + low / divided)
            if group.statistics == "direction":
                u = (beta * (c.m * mean[i] / diagonal[i] + low) + (1 - beta) * u) / w
            c.m = beta * c.m + (1 - beta) * mean[i] if group.moving else 0.0
            d = c.m / w if group.moving else mean[i]
            if group.statistics == "direction":
                n = d * d / diagonal[i]
            signal[i] = u
            length.append(n)
            direction.append(d / diagonal[i])
        self._learn_and_move(coordinates, squared, hindsight, signal, length, direction)

    def _diagonal(self, coordinates: list[Coordinate], mean: list[float]) -> list[float]:
        found = [1.0] * len(mean)
        for metric, (decay, k0, k1) in CONSTANTS.items():
            members = [c for c in self.coordinates if self.groups[c.group].metric == metric]
            present = [(i, c) for i, c in enumerate(coordinates) if self.groups[c.group].metric == metric]
            of_tensor: dict[int, list[float]] = {}
            for c in members:
                if c.seen:
                    of_tensor.setdefault(c.tensor, []).append(c.squares / c.seen)
            past = [q for qs in of_tensor.values() for q in qs]
            for i, c in present:
                if not c.seen:
                    of_tensor.setdefault(c.tensor, []).append(mean[i] ** 2)
            everything = past or [q for qs in of_tensor.values() for q in qs]
            overall = sum(everything) / len(everything) if everything else 0.0
            means = {t: sum(qs) / len(qs) for t, qs in of_tensor.items()}
            for i, c in present:
                v = (c.squares + k0 * means[c.tensor]) / (c.seen + k0)
                found[i] = ((v / overall + k1) / (1 + k1)) ** 0.5 if overall > 0 else 1.0
                c.squares, c.seen = decay * c.squares + mean[i] ** 2, decay * c.seen + 1
        return found

    def _learn_and_move(
        self,
        coordinates: list[Coordinate],
        squared: float,
        hindsight: list[float],
        signal: list[float],
        length: list[float],
        direction: list[float],
    ) -> None:
        members: dict[Any, list[int]] = {}
        for i, c in enumerate(coordinates):
            members.setdefault(c.block, []).append(i)
        multipliers = {}
        known = self.first
        if not self.first:
            self.first = squared / len(self.coordinates)
        for name, mine in members.items():
            block = self.blocks[name]
            group = block.group
            alpha = known * (group.kappa or 1.0) * block.size if group.alpha is None else group.alpha
            s = self._multiplier(block, alpha)
            u, n = sum(signal[i] for i in mine), sum(length[i] for i in mine)
            if group.learner == "measured":
                v = sum(hindsight[i] for i in mine)
                if block.s_last > 0:
                    block.h += (block.u_last - v) / block.s_last
                block.u += block.u_last
                block.u_last, block.s_last = u, s
            else:
                block.u, block.n = block.u + u, block.n + n
            multipliers[name] = s
        self.updates += 1
        for c, d in zip(coordinates, direction, strict=True):
            group = self.groups[c.group]
            step = group.lr / (1 - group.momentum) * multipliers[c.block]
            c.x = c.x - step * (group.weight_decay * c.x + (-d if group.maximize else d))
            c.last = d
            if group.averaging is not None and c.average is None:
                c.average = c.x
        for c in self.coordinates:
            power = self.groups[c.group].averaging
            if power is not None and c.average is not None:
                c.average += (power + 1) / (self.updates + power) * (c.x - c.average)

    def _multiplier(self, block: Block, alpha: float) -> float:
        if block.group.learner == "measured":
            gain = max(alpha + block.u, 0.0)
            cost = gain + 2.0 * max(block.h - block.u / 0.6, 0.0)
            return gain / cost if cost > 0 else 1.0
        cost = alpha + block.n
        return min(max((alpha + block.u) / cost, 0.0), 2.0) if cost > 0 else 1.0
