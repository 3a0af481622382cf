"""The options of SGDOLFree, what its parameter groups' lr means, and checks of a saved state."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from sgdol.free import State
from sgdol.torch._options import BOTH, WITHIN, Check, number, one_of, refuse_unknown
from sgdol.torch._options import INSTEAD as OF_OTHERS
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

# In every parameter group. (``defaults`` has more keys after unpickling: torch adds its own.)
OPTIONS: dict[str, Check] = {
    "lr": number(WITHIN[0], f"{WITHIN[1]}; 1 is the step size that is learned", tensor=True),
    "averaging": number(lambda v: v >= 0, "at least 0 and finite"),
    "state_dtype": one_of(
        (None, torch.bfloat16),
        ValueError,
        "None, for float32 or the wider type of the parameters, or torch.bfloat16",
    ),
    **BOTH,
}

# What to do in place of an option of SGDOL or of another optimizer.
INSTEAD = {
    **{name: "it is an option of sgdol.SGDOL alone" for name in OF_SGDOL if name not in OPTIONS},
    **OF_OTHERS,
    "smoothness": "it measures the smoothness itself",
}

# Must be the same in all parameter groups: there is one direction, in one norm, and one average.
SHARED = ("momentum", "averaging", "metric", "state_dtype", "maximize", "foreach")


def checked(options: dict[str, Any], unknown: dict[str, Any]) -> dict[str, Any]:
    refuse_unknown(unknown, "SGDOLFree", options, INSTEAD)
    return {**options, **{name: check(name, options[name]) for name, check in OPTIONS.items()}}


def multipliers(groups: list[dict[str, Any]]) -> list[float]:
    rates = [float(group["lr"]) for group in groups]  # a scheduler may have written anything
    for index, rate in enumerate(rates):
        if not 0 <= rate < math.inf:
            raise ValueError(f"lr of parameter group {index} must be at least 0 and finite, got {rate!r}")
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


def refuse_other_states(state_dict: dict[str, Any]) -> None:
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
    if not isinstance(state, dict) or not all(isinstance(saved, dict) for saved in state.values()):
        raise ValueError("state_dict is damaged: its state is not a dict of dicts, one per parameter")
    vectors = ("momentum", "average", "last_step")
    for index, saved in state.items():
        missing = [name for name in vectors if not isinstance(saved.get(name), Tensor)]
        if 0 < len(missing) < len(vectors):
            raise ValueError(f"state_dict is damaged: parameter {index} has no tensor {', '.join(missing)}")


def refuse_other_shapes(saved: list[Any], state: dict[Any, dict[str, Tensor]], params: list[Tensor]) -> None:
    for index, p in zip(saved, params, strict=False):
        for name, value in state.get(index, {}).items():
            is_vector = isinstance(value, Tensor) and name != "moves" and not name.startswith("metric.")
            if is_vector and value.shape != real_view(p).shape:
                raise ValueError(
                    f"state_dict does not fit: {name} of parameter {index} has shape {tuple(value.shape)}, the "
                    f"parameter {tuple(p.shape)}"
                )
