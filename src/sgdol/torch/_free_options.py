"""The options of the optimizer without M, its parameter groups, and states that an earlier version saved."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from sgdol import metrics
from sgdol.free import State
from sgdol.metrics import RMS, Euclidean
from sgdol.torch._options import INSTEAD, check_flag, check_foreach, check_number, refuse_unknown
from sgdol.torch._tensors import real_view

__all__ = ["SHARED", "Group", "NoLearningRate", "checked", "of_this_version", "refuse_other_shapes"]

SHARED = ("momentum", "averaging", "metric", "maximize", "foreach")
"""Options that are the same for all parameter groups: there is one point, one direction, one norm."""


NO_RATE = "it chooses every step size itself. Delete the rate, and the scheduler with it"


def checked(options: dict[str, Any], unknown: dict[str, Any]) -> dict[str, Any]:
    """The options, numbers as Python's own; those of other optimizers are refused."""
    instead = {**INSTEAD, "lr": NO_RATE, "learning_rate": NO_RATE, "smoothness": "it measures the smoothness itself"}
    refuse_unknown(unknown, "SGDOLFree", options, instead)
    if not isinstance(metrics.get(options["metric"]), RMS | Euclidean):
        raise TypeError(f"metric must be Euclidean, RMS or AdaGrad of sgdol.metrics, got {options['metric']!r}")
    at_least_0 = (lambda v: v >= 0), "at least 0 and finite"
    return {
        **options,
        "momentum": check_number("momentum", options["momentum"], lambda v: 0 <= v < 1, "at least 0 and less than 1"),
        "weight_decay": check_number("weight_decay", options["weight_decay"], *at_least_0),
        "averaging": check_number("averaging", options["averaging"], *at_least_0),
        "maximize": check_flag("maximize", options["maximize"]),
        "foreach": check_foreach(options["foreach"]),
    }


class Group(dict[str, Any]):
    """A parameter group that says why there is no learning rate in it."""

    def __missing__(self, key: str) -> Any:
        if key in ("lr", "initial_lr"):
            raise NoLearningRate(
                "SGDOLFree has no learning rate, so there is nothing that a scheduler could move: it chooses every "
                "step size itself, and its average takes the place of a decay. Delete the scheduler; "
                'group["step_size"] is what to log'
            )
        raise KeyError(key)


class NoLearningRate(KeyError):
    """Somebody wants to read or schedule the learning rate of an optimizer that has none."""

    def __str__(self) -> str:
        return str(self.args[0])


def of_this_version(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state, with what version 0.1 saved in today's words."""
    groups = []
    for index, group in enumerate(state_dict["param_groups"]):
        if "averaging" not in group:
            raise ValueError(f"state_dict was not saved by SGDOLFree: its group {index} has only {sorted(group)}")
        groups.append({**group})
    state = {index: {**vectors} for index, vectors in state_dict["state"].items()}
    for group in groups:
        if "metric" in group:
            continue
        group["metric"] = "euclidean"
        if "rule" not in group:
            continue
        group["rule"] = _rule_of_version_0_1(group["rule"])
        if group["maximize"]:
            for index in group["params"]:
                if "momentum" in state.get(index, {}):
                    state[index]["momentum"] = -state[index]["momentum"]
    return {**state_dict, "state": state, "param_groups": groups}


def _rule_of_version_0_1(old: dict[str, Any]) -> dict[str, Any]:
    """What was learned, in the units that are used now. The last step is forgotten: its start was not saved."""
    alpha, weight = old["alpha"] or 1.0, old["curvature_weight"] or 1.0
    count = math.sqrt(old["updates"] + 1.0)
    kept = State(**{name: old[name] for name in State._fields if name in old})
    learned = kept._replace(
        first_norm=math.sqrt(old["alpha"]),
        signal=old["signal"] / alpha,
        noise=old["noise"] / alpha,
        signal_root=math.sqrt(old["signal_squares"]) / alpha,
        recent_signal=old["recent_signal"] / alpha,
        recent_noise=old["recent_noise"] / alpha,
        curvature=math.sqrt(old["curvature_squares"] / weight),
        stiffness=math.sqrt(old["norm_squares"] / weight),
        curvature_weight=weight * count,
        step_size=0.0,
    )
    return learned._asdict()


def refuse_other_shapes(saved: list[Any], state: dict[Any, dict[str, Tensor]], params: list[Tensor]) -> None:
    for index, p in zip(saved, params, strict=False):
        for name, value in state.get(index, {}).items():
            if value.shape != real_view(p).shape:
                raise ValueError(
                    f"state_dict does not fit: {name} of parameter {index} has shape {tuple(value.shape)}, the "
                    f"parameter {tuple(p.shape)}"
                )
