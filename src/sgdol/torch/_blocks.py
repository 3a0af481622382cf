"""Blocks of coordinates that share a step size, and where their state is kept.

The four granularities are the same surrogate on blocks: ``"global"`` has one block, ``"group"`` one per parameter
group, ``"tensor"`` one per parameter and ``"coordinate"`` one per scalar. Parameter groups may differ in it. State that
belongs to a group (or to several) stands in the group's dictionary, state that belongs to a parameter in
``optimizer.state[parameter]``: ``state_dict()`` saves both. A new granularity is one class here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from sgdol.learners import Learner
from sgdol.torch._tensors import size, stacked
from sgdol.torch._world import like_parameter, local

__all__ = ["GRANULARITIES", "Block", "Blocks", "Granularity", "Partition", "learners_of", "share"]

Granularity = Literal["global", "group", "tensor", "coordinate"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)

LARGEST = 2.0**-40
"""Alpha is at most so much of the largest number there is, so that sums with it stay finite."""


class Partition(Protocol):
    """Which parameters share a step size, and who keeps what is learned for them."""

    def label(self, group: dict[str, Any], place: int, param: Tensor) -> Hashable:
        """Parameters of the same label are in one block; ``place`` is that of the group."""
        ...

    def owner(self, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """Where the block of a parameter keeps its state; ``state`` is the parameter's own."""
        ...

    def size(self, members: list[dict[str, Any]], param: Tensor) -> int:
        """How many scalars a block has, also those that take no part; ``members`` are the groups of its label."""
        ...


