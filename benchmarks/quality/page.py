"""The page: the tables in words, what they were made to find out, and how everything was run."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.quality.harness import Line, Settings
from benchmarks.quality.methods import OURS, OURS_FREE
from benchmarks.quality.problem import HALVES
from benchmarks.quality.tables import DEFAULT, FREE, TUNED, Summary, by_kind, complete, effects, factor, summarise

__all__ = ["about", "grouped", "markdown", "read_information", "verdicts"]


def about(settings: Settings, command: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """Machine, versions, seeds and command, to be saved with the runs; ``more`` packages are named too."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        cpu = next((x.split(":")[1].strip() for x in cpuinfo.read_text().splitlines() if "model name" in x), cpu)
    packages = (
        "sgdol", "torch", "numpy", "scikit-learn", "mlxtend", "prodigyopt", "dadaptation", "schedulefree",
        "dog-optimizer", "mechanic-pytorch", "parameterfree",
    )  # fmt: skip
    return {
        "command": command,
        "machine": f"{cpu}, {platform.system()}, Python {platform.python_version()}, one thread per run",
        "versions": {p: importlib.metadata.version(p) for p in (*packages, *more)},
        "seeds": list(settings.seeds),
        "tuning_seed": settings.tuning_seed,
        "grid": list(settings.grid),
        "extensions": settings.extensions,
        "shorten": settings.shorten,
    }


class _Named(Protocol):
    @property
    def group(self) -> str: ...
    @property
    def contender(self) -> str: ...


N = TypeVar("N", bound=_Named)


def grouped(
    rows: Sequence[N], columns: Sequence[str], left: Sequence[str], cells: Callable[[N], tuple[str, list[str]]]
) -> list[str]:
    """A table for each group, by what has to be tuned; SGDOL's rows are bold.

    Args:
        rows: in their order within a group.
        columns: their headings.
        left: those columns that are not aligned to the right.
        cells: a note behind the name of a row, and what stands under the columns.
    """
    out: list[str] = []
    for group in (FREE, DEFAULT, TUNED):
        mine = [r for r in rows if r.group == group]
        if not mine:
            continue
        aligned = "|".join("---" if c in left else "---:" for c in columns)
        out += [f"**{group[0].upper()}{group[1:]}**", "", f"| | {' | '.join(columns)} |", f"|---|{aligned}|"]
        for r in mine:
            name = f"**{r.contender}**" if r.contender.startswith("SGDOL") else r.contender
            note, values = cells(r)
            out.append(f"| {name}{note and f' ({note})'} | {' | '.join(values)} |")
        out.append("")
    return out


_COLUMNS = (
    "geometric mean", "over seeds", "worst", "on", "failed", "validation rank", "accuracy", "extra gradients",
    "diverged",
)  # fmt: skip


def _cells(r: Summary) -> tuple[str, list[str]]:
    return f"{r.at_edge} at an edge" if r.at_edge else "", [
        factor(r.geometric_mean),
        f"{factor(r.low)} to {factor(r.high)}",
        factor(r.worst),
        r.worst_problem,
        str(r.failed),
        f"{r.rank:.1f}",
        f"{r.accuracy:.3f}",
        f"{r.extra:.0%}",
        f"{r.diverged} of {r.runs}",
    ]


WITHIN = 1.2
"""How many times tuned Adam + averaging's geometric mean SGDOLFree may have at most."""


def verdicts(rows: Sequence[Summary]) -> list[str]:
    """What the comparison was made to find out, answered from the table."""
    by_name = {r.contender: r for r in rows}
    out = []
    free, ours, adam = by_name.get(OURS_FREE), by_name.get(OURS), by_name.get("Adam + averaging")
    peers = [r for r in rows if r.group == FREE and not r.contender.startswith("SGDOL")]

    def say(holds: bool, sentence: str) -> None:
        out.append(f"- {'Holds' if holds else 'Does not hold'}: {sentence}")

    if free and peers:
        mean = min(peers, key=lambda r: r.geometric_mean)
        worst = min(peers, key=lambda r: r.worst)
        rank = min(peers, key=lambda r: r.rank)
        say(
            free.geometric_mean < mean.geometric_mean,
            f"{OURS_FREE} has a better geometric mean ({factor(free.geometric_mean)}) than every peer without a "
            f"learning rate, those that are told the horizon (cosine) included; the best of them is {mean.contender} "
            f"({factor(mean.geometric_mean)}).",
        )
        say(
            free.worst < worst.worst,
            f"its worst case ({factor(free.worst)}, {free.worst_problem}) is better than theirs; the best of "
            f"theirs is {worst.contender}'s ({factor(worst.worst)}, {worst.worst_problem}).",
        )
        say(
            free.rank < rank.rank,
            f"its validation rank ({free.rank:.1f}) is better than theirs; the best of theirs is {rank.contender}'s "
            f"({rank.rank:.1f}).",
        )
        fewest = min(peers, key=lambda r: r.failed)
        say(
            free.failed == 0,
            f"it fails on no problem: it fails on {free.failed}; the fewest of theirs are {fewest.contender}'s "
            f"{fewest.failed}.",
        )
    if free and adam:
        ratio = free.geometric_mean / adam.geometric_mean
        say(ratio <= WITHIN, f"it is within {WITHIN} times tuned Adam + averaging: {factor(ratio)} times.")
    if ours and adam:
        say(
            ours.geometric_mean <= adam.geometric_mean,
            f"{OURS} with tuned M ({factor(ours.geometric_mean)}) is ahead of tuned Adam + averaging "
            f"({factor(adam.geometric_mean)}).",
        )
    return out


