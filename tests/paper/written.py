"""Results that were not run but written down: curves whose verdicts are known."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import xarray as xr

import sgdol
from sgdol.paper.results import Configuration, Results

NOISES = {
    "adult": {"batch=all": 0.0, "batch=50": 0.1, "batch=1": 5.0},
    "rosenbrock": {"sigma=0": 0.0, "sigma=0.2": 0.1, "sigma=5": 5.0},
}
STEPLESS = ("Adam", "RMSProp", "AdaDelta", "AMSGrad")
TUNED = ("SGD", "AdaGrad Global", "AdaGrad Coordinate", *STEPLESS, "Hypergradient")
COMMON = ("SGDOL Global", "SGDOL Coordinate", *TUNED)
SHRINKING = ("SGDOL Global", "SGDOL Coordinate", "AdaGrad Global", "AdaGrad Coordinate")


class WrittenResults:
    """A world in which the paper is right, unless it is told otherwise.

    The squared gradient is 1/t plus what the noise adds: noise / sqrt(t) for a method whose steps shrink, the noise
    itself for one whose steps do not. Hypergradient diverges under the largest noise.
    """

    def __init__(self, repeats=3, horizon=10_000, stalls=(), missing=(), rate=1e-3):
        usual = {"data": None, "noise_model": "coordinate", "seed": 0, "quick": False, "alpha": 10.0}
        self.configuration = SimpleNamespace(**usual, horizon=horizon, repeats=repeats, figures=(1, 2, 3, 4))
        self.repeats, self.horizon, self.stalls, self.missing, self.rate = repeats, horizon, stalls, missing, rate

    def methods(self, experiment):
        return COMMON if experiment == "adult" else (*COMMON, "SGD GL")

    def available(self):
        return [
            (e, n, m)
            for e in NOISES
            for n in NOISES[e]
            for m in self.methods(e)
            if e not in self.missing and m not in self.missing
        ]

    def run(self, experiment, noise, method):
        """What a run was asked for."""
        asked = {"experiment": experiment, "noise": noise, "method": method, "learning_rate": self.rate}
        return {**asked, "smoothness": 1 / self.rate, "alpha": 10.0, "horizon": self.horizon, "repeats": self.repeats}

    def curves(self, experiment, noise, method):
        level = NOISES[experiment][noise]
        t = np.unique(np.geomspace(1, self.horizon, 121).round()).astype(int)
        every = np.arange(1, self.horizon + 1)
        shrinks = method in SHRINKING and method not in self.stalls
        squared = 0.5 / every + level * (every**-0.5 if shrinks else 1.0)
        wobble = 1 + 0.02 * (level > 0) * np.arange(self.repeats)[:, None]
        mean = (np.cumsum(squared) / every)[t - 1] * wobble
        step = np.full(mean.shape, self.rate)
        if shrinks:
            step = step / (1 + np.maximum(0, level * (t - 10) / 500))
        if method == "SGD GL" and level:
            total = float(noise.removeprefix("sigma=")) * 2**0.5
            step = np.full(mean.shape, min(self.rate, (2 * self.rate) ** 0.5 / (total * self.horizon**0.5)))
        if method in STEPLESS:
            step = np.full(mean.shape, np.nan)
        diverged = np.zeros(self.repeats, dtype=bool)
        instant, start = squared[t - 1] * wobble, 1.0 if experiment == "rosenbrock" else 0.5
        objective = start * squared[t - 1] / squared[0] * np.ones_like(mean)
        if method == "Hypergradient" and level > 1:
            diverged[-1] = True
            for values in (mean, instant, objective, step):
                values[-1, t > 100] = np.nan
        curves = {"mean_squared_gradient": mean, "squared_gradient": instant, "objective": objective, "step_size": step}
        values = {name: (("repeat", "iteration"), curve) for name, curve in curves.items()}
        told = {"seed": 0, "gradients_per_iteration": 2 if method.startswith("SGDOL") else 1, "version": "0"}
        return xr.Dataset(
            {**values, "diverged": ("repeat", diverged)},
            coords={"iteration": t, "repeat": np.arange(self.repeats)},
            attrs={**self.run(experiment, noise, method), **told},
        )

    def tuning(self, experiment, method):
        if method.startswith("SGDOL") or method == "SGD GL":
            raise KeyError(method)
        found = ("rate", np.array([4.0, 2.0, 1.0, 3.0, np.inf]))
        told = {"chosen": self.rate, "criterion": "the smallest running mean at the horizon", "horizon": self.horizon}
        return xr.Dataset(
            {"mean_squared_gradient": found, "objective": found, "diverged": ("rate", np.isinf(found[1]))},
            coords={"rate": np.array([2e-4, 5e-4, 1e-3, 2e-3, 5e-3])},
            attrs={**told, "experiment": experiment, "method": method},
        )

    def summary(self):
        rows = []
        for experiment, noise, method in self.available():
            curves = self.curves(experiment, noise, method)
            final = curves["mean_squared_gradient"].values[:, -1]
            means = {"mean_squared_gradient": final.mean(), "mean_squared_gradient_std": final.std()}
            means |= {"objective": 0.1, "objective_std": 0.0, "diverged": int(curves["diverged"].sum())}
            step_size = float(curves["step_size"].values[:, -1].mean())
            rows.append({**self.run(experiment, noise, method), **means, "step_size": step_size})
        return rows


def write_folder(folder, experiments=("rosenbrock",), methods=("SGDOL Global", "SGD")):
    """A small part of the same world as files, as a run leaves them."""
    results = Results(folder)
    results.prepare(Configuration(horizon=1000, repeats=3))
    for experiment in experiments:
        horizons = results.configuration.horizons(experiment)
        for noise, level in NOISES[experiment].items():
            written = WrittenResults(repeats=3, horizon=horizons.noisy if level else horizons.noiseless)
            for method in methods:
                dataset = written.curves(experiment, noise, method).assign_attrs(version=sgdol.__version__)
                results.write(results.curves_path(experiment, noise, method), dataset, key="written")
        for method in set(methods) & set(TUNED):
            dataset = WrittenResults(horizon=horizons.tuning).tuning(experiment, method)
            results.write(results.tuning_path(experiment, method), dataset, key="written")
    results.record_time("rosenbrock: sigma=5: SGD", 83.0)
    results.record_time("rosenbrock: sigma=5: Adam", 40.5)
    results.write_summary()
    return results
