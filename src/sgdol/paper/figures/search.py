"""The search for the rates."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from sgdol.paper.experiments import EXPERIMENTS, SearchLook
from sgdol.paper.figures.drawing import finish, frame
from sgdol.paper.figures.looks import STYLE
from sgdol.paper.measures import Reader
from sgdol.paper.methods import methods

__all__ = ["draw_tuning"]

LARGEST_RATIO = 1e4
"""The search for the rates is drawn up to this many times the chosen rate's value, and down to as little of it."""


def draw_tuning(read: Reader) -> Figure:
    """The search for each method's rate on the noiseless problems, with the rate that was chosen."""
    tuned = [name for name, method in methods().items() if method.tuned]
    with mpl.rc_context(STYLE):
        figure, axes = frame(2, 4, 1.8, 1, sharey=True)
        figure.subplots_adjust(hspace=0.42, wspace=0.1)
        for axis, method in zip(axes.flat, tuned, strict=True):
            axis.set_title(method, pad=5)
            axis.set_xscale("log")
            axis.set_yscale("log")
            for experiment in EXPERIMENTS.values():
                tuning = read.tuning(experiment.name, method)
                if tuning is not None:
                    _draw_search(axis, experiment.search_look, tuning)
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
            Line2D([], [], color=look.colour, linestyle=look.dashes, marker=look.marker, markersize=3.5, label=name)
            for name, look in ((experiment.name, experiment.search_look) for experiment in EXPERIMENTS.values())
        ]
        ring = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "markeredgewidth": 1.4}
        handles.append(Line2D([], [], linestyle="none", color="#333333", label="chosen", **ring))  # type: ignore[arg-type]
        handles.append(Line2D([], [], linestyle="none", color="#333333", label="diverged", marker="x", markersize=5))
        finish(figure, "The search for the learning rates, without noise", handles, 4, "each point is a whole run")
    return figure


def _draw_search(axis: Axes, look: SearchLook, tuning: Any) -> None:
    colour, dashes, marker, height = look
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
    axis.plot(
        rates[lost],
        np.full(lost.sum(), height),
        color=colour,
        marker="x",
        markersize=4.5,
        linestyle="none",
        transform=axis.get_xaxis_transform(),
    )
