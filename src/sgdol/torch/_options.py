"""The options of both optimizers: the name and the check of each, in one table.

The order is that of the constructor's arguments, of the parameter groups and of the optax front end. Every option of
SGDOL may stand in a parameter group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any, Never

import torch
from torch import Tensor

from sgdol import metrics
from sgdol.learners import Learner, MeasuredCurvature, suggested_kappa, uses_hindsight
from sgdol.metrics import Metric
from sgdol.surrogate import ESTIMATORS, MOMENTUM_STATISTICS
from sgdol.torch._blocks import GRANULARITIES

__all__ = [
    "INSTEAD",
    "INSTEAD_FREE",
    "LEARNED_WITH",
    "OPTIONS",
    "OPTIONS_FREE",
    "SHARED",
    "Catalogue",
    "checked",
    "largest",
    "materialise",
    "multipliers",
    "ratios",
    "refuse_scaled",
    "refuse_scheduled",
    "refuse_unknown",
    "unknown_in_group",
]

# Checks ---------------------------------------------------------------------------------------------------------------

Check = Callable[[str, Any], Any]
"""Takes the name of an option and its value; returns the value as it stands in a parameter group, or raises."""

# A larger lr of SGDOL would leave the range of float64 in the first update. Gradients of 1e-150 do need lr = 1e150.
LARGEST_RATE = 1e200


def number(allowed: Callable[[float], bool], sentence: str, *, optional: bool = False, tensor: bool = False) -> Check:
    """A check for a finite number: also a Fraction, a numpy scalar or a one-element tensor; a float comes out.

    With ``optional`` None is allowed too; with ``tensor`` a tensor stays one: "capturable" schedulers write to it.

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


def one_of(*allowed: Any, error: type[Exception] = ValueError, sentence: str = "") -> Check:
    words = sentence or f"one of {', '.join(map(repr, allowed))}"

    def check(name: str, value: Any) -> Any:
        if not any(isinstance(value, type(x)) and value == x for x in allowed):  # 1 == True, but 1 is no bool
            raise error(f"{name} must be {words}, got {_cut(value)}")
        return value

    return check


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
_SWITCH = one_of(True, False, error=TypeError, sentence="True or False")
# A larger weight_decay, or lr of SGDOLFree, would leave the range of float32 in the first update.
_WITHIN: tuple[Callable[[float], bool], str] = lambda v: 0 <= v <= 1e30, "at least 0 and finite, at most 1e+30"

# As they stand in the parameter groups. ``smoothness`` is not there: it becomes lr = (1 - momentum)/smoothness.
OPTIONS: dict[str, Check] = {
    "lr": _lr,
    "alpha": _SCALE,
    "kappa": _SCALE,
    "estimator": one_of(*ESTIMATORS),
    "granularity": one_of(*GRANULARITIES),
    "momentum": number(lambda v: 0 <= v < 1, "at least 0 and less than 1"),
    "bias_correction": _SWITCH,
    "statistics": one_of(*MOMENTUM_STATISTICS),
    "epoch": _epoch,
    "weight_decay": number(*_WITHIN),
    "averaging": number(lambda v: v >= 0, "None, or finite and at least 0", optional=True),
    "learner": _learner,
    "metric": _metric,
    "maximize": _SWITCH,
    "foreach": one_of(None, True, False, error=TypeError, sentence="None, True or False"),
}

# Of SGDOLFree; those without a check of their own here are SGDOL's.
OPTIONS_FREE: dict[str, Check] = {
    "lr": number(_WITHIN[0], f"{_WITHIN[1]}; 1 is the step size that is learned", tensor=True),
    "averaging": number(lambda v: v >= 0, "at least 0 and finite"),
    "state_dtype": one_of(
        None, torch.bfloat16, sentence="None, for float32 or the wider type of the parameters, or torch.bfloat16"
    ),
    **{name: OPTIONS[name] for name in ("momentum", "weight_decay", "metric", "maximize", "foreach")},
}

