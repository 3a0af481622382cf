"""The options of SGDOL: name, default and check of each, in one table.

The order is that of the constructor's arguments, of the parameter groups and of the optax front end. Every option may
stand in a parameter group.
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

# As they stand in the parameter groups. ``smoothness`` is not there: it becomes lr = (1 - momentum)/smoothness.
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

OPTIONS = tuple(DEFAULTS)

# A saved state is refused if one of these differs: what was learned has a meaning only together with them.
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

# What to do in place of other optimizers' options.
INSTEAD = {
    "betas": "give the first one as momentum; the metric takes the place of the second",
    "nesterov": "its momentum is ordinary (heavy-ball) momentum; leave nesterov out",
    "dampening": "its momentum is that of SGD without dampening; leave it out",
    "eps": "its divisors are never 0; leave eps out",
    "amsgrad": "metric='adagrad' weights all past gradients equally, which has the same purpose",
    "fused": "many tensors are updated at once anyway; leave it out",
    "capturable": "step() never waits for a device",
    "differentiable": "step() cannot be differentiated through",
}


def refuse_unknown(
    given: dict[str, Any],
    name: str,
    options: Iterable[str] = ("smoothness", *OPTIONS),
    instead: dict[str, str] = INSTEAD,
) -> None:
    """Raise TypeError for unknown arguments; for those of other optimizers it says what to do instead."""
    for option in given:
        sentence = f"{name} has no option {option!r}"
        if option in instead:
            raise TypeError(f"{sentence}: {instead[option]}")
        raise TypeError(f"{sentence}; it has {', '.join(options)}")


# Keys that programs, schedulers and torch itself write into parameter groups.
ANNOTATIONS = ("params", "name", "param_names", "lr_scale", "initial_lr", "max_lr", "min_lr")


def unknown_in_group(
    group: dict[str, Any], index: int, name: str, options: Iterable[str], instead: dict[str, str] = INSTEAD
) -> str | None:
    """A warning about keys of a parameter group that are no options, or None; those of other optimizers are refused."""
    unknown = [key for key in group if key not in options and key not in ANNOTATIONS]
    refuse_unknown({key: group[key] for key in unknown if key in instead}, name, options, instead)
    if not unknown:
        return None
    return (
        f"parameter group {index} brings {', '.join(map(repr, unknown))}: {name} has no such option, so it changes "
        f"nothing. {name} has {', '.join(options)}"
    )


# One value ------------------------------------------------------------------------------------------------------------


# A larger weight_decay, or lr of SGDOLFree, would leave the range of float32 in the first update.
LARGEST = 1e30

# A larger lr of SGDOL would leave the range of float64 in the first update. Gradients of 1e-150 do need lr = 1e150.
LARGEST_RATE = 1e200


def check_number(name: str, value: Any, allowed: Callable[[float], bool], sentence: str) -> float:
    """Return ``value`` as a float if it is an allowed number: also a Fraction, a numpy scalar, a one-element tensor.

    >>> check_number("momentum", 0.5, lambda v: 0 <= v < 1, "at least 0 and less than 1")
    0.5
    """
    scalar = value
    if hasattr(value, "shape") and hasattr(value, "item"):
        if math.prod(value.shape) != 1:
            raise ValueError(f"{name} must be one number, {sentence}, got {len(value.shape)}-dimensional {_cut(value)}")
        scalar = value.item()
    if isinstance(scalar, bool) or not isinstance(scalar, Real):  # bool is a subclass of int
        raise TypeError(f"{name} must be a number, {sentence}, got {_cut(value)}")
    try:
        number = float(scalar)
    except OverflowError:  # an integer or Fraction beyond float64
        number = math.inf
    if not (math.isfinite(number) and allowed(number)):
        raise ValueError(f"{name} must be {sentence}, got {_cut(value)}")
    return number


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {_cut(value)}")
    return value


def check_foreach(value: Any) -> bool | None:
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
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of thousands of digits
        text = f"an integer of {value.bit_length()} bits"
    return text if len(text) <= 80 else f"{text[:60]}... ({type(value).__name__})"


# A group's values -----------------------------------------------------------------------------------------------------


def checked_rate(options: dict[str, Any], momentum: float, where: str) -> Any:
    """Return lr from ``lr`` or ``smoothness``, and remove ``smoothness`` from the options; None if neither is given.

    lr = (1 - momentum)/M: lr multiplies a decayed sum of gradients, as in torch's SGD, and 1/M their average.
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


DERIVED = ("kappa", "bias_correction")  # their defaults depend on the learner


