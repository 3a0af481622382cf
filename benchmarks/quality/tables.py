r"""The tables, from saved runs.

With gap[c, p, s] the loss gap of contender c on problem p with seed s, and best[p] the least geometric mean over the
seeds that a contender *with a tuned learning rate* has on p,

    r[c, p, s] = gap[c, p, s] / best[p]

is what the tables summarise: the geometric mean over problems and seeds, with the least and the largest of the seeds'
own geometric means as its spread, and the worst problem (geometric mean over its seeds). 1 is the best tuned method of
each problem; a diverged run has the starting gap, which is the most that a run can have.

Beside it stand on how many problems a contender failed (most of its runs are no better than a constant predictor) and
its mean rank by what is measured on samples that were kept from training: accuracy, or the loss where nothing is
classified. Ranks are among all contenders of the half, 1 being the best.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from benchmarks.quality.harness import Line
from benchmarks.quality.methods import OURS, OURS_FREE, OURS_FREE_RMS
from benchmarks.quality.problem import KINDS, NETWORKS, Half

__all__ = [
    "DEFAULT", "FREE", "TUNED", "Summary", "by_kind", "complete", "effects", "factor", "failed", "geometric_mean",
    "ranks", "ratios", "read_rows", "read_runs", "summarise", "write_rows", "write_runs", "write_summary",
]  # fmt: skip

K = TypeVar("K")

TUNED = "learning rate tuned per problem"
DEFAULT = "learning rate at its documented default"
FREE = "no learning rate"
LEARNED = 0.99
"""A run has failed if its gap is not below this share of the gap of a constant predictor."""


# Saved runs -----------------------------------------------------------------------------------------------------------


def write_rows(path: Path, lines: Iterable[Any], kind: type) -> None:
    """One row for each line, which is a dataclass ``kind`` of plain values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([f.name for f in dataclasses.fields(kind)])
        for line in lines:
            values = dataclasses.astuple(line)
            writer.writerow(["" if v is None else f"{v:.8g}" if isinstance(v, float) else v for v in values])


def read_rows(path: Path, kind: type[K]) -> list[K]:
    """What :func:`write_rows` wrote."""
    hints = get_type_hints(kind)
    with path.open(newline="") as file:
        return [
            kind(**{name: _parse(value, hints[name]) for name, value in row.items()}) for row in csv.DictReader(file)
        ]


def write_runs(path: Path, lines: Iterable[Line]) -> None:
    """One row per reported run."""
    write_rows(path, lines, Line)


def read_runs(path: Path) -> list[Line]:
    """What :func:`write_runs` wrote."""
    return read_rows(path, Line)


def _parse(text: str, kind: Any) -> Any:
    if kind is bool:
        return {"True": True, "False": False}[text]
    if kind in (str, int):
        return kind(text)
    return None if text == "" else float(text)


# Arithmetic -----------------------------------------------------------------------------------------------------------


def geometric_mean(values: Iterable[float]) -> float:
    """The exponential of the mean logarithm.

    >>> round(geometric_mean([1.0, 10.0, 100.0]), 12)
    10.0
    """
    logs = [math.log(v) for v in values]
    return math.exp(math.fsum(logs) / len(logs))


def ratios(lines: Sequence[Line]) -> dict[str, dict[str, dict[int, float]]]:
    """r[contender][problem][seed]."""
    gaps: dict[str, dict[str, dict[int, float]]] = {}
    for line in lines:
        gaps.setdefault(line.contender, {}).setdefault(line.problem, {})[line.seed] = line.gap
    tuned = {line.contender for line in lines if line.group == TUNED}
    if not tuned:
        raise ValueError("ratios are to the best tuned contender of each problem: got no tuned contender")
    best: dict[str, float] = {}
    for contender in tuned:
        for problem, seeds in gaps[contender].items():
            best[problem] = min(best.get(problem, math.inf), geometric_mean(seeds.values()))
    return {
        c: {p: {s: gap / best[p] for s, gap in seeds.items()} for p, seeds in problems.items() if p in best}
        for c, problems in gaps.items()
    }