# Must be the same in all parameter groups of SGDOLFree: there is one direction, in one norm, and one average.
SHARED = ("momentum", "averaging", "metric", "state_dtype", "maximize", "foreach")

# A saved state of SGDOL is refused if one of these differs: what was learned has a meaning only together with them.
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


# The same for SGDOLFree.
INSTEAD_FREE = {
    **{name: "it is an option of sgdol.SGDOL alone" for name in OPTIONS if name not in OPTIONS_FREE},
    **INSTEAD,
    "smoothness": "it measures the smoothness itself",
}

# Keys that programs, schedulers and torch itself write into parameter groups.
ANNOTATIONS = ("params", "name", "param_names", "lr_scale", "initial_lr", "max_lr", "min_lr")


def refuse_unknown(
    given: Iterable[str],
    name: str,
    options: Iterable[str] = ("smoothness", *OPTIONS),
    instead: dict[str, str] = INSTEAD,
) -> None:
    """Raise TypeError for unknown arguments; for those of other optimizers it says what to do instead."""
    for option in given:
        remedy = f": {instead[option]}" if option in instead else f"; it has {', '.join(options)}"
        raise TypeError(f"{name} has no option {option!r}{remedy}")


def unknown_in_group(
    group: dict[str, Any], index: int, name: str, options: Iterable[str], instead: dict[str, str] = INSTEAD
) -> str | None:
    """A warning about keys of a parameter group that are no options, or None; those of other optimizers are refused."""
    unknown = [key for key in group if key not in options and key not in ANNOTATIONS]
    refuse_unknown([key for key in unknown if key in instead], name, options, instead)
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


