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
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from sgdol.paper.experiments import FIGURES
from sgdol.paper.figures.looks import LOOKS, STYLE, Look
from sgdol.paper.figures.panels import draw, draw_coordinate, draw_evaluations
from sgdol.paper.figures.search import draw_tuning
from sgdol.paper.files import write_atomically
from sgdol.paper.measures import Reader

__all__ = [
    "LOOKS",
    "Look",
    "draw",
    "draw_coordinate",
    "draw_evaluations",
    "draw_tuning",
    "save",
    "write_figures",
]


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

    def has_runs(number: int) -> bool:
        experiment, layout = FIGURES[number]
        return any(name == experiment.name and method in layout.methods for name, _, method in available)

    jobs: list[tuple[str, Callable[[Reader], Figure]]] = [
        (f"figure{number}", functools.partial(draw, number)) for number in numbers if has_runs(number)
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
