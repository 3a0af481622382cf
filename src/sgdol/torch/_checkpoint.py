"""Saving and loading: without rounding, and by the protocol of torch.distributed.checkpoint.

``Optimizer.load_state_dict`` casts floating-point state to the parameter's type, which would round the sums and the
averages of narrow parameters. :func:`load` replaces the cast values by the saved ones, sharded as the parameter is.

torch.distributed.checkpoint (DCP) loads *into* an existing state dict, key by key, and drops saved keys that are not in
it. So the optimizer has to have every key that it may ever have:

* When DCP calls ``state_dict()``, :func:`complete` adds the missing keys, with the values from before any update; a
  held gradient is zero.
* To make an optimizer create its state, DCP sets lr = 0 and all gradients to zero and calls ``step()`` without any
  backward pass. :func:`is_creating` recognises that, and :func:`create` creates all keys. Nothing else happens.
* :func:`drop_blanks` removes zero gradients that are not held, when training goes on and after loading.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sgdol.free import State
from sgdol.learners import Learner
from sgdol.torch import _diagnostics as diagnostics
from sgdol.torch._direction import uses_momentum
from sgdol.torch._metric import Metrics
from sgdol.torch._remembered import carried_over
from sgdol.torch._vectors import scalar_dtype, wide_dtype
from sgdol.torch._world import World, fitted, like_parameter, local, piece_of, real_view

__all__ = [
    "Blanks",
    "FreeBlanks",
    "complete",
    "create",
    "drop_blanks",
    "first_step_size",
    "is_asked",
    "is_creating",
    "load",
    "refuse_another_configuration",
]

# What has the parameter's shape, whatever the options are.
VECTORS = ("held_gradient", "momentum", "direction", "average", "last_step")

# The package with get_state_dict, set_state_dict, save and load; the last two may be given an optimizer itself.
CHECKPOINT = "torch.distributed.checkpoint"


Maker = Callable[[Tensor], Any]


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

    def groups(self) -> list[dict[str, Any]]:
        like = first_step_size(self._groups[0]).new_zeros(())
        blanks = []
        for group in self._groups:  # memory of its own for each group: a checkpoint is read into it
            blank: dict[str, Any] = {"gradients": 0, "pending": False, "totals": diagnostics.zeros(like)}
            if group["alpha"] is None:
                blank["alpha_learned"] = like.clone()
            if uses_momentum(group):
                blank["momentum_weight"] = like.clone()
            if group["granularity"] in ("global", "group"):
                blank.update({name: make(like) for name, make in self._learned(group).items()})
            blanks.append(blank)
        return blanks

    def parameters(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """Each parameter with the keys that are missing in its state; only these are allocated."""
        return [(p, self._missing(p, group)) for group in self._groups for p in group["params"]]

    def _missing(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        known = self._state.get(p, {})
        blank = {name: make(p) for name, make in self._makers(group).items() if name not in known}
        return {**blank, **{name: value for name, value in self._metrics.blank(p).items() if name not in known}}

    def _makers(self, group: dict[str, Any]) -> dict[str, Maker]:
        makers: dict[str, Maker] = {"held_gradient": torch.zeros_like}
        if uses_momentum(group):
            makers["momentum"] = _zeros
        if self._keeps_direction(group):
            makers["direction"] = _zeros
        if group["averaging"] is not None:
            makers["average"] = lambda p: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
        for name, make in self._learned(group).items():
            if group["granularity"] == "tensor":
                makers[name] = lambda p, make=make: make(torch.zeros((), device=p.device, dtype=scalar_dtype(p.device)))
            elif group["granularity"] == "coordinate":
                makers[name] = lambda p, make=make: like_parameter(make(torch.zeros_like(_wide(p))), p)
        return makers

    def _learned(self, group: dict[str, Any]) -> dict[str, Maker]:
        # Of a zero, a new tensor for each number that the learner keeps.
        initial = self._learner_of(group).initial
        names = initial(torch.zeros(()))._fields
        return {f"learner.{name}": lambda zero, name=name: getattr(initial(zero), name).clone() for name in names}


class FreeBlanks(Blanks):
    """All keys that SGDOLFree may have in its state and parameter groups."""

    def __init__(self, groups: list[dict[str, Any]], state: dict[Any, Any], metrics: Metrics) -> None:
        self._groups, self._state, self._metrics = groups, state, metrics

    def groups(self) -> list[dict[str, Any]]:
        return [{"rule": State()._asdict(), "gradients": 0, "unit": 1.0} for _ in self._groups]

    def _makers(self, group: dict[str, Any]) -> dict[str, Maker]:
        return {
            "momentum": _zeros,
            "average": lambda p: like_parameter(_wide(p).clone(), p),
            "last_step": _zeros,
            # 0 for a parameter that has never moved; after loading its state is dropped again.
            "moves": lambda p: torch.tensor(float("momentum" in self._state.get(p, {}))),
        }


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


def complete(state_dict: dict[str, Any], blanks: Blanks) -> dict[str, Any]:
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    saved = state_dict["state"]
    state = {index: dict(saved.get(index, {})) for index in indices}  # the dicts in it are the optimizer's own
    _fill(state_dict["param_groups"], state, indices, blanks)
    saved.update({index: found for index, found in state.items() if found})
    return state_dict


def create(groups: list[dict[str, Any]], state: dict[Any, Any], blanks: Blanks) -> None:
    _fill(groups, state, [p for group in groups for p in group["params"]], blanks)


def _fill(groups: list[dict[str, Any]], state: dict[Any, Any], keys: list[Any], blanks: Blanks) -> None:
    # What has been learned stays.
    for group, blank in zip(groups, blanks.groups(), strict=True):
        group.update({name: value for name, value in blank.items() if name not in group})
    for key, (p, blank) in zip(keys, blanks.parameters(), strict=True):
        if p.requires_grad or state.get(key):  # frozen parameters have no state, and get none
            state[key].update(blank)


def is_creating(groups: list[dict[str, Any]], params: list[Tensor], k: int, world: World) -> bool:
    """Whether torch.distributed.checkpoint calls ``step()`` to make the optimizer create its state.

    It does so with lr = 0 and gradients of zero that no backward pass has made (k = 0).
    """
    if k or not all(group["lr"] == 0 for group in groups):
        return False
    # Gradients that were written by hand at lr = 0 are not all zero.
    lengths = torch.stack([piece_of(p.grad, p).double().square().sum() for p in params if p.grad is not None])
    return not world.total([p for p in params if p.grad is not None], lengths[None]).sum().item()


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
    """Load a state without rounding.

    Args:
        optimizer: the optimizer.
        load_state_dict: torch's own method of it.
        state_dict: what ``state_dict()`` returned.
        check: raises ValueError if the state is of another configuration.
        then: is called when the state has been loaded.
        in_basis: the names of vectors that are kept in the basis of the Kronecker metric.
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


def refuse_another_configuration(
    state_dict: dict[str, Any], groups: list[dict[str, Any]], names: tuple[str, ...]
) -> None:
    for index, (saved, group) in enumerate(zip(state_dict["param_groups"], groups, strict=False)):
        if "granularity" not in saved:
            raise ValueError(f"state_dict was not saved by SGDOL: its group {index} has only {sorted(saved)}")
        for name in names:
            if name in saved and saved[name] != group[name]:
                raise ValueError(
                    f"state_dict was saved with {name}={saved[name]!r} in group {index}, this optimizer has "
                    f"{name}={group[name]!r}: construct it with the same {name}"
                )
