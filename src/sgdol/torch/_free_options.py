"""The options of the optimizer without M, its parameter groups, and states that an earlier version saved."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from torch import Tensor

from sgdol import metrics
from sgdol.free import State
from sgdol.torch._options import INSTEAD as OF_OTHERS
from sgdol.torch._options import LARGEST, check_flag, check_foreach, check_number, refuse_unknown
from sgdol.torch._options import OPTIONS as OF_SGDOL
from sgdol.torch._world import real_view

__all__ = [
    "INSTEAD",
    "OPTIONS",
    "SHARED",
    "checked",
    "largest",
    "multipliers",
    "ratios",
    "refuse_other_shapes",
    "refuse_other_states",
    "refuse_scaled",
]

OPTIONS = ("lr", "momentum", "weight_decay", "averaging", "metric", "maximize", "foreach")
"""Options that every parameter group has. torch adds others to ``defaults`` when it unpickles an optimizer."""

INSTEAD = {
    **{name: "it is an option of sgdol.SGDOL alone" for name in OF_SGDOL if name not in OPTIONS},
    **OF_OTHERS,
    "smoothness": "it measures the smoothness itself",
}
"""What to do in place of the options of SGDOL and of other optimizers."""

SHARED = ("momentum", "averaging", "metric", "maximize", "foreach")
"""Options that are the same for all parameter groups: there is one point, one direction, one norm."""


def checked(options: dict[str, Any], unknown: dict[str, Any]) -> dict[str, Any]:
    """The options, numbers as Python's own; those of other optimizers are refused."""
    refuse_unknown(unknown, "SGDOLFree", options, INSTEAD)
    metrics.get(options["metric"])
    at_least_0 = (lambda v: v >= 0), "at least 0 and finite"
    at_most = (lambda v: 0 <= v <= LARGEST), f"at least 0 and finite, at most {LARGEST:g}"
    return {
        **options,
        "lr": check_rate(options["lr"]),
        "momentum": check_number("momentum", options["momentum"], lambda v: 0 <= v < 1, "at least 0 and less than 1"),
        "weight_decay": check_number("weight_decay", options["weight_decay"], *at_most),
        "averaging": check_number("averaging", options["averaging"], *at_least_0),
        "maximize": check_flag("maximize", options["maximize"]),
        "foreach": check_foreach(options["foreach"]),
    }


def check_rate(value: Any) -> Any:
    """A multiplier: a number, or a tensor that holds one, which stays one for ``capturable`` schedulers."""
    sentence = f"at least 0 and finite, at most {LARGEST:g}; 1 is the step size that is learned"
    number = check_number("lr", value, lambda v: 0 <= v <= LARGEST, sentence)
    return value if isinstance(value, Tensor) else number


def multipliers(groups: list[dict[str, Any]]) -> list[float]:
    """What the learned step is multiplied by in each group: lr, which a scheduler may have moved."""
    rates = [float(group["lr"]) for group in groups]
    for index, rate in enumerate(rates):
        if not 0 <= rate < math.inf:
            raise ValueError(f"lr of parameter group {index} must be at least 0 and finite, got {rate!r}")
    return rates


def ratios(groups: list[dict[str, Any]]) -> list[float]:
    """The multipliers in units of the largest, which the metric has: D/rho."""
    rates = multipliers(groups)
    top = max(rates)
    return [rate / top if top else 1.0 for rate in rates]


def largest(groups: list[dict[str, Any]]) -> float:
    """The largest multiplier of all groups: lr, or what a scheduler of torch starts from or goes up to."""
    rates = [(group["lr"], group.get("initial_lr", 0.0), group.get("max_lr", 0.0)) for group in groups]
    return max(float(rate) for each in rates for rate in each)


def refuse_scaled(factor: float) -> None:
    """Refuse gradients that were divided by a power of two, at least 8, which the loss was not: a GradScaler's factor.

    A norm that is clipped is not a power of two to six digits. At the first step alone: later, chance would meet one.
    """
    if 0 < factor <= 1 / 8 and abs(math.log2(factor) - round(math.log2(factor))) < 1e-6:
        raise RuntimeError(
            f"gradients were multiplied by {factor:g} between backward() and step(), as a GradScaler does whose "
            "scale() is called inside of loss_fn. Return the loss itself from loss_fn, and give backward() "
            "run=lambda loss: scaler.scale(loss).backward()"
        )


def refuse_other_states(state_dict: dict[str, Any]) -> None:
    """Refuse what was not saved by an SGDOLFree of this version, or has been damaged since."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
        shown = sorted(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict).__name__
        raise ValueError(f"state_dict must be what SGDOLFree.state_dict() returned, got {shown}")
    for index, group in enumerate(state_dict["param_groups"]):
        if "averaging" not in group:
            raise ValueError(f"state_dict was not saved by SGDOLFree: its group {index} has only {sorted(group)}")
        if "metric" not in group:
            raise ValueError("state_dict was saved by SGDOLFree of version 0.1, which this version cannot continue")
        missing = [name for name in OPTIONS if name not in group]
        if missing:
            raise ValueError(f"state_dict is damaged: its group {index} has no {', '.join(missing)}")
        rule = group.get("rule", {})
        for name, value in rule.items():
            if name not in State._fields:
                raise ValueError(f"state_dict is damaged, or from a later version: rule has an unknown entry {name!r}")
            if not isinstance(value, Real | Tensor) or math.isnan(value):
                raise ValueError(f"state_dict is damaged: {name} in the rule of group {index} is {value!r}")
    _refuse_incomplete(state_dict["state"])


def _refuse_incomplete(state: Any) -> None:
    """Refuse vectors that are no tensors, or not all there."""
    if not isinstance(state, dict) or not all(isinstance(held, dict) for held in state.values()):
        raise ValueError("state_dict is damaged: its state is not a dict of dicts, one per parameter")
    vectors = ("momentum", "average", "previous")
    for index, held in state.items():
        missing = [name for name in vectors if not isinstance(held.get(name), Tensor)]
        if 0 < len(missing) < len(vectors):
            raise ValueError(f"state_dict is damaged: parameter {index} has no tensor {', '.join(missing)}")


def refuse_other_shapes(saved: list[Any], state: dict[Any, dict[str, Tensor]], params: list[Tensor]) -> None:
    for index, p in zip(saved, params, strict=False):
        for name, value in state.get(index, {}).items():
            if name != "moves" and not name.startswith("metric.") and value.shape != real_view(p).shape:
                raise ValueError(
                    f"state_dict does not fit: {name} of parameter {index} has shape {tuple(value.shape)}, the "
                    f"parameter {tuple(p.shape)}"
                )
