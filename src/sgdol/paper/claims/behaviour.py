"""What section 7 says of the curves, as parts: of adult in the text, of Rosenbrock's function in the appendix.

The parts at the largest noise are main: the paper's findings are about what noise does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from sgdol.paper.claims._check import COMPARABLE, STALL
from sgdol.paper.experiments import Experiment
from sgdol.paper.measures import Curve, Number, Reader, factor, final_ratio, jackknife, part, ratio_of_means
from sgdol.paper.verdict import Part

__all__ = [
    "SGDOL",
    "better_than_fixed",
    "comparable",
    "converges",
    "gradual_decrease",
    "level_depends",
    "recovers_sgd",
    "same_step_at_first",
    "sooner",
    "stalls",
]

SGDOL = "SGDOL Global"


def _curves(read: Reader, experiment: Experiment, noise: str, *methods: str) -> list[Curve | None]:
    return [read.curve(experiment.name, noise, method) for method in methods]


def same_step_at_first(read: Reader, experiment: Experiment) -> Iterable[Part]:
    """The relative distance between SGDOL's step size and SGD's: at the first iteration, and in the first ten."""

    def distance(until: int) -> Callable[[Curve, Curve], Number]:
        def measure(sgdol: Curve, sgd: Curve) -> Number:
            early = sgdol.t <= until
            base = float(sgd.attrs["learning_rate"])

            def largest(steps: NDArray[np.float64]) -> float:
                return float(np.abs(steps[:, early].mean(axis=0) / base - 1).max())

            return jackknife(largest, sgdol.values("step_size"))

        return measure

    for noise in experiment.noises:
        curves = _curves(read, experiment, noise, SGDOL, "SGD")
        main = noise == experiment.largest_noise
        yield part(f"{noise}: relative distance at the first iteration", curves, distance(1), "<=", 1e-9, main=main)
        what = f"{noise}: largest relative distance in the first ten iterations"
        yield part(what, curves, distance(10), "<=", 0.05)


def gradual_decrease(read: Reader, experiment: Experiment) -> Iterable[Part]:
    """How much SGDOL's step size falls under noise (main at the largest), and whether it ever rises."""

    def shrinkage(curve: Curve) -> Number:
        return jackknife(lambda steps: float(steps[:, -1].mean() / steps[:, 0].mean()), curve.values("step_size"))

    def rise(curve: Curve) -> float:
        steps = curve.step_size
        return float((steps - np.minimum.accumulate(steps)).max() / steps[0])

    for noise in experiment.noisy:
        curve = _curves(read, experiment, noise, SGDOL)
        main = noise == experiment.largest_noise
        yield part(f"{noise}: last step size over the first", curve, shrinkage, "<=", 0.5, main=main)
        yield part(f"{noise}: largest rise above an earlier step size, over the first", curve, rise, "<=", 0.05)


def sooner(read: Reader, experiment: Experiment) -> Iterable[Part]:
    """When SGDOL's step size starts to fall, between neighbouring levels of noise."""

    def ratio(more: Curve, less: Curve) -> float:
        if math.isinf(less.decrease_starts()):
            return 1.0 if math.isinf(more.decrease_starts()) else 0.0
        return more.decrease_starts() / less.decrease_starts()

    none, small, large = experiment.noises
    for more, less in ((small, none), (large, small)):
        yield part(
            f"start under {more} over start under {less}",
            [read.curve(experiment.name, noise, SGDOL) for noise in (more, less)],
            ratio,
            "<=",
            0.8,
            main=more == large,
        )


def recovers_sgd(read: Reader, experiment: Experiment) -> Iterable[Part]:
    """The largest relative distance between SGDOL's and SGD's running means without noise."""

    def distance(sgdol: Curve, sgd: Curve) -> float:
        one, other = (c.values("mean_squared_gradient").mean(axis=0) for c in (sgdol, sgd))
        return float(np.abs(one / other - 1).max())

    noise = experiment.noiseless
    yield part(
        f"{noise}: largest relative distance of the running means, any t",
        _curves(read, experiment, noise, SGDOL, "SGD"),
        distance,
        "<=",
        0.01,
        main=True,
    )


def converges(read: Reader, experiment: Experiment, method: str) -> Iterable[Part]:
    """The decade ratio of a method under noise, which is to be small."""
    for noise in experiment.noisy:
        yield part(
            f"{method}, {noise}: decade ratio",
            _curves(read, experiment, noise, method),
            Curve.decade_ratio,
            "<=",
            STALL,
            main=noise == experiment.largest_noise,
        )


def stalls(read: Reader, experiment: Experiment, methods: Iterable[str]) -> Iterable[Part]:
    """The decade ratio of some methods under noise, which is to be large."""
    for method in methods:
        for noise in experiment.noisy:
            yield part(
                f"{method}, {noise}: decade ratio",
                _curves(read, experiment, noise, method),
                Curve.decade_ratio,
                ">=",
                STALL,
                main=noise == experiment.largest_noise,
            )


def comparable(read: Reader, experiment: Experiment, method: str) -> Iterable[Part]:
    """The factor between a method's running mean at the horizon and SGDOL's, whichever is larger."""
    for noise in experiment.noises:
        yield part(
            f"{noise}: running means of {SGDOL} and {method}, the larger over the smaller",
            _curves(read, experiment, noise, SGDOL, method),
            factor,
            "<=",
            COMPARABLE,
            main=noise == experiment.largest_noise,
        )


def level_depends(read: Reader, experiment: Experiment) -> Iterable[Part]:
    """The level of SGD and Adam under the largest noise over that under the smaller one."""

    def ratio(more: Curve, less: Curve) -> Number:
        return jackknife(ratio_of_means, more.level, less.level)

    _, small, large = experiment.noises
    for method in ("SGD", "Adam"):
        yield part(
            f"{method}: level under {large} over level under {small}",
            [read.curve(experiment.name, noise, method) for noise in (large, small)],
            ratio,
            ">=",
            COMPARABLE,
            main=True,
        )


def better_than_fixed(read: Reader, experiment: Experiment) -> Iterable[Part]:
    """SGDOL's running mean at the horizon over that of SGD, which is SGDOL without the decrease."""
    for noise in experiment.noisy:
        yield part(
            f"{noise}: running mean of {SGDOL} over that of SGD",
            _curves(read, experiment, noise, SGDOL, "SGD"),
            final_ratio,
            "<=",
            1.0,
            main=noise == experiment.largest_noise,
        )
