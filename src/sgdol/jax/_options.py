"""Every option of the optimizer: name, order, default and check, once.

A factory takes what an options class takes: :func:`takes` gives it the class's signature, for people, for editors and
for ``optax.inject_hyperparams``, which looks at it.
"""
# No postponed annotations here: optax's own tests look at learning_rate's for its type.

import difflib
import functools
import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import optax

from sgdol import metrics, surrogate
from sgdol.jax._blocks import GRANULARITIES, Granularity
from sgdol.jax._checks import check_choice, check_number, is_given, shown
from sgdol.learners import Learner, MeasuredCurvature, suggested_kappa, uses_hindsight
from sgdol.metrics import Metric

__all__ = ["Options", "Scaling", "takes"]

Number = float | jax.Array
P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

_LAST_COUNT = 2**31 - 1
"""Where counts of updates stop."""


# The order of the options is that of the classes below, the last of a list of bases first -----------------------------


@dataclass(eq=False)
class _Rate:
    learning_rate: optax.ScalarOrSchedule = None
    _: KW_ONLY
    smoothness: Number | None = None


@dataclass(eq=False, kw_only=True)
class _Learning:
    alpha: Number | None = None
    kappa: Number | None = None
    estimator: surrogate.Estimator = "symmetric"
    granularity: Granularity = "global"
    momentum: Number | None = 0.9
    bias_correction: bool | None = None
    statistics: surrogate.MomentumStatistics = "direction"
    epoch: int | jax.Array | None = None
    weight_decay: Number | None = None


@dataclass(eq=False, kw_only=True)
class _Averaging:
    averaging: Number | None = None


@dataclass(eq=False, kw_only=True)
class _Parts:
    learner: Learner | None = None
    metric: str | Metric = "euclidean"
    param_labels: Any | Callable[[Any], Any] = None
    axis_name: str | tuple[str, ...] | None = None
    record: bool = True


@dataclass(eq=False, kw_only=True)
class Scaling(_Parts, _Learning):
    """What direction and multiplier depend on, checked; options that ask for nothing are None."""

    def __post_init__(self) -> None:
        self.learner = learner = _learner(self.learner)
        self._check_alpha(learner)
        check_choice("estimator", self.estimator, surrogate.ESTIMATORS)
        check_choice("granularity", self.granularity, GRANULARITIES)
        check_choice("statistics", self.statistics, surrogate.MOMENTUM_STATISTICS)
        self.momentum = _optional("momentum", self.momentum, lambda beta: 0 <= beta < 1, "at least 0 and less than 1")
        self.weight_decay = _optional("weight_decay", self.weight_decay, lambda c: c >= 0, "at least 0 and finite")
        if (self.granularity == "group") != (self.param_labels is not None):
            raise ValueError(
                f'param_labels belongs to granularity="group", got granularity={self.granularity!r} and '
                f"param_labels={shown(self.param_labels)}"
            )
        names = self.axis_name if isinstance(self.axis_name, tuple) else (self.axis_name,)
        if self.axis_name is not None and not (names and all(isinstance(name, str) for name in names)):
            raise TypeError(f"axis_name must be a name, a tuple of names or None, got {shown(self.axis_name)}")
        if not isinstance(self.record, bool):
            raise TypeError(f"record must be True or False, got {shown(self.record)}")
        self._check_momentum(learner)
        self.metric = metrics.get(self.metric)
        if self.granularity == "coordinate" and not metrics.is_diagonal(self.metric):
            allowed = ", ".join(repr(name) for name, metric in metrics.METRICS.items() if metrics.is_diagonal(metric))
            raise ValueError(
                f'granularity="coordinate" needs a metric whose D is a diagonal matrix: {allowed} or an object with '
                f"diagonal = True, got metric={shown(self.metric)}"
            )

    def _check_alpha(self, learner: Learner) -> None:
        if self.alpha is not None:
            self.alpha = check_number(
                "alpha", self.alpha, lambda a: a > 0, "positive and finite, or None", of_any_size=True
            )
        if self.alpha is not None and self.kappa is not None:
            raise ValueError(
                f"give alpha or kappa, not both: got alpha={shown(self.alpha)} and kappa={shown(self.kappa)} "
                "(kappa is in units of the first squared gradient)"
            )
        kappa = suggested_kappa(learner) if self.kappa is None else self.kappa
        self.kappa = check_number("kappa", kappa, lambda c: c > 0, "positive and finite, or None", of_any_size=True)

    def _check_momentum(self, learner: Learner) -> None:
        if self.bias_correction is None:
            self.bias_correction = not uses_hindsight(learner)
        if not isinstance(self.bias_correction, bool):
            raise TypeError(f"bias_correction must be True, False or None, got {shown(self.bias_correction)}")
        if self.epoch is None:
            return
        words = "a whole number of updates, at least 2, or None"
        epoch = check_number("epoch", self.epoch, lambda b: b >= 2 and b == int(b), words, of_any_size=True)
        self.epoch = min(int(epoch), _LAST_COUNT) if isinstance(epoch, float) else epoch
        if self.estimator == "paper":
            raise ValueError('epoch corrects estimator="symmetric", got estimator="paper"')


