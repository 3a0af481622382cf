"""Saving and loading: without rounding, and by the protocol of torch.distributed.checkpoint.

``Optimizer.load_state_dict`` casts floating-point state to the parameter's type, which would round the sums and the
averages of narrow parameters. :func:`restore` replaces the cast values by the saved ones, sharded as the parameter is.

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
    "restore",
]

# The package with get_state_dict, set_state_dict, save and load; the last two may be given an optimizer itself.
CHECKPOINT = "torch.distributed.checkpoint"


class Blanks:
    """All keys that SGDOL may have in its state and parameter groups, with their values before any update.

    Args:
        groups: the parameter groups.
        state: the optimizer's state.
        learner_of: returns the online learner of a group.
        metrics: the metrics of the groups.
        keeps_direction: returns whether the state of a group's parameters has the last direction.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        state: dict[Any, Any],
        learner_of: Callable[[dict[str, Any]], Learner],
        metrics: Metrics,
        keeps_direction: Callable[[dict[str, Any]], bool],
    ) -> None:
        self._groups = groups
        self._state = state
        self._learner_of = learner_of
        self._metrics = metrics
        self._keeps_direction = keeps_direction

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
                blank.update(self._learner(group, like))
            blanks.append(blank)
        return blanks

    def parameters(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """Each parameter with the keys that are missing in its state; only these are allocated."""
        return [(p, self._parameter(p, group)) for group in self._groups for p in group["params"]]

    def _parameter(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        like, known = real_view(local(p.detach())), self._state.get(p, {})
        blank: dict[str, Any] = {}
        if "held_gradient" not in known:
            blank["held_gradient"] = torch.zeros_like(p)
        wide = torch.zeros_like(like, dtype=wide_dtype(like.dtype), memory_format=torch.contiguous_format)
        if uses_momentum(group) and "momentum" not in known:
            blank["momentum"] = like_parameter(torch.zeros_like(wide), p)
        if self._keeps_direction(group) and "direction" not in known:
            blank["direction"] = like_parameter(torch.zeros_like(wide), p)
        if group["averaging"] is not None and "average" not in known:
            blank["average"] = p.detach().to(dtype=torch.promote_types(p.dtype, torch.float32), copy=True)
        if group["granularity"] == "tensor":
            blank.update(self._learner(group, torch.zeros((), device=p.device, dtype=scalar_dtype(p.device))))
        elif group["granularity"] == "coordinate" and not any(key.startswith("learner.") for key in known):
            number = self._learner(group, wide.new_zeros(()))
            blank.update({key: like_parameter(value.expand_as(wide).clone(), p) for key, value in number.items()})
        blank.update(self._metrics.blank(p))
        return {key: value for key, value in blank.items() if key not in known}

    def _learner(self, group: dict[str, Any], like: Tensor) -> dict[str, Tensor]:
        fresh = self._learner_of(group).initial(like)
        return {f"learner.{name}": value.clone() for name, value in zip(fresh._fields, fresh, strict=True)}


class FreeBlanks:
    """All keys that SGDOLFree may have in its state and parameter groups, as :class:`Blanks` has those of SGDOL."""

    def __init__(self, groups: list[dict[str, Any]], state: dict[Any, Any], metrics: Metrics) -> None:
        self._groups, self._state, self._metrics = groups, state, metrics

    def groups(self) -> list[dict[str, Any]]:
        return [{"rule": State()._asdict(), "gradients": 0, "unit": 1.0} for _ in self._groups]

    def parameters(self) -> list[tuple[Tensor, dict[str, Any]]]:
        return [(p, self._parameter(p)) for group in self._groups for p in group["params"]]

    def _parameter(self, p: Tensor) -> dict[str, Any]:
        known, piece = self._state.get(p, {}), real_view(local(p.detach()))
        wide = piece.to(wide_dtype(p.dtype), memory_format=torch.contiguous_format)
        fresh = {"momentum": torch.zeros_like, "average": torch.clone, "last_step": torch.zeros_like}
        blank = {name: like_parameter(make(wide), p) for name, make in fresh.items() if name not in known}
        blank.update({name: value for name, value in self._metrics.blank(p).items() if name not in known})
        # 0 for a parameter that has never moved; after loading its state is dropped again.
        return {**blank, "moves": torch.tensor(float("momentum" in known and "moves" not in known))}


def is_asked() -> bool:
    """Whether a function of torch.distributed.checkpoint is on the stack of calls."""
    if CHECKPOINT not in sys.modules:  # the usual case, at no cost
        return False
    frame = sys._getframe(1).f_back
    while frame is not None and not f"{frame.f_globals.get('__name__')}.".startswith(f"{CHECKPOINT}."):
        frame = frame.f_back
    return frame is not None


def complete(state_dict: dict[str, Any], blanks: Blanks | FreeBlanks) -> dict[str, Any]:
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    state = state_dict["state"]
    for group, blank in zip(state_dict["param_groups"], blanks.groups(), strict=True):
        group.update({key: value for key, value in blank.items() if key not in group})
    for index, (p, blank) in zip(indices, blanks.parameters(), strict=True):
        if p.requires_grad or index in state:  # frozen parameters have no state, and get none
            state[index] = {**blank, **state.get(index, {})}
    return state_dict


def is_creating(groups: list[dict[str, Any]], params: list[Tensor], k: int, world: World) -> bool:
    """Whether torch.distributed.checkpoint calls ``step()`` to make the optimizer create its state.

    It does so with lr = 0 and gradients of zero that no backward pass has made (k = 0).
    """
    if k or not all(group["lr"] == 0 for group in groups):
        return False
    # Gradients that were written by hand at lr = 0 are not all zero.
    lengths = torch.stack([piece_of(p.grad, p).double().square().sum() for p in params if p.grad is not None])
    return not world.total([p for p in params if p.grad is not None], lengths[None]).sum().item()


def create(groups: list[dict[str, Any]], state: dict[Any, Any], blanks: Blanks | FreeBlanks) -> None:
    for p, blank in blanks.parameters():
        if p.requires_grad:
            for key, value in blank.items():  # what has been learned stays
                state[p].setdefault(key, value)
    for group, blank in zip(groups, blanks.groups(), strict=True):
        group.update({key: value for key, value in blank.items() if key not in group})


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
        loaded.update(final)

    def after(_: Optimizer) -> None:
        restore(optimizer, loaded, in_basis)
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


def restore(optimizer: Optimizer, state_dict: dict[str, Any], in_basis: tuple[str, ...] = ()) -> None:
    """Replace state that torch has cast to the parameter's type by the saved values; see :func:`load`."""
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    params = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    for index, (p, group) in zip(saved, params, strict=True):
        # Vectors of a complex parameter are kept as pairs of real numbers, its average need not be.
        shapes = (p.shape, (*p.shape, 2)) if p.is_complex() else (p.shape,)
        held = state_dict["state"].get(index, {})
        carried = carried_over(optimizer._metric_of(group), p, held, in_basis)  # type: ignore[attr-defined]
        for name in held.keys() - carried.keys():
            del optimizer.state[p][name]
        for key, value in carried.items():
            if isinstance(value, Tensor):
                if value.dim() and value.shape not in shapes and not key.startswith("metric."):
                    raise ValueError(
                        f"state_dict does not fit: {key} of parameter {index} has shape {tuple(value.shape)}, the "
                        f"parameter {tuple(p.shape)}"
                    )
                optimizer.state[p][key] = fitted(value, p)


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
