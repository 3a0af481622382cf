"""Saving and loading: without rounding, and by the protocol of torch.distributed.checkpoint.

``Optimizer.load_state_dict`` casts floating-point state to the parameter's type, which would round the sums and the
averages of narrow parameters. :func:`load` replaces the cast values by the saved ones, sharded as the parameter is.

torch.distributed.checkpoint (DCP) loads *into* an existing state dict, key by key, and drops saved keys that are not in
it. So the optimizer has to have every key that it may ever have:

* When DCP calls ``state_dict()``, :meth:`Blanks.complete` adds the missing keys, with the values from before any
  update; a held gradient is zero.
* To make an optimizer create its state, DCP sets lr = 0 and all gradients to zero and calls ``step()`` without any
  backward pass. :func:`is_creating` recognises that, and :meth:`Blanks.create` creates all keys. Nothing else happens.
* :func:`drop_blanks` removes zero gradients that are not held, when training goes on and after loading.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sgdol.free import State
from sgdol.learners import Learner
from sgdol.torch import _diagnostics as diagnostics
from sgdol.torch._blocks import OF_GROUPS
from sgdol.torch._direction import uses_momentum
from sgdol.torch._metric import Metrics
from sgdol.torch._options import LEARNED_WITH, OPTIONS_FREE
from sgdol.torch._remembered import carried_over
from sgdol.torch._vectors import scalar_dtype, wide_dtype
from sgdol.torch._world import World, fitted, like_parameter, local, piece_of, real_view

__all__ = [
    "Blanks",
    "FreeBlanks",
    "drop_blanks",
    "first_step_size",
    "is_asked",
    "is_creating",
    "load",
    "refuse_another_configuration",
    "refuse_other_states",
]

# What has the parameter's shape, whatever the options are.
VECTORS = ("held_gradient", "momentum", "direction", "average", "last_step")

# The package with get_state_dict, set_state_dict, save and load; the last two may be given an optimizer itself.
CHECKPOINT = "torch.distributed.checkpoint"


class Blanks:
    """All keys that SGDOL may have in its state and parameter groups, with their values before any update.

    Args:
        groups: the parameter groups.
        state: the optimizer's state.
        metrics: the metrics of the groups.
        learner_of: returns the online learner of a group.
        keeps_direction: returns whether the state of a group's parameters has the last direction.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        state: dict[Any, Any],
        metrics: Metrics,
        learner_of: Callable[[dict[str, Any]], Learner],
        keeps_direction: Callable[[dict[str, Any]], bool],
    ) -> None:
        self._groups, self._state, self._metrics = groups, state, metrics
        self._learner_of, self._keeps_direction = learner_of, keeps_direction

    def create(self) -> None:
        """Add the keys that are missing to the optimizer."""
        self._fill(self._groups, self._state, [p for group in self._groups for p in group["params"]])

    def complete(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Add the keys that are missing to what ``state_dict()`` returns."""
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        saved = state_dict["state"]
        state = {index: dict(saved.get(index, {})) for index in indices}  # the dicts in it are the optimizer's own
        self._fill(state_dict["param_groups"], state, indices)
        saved.update({index: found for index, found in state.items() if found})
        return state_dict

    def _fill(self, groups: list[dict[str, Any]], state: dict[Any, Any], keys: list[Any]) -> None:
        places = iter(keys)
        for own, group in zip(groups, self._groups, strict=True):
            own.update({name: value for name, value in self._of_group(group).items() if name not in own})
            for p, key in zip(group["params"], places, strict=False):
                if p.requires_grad or state.get(key):  # frozen parameters have no state, and get none
                    blank = {**self._of_parameter(p, group, state[key]), **self._metrics.blank(p)}
                    state[key].update({name: value for name, value in blank.items() if name not in state[key]})

    def _of_group(self, group: dict[str, Any]) -> dict[str, Any]:
        like = first_step_size(self._groups[0]).new_zeros(())  # a checkpoint is read into the memory of each group
        blank: dict[str, Any] = {"gradients": 0, "pending": False, "totals": diagnostics.zeros(like)}
        if group["alpha"] is None:
            blank["alpha_learned"] = like.clone()
        if uses_momentum(group):
            blank["momentum_weight"] = like.clone()
        if group["granularity"] in OF_GROUPS:
            blank.update(self._learned(group, like))
        return blank

    def _of_parameter(self, p: Tensor, group: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
        # Only the vectors that are missing are allocated.
        wanted = {"momentum": uses_momentum(group), "direction": self._keeps_direction(group)}
        blank = {name: _zeros(p) for name, is_wanted in wanted.items() if is_wanted and name not in known}
        if "held_gradient" not in known:
            blank["held_gradient"] = torch.zeros_like(p)
        if group["averaging"] is not None and "average" not in known:
            blank["average"] = p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
        if group["granularity"] not in (*OF_GROUPS, "coordinate"):
            blank |= self._learned(group, torch.zeros((), device=p.device, dtype=scalar_dtype(p.device)))
        elif group["granularity"] == "coordinate" and not any(name.startswith("learner.") for name in known):
            numbers = self._learned(group, torch.zeros_like(_wide(p)))
            blank |= {name: like_parameter(value, p) for name, value in numbers.items()}
        return blank

    def _learned(self, group: dict[str, Any], zero: Tensor) -> dict[str, Tensor]:
        fresh = self._learner_of(group).initial(zero)
        return {f"learner.{name}": value.clone() for name, value in zip(fresh._fields, fresh, strict=True)}


class FreeBlanks(Blanks):
    """All keys that SGDOLFree may have in its state and parameter groups."""

    def __init__(self, groups: list[dict[str, Any]], state: dict[Any, Any], metrics: Metrics) -> None:
        self._groups, self._state, self._metrics = groups, state, metrics

    def _of_group(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"rule": State()._asdict(), "gradients": 0, "unit": 1.0}

    def _of_parameter(self, p: Tensor, group: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
        blank = {name: _zeros(p) for name in ("momentum", "last_step") if name not in known}
        if "average" not in known:
            blank["average"] = like_parameter(_wide(p).clone(), p)
        # 0 for a parameter that has never moved; after loading its state is dropped again.
        return {**blank, "moves": torch.tensor(float("momentum" in known))}


def _zeros(p: Tensor) -> Tensor:
    return like_parameter(torch.zeros_like(_wide(p)), p)


def _wide(p: Tensor) -> Tensor:
    return real_view(local(p.detach())).to(wide_dtype(p.dtype), memory_format=torch.contiguous_format)


def is_asked() -> bool:
    """Whether a function of torch.distributed.checkpoint is on the stack of calls."""
    if CHECKPOINT not in sys.modules:  # the usual case, at no cost
        return False
    frame = sys._getframe(1).f_back
    while frame is not None and not f"{frame.f_globals.get('__name__')}.".startswith(f"{CHECKPOINT}."):
        frame = frame.f_back
    return frame is not None


def is_creating(groups: list[dict[str, Any]], params: list[Tensor], k: int, world: World) -> bool:
    """Whether DCP calls ``step()`` to create state: lr = 0, and gradients of 0 that no backward has made (k = 0)."""
    if k or not all(group["lr"] == 0 for group in groups):
        return False
    params = [p for p in params if p.grad is not None]
    # Gradients that were written by hand at lr = 0 are not all zero.
    lengths = torch.stack([piece_of(p.grad, p).double().square().sum() for p in params])  # type: ignore[arg-type]
    return not world.total(params, lengths[None]).sum().item()


def drop_blanks(state: dict[Any, Any], pending: bool) -> None:
    if not pending:
        for p in list(state):
            state[p].pop("held_gradient", None)
            if not state[p]:
                del state[p]


def load(
    optimizer: Optimizer,
    load_state_dict: Callable[[dict[str, Any]], Any],
    state_dict: dict[str, Any],
    check: Callable[[dict[str, Any]], None],
    then: Callable[[], None],
    in_basis: tuple[str, ...] = (),
) -> None:
    """Load a state without rounding: ``check`` may refuse it before, ``then`` is called after.

    ``in_basis`` names the vectors that are kept in the basis of the Kronecker metric.
    """
    loaded: dict[str, Any] = {}

    def before(_: Optimizer, final: dict[str, Any]) -> None:
        check(final)
        _refuse_other_shapes(final, [p for group in optimizer.param_groups for p in group["params"]])
        loaded.update(final)

    def after(_: Optimizer) -> None:
        saved = [index for group in loaded["param_groups"] for index in group["params"]]
        params = [(p, group) for group in optimizer.param_groups for p in group["params"]]
        for index, (p, group) in zip(saved, params, strict=True):
            held = loaded["state"].get(index, {})
            carried = carried_over(optimizer._metric_of(group), p, held, in_basis)  # type: ignore[attr-defined]
            for name in held.keys() - carried.keys():
                del optimizer.state[p][name]
            for name, value in carried.items():
                if isinstance(value, Tensor):
                    optimizer.state[p][name] = fitted(value, p)
        then()

    # After the pre-hooks of users, which may change the state dict; before their post-hooks, which see exact values.
    handles = [
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    ]
    try:
        load_state_dict(state_dict)
    finally:
        for handle in handles:  # they belong to this call alone
            handle.remove()


def _refuse_other_shapes(state_dict: dict[str, Any], params: list[Tensor]) -> None:
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    for index, p in zip(saved, params, strict=False):  # torch itself refuses other numbers of parameters
        for name, value in state_dict["state"].get(index, {}).items():
            if not isinstance(value, Tensor) or name.startswith("metric.") or not (value.dim() or name in VECTORS):
                continue
            # Vectors of a complex parameter are kept as pairs of real numbers, or as complex numbers.
            if value.shape != (p if value.is_complex() else real_view(p)).shape:
                raise ValueError(
                    f"state_dict does not fit: {name} of parameter {index} has shape {tuple(value.shape)}, the "
                    f"parameter {tuple(p.shape)}"
                )


def first_step_size(group: dict[str, Any]) -> Tensor:
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    return torch.as_tensor(group["lr"], device=device, dtype=scalar_dtype(device)).detach().clone().reshape(())


def refuse_another_configuration(groups: list[dict[str, Any]], state_dict: dict[str, Any]) -> None:
    for index, (saved, group) in enumerate(zip(state_dict["param_groups"], groups, strict=False)):
        if "granularity" not in saved:
            raise ValueError(f"state_dict was not saved by SGDOL: its group {index} has only {sorted(saved)}")
        for name in LEARNED_WITH:
            if name in saved and saved[name] != group[name]:
                raise ValueError(
                    f"state_dict was saved with {name}={saved[name]!r} in group {index}, this optimizer has "
                    f"{name}={group[name]!r}: construct it with the same {name}"
                )


def refuse_other_states(state_dict: dict[str, Any]) -> None:
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
        shown = sorted(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict).__name__
        raise ValueError(f"state_dict must be what SGDOLFree.state_dict() returned, got {shown}")
    for index, group in enumerate(state_dict["param_groups"]):
        if "averaging" not in group or "estimator" in group:  # SGDOL's groups have both
            raise ValueError(f"state_dict was not saved by SGDOLFree: its group {index} has only {sorted(group)}")
        if "metric" not in group:
            raise ValueError("state_dict was saved by SGDOLFree of version 0.1, which this version cannot continue")
        missing = [name for name in OPTIONS_FREE if name not in group]
        if missing:
            raise ValueError(f"state_dict is damaged: its group {index} has no {', '.join(missing)}")
        for name, value in group.get("rule", {}).items():
            if name not in State._fields:
                raise ValueError(f"state_dict is damaged, or from a later version: rule has an unknown entry {name!r}")
            if not isinstance(value, Real | Tensor) or math.isnan(value):
                raise ValueError(f"state_dict is damaged: {name} in the rule of group {index} is {value!r}")
    state = state_dict["state"]
    if not isinstance(state, dict) or not all(isinstance(saved, dict) for saved in state.values()):
        raise ValueError("state_dict is damaged: its state is not a dict of dicts, one per parameter")
    vectors = ("momentum", "average", "last_step")
    for index, saved in state.items():
        missing = [name for name in vectors if not isinstance(saved.get(name), Tensor)]
        if 0 < len(missing) < len(vectors):
            raise ValueError(f"state_dict is damaged: parameter {index} has no tensor {', '.join(missing)}")
