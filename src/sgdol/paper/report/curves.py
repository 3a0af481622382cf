"""The data of the curves that a reader of the report can explore: means and bands, thinned and rounded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgdol.paper.experiments import EXPERIMENTS, Experiment
from sgdol.paper.figures import LOOKS
from sgdol.paper.measures import Curve, Reader

__all__ = ["POINTS", "QUANTITIES", "curves_data"]

POINTS = 90
"""How many points a curve has at most: one for every three pixels of a panel."""

QUANTITIES = {
    "mean_squared_gradient": "mean squared gradient",
    "objective": "objective f(x_t)",
    "step_size": "step size",
}


def curves_data(read: Reader) -> dict[str, Any]:
    """Everything that the page needs to draw curves, as JSON takes it."""
    experiments = sorted(EXPERIMENTS.values(), key=lambda experiment: experiment.main.number)
    described = [_experiment(read, experiment) for experiment in experiments]
    return {
        "quantities": QUANTITIES,
        "looks": {
            name: {"colour": look.colour, "dashes": _dashes(look.dashes), "width": 1.2 * look.width}
            for name, look in LOOKS.items()
        },
        "experiments": [each for each in described if any(panel["curves"] for panel in each["panels"])],
    }


def _experiment(read: Reader, experiment: Experiment) -> dict[str, Any]:
    return {
        "name": experiment.name,
        "title": experiment.main.title,
        "main": experiment.main.methods,
        "panels": [
            {
                "title": title.replace("$", "").replace("\\sigma", "σ"),
                "curves": {
                    method: _curve(curve)
                    for method in LOOKS
                    if (curve := read.curve(experiment.name, noise, method)) is not None
                },
            }
            for noise, title in experiment.panels.items()
        ],
    }


def _curve(curve: Curve) -> dict[str, Any]:
    at = np.unique(np.linspace(0, len(curve.t) - 1, min(POINTS, len(curve.t))).round().astype(int))
    found: dict[str, Any] = {"t": curve.t[at].astype(int).tolist()}
    if curve.diverged.any():
        found["diverged"] = f"{int(curve.diverged.sum())} of {len(curve.diverged)} diverged"
    for quantity in QUANTITIES:
        values = np.asarray(curve.dataset[quantity].transpose("repeat", "iteration").values, dtype=np.float64)[:, at]
        with np.errstate(over="ignore", invalid="ignore"):
            mean, low, high = values.mean(axis=0), values.min(axis=0), values.max(axis=0)
        if not np.isfinite(mean).any():
            continue
        found[quantity] = {"mean": _plain(mean)}
        if not np.allclose(low, high, rtol=1e-6, atol=0, equal_nan=True):
            found[quantity] |= {"low": _plain(low), "high": _plain(high)}
    return found


def _plain(values: NDArray[np.float64]) -> list[float | None]:
    """Four digits, which is more than can be seen; None where a run is no number any more."""
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values.tolist()]


def _dashes(dashes: Any) -> str:
    return "" if isinstance(dashes, str) else " ".join(f"{1.4 * length:g}" for length in dashes[1])