@dataclasses.dataclass(frozen=True)
class Summary:
    """A row of the main table."""

    half: str
    group: str
    contender: str
    geometric_mean: float
    low: float
    """The least of the seeds' own geometric means."""
    high: float
    worst: float
    worst_problem: str
    failed: int
    """On how many problems most runs are no better than a constant predictor."""
    rank: float
    """The mean rank among all contenders by accuracy or loss on samples kept from training."""
    accuracy: float
    """Mean over the networks that classify of the accuracy on kept samples; a diverged run's is a guess, a tenth."""
    extra: float
    """Gradient evaluations beyond one per step, as a share of the steps."""
    diverged: int
    runs: int
    at_edge: int
    """On how many problems the tuned learning rate is still at an edge of the grid."""
    problems: int


def failed(line: Line) -> bool:
    """Whether a run is no better than a constant predictor."""
    return line.diverged or line.gap >= LEARNED * line.constant


def ranks(lines: Sequence[Line]) -> dict[str, float]:
    """Each contender's mean rank over the problems that keep samples for it; equals share their mean rank.

    A contender's value on a problem is the mean over its seeds of the accuracy, or of minus the loss. Who has diverged
    has none and is last.
    """
    values: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        value = line.accuracy if line.validation is None else -line.validation
        if value is None or not math.isfinite(value):
            value = -math.inf
        values.setdefault(line.problem, {}).setdefault(line.contender, []).append(value)
    found: dict[str, list[float]] = {}
    for by_contender in values.values():
        means = {c: sum(v) / len(v) for c, v in by_contender.items()}
        if all(math.isinf(m) for m in means.values()):
            continue  # nothing is kept from training here
        for contender, mean in means.items():
            better, equal = (sum(test(m) for m in means.values()) for test in (mean.__lt__, mean.__eq__))
            found.setdefault(contender, []).append(better + (equal + 1) / 2)
    return {c: math.fsum(r) / len(r) for c, r in found.items()}


def complete(lines: Sequence[Line], half: Half) -> tuple[list[Line], list[str]]:
    """The lines of the contenders that were run on every problem of a half, and the names of the others."""
    lines = [line for line in lines if line.half == half]
    problems = {line.problem for line in lines}
    seen: dict[str, set[str]] = {}
    for line in lines:
        seen.setdefault(line.contender, set()).add(line.problem)
    partial = [c for c, mine in seen.items() if mine != problems]
    return [line for line in lines if line.contender not in partial], partial


def summarise(lines: Sequence[Line], half: Half) -> list[Summary]:
    """The main table of a half: within each group the best first."""
    lines = [line for line in lines if line.half == half]
    table, rank = ratios(lines), ranks(lines)
    classified = {line.problem for line in lines if line.accuracy is not None and line.kind in NETWORKS}
    rows = []
    for contender, problems in table.items():
        mine = [line for line in lines if line.contender == contender]
        seeds = sorted({line.seed for line in mine})
        per_seed = [geometric_mean(problems[p][s] for p in problems) for s in seeds]
        per_problem = {p: geometric_mean(values.values()) for p, values in problems.items()}
        worst = max(per_problem, key=lambda p: per_problem[p])
        nets = [0.1 if r.accuracy is None else r.accuracy for r in mine if r.problem in classified]
        failures = {p: [failed(r) for r in mine if r.problem == p] for p in problems}
        rows.append(
            Summary(
                half=half,
                group=mine[0].group,
                contender=contender,
                geometric_mean=geometric_mean(per_seed),
                low=min(per_seed),
                high=max(per_seed),
                worst=per_problem[worst],
                worst_problem=worst,
                failed=sum(2 * sum(f) > len(f) for f in failures.values()),
                rank=rank.get(contender, math.nan),
                accuracy=math.fsum(nets) / len(nets) if nets else math.nan,
                extra=_extra([r for r in mine if not r.diverged]),
                diverged=sum(r.diverged for r in mine),
                runs=len(mine),
                at_edge=len({r.problem for r in mine if r.edge}),
                problems=len(problems),
            )
        )
    order = [FREE, DEFAULT, TUNED]
    return sorted(rows, key=lambda r: (order.index(r.group), r.geometric_mean))


