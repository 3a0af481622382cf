"""Figures 1 to 4 of the paper, and two more of the same runs."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from sgdol.paper.experiments import EXPERIMENTS, FIGURES, Experiment
from sgdol.paper.figures.drawing import draw_curve, finish, frame, frame_step_sizes, repeats_note, scales
from sgdol.paper.figures.looks import QUANTITIES, STYLE, handle, legend_label
from sgdol.paper.measures import Curve, Reader

__all__ = ["draw", "draw_coordinate", "draw_evaluations"]


_ROWS = sorted(EXPERIMENTS.values(), key=lambda experiment: experiment.main.number)
"""The experiments in the order of the paper's figures."""


def draw(number: int, read: Reader) -> Figure:
    """A figure of the paper by its number, 1 to 4, from whatever the results have of it.

    Raises:
        ValueError: if the paper has no such figure.
    """
    if number not in FIGURES:
        raise ValueError(f"figure must be one of {', '.join(map(str, FIGURES))}, got {number!r}")
    experiment, layout = FIGURES[number]
    with mpl.rc_context(STYLE):
        legend_columns = 4 if len(layout.methods) == 4 else 3
        legend_rows = -(-len(layout.methods) // legend_columns)
        figure, axes = frame(len(layout.rows), 3, 1.75, legend_rows, sharex="col", sharey="row")
        found: dict[str, Curve] = {}
        for column, (noise, title) in enumerate(experiment.panels.items()):
            axes[0, column].set_title(title, pad=7)
            for order, method in enumerate(layout.methods):
                curve = read.curve(experiment.name, noise, method)
                if curve is None:
                    continue
                found.setdefault(method, curve)
                for row, quantity in enumerate(layout.rows):
                    draw_curve(axes[row, column], curve, method, quantity, (order + 0.5) / len(layout.methods))
        for (row, _), axis in np.ndenumerate(axes):
            scales(axis, layout.rows[row])
        for row, quantity in enumerate(layout.rows):
            axes[row, 0].set_ylabel(QUANTITIES[quantity])
            if quantity == "step_size" and "SGDOL Global" in found:
                frame_step_sizes(axes[row], 2 / float(found["SGDOL Global"].attrs["smoothness"]))
        for axis in axes[-1]:
            axis.set_xlabel("iteration")
        figure.align_ylabels(axes[:, 0])
        handles = [handle(method, legend_label(method, curve.attrs)) for method, curve in found.items()]
        noisy = [
            c for noise in experiment.noisy for m in layout.methods if (c := read.curve(experiment.name, noise, m))
        ]
        finish(figure, f"Figure {number}. {layout.title}", handles, legend_columns, repeats_note(noisy))
    return figure


def _draw_grid(
    read: Reader, methods: list[tuple[Experiment, tuple[str, ...]]], title: str, by_gradients: bool
) -> Figure:
    """The mean squared gradient of some methods, a row for each experiment."""
    with mpl.rc_context(STYLE):
        names = list(dict.fromkeys(name for _, group in methods for name in group))
        legend_columns = min(len(names), 4 if not by_gradients else 5)
        figure, axes = frame(len(methods), 3, 1.9, -(-len(names) // legend_columns), sharex="row", sharey="row")
        figure.subplots_adjust(hspace=0.42)
        every = []
        for row, (experiment, group) in enumerate(methods):
            for column, (noise, panel) in enumerate(experiment.panels.items()):
                axis = axes[row, column]
                axis.set_title(f"{experiment.name}: {panel}" if column == 0 else panel, pad=6)
                for order, method in enumerate(group):
                    curve = read.curve(experiment.name, noise, method)
                    if curve is None:
                        continue
                    every.append(curve)
                    factor = float(curve.attrs.get("gradients_per_iteration", 1)) if by_gradients else 1.0
                    draw_curve(axis, curve, method, "mean_squared_gradient", (order + 0.5) / len(group), factor)
                scales(axis, "mean_squared_gradient")
            axes[row, 0].set_ylabel(QUANTITIES["mean_squared_gradient"])
        for axis in axes[-1]:
            axis.set_xlabel("gradient evaluations" if by_gradients else "iteration")
        finish(figure, title, [handle(name, name) for name in names], legend_columns, repeats_note(every))
    return figure


def draw_evaluations(read: Reader) -> Figure:
    """Figures 1 and 2 by gradient evaluations, of which an iteration of SGDOL takes two."""
    methods = [(experiment, experiment.main.methods) for experiment in _ROWS]
    return _draw_grid(read, methods, "The same runs by gradient evaluations", by_gradients=True)


def draw_coordinate(read: Reader) -> Figure:
    """SGDOL with a step size for each coordinate (section 6), which the paper's experiments leave out."""
    group = ("SGDOL Global", "SGDOL Coordinate", "AdaGrad Coordinate")
    return _draw_grid(
        read,
        [(experiment, group) for experiment in _ROWS],
        "SGDOL with one step size for each coordinate",
        by_gradients=False,
    )
