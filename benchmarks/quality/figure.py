"""Performance profiles (Dolan and Moré 2002): on what share of the problems a method is within a factor of the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.harness import Line
from benchmarks.quality.problems import HALVES
from benchmarks.quality.tables import OURS, OURS_FREE, TUNED, geometric_mean, ratios

__all__ = ["draw", "profile"]

# Okabe and Ito's colours, which colour-blind readers can tell apart, with different dashes as well.
DEFAULTS: dict[str, tuple[str, Any]] = {
    OURS_FREE: ("#D55E00", "-"),
    "Prodigy": ("#0072B2", "-"),
    "Prodigy, cosine": ("#0072B2", (0, (1.2, 1.2))),
    "DoG + averaging": ("#009E73", (0, (5, 1.5))),
    "D-Adaptation Adam": ("#56B4E9", "-"),
    "Mechanic AdamW": ("#CC79A7", (0, (4, 1, 1, 1))),
    "Schedule-Free AdamW, lr 0.0025": ("#000000", (0, (2, 2))),
    "Adam, lr 1e-3": ("#E69F00", (0, (6, 2, 1, 2))),
}
TUNED_LINES: dict[str, tuple[str, Any]] = {
    OURS: ("#D55E00", "-"),
    "SGD + momentum + averaging": ("#0072B2", "-"),
    "SGD + momentum, cosine": ("#56B4E9", (0, (1.2, 1.2))),
    "Adam": ("#E69F00", (0, (6, 2, 1, 2))),
    "AdamW, cosine": ("#009E73", (0, (5, 1.5))),
    "Schedule-Free AdamW": ("#000000", (0, (2, 2))),
    "SGDOL": ("#CC79A7", (0, (4, 1, 1, 1))),
}
OTHERS = "#D0D0D0"
FROM, TO = 0.5, 1e4


def profile(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The steps of the share of values that are at most x.

    >>> profile([2.0, 1.0])
    ([1.0, 2.0], [0.5, 1.0])
    """
    ordered = sorted(values)
    return ordered, [(i + 1) / len(ordered) for i in range(len(ordered))]


def draw(lines: Sequence[Line], paths: Sequence[Path]) -> None:
    """One row of panels per half: methods as they come, and methods whose learning rate is tuned."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "sgdol"  # the same file each time
    import matplotlib.pyplot as plt

    halves = [half for half in HALVES if any(line.half == half for line in lines)]
    figure, axes = plt.subplots(
        len(halves), 2, figsize=(11, 1.4 + 3.6 * len(halves)), squeeze=False, sharex=True, layout="constrained"
    )
    for row, half in zip(axes, halves, strict=True):
        mine = [line for line in lines if line.half == half]
        table = ratios(mine)
        group_of = {line.contender: line.group for line in mine}
        for axis, tuned in zip(row, (False, True), strict=True):
            chosen = {c: r for c, r in table.items() if (group_of[c] == TUNED) == tuned}
            _panel(axis, chosen, TUNED_LINES if tuned else DEFAULTS)
            axis.set_title(
                f"{half[0].upper()}{half[1:]} half, {'learning rate tuned per problem' if tuned else 'as they come'}",
                fontsize=11,
                loc="left",
            )
        row[0].set_ylabel("share of problems")
    for axis, highlighted in zip(axes[-1], (DEFAULTS, TUNED_LINES), strict=True):
        axis.set_xlabel("loss gap over that of the best tuned method, at most")
        _legend(axis, [*highlighted, "others"])
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
    plt.close(figure)


def _legend(axis: Any, labels: list[str]) -> None:
    """Below the column, since the lines need the whole panel."""
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    shown = [label for label in labels if label in handles]
    axis.legend(
        [handles[label] for label in shown],
        [label.replace(" (direction, kappa 1)", "") for label in shown],
        fontsize=8.5,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=2,
        frameon=False,
        handlelength=3,
    )


def _panel(axis: Any, table: dict[str, dict[str, dict[int, float]]], highlighted: dict[str, tuple[str, Any]]) -> None:
    grey_labelled = False
    for contender in sorted(table, key=lambda c: c in highlighted):
        values = [geometric_mean(seeds.values()) for seeds in table[contender].values()]
        x, y = profile(values)
        x, y = [FROM / 10, *x, TO * 10], [0.0, *y, 1.0]
        if contender in highlighted:
            colour, dashes = highlighted[contender]
            width = 2.8 if contender in (OURS, OURS_FREE) else 1.7
            axis.step(x, y, where="post", color=colour, linestyle=dashes, linewidth=width, label=contender)
        else:
            label = None if grey_labelled else "others"
            grey_labelled = True
            axis.step(x, y, where="post", color=OTHERS, linewidth=0.9, label=label, zorder=1)
    axis.set_xscale("log")
    axis.set_xlim(FROM, TO)
    axis.set_ylim(0, 1.02)
    axis.axvline(1, color="#909090", linewidth=0.7, zorder=0)
    axis.set_xticks([1, 10, 100, 1000, 10000], ["1", "10", "100", "1,000", "10,000"])
    axis.spines[["top", "right"]].set_visible(False)
    assert all(math.isfinite(v) for r in table.values() for seeds in r.values() for v in seeds.values())