class Catalogue:
    """The default options of parameter groups, and the learners and metrics whose names stand in the groups.

    In a parameter group learner and metric are names, so that a saved state can be loaded with ``weights_only=True``.

    Args:
        given: the constructor's arguments: all options and smoothness.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._objects: dict[tuple[str, str], Any] = {}
        options = self._checked(given)
        self.learner = self.learner_of(options)
        self.defaults = {"lr": _rate(dict(given), options["momentum"], ""), **options}

    def group(self, given: dict[str, Any]) -> dict[str, Any]:
        """A new parameter group, its own options checked. Torch adds the defaults of the others."""
        group = {name: value for name, value in given.items() if name != "lr" or value is not None}
        if not isinstance(group["params"], Tensor | set):  # torch refuses a set, whose order is not known
            group["params"] = list(group["params"])
        options = self._checked({**self._given, **group})
        if group.get("lr") is None and group.get("smoothness") is None:
            group["smoothness"] = self._given["smoothness"]  # M is the same in all groups, also if momentum is not
        rate = _rate(group, options["momentum"], "a parameter group ")
        if rate is None and self.defaults["lr"] is None:
            raise ValueError(
                "lr or smoothness is needed: got neither, for all parameters or for this parameter group. lr is the "
                "rate that torch.optim.SGD takes with the same momentum; sgdol.SGDOLFree needs neither (experimental)"
            )
        if rate is not None:
            group["lr"] = rate
        group.update({name: value for name, value in options.items() if name in group or name in DERIVED})
        return group

    def _checked(self, options: dict[str, Any]) -> dict[str, Any]:
        """All options but lr, as they stand in a parameter group."""
        learner: Any = MeasuredCurvature() if options["learner"] is None else options["learner"]
        given = {**options, "learner": learner}
        if given["bias_correction"] is None:
            given["bias_correction"] = not uses_hindsight(learner)
        values = {name: check(name, given[name]) for name, check in OPTIONS.items() if name != "lr"}
        if values["alpha"] is not None and values["kappa"] is not None:
            raise ValueError(
                f"give alpha or kappa, not both: got alpha={values['alpha']!r} and kappa={values['kappa']!r} "
                "(kappa is in units of the first squared gradient)"
            )
        if values["kappa"] is None:
            values["kappa"] = suggested_kappa(learner)
        if values["epoch"] is not None and values["estimator"] == "paper":
            raise ValueError('epoch corrects estimator="symmetric", got estimator="paper"')
        metric = metrics.get(values["metric"])
        if values["granularity"] == "coordinate" and not metrics.is_diagonal(metric):
            raise ValueError(
                f'granularity="coordinate" needs a metric whose D is diagonal, got metric={_cut(options["metric"])}: '
                'use granularity="tensor", or metric="rms"'
            )
        known = (name for name, own in metrics.METRICS.items() if type(own) is type(metric) and own == metric)
        values["learner"], values["metric"] = _name(learner), next(known, _name(metric))
        self._objects.setdefault(("learner", values["learner"]), learner)
        self._objects.setdefault(("metric", values["metric"]), metric)
        return values

    def learner_of(self, group: dict[str, Any]) -> Learner:
        return self._objects["learner", group["learner"]]

    def metric_of(self, group: dict[str, Any]) -> Metric:
        return self._objects["metric", group["metric"]]

    def uses_hindsight(self, group: dict[str, Any]) -> bool:
        return uses_hindsight(self.learner_of(group))


def _name(thing: Any) -> str:
    # In a saved state: the default repr has an address in memory, which is another one in each process.
    kind = type(thing)
    return kind.__qualname__ if kind.__repr__ is object.__repr__ else repr(thing)


def refuse_scheduled(index: int, rate: float, momentum: float) -> Never:
    """Raise for an lr or momentum of a parameter group that a scheduler should not have written."""
    if not 0 <= rate < math.inf:
        raise ValueError(f"lr of parameter group {index} must be at least 0 and finite, got {rate!r}")
    raise ValueError(f"momentum of parameter group {index} must be at least 0 and less than 1, got {momentum!r}")


# SGDOLFree -----------------------------------------------------------------------------------------------------------


def checked(options: dict[str, Any], unknown: dict[str, Any]) -> dict[str, Any]:
    """The options of SGDOLFree as they stand in a parameter group."""
    refuse_unknown(unknown, "SGDOLFree", options, INSTEAD_FREE)
    return {**options, **{name: check(name, options[name]) for name, check in OPTIONS_FREE.items()}}


def multipliers(groups: list[dict[str, Any]]) -> list[float]:
    rates = [float(group["lr"]) for group in groups]  # a scheduler may have written anything
    for index, rate in enumerate(rates):
        if not 0 <= rate < math.inf:
            refuse_scheduled(index, rate, groups[index]["momentum"])
    return rates


def ratios(groups: list[dict[str, Any]]) -> list[float]:
    """rho_i = lr_i / max lr of each group; the metric of group i is D/rho_i."""
    rates = multipliers(groups)
    highest = max(rates)
    return [rate / highest if highest else 1.0 for rate in rates]


def largest(groups: list[dict[str, Any]]) -> float:
    """The largest lr of all groups, now or in the schedule: torch's schedulers keep ``initial_lr`` and ``max_lr``."""
    return max(float(group.get(name, 0.0)) for group in groups for name in ("lr", "initial_lr", "max_lr"))


def refuse_scaled(factor: float) -> None:
    """Refuse gradients that were multiplied by 2^-j, j >= 3, while the loss was not: a GradScaler inside loss_fn.

    Clipping multiplies by a power of two to six digits only by chance. So that chance is small, this is asked once, at
    the first step.
    """
    if 0 < factor <= 1 / 8 and abs(math.log2(factor) - round(math.log2(factor))) < 1e-6:
        raise RuntimeError(
            f"gradients were multiplied by {factor:g} between backward() and step(), as a GradScaler does whose "
            "scale() is called inside of loss_fn. Return the loss itself from loss_fn, and give backward() "
            "run=lambda loss: scaler.scale(loss).backward()"
        )


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
