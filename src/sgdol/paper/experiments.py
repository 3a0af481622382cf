"""The paper's two experiments: everything that is true of one of them stands here and nowhere else.

An experiment is a problem, the levels of its noise, the figures that show it, the rates that are tried, and how long
its runs are. To add one, write its problem (:mod:`sgdol.paper.problems`) and one :class:`Experiment` in
:data:`EXPERIMENTS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sgdol.paper.data import balanced_adult
from sgdol.paper.problems import AdultClassifier, Problem, Rosenbrock
from sgdol.paper.tuning import Criterion, Grid

__all__ = [
    "ADULT",
    "EXPERIMENTS",
    "FIGURES",
    "ROSENBROCK",
    "TUNING",
    "Costs",
    "Experiment",
    "PaperFigure",
    "SearchLook",
    "iteration_cost",
]


@dataclass(frozen=True)
class PaperFigure:
    """A figure of the paper: a column for each level of noise, a row for each quantity."""

    number: int
    title: str
    methods: tuple[str, ...]
    rows: tuple[str, ...]
    caption: str


class SearchLook(NamedTuple):
    """How the experiment is drawn among the searches for the rates."""

    colour: str
    dashes: Any
    marker: str
    height: float
    """Where the crosses of diverged rates stand, as a share of the axis."""


class Costs(NamedTuple):
    """How long an iteration of each part takes, next to one another: for an estimate of the time left, no more."""

    tuning: float
    noiseless: float
    noisy: float


@dataclass(frozen=True)
class Experiment:
    """One experiment."""

    name: str
    build: Callable[[Any], Problem]
    """The problem, from a :class:`~sgdol.paper.configuration.Configuration`."""
    panels: Mapping[str, str]
    """The levels of noise in the order of the paper's columns, the noiseless one first, and their titles."""
    figures: tuple[PaperFigure, ...]
    grids: Mapping[str, Mapping[str, Grid]]
    """For each tuned method and each of its hyperparameters, the rates that are tried."""
    criterion: Criterion
    """Which of them is chosen."""
    repeats: int
    """How often the paper repeats each noisy run."""
    search_look: SearchLook
    costs: Costs
    optimum: float | None = None
    """f*, if it is known."""
    noiseless_share: int = 1
    """By how much the noiseless runs are shorter, where one of their iterations costs as much as many noisy ones."""
    uses_data: bool = False
    """Whether the noise is that of minibatches of the adult data."""
    gl_constants: str = field(default="")
    """How the constants of SGD GL were estimated, where they are not known."""

    @property
    def noises(self) -> tuple[str, ...]:
        """The names of the levels of noise, from none to the largest."""
        return tuple(self.panels)

    @property
    def noiseless(self) -> str:
        """The level without noise."""
        return self.noises[0]

    @property
    def noisy(self) -> tuple[str, ...]:
        """The levels with noise."""
        return self.noises[1:]

    @property
    def largest_noise(self) -> str:
        """The level with the most noise, which the paper's findings are about."""
        return self.noises[-1]

    @property
    def main(self) -> PaperFigure:
        """The figure of the paper's main comparison."""
        return self.figures[0]


_OTHER_METHODS = ("SGDOL Global", "AdaGrad Coordinate", "RMSProp", "AdaDelta", "AMSGrad", "Hypergradient")

_rosenbrock = functools.cache(Rosenbrock)  # compiled programs are kept by problem

ROSENBROCK = Experiment(
    name=Rosenbrock.name,
    build=lambda configuration: _rosenbrock(configuration.noise_model),
    panels={
        "sigma=0": "no noise",
        "sigma=0.2": "small noise, $\\sigma = 0.2$",
        "sigma=5": "large noise, $\\sigma = 5$",
    },
    figures=(
        PaperFigure(
            2,
            "The Rosenbrock function",
            ("SGDOL Global", "SGD", "SGD GL", "AdaGrad Global", "Adam"),
            ("mean_squared_gradient", "objective", "step_size"),
            "Top: mean squared gradient. Middle: optimality gap at x_t. Bottom: step sizes; Adam has none.",
        ),
        PaperFigure(
            3,
            "The Rosenbrock function, other methods",
            _OTHER_METHODS,
            ("mean_squared_gradient", "objective"),
            "Top: mean squared gradient. Bottom: optimality gap at x_t.",
        ),
    ),
    grids={
        "SGD": {"learning_rate": Grid(1e-6, 1e1)},
        "AdaGrad Global": {"learning_rate": Grid(1e-4, 1e3)},
        "AdaGrad Coordinate": {"learning_rate": Grid(1e-4, 1e3)},
        "Adam": {"learning_rate": Grid(1e-5, 1e2)},
        "RMSProp": {"learning_rate": Grid(1e-6, 1e1)},
        "AdaDelta": {"learning_rate": Grid(1e-3, 1e4)},
        "AMSGrad": {"learning_rate": Grid(1e-5, 1e2)},
        "Hypergradient": {"learning_rate": Grid(1e-6, 1e-1), "beta": Grid(1e-12, 1e-2, digits=(1,))},
    },
    criterion=Criterion(),
    repeats=40,
    search_look=SearchLook("#0072B2", "-", "o", 0.97),
    costs=Costs(tuning=2, noiseless=1.5, noisy=1),
    optimum=Rosenbrock.optimum,
)


