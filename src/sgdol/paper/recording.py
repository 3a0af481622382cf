r"""What a run leaves: values at log-spaced iterations, and the running mean of the true squared gradient.

The running mean is exact where the true gradient of every iteration is at hand (:class:`Exact`,
:class:`EveryIteration`), and estimated from one iteration of each stratum where it is dear
(:class:`OneOfEachStratum`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DIVERGENCE",
    "EveryIteration",
    "Exact",
    "OneOfEachStratum",
    "Recorder",
    "Strata",
    "Trace",
    "record_iterations",
    "strata",
]

DIVERGENCE = 1e10
"""A run has diverged once a coordinate of an iterate is beyond this, or is no number any more.

It has also diverged if it ends with an objective above the problem's ceiling."""

EVALUATIONS = 96
"""How many points (all lanes of some iterations) one evaluation of true gradients takes at least.

Fewer waste the products of matrices; with more, the residuals of all samples leave the processor's cache."""

Array = NDArray[np.float64]


class Trace(NamedTuple):
    """What a run recorded; arrays of shape (lanes, recorded iterations) unless said otherwise."""

    iteration: NDArray[np.int64]
    """Shape (recorded,), from 1 to the horizon."""
    mean_squared_gradient: Array
    squared_gradient: Array
    objective: Array
    step_size: Array
    sampling_error: Array
    """The standard error of the running mean as an estimate of the exact one; 0 where it is exact."""
    diverged: NDArray[np.bool_]
    """Shape (lanes,)."""
    evaluations: int
    """How many true gradients per lane were computed only to record them."""


def record_iterations(horizon: int, per_decade: int = 30) -> NDArray[np.int64]:
    """Log-spaced iterations from 1 to the horizon inclusive.

    >>> record_iterations(1000, per_decade=3).tolist()
    [1, 2, 5, 10, 22, 46, 100, 215, 464, 1000]
    """
    count = max(2, math.ceil(per_decade * math.log10(horizon)) + 1) if horizon > 1 else 1
    return np.unique(np.rint(np.geomspace(1, horizon, count)).astype(np.int64))


class Strata(NamedTuple):
    """The iterations at which true gradients are evaluated to estimate the running mean."""

    position: NDArray[np.int64]
    """The iteration that stands for each stratum."""
    size: NDArray[np.int64]
    """How many iterations each stratum has."""
    ends: NDArray[np.int64]
    """For each recorded iteration, how many strata end at or before it."""


def strata(
    recorded: NDArray[np.int64], rng: np.random.Generator, fraction: float = 1 / 200, longest: int = 40
) -> Strata:
    """Cut 1, ..., T into strata of at most ``fraction`` of t and at most ``longest``, and draw a position in each.

    >>> strata(np.array([1, 2, 10]), np.random.default_rng(0)).size.sum()
    np.int64(10)
    """
    sizes: list[NDArray[np.int64]] = []
    ends = []
    total = 0
    previous = 0
    for end in recorded.tolist():
        width = min(max(1, int(end * fraction)), longest)
        number = math.ceil((end - previous) / width)
        edges = np.rint(np.linspace(previous, end, number + 1)).astype(np.int64)
        sizes.append(np.diff(edges))
        total += number
        ends.append(total)
        previous = end
    size = np.concatenate(sizes)
    first = np.cumsum(size) - size + 1
    return Strata(first + rng.integers(0, size), size, np.array(ends))


class Recorder(Protocol):
    """What becomes of the iterates of a noisy run."""

    def add_path(self, path: Array, eta: Array, steps: int) -> None:
        """The first ``steps`` of a chunk's iterates (steps, lanes, dimension) and step sizes (steps, lanes)."""

    def trace(self) -> Trace:
        """What was recorded, lanes first."""
        ...


class Exact:
    """The running mean from the squared gradient of every iteration."""

    def __init__(self, lanes: int, horizon: int) -> None:
        self.iteration = record_iterations(horizon)
        self.done = 0
        self.total = np.zeros(lanes)
        self.diverged = np.zeros(lanes, dtype=bool)
        self.columns: list[list[Array]] = [[], [], [], []]

    def add(self, squared: Array, objective: Array, eta: Array, outside: NDArray[np.bool_]) -> None:
        """One chunk, of shape (steps, lanes)."""
        steps = len(squared)
        with np.errstate(over="ignore", invalid="ignore"):
            sums = self.total + np.cumsum(squared, axis=0)
        self.total = sums[-1]
        self.diverged |= outside.any(axis=0) | ~np.isfinite(squared).all(axis=0)
        here = self.iteration[(self.iteration > self.done) & (self.iteration <= self.done + steps)]
        index = here - self.done - 1
        for column, values in zip(
            self.columns, (sums[index] / here[:, None], squared[index], objective[index], eta[index]), strict=True
        ):
            column.append(values)
        self.done += steps

    def trace(self) -> Trace:
        """Everything recorded so far, lanes first."""
        mean, squared, objective, eta = (np.ascontiguousarray(np.concatenate(c).T) for c in self.columns)
        return Trace(self.iteration, mean, squared, objective, eta, np.zeros_like(mean), self.diverged, 0)


