r"""What is measured on the curves of a run: levels, ratios and where the step size starts to fall.

All of it comes from the running mean :math:`m_t` of the true squared gradient and from the step size:

* the *level* of a run is its mean squared gradient in the last decade of iterations, (T/10, T];
* its *decade ratio* is that level over the level of the decade before, (T/100, T/10].

Spreads are jackknife standard errors over the repeats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from sgdol.paper.configuration import MissingError
from sgdol.paper.verdict import Part, Relation

__all__ = ["Curve", "Number", "Reader", "ResultsLike", "factor", "final_ratio", "jackknife", "part", "ratio_of_means"]

Array = NDArray[np.float64]


class ResultsLike(Protocol):
    """What the checks and the figures read: the results folder of :mod:`sgdol.paper.results`, or one like it."""

    @property
    def configuration(self) -> Any:
        """How the results were made."""
        ...

    def available(self) -> list[tuple[str, str, str]]:
        """(experiment, noise, method) of every finished run."""
        ...

    def curves(self, experiment: str, noise: str, method: str) -> xr.Dataset:
        """The curves of one of them, dimensions (repeat, iteration)."""
        ...

    def tuning(self, experiment: str, method: str) -> xr.Dataset:
        """The search for a method's rate, dimension rate."""
        ...


class Number(NamedTuple):
    """A measured value and its standard error over the repeats."""

    value: float
    error: float | None = None


def jackknife(statistic: Callable[..., float], *samples: Array) -> Number:
    """A function of repeats, with its jackknife standard error; samples of one length are left out together."""
    value = statistic(*samples)
    size = min(len(sample) for sample in samples)
    if size < 2 or not math.isfinite(value):
        return Number(value, None)
    without = np.array(
        [statistic(*(np.delete(sample, i, axis=0) for sample in samples)) for i in range(size)], dtype=np.float64
    )
    error = float(np.sqrt((size - 1) * without.var()))
    return Number(value, error if math.isfinite(error) else None)


def ratio_of_means(numerator: Array, denominator: Array) -> float:
    """The ratio of two means; whatever diverged is infinitely large."""
    top, bottom = float(np.mean(numerator)), float(np.mean(denominator))
    if math.isinf(bottom):
        return math.nan if math.isinf(top) else 0.0
    if bottom == 0:
        return 1.0 if top == 0 else math.inf
    return top / bottom


class Curve:
    """One finished run: arrays of shape (repeat, iteration), infinite where a repeat has diverged."""

    def __init__(self, dataset: xr.Dataset) -> None:
        self.dataset = dataset
        self.attrs = dataset.attrs
        self.t = np.asarray(dataset["iteration"].values, dtype=np.float64)
        self.diverged = np.asarray(dataset["diverged"].values, dtype=bool)

    def values(self, name: str) -> Array:
        """A variable, with what is not a number read as infinite, as diverged repeats leave it."""
        values = np.array(self.dataset[name].transpose("repeat", "iteration").values, dtype=np.float64)
        values[np.isnan(values)] = np.inf
        # Far from everything a bounded loss is flat: a diverged iterate may have a small gradient.
        values[self.diverged, -1] = np.inf
        return values

    def at(self, name: str, iteration: float) -> Array:
        """The variable in each repeat at the recorded iteration that is nearest on a logarithmic axis."""
        return self.values(name)[:, int(np.abs(np.log(self.t / iteration)).argmin())]

    @property
    def final(self) -> Array:
        """The running mean of the squared gradient at the horizon."""
        return self.values("mean_squared_gradient")[:, -1]

    def window(self, start: float, stop: float) -> Array:
        """The mean squared gradient over the iterations (start, stop], from the running mean at both ends."""
        first, last = (int(np.abs(np.log(self.t / t)).argmin()) for t in (start, stop))
        m = self.values("mean_squared_gradient")
        if first == last:
            return m[:, last]
        with np.errstate(invalid="ignore"):
            window = (self.t[last] * m[:, last] - self.t[first] * m[:, first]) / (self.t[last] - self.t[first])
        return np.where(np.isfinite(m[:, last]), np.maximum(window, 0.0), np.inf)

    @property
    def level(self) -> Array:
        """The mean squared gradient over the last decade."""
        return self.window(self.t[-1] / 10, self.t[-1])

    @property
    def fled(self) -> float | None:
        """The last objective if it is larger than the first: such a run has left the minimum it came from.

        On the adult data it has jumped to where the loss is flat, and its small gradients mean nothing.
        """
        objective = self.values("objective")
        first, last = float(objective[:, 0].mean()), float(objective[:, -1].mean())
        return last if math.isfinite(last) and last > first else None

    def decade_ratio(self) -> Number:
        """The level over that of the decade before; infinite if a repeat diverged."""
        if self.diverged.any():
            return Number(math.inf)
        return jackknife(ratio_of_means, self.level, self.window(self.t[-1] / 100, self.t[-1] / 10))

    @property
    def step_size(self) -> Array:
        """The step size, mean over the repeats, at each recorded iteration."""
        return self.values("step_size").mean(axis=0)

    def decrease_starts(self) -> float:
        """The first recorded iteration whose step size has lost a tenth of the first one; infinite if none has."""
        below = np.flatnonzero(self.step_size < 0.9 * self.step_size[0])
        return float(self.t[below[0]]) if len(below) else math.inf


class Reader:
    """Reads each run once and gives None for what is missing; checks and figures may share one."""

    def __init__(self, results: ResultsLike) -> None:
        self.results = results
        self.configuration = results.configuration
        self.available = results.available()
        self._curves: dict[tuple[str, str, str], Curve] = {}
        self._tunings: dict[tuple[str, str], xr.Dataset | None] = {}

    def curve(self, experiment: str, noise: str, method: str) -> Curve | None:
        """The curves of a run, or None if it is not among the results."""
        key = (experiment, noise, method)
        if key not in self.available:
            return None
        if key not in self._curves:
            self._curves[key] = Curve(self.results.curves(*key).load())
        return self._curves[key]

    def methods(self, experiment: str, noise: str) -> list[str]:
        """The methods that were run on an experiment at a level of noise."""
        return sorted({m for e, n, m in self.available if (e, n) == (experiment, noise)})

    def tuning(self, experiment: str, method: str) -> xr.Dataset | None:
        """The search for a method's rate, or None if there was none."""
        key = (experiment, method)
        if key not in self._tunings:
            try:
                self._tunings[key] = self.results.tuning(*key)
            except (KeyError, MissingError):
                self._tunings[key] = None
        return self._tunings[key]


def part(
    what: str,
    curves: Iterable[Curve | None],
    measure: Callable[..., Number | float],
    relation: Relation,
    threshold: float,
    *,
    main: bool = False,
) -> Part:
    """A part measured on some curves, or one that is not measured if any of them is missing."""
    found = list(curves)
    if any(curve is None for curve in found):
        return Part(what, None, relation, threshold, main=main)
    result = measure(*found)
    number = result if isinstance(result, Number) else Number(float(result))
    return Part(what, number.value, relation, threshold, spread=number.error, main=main)


def final_ratio(one: Curve, other: Curve) -> Number:
    """The ratio of the running means of the squared gradient at the horizon."""
    return jackknife(ratio_of_means, one.final, other.final)


def factor(one: Curve, other: Curve) -> Number:
    """The ratio of the running means at the horizon, the larger over the smaller."""
    number = final_ratio(one, other)
    if number.value > 1 or math.isnan(number.value):
        return number
    return jackknife(ratio_of_means, other.final, one.final)
