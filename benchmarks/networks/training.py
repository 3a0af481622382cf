"""One training of a larger network: its curve, its end, how much the loss rose at first, and what it cost.

The training loss is measured on fixed training samples (:class:`Probe`), at the point where a method says to evaluate,
after every 4 % of the budget and once more at 98 %; the loss of the end is the mean of the last three. The time is this
process's CPU time without the evaluations.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.networks.methods import WARMUP
from benchmarks.networks.optimizers import mark_outer_layers
from benchmarks.networks.probe import Probe
from benchmarks.quality.methods import Method
from benchmarks.quality.problem import Instance, Problem
from benchmarks.quality.training import Loop

__all__ = ["Curve", "Result", "checkpoints", "rate_at", "rise", "run"]

END = 3
"""So many evaluations make the loss of the end."""
FIRST = 50
"""In so many steps the rise of the loss is looked for."""


@dataclass(frozen=True)
class Curve:
    """The training loss of one point, "last" or "average", during a training."""

    evaluations: list[int] = field(default_factory=list)
    """Gradient evaluations so far."""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """CPU time so far, without evaluations."""
    validation: float = math.inf
    """The loss on kept samples at the end."""

    @property
    def end(self) -> float:
        """The mean of the last evaluations; infinite if there are none, or one is not finite."""
        last = self.losses[-END:]
        return math.fsum(last) / len(last) if last and all(map(math.isfinite, last)) else math.inf


@dataclass(frozen=True)
class Result:
    """What one training gave."""

    curves: dict[str, Curve]
    """By point."""
    start: float
    """The training loss at the first point."""
    rise: float
    evaluations: int
    steps: int
    seconds: float
    failed: bool
    """Whether it ended early because nothing finite was left."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Result:
        """From plain values."""
        return cls(**{**values, "curves": {k: Curve(**v) for k, v in values["curves"].items()}})


def run(problem: Problem, method: Method, seed: int, rate: float | None, budget: int) -> Result:
    """Train a network until the budget of gradient evaluations is spent; the same numbers each time, but the seconds.

    Args:
        problem: the network.
        method: how it is trained.
        seed: of the first weights, the order of the data and their noise: the same for all methods.
        rate: the learning rate; None for the method's documented default, or if it has none.
        budget: in gradient evaluations.
    """
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        instance = problem.make(seed, steps=budget)
        torch.manual_seed(3000 + seed)
        training = _Measured(instance, method, method.default if rate is None else rate, budget)
        start = training.probe.training()
        training.began = time.process_time()
        failed = training.run()
        seconds = training.now()
        curves = training.curves if failed else training.finished()
    early = rise(training.batch_losses)
    return Result(curves, start, early, training.evaluations, training.steps, seconds, failed)


def checkpoints(budget: int) -> list[int]:
    """After how many gradient evaluations the loss is measured.

    >>> checkpoints(500)[:3], checkpoints(500)[-4:]
    ([20, 40, 60], [460, 480, 490, 500])
    """
    return sorted({max(1, round(budget * share / 100)) for share in [*range(4, 101, 4), 98]})


def rate_at(step: int, budget: int, rate: float) -> float:
    """Linear warmup to ``rate``, then half a cosine to 0.

    >>> [round(rate_at(t, 100, 1.0), 3) for t in (0, 4, 5, 52, 99)]
    [0.2, 1.0, 1.0, 0.508, 0.0]
    """
    warmup = max(1, round(WARMUP * budget))
    if step < warmup:
        return rate * (step + 1) / warmup
    return rate * (1 + math.cos(math.pi * (step - warmup) / max(1, budget - warmup))) / 2


def rise(losses: list[float]) -> float:
    """The largest loss of the first ``FIRST`` batches over the loss of the first one.

    >>> rise([2.0, 1.0, 3.0]), rise([2.0, float("nan")]), rise([2.0])
    (1.5, inf, 1.0)
    """
    early = losses[:FIRST]
    return max(early) / early[0] if all(map(math.isfinite, early)) else math.inf


class _Measured(Loop):
    """The loop of the quality suite with a schedule, a clock and a curve."""

    def __init__(self, instance: Instance, method: Method, rate: float | None, budget: int) -> None:
        mark_outer_layers(instance.objective)
        super().__init__(instance, method, rate, budget)
        self.batch_losses: list[float] = []
        self.curves: dict[str, Curve] = {point: Curve() for point in method.points}
        self.waiting = checkpoints(budget)
        self.probe = Probe(instance.objective)
        self.spent, self.began = 0.0, time.process_time()
        self._schedule()

    def now(self) -> float:
        """The CPU time of training so far; the clock goes on."""
        clock = time.process_time()
        self.spent, self.began = self.spent + clock - self.began, clock
        return self.spent

    def _schedule(self) -> None:
        if self.method.schedule == "warmup-cosine":
            assert self.rate is not None
            for group in self.optimizer.param_groups:
                group["lr"] = rate_at(self.steps, self.budget, self.rate)

    def _closure(self, step: int) -> Callable[[], Tensor]:
        closure = super()._closure(step)

        def noting() -> Tensor:
            loss = closure()
            if len(self.batch_losses) <= step:
                self.batch_losses.append(float(loss))
            return loss

        return noting

    def _update_average(self) -> None:
        """After every step: the average, the next learning rate, and the curve where it is due."""
        super()._update_average()
        self._schedule()
        if self.waiting and self.evaluations >= self.waiting[0]:
            while self.waiting and self.evaluations >= self.waiting[0]:
                del self.waiting[0]
            seconds = self.now()
            for point, curve in self.curves.items():
                with self.at(point):
                    curve.losses.append(self.probe.training())
                curve.evaluations.append(self.evaluations)
                curve.seconds.append(seconds)
            self.began = time.process_time()

    @contextlib.contextmanager
    def at(self, point: str) -> Iterator[None]:
        """The parameters at the point to evaluate, and back again."""
        overwritten = point == "average" and self.method.averaging != "optimizer"
        before = [p.detach().clone() for p in self.params] if overwritten else []
        with super().at(point):
            yield
        if self.method.modes:
            self.optimizer.train()
        if overwritten:
            with torch.no_grad():
                torch._foreach_copy_(self.params, before)

    def finished(self) -> dict[str, Curve]:
        """The curves, with the losses on kept samples."""
        found = {}
        for point, curve in self.curves.items():
            with self.at(point):
                found[point] = replace(curve, validation=self.probe.validation())
        return found
