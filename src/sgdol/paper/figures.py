r"""The paper's four figures, and three more that it does not have.

Figures 1 to 4 are drawn as the paper's text describes them: a column for each level of noise, and rows for the mean
squared gradient, the optimality gap and the step size. Lines are means over the repeats, bands reach from the smallest
repeat to the largest. Colours are those of Okabe and Ito, which colour-blind readers tell apart, and every method also
has its own dashes and marker, so that the figures survive a black-and-white printer. A run that diverges ends in a
cross and says so; one whose objective ends above where it started, for instance by a jump to where the loss is flat,
carries that objective at its end.

Beyond the paper: the search for the rates (:func:`draw_tuning`), the curves by gradient evaluations, of which SGDOL
takes two per iteration (:func:`draw_evaluations`), and SGDOL with a step size for each coordinate
(:func:`draw_coordinate`).
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray

from sgdol.paper.measures import Curve, Reader
from sgdol.paper.results import FIGURES as PAPER_FIGURES
from sgdol.paper.results import NOISES, write_atomically

__all__ = [
    "FIGURES",
    "LOOKS",
    "Layout",
    "Look",
    "draw",
    "draw_coordinate",
    "draw_evaluations",
    "draw_tuning",
    "save",
    "write_figures",
]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Look:
    """How a method is drawn, wherever it is drawn."""

    colour: str
    dashes: Any
    marker: str
    width: float = 1.4


LOOKS = {
    "SGDOL Global": Look("#D55E00", "-", "o", 2.2),
    "SGDOL Coordinate": Look("#E69F00", (0, (6, 1.5)), "s", 2.0),
    "SGD": Look("#0072B2", (0, (5, 2)), "^"),
    "SGD GL": Look("#56B4E9", (0, (5, 1.5, 1, 1.5)), "v"),
    "AdaGrad Global": Look("#009E73", (0, (3, 1.2, 1, 1.2, 1, 1.2)), "D"),
    "AdaGrad Coordinate": Look("#009E73", (0, (7, 2)), "D"),
    "Adam": Look("#CC79A7", (0, (1, 1.2)), "X"),
    "RMSProp": Look("#E69F00", (0, (1, 1.2)), "P"),
    "AdaDelta": Look("#0072B2", (0, (4, 1.5, 1, 1.5)), "v"),
    "AMSGrad": Look("#CC79A7", (0, (3, 1.2, 1, 1.2, 1, 1.2)), "X"),
    "Hypergradient": Look("#000000", (0, (5, 2)), "s"),
}
"""Okabe and Ito's palette; no two methods of one figure share a colour, and no two at all share all three."""

NOISE_TITLES = {
    "batch=all": "all samples (no noise)",
    "batch=50": "minibatch of 50",
    "batch=1": "minibatch of 1",
    "sigma=0": "no noise",
    "sigma=0.2": "small noise, $\\sigma = 0.2$",
    "sigma=5": "large noise, $\\sigma = 5$",
}

SMALLEST_GAP = 1e-10
"""The optimality gap is drawn down to here."""

LARGEST_RATIO = 1e4
"""The search for the rates is drawn up to this many times the chosen rate's value, and down to as little of it."""

QUANTITIES = {
    "mean_squared_gradient": "$\\mathrm{E}\\;\\|\\nabla f(x_k)\\|^2$",
    "objective": "optimality gap  $f(x_t) - f^\\star$",
    "step_size": "step size  $\\eta_t$",
}


@dataclass(frozen=True)
class Layout:
    """What a figure of the paper shows."""

    experiment: str
    noises: tuple[str, ...]
    methods: tuple[str, ...]
    rows: tuple[str, ...]
    title: str


_ROWS = {
    1: ("mean_squared_gradient", "step_size"),
    2: ("mean_squared_gradient", "objective", "step_size"),
    3: ("mean_squared_gradient", "objective"),
    4: ("mean_squared_gradient",),
}
_TITLES = {
    1: "Classification of the adult data",
    2: "The Rosenbrock function",
    3: "The Rosenbrock function, other methods",
    4: "Classification of the adult data, other methods",
}

FIGURES = {
    number: Layout(experiment, NOISES[experiment], methods, _ROWS[number], _TITLES[number])
    for number, (experiment, methods) in PAPER_FIGURES.items()
}
"""The figures of the paper by their numbers there."""

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "mathtext.fontset": "dejavusans",
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "savefig.dpi": 200,
    # Text stays text in SVG, and its identifiers do not depend on the moment.
    "svg.fonttype": "path",
    "svg.hashsalt": "sgdol",
}


