r"""Tuning as the paper does it: each method's best rate on the noiseless problem, used unchanged under noise.

The paper says "the ones giving the best convergence rate"; here that is the smallest running mean
:math:`\frac1T \sum_{t \le T} \|\nabla f(x_t)\|^2` over a grid of rates, 1-2-5 in each decade. On the adult data the
gradient norm alone would choose steps so large that they jump to the flat region far away, where f is near 1, so a
rate is admitted only if it ends with an objective within a tolerance of the smallest that the method reaches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sgdol.paper.methods import Method
from sgdol.paper.problems import Problem
from sgdol.paper.recording import Trace
from sgdol.paper.runner import Lanes, Progress, run_noiseless

__all__ = ["Criterion", "Grid", "Search", "choose", "grid_for", "tune"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Grid:
    """The rates 1, 2 and 5 in every decade from ``low`` to ``high``, both included.

    >>> Grid(1e-3, 1e-2).rates().tolist()
    [0.001, 0.002, 0.005, 0.01]
    """

    low: float
    high: float
    digits: tuple[int, ...] = (1, 2, 5)

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < float("inf"):
            raise ValueError(f"a grid needs 0 < low <= high < inf, got low={self.low!r} and high={self.high!r}")

    def rates(self) -> Array:
        """The rates, ascending."""
        first, last = round(np.floor(np.log10(self.low))), round(np.ceil(np.log10(self.high)))
        # Decimal literals, not products: 0.002 is to be the number that a reader would type.
        rates = [float(f"{digit}e{decade}") for decade in range(first, last + 1) for digit in self.digits]
        return np.array([r for r in rates if self.low * (1 - 1e-9) <= r <= self.high * (1 + 1e-9)])

    def __str__(self) -> str:
        return f"{'-'.join(map(str, self.digits))} per decade from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Criterion:
    """The smallest running mean at the horizon, among rates whose last objective is near the smallest."""

    objective_tolerance: float = float("inf")

    def __str__(self) -> str:
        rule = "smallest running mean of the squared gradient norm at the horizon"
        if self.objective_tolerance == float("inf"):
            return rule
        return f"{rule}, with the objective within {self.objective_tolerance:g} of the smallest on the grid"


def grid_for(method: Method, grids: Mapping[str, Grid]) -> dict[str, Array]:
    """All the combinations of the hyperparameters' rates: one array of lanes for each.

    >>> from sgdol.paper.methods import methods
    >>> grid_for(methods()["SGD"], {"learning_rate": Grid(1e-1, 1e0)})
    {'learning_rate': array([0.1, 0.2, 0.5, 1. ])}
    """
    axes = [grids[name].rates() for name in method.tuned]
    mesh = np.meshgrid(*axes, indexing="ij")
    return {name: values.ravel() for name, values in zip(method.tuned, mesh, strict=True)}


@dataclass(frozen=True)
class Search:
    """The search curve of one method and what it chose."""

    method: str
    hyperparameters: Mapping[str, Array]
    """What was tried: one array per tuned hyperparameter, one entry per trial."""
    mean_squared_gradient: Array
    objective: Array
    diverged: NDArray[np.bool_]
    horizon: int
    criterion: str
    grid: str
    index: int
    """Which trial was chosen."""
    chosen: Mapping[str, float] = field(default_factory=dict)
    at_edge: tuple[str, ...] = ()
    """The hyperparameters whose choice is the first or last of its grid: the grid may be too narrow."""


def choose(mean_squared_gradient: Array, objective: Array, diverged: NDArray[np.bool_], criterion: Criterion) -> int:
    """The number of the best trial.

    >>> no = np.array([False, False])
    >>> choose(np.array([0.1, 0.2]), np.array([0.9, 0.2]), no, Criterion(objective_tolerance=0.002))
    1
    """
    usable = ~diverged & np.isfinite(mean_squared_gradient) & np.isfinite(objective)
    if not usable.any():
        raise ValueError("every rate of the grid diverges: extend the grid to smaller rates")
    best_objective = objective[usable].min()
    admitted = usable & (objective <= best_objective + criterion.objective_tolerance)
    return int(np.argmin(np.where(admitted, mean_squared_gradient, np.inf)))


def tune(
    problem: Problem,
    methods: Sequence[Method],
    horizon: int,
    *,
    grids: Mapping[str, Mapping[str, Grid]],
    criterion: Criterion,
    progress: Progress | None = None,
) -> list[Search]:
    """Search the rates of several methods on the noiseless problem, all of them in one program.

    Args:
        problem: the problem.
        methods: the methods; those that have nothing to tune are an error.
        horizon: T of the search.
        grids: for each method and hyperparameter, the rates to try.
        criterion: how to choose.
        progress: called as iterations are done.
    """
    group = []
    for method in methods:
        if not method.tuned:
            raise ValueError(f"{method.name} has no rate to tune")
        group.append(Lanes(method, grid_for(method, grids[method.name])))
    traces = run_noiseless(problem, group, horizon, progress)
    return [
        _search(lanes, trace, grids[lanes.method.name], horizon, criterion)
        for lanes, trace in zip(group, traces, strict=True)
    ]


def _search(lanes: Lanes, trace: Trace, grids: Mapping[str, Grid], horizon: int, criterion: Criterion) -> Search:
    mean, objective = trace.mean_squared_gradient[:, -1], trace.objective[:, -1]
    index = choose(mean, objective, trace.diverged, criterion)
    chosen = {name: float(values[index]) for name, values in lanes.hyperparameters.items()}
    edges = tuple(name for name, value in chosen.items() if value in grids[name].rates()[[0, -1]])
    return Search(
        method=lanes.method.name,
        hyperparameters=lanes.hyperparameters,
        mean_squared_gradient=mean,
        objective=objective,
        diverged=trace.diverged,
        horizon=horizon,
        criterion=str(criterion),
        grid="; ".join(f"{name}: {grids[name]}" for name in lanes.method.tuned),
        index=index,
        chosen=chosen,
        at_edge=edges,
    )
