"""The options of the optimizer without M, its parameter groups, and states that an earlier version saved."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sgdol import metrics
from sgdol.torch._options import INSTEAD, check_flag, check_foreach, check_number, refuse_unknown
from sgdol.torch._world import real_view

__all__ = ["SHARED", "Group", "NoLearningRate", "checked", "refuse_other_shapes", "refuse_other_states"]

SHARED = ("momentum", "averaging", "metric", "maximize", "foreach")
"""Options that are the same for all parameter groups: there is one point, one direction, one norm."""


NO_RATE = "it chooses every step size itself. Delete the rate, and the scheduler with it"


def checked(options: dict[str, Any], unknown: dict[str, Any]) -> dict[str, Any]:
    """The options, numbers as Python's own; those of other optimizers are refused."""
    instead = {**INSTEAD, "lr": NO_RATE, "learning_rate": NO_RATE, "smoothness": "it measures the smoothness itself"}
    refuse_unknown(unknown, "SGDOLFree", options, instead)
    metrics.get(options["metric"])
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


def refuse_other_states(state_dict: dict[str, Any]) -> None:
    """Refuse what was not saved by an SGDOLFree of this version."""
    for index, group in enumerate(state_dict["param_groups"]):
        if "averaging" not in group:
            raise ValueError(f"state_dict was not saved by SGDOLFree: its group {index} has only {sorted(group)}")
        if "metric" not in group:
            raise ValueError("state_dict was saved by SGDOLFree of version 0.1, which this version cannot continue")


def refuse_other_shapes(saved: list[Any], state: dict[Any, dict[str, Tensor]], params: list[Tensor]) -> None:
    for index, p in zip(saved, params, strict=False):
        for name, value in state.get(index, {}).items():
            if not name.startswith("metric.") and value.shape != real_view(p).shape:
                raise ValueError(
                    f"state_dict does not fit: {name} of parameter {index} has shape {tuple(value.shape)}, the "
                    f"parameter {tuple(p.shape)}"
                )