def _number(value: float) -> str:
    """A rate as a reader would write it.

    >>> _number(0.001), _number(20.0), _number(1.25e-05), _number(1234567.0)
    ('0.001', '20', '1.25e-5', '1.23e6')
    """
    text = f"{value:.3g}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        if -3 <= int(exponent) <= 4:
            return f"{float(text):.0f}"
        return f"{mantissa}e{int(exponent)}"
    return text


def legend_label(method: str, attrs: dict[str, Any]) -> str:
    """The method with what it was run with, as the paper's legends have it."""
    if method.startswith("SGDOL"):
        return f"{method} (M = {_number(float(attrs['smoothness']))}, α = {_number(float(attrs['alpha']))})"
    if method == "SGD GL":
        return method
    return f"{method} ({_number(float(attrs['learning_rate']))})"


def _figure(rows: int, columns: int, row_height: float, legend_rows: int, **sharing: Any) -> tuple[Figure, Any]:
    head, foot = 0.62, 0.55 + 0.2 * legend_rows
    height = rows * row_height + head + foot
    figure = Figure(figsize=(8.6, height))
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **sharing)
    figure.subplots_adjust(
        left=0.085, right=0.985, top=1 - head / height, bottom=foot / height, hspace=0.24, wspace=0.14
    )
    return figure, axes


def _finish(figure: Figure, title: str, handles: list[Line2D], columns: int, note: str = "") -> None:
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