@dataclass(eq=False, kw_only=True)
class Options(_Parts, _Averaging, _Learning, _Rate):
    """All options of :func:`sgdol.jax.sgdol`, checked; :attr:`learning_rate` is there also if M was given."""

    def __post_init__(self) -> None:
        if (self.learning_rate is None) == (self.smoothness is None):
            both = f"{shown(self.learning_rate)} and {shown(self.smoothness)}"
            given = "neither" if self.learning_rate is None else both
            raise ValueError(
                "give learning_rate or smoothness ((1 - momentum) / learning_rate), exactly one of the two, got "
                f"{given}"
            )
        if self.smoothness is not None:
            smoothness = check_number("smoothness", self.smoothness, lambda m: m > 0, "positive and finite")
            check_number("smoothness", smoothness, _has_an_inverse, "such that 1 / smoothness is positive and finite")
            self.smoothness = smoothness
        elif not callable(self.learning_rate):
            self.learning_rate = check_number(
                "learning_rate", self.learning_rate, lambda rate: rate > 0, "positive and finite"
            )
        if self.averaging is not None:
            self.averaging = check_number(
                "averaging", self.averaging, lambda a: a >= 0, "at least 0 and finite, or None"
            )
        self.scaling = scaling = Scaling(
            **{name: getattr(self, name) for name in inspect.signature(Scaling).parameters}
        )
        if self.smoothness is not None:
            self.learning_rate = (1.0 if scaling.momentum is None else 1 - scaling.momentum) / self.smoothness


def _has_an_inverse(m: float) -> bool:
    kind = jnp.finfo(jnp.result_type(float))
    return m > 0 and float(kind.tiny) <= 1 / m <= float(kind.max)


def _optional(name: str, value: Any, allowed: Callable[[float], bool], words: str) -> Any:
    if value is not None:
        value = check_number(name, value, allowed, f"{words}, or None")
    return value if is_given(value) else None


def _learner(learner: Any) -> Learner:
    if learner is None:
        return MeasuredCurvature()
    if isinstance(learner, type) or not isinstance(learner, Learner):
        raise TypeError(
            f"learner must be an object with initial, predict and observe (see sgdol.learners), got {shown(learner)}"
        )
    return learner


# Factories ------------------------------------------------------------------------------------------------------------

_ADAM = 'momentum=0.9 does what the first of Adam\'s betas does, and metric="rms" what the second does'
_ELSEWHERE = {
    "betas": _ADAM,
    "b1": _ADAM,
    "b2": _ADAM,
    "eps": 'nothing has to be kept from 0 here; metric="rms" has a floor of its own',
    "nesterov": "momentum=0.9 is a weighted mean of the gradients, and there is no other kind",
    "dampening": "momentum=0.9 is a weighted mean of the gradients, and there is no other kind",
    "lr": "it is learning_rate here",
    "mask": "wrap the optimizer in optax.masked, or in optax.partition",
    "accumulator_dtype": "sums are kept in float32 or wider",
}
"""What people who come from other optimizers ask for, and where it is."""


def takes(options: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """A function of options, as a function of what they are made of.

    >>> @takes(Scaling)
    ... def beta(options):
    ...     return options.momentum
    >>> beta(momentum=0.5)
    0.5
    >>> beta(betas=(0.9, 0.999))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: beta() has no argument 'betas': momentum=0.9 does what the first of Adam's betas does, and ...
    """
    signature = inspect.signature(options)

    def decorate(function: Callable[[T], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def factory(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in signature.parameters:
                    _refuse(function.__name__, name, list(signature.parameters))
            return function(options(*args, **kwargs))

        result = inspect.signature(function).return_annotation
        factory.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
        return factory

    return decorate


def _refuse(function: str, name: str, known_names: list[str]) -> None:
    near = difflib.get_close_matches(name, known_names, n=1)
    hint = _ELSEWHERE.get(name) or (f"perhaps {near[0]} is meant" if near else "")
    raise TypeError(
        f"{function}() has no argument {name!r}{': ' * bool(hint)}{hint}. It takes {', '.join(known_names)}"
    )