def _adult_problem(configuration: Any) -> Problem:
    adult = balanced_adult(seed=configuration.seed, path=configuration.data)
    return AdultClassifier(adult.features, adult.labels)


ADULT = Experiment(
    name=AdultClassifier.name,
    build=_adult_problem,
    panels={
        "batch=all": "all samples (no noise)",
        "batch=50": "minibatch of 50",
        "batch=1": "minibatch of 1",
    },
    figures=(
        PaperFigure(
            1,
            "Classification of the adult data",
            ("SGDOL Global", "SGD", "AdaGrad Global", "Adam"),
            ("mean_squared_gradient", "step_size"),
            "Top: mean squared gradient, the running mean of ‖∇f(x_s)‖² over s ≤ t. Bottom: step sizes; Adam has none.",
        ),
        PaperFigure(
            4,
            "Classification of the adult data, other methods",
            _OTHER_METHODS,
            ("mean_squared_gradient",),
            "Mean squared gradient. The minimum is unknown, so no optimality gap is drawn. A label f(x_T) marks a run"
            " that ended above f(x_1) = 0.5: it jumped to a flat region, where gradients are small without"
            " convergence.",
        ),
    ),
    grids={
        "SGD": {"learning_rate": Grid(1e-2, 2e0)},
        "AdaGrad Global": {"learning_rate": Grid(1e-2, 2e0)},
        "AdaGrad Coordinate": {"learning_rate": Grid(1e-2, 2e0)},
        "Adam": {"learning_rate": Grid(5e-4, 5e-1)},
        "RMSProp": {"learning_rate": Grid(1e-4, 1e-1)},
        "AdaDelta": {"learning_rate": Grid(1e-2, 5e0)},
        "AMSGrad": {"learning_rate": Grid(5e-4, 5e-1)},
        "Hypergradient": {"learning_rate": Grid(5e-2, 1e0), "beta": Grid(1e-3, 1e1, digits=(1,))},
    },
    # Steps that jump to the flat region far away have small gradients too: they must also end near the best objective.
    criterion=Criterion(objective_tolerance=0.002),
    repeats=5,
    search_look=SearchLook("#D55E00", (0, (4, 1.5)), "s", 0.9),
    costs=Costs(tuning=700, noiseless=200, noisy=10),
    noiseless_share=10,
    uses_data=True,
    gl_constants="f* by the lowest objective of the searches, the variance by that at x_1",
)

TUNING = "tuning"
"""What the search for the rates is called among the parts of a run, where the others have their noise."""

EXPERIMENTS: Mapping[str, Experiment] = {experiment.name: experiment for experiment in (ROSENBROCK, ADULT)}
"""The experiments by name, in the order in which they are run."""

FIGURES: Mapping[int, tuple[Experiment, PaperFigure]] = {
    figure.number: (experiment, figure)
    for figure, experiment in sorted(
        ((f, e) for e in EXPERIMENTS.values() for f in e.figures), key=lambda pair: pair[0].number
    )
}
"""The paper's figures by number, each with its experiment."""


def iteration_cost(part: str) -> float:
    """How long an iteration of a part of the reproduction takes, next to those of the others.

    >>> iteration_cost("adult: tuning") > iteration_cost("adult: batch=1: SGD")
    True
    """
    name, what = part.split(": ")[:2]
    costs = EXPERIMENTS[name].costs
    if what == TUNING:
        return costs.tuning
    return costs.noiseless if what == EXPERIMENTS[name].noiseless else costs.noisy
