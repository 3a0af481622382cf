"""The page of the larger networks: the tables, and how everything was run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.networks import tables
from benchmarks.networks.harness import Line
from benchmarks.networks.methods import BASELINE
from benchmarks.networks.tables import Summary
from benchmarks.quality.page import grouped
from benchmarks.quality.problem import HALVES
from benchmarks.quality.tables import factor

__all__ = ["markdown"]

_HOW = f"""\
How to read the tables:

- **Networks.** 1e5 to 5e5 parameters, ordinary initialisations, 500 to 2,000 batches. The halves were fixed by kind
  before anything was measured: rules are tuned on the development half only.
- **Budget.** Every method gets the same number of gradient evaluations, the same first weights and the same batches in
  the same order. SGDOL's two half batches are one evaluation, a look-back is another one.
- **Loss.** The training loss on fixed samples, at the point where a method says to evaluate, as the mean of the last
  three evaluations (96, 98 and 100 % of the budget). It is relative to "{BASELINE}" with a learning rate tuned per
  network: below 1 is better. "Over seeds" is the range of the seeds' own geometric means. A run that ends above its
  start counts as if it had stayed there. On td-walk the loss is the squared error of the values relative to their
  variance, because the loss of the batches has targets that move.
- **Validation.** The same ratio of the losses on samples kept from training.
- **Target.** As in AlgoPerf: what "{BASELINE}" ends with, the median of its seeds. Evaluations and seconds (CPU time
  without evaluations) are the geometric means over the runs that hit the target; 1 is the whole training of
  "{BASELINE}". Runs that miss it are in no mean, so read both columns together with the hits.
- **Seconds an evaluation.** CPU time for each gradient evaluation, optimizer included, relative to "{BASELINE}".
- **Rise.** The largest loss of the first 50 batches over that of the first, in any run.
- **Tuning.** Per network on half decades (1, 3, 10, ...) around the usual learning rate, with one seed, and reported on
  others; the grid grows where its edge is best. Tuned methods use no weight decay.

Every run, with its learning rate and its curve: `networks-runs.csv`."""


def _number(value: float | None) -> str:
    return "" if value is None else factor(value)


_COLUMNS = (
    "loss", "over seeds", "worst", "on", "validation", "target hit", "evaluations to it", "seconds to it",
    "seconds an evaluation", "rise", "extra gradients", "diverged",
)  # fmt: skip


def _main_table(rows: Sequence[Summary]) -> list[str]:
    most = max(r.networks for r in rows)

    def cells(r: Summary) -> tuple[str, list[str]]:
        notes = [f"{r.networks} of {most} networks"] if r.networks < most else []
        notes += [f"{r.at_edge} at an edge"] if r.at_edge else []
        return ", ".join(notes), [
            factor(r.mean),
            f"{factor(r.low)} to {factor(r.high)}",
            factor(r.worst),
            r.worst_network,
            factor(r.validation),
            f"{r.hits} of {r.runs}",
            _number(r.evaluations),
            _number(r.seconds),
            factor(r.cost),
            factor(r.rise),
            f"{r.extra:.0%}",
            str(r.diverged),
        ]

    return grouped(rows, _COLUMNS, ["on"], cells)


def markdown(lines: Sequence[Line], known: dict[str, Any]) -> str:
    """The whole page."""
    out = ["# Larger networks against peers", "", "Made by `make bench-networks`.", "", _HOW, ""]
    for half in HALVES:
        mine = [line for line in lines if line.half == half]
        if not any(line.contender == BASELINE for line in mine):
            continue
        rows = tables.summarise(mine)
        what = "used to choose defaults" if half == "development" else "run only to report"
        out += [f"## The {half} half: {max(r.networks for r in rows)} networks, {what}", "", *_main_table(rows)]
        out += ["The loss on each network, with the range over seeds:", "", *tables.by_network(mine, rows), ""]
        out += ["Targets:", "", *tables.target_table(mine), ""]
        out += ["Tuned learning rates (* still at an edge of the grid):", "", *tables.learning_rates(mine), ""]
    tried, pairs = tables.configurations(lines)
    versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    out += [
        "## How it was run",
        "",
        f"`{known['command']}`; seeds {', '.join(map(str, known['seeds']))}; tuned with seed {known['tuning_seed']}: "
        f"{tried} learning rates were looked at for {pairs} pairs of a tuned method and a network. {known['machine']}. "
        f"{versions}.",
    ]
    return "\n".join(out) + "\n"
