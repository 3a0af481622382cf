"""One training: a problem, a method, a learning rate and a seed give a result, the same one each time."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.quality.methods import AVERAGING_POWER, Method
from benchmarks.quality.objectives import Evaluation
from benchmarks.quality.problem import FLOOR, Instance, Problem

__all__ = ["Loop", "Outcome", "Result", "run"]


@dataclass(frozen=True)
class Outcome:
    """How good one point of a training is."""

    gap: float
    """Loss over the optimum at the end, between ``FLOOR`` times the starting gap and the starting gap."""
    accuracy: float | None
    """On the samples kept for it, for classifiers."""
    validation: float | None
    """The loss on the samples kept for it, where nothing is classified."""
    diverged: bool
    """Whether the loss was not finite or above where it started; then ``gap`` is the starting gap."""


@dataclass(frozen=True)
class Result:
    """What one training gave."""

    outcomes: dict[str, Outcome]
    """By point: "last" and, where an average is kept, "average"."""
    start: float
    """The starting gap."""
    constant: float
    """The gap of the best constant predictor, at most ``start``: who is not below it has learned nothing."""
    evaluations: int
    """Gradient evaluations, counted where gradients are made."""
    steps: int
    """Batches seen: fewer than ``evaluations`` if some were looked at again."""
    seconds: float
    """Of training, on whatever machine this was: not for the table."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Result:
        """From plain values."""
        return cls(**{**values, "outcomes": {k: Outcome(**v) for k, v in values["outcomes"].items()}})


def run(problem: Problem, method: Method, seed: int, rate: float | None = None, budget: int | None = None) -> Result:
    """Train until the budget of gradient evaluations is spent, and evaluate where the method says to.

    The gradients are made here, by a closure that counts: one evaluation each time it goes over the batch, whether in
    one part or in several, and whether for the first time or again at another point.

    Args:
        problem: what to minimise.
        method: how.
        seed: of the first point, the order of the data, the noise and dropout: the same for all methods.
        rate: the learning rate; None for the method's documented default, or if it has none.
        budget: in gradient evaluations; None for the problem's.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            return _run(problem, method, seed, rate, problem.budget if budget is None else budget)
    finally:
        torch.set_num_threads(threads)


def _run(problem: Problem, method: Method, seed: int, rate: float | None, budget: int) -> Result:
    instance = problem.make(seed, steps=budget)
    start = instance.gap(instance.objective.evaluate())
    torch.manual_seed(3000 + seed)  # dropout
    training = _Training(instance, method, method.default if rate is None else rate, budget)
    began = time.perf_counter()
    failed = training.run()
    seconds = time.perf_counter() - began
    outcomes: dict[str, Outcome] = {}
    for point in method.points:
        with training.at(point):
            outcomes[point] = _outcome(instance, start, failed)
    return Result(outcomes, start, instance.constant(start), training.evaluations, training.steps, seconds)


def _outcome(instance: Instance, start: float, failed: bool) -> Outcome:
    finite = not failed and all(bool(p.isfinite().all()) for p in instance.parameters())
    evaluation = instance.objective.evaluate() if finite else Evaluation(math.inf)
    gap = instance.gap(evaluation)
    diverged = not gap <= start
    gap = start if diverged else max(gap, FLOOR * start)
    return Outcome(gap, evaluation.accuracy, evaluation.validation, diverged)


class _Training:
    """The loop, and the averages."""

    def __init__(self, instance: Instance, method: Method, rate: float | None, budget: int) -> None:
        self.instance, self.method, self.rate, self.budget = instance, method, rate, budget
        self.params: list[Tensor] = list(instance.parameters())
        self.optimizer: Any = method.make(self.params, rate)
        self.evaluations = self.steps = 0
        self.average: list[Tensor] = []
        self.averager: Any = None
        if method.averaging == "harness":
            self.average = [p.detach().clone() for p in self.params]
        elif method.averaging == "dog":
            from dog import PolynomialDecayAverager

            self.averager = PolynomialDecayAverager(nn.ParameterList(self.params), gamma=AVERAGING_POWER)

    def run(self) -> bool:
        """Train; whether it ended early because nothing finite was left."""
        if self.method.modes:
            self.optimizer.train()
        while self.evaluations < self.budget:
            if self.method.schedule == "cosine":
                assert self.rate is not None
                now = self.rate * (1 + math.cos(math.pi * self.steps / self.budget)) / 2
                for group in self.optimizer.param_groups:
                    group["lr"] = now
            closure = self._closure(self.steps)
            try:
                if self.method.closure:
                    self.optimizer.step(closure)
                elif not self._finite(closure()):
                    return True
                else:
                    self.optimizer.step()
            except (ArithmeticError, AssertionError):  # DoG asserts that its sum of squares is a number
                return True
            self.steps += 1
            self._update_average()
        return False

    def _closure(self, step: int) -> Callable[[], Tensor]:
        """The loss and gradient of a step's batch, in the method's number of microbatches."""
        parts = self.method.parts

        def closure() -> Tensor:
            self.evaluations += 1
            self.optimizer.zero_grad()
            if parts == 1:
                loss = self.instance.loss(step)
                loss.backward()
                return loss.detach()
            total = torch.zeros(())
            for part in range(parts):
                loss = self.instance.loss(step, part, parts) / parts
                loss.backward()
                total = total + loss.detach()
            return total

        return closure

    def _finite(self, loss: Tensor) -> bool:
        """Whether training can go on: a loss or gradient may overflow once, but not the parameters."""
        return math.isfinite(loss) or all(
            bool(p.isfinite().all()) and (p.grad is None or bool(p.grad.isfinite().all())) for p in self.params
        )

    @torch.no_grad()
    def _update_average(self) -> None:
        if self.average:
            weight = (AVERAGING_POWER + 1) / (self.steps + AVERAGING_POWER)  # of the first iterate: 1
            torch._foreach_lerp_(self.average, self.params, weight)
        elif self.averager is not None:
            self.averager.step()

    @contextlib.contextmanager
    def at(self, point: str) -> Iterator[None]:
        """The parameters at the point to evaluate."""
        if self.method.modes:
            self.optimizer.eval()
        if point == "last":
            yield
        elif self.method.averaging == "optimizer":
            with self.optimizer.averaged():
                yield
        else:
            average = self.average or list(self.averager.averaged_model.parameters())
            with torch.no_grad():
                for p, a in zip(self.params, average, strict=True):
                    p.copy_(a)  # the last point has been evaluated before
            yield


Loop = _Training  # under a public name; its own is a part of what names saved runs