def _extra(lines: Sequence[Line]) -> float:
    steps = sum(line.steps for line in lines)
    return sum(line.evaluations for line in lines) / steps - 1 if steps else 0.0


def write_summary(path: Path, rows: Iterable[Summary]) -> None:
    """The main table as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([f.name for f in dataclasses.fields(Summary)])
        for row in rows:
            writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in dataclasses.astuple(row)])


def factor(value: float) -> str:
    """Two digits, as a reader of ratios wants them.

    >>> [factor(v) for v in (0.034, 0.5, 1.049, 12.3, 340.0, 51234.0)]
    ['0.034', '0.50', '1.05', '12', '340', '5.1e+04']
    """
    if value >= 1e4 or value < 1e-2:
        return f"{value:.1e}"
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


# Effects --------------------------------------------------------------------------------------------------------------


def _effects() -> list[tuple[str, str, str]]:
    """What is added, and the two contenders that differ in it."""
    return [
        ("averaging, to SGD + momentum", "SGD + momentum + averaging", "SGD + momentum"),
        ("averaging, to SGDOL", "SGDOL + averaging", "SGDOL"),
        ("averaging, to SGDOL, metric rms", OURS, "SGDOL, metric rms"),
        ("learned step size, to SGD + momentum", "SGDOL", "SGD + momentum"),
        ("learned step size, to SGD + momentum + averaging", "SGDOL + averaging", "SGD + momentum + averaging"),
        ("the metric rms, to SGDOL + averaging", OURS, "SGDOL + averaging"),
        ("no learning rate, to SGDOL, metric rms + averaging", OURS_FREE_RMS, OURS),
        ("the metric kronecker, to SGDOLFree, metric rms", OURS_FREE, OURS_FREE_RMS),
    ]


def effects(lines: Sequence[Line], half: Half) -> list[str]:
    """Rows of the second table: how much one thing changes the gap, per kind of problem."""
    table = ratios([line for line in lines if line.half == half])
    kind_of = {line.problem: line.kind for line in lines}
    present = [k for k in KINDS if k in {kind_of[p] for problems in table.values() for p in problems}]
    rows = [f"| adding | all | {' | '.join(present)} |", "|---|---:" + "|---:" * len(present) + "|"]
    for label, with_it, without in _effects():
        if with_it not in table or without not in table:
            continue
        a, b = table[with_it], table[without]
        change = {p: [a[p][s] / b[p][s] for s in a[p]] for p in a if p in b}
        cells = [factor(geometric_mean(v for values in change.values() for v in values))]
        for kind in present:
            values = [v for p, vs in change.items() if kind_of[p] == kind for v in vs]
            cells.append(factor(geometric_mean(values)) if values else "")
        rows.append(f"| {label} | {' | '.join(cells)} |")
    return rows


def by_kind(lines: Sequence[Line], half: Half) -> list[str]:
    """Every SGDOL and the SGDs beside them, per kind of problem: the geometric mean of r."""
    table = ratios([line for line in lines if line.half == half])
    kind_of = {line.problem: line.kind for line in lines}
    present = [k for k in KINDS if k in {kind_of[p] for problems in table.values() for p in problems}]
    chosen = [c for c in table if c == OURS_FREE or c.startswith(("SGDOL", "SGD")) or c in ("Adam", "Adam + averaging")]
    rows = [f"| | all | {' | '.join(present)} |", "|---|---:" + "|---:" * len(present) + "|"]
    for contender in chosen:
        problems = table[contender]
        cells = [factor(geometric_mean(v for values in problems.values() for v in values.values()))]
        for kind in present:
            values = [v for p, seeds in problems.items() if kind_of[p] == kind for v in seeds.values()]
            cells.append(factor(geometric_mean(values)) if values else "")
        rows.append(f"| {contender} | {' | '.join(cells)} |")
    return rows