class EveryIteration(Exact):
    """The running mean from true gradients that are evaluated at every iterate."""

    def __init__(self, evaluate: Callable[..., Any], lanes: int, horizon: int) -> None:
        super().__init__(lanes, horizon)
        self.evaluate = evaluate

    def add_path(self, path: Array, eta: Array, steps: int) -> None:
        """All of the chunk is evaluated, so that the program has one shape."""
        parts = self.evaluate(path.reshape(-1, path.shape[-1]))
        squared, objective, outside = (np.asarray(part).reshape(eta.shape)[:steps] for part in parts)
        self.add(squared, objective, eta[:steps], outside)


class OneOfEachStratum:
    """The running mean from one iteration of each stratum, by evaluating the true gradient at saved iterates."""

    def __init__(self, evaluate: Callable[..., Any], lanes: int, horizon: int, rng: np.random.Generator) -> None:
        self.iteration = record_iterations(horizon)
        self.strata = strata(self.iteration, rng)
        self.needed = np.union1d(self.strata.position, self.iteration)
        self.evaluate = evaluate
        self.together = -(-EVALUATIONS // lanes)
        self.lanes = lanes
        self.done = 0
        self.waiting: list[Array] = []
        self.squared: list[Array] = []
        self.objective: list[Array] = []
        self.eta: list[Array] = []
        self.diverged = np.zeros(lanes, dtype=bool)

    def add_path(self, path: Array, eta: Array, steps: int) -> None:
        """Keep the iterates that are needed, and evaluate them once there are enough."""
        path = path[:steps]
        here = self.needed[(self.needed > self.done) & (self.needed <= self.done + steps)]
        self.waiting.extend(path[here - self.done - 1])
        with np.errstate(invalid="ignore"):
            self.diverged |= ~(np.abs(path) <= DIVERGENCE).all(axis=(0, 2))
        recorded = self.iteration[(self.iteration > self.done) & (self.iteration <= self.done + steps)]
        self.eta.append(eta[recorded - self.done - 1])
        self.done += steps
        while len(self.waiting) >= self.together:
            self._evaluate(self.together)

    def _evaluate(self, count: int) -> None:
        points = np.stack(self.waiting[:count])
        del self.waiting[:count]
        padded = np.zeros((self.together, *points.shape[1:]))
        padded[:count] = points
        squared, objective, _ = self.evaluate(padded.reshape(-1, points.shape[-1]))
        self.squared.append(np.asarray(squared).reshape(self.together, self.lanes)[:count])
        self.objective.append(np.asarray(objective).reshape(self.together, self.lanes)[:count])

    def trace(self) -> Trace:
        """The estimates at the recorded iterations, lanes first."""
        if self.waiting:
            self._evaluate(len(self.waiting))
        squared, objective = np.concatenate(self.squared), np.concatenate(self.objective)
        sampled = squared[np.searchsorted(self.needed, self.strata.position)]
        size = self.strata.size[:, None]
        until, t = self.strata.ends - 1, self.iteration[:, None]
        with np.errstate(invalid="ignore", over="ignore"):
            mean = np.cumsum(size * sampled, axis=0)[until] / t
            # Half the squared difference of neighbours estimates the variance within a stratum (and a little too much).
            variance = np.where(size > 1, np.diff(sampled, axis=0, prepend=sampled[:1]) ** 2 / 2, 0.0)
            error = np.sqrt(np.cumsum(size**2 * variance, axis=0)[until]) / t
        at = np.searchsorted(self.needed, self.iteration)
        eta = np.concatenate(self.eta)
        columns = (mean, squared[at], objective[at], eta, error)
        mean, now, value, eta, error = (np.ascontiguousarray(column.T) for column in columns)
        return Trace(self.iteration, mean, now, value, eta, error, self.diverged, len(self.needed))
