"""Performance profiles (Dolan and Moré 2002): on what share of the problems a method is within a factor of the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.harness import Line
from benchmarks.quality.methods import OURS, OURS_FREE, OURS_FREE_RMS
from benchmarks.quality.problems import HALVES
from benchmarks.quality.tables import geometric_mean, ratios

__all__ = ["LEFT", "RIGHT", "draw", "profile"]

Style = tuple[str, Any]

# Okabe and Ito's colours, which colour-blind readers can tell apart; a method keeps its colour, its variants differ in
# their dashes. At most eight lines a panel, or nobody can follow one.
_DASHED, _DOTTED = (0, (4, 1.4)), (0, (1.2, 1.2))
LEFT: dict[str, Style] = {
    OURS_FREE: ("#D55E00", "-"),
    OURS_FREE_RMS: ("#D55E00", _DOTTED),
    "Prodigy": ("#0072B2", "-"),
    "Prodigy, cosine": ("#0072B2", _DOTTED),
    "DoG + averaging": ("#009E73", "-"),
    "Mechanic AdamW": ("#CC79A7", "-"),
    "Schedule-Free AdamW, lr 0.0025": ("#000000", "-"),
    "AdamW, lr 1e-3": ("#E69F00", "-"),
}
RIGHT: dict[str, Style] = {
    OURS: ("#D55E00", _DASHED),
    OURS_FREE: ("#D55E00", "-"),
    OURS_FREE_RMS: ("#D55E00", _DOTTED),
    "SGD + momentum + averaging": ("#8C6D31", "-"),
    "Adam + averaging": ("#E69F00", _DASHED),
    "AdamW, cosine": ("#E69F00", _DOTTED),
    "Schedule-Free AdamW": ("#000000", "-"),
}
UNTUNED = {OURS_FREE, OURS_FREE_RMS}
"""On the right for comparison, although it has no learning rate to tune."""
FROM = 0.4
LEFT_TO, RIGHT_TO = 1e4, 100.0
"""Where the panels end. Tuned methods differ within a factor of ten; beyond a hundred there is a problem or two."""


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
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # What the defaults were not chosen on comes first.
    halves = [half for half in reversed(HALVES) if any(line.half == half for line in lines)]
    layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.1, hspace=0.04)
    figure, axes = plt.subplots(
        len(halves), 2, figsize=(11, 1.6 + 3.7 * len(halves)), squeeze=False, layout=layout, sharey=True
    )
    sides = ((LEFT, LEFT_TO, "nothing tuned"), (RIGHT, RIGHT_TO, "learning rate tuned"))
    for row, half in zip(axes, halves, strict=True):
        table = ratios([line for line in lines if line.half == half])
        problems = len({line.problem for line in lines if line.half == half})
        for axis, (chosen, end, what) in zip(row, sides, strict=True):
            _panel(axis, table, chosen, end)
            axis.set_title(
                f"{half[0].upper()}{half[1:]} half, {problems} problems: {what}", fontsize=11, loc="left", pad=12
            )
        row[0].set_ylabel("share of problems")
    for column, (chosen, _, _) in zip(axes.T, sides, strict=True):
        column[-1].set_xlabel("loss gap at most this many times that of the best tuned method")
        _legend(column, chosen)
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
    plt.close(figure)


def _legend(column: Sequence[Any], chosen: dict[str, Style]) -> None:
    """Below the column, since the lines need the whole panel; of every line that one of its panels has."""
    handles: dict[str, Any] = {}
    for axis in column:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    shown = [label for label in chosen if label in handles]
    notes = dict.fromkeys(UNTUNED, " (not tuned)") if chosen is RIGHT else {}
    column[-1].legend(
        [handles[label] for label in shown],
        [label + notes.get(label, "") for label in shown],
        fontsize=8.5,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.17),
        ncols=2 if max(map(len, shown), default=0) < 40 else 1,
        frameon=False,
        handlelength=3,
    )


def _panel(axis: Any, table: dict[str, dict[str, dict[int, float]]], chosen: dict[str, Style], end: float) -> None:
    for contender, (colour, dashes) in reversed(chosen.items()):  # the first on top
        if contender not in table:
            continue
        x, y = profile([geometric_mean(seeds.values()) for seeds in table[contender].values()])
        x, y = [FROM / 10, *x, max(end, *x) * 10], [0.0, *y, 1.0]
        width = 2.6 if contender in (OURS, OURS_FREE, OURS_FREE_RMS) else 1.6
        axis.step(x, y, where="post", color=colour, linestyle=dashes, linewidth=width, label=contender)
        assert all(math.isfinite(v) for v in x)
    axis.set_xscale("log")
    axis.set_xlim(FROM, end)
    axis.set_ylim(0, 1.02)
    axis.axvline(1, color="#909090", linewidth=0.7, zorder=0)
    ticks = [each for each in (1, 2, 5, 10, 20, 50, 100, 1000, 10_000) if end < 1e3 or math.log10(each).is_integer()]
    axis.set_xticks([each for each in ticks if each <= end], [f"{each:,}" for each in ticks if each <= end])
    axis.grid(visible=True, color="#e6e6e6", linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
