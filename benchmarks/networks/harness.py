"""Tuning and seeds of the larger networks; the cache and the processes are the quality suite's.

A learning rate is tuned per network on half decades with the tuning seed, by the training loss of the end; the grid
grows while its edge is best. The reported runs are those of the other seeds.
"""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from pathlib import Path

from benchmarks.networks import methods, problems, training
from benchmarks.networks.methods import USUAL
from benchmarks.networks.training import Curve, Result
from benchmarks.quality import digest as digests
from benchmarks.quality.harness import Part, Row, Runs, Settings, digest_of, row, tune
from benchmarks.quality.methods import Contender, Method
from benchmarks.quality.problem import Problem

__all__ = ["NETWORKS", "SETTINGS", "SMOKE", "Line", "half_decade"]

SETTINGS = Settings(grid=(-1, 0, 1), extensions=4)
SMOKE = Settings(seeds=(1,), grid=(0,), extensions=0, shorten=25.0)


@dataclass(frozen=True)
class Line(Row):
    """One run that is reported: a row of the saved results."""

    tried: int
    """How many learning rates were tried."""
    loss: float
    """On training samples at the end; the loss at the start if the run diverged."""
    start: float
    validation: float
    """The loss on kept samples at the end; infinite if the run diverged."""
    diverged: bool
    rise: float
    """The largest loss of the first 50 batches over that of the first one."""
    evaluations: int
    steps: int
    seconds: float
    """CPU time of training."""
    curve: str
    """The training loss on the way: "evaluations loss seconds; ..."."""
    digest: str
    """Of what made it; a saved line with another one is run again."""


LOOP = (training.run, Problem.make, Method.make)


class Cache(Runs[Result]):
    """The runs of the larger networks."""

    module, loop = training, LOOP


def half_decade(k: int) -> float:
    """The k-th number of 1, 3, 10, 30, ...

    >>> [half_decade(k) for k in (-5, -4, -1, 0, 1, 2)]
    [0.003, 0.01, 0.3, 1.0, 3.0, 10.0]
    """
    return float(f"{3 if k % 2 else 1}e{k // 2}")


def digest(problem: Problem, contender: Contender, settings: Settings) -> str:
    """What makes the lines of a contender on a network, the tuning of its learning rate included."""
    tuning = {"code": digests.code((tune, _score, half_decade)), "usual": USUAL.get(contender.method.name)}
    version = platform.python_version()  # whose own text is some of the data
    return digest_of(problem, contender, settings, LOOP, tuning, python=version)


def _score(result: Result, point: str) -> float:
    end = result.curves[point].end
    return math.inf if result.failed or end > result.start else end


def measure(problem: Problem, contender: Contender, folder: Path, settings: Settings) -> list[Line]:
    """The reported runs of a contender on a network: one for each seed."""
    method, point, cache = contender.method.on(problem.kind), contender.point, Cache(folder)
    budget, made_by = settings.budget(problem), digest(problem, contender, settings)
    rate, edge, tried = method.default, False, set[float]()
    if contender.tuned:
        usual = round(2 * math.log10(USUAL[method.name]))

        def learning_rate(power_of_ten: float) -> float:
            """The harness counts in decades: its k-th one is the k-th half decade from the usual learning rate."""
            return half_decade(usual + round(math.log10(power_of_ten)))

        def train(power_of_ten: float) -> float:
            candidate = learning_rate(power_of_ten)
            tried.add(candidate)
            return _score(cache.run(problem, method, settings.tuning_seed, candidate, budget), point)

        best, edge = tune(train, 1.0, settings)
        rate = learning_rate(best)
    lines = []
    for seed in settings.seeds:
        result = cache.run(problem, method, seed, rate, budget)
        diverged = math.isinf(_score(result, point))
        lines.append(
            Line(
                **row(problem, contender, rate, edge, seed),
                tried=max(1, len(tried)),
                loss=result.start if diverged else result.curves[point].end,
                start=result.start,
                validation=math.inf if diverged else result.curves[point].validation,
                diverged=diverged,
                rise=result.rise,
                evaluations=result.evaluations,
                steps=result.steps,
                seconds=result.seconds,
                curve=_written(result.curves[point]),
                digest=made_by,
            )
        )
    return lines


def _written(curve: Curve) -> str:
    points = zip(curve.evaluations, curve.losses, curve.seconds, strict=True)
    return "; ".join(f"{n} {loss:.5g} {seconds:.3g}" for n, loss, seconds in points)


def _loss(line: Line) -> float:
    return line.loss


NETWORKS: Part[Line] = Part(problems.get, methods.contenders, measure, digest, _loss)