class _Global:
    def label(self, group: dict[str, Any], place: int, param: Tensor) -> Hashable:
        return ("global", group["learner"], group["alpha"], group["kappa"])

    def owner(self, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        return group

    def size(self, members: list[dict[str, Any]], param: Tensor) -> int:
        return sum(size(p) for group in members for p in group["params"])


class _Group(_Global):
    def label(self, group: dict[str, Any], place: int, param: Tensor) -> Hashable:
        return ("group", place)


class _Tensor:
    def label(self, group: dict[str, Any], place: int, param: Tensor) -> Hashable:
        return ("tensor", id(param))

    def owner(self, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        return state

    def size(self, members: list[dict[str, Any]], param: Tensor) -> int:
        return size(param)


class _Coordinate(_Tensor):
    """Every scalar is a block: what is summed over blocks here is summed over the tensor, for the records."""

    def label(self, group: dict[str, Any], place: int, param: Tensor) -> Hashable:
        return ("coordinate", id(param))

    def size(self, members: list[dict[str, Any]], param: Tensor) -> int:
        return 1


PARTITIONS: dict[str, Partition] = {
    "global": _Global(),
    "group": _Group(),
    "tensor": _Tensor(),
    "coordinate": _Coordinate(),
}


class Block(NamedTuple):
    """Parameters that share a step size (or, of a tensor whose coordinates are blocks, the tensor)."""

    owner: dict[str, Any]
    group: dict[str, Any]
    """The first of its groups: they have the learner and alpha in common."""
    size: int
    rows: list[int]
    """Which of the parameters that take part are in it."""


class Blocks:
    """The blocks of the parameters that take part in updates; made anew only when these change.

    Args:
        groups: the optimizer's parameter groups.
        state: the optimizer's state.
        params: the parameters that take part, in the order of the groups.
        group_of: the place of each parameter's group.
    """

    def __init__(
        self, groups: list[dict[str, Any]], state: dict[Any, Any], params: list[Tensor], group_of: list[int]
    ) -> None:
        self.params = params
        self.group_of = group_of
        self.groups = groups
        self.per_group = [group_of.count(i) for i in range(len(groups))] if len(groups) > 1 else [len(params)]
        found: dict[Hashable, Block] = {}
        labels = _labels(groups)
        for row, (p, place) in enumerate(zip(params, group_of, strict=True)):
            group = groups[place]
            partition = PARTITIONS[group["granularity"]]
            label = partition.label(group, place, p)
            if label not in found:
                members = labels.get(label, [group])
                owner = partition.owner(members[0], state[p] if isinstance(partition, _Tensor) else {})
                found[label] = Block(owner, members[0], partition.size(members, p), [])
            found[label].rows.append(row)
        blocks = list(found.values())
        self._owners = {b.rows[0]: b.owner for b in blocks}
        self.tensors = [b for b in blocks if b.group["granularity"] != "coordinate"]
        """The blocks that have one number each."""
        self.coordinates = [b.rows[0] for b in blocks if b.group["granularity"] == "coordinate"]
        """The parameters whose coordinates are blocks."""
        self.whole = len(labels) == 1 and all(group["granularity"] == "global" for group in groups)
        """Whether there is one block only, whatever takes part."""
        self._index: Tensor | None = None
        self._sizes: Tensor | None = None
        self._made_of = _options(groups)

    def current(self) -> bool:
        """Whether the groups still say what they said."""
        return self._made_of == _options(self.groups)

    @property
    def identity(self) -> bool:
        """Whether every block is one parameter, in order."""
        return len(self.tensors) == len(self.params)

    def numbers(self, learner_of: Callable[[dict[str, Any]], Learner]) -> bool:
        """Whether one block has everything, with one rate that is a number and a learner that takes numbers."""
        if len(self.tensors) != 1 or self.coordinates:
            return False
        group = self.tensors[0].group
        if group["alpha"] is not None and any(g["alpha"] is None for g in self.groups):
            return False  # of groups that take no part: theirs is learned from this update
        return type(learner_of(group)).__module__ == "sgdol.learners" and all(
            isinstance(g["lr"], float) and g["lr"] == group["lr"] for g in self.groups
        )

    def owner(self, row: int) -> dict[str, Any]:
        """Where the state of a parameter is whose coordinates are blocks."""
        return self._owners[row]

    def sum(self, values: Tensor) -> Tensor:
        """One value per parameter, summed over each block that has one number."""
        if len(self.tensors) == 1 and not self.coordinates:
            return values.sum(dim=0, keepdim=True)
        if self.identity:
            return values
        if not self.tensors:
            return values[:0]
        self._place(values)
        chosen = values if not self.coordinates else values[self._rows]
        return values.new_zeros(len(self.tensors)).index_add_(0, self._index, chosen)  # type: ignore[arg-type]

    def spread(self, values: Tensor) -> Tensor:
        """One value per such block, for each of its parameters; 1 for parameters whose coordinates are blocks."""
        if self.identity:
            return values
        if len(self.tensors) == 1 and not self.coordinates:
            return values.expand(len(self.params))
        if not self.tensors:
            return values.new_ones(len(self.params))
        self._place(values)
        out = values.new_ones(len(self.params))
        out[self._rows] = values[self._index]
        return out

    def rates(self, like: Tensor) -> Tensor:
        """The base rate lr of each parameter."""
        rates = [group["lr"] for group in self.groups]
        if any(isinstance(rate, Tensor) for rate in rates):
            values = torch.stack([torch.as_tensor(rate).to(like).reshape(()) for rate in rates])
        else:
            values = like.new_tensor(rates)
        return values.expand(len(self.params)) if len(rates) == 1 else values[self.group_of]

    def alpha(self, block: Block, like: Tensor) -> Any:
        """The regulariser's alpha of a block; 0 while it is not known yet."""
        fixed = block.group["alpha"]
        if fixed is not None:
            return float(fixed)
        learned = block.group.get("alpha_learned")
        return 0.0 if learned is None else learned.to(like) * (1 if self.whole else block.size)

    def alphas(self, like: Tensor) -> Tensor:
        """The same of all blocks that have one number."""
        if len(self.groups) > 1 or self.whole or not self.tensors or self.groups[0]["alpha"] is not None:
            values = [self.alpha(block, like) for block in self.tensors]
            if any(isinstance(value, Tensor) for value in values):
                return torch.stack([torch.as_tensor(value).to(like) for value in values])
            return like.new_tensor(values)
        if self._sizes is None or self._sizes.device != like.device:
            self._sizes = like.new_tensor([block.size for block in self.tensors])
        learned = self.groups[0].get("alpha_learned")
        return torch.zeros_like(self._sizes) if learned is None else self._sizes * learned.to(like)

    def learn_alpha(self, n: Tensor, ok: Tensor | None) -> None:
        """Take alpha from the first update that moves: kappa ||gbar_0||^2, each block its even share by size.

        Kept per coordinate, so that a block which joins later gets the share that its size would have had; but one
        block for everything keeps the whole.
        """
        for group in self.groups:
            old = group.get("alpha_learned")
            if group["alpha"] is not None or (ok is None and old is not None and old.tolist() > 0):
                continue
            old = torch.zeros_like(n) if old is None else old.to(n)
            # Beside a first square that is nearly too large itself, alpha is that many times it as well.
            largest = (16 * n).clamp(min=torch.finfo(n.dtype).max * LARGEST)
            first = (n if self.whole else n / self._size()) * group["kappa"]
            new = torch.where(old > 0, old, torch.minimum(first, largest / (1 if self.whole else self._size())))
            group["alpha_learned"] = new if ok is None else torch.where(ok, new, old)

    def state(self, learner: Learner, owners: Sequence[dict[str, Any]], like: Tensor) -> Any:
        """The learner's state as vectors over some blocks."""
        fresh = learner.initial(like.new_zeros(()))
        parts = []
        for name, value in zip(fresh._fields, fresh, strict=True):
            key = f"learner.{name}"
            parts.append(stacked([owner.get(key, value) for owner in owners], like))
        return type(fresh)(*parts)

    def write(self, owners: Sequence[dict[str, Any]], new: Any, old: Any, ok: Tensor | None) -> None:
        """Store the learner's state, unless the update turns out not to be finite."""
        for name, value, before in zip(new._fields, new, old, strict=True):
            chosen = value if ok is None else torch.where(ok, value, before)
            for owner, number in zip(owners, chosen.unbind(), strict=True):
                owner[f"learner.{name}"] = number

    def _place(self, like: Tensor) -> None:
        if self._index is None or self._index.device != like.device:
            pairs = sorted((row, place) for place, block in enumerate(self.tensors) for row in block.rows)
            self._rows = torch.tensor([row for row, _ in pairs], device=like.device)
            self._index = torch.tensor([place for _, place in pairs], device=like.device)

    def _size(self) -> int:
        return sum(size(p) for group in self.groups for p in group["params"])


def tensor_state(learner: Learner, owner: dict[str, Any], param: Tensor, like: Tensor) -> Any:
    """The learner's state of one parameter, per coordinate: tensors that may be written to."""
    fresh = learner.initial(like.new_zeros(()))
    for name, value in zip(fresh._fields, fresh, strict=True):
        if f"learner.{name}" not in owner:
            piece = value.expand_as(like).clone(memory_format=torch.contiguous_format)
            owner[f"learner.{name}"] = like_parameter(piece, param)
    return type(fresh)(*(local(owner[f"learner.{name}"]) for name in fresh._fields))


def learners_of(blocks: Blocks, learner_of: Callable[[dict[str, Any]], Learner]) -> list[tuple[Learner, list[int]]]:
    """The blocks that have one number, by their learner."""
    found: dict[str, tuple[Learner, list[int]]] = {}
    for i, block in enumerate(blocks.tensors):
        found.setdefault(block.group["learner"], (learner_of(block.group), []))[1].append(i)
    return list(found.values())


def share(groups: list[dict[str, Any]]) -> None:
    """Copy what belongs to several groups from the first of them to all, so that none can be saved without it."""
    first = groups[0]
    if len(groups) == 1:
        return
    for group in groups[1:]:
        for key in ("totals", "gradients", "pending"):
            if key in first:
                group[key] = first[key]
        if "alpha_learned" in first and "alpha_learned" not in group and group["alpha"] is None:
            factor = group["kappa"] / first["kappa"]
            group["alpha_learned"] = first["alpha_learned"] if factor == 1 else first["alpha_learned"] * factor
    for members in _labels(groups).values():
        learned = {key: value for key, value in members[0].items() if key.startswith("learner.")}
        for group in members[1:]:
            group.update(learned)


def _labels(groups: list[dict[str, Any]]) -> dict[Hashable, list[dict[str, Any]]]:
    """The groups that are in one block, whatever takes part."""
    found: dict[Hashable, list[dict[str, Any]]] = {}
    for place, group in enumerate(groups):
        if group["granularity"] in ("global", "group"):
            label = PARTITIONS[group["granularity"]].label(group, place, group["params"])
            found.setdefault(label, []).append(group)
    return found


def _options(groups: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(g["granularity"], g["learner"], g["alpha"], g["kappa"], len(g["params"])) for g in groups]
