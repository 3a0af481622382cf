"""Draw docs/explanation/unknown_smoothness.png: what a guess of M that is too small costs, with a proof and without.

    python scripts/draw_unknown_smoothness.py

Two problems with every assumption of the theorems: f = 1 - cos x, and f = sum a_i (sqrt(1 + x_i^2) - 1) in ten
dimensions, M = 1 in both, with noise of two values per coordinate. Every method gets the same number of stochastic
gradients. Shown is E ||grad f||^2 at what the theorems speak of: a uniformly random iterate, for the grid the selected
candidate; the mean over repeats. The numbers are printed as a table too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

from sgdol import reference_free, reference_tested

mpl.use("Agg")
import matplotlib.pyplot as plt

Vector = NDArray[np.float64]
Oracle = Callable[[Vector], Vector]

FIGURE = Path(__file__).parents[1] / "docs" / "explanation" / "unknown_smoothness.png"
RATIOS = 10.0 ** np.arange(-4, 0.1, 0.5)
GRADIENTS = 60_000
REPEATS = 6
ALPHA = 1.0


class Problem(NamedTuple):
    """An objective with M = 1 and noise of two values per coordinate."""

    name: str
    x1: Vector
    value: Callable[[Vector], float]
    gradient: Callable[[Vector], Vector]
    noise: Vector
    lipschitz: float


SCALES = np.geomspace(1.0, 0.1, 10)
PROBLEMS = (
    Problem("1 - cos x, noise 0.2", np.array([2.0]), lambda x: float(1 - np.cos(x[0])), np.sin, np.array([0.2]), 1.2),
    Problem(
        "ten dimensions, noise half of the slope",
        np.full(10, 3.0),
        lambda x: float(SCALES @ (np.sqrt(1 + x**2) - 1)),
        lambda x: SCALES * x / np.sqrt(1 + x**2),
        0.5 * SCALES,
        1.5 * float(np.linalg.norm(SCALES)),
    ),
)


def stochastic(problem: Problem, seed: int) -> Oracle:
    """Fresh gradients of a problem."""
    rng = np.random.default_rng(seed)

    def signs() -> Iterator[Vector]:
        while True:  # in blocks: a generator call for each gradient would be half of the time
            yield from rng.choice([-1.0, 1.0], size=(4096, len(problem.noise)))

    stream = signs()
    return lambda x: problem.gradient(x) + problem.noise * next(stream)


def mean_square(problem: Problem, points: Vector) -> float:
    """The mean of ||grad f||^2 over some points."""
    return float(np.mean([np.sum(problem.gradient(x) ** 2) for x in points]))


def known(problem: Problem, ratio: float, seed: int) -> float:
    """SGDOL as the paper has it, with M = 1."""
    steps = GRADIENTS // 2
    oracle, x, U, N, total = stochastic(problem, seed), problem.x1, 0.0, 0.0, 0.0
    for _ in range(steps):
        total += float(np.sum(problem.gradient(x) ** 2))
        s = min(max((ALPHA + U) / (ALPHA + N), 0.0), 2.0)
        g, other = oracle(x), oracle(x)
        U, N, x = U + float(g @ other), N + float(g @ g), x - s * g
    return total / steps


def tested(kind: str) -> Callable[[Problem, float, int], float]:
    """One run that tests its guess, in one of three ways."""

    def measure(problem: Problem, ratio: float, seed: int) -> float:
        run = reference_tested.run_with_test(
            stochastic(problem, seed),
            problem.x1,
            GRADIENTS // (2 if kind == "two" else 3),
            guess=ratio,
            alpha=ALPHA,
            lipschitz=problem.lipschitz,
            test=kind,  # type: ignore[arg-type]
            seed=seed,
        )
        return mean_square(problem, run.iterates)

    return measure


def grid(problem: Problem, ratio: float, seed: int) -> float:
    """A run for each guess up to M, and a selection."""
    runs = 1 + math.ceil(-math.log2(ratio) - 1e-9)
    found = reference_tested.grid_and_selection(
        stochastic(problem, seed), problem.x1, GRADIENTS // 2, guess=ratio, runs=runs, alpha=ALPHA, seed=seed
    )
    return mean_square(problem, found.candidates[[found.selected]])


def adagrad_norm(problem: Problem, ratio: float, seed: int) -> float:
    """Ward, Wu and Bottou 2019; its rate is such that the first step is g_1/m_0."""
    oracle, x, squares, rate, total = stochastic(problem, seed), problem.x1, 0.0, 0.0, 0.0
    for t in range(GRADIENTS):
        total += float(np.sum(problem.gradient(x) ** 2))
        g = oracle(x)
        squares += float(g @ g)
        if t == 0:
            rate = math.sqrt(squares) / ratio
        x = x - rate / math.sqrt(squares) * g
    return total / GRADIENTS


def dog(problem: Problem, ratio: float, seed: int) -> float:
    """Ivgi, Hinder and Carmon 2023, with their first movement."""
    oracle, x, squares, total = stochastic(problem, seed), problem.x1, 0.0, 0.0
    farthest = 1e-4 * (1 + float(np.linalg.norm(x)))
    for _ in range(GRADIENTS):
        total += float(np.sum(problem.gradient(x) ** 2))
        g = oracle(x)
        squares += float(g @ g)
        x = x - farthest / math.sqrt(squares) * g
        farthest = max(farthest, float(np.linalg.norm(x - problem.x1)))
    return total / GRADIENTS


def free(problem: Problem, ratio: float, seed: int) -> float:
    """SGDOLFree as the reference has it; a batch of two halves, of which looking back takes about every ninth."""
    steps = int(GRADIENTS / 2 / 1.1)
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], size=(steps, 2, len(problem.noise)))

    def batch(t: int, x: Vector) -> tuple[float, Vector]:
        noise = problem.noise * signs[t]
        return problem.value(x) + float(noise.mean(axis=0) @ x), problem.gradient(x) + noise

    run = reference_free.sgdol_free(batch, problem.x1, steps)
    return mean_square(problem, run.iterates[:-1])


METHODS: dict[str, tuple[Callable[[Problem, float, int], float], str, str, bool]] = {
    "SGDOL, M known": (known, "#000000", "--", False),
    "tested run, three gradients": (tested("three"), "#0072B2", "-", True),
    "tested run, two gradients": (tested("two"), "#56B4E9", "-", True),
    "tested run without L": (tested("symmetric"), "#009E73", "-", True),
    "grid and selection": (grid, "#D55E00", "-", True),
    "AdaGrad-Norm, first step g/m₀": (adagrad_norm, "#CC79A7", "-.", True),
    "DoG": (dog, "#808080", ":", False),
    "SGDOLFree": (free, "#E69F00", ":", False),
}
"""What measures it, its colour and dashes, and whether it depends on the guess."""


def main() -> None:
    """Measure, print the tables and draw."""
    global GRADIENTS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gradients", type=int, default=GRADIENTS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path, default=FIGURE)
    arguments = parser.parse_args()
    GRADIENTS = arguments.gradients
    figure, axes = plt.subplots(1, len(PROBLEMS), figsize=(10, 4.2), layout="constrained", sharey=False)
    for axis, problem in zip(axes, PROBLEMS, strict=True):
        print(f"\n| {problem.name}, m₀/M = | " + " | ".join(f"{r:.0e}" for r in RATIOS[::2]) + " |")
        print("|---|" + "---:|" * len(RATIOS[::2]))
        for name, (measure, colour, dashes, depends) in METHODS.items():
            at = RATIOS if depends else RATIOS[:1]
            line = [float(np.mean([measure(problem, r, seed) for seed in range(arguments.repeats)])) for r in at]
            line = line if depends else line * len(RATIOS)
            print(f"| {name} | " + " | ".join(f"{value:.1e}" for value in line[::2]) + " |", flush=True)
            axis.plot(RATIOS, line, color=colour, linestyle=dashes, label=name, linewidth=1.6)
        axis.set(xscale="log", yscale="log", xlabel="first guess of the smoothness, m₀/M", title=problem.name)
        axis.grid(visible=True, color="#e6e6e6", linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("E ‖∇f‖²")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
