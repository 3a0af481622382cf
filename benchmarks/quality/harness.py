"""Tuning, seeds, the cache, and running it all on several processes.

A learning rate is tuned per problem, on the grid ``unit * 10^k`` for k in ``GRID``, with the tuning seed, for the last
iterate and the average separately; while the best is at an edge of the grid, the grid grows there by another decade, at
most ``EXTENSIONS`` times: every tuned learning rate is better than those ten times smaller and larger. What is reported
are the runs with the tuned learning rate on the other seeds. A method without a learning rate, or at its default, is
run on those seeds alone.

Every run is kept in a file of its own, written whole or not at all, named after everything that makes its numbers: the
problem and its code, the method and its version, the learning rate, the seed, the budget, the code of the training
loop, and what the optimizers of this package do in a few short runs. So an interrupted table continues where it was,
and what has changed is run again. The lines of the saved tables carry the digest of the same things, so a table also
grows by a problem or a method without running the others, and without their files.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from benchmarks.quality import digest as digests
from benchmarks.quality import methods, problems, training
from benchmarks.quality.methods import Contender, Method
from benchmarks.quality.problems import Problem
from benchmarks.quality.training import Outcome, Result

__all__ = [
    "Cache", "Line", "Part", "Row", "Runs", "Settings", "digest_of", "in_order", "makes", "measure", "measure_all",
    "row", "tune",
]  # fmt: skip

GRID = (-2, -1, 0)
EXTENSIONS = 4


@dataclass(frozen=True)
class Settings:
    """How much is run."""

    seeds: tuple[int, ...] = (1, 2, 3)
    tuning_seed: int = 0
    grid: tuple[int, ...] = GRID
    extensions: int = EXTENSIONS
    shorten: float = 1.0
    """Budgets are divided by this; a smoke run only."""

    def budget(self, problem: Problem) -> int:
        """In gradient evaluations."""
        return max(20, int(problem.budget / self.shorten))


@dataclass(frozen=True)
class Row:
    """What every run that is reported is a run of: the first columns of the saved results."""

    half: str
    problem: str
    kind: str
    contender: str
    group: str
    method: str
    point: str
    learning_rate: float | None
    """None: the method has none."""
    edge: bool
    """Whether the tuned learning rate is still at an edge of its grid."""
    seed: int


@dataclass(frozen=True)
class Line(Row):
    """One run that is reported: a row of the saved results."""

    gap: float
    start: float
    constant: float
    """The gap of the best constant predictor."""
    accuracy: float | None
    validation: float | None
    diverged: bool
    evaluations: int
    steps: int
    digest: str
    """Of what made it; a saved line with another one is run again."""


def makes(
    problem: Problem, method: Method, budget: int, loop: tuple[Callable[..., Any], ...] = digests.TRAINING
) -> dict[str, Any]:
    """What makes the numbers of a method on a problem, but for the seed and the learning rate; ``loop`` trains."""
    return {
        "problem": problem.specification(),
        "problem code": digests.problem_code(problem),
        "training code": digests.code(loop),
        "method": method.specification(),
        "budget": budget,
        "torch": torch.__version__,
        "behaviour": _behaviour(method),
    }


def digest_of(
    problem: Problem,
    contender: Contender,
    settings: Settings,
    loop: tuple[Callable[..., Any], ...],
    tuning: dict[str, Any],
    **more: Any,
) -> str:
    """What makes the lines of a contender on a problem; ``tuning`` counts if its learning rate is tuned."""
    method = contender.method.on(problem.kind)
    grid = {"grid": settings.grid, "extensions": settings.extensions, "seed": settings.tuning_seed}
    return digests.of(
        {
            **makes(problem, method, settings.budget(problem), loop),
            "point": contender.point,
            "default": method.default,
            "tuning": {**tuning, **grid} if contender.tuned else None,
            **more,
        }
    )


def digest(problem: Problem, contender: Contender, settings: Settings) -> str:
    """What makes the lines of a contender on a problem, the tuning of its learning rate included."""
    tuning = {"code": digests.code((tune, _score)), "units": digests.units_code()}
    return digest_of(problem, contender, settings, digests.TRAINING, tuning)


# The cache ------------------------------------------------------------------------------------------------------------


R = TypeVar("R")


class Runs(Generic[R]):
    """Results of trainings in a folder, one file each."""

    module: Any
    """Has ``run``, which trains, and ``Result``, which it returns."""
    loop: tuple[Callable[..., Any], ...]
    """The functions whose code is a part of what names a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, problem: Problem, method: Method, seed: int, rate: float | None, budget: int) -> R:
        """The result, from its file if there is one."""
        path = self.path(problem, method, seed, rate, budget)
        try:
            return self.module.Result.from_json(json.loads(path.read_text())["result"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass  # not there, or not whole: run it
        result = self.module.run(problem, method, seed, rate, budget)
        about = {"problem": problem.name, "method": method.name, "rate": rate, "seed": seed, "budget": budget}
        self._write(path, json.dumps({"about": about, "result": result.to_json()}))
        return result

    def path(self, problem: Problem, method: Method, seed: int, rate: float | None, budget: int) -> Path:
        """The file of a run."""
        made_by = makes(problem, method, budget, self.loop)
        key = {**made_by, "rate": None if rate is None else rate.hex(), "seed": seed}
        name = problem.name.replace(" ", "_").replace("*", "x")
        return self.folder / method.name / f"{name}-{digests.of(key)}.json"

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)


class Cache(Runs[Result]):
    """The runs of this suite."""

    module, loop = training, digests.TRAINING


def _behaviour(method: Method) -> str:
    """What this package's optimizers do in a few short runs, to nine digits. Those of others have a version.

    Their code changes often without changing a number, and to hash it would run everything again each time. The rule of
    the optimizer without M has branches that short runs may not reach: its module is looked at as well.
    """
    if method.package != "sgdol":
        return ""
    key = json.dumps(method.specification(), sort_keys=True)
    if key not in _probed:
        _probed[key] = _probe(method)
    return _probed[key]


_probed: dict[str, str] = {}
_PROBES = (("rosenbrock-10d", -2), ("logistic-cancer", 0), ("mlp-digits", -1))


def _probe(method: Method) -> str:
    digest = hashlib.sha256()
    for name, k in _PROBES:
        problem = problems.get(name)
        rate = None if method.rate is None else _rate(getattr(problem.scales, method.rate), k)
        result = training.run(problem, method, seed=9, rate=rate, budget=120)
        for outcome in result.outcomes.values():
            digest.update(f"{outcome.gap:.9e} {result.evaluations} {result.steps}".encode())
    if method.optimizer == "sgdol:SGDOLFree":
        digest.update(digests.source(importlib.import_module("sgdol.free")).encode())
    return digest.hexdigest()


# Tuning ---------------------------------------------------------------------------------------------------------------


def _score(outcome: Outcome) -> float:
    return math.inf if outcome.diverged else outcome.gap


def tune(train: Callable[[float], float], unit: float, settings: Settings) -> tuple[float, bool]:
    """The best learning rate of the grid, which grows while the best is at an edge; whether it still is.

    >>> tune(lambda rate: abs(math.log10(rate) + 5), 1.0, Settings())
    (1e-05, False)
    """
    scores = {k: train(_rate(unit, k)) for k in settings.grid}
    for _ in range(settings.extensions):
        best = min(scores, key=lambda k: (scores[k], k))
        if min(scores) < best < max(scores):
            break
        downwards = math.isinf(scores[best]) or best == min(scores)  # all diverged: smaller ones may not
        further = min(scores) - 1 if downwards else max(scores) + 1
        scores[further] = train(_rate(unit, further))
    best = min(scores, key=lambda k: (scores[k], k))
    return _rate(unit, best), best in (min(scores), max(scores))


def _rate(unit: float, k: int) -> float:
    return float(f"1e{round(math.log10(unit)) + k}")  # the decimal power itself: the same on every problem's grid


def row(problem: Problem, contender: Contender, rate: float | None, edge: bool, seed: int) -> dict[str, Any]:
    """The columns of :class:`Row`."""
    return {
        "half": problem.half,
        "problem": problem.name,
        "kind": problem.kind,
        "contender": contender.label,
        "group": contender.group,
        "method": contender.method.name,
        "point": contender.point,
        "learning_rate": rate,
        "edge": edge,
        "seed": seed,
    }


def measure(problem: Problem, contender: Contender, cache: Cache, settings: Settings) -> list[Line]:
    """The reported runs of a contender on a problem: one for each seed."""
    method, point, budget = contender.method.on(problem.kind), contender.point, settings.budget(problem)
    rate, edge, made_by = method.default, False, digest(problem, contender, settings)
    if contender.tuned:
        assert method.rate is not None, f"{method.name} has no learning rate to tune"

        def train(candidate: float) -> float:
            return _score(cache.run(problem, method, settings.tuning_seed, candidate, budget).outcomes[point])

        rate, edge = tune(train, getattr(problem.scales, method.rate), settings)
    lines = []
    for seed in settings.seeds:
        result = cache.run(problem, method, seed, rate, budget)
        outcome = result.outcomes[point]
        lines.append(
            Line(
                **row(problem, contender, rate, edge, seed),
                gap=outcome.gap,
                start=result.start,
                constant=result.constant,
                accuracy=outcome.accuracy,
                validation=outcome.validation,
                diverged=outcome.diverged,
                evaluations=result.evaluations,
                steps=result.steps,
                digest=made_by,
            )
        )
    return lines


# All of it ------------------------------------------------------------------------------------------------------------


class Reported(Protocol):
    """What is known of a row of any saved results."""

    @property
    def problem(self) -> str: ...
    @property
    def contender(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def digest(self) -> str: ...


L = TypeVar("L", bound=Reported)


@dataclass(frozen=True)
class Part(Generic[L]):
    """A part of the benchmark, as functions that other processes can import."""

    problem: Callable[[str], Problem]
    contenders: Callable[[], list[Contender]]
    measure: Callable[[Problem, Contender, Path, Settings], list[L]]
    """The reported runs of a contender on a problem; a folder keeps the single runs."""
    digest: Callable[[Problem, Contender, Settings], str]
    loss: Callable[[L], float]
    """Of a reported run, to show while it goes on."""


def _measure_in(problem: Problem, contender: Contender, folder: Path, settings: Settings) -> list[Line]:
    return measure(problem, contender, Cache(folder), settings)


def _gap(line: Line) -> float:
    return line.gap


QUALITY: Part[Line] = Part(problems.get, methods.contenders, _measure_in, digest, _gap)


def _measure_method(
    part: Part[L], name: str, labels: Sequence[str], method: str, folder: Path, settings: Settings
) -> list[L]:
    """In a worker: everything that one method does on one problem, since its contenders share runs."""
    torch.set_num_threads(1)
    chosen = [c for c in part.contenders() if c.label in labels and c.method.name == method]
    return [line for contender in chosen for line in part.measure(part.problem(name), contender, folder, settings)]


def _still_good(
    part: Part[L], saved: Iterable[L], problem: Problem, contender: Contender, settings: Settings
) -> list[L]:
    """The saved lines of a contender on a problem if nothing that makes them has changed; otherwise none."""
    mine = [line for line in saved if (line.problem, line.contender) == (problem.name, contender.label)]
    if sorted(line.seed for line in mine) != sorted(settings.seeds):
        return []
    expected = part.digest(problem, contender, settings)
    return mine if all(line.digest == expected for line in mine) else []


def measure_all(
    suite: Sequence[Problem],
    chosen: Sequence[Contender],
    folder: Path,
    settings: Settings,
    jobs: int = 1,
    saved: Sequence[L] = (),
    report: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    part: Part[L] = QUALITY,  # type: ignore[assignment]
) -> list[L]:
    """The reported runs of all contenders on all problems, in the order of both, whatever ran first.

    Those of ``saved`` that are still good are not run again.
    """
    lines: list[L] = []
    missing: dict[tuple[str, str], list[str]] = {}
    known: dict[str, list[L]] = {}
    for line in saved:
        known.setdefault(line.problem, []).append(line)
    for problem, contender in itertools.product(suite, chosen):
        kept = _still_good(part, known.get(problem.name, []), problem, contender, settings)
        lines += kept
        if not kept:
            missing.setdefault((problem.name, contender.method.name), []).append(contender.label)
    tasks = [(part, problem, wanted, method, folder, settings) for (problem, method), wanted in missing.items()]
    report(f"{len(lines)} saved runs are still good; {len(tasks)} methods are to be run on a problem")
    for done, (task, found) in enumerate(_results(tasks, jobs), start=1):
        lines += found
        losses = [part.loss(line) for line in found]
        report(f"{done}/{len(tasks)} {task[1]}: {task[3]}, losses {min(losses):.2g} to {max(losses):.2g}")
    return in_order(lines, suite, [c.label for c in chosen])


def in_order(lines: Iterable[L], suite: Sequence[Problem], labels: Sequence[str]) -> list[L]:
    """As the problems and the contenders stand; what is of neither is left out."""
    place, rank = ({name: i for i, name in enumerate(names)} for names in ([p.name for p in suite], labels))
    known = [line for line in lines if line.problem in place and line.contender in rank]
    return sorted(known, key=lambda r: (place[r.problem], rank[r.contender], r.seed))


def _results(tasks: Sequence[tuple[Any, ...]], jobs: int) -> Iterator[tuple[tuple[Any, ...], list[Any]]]:
    if jobs <= 1:
        for task in tasks:
            yield task, _measure_method(*task)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_measure_method, *task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
