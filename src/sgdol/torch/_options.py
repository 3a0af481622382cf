"""Every option of the optimizer: its name, place, default and check, once.

The order here is that of the constructor's arguments, of the parameter groups and of the optax front end. Each of them
may stand in a parameter group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from sgdol import metrics
from sgdol.learners import Learner, MeasuredCurvature, suggested_kappa, uses_hindsight
from sgdol.metrics import Metric
from sgdol.surrogate import ESTIMATORS, MOMENTUM_STATISTICS
from sgdol.torch._blocks import GRANULARITIES

__all__ = [
    "DEFAULTS",
    "DERIVED",
    "INSTEAD",
    "LEARNED_WITH",
    "OPTIONS",
    "Catalogue",
    "check_flag",
    "check_foreach",
    "check_number",
    "checked",
    "checked_rate",
    "every_group_has_a_rate",
    "materialise",
    "refuse_unknown",
    "unknown_in_group",
]

DEFAULTS: dict[str, Any] = {
    "lr": None,
    "alpha": None,
    "kappa": None,
    "estimator": "symmetric",
    "granularity": "global",
    "momentum": 0.9,
    "bias_correction": None,
    "statistics": "direction",
    "epoch": None,
    "weight_decay": 0.0,
    "averaging": None,
    "learner": None,
    "metric": "euclidean",
    "maximize": False,
    "foreach": None,
}
"""Every option and its default, as they stand in the parameter groups; smoothness becomes lr = (1 - momentum)/M."""

OPTIONS = tuple(DEFAULTS)

LEARNED_WITH = (
    "learner",  # first, because others follow from it
    "alpha",
    "kappa",
    "estimator",
    "granularity",
    "bias_correction",
    "statistics",
    "averaging",
    "metric",
)
"""What has been learned means something only with the same of these: a saved state is refused by another."""

INSTEAD = {
    "betas": "give the first one as momentum; metric='rms' takes the place of the second",
    "nesterov": "its momentum is ordinary (heavy-ball) momentum; leave nesterov out",
    "dampening": "its momentum is that of SGD without dampening; leave it out",
    "eps": "its divisors are never 0; leave eps out",
    "amsgrad": "metric='adagrad' weights all past gradients equally, which has the same purpose",
    "fused": "foreach=True updates many tensors at once",
    "capturable": "step() never waits for a device",
    "differentiable": "step() cannot be differentiated through",
}
"""What to do in place of other optimizers' options."""


def refuse_unknown(
    given: dict[str, Any],
    name: str,
    options: Iterable[str] = ("smoothness", *OPTIONS),
    instead: dict[str, str] = INSTEAD,
) -> None:
    """Refuse arguments that are not there, those of other optimizers with what to do instead."""
    for option in given:
        sentence = f"{name} has no option {option!r}"
        if option in instead:
            raise TypeError(f"{sentence}: {instead[option]}")
        raise TypeError(f"{sentence}; it has {', '.join(options)}")


ANNOTATIONS = ("params", "name", "param_names", "lr_scale", "initial_lr", "max_lr", "min_lr")
"""What programs, schedulers and torch itself write into parameter groups for themselves."""


def unknown_in_group(
    group: dict[str, Any], index: int, name: str, options: Iterable[str], instead: dict[str, str] = INSTEAD
) -> str | None:
    """A sentence on what a parameter group brings that is no option; options of other optimizers are refused."""
    unknown = [key for key in group if key not in options and key not in ANNOTATIONS]
    refuse_unknown({key: group[key] for key in unknown if key in instead}, name, options, instead)
    if not unknown:
        return None
    return (
        f"parameter group {index} brings {', '.join(map(repr, unknown))}: {name} has no such option, so it changes "
        f"nothing. {name} has {', '.join(options)}"
    )


# One value ------------------------------------------------------------------------------------------------------------


LARGEST = 1e30
"""A larger multiplier or weight_decay leaves the range of float32 in the first update."""

LARGEST_RATE = 1e200
"""A larger lr leaves the range of float64 in the first update. Gradients of 1e-150 do need lr = 1e150."""


