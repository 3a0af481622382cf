"""What to reproduce, and how: the one object that a run is determined by."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import sgdol
from sgdol.paper.experiments import EXPERIMENTS, FIGURES
from sgdol.paper.files import shown
from sgdol.paper.methods import ADAGRAD_FORMS, METHODS
from sgdol.paper.problems import NOISE_MODELS, NoiseModel

__all__ = ["CHOICES", "DEFAULT_HORIZON", "QUICK_HORIZON", "Configuration", "Horizons", "MissingError", "ResultsError"]

CHOICES = ("figures", "only", "quick", "data")
"""What chooses which numbers are made, and does not change them (of the data, their hash counts)."""

ALWAYS = ("SGDOL Coordinate", "SGD GL")
"""What is run beyond the methods of a figure: section 6's variant and the step size of a worst-case bound."""

DEFAULT_HORIZON = 100_000
QUICK_HORIZON = 2_000
LEAST_NOISELESS = 1_000


class ResultsError(Exception):
    """A results folder that cannot be used; the message is one sentence that says why and what to do."""


class MissingError(ResultsError):
    """A result that was not made, or is not there any more."""


class Horizons(NamedTuple):
    """How many iterations the parts of an experiment take."""

    noisy: int
    noiseless: int
    tuning: int


@dataclass(frozen=True)
class Configuration:
    """What to reproduce, and how.

    Args:
        figures: which of the paper's figures, from 1 to 4.
        horizon: T, at least 10.
        repeats: how many times each noisy run is repeated; None for the paper's 40 on Rosenbrock and 5 on adult.
        noise_model: how sigma is read on Rosenbrock: of each coordinate, or of the total.
        seed: of everything that is drawn.
        alpha: SGDOL's alpha.
        data: a LIBSVM file to use instead of the shipped adult data.
        quick: a short horizon (2,000 unless ``horizon`` says otherwise).
        adagrad_form: whether AdaGrad Global's step size includes the current gradient.
        noiseless_horizon: T of the full-batch runs on adult, where one iteration costs as much as a hundred noisy ones;
            None for a tenth of the horizon, and no less than 1,000 if the horizon allows it.
        tuning_horizon: T of the search of the rates; None for that of the noiseless runs, and at most 100,000.
        only: the methods to run with noise, by the paper's names; none for all that the figures need.

    >>> Configuration(figures=(5,))
    Traceback (most recent call last):
        ...
    ValueError: figures must be among 1, 2, 3 and 4, got 5
    """

    figures: tuple[int, ...] = (1, 2, 3, 4)
    horizon: int = DEFAULT_HORIZON
    repeats: int | None = None
    noise_model: NoiseModel = "coordinate"
    seed: int = 0
    alpha: float = 10.0
    data: str | None = None
    quick: bool = False
    adagrad_form: str = "current"
    noiseless_horizon: int | None = None
    tuning_horizon: int | None = None
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.quick and self.horizon == DEFAULT_HORIZON:
            object.__setattr__(self, "horizon", QUICK_HORIZON)
        object.__setattr__(self, "figures", tuple(sorted(set(self.figures))))
        if self.data is not None:
            object.__setattr__(self, "data", os.fspath(self.data))
        self._check_names()
        self._check_numbers()

    def _check_names(self) -> None:
        if not self.figures:
            raise ValueError("figures must name at least one of 1, 2, 3 and 4, got none")
        for figure in self.figures:
            if figure not in FIGURES:
                raise ValueError(f"figures must be among 1, 2, 3 and 4, got {figure!r}")
        for method in self.only:
            if method not in METHODS:
                raise ValueError(f"method must be one of {', '.join(METHODS)}, got {shown(method)}")
        if self.noise_model not in NOISE_MODELS:
            raise ValueError(f"noise_model must be one of {NOISE_MODELS}, got {shown(self.noise_model)}")
        if self.adagrad_form not in ADAGRAD_FORMS:
            raise ValueError(f"adagrad_form must be one of {ADAGRAD_FORMS}, got {shown(self.adagrad_form)}")

    def _check_numbers(self) -> None:
        _integer("horizon", self.horizon, 10, 10**9)
        _integer("seed", self.seed, 0, 2**63 - 1)
        for name in ("repeats", "noiseless_horizon", "tuning_horizon"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 1 if name == "repeats" else 10, 10**9)
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float):
            raise ValueError(f"alpha must be a positive number, got {self.alpha!r}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha must be positive and finite, got {self.alpha!r}")

    def experiments(self) -> tuple[str, ...]:
        """The experiments that the figures need, Rosenbrock first."""
        wanted = {FIGURES[f][0].name for f in self.figures}
        return tuple(name for name in EXPERIMENTS if name in wanted)

    def methods(self, experiment: str) -> tuple[str, ...]:
        """The methods to run with noise: those of the figures, SGDOL Coordinate and SGD GL, unless only some are."""
        wanted = {*ALWAYS}.union(*(f.methods for f in EXPERIMENTS[experiment].figures if f.number in self.figures))
        return tuple(m for m in METHODS if m in wanted and (not self.only or m in self.only))

    def repeats_of(self, experiment: str) -> int:
        """How many repeats the experiment has."""
        return EXPERIMENTS[experiment].repeats if self.repeats is None else self.repeats

    def horizons(self, experiment: str) -> Horizons:
        """How many iterations the experiment's parts take.

        >>> Configuration().horizons("adult")
        Horizons(noisy=100000, noiseless=10000, tuning=10000)
        """
        noiseless, share = self.horizon, EXPERIMENTS[experiment].noiseless_share
        if share > 1:
            noiseless = self.noiseless_horizon or min(self.horizon, max(self.horizon // share, LEAST_NOISELESS))
        return Horizons(self.horizon, noiseless, self.tuning_horizon or min(noiseless, DEFAULT_HORIZON))

    def identity(self) -> dict[str, Any]:
        """Everything that the numbers depend on."""
        entries = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in CHOICES}
        return {**entries, "data": self.data_sha256(), "version": sgdol.__version__}

    def data_sha256(self) -> str:
        """The SHA-256 of the user's data file, or ``"shipped"``."""
        if self.data is None:
            return "shipped"
        try:
            return hashlib.sha256(Path(self.data).read_bytes()).hexdigest()
        except OSError as error:
            raise ResultsError(f"cannot read the data file {self.data}: {error.strerror}") from error


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")