_HOW = """\
How to read the tables:

- **Budget.** Every method gets the same number of gradient evaluations, the same first point, the same batches in the
  same order and the same noise. An evaluation is one pass over one batch: SGDOL's two half batches are one, a look-back
  is another one.
- **Gap.** The final training loss on all data over the optimum (over 0 for networks; over a little below the best known
  value for the adult loss, which has many local minima, and below the data's own entropy for densities). A run that
  ends with a loss that is not finite or above its start has diverged, and counts as if it had stayed at its start; a
  gap below 1e-6 of the start counts as that.
- **Geometric mean.** Over problems and seeds, of the gap relative to the best tuned method of each problem: 1 would be
  the best tuned method everywhere, and smaller is better. "Over seeds" is the range of the seeds' own means.
- **Failed.** On so many problems most runs are no better than the best constant predictor (than the start, where
  nothing is predicted).
- **Validation rank.** The mean rank among all methods of the half, over the problems that keep samples from training,
  by the accuracy on them, or by the loss where nothing is classified; 1 is the best. Accuracy is the mean over the
  networks that classify.
- **Tuning.** Learning rates are tuned per problem on powers of ten around a unit measured at the first point, with one
  seed, and reported on others; the grid grows where its edge is best. No method uses weight decay, but for AdamW at its
  defaults.
- **Where.** Methods are evaluated where they say to be: averages, Schedule-Free's eval mode; BatchNorm's statistics are
  estimated anew at those weights for all.

Every run, with its learning rate: `quality-runs-*.csv`."""


def markdown(lines: Sequence[Line], information: dict[str, dict[str, Any]]) -> str:
    """The whole page."""
    out = ["# Quality against peers", "", "Made by `make bench-peers`.", "", _HOW, ""]
    for half in HALVES:
        mine, partial = complete(lines, half)
        if not mine:
            continue
        rows = summarise(mine, half)
        what = "used to choose defaults" if half == "development" else "run only to report"
        out += [
            f"## The {half} half: {rows[0].problems} problems, {what}",
            "",
            *grouped(rows, _COLUMNS, ["on"], _cells),
        ]
        if partial:
            out += [f"Left out, because not run on all problems: {', '.join(partial)}.", ""]
        out += [*verdicts(rows), ""]
        out += [
            f"### When momentum, averaging and the learned step size are worth it ({half} half)",
            "",
            "How the gap changes by adding one thing: below 1 it helps. Learning rates are tuned for each line.",
            "",
            *effects(mine, half),
            "",
            "The same as gaps relative to the best tuned method of each problem:",
            "",
            *by_kind(mine, half),
            "",
        ]
    out += ["## How it was run", ""]
    for name_of_half, known in information.items():
        versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
        seeds = ", ".join(map(str, known["seeds"]))
        grid = f"10^{known['grid'][0]} to 10^{known['grid'][-1]} times the unit"
        out.append(
            f"- {name_of_half}: `{known['command']}`; seeds {seeds}; tuned with seed {known['tuning_seed']} on {grid}, "
            f"and up to {known['extensions']} decades more at an edge. {known['machine']}. {versions}."
        )
    return "\n".join(out) + "\n"


def read_information(folder: Path) -> dict[str, dict[str, Any]]:
    """What is known of how the saved runs were made, by half."""
    paths = {half: folder / f"quality-about-{half}.json" for half in HALVES}
    return {half: json.loads(path.read_text()) for half, path in paths.items() if path.exists()}