def check_number(name: str, value: Any, allowed: Callable[[float], bool], sentence: str) -> float:
    """A number as Python's float, if it is one and allowed: also a Fraction, numpy's scalars, a tensor with one entry.

    >>> check_number("momentum", 0.5, lambda v: 0 <= v < 1, "at least 0 and less than 1")
    0.5
    """
    found = value
    if hasattr(found, "shape") and hasattr(found, "item"):
        if math.prod(found.shape) != 1:
            raise ValueError(f"{name} must be one number, {sentence}, got {len(found.shape)}-dimensional {_cut(value)}")
        found = found.item()
    if isinstance(found, bool) or not isinstance(found, Real):
        raise TypeError(f"{name} must be a number, {sentence}, got {_cut(value)}")
    try:
        number = float(found)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and allowed(number)):
        raise ValueError(f"{name} must be {sentence}, got {_cut(value)}")
    return number


def check_flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {_cut(value)}")
    return value


def check_foreach(value: Any) -> bool | None:
    """None, True or False."""
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"foreach must be None, True or False, got {_cut(value)}")
    return value


def _check_lr(value: Any) -> float | Tensor:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, got lr of shape {tuple(value.shape)}")
    number = check_number(
        "lr", value, lambda v: 0 < v <= LARGEST_RATE, f"positive and finite, at most {LARGEST_RATE:g}"
    )
    return value if isinstance(value, Tensor) else number


