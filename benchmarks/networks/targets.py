"""Time to target, as AlgoPerf measures it.

The target of a network is the training loss that the tuned baseline ends with: the median over its seeds. A run hits
the target at the first of its evaluations that is not above it. Gradient evaluations until then are relative to the
budget, seconds relative to what the baseline's whole training takes (the median over its seeds).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.networks.harness import Line
from benchmarks.networks.methods import BASELINE

__all__ = ["Hit", "Target", "hit", "points", "targets"]


@dataclass(frozen=True)
class Target:
    """What the baseline reaches on one network, and at which cost."""

    loss: float
    evaluations: float
    seconds: float


@dataclass(frozen=True)
class Hit:
    """When a run reached a target, relative to the baseline's whole training."""

    evaluations: float
    seconds: float


def points(curve: str) -> list[tuple[int, float, float]]:
    """Gradient evaluations, training loss and seconds of a saved curve.

    >>> points("20 2.5 0.4; 40 2.25 0.8")
    [(20, 2.5, 0.4), (40, 2.25, 0.8)]
    """
    parts = [part.split() for part in curve.split(";") if part.strip()]
    return [(int(n), float(loss), float(seconds)) for n, loss, seconds in parts]


def targets(lines: Iterable[Line]) -> dict[str, Target]:
    """The targets of the networks on which the baseline was run."""
    runs: dict[str, list[Line]] = {}
    for line in lines:
        if line.contender == BASELINE:
            runs.setdefault(line.problem, []).append(line)
    return {
        problem: Target(
            statistics.median(r.loss for r in mine),
            statistics.median(r.evaluations for r in mine),
            statistics.median(r.seconds for r in mine),
        )
        for problem, mine in runs.items()
    }


def hit(curve: Sequence[tuple[int, float, float]], target: Target) -> Hit | None:
    """When a curve reaches a target, or None.

    >>> hit([(20, 2.5, 0.4), (40, 2.0, 0.8), (60, 2.1, 1.2)], Target(2.2, 80, 1.6))
    Hit(evaluations=0.5, seconds=0.5)
    """
    for evaluations, loss, seconds in curve:
        if loss <= target.loss:
            return Hit(evaluations / target.evaluations, seconds / target.seconds)
    return None
