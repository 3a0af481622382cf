"""The options of SGDOL: the name and the check of each, in one table; SGDOLFree's are in ``_free_options``.

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
    "BOTH",
    "INSTEAD",
    "LEARNED_WITH",
    "OPTIONS",
    "WITHIN",
    "Catalogue",
    "Check",
    "every_group_has_a_rate",
    "materialise",
    "number",
    "refuse_unknown",
    "unknown_in_group",
]

# Checks ---------------------------------------------------------------------------------------------------------------

Check = Callable[[str, Any], Any]
"""Takes the name of an option and its value; returns the value as it stands in a parameter group, or raises."""

# A larger weight_decay, or lr of SGDOLFree, would leave the range of float32 in the first update.
LARGEST = 1e30

# A larger lr of SGDOL would leave the range of float64 in the first update. Gradients of 1e-150 do need lr = 1e150.
LARGEST_RATE = 1e200

WITHIN: tuple[Callable[[float], bool], str] = (
    lambda v: 0 <= v <= LARGEST,
    f"at least 0 and finite, at most {LARGEST:g}",
)


def number(allowed: Callable[[float], bool], sentence: str, *, optional: bool = False, tensor: bool = False) -> Check:
    """A check for a finite number: also a Fraction, a numpy scalar or a one-element tensor; a float comes out.

    Args:
        allowed: whether a finite number is allowed.
        sentence: what is allowed.
        optional: True if None is allowed too.
        tensor: True if a tensor stays a tensor: "capturable" schedulers write to it.

    >>> number(lambda v: 0 <= v < 1, "at least 0 and less than 1")("momentum", 0.5)
    0.5
    """

    def check(name: str, value: Any) -> Any:
        if value is None and optional:
            return None
        scalar = value
        if hasattr(value, "shape") and hasattr(value, "item"):
            if math.prod(value.shape) != 1:
                kind = f"{len(value.shape)}-dimensional {_cut(value)}"
                raise ValueError(f"{name} must be one number, {sentence}, got {kind}")
            scalar = value.item()
        if isinstance(scalar, bool) or not isinstance(scalar, Real):  # bool is a subclass of int
            raise TypeError(f"{name} must be a number, {sentence}, got {_cut(value)}")
        try:
            found = float(scalar)
        except OverflowError:  # an integer or Fraction beyond float64
            found = math.inf
        if not (math.isfinite(found) and allowed(found)):
            raise ValueError(f"{name} must be {sentence}, got {_cut(value)}")
        return value if tensor and isinstance(value, Tensor) else found

    return check


def one_of(allowed: tuple[Any, ...], error: type[Exception], sentence: str) -> Check:
    def check(name: str, value: Any) -> Any:
        if not any(value is x or (isinstance(x, str) and isinstance(value, str) and value == x) for x in allowed):
            raise error(f"{name} must be {sentence}, got {_cut(value)}")
        return value

    return check


def _word(words: tuple[str, ...]) -> Check:
    return one_of(words, ValueError, f"one of {', '.join(map(repr, words))}")


def _lr(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, got lr of shape {tuple(value.shape)}")
    sentence = f"positive and finite, at most {LARGEST_RATE:g}"
    return number(lambda v: 0 < v <= LARGEST_RATE, sentence, tensor=True)(name, value)


def _learner(name: str, value: Any) -> Learner:
    if isinstance(value, type) or not isinstance(value, Learner):
        sentence = "an object with initial, predict and observe (see sgdol.learners)"
        raise TypeError(f"{name} must be {sentence}, got {_cut(value)}")
    return value


def _epoch(name: str, value: Any) -> Any:
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if value is not None and not (is_whole and 2 <= int(value) < 2**31):
        raise ValueError(f"{name} must be a whole number of updates, from 2 to 2^31 - 1, or None, got {_cut(value)}")
    return value


def _metric(name: str, value: Any) -> Any:
    metrics.get(value)  # raises
    return value


def _cut(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of thousands of digits
        text = f"an integer of {value.bit_length()} bits"
    return text if len(text) <= 80 else f"{text[:60]}... ({type(value).__name__})"


# The table ------------------------------------------------------------------------------------------------------------

_SCALE = number(lambda v: v > 0, "None, or positive and finite", optional=True)

BOTH: dict[str, Check] = {  # of both optimizers
    "momentum": number(lambda v: 0 <= v < 1, "at least 0 and less than 1"),
    "weight_decay": number(*WITHIN),
    "metric": _metric,
    "maximize": one_of((True, False), TypeError, "True or False"),
    "foreach": one_of((None, True, False), TypeError, "None, True or False"),
}

# As they stand in the parameter groups. ``smoothness`` is not there: it becomes lr = (1 - momentum)/smoothness.
OPTIONS: dict[str, Check] = {
    "lr": _lr,
    "alpha": _SCALE,
    "kappa": _SCALE,
    "estimator": _word(ESTIMATORS),
    "granularity": _word(GRANULARITIES),
    "momentum": BOTH["momentum"],
    "bias_correction": BOTH["maximize"],
    "statistics": _word(MOMENTUM_STATISTICS),
    "epoch": _epoch,
    "weight_decay": BOTH["weight_decay"],
    "averaging": number(lambda v: v >= 0, "None, or finite and at least 0", optional=True),
    "learner": _learner,
    "metric": _metric,
    "maximize": BOTH["maximize"],
    "foreach": BOTH["foreach"],
}

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


# A group's values -----------------------------------------------------------------------------------------------------


def _rate(options: dict[str, Any], momentum: float, where: str) -> Any:
    """Return lr from ``lr`` or ``smoothness``, and remove ``smoothness`` from the options; None if neither is given.

    lr = (1 - momentum)/M: lr multiplies a decayed sum of gradients, as in torch's SGD, and 1/M their average.
    """
    smoothness, lr = options.pop("smoothness", None), options.get("lr")
    if smoothness is None:
        return None if lr is None else _lr("lr", lr)
    if lr is not None:
        raise ValueError(
            f"give {where}lr or smoothness, not both: got lr={lr!r} and smoothness={smoothness!r} "
            "(lr = (1 - momentum)/smoothness)"
        )
    found = number(lambda v: v > 0, "positive and finite")("smoothness", smoothness)
    number(lambda v: math.isfinite(1 / v), "larger, the base rate is 1 over it")("smoothness", smoothness)
    return _lr("lr", (1 - momentum) / found)


DERIVED = ("kappa", "bias_correction")  # their defaults depend on the learner


def _checked(options: dict[str, Any]) -> tuple[dict[str, Any], Learner, Metric]:
    """Check all options but lr. Returns them as they stand in a parameter group, with the learner and the metric.

    In a parameter group learner and metric are names, so that a saved state can be loaded with ``weights_only=True``.
    """
    learner: Any = MeasuredCurvature() if options["learner"] is None else options["learner"]
    hindsight = uses_hindsight(learner)
    given = {**options, "learner": learner}
    if given["bias_correction"] is None:
        given["bias_correction"] = not hindsight
    values = {name: check(name, given[name]) for name, check in OPTIONS.items() if name != "lr"}
    metric = metrics.get(values["metric"])
    if values["alpha"] is not None and values["kappa"] is not None:
        raise ValueError(
            f"give alpha or kappa, not both: got alpha={values['alpha']!r} and kappa={values['kappa']!r} "
            "(kappa is in units of the first squared gradient)"
        )
    if values["kappa"] is None:
        values["kappa"] = suggested_kappa(learner)
    if values["epoch"] is not None and values["estimator"] == "paper":
        raise ValueError('epoch corrects estimator="symmetric", got estimator="paper"')
    if values["granularity"] == "coordinate" and not metrics.is_diagonal(metric):
        raise ValueError(
            f'granularity="coordinate" needs a metric whose D is diagonal, got metric={_cut(options["metric"])}: use '
            'granularity="tensor", or metric="rms"'
        )
    values["learner"], values["metric"] = _name(learner), _metric_name(metric)
    return values, learner, metric


class Catalogue:
    """The default options of parameter groups, and the learners and metrics whose names stand in the groups.

    Args:
        given: the constructor's arguments: all options and smoothness.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self._derived = {name: given[name] for name in DERIVED}
        defaults, self.learner, self._metric = _checked(given)
        self._smoothness = given["smoothness"]
        self.defaults = {"lr": _rate(dict(given), defaults["momentum"], ""), **defaults}
        self._learners = {defaults["learner"]: self.learner}
        self._metrics = {defaults["metric"]: self._metric}

    def group(self, given: dict[str, Any]) -> dict[str, Any]:
        """A new parameter group, its own options checked. Torch adds the defaults of the others."""
        group = dict(given)
        if not isinstance(group["params"], Tensor | set):  # torch refuses a set, whose order is not known
            group["params"] = list(group["params"])
        defaults = {**self.defaults, "learner": self.learner, "metric": self._metric}
        options, learner, metric = _checked({**defaults, **self._derived, **group})
        if group.get("lr") is None and group.get("smoothness") is None:
            group["smoothness"] = self._smoothness  # M is the same in all groups, also if their momentum is not
        rate = _rate(group, options["momentum"], "a parameter group ")
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