def _draw_curve(axis: Axes, curve: Curve, method: str, quantity: str, offset: float, factor: float = 1.0) -> None:
    """A curve up to where its first repeat diverges, the survivors beyond it, and a cross that says so."""
    look, x = LOOKS[method], curve.t * factor
    values = np.asarray(curve.dataset[quantity].transpose("repeat", "iteration").values, dtype=np.float64)
    if quantity == "step_size":
        if not np.isfinite(values).any():
            return
        base = np.isfinite(values)
    else:
        # Where a diverging run is no number any more, or far beyond everything else in the picture.
        base = np.isfinite(values) & (values < 1e12)
    for repeat in np.flatnonzero(curve.diverged):
        # A run may leave for where the loss is flat and keep finite numbers; it is lost when f stays above f(x_1).
        objective = np.asarray(curve.dataset["objective"].values[repeat], dtype=np.float64)
        base[repeat, 1 + int(np.flatnonzero(objective <= objective[0])[-1]) :] = False
    alive = np.logical_and.accumulate(base, axis=1)
    common = int(alive.all(axis=0).sum())
    if common:
        _line(axis, look, x[:common], values[:, :common], offset)
    if quantity == "mean_squared_gradient" and curve.fled is not None and not curve.diverged.any():
        level, before = values[:, -1].mean(), values[:, len(x) // 2].mean()
        falls = level < before / 3
        axis.annotate(
            f"$f(x_T)$ = {curve.fled:.2f}",
            (x[-1], level),
            xytext=(-6, -4) if falls else (0, 5),
            textcoords="offset points",
            ha="right",
            va="top" if falls else "bottom",
            fontsize=7,
            color=look.colour,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )
    if not curve.diverged.any():
        return
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
    axis.annotate(
        f"{int(curve.diverged.sum())} of {len(curve.diverged)} diverged",
        (x[end], height),
        # The first iterations are crowded: a label there goes above the crowd.
        xytext=(0, 26 if end < len(x) // 6 else 8),
        textcoords="offset points",
        ha="left" if end < len(x) // 6 else "right" if end > 5 * len(x) // 6 else "center",
        va="bottom",
        fontsize=7,
        color=look.colour,
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
    )


def _axes_scales(axis: Axes, quantity: str) -> None:
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


def _handle(method: str, label: str) -> Line2D:
    look = LOOKS[method]
    return Line2D(
        [], [], color=look.colour, linestyle=look.dashes, linewidth=look.width, marker=look.marker, markersize=4,
        markeredgewidth=0, label=label,
    )  # fmt: skip


def _repeats_note(curves: Sequence[Curve]) -> str:
    repeats = sorted({len(curve.diverged) for curve in curves})
    if not repeats or repeats[-1] == 1:
        return ""
    return f"mean of {' or '.join(map(str, repeats))} repeats; band: smallest to largest"


def _frame_step_sizes(axes: Sequence[Axes], largest: float) -> None:
    """End the axis just above SGDOL's largest step size, 2/M, and say where a line starts that comes from above."""
    top = 1.08 * largest
    for axis in axes:
        axis.set_ylim(0, top)
        starts = {float(np.asarray(line.get_ydata(), dtype=np.float64)[0]): line.get_color() for line in axis.lines}
        start = max(starts, default=0.0)
        if start > top:
            axis.annotate(
                f"from {_number(start)}",
                (0.17, 0.98),
                xycoords="axes fraction",
                ha="left",
                va="top",
                fontsize=7,
                color=starts[start],
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
            )


def draw(number: int, read: Reader) -> Figure:
    """A figure of the paper by its number, 1 to 4, from whatever the results have of it.

    Raises:
        ValueError: if the paper has no such figure.
    """
    if number not in FIGURES:
        raise ValueError(f"figure must be one of {', '.join(map(str, FIGURES))}, got {number!r}")
    layout = FIGURES[number]
    with mpl.rc_context(STYLE):
        legend_columns = 4 if len(layout.methods) == 4 else 3
        legend_rows = -(-len(layout.methods) // legend_columns)
        figure, axes = _figure(len(layout.rows), 3, 1.75, legend_rows, sharex="col", sharey="row")
        found: dict[str, Curve] = {}
        for column, noise in enumerate(layout.noises):
            axes[0, column].set_title(NOISE_TITLES[noise], pad=7)
            for order, method in enumerate(layout.methods):
                curve = read.curve(layout.experiment, noise, method)
                if curve is None:
                    continue
                found.setdefault(method, curve)
                for row, quantity in enumerate(layout.rows):
                    _draw_curve(axes[row, column], curve, method, quantity, (order + 0.5) / len(layout.methods))
        for (row, _), axis in np.ndenumerate(axes):
            _axes_scales(axis, layout.rows[row])
        for row, quantity in enumerate(layout.rows):
            axes[row, 0].set_ylabel(QUANTITIES[quantity])
            if quantity == "step_size" and "SGDOL Global" in found:
                _frame_step_sizes(axes[row], 2 / float(found["SGDOL Global"].attrs["smoothness"]))
        for axis in axes[-1]:
            axis.set_xlabel("iteration")
        figure.align_ylabels(axes[:, 0])
        handles = [_handle(method, legend_label(method, curve.attrs)) for method, curve in found.items()]
        noisy = [
            c for noise in layout.noises[1:] for m in layout.methods if (c := read.curve(layout.experiment, noise, m))
        ]
        _finish(figure, f"Figure {number}. {layout.title}", handles, legend_columns, _repeats_note(noisy))
    return figure


def _draw_grid(read: Reader, methods: dict[str, tuple[str, ...]], title: str, by_gradients: bool) -> Figure:
    """The mean squared gradient of some methods, a row for each experiment."""
    with mpl.rc_context(STYLE):
        names = list(dict.fromkeys(name for group in methods.values() for name in group))
        legend_columns = min(len(names), 4 if not by_gradients else 5)
        figure, axes = _figure(len(methods), 3, 1.9, -(-len(names) // legend_columns), sharex="row", sharey="row")
        figure.subplots_adjust(hspace=0.42)
        every = []
        for row, (experiment, group) in enumerate(methods.items()):
            for column, noise in enumerate(NOISES[experiment]):
                axis = axes[row, column]
                axis.set_title(f"{experiment}: {NOISE_TITLES[noise]}" if column == 0 else NOISE_TITLES[noise], pad=6)
                for order, method in enumerate(group):
                    curve = read.curve(experiment, noise, method)
                    if curve is None:
                        continue
                    every.append(curve)
                    factor = float(curve.attrs.get("gradients_per_iteration", 1)) if by_gradients else 1.0
                    _draw_curve(axis, curve, method, "mean_squared_gradient", (order + 0.5) / len(group), factor)
                _axes_scales(axis, "mean_squared_gradient")
            axes[row, 0].set_ylabel(QUANTITIES["mean_squared_gradient"])
        for axis in axes[-1]:
            axis.set_xlabel("gradient evaluations" if by_gradients else "iteration")
        _finish(figure, title, [_handle(name, name) for name in names], legend_columns, _repeats_note(every))
    return figure


def draw_evaluations(read: Reader) -> Figure:
    """Figures 1 and 2 by gradient evaluations, of which an iteration of SGDOL takes two."""
    methods = {"adult": FIGURES[1].methods, "rosenbrock": FIGURES[2].methods}
    return _draw_grid(read, methods, "The same runs by gradient evaluations", by_gradients=True)


def draw_coordinate(read: Reader) -> Figure:
    """SGDOL with a step size for each coordinate (section 6), which the paper's experiments leave out."""
    group = ("SGDOL Global", "SGDOL Coordinate", "AdaGrad Coordinate")
    return _draw_grid(
        read,
        {"adult": group, "rosenbrock": group},
        "SGDOL with one step size for each coordinate",
        by_gradients=False,
    )


_SEARCHES: dict[str, tuple[str, Any, str]] = {
    "rosenbrock": ("#0072B2", "-", "o"),
    "adult": ("#D55E00", (0, (4, 1.5)), "s"),
}


def draw_tuning(read: Reader) -> Figure:
    """The search for each method's rate on the noiseless problems, with the rate that was chosen."""
    methods = [m for m in LOOKS if not m.startswith("SGDOL") and m != "SGD GL"]
    with mpl.rc_context(STYLE):
        figure, axes = _figure(2, 4, 1.8, 1, sharey=True)
        figure.subplots_adjust(hspace=0.42, wspace=0.1)
        for axis, method in zip(axes.flat, methods, strict=True):
            axis.set_title(method, pad=5)
            axis.set_xscale("log")
            axis.set_yscale("log")
            for experiment in _SEARCHES:
                tuning = read.tuning(experiment, method)
                if tuning is not None:
                    _draw_search(axis, experiment, tuning)
            axis.xaxis.set_major_locator(LogLocator(10, numticks=5))
            axis.yaxis.set_major_locator(LogLocator(10, numticks=7))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.yaxis.set_minor_locator(NullLocator())
        low, high = axes[0, 0].get_ylim()
        axes[0, 0].set_ylim(max(low, 1 / LARGEST_RATIO), min(high, LARGEST_RATIO))
        for axis in axes[:, 0]:
            axis.set_ylabel("mean squared gradient\nover that of the chosen rate")
        for axis in axes[-1]:
            axis.set_xlabel("learning rate")
        handles = [
            Line2D([], [], color=colour, linestyle=dashes, marker=marker, markersize=3.5, label=experiment)
            for experiment, (colour, dashes, marker) in _SEARCHES.items()
        ]
        ring = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "markeredgewidth": 1.4}
        handles.append(Line2D([], [], linestyle="none", color="#333333", label="chosen", **ring))  # type: ignore[arg-type]
        handles.append(Line2D([], [], linestyle="none", color="#333333", label="diverged", marker="x", markersize=5))
        _finish(figure, "The search for the learning rates, without noise", handles, 4, "each point is a whole run")
    return figure


def _draw_search(axis: Axes, experiment: str, tuning: Any) -> None:
    colour, dashes, marker = _SEARCHES[experiment]
    rate = np.asarray(tuning["rate"].values, dtype=np.float64).ravel()
    value = np.asarray(tuning["mean_squared_gradient"].values, dtype=np.float64).ravel()
    diverged = np.asarray(tuning["diverged"].values, dtype=bool).ravel() | ~np.isfinite(value)
    rates = np.unique(rate)
    # A method with a second parameter has several values at a rate: its best is what counts.
    best = np.array([np.min(value[(rate == r) & ~diverged], initial=np.inf) for r in rates])
    lost = ~np.isfinite(best)
    at = int(np.abs(rates - float(tuning.attrs["chosen"])).argmin())
    relative = np.where(lost, np.nan, best) / best[at]
    axis.plot(rates, relative, color=colour, linestyle=dashes, linewidth=1.2, marker=marker, markersize=3)
    axis.plot(rates[at], 1.0, marker="o", markersize=9, markerfacecolor="none", markeredgewidth=1.4, color=colour)
    height = 0.97 if experiment == "rosenbrock" else 0.9
    axis.plot(
        rates[lost],
        np.full(lost.sum(), height),
        color=colour,
        marker="x",
        markersize=4.5,
        linestyle="none",
        transform=axis.get_xaxis_transform(),
    )


def save(figure: Figure, folder: str | os.PathLike[str], name: str) -> list[Path]:
    """Write a figure as PNG and SVG, the same bytes each time, and return where they are."""
    written = []
    with mpl.rc_context(STYLE):
        for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
            target = Path(folder) / f"{name}.{suffix}"
            content = io.BytesIO()
            figure.savefig(content, format=suffix, metadata=metadata)
            write_atomically(target, content.getvalue())
            written.append(target)
    return written


def write_figures(
    read: Reader,
    folder: str | os.PathLike[str],
    numbers: Sequence[int] = (1, 2, 3, 4),
    progress: Callable[[str], None] | None = None,
) -> list[Path]:
    """Draw the figures that the results have runs for, and write each as PNG and SVG.

    Args:
        read: reads an opened results folder.
        folder: where to write, which exists.
        numbers: which of the paper's figures.
        progress: called with the name of each figure before it is drawn.
    """
    available = read.available

    def has_runs(layout: Layout) -> bool:
        return any(experiment == layout.experiment and method in layout.methods for experiment, _, method in available)

    jobs: list[tuple[str, Callable[[Reader], Figure]]] = [
        (f"figure{number}", functools.partial(draw, number)) for number in numbers if has_runs(FIGURES[number])
    ]
    if available:
        jobs += [("tuning", draw_tuning), ("evaluations", draw_evaluations)]
    if any(method == "SGDOL Coordinate" for _, _, method in available):
        jobs.append(("coordinate", draw_coordinate))
    written = []
    for name, job in jobs:
        if progress:
            progress(name)
        written += save(job(read), folder, name)
    return written