def _check_word(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {_cut(value)}")
    return value


def _check_learner(value: Any) -> Learner:
    learner = MeasuredCurvature() if value is None else value
    if isinstance(learner, type) or not isinstance(learner, Learner):
        raise TypeError(
            f"learner must be an object with initial, predict and observe (see sgdol.learners), got {_cut(value)}"
        )
    return learner


def _check_epoch(value: Any, estimator: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Integral) or not 2 <= int(value) < 2**31:
        raise ValueError(f"epoch must be a whole number of updates, from 2 to 2^31 - 1, or None, got {_cut(value)}")
    if estimator == "paper":
        raise ValueError('epoch corrects estimator="symmetric", got estimator="paper"')


def _cut(value: Any) -> str:
    """The value for a message, not more of it than helps."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of thousands of digits
        text = f"an integer of {value.bit_length()} bits"
    return text if len(text) <= 80 else f"{text[:60]}... ({type(value).__name__})"


# A group's values -----------------------------------------------------------------------------------------------------


def checked_rate(options: dict[str, Any], momentum: float, where: str) -> Any:
    """Lr of these options, from lr or smoothness, which is taken out of them; None if neither is given.

    Lr is the rate of a sum of gradients, as torch's SGD has it, and 1/M that of their average: lr = (1 - momentum)/M.
    """
    smoothness, lr = options.pop("smoothness", None), options.get("lr")
    if smoothness is None:
        return None if lr is None else _check_lr(lr)
    if lr is not None:
        raise ValueError(
            f"give {where}lr or smoothness, not both: got lr={lr!r} and smoothness={smoothness!r} "
            "(lr = (1 - momentum)/smoothness)"
        )
    number = check_number("smoothness", smoothness, lambda v: v > 0, "positive and finite")
    check_number("smoothness", smoothness, lambda v: math.isfinite(1 / v), "larger, the base rate is 1 over it")
    return _check_lr((1 - momentum) / number)


DERIVED = ("kappa", "bias_correction")
"""Options whose default depends on the learner."""


def checked(options: dict[str, Any]) -> tuple[dict[str, Any], Learner, Metric]:
    """All options but lr, by name, value and what is allowed, in the form in which they stand in a group.

    Learners and metrics stand there by name, so that a saved state can be loaded without them.
    """
    found = {name: options[name] for name in OPTIONS if name != "lr"}
    learner, metric = _check_learner(found["learner"]), metrics.get(found["metric"])
    if found["alpha"] is not None:
        found["alpha"] = check_number("alpha", found["alpha"], lambda v: v > 0, "None, or positive and finite")
    if found["alpha"] is not None and found["kappa"] is not None:
        raise ValueError(
            f"give alpha or kappa, not both: got alpha={found['alpha']!r} and kappa={_cut(found['kappa'])} "
            "(kappa is in units of the first squared gradient)"
        )
    kappa = suggested_kappa(learner) if found["kappa"] is None else found["kappa"]
    found["kappa"] = check_number("kappa", kappa, lambda v: v > 0, "None, or positive and finite")
    _check_word("estimator", found["estimator"], ESTIMATORS)
    _check_word("granularity", found["granularity"], GRANULARITIES)
    _check_word("statistics", found["statistics"], MOMENTUM_STATISTICS)
    sentence = "at least 0 and less than 1"
    found["momentum"] = check_number("momentum", found["momentum"], lambda v: 0 <= v < 1, sentence)
    if found["bias_correction"] is None:
        found["bias_correction"] = not uses_hindsight(learner)
    check_flag("bias_correction", found["bias_correction"])
    _check_epoch(found["epoch"], found["estimator"])
    sentence = f"at least 0 and finite, at most {LARGEST:g}"
    found["weight_decay"] = check_number("weight_decay", found["weight_decay"], lambda v: 0 <= v <= LARGEST, sentence)
    if found["averaging"] is not None:
        sentence = "None, or finite and at least 0"
        found["averaging"] = check_number("averaging", found["averaging"], lambda v: v >= 0, sentence)
    if found["granularity"] == "coordinate" and not metrics.is_diagonal(metric):
        raise ValueError(
            f'granularity="coordinate" needs a metric whose D is diagonal, got metric={_cut(options["metric"])}: use '
            'granularity="tensor", or metric="rms"'
        )
    found["learner"], found["metric"] = _name(learner), _metric_name(metric)
    check_flag("maximize", found["maximize"])
    check_foreach(found["foreach"])
    return found, learner, metric


class Catalogue:
    """The options that groups have unless they say otherwise, and the objects behind the names that stand in groups.

    Args:
        given: every option, as the constructor got it, and smoothness.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self._derived = {name: given[name] for name in DERIVED}
        defaults, self.learner, self._metric = checked(given)
        self._smoothness = given.get("smoothness")
        rate = checked_rate(given, defaults["momentum"], "")
        self.defaults = {"lr": rate, **defaults}
        self._learners = {defaults["learner"]: self.learner}
        self._metrics = {defaults["metric"]: self._metric}

    def group(self, given: dict[str, Any]) -> dict[str, Any]:
        """A new parameter group with the options that it brings, checked; those that it does not bring are left out."""
        found = dict(given)
        if not isinstance(found["params"], Tensor | set):
            found["params"] = list(found["params"])
        known = {**self.defaults, "learner": self.learner, "metric": self._metric}
        options, learner, metric = checked({**known, **self._derived, **found})
        if found.get("lr") is None and found.get("smoothness") is None:
            found["smoothness"] = self._smoothness  # 1/M of all groups, whatever their momentum
        rate = checked_rate(found, options["momentum"], "a parameter group ")
        if rate is None and self.defaults["lr"] is None:
            raise ValueError("lr or smoothness is needed for this parameter group: the optimizer has no default")
        if rate is not None:
            found["lr"] = rate
        self._learners.setdefault(options["learner"], learner)
        self._metrics.setdefault(options["metric"], metric)
        found.update({name: value for name, value in options.items() if name in found or name in DERIVED})
        return found

    def learner_of(self, group: dict[str, Any]) -> Learner:
        """The learner that the group names."""
        return self._learners[group["learner"]]

    def metric_of(self, group: dict[str, Any]) -> Metric:
        """The metric that the group names."""
        return self._metrics[group["metric"]]

    def asks(self, group: dict[str, Any]) -> bool:
        """Whether the group's learner uses hindsight."""
        return uses_hindsight(self._learners[group["learner"]])


def _name(thing: Any) -> str:
    """What tells one learner from another in a saved state: not where it happens to be in memory."""
    kind = type(thing)
    return kind.__qualname__ if kind.__repr__ is object.__repr__ else repr(thing)


def _metric_name(metric: Metric) -> str:
    return next(
        (name for name, known in metrics.METRICS.items() if type(known) is type(metric) and known == metric),
        _name(metric),
    )


def every_group_has_a_rate(params: list[Any]) -> bool:
    """Whether all of these are parameter groups that bring a rate of their own."""
    return all(isinstance(g, dict) and ("lr" in g or "smoothness" in g) for g in params)


# Parameters -----------------------------------------------------------------------------------------------------------


def materialise(params: Any) -> list[Any]:
    """The parameters as a list, if they are an iterable of tensors or of groups."""
    kinds = {
        torch.nn.Module: "a module: give its .parameters()",
        dict: "one dict: put it into a list",
        Tensor: "a single tensor: put it into a list",
    }
    for kind, sentence in kinds.items():
        if isinstance(params, kind):
            raise TypeError(
                f"params argument given to the optimizer should be an iterable of Tensors or dicts, got {sentence}"
            )
    return list(params)
