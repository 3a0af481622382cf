"""The plan of the reproduction: which runs a figure needs, in which order, and what they are called.

Each experiment is tuned without noise first; then its noiseless runs are made, all methods in one program; then its
noisy runs, one file each. Every part looks for its file before it works, so an interrupted reproduction continues.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xarray as xr

import sgdol
from sgdol.paper.configuration import Configuration, Horizons
from sgdol.paper.experiments import EXPERIMENTS, TUNING, Experiment
from sgdol.paper.methods import Method, methods
from sgdol.paper.problems import Noise, Problem
from sgdol.paper.recording import DIVERGENCE, Trace
from sgdol.paper.results import Results, key_of
from sgdol.paper.runner import Lanes, evaluate, run_noiseless, run_noisy
from sgdol.paper.tuning import Search, tune

__all__ = ["Progress", "reproduce"]


class Progress(Protocol):
    """Who wants to know how far the reproduction is. Calls may come from several threads."""

    def plan(self, parts: Mapping[str, int]) -> None:
        """All the parts that will be run, and how many iterations each takes; more may be announced later."""

    def advance(self, part: str, iterations: int) -> None:
        """So many iterations more of the part are done."""

    def finish(self, part: str, seconds: float) -> None:
        """The part is written. It took so many seconds, or 0 if it was there already."""


class _Silent:
    def plan(self, parts: Mapping[str, int]) -> None: ...
    def advance(self, part: str, iterations: int) -> None: ...
    def finish(self, part: str, seconds: float) -> None: ...


def reproduce(
    configuration: Configuration,
    out: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    workers: int | None = None,
) -> Results:
    """Run what the configuration's figures need and is not in the folder yet.

    Args:
        configuration: what to run.
        out: the results folder.
        progress: told about everything; None for silence.
        workers: how many noisy runs at once; None for one per core.

    Returns:
        The folder, complete, with ``summary.csv``.

    Raises:
        ResultsError: the folder cannot be used; nothing in it was changed.
        DataError: the data file cannot be used.
    """
    experiments = [EXPERIMENTS[name] for name in configuration.experiments()]
    problems = [(experiment, experiment.build(configuration)) for experiment in experiments]
    results = Results(out)
    with results.alone():
        results.prepare(configuration)
    with results.alone():
        _run_all(configuration, problems, results, progress or _Silent(), workers or os.cpu_count() or 1)
        results.write_summary()
    return results


def _run_all(
    configuration: Configuration,
    problems: Sequence[tuple[Experiment, Problem]],
    results: Results,
    progress: Progress,
    workers: int,
) -> None:
    jobs = [_Job(configuration, experiment, problem, results, progress) for experiment, problem in problems]
    progress.plan({part: total for job in jobs for part, total in job.parts().items()})
    with ThreadPoolExecutor(workers) as pool:
        # The noisy runs of one experiment fill the cores while the rates of the next are searched.
        begun = [(job, pool.submit(job.run_without_noise)) for job in jobs]
        futures = []
        try:
            for job, future in begun:
                future.result()
                futures += [pool.submit(job.run_noisy, noise, method) for noise, method in job.noisy()]
            for future in futures:
                future.result()
        except BaseException:
            for job in jobs:
                job.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _StoppedError(Exception):
    """Another part failed or the user interrupted: this part need not go on."""


class _Job:
    """The parts of one experiment."""

    def __init__(
        self,
        configuration: Configuration,
        experiment: Experiment,
        problem: Problem,
        results: Results,
        progress: Progress,
    ) -> None:
        self.configuration = configuration
        self.experiment = experiment
        self.problem = problem
        self.results = results
        self.progress = progress
        self.table = methods(configuration.adagrad_form)  # type: ignore[arg-type]
        self.horizons: Horizons = configuration.horizons(problem.name)
        self.repeats = configuration.repeats_of(problem.name)
        self.grids = experiment.grids
        self.criterion = experiment.criterion
        self.stopped = threading.Event()

    # ---------------------------------------------------------------------------------------------------- plan

    def noisy(self) -> Iterable[tuple[Noise, Method]]:
        """The noisy runs, the longest first."""
        wanted = self.configuration.methods(self.problem.name)
        for noise in self.problem.noises:
            if not noise.deterministic:
                for name in wanted:
                    yield noise, self.table[name]

    def parts(self) -> dict[str, int]:
        """The names of the parts and their iterations."""
        parts = {self._tuning_part(): self.horizons.tuning, self._noiseless_part(): self.horizons.noiseless}
        return parts | {self._noisy_part(noise, method): self.horizons.noisy for noise, method in self.noisy()}

    def _tuning_part(self) -> str:
        return f"{self.problem.name}: {TUNING}"

    def _noiseless_part(self) -> str:
        return f"{self.problem.name}: {self._noiseless().name}"

    def _noisy_part(self, noise: Noise, method: Method) -> str:
        return f"{self.problem.name}: {noise.name}: {method.name}"

    def _noiseless(self) -> Noise:
        return next(noise for noise in self.problem.noises if noise.deterministic)

    def _key(self, **entries: Any) -> str:
        return key_of({**self.configuration.identity(), "experiment": self.problem.name, **entries})

    # -------------------------------------------------------------------------------------------------- tuning

    def run_without_noise(self) -> None:
        """What the noisy runs have to wait for, and the noiseless runs."""
        self.tune()
        self.run_noiseless()

    def tune(self) -> None:
        """Search the rates of all methods; they share one program, so they are searched together."""
        start = time.perf_counter()
        tuned = [method for method in self.table.values() if method.tuned]
        keys = {m.name: self._tuning_key(m) for m in tuned}
        missing = [m for m in tuned if not self.results.has(self._tuning_path(m), keys[m.name])]
        part = self._tuning_part()
        if missing:
            searches = tune(
                self.problem,
                tuned,
                self.horizons.tuning,
                grids=self.grids,
                criterion=self.criterion,
                progress=lambda n: self._advance(part, n),
            )
            for search in searches:
                if self.table[search.method] in missing:
                    dataset = self._search_dataset(search)
                    self.results.write(self._tuning_path(self.table[search.method]), dataset, keys[search.method])
        self._finish(part, start, bool(missing))
        self._take_over()

    def _tuning_key(self, method: Method) -> str:
        grids = {name: str(grid) for name, grid in self.grids[method.name].items()}
        return self._key(tuning=method.name, grids=grids, criterion=str(self.criterion), steps=self.horizons.tuning)

    def _tuning_path(self, method: Method) -> Path:
        return self.results.tuning_path(self.problem.name, method.name)

    def _take_over(self) -> None:
        """What tuning decides for the runs: the rates, and M = 1 / SGD's best rate."""
        self.chosen: dict[str, dict[str, float]] = {}
        lowest = np.inf
        for method in self.table.values():
            if method.tuned:
                search = self.results.tuning(self.problem.name, method.name)
                index = int(search.attrs["index"])
                names = {"learning_rate": "rate", "beta": "beta"}
                self.chosen[method.name] = {name: float(search[names[name]][index]) for name in method.tuned}
                lowest = min(lowest, float(search["objective"].where(~search["diverged"]).min()))
        self.smoothness = 1 / self.chosen["SGD"]["learning_rate"]
        at_start = float(evaluate(self.problem, self.problem.x1[None])[0][0])
        self.gap = at_start - (lowest if self.experiment.optimum is None else self.experiment.optimum)

    def _search_dataset(self, search: Search) -> xr.Dataset:
        method = self.table[search.method]
        tried = dict(search.hyperparameters)
        variables = {
            "rate": ("rate", tried.pop("learning_rate")),
            "mean_squared_gradient": ("rate", search.mean_squared_gradient),
            "objective": ("rate", search.objective),
            "diverged": ("rate", search.diverged),
        }
        variables |= {name: ("rate", values) for name, values in tried.items()}
        attributes = {
            "experiment": self.problem.name,
            "method": method.name,
            "chosen": search.chosen["learning_rate"],
            **{f"chosen_{name}": value for name, value in search.chosen.items() if name != "learning_rate"},
            "index": search.index,
            "criterion": search.criterion,
            "grid": search.grid,
            "at_edge": ", ".join(search.at_edge),
            "horizon": search.horizon,
            "version": sgdol.__version__,
        }
        return xr.Dataset(variables, attrs=attributes)

    # ---------------------------------------------------------------------------------------------------- runs

    def _hyperparameters(self, method: Method, noise: Noise) -> dict[str, float]:
        if method.tuned:
            return self.chosen[method.name]
        known = {
            "smoothness": self.smoothness,
            "alpha": float(self.configuration.alpha),
            "gap": self.gap,
            "total_variance": self.problem.total_variance(noise),
            "horizon": self.horizons.noiseless if noise.deterministic else self.horizons.noisy,
        }
        return method.from_known(**{name: known[name] for name in method.known})

    def run_noiseless(self) -> None:
        """The runs without noise; they share one program, so they are run together."""
        start = time.perf_counter()
        noise, part = self._noiseless(), self._noiseless_part()
        hyperparameters = {m.name: self._hyperparameters(m, noise) for m in self.table.values()}
        keys = {name: self._run_key(name, noise, h, self.horizons.noiseless) for name, h in hyperparameters.items()}
        missing = [
            name
            for name in self.table
            if not self.results.has(self.results.curves_path(self.problem.name, noise.name, name), keys[name])
        ]
        if missing:
            group = [Lanes(m, _lanes(hyperparameters[m.name], 1)) for m in self.table.values()]
            traces = run_noiseless(self.problem, group, self.horizons.noiseless, lambda n: self._advance(part, n))
            for lanes, trace in zip(group, traces, strict=True):
                if lanes.method.name in missing:
                    name = lanes.method.name
                    dataset = self._run_dataset(
                        lanes.method, noise, hyperparameters[name], _repeated(trace, self.repeats)
                    )
                    path = self.results.curves_path(self.problem.name, noise.name, name)
                    self.results.write(path, dataset, keys[name])
        self._finish(part, start, bool(missing))

    def run_noisy(self, noise: Noise, method: Method) -> None:
        """One run with noise."""
        start = time.perf_counter()
        part = self._noisy_part(noise, method)
        hyperparameters = self._hyperparameters(method, noise)
        key = self._run_key(method.name, noise, hyperparameters, self.horizons.noisy)
        path = self.results.curves_path(self.problem.name, noise.name, method.name)
        missing = not self.results.has(path, key)
        if missing:
            trace = run_noisy(
                self.problem,
                Lanes(method, _lanes(hyperparameters, self.repeats)),
                noise,
                self.horizons.noisy,
                seed=self.configuration.seed,
                progress=lambda n: self._advance(part, n),
            )
            self.results.write(path, self._run_dataset(method, noise, hyperparameters, trace), key)
        self._finish(part, start, missing)

    def _run_key(self, method: str, noise: Noise, hyperparameters: Mapping[str, float], horizon: int) -> str:
        return self._key(
            run=method,
            noise=noise._asdict(),
            hyperparameters=dict(hyperparameters),
            steps=horizon,
            lanes=self.repeats,
            divergence=[DIVERGENCE, str(self.problem.ceiling)],
        )

    def _run_dataset(
        self, method: Method, noise: Noise, hyperparameters: Mapping[str, float], trace: Trace
    ) -> xr.Dataset:
        both = ("repeat", "iteration")
        with_noise = not noise.deterministic
        rate = hyperparameters.get("learning_rate", 1 / self.smoothness)
        attributes = {
            "experiment": self.problem.name,
            "noise": noise.name,
            "method": method.name,
            "learning_rate": rate,
            "smoothness": self.smoothness if "smoothness" in method.known else np.nan,
            "alpha": hyperparameters.get("alpha", np.nan),
            **{name: value for name, value in hyperparameters.items() if name == "beta"},
            "horizon": int(trace.iteration[-1]),
            "repeats": self.repeats,
            "seed": self.configuration.seed,
            "gradients_per_iteration": method.gradients,
            "noise_model": "minibatch" if self.experiment.uses_data else self.configuration.noise_model,
            "adagrad_form": self.configuration.adagrad_form,
            "data": self.configuration.data_sha256() if self.experiment.uses_data else "",
            "deterministic": int(noise.deterministic),
            "running_mean": "one iteration of each stratum" if trace.evaluations else "every iteration",
            "true_gradient_evaluations": trace.evaluations,
            "diverged_if": f"an iterate beyond {DIVERGENCE:g}, or a last objective above {self.problem.ceiling:g}",
            "version": sgdol.__version__,
        }
        if "gap" in method.known:
            attributes |= {"gap": self.gap, "total_variance": self.problem.total_variance(noise)}
            if self.experiment.gl_constants:
                attributes["estimated"] = self.experiment.gl_constants
        if with_noise and not trace.evaluations:
            attributes["sigma"] = noise.sigma
        return xr.Dataset(
            {
                "mean_squared_gradient": (both, trace.mean_squared_gradient),
                "squared_gradient": (both, trace.squared_gradient),
                "objective": (both, trace.objective),
                "step_size": (both, trace.step_size),
                "sampling_error": (both, trace.sampling_error),
                "diverged": ("repeat", trace.diverged),
            },
            coords={"iteration": trace.iteration, "repeat": np.arange(self.repeats)},
            attrs=attributes,
        )

    def _advance(self, part: str, iterations: int) -> None:
        if self.stopped.is_set():
            raise _StoppedError
        self.progress.advance(part, iterations)

    def _finish(self, part: str, start: float, worked: bool) -> None:
        seconds = time.perf_counter() - start if worked else 0.0
        if worked:
            self.results.record_time(part, seconds)
        self.progress.finish(part, seconds)


def _lanes(hyperparameters: Mapping[str, float], count: int) -> dict[str, np.ndarray]:
    return {name: np.full(count, value) for name, value in hyperparameters.items()}


def _repeated(trace: Trace, repeats: int) -> Trace:
    """Without noise, every repeat is the same."""
    each: dict[str, Any] = {
        name: np.repeat(values, repeats, axis=0)
        for name, values in trace._asdict().items()
        if name not in ("iteration", "evaluations")
    }
    return trace._replace(**each)
