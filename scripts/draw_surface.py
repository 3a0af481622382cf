"""Draw docs/surface.gif: SGD, Adam and SGDOLFree on the Rosenbrock function, with look-backs and rejected steps.

    python scripts/draw_surface.py

The problem is the paper's: f(x, y) = (1 - x)^2 + 100 (y - x^2)^2 from (0, 0), every gradient with Gaussian noise of
standard deviation 0.2. SGD (momentum 0.9) and Adam have the best of the rates below, chosen by f after the last step;
SGDOLFree has no rate. One step is two noisy gradients for everybody.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

from sgdol import SGDOLFree

FIGURE = Path(__file__).parents[1] / "docs" / "surface.gif"
STEPS, NOISE, SEED = 150, 0.2, 0
RATES = [a * 10.0**b for b in (-4, -3, -2, -1) for a in (1, 2, 5)]
FRAMES = [*range(1, 41), *range(42, 80, 2), *range(80, STEPS + 1, 5)]
COLOURS = {"SGD": "#0072B2", "Adam": "#E69F00", "SGDOLFree": "#D55E00"}


def rosenbrock(x: Any, y: Any) -> Any:
    """The function; its minimum is 0, at (1, 1)."""
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


@dataclass
class Run:
    """Where an optimizer went, and which other points its steps evaluated."""

    name: str
    points: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)])
    looked: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    """Step -> the points at which the batch was evaluated besides the one that the step began at."""
    rejected: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Step -> the point that the step left, because the step to it was too long."""

    def values(self) -> list[float]:
        """The function at every point."""
        with np.errstate(over="ignore", invalid="ignore"):
            return [float(value) for value in rosenbrock(*np.array(self.points).T)]


def run(name: str, make: Callable[[Any], torch.optim.Optimizer]) -> Run:
    """150 steps from (0, 0)."""
    noises = NOISE * torch.randn(STEPS, 2, 2, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = make([x])
    found = Run(name)
    for step, noise in enumerate(noises, start=1):
        evaluated: list[tuple[float, float]] = []

        def closure(noise: torch.Tensor = noise, evaluated: list[Any] = evaluated) -> float:
            opt.zero_grad()
            evaluated.append(tuple(x.detach().tolist()))
            losses = [(rosenbrock(*x) + row @ x) / 2 for row in noise]
            for loss in losses:
                loss.backward()
            return float(sum(loss.detach() for loss in losses))

        before = opt.diagnostics() if isinstance(opt, SGDOLFree) else {"rejections": 0}
        opt.step(closure)
        found.points.append(tuple(x.detach().tolist()))
        found.looked[step] = evaluated[1:]
        if isinstance(opt, SGDOLFree) and opt.diagnostics()["rejections"] > before["rejections"]:
            found.rejected[step] = evaluated[0]
    return found


def best(name: str, make: Callable[[Any, float], torch.optim.Optimizer]) -> Run:
    """The run at the rate with the smallest f at the end."""
    runs = {
        rate: run(f"{name}, lr {rate:g}, best of {len(RATES)}", lambda p, rate=rate: make(p, rate)) for rate in RATES
    }
    ends = {rate: found.values()[-1] for rate, found in runs.items()}
    return runs[min(ends, key=lambda rate: ends[rate] if math.isfinite(ends[rate]) else math.inf)]


def frame(runs: list[Run], step: int) -> Image.Image:
    """The picture after a number of steps: a map for each optimizer, and f."""
    with mpl.rc_context({"font.size": 9}):
        figure = Figure(figsize=(11.2, 3.3), dpi=90, layout="constrained")
        *maps, curve = figure.subplots(1, len(runs) + 1, width_ratios=(1, 1, 1, 1.25))
        x, y = np.meshgrid(np.linspace(-0.25, 1.25, 200), np.linspace(-0.3, 1.3, 200))
        for each, surface in zip(runs, maps, strict=True):
            colour = COLOURS[each.name.split(",")[0]]
            surface.contour(
                x, y, rosenbrock(x, y), levels=np.geomspace(0.01, 300, 14), colors="#c8c8c8", linewidths=0.6
            )
            surface.plot(1, 1, "*", color="black", markersize=10)
            surface.set(xlim=(-0.25, 1.25), ylim=(-0.3, 1.3), xticks=[], yticks=[])
            surface.set_title(each.name, loc="left", fontsize=9, color=colour, fontweight="bold")
            _path(surface, each, step, colour)
            curve.plot(each.values()[: step + 1], color=colour, lw=1.5)
        maps[-1].plot([], [], ":o", color="black", mfc="white", markersize=6, lw=1, label="look-back in this step")
        maps[-1].plot([], [], "X", color="#CC0000", markersize=7, label="step rejected and taken back")
        maps[-1].legend(loc="upper left", fontsize=8, framealpha=0.9, edgecolor="none")
        curve.set_title(f"f after {step} steps of two gradients", loc="left", fontsize=9)
        curve.set(xlim=(0, STEPS), ylim=(1e-4, 5), yscale="log", xlabel="step")
        curve.grid(visible=True, color="#e6e6e6", linewidth=0.5)
        curve.spines[["top", "right"]].set_visible(False)
        file = io.BytesIO()
        figure.savefig(file, format="png")
    return Image.open(file).convert("RGB")


def _path(surface: Any, each: Run, step: int, colour: str) -> None:
    so_far = np.array(each.points[: step + 1])
    surface.plot(*so_far.T, "-", color=colour, lw=1.3)
    surface.plot(*so_far.T, ".", color=colour, markersize=3.5)
    surface.plot(*so_far[-1], "o", color=colour, markersize=7)
    for when, point in each.rejected.items():
        if when <= step:
            surface.plot(*point, "X", color="#CC0000", markersize=7)
    for other in each.looked[step]:  # a line to each point at which this step evaluated its batch as well
        start = each.rejected.get(step, each.points[step - 1])
        surface.plot(*zip(start, other, strict=True), ":", color="black", lw=1)
        surface.plot(*other, "o", mfc="white", mec="black", markersize=6)


def main() -> None:
    """Run the three, and draw."""
    torch.set_num_threads(1)
    runs = [
        best("SGD", lambda p, rate: torch.optim.SGD(p, lr=rate, momentum=0.9)),
        best("Adam", lambda p, rate: torch.optim.Adam(p, lr=rate)),
        run("SGDOLFree, no learning rate", SGDOLFree),
    ]
    for each in runs:
        others = sum(map(len, each.looked.values()))
        print(f"{each.name}: f = {each.values()[-1]:.2g}, {others} look-backs, {len(each.rejected)} rejected")
    palette = frame(runs, next(iter(runs[2].rejected), STEPS)).quantize(255)
    pictures = [frame(runs, step).quantize(palette=palette, dither=Image.Dither.NONE) for step in FRAMES]
    waits = [500 if step in runs[2].rejected else 160 if step <= 40 else 90 for step in FRAMES[:-1]]
    pictures[0].save(
        FIGURE, save_all=True, append_images=pictures[1:], duration=[*waits, 5000], loop=0, optimize=True, disposal=1
    )
    print(f"{FIGURE.name}: {FIGURE.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
