r"""The tables of the larger networks, from saved runs.

With loss[c, p, s] the training loss that contender c ends with on network p with seed s, and base[p] the geometric mean
of the baseline's over the seeds,

    r[c, p, s] = loss[c, p, s] / base[p]

is summarised by its geometric mean over networks and seeds, with the range of the seeds' own means, and by the worst
network. Beside it stand the same ratio of the validation losses, the hits of the target, the evaluations and seconds of
those that hit it, and the largest early rise of the batch loss.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.networks.harness import Line
from benchmarks.networks.methods import BASELINE
from benchmarks.networks.targets import hit, points, targets
from benchmarks.quality.tables import DEFAULT, FREE, TUNED, factor, geometric_mean

__all__ = ["Summary", "by_network", "configurations", "learning_rates", "summarise", "target_table"]

Ratios = dict[str, dict[str, dict[int, float]]]


@dataclass(frozen=True)
class Summary:
    """A row of the main table."""

    group: str
    contender: str
    networks: int
    """On how many networks it was run."""
    mean: float
    low: float
    """The least of the seeds' own geometric means."""
    high: float
    worst: float
    worst_network: str
    validation: float
    """Geometric mean of the validation loss relative to the baseline's; infinite if a run diverged."""
    hits: int
    runs: int
    evaluations: float | None
    """Geometric mean over the hits; None if there are none."""
    seconds: float | None
    cost: float
    """Seconds a gradient evaluation relative to the baseline's: geometric mean over networks."""
    rise: float
    """The largest over all runs."""
    extra: float
    """Gradient evaluations beyond one per step, as a share of the steps."""
    diverged: int
    at_edge: int
    """On how many networks the tuned learning rate is at an edge of its grid."""


def ratios(lines: Sequence[Line], value: Callable[[Line], float]) -> Ratios:
    """r[contender][network][seed] of a value, on the networks on which the baseline was run."""
    base: dict[str, list[float]] = {}
    for line in lines:
        if line.contender == BASELINE:
            base.setdefault(line.problem, []).append(value(line))
    found: Ratios = {}
    for line in lines:
        if line.problem in base:
            of_contender = found.setdefault(line.contender, {})
            of_contender.setdefault(line.problem, {})[line.seed] = value(line) / geometric_mean(base[line.problem])
    return found


def summarise(lines: Sequence[Line]) -> list[Summary]:
    """The main table of some lines: within each group the best first."""
    losses = ratios(lines, lambda r: r.loss)
    validation = ratios(lines, lambda r: r.validation)
    cost = ratios(lines, lambda r: r.seconds / r.evaluations)
    known = targets(lines)
    rows = []
    for contender, networks in losses.items():
        mine = [r for r in lines if r.contender == contender and r.problem in known]
        seeds = sorted({r.seed for r in mine})
        per_seed = [geometric_mean(by[s] for by in networks.values() if s in by) for s in seeds]
        per_network = {p: geometric_mean(by.values()) for p, by in networks.items()}
        worst = max(per_network, key=lambda p: per_network[p])
        hits = [h for r in mine if (h := hit(points(r.curve), known[r.problem]))]
        rows.append(
            Summary(
                group=mine[0].group,
                contender=contender,
                networks=len(networks),
                mean=geometric_mean(per_seed),
                low=min(per_seed),
                high=max(per_seed),
                worst=per_network[worst],
                worst_network=worst,
                validation=geometric_mean(_flat(validation[contender])),
                hits=len(hits),
                runs=len(mine),
                evaluations=geometric_mean(h.evaluations for h in hits) if hits else None,
                seconds=geometric_mean(h.seconds for h in hits) if hits else None,
                cost=geometric_mean(_flat(cost[contender])),
                rise=max(r.rise for r in mine),
                extra=sum(r.evaluations for r in mine) / sum(r.steps for r in mine) - 1,
                diverged=sum(r.diverged for r in mine),
                at_edge=len({r.problem for r in mine if r.edge}),
            )
        )
    order = [FREE, DEFAULT, TUNED]
    return sorted(rows, key=lambda r: (order.index(r.group), r.mean))


def _flat(networks: dict[str, dict[int, float]]) -> list[float]:
    return [v for by in networks.values() for v in by.values()]


def by_network(lines: Sequence[Line], rows: Sequence[Summary]) -> list[str]:
    """Rows of a table: the relative training loss on each network, with the range over seeds."""
    table = ratios(lines, lambda r: r.loss)
    networks = list(dict.fromkeys(r.problem for r in lines if r.problem in table[BASELINE]))
    out = [f"| | {' | '.join(networks)} |", "|---|" + "---:|" * len(networks)]
    for row in rows:
        cells = []
        for network in networks:
            by = table[row.contender].get(network)
            cells.append(
                f"{factor(geometric_mean(by.values()))} ({factor(min(by.values()))} to {factor(max(by.values()))})"
                if by
                else ""
            )
        out.append(f"| {row.contender} | {' | '.join(cells)} |")
    return out


def target_table(lines: Sequence[Line]) -> list[str]:
    """Rows of a table: what the baseline reaches on each network, and how often the others do."""
    known = targets(lines)
    out = [
        "| network | target | its learning rate | its validation loss | its seconds | others that hit it |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for problem, target in known.items():
        base = [r for r in lines if (r.problem, r.contender) == (problem, BASELINE)]
        others = [r for r in lines if r.problem == problem and r.contender != BASELINE]
        hits = sum(hit(points(r.curve), target) is not None for r in others)
        validation = statistics.median(r.validation for r in base)
        out.append(
            f"| {problem} | {target.loss:.4g} | {base[0].learning_rate:g} | {validation:.4g} | {target.seconds:.1f} | "
            f"{hits} of {len(others)} |"
        )
    return out


def learning_rates(lines: Sequence[Line]) -> list[str]:
    """Rows of a table: the tuned learning rates; a star at an edge of the grid."""
    networks = list(dict.fromkeys(r.problem for r in lines))
    tuned = list(dict.fromkeys(r.contender for r in lines if r.group == TUNED))
    found = {(r.contender, r.problem): f"{r.learning_rate}{'*' if r.edge else ''}" for r in lines}
    out = [f"| | {' | '.join(networks)} |", "|---|" + "---:|" * len(networks)]
    for contender in tuned:
        out.append(f"| {contender} | {' | '.join(found.get((contender, n), '') for n in networks)} |")
    return out


def configurations(lines: Iterable[Line]) -> tuple[int, int]:
    """How many learning rates were tried for tuned contenders, and on how many pairs of contender and network."""
    tried = {(r.contender, r.problem): r.tried for r in lines if r.group == TUNED}
    return sum(tried.values()), len(tried)
