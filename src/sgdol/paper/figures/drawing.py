"""The pieces of the figures: the frame, a curve with its band and its end, the axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray

from sgdol.paper.figures.looks import LOOKS, Look, short
from sgdol.paper.measures import Curve

__all__ = ["draw_curve", "finish", "frame", "frame_step_sizes", "repeats_note", "scales"]

Array = NDArray[np.float64]

SMALLEST_GAP = 1e-10
"""The optimality gap is drawn down to here."""


def frame(rows: int, columns: int, row_height: float, legend_rows: int, **sharing: Any) -> tuple[Figure, Any]:
    """A figure with its axes, and room for a title and a legend."""
    head, foot = 0.62, 0.55 + 0.2 * legend_rows
    height = rows * row_height + head + foot
    figure = Figure(figsize=(8.6, height))
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **sharing)
    figure.subplots_adjust(
        left=0.085, right=0.985, top=1 - head / height, bottom=foot / height, hspace=0.24, wspace=0.14
    )
    return figure, axes


def finish(figure: Figure, title: str, handles: list[Line2D], columns: int, note: str = "") -> None:
    """The title, the legend, and a note at the upper right."""
    height = figure.get_size_inches()[1]
    figure.text(0.012, 1 - 0.1 / height, title, ha="left", va="top", fontsize=10.5, fontweight="bold")
    if note:
        figure.text(0.985, 1 - 0.12 / height, note, ha="right", va="top", fontsize=7.5, color="#555555")
    figure.legend(
        handles=handles,
        loc="lower center",
        ncols=columns,
        bbox_to_anchor=(0.5, 0.0),
        handlelength=3.6,
        columnspacing=1.6,
    )


def _line(axis: Axes, look: Look, x: Array, values: Array, offset: float) -> None:
    """The mean over repeats with a band from the smallest to the largest."""
    low, high, middle = values.min(axis=0), values.max(axis=0), values.mean(axis=0)
    if len(values) > 1 and not np.allclose(low, high, rtol=1e-6, atol=0):
        axis.fill_between(x, low, high, color=look.colour, alpha=0.16, linewidth=0)
    every = max(1, len(x) // 6)
    axis.plot(
        x,
        middle,
        color=look.colour,
        linestyle=look.dashes,
        linewidth=look.width,
        marker=look.marker,
        markersize=3.8,
        markevery=(int(offset * every) % max(1, len(x)), every),
        markeredgewidth=0,
    )


def draw_curve(axis: Axes, curve: Curve, method: str, quantity: str, offset: float, factor: float = 1.0) -> None:
    """A curve up to where its first repeat diverges, the survivors beyond it, and a cross that says so.

    Args:
        axis: where to draw.
        curve: the run.
        method: whose look it has.
        quantity: which of its variables.
        offset: where among the others its markers stand, from 0 to 1.
        factor: by how much the horizontal axis is stretched.
    """
    look, x = LOOKS[method], curve.t * factor
    values = np.asarray(curve.dataset[quantity].transpose("repeat", "iteration").values, dtype=np.float64)
    if quantity == "step_size" and not np.isfinite(values).any():
        return
    common = _alive(curve, values, quantity)
    if common:
        _line(axis, look, x[:common], values[:, :common], offset)
    if curve.diverged.any():
        _mark_divergence(axis, look, curve, x, values, common)
    elif quantity == "mean_squared_gradient" and curve.fled is not None:
        _mark_flight(axis, look, x, values, curve.fled)


def _alive(curve: Curve, values: Array, quantity: str) -> int:
    """For how many recorded iterations no repeat has diverged."""
    alive = np.isfinite(values)
    if quantity != "step_size":
        # A diverging run may still be a number, far beyond everything else in the picture.
        alive &= values < 1e12
    for repeat in np.flatnonzero(curve.diverged):
        # A run may leave for where the loss is flat and keep finite numbers; it is lost when f stays above f(x_1).
        objective = np.asarray(curve.dataset["objective"].values[repeat], dtype=np.float64)
        alive[repeat, 1 + int(np.flatnonzero(objective <= objective[0])[-1]) :] = False
    return int(np.logical_and.accumulate(alive, axis=1).all(axis=0).sum())


def _mark_flight(axis: Axes, look: Look, x: Array, values: Array, objective: float) -> None:
    """The last objective of a run that ended above where it started."""
    level, before = values[:, -1].mean(), values[:, len(x) // 2].mean()
    falls = level < before / 3
    _label(
        axis,
        look,
        f"$f(x_T)$ = {objective:.2f}",
        (x[-1], level),
        xytext=(-6, -4) if falls else (0, 5),
        ha="right",
        va="top" if falls else "bottom",
    )


def _mark_divergence(axis: Axes, look: Look, curve: Curve, x: Array, values: Array, common: int) -> None:
    """The survivors beyond the first divergence, a cross there, and how many diverged."""
    survivors = values[~curve.diverged]
    if len(survivors) and common < len(x):
        start = max(0, common - 1)
        axis.plot(x[start:], survivors[:, start:].mean(axis=0), color=look.colour, linewidth=0.8, linestyle=look.dashes)
    end = max(0, common - 1)
    height = values[:, end].mean() if common else np.nan
    axis.plot(
        x[end], height, marker="x", markersize=8, markeredgewidth=2, color=look.colour, linestyle="none", clip_on=False,
        zorder=5,
    )  # fmt: skip
    _label(
        axis,
        look,
        f"{int(curve.diverged.sum())} of {len(curve.diverged)} diverged",
        (x[end], height),
        # The first iterations are crowded: a label there goes above the crowd.
        xytext=(0, 26 if end < len(x) // 6 else 8),
        ha="left" if end < len(x) // 6 else "right" if end > 5 * len(x) // 6 else "center",
        va="bottom",
    )


def _label(axis: Axes, look: Look, text: str, point: tuple[float, float], **place: Any) -> None:
    axis.annotate(
        text,
        point,
        textcoords="offset points",
        fontsize=7,
        color=look.colour,
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
        **place,
    )


def scales(axis: Axes, quantity: str) -> None:
    """Logarithmic axes as in the paper, but for the step size."""
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(10, numticks=12))
    axis.xaxis.set_minor_locator(NullLocator())
    if quantity != "step_size":
        axis.set_yscale("log")
        if quantity == "objective":
            # Without noise some gaps fall to the rounding error; the rest of the picture is above.
            axis.set_ylim(bottom=max(axis.get_ylim()[0], SMALLEST_GAP))
        axis.yaxis.set_major_locator(LogLocator(10, numticks=8))
        axis.yaxis.set_minor_locator(NullLocator())
    else:
        axis.set_ylim(bottom=0)
        axis.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3), useMathText=True)


def repeats_note(curves: Sequence[Curve]) -> str:
    """How many repeats a line is the mean of."""
    repeats = sorted({len(curve.diverged) for curve in curves})
    if not repeats or repeats[-1] == 1:
        return ""
    return f"mean of {' or '.join(map(str, repeats))} repeats; band: smallest to largest"


def frame_step_sizes(axes: Sequence[Axes], largest: float) -> None:
    """End the axis just above SGDOL's largest step size, 2/M, and say where a line starts that comes from above."""
    top = 1.08 * largest
    for axis in axes:
        axis.set_ylim(0, top)
        starts = {float(np.asarray(line.get_ydata(), dtype=np.float64)[0]): line.get_color() for line in axis.lines}
        start = max(starts, default=0.0)
        if start > top:
            axis.annotate(
                f"from {short(start)}",
                (0.17, 0.98),
                xycoords="axes fraction",
                ha="left",
                va="top",
                fontsize=7,
                color=starts[start],
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
            )
