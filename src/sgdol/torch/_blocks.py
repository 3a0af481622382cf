"""Blocks of coordinates that share a step size, and where their state is kept.

The four granularities are the same surrogate on blocks: ``"global"`` has one block, ``"group"`` one per parameter
group, ``"tensor"`` one per parameter and ``"coordinate"`` one per scalar. State that belongs to a group (or to all of
them) stands in the group's dictionary, state that belongs to a parameter in ``optimizer.state[parameter]``:
``state_dict()`` saves both.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sgdol.learners import Learner
from sgdol.torch._shards import Shards, like_parameter, local

__all__ = ["GRANULARITIES", "Blocks", "Granularity", "share"]

Granularity = Literal["global", "group", "tensor", "coordinate"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)


class Blocks:
    """The blocks that take part in one update.

    Args:
        granularity: which coordinates share a step size.
        groups: the optimizer's parameter groups.
        state: the optimizer's state.
        params: the parameters that take part, in the order of the groups.
        shards: the ranks over which they are spread, None if they are not.
    """

    def __init__(
        self,
        granularity: Granularity,
        groups: list[dict[str, Any]],
        state: dict[Any, Any],
        params: list[Tensor],
        shards: Shards | None = None,
    ) -> None:
        self.granularity = granularity
        self.params = params
        self.shards = shards
        self._groups = groups
        self._state = state
        taking_part = set(params)
        self.per_group = [len(params)] if len(groups) == 1 else [_count(g["params"], taking_part) for g in groups]
        self.group_of = [i for i, size in enumerate(self.per_group) for _ in range(size)]
        self.momenta = [float(group["momentum"]) for group in groups]

    def cells(self, values: Tensor) -> Tensor:
        """One value per parameter, summed over the largest parts of each block in which momentum is the same."""
        if self.granularity == "global":
            return values.sum(dim=0, keepdim=True) if len(set(self.momenta)) == 1 else self.by_group(values)
        return self.by_group(values) if self.granularity == "group" else values

    def total(self, values: Tensor) -> Tensor:
        """One value per parameter, summed over each block (over each tensor, where blocks are coordinates)."""
        return self.merge(self.cells(values))

    def merge(self, cells: Tensor) -> Tensor:
        """One value per cell, summed over each block."""
        return cells.sum(dim=0, keepdim=True) if self.granularity == "global" else cells

    def cell_values(self, by_group: list[Tensor]) -> Tensor:
        """One value per group, for each cell: those of its group."""
        if self.granularity == "global" and len(set(self.momenta)) == 1:
            return by_group[0].reshape(1)
        values = torch.stack(by_group)
        return values if self.granularity in ("global", "group") else values[self.group_of]

    def by_group(self, values: Tensor) -> Tensor:
        """One value per parameter, summed over each group."""
        if len(self._groups) == 1:
            return values.sum(dim=0, keepdim=True)
        return torch.stack([part.sum() for part in values.split(self.per_group)])

    def rates(self, like: Tensor) -> Tensor:
        """The base rate lr of each group."""
        rates = [group["lr"] for group in self._groups]
        if any(isinstance(rate, Tensor) for rate in rates):
            return torch.stack([torch.as_tensor(rate).to(like).reshape(()) for rate in rates])
        return torch.tensor(rates, device=like.device, dtype=like.dtype)

    def alpha(self, fixed: float | None, like: Tensor) -> Tensor:
        """The regulariser's alpha of each block; 0 while it is not known yet."""
        if fixed is not None:
            return like.new_full((len(self._owners),), float(fixed))
        learned = self._groups[0].get("alpha_learned", like.new_zeros(())).to(like)
        return learned * self._sizes(like)

    def learn_alpha(self, n_total: Tensor, kappa: float, ok: Tensor | None) -> None:
        """Take alpha from the first update that moves: kappa ||d_0||^2, each block its even share by size.

        Kept per coordinate, so that a block which joins later gets the share that its size would have had; but the one
        global block keeps the whole.
        """
        old = self._groups[0].get("alpha_learned", torch.zeros_like(n_total)).to(n_total)
        first = kappa * n_total
        new = torch.where(old > 0, old, first if self.granularity == "global" else first / self._size())
        self._groups[0]["alpha_learned"] = new if ok is None else torch.where(ok, new, old)

    def learner_state(self, learner: Learner, like: Tensor) -> Any:
        """The learner's state as vectors over the blocks."""
        fresh = learner.initial(like.new_zeros(()))
        return type(fresh)(
            *(self._read(f"learner.{name}", value, like) for name, value in zip(fresh._fields, fresh, strict=True))
        )

    def tensor_state(self, learner: Learner, names: tuple[str, ...], index: int, like: Tensor) -> list[Tensor]:
        """The learner's state for one parameter, per coordinate: tensors that may be written to."""
        owner = self._owners[index]
        if f"learner.{names[0]}" not in owner:
            for name, value in zip(names, learner.initial(like.new_zeros(())), strict=True):
                piece = value.expand_as(like).clone(memory_format=torch.contiguous_format)
                owner[f"learner.{name}"] = like_parameter(piece, self.params[index])
        return [local(owner[f"learner.{name}"]) for name in names]

    def write_learner_state(self, new: Any, old: Any, ok: Tensor | None) -> None:
        """Store the learner's state."""
        for name, value, before in zip(new._fields, new, old, strict=True):
            self.write(f"learner.{name}", value, before, ok)

    def write(self, name: str, new: Tensor, old: Tensor, ok: Tensor | None) -> None:
        """Store one number per block, unless the update turns out not to be finite."""
        values = new if ok is None else torch.where(ok, new, old)
        for owner, value in zip(self._owners, values.unbind(), strict=True):
            owner[name] = value

    @functools.cached_property
    def _owners(self) -> list[dict[str, Any]]:
        if self.granularity == "global":
            return self._groups[:1]
        return self._groups if self.granularity == "group" else [self._state[p] for p in self.params]

    def _read(self, name: str, default: Tensor, like: Tensor) -> Tensor:
        return torch.stack([owner.get(name, default).to(like) for owner in self._owners])

    def _sizes(self, like: Tensor) -> Tensor:
        """By how much each block's alpha exceeds what is kept."""
        if self.granularity in ("global", "coordinate"):
            return torch.ones_like(like)
        if self.granularity == "tensor":
            sizes = [_size(p) for p in self.params]
        else:
            sizes = [sum(map(_size, group["params"])) for group in self._groups]
        return torch.tensor(sizes, device=like.device, dtype=like.dtype)

    def _size(self) -> int:
        return sum(_size(p) for group in self._groups for p in group["params"])


def share(groups: list[dict[str, Any]], granularity: str) -> None:
    """Copy what belongs to the whole optimizer from the first group to all, so that none can be saved without it."""
    for key, value in groups[0].items():
        if key in ("totals", "gradients", "pending", "alpha_learned") or (
            granularity == "global" and key.startswith("learner.")
        ):
            for group in groups[1:]:
                group[key] = value


def _count(params: list[Tensor], members: set[Tensor]) -> int:
    return sum(p in members for p in params)


def _size(p: Tensor) -> int:
    return p.numel() * (2 if p.is_complex() else 1)