def checked(options: dict[str, Any]) -> tuple[dict[str, Any], Learner, Metric]:
    """Check all options but lr. Returns them as they stand in a parameter group, with the learner and the metric.

    In a parameter group learner and metric are names, so that a saved state can be loaded with ``weights_only=True``.
    """
    values = {name: options[name] for name in OPTIONS if name != "lr"}
    learner, metric = _check_learner(values["learner"]), metrics.get(values["metric"])
    if values["alpha"] is not None:
        values["alpha"] = check_number("alpha", values["alpha"], lambda v: v > 0, "None, or positive and finite")
    if values["alpha"] is not None and values["kappa"] is not None:
        raise ValueError(
            f"give alpha or kappa, not both: got alpha={values['alpha']!r} and kappa={_cut(values['kappa'])} "
            "(kappa is in units of the first squared gradient)"
        )
    kappa = suggested_kappa(learner) if values["kappa"] is None else values["kappa"]
    values["kappa"] = check_number("kappa", kappa, lambda v: v > 0, "None, or positive and finite")
    _check_word("estimator", values["estimator"], ESTIMATORS)
    _check_word("granularity", values["granularity"], GRANULARITIES)
    _check_word("statistics", values["statistics"], MOMENTUM_STATISTICS)
    sentence = "at least 0 and less than 1"
    values["momentum"] = check_number("momentum", values["momentum"], lambda v: 0 <= v < 1, sentence)
    if values["bias_correction"] is None:
        values["bias_correction"] = not uses_hindsight(learner)
    check_flag("bias_correction", values["bias_correction"])
    _check_epoch(values["epoch"], values["estimator"])
    sentence = f"at least 0 and finite, at most {LARGEST:g}"
    values["weight_decay"] = check_number("weight_decay", values["weight_decay"], lambda v: 0 <= v <= LARGEST, sentence)
    if values["averaging"] is not None:
        sentence = "None, or finite and at least 0"
        values["averaging"] = check_number("averaging", values["averaging"], lambda v: v >= 0, sentence)
    if values["granularity"] == "coordinate" and not metrics.is_diagonal(metric):
        raise ValueError(
            f'granularity="coordinate" needs a metric whose D is diagonal, got metric={_cut(options["metric"])}: use '
            'granularity="tensor", or metric="rms"'
        )
    values["learner"], values["metric"] = _name(learner), _metric_name(metric)
    check_flag("maximize", values["maximize"])
    check_foreach(values["foreach"])
    return values, learner, metric


class Catalogue:
    """The default options of parameter groups, and the learners and metrics whose names stand in the groups.

    Args:
        given: the constructor's arguments: all options and smoothness.
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
        """A new parameter group, its own options checked. Torch adds the defaults of the others."""
        group = dict(given)
        if not isinstance(group["params"], Tensor | set):  # torch refuses a set, whose order is not known
            group["params"] = list(group["params"])
        defaults = {**self.defaults, "learner": self.learner, "metric": self._metric}
        options, learner, metric = checked({**defaults, **self._derived, **group})
        if group.get("lr") is None and group.get("smoothness") is None:
            group["smoothness"] = self._smoothness  # M is the same in all groups, also if their momentum is not
        rate = checked_rate(group, options["momentum"], "a parameter group ")
        if rate is None and self.defaults["lr"] is None:
            raise ValueError("lr or smoothness is needed for this parameter group: the optimizer has no default")
        if rate is not None:
            group["lr"] = rate
        self._learners.setdefault(options["learner"], learner)
        self._metrics.setdefault(options["metric"], metric)
        group.update({name: value for name, value in options.items() if name in group or name in DERIVED})
        return group

    def learner_of(self, group: dict[str, Any]) -> Learner:
        return self._learners[group["learner"]]

    def metric_of(self, group: dict[str, Any]) -> Metric:
        return self._metrics[group["metric"]]

    def uses_hindsight(self, group: dict[str, Any]) -> bool:
        return uses_hindsight(self._learners[group["learner"]])


def _name(thing: Any) -> str:
    # In a saved state: the default repr has an address in memory, which is another one in each process.
    kind = type(thing)
    return kind.__qualname__ if kind.__repr__ is object.__repr__ else repr(thing)


def _metric_name(metric: Metric) -> str:
    return next(
        (name for name, known in metrics.METRICS.items() if type(known) is type(metric) and known == metric),
        _name(metric),
    )


def every_group_has_a_rate(params: list[Any]) -> bool:
    return all(isinstance(g, dict) and ("lr" in g or "smoothness" in g) for g in params)


# Parameters -----------------------------------------------------------------------------------------------------------


def materialise(params: Any) -> list[Any]:
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
