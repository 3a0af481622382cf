"""Blocks of coordinates that share a step size, what is learned for each, and where that is kept.

The four granularities are the same surrogate on blocks: ``"global"`` has one block, ``"group"`` one per parameter
group, ``"tensor"`` one per parameter and ``"coordinate"`` one per scalar. Parameter groups may differ in it. State that
belongs to a group (or to several) stands in the group's dictionary, state that belongs to a parameter in
``optimizer.state[parameter]``: ``state_dict()`` saves both. A new granularity is a line in :func:`_label`.

Learners take numbers as they are: a Python float where one block is alone and the host may look, a float64 tensor with
an entry per block, or an array with an entry per coordinate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from sgdol.learners import Learner, uses_hindsight
from sgdol.surrogate import loss
from sgdol.torch._direction import Direction
from sgdol.torch._gate import Gate
from sgdol.torch._vectors import Layout, as_number, dot, size
from sgdol.torch._world import World

__all__ = ["GRANULARITIES", "Blocks", "Granularity", "Learned", "share"]

Granularity = Literal["global", "group", "tensor", "coordinate"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)

POOLED = ("lr", "momentum", "bias_correction", "statistics", "epoch", "metric")
"""Options by which the numbers of tensors may differ."""

LARGEST = 2.0**-40
"""Alpha is at most so much of the largest number there is, so that sums with it stay finite."""


def _label(group: dict[str, Any], place: int, param: Tensor | None) -> Hashable:
    """Parameters of one label share a step size."""
    match group["granularity"]:
        case "global":
            return "global", group["learner"], group["alpha"], group["kappa"]
        case "group":
            return "group", place
        case other:
            return other, id(param)


class Block(NamedTuple):
    """Parameters that share a step size (or a tensor whose coordinates have their own)."""

    owner: dict[str, Any]
    """Where what is learned is kept."""
    group: dict[str, Any]
    """The first of its groups: they have the learner and alpha in common."""
    size: int
    """How many scalars it has, also those that take no part."""
    rows: list[int]
    """Which of the numbers (:data:`sgdol.torch._vectors.Numbers`) are in it."""


class Learned(NamedTuple):
    """What an update does and what is recorded of it."""

    etas: list[Any]
    """The step size of each entry: a number, a number per tensor of a merged entry, or an array like the entry."""
    step_sizes: list[Any]
    """One number to show for each group of the layout."""
    surrogate: Any
    """The sum of the surrogate losses at the step sizes that were played."""
    signal: Any
    """lr times u, summed."""
    length: Any
    """lr times n, summed."""


class Blocks:
    """The blocks of the parameters that take part in an update.

    Args:
        groups: all parameter groups of the optimizer.
        layout: the parameters that take part.
        state: the optimizer's state.
        learner_of: the online learner of a group.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        layout: Layout,
        state: dict[Any, Any],
        learner_of: Callable[[dict[str, Any]], Learner],
    ) -> None:
        self.layout, self._groups, self._state, self._learner_of = layout, groups, state, learner_of
        labels = _labels(groups)
        found: dict[Hashable, Block] = {}
        for row, i in enumerate(layout.numbered):
            p, place = layout.params[i], layout.places[layout.group_of[i]]
            label = _label(groups[place], place, p)
            if label not in found:
                members = labels.get(label)
                if members is None:
                    found[label] = Block(state[p], groups[place], size(p), [])
                else:
                    count = sum(size(p) for group in members for p in group["params"])
                    found[label] = Block(members[0], members[0], count, [])
            found[label].rows.append(row)
        self._blocks = list(found.values())
        learners = dict.fromkeys(block.group["learner"] for block in self._blocks)
        self._families = [[b for b in self._blocks if b.group["learner"] == name] for name in learners]
        self._whole = len(labels) == 1 and all(group["granularity"] == "global" for group in groups)
        self._made_of = _options(groups)

    def current(self) -> bool:
        """Whether the groups still say what they said."""
        return self._made_of == _options(self._groups)

    def pooled(self) -> bool:
        """Whether sums over all tensors are all that is learned from: one block, and no option differs by tensor."""
        if len(self._blocks) != 1 or self.layout.coordinates or self._blocks[0].group["granularity"] == "tensor":
            return False
        options = [tuple(group[name] for name in POOLED) for group in self.layout.groups]
        return not any(isinstance(group["lr"], Tensor) for group in self._groups) and options.count(options[0]) == len(
            options
        )

    # One update -------------------------------------------------------------------------------------------------------

    def learn(self, direction: Direction, squared: Any, gate: Gate, world: World) -> Learned:
        """Choose the step sizes of an update, and learn from its numbers.

        The multiplier is taken from the learner before it observes (u, n): it must not see the gradients it scales.

        Args:
            direction: d, u, n and last.
            squared: ||g||^2, of which alpha is made in the first update.
            gate: whether the update counts.
            world: sums over ranks.
        """
        layout = self.layout
        before = {id(block): self._alpha(block.group, block.size, gate) for block in self._blocks}
        coordinates_before = [self._alpha(self._group(e), 1, gate) for e in layout.coordinates]
        self._learn_alpha(squared, gate)
        multipliers: Any = layout.like.new_ones(len(layout.numbered))
        for family in self._families:
            s = self._learn_family(family, direction, [before[id(block)] for block in family], gate)
            if len(family) == len(self._blocks) == 1:
                multipliers = s
            else:
                index = [i for i, block in enumerate(family) for _ in block.rows]
                multipliers[[row for block in family for row in block.rows]] = as_number(s, layout.like).expand(
                    len(family)
                )[index]
        arrays = [
            self._learn_coordinates(e, direction, place, alpha, gate)
            for place, (e, alpha) in enumerate(zip(layout.coordinates, coordinates_before, strict=True), start=1)
        ]
        return self._learned(direction, multipliers, arrays, gate, world)

    def _learn_family(self, family: list[Block], direction: Direction, alpha: list[Any], gate: Gate) -> Any:
        """The multipliers of blocks that have one learner: a number if there is one block, else one for each."""
        learner, owners = self._learner_of(family[0].group), [block.owner for block in family]
        u, n, last = (_sums(family, values[0], gate) for values in (direction.u, direction.n, direction.last))
        state = _read(learner, owners, self.layout.like, gate)
        after = [self._alpha(block.group, block.size, gate) for block in family]
        s = learner.predict(state, _joined(alpha, u))
        new = learner.observe(state, s, u, n, _joined(after, u), **_hindsight(learner, last))
        if not gate.host:
            new = type(new)(*(gate.choose(a, b) for a, b in zip(new, state, strict=True)))
        _write(owners, new, self.layout.like)
        return s

    def _learn_coordinates(self, e: int, direction: Direction, place: int, alpha: Any, gate: Gate) -> Tensor:
        """The multiplier of each coordinate of an entry."""
        learner, group = self._learner_of(self._group(e)), self._group(e)
        u, n, last = (values[place] for values in (direction.u, direction.n, direction.last))
        fresh = learner.initial(u.new_zeros(()))
        state = type(fresh)(
            *(self.layout.vector(f"learner.{name}", e, value) for name, value in zip(fresh._fields, fresh, strict=True))
        )
        s = learner.predict(state, _representable(alpha, u.dtype))
        after = _representable(self._alpha(group, 1, gate), u.dtype)
        new = learner.observe(state, s, u, n, after, **_hindsight(learner, last))
        # What a learner returns may be a field of its state: all are read before any is written to.
        s, *new = (value.clone() if any(value is field for field in state) else value for value in (s, *new))
        for field, value in zip(state, new, strict=True):
            field.copy_(gate.choose(value, field))
        return s

    def _learned(
        self, direction: Direction, multipliers: Any, arrays: list[Tensor], gate: Gate, world: World
    ) -> Learned:
        """Step sizes from multipliers, and what is recorded of them."""
        layout, groups = self.layout, self.layout.groups
        rate, *own = layout.by_group([gate.number(group["lr"]) for group in groups])
        u, n = direction.u[0], direction.n[0]
        if isinstance(multipliers, float) and isinstance(rate, float) and isinstance(u, Tensor):
            u, n = gate.number(u.sum()), gate.number(n.sum())
        eta = rate * multipliers
        rows = [rate * loss(multipliers, u, n, 1.0), rate * u, rate * n]
        sums = [row if isinstance(row, float) else row.sum() for row in rows]
        etas: list[Any] = []
        moved: dict[int, Any] = {}
        numbered = iter(range(len(layout.numbered)))
        for e, entry in enumerate(layout.entries):
            if entry.coordinates:
                place = layout.coordinates.index(e)
                u_e, n_e, d = direction.u[1 + place], direction.n[1 + place], direction.d[e] * direction.scales[e]
                etas.append(arrays[place] * own[place])
                moved[e] = _coordinate_sums(arrays[place], own[place], u_e, n_e, d, layout.like)
            else:
                some = [next(numbered) for _ in entry.sizes]
                etas.append(eta if not isinstance(eta, Tensor) or not eta.dim() else eta[some[0] : some[-1] + 1])
        if moved:
            params = [layout.params[layout.entries[e].start] for e in moved]
            table = torch.stack(list(moved.values()), dim=1)
            table = world.total(params, table) if world.spread else table
            sums = [a + b for a, b in zip(sums, table[:3].sum(1), strict=True)]
            moved = dict(zip(moved, table[3:].T, strict=True))
        shown = [self._shown(place, etas, direction.n[0], moved) for place in range(len(groups))]
        return Learned(etas, shown, *sums)

    def _shown(self, place: int, etas: list[Any], n: Tensor, moved: dict[int, Any]) -> Any:
        """What eta would have to be, were it one number for the group, for a move of the same length."""
        layout, group = self.layout, self.layout.groups[place]
        mine = [e for e, entry in enumerate(layout.entries) if entry.group == place]
        if group["granularity"] in ("global", "group"):
            eta = etas[mine[0]]
            return eta if not isinstance(eta, Tensor) or not eta.dim() else eta[0]
        if group["granularity"] == "coordinate":
            lengths, squares = torch.stack([moved[e] for e in mine]).sum(0)
            fallback = as_number(group["lr"], lengths)
            return torch.where(lengths > 0, squares / torch.where(lengths > 0, lengths, 1), fallback**2).sqrt()
        eta = torch.cat([as_number(etas[e], n).expand(len(layout.entries[e].sizes)) for e in mine])
        n = n[[row for row, i in enumerate(layout.numbered) if layout.group_of[i] == place]]
        total = n.sum()
        mean = (eta.square() * n).sum() / torch.where(total > 0, total, 1)
        return torch.where(total > 0, mean, eta.square().mean()).sqrt()

    # Alpha ------------------------------------------------------------------------------------------------------------

    def _group(self, e: int) -> dict[str, Any]:
        return self.layout.groups[self.layout.entries[e].group]

    def _alpha(self, group: dict[str, Any], size: int, gate: Gate) -> Any:
        """The regulariser's alpha of a block of this size; 0 while it is not known yet."""
        if group["alpha"] is not None:
            return float(group["alpha"])
        learned = group.get("alpha_learned")
        return 0.0 if learned is None else gate.number(learned.to(self.layout.like)) * (1 if self._whole else size)

    def _learn_alpha(self, squared: Any, gate: Gate) -> None:
        """Take alpha from the first update that moves: kappa ||g_0||^2, each block its even share by size.

        Kept per coordinate, so that a block which joins later gets the share that its size would have had; but one
        block for everything keeps the whole.
        """
        for group in self._groups:
            old = group.get("alpha_learned")
            if group["alpha"] is not None or (gate.host and old is not None and old.item() > 0):
                continue
            like = self.layout.like
            square, old = as_number(squared, like), like if old is None else old.to(like)
            shares = 1 if self._whole else sum(size(p) for g in self._groups for p in g["params"])
            # Beside a first square that is nearly too large itself, alpha is that many times it as well.
            largest = (16 * square).clamp(min=torch.finfo(like.dtype).max * LARGEST)
            new = torch.minimum(square * group["kappa"] / shares, largest / shares)
            group["alpha_learned"] = gate.choose(torch.where(old > 0, old, new), old)


def _hindsight(learner: Learner, last: Any) -> dict[str, Any]:
    return {"last": last} if uses_hindsight(learner) else {}


def _sums(family: list[Block], values: Any, gate: Gate) -> Any:
    """One number per tensor, summed over each block: a Python number if there is one block and the host may look."""
    if not isinstance(values, Tensor):
        return values
    if len(family) == 1:
        rows = family[0].rows
        return gate.number((values if len(rows) == len(values) else values[rows]).sum())
    if all(len(block.rows) == 1 for block in family):
        return values[[block.rows[0] for block in family]]
    return torch.stack([values[block.rows].sum() for block in family])


def _joined(values: list[Any], like: Any) -> Any:
    """The values of blocks: one as it is, several as a tensor."""
    if len(values) == 1:
        return values[0]
    if any(isinstance(value, Tensor) for value in values):
        return torch.stack([as_number(value, like) for value in values])
    return like.new_tensor(values)


def _read(learner: Learner, owners: Sequence[dict[str, Any]], like: Tensor, gate: Gate) -> Any:
    """The learner's state of some blocks."""
    fresh = learner.initial(like)
    keys = _keys(cast(Hashable, type(fresh)))
    if len(owners) == 1:
        values = [owners[0].get(key, value) for key, value in zip(keys, fresh, strict=True)]
        return type(fresh)(*[value.item() if gate.host else value.to(like) for value in values])
    rows = [[owner.get(key, value).to(like) for owner in owners] for key, value in zip(keys, fresh, strict=True)]
    return type(fresh)(*[torch.stack(row) for row in rows])


@functools.cache
def _keys(kind: Hashable) -> tuple[str, ...]:
    """The names under which the fields of a learner's state are kept."""
    fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    return tuple(f"learner.{name}" for name in fields)


def _write(owners: Sequence[dict[str, Any]], new: Any, like: Tensor) -> None:
    """Keep the learner's state of some blocks."""
    if len(owners) == 1:
        table = like.new_tensor(new).unbind() if isinstance(new[0], float) else new
        owners[0].update(zip(_keys(cast(Hashable, type(new))), table, strict=True))
        return
    for key, values in zip(_keys(cast(Hashable, type(new))), new, strict=True):
        for owner, value in zip(owners, values.unbind(), strict=True):
            owner[key] = value


def _coordinate_sums(s: Tensor, rate: Any, u: Tensor, n: Tensor, d: Tensor, like: Tensor) -> Tensor:
    """Over an entry: the surrogate loss, lr u, lr n, ||d||^2, and the squared length of the move."""
    wide, moved = like.dtype, s * d.to(s.dtype)
    losses = dot(s * s, n) / 2 - dot(s, u)
    rows = (
        rate * losses,
        rate * u.sum(dtype=wide),
        rate * n.sum(dtype=wide),
        dot(d, d),
        rate * rate * dot(moved, moved),
    )
    return torch.stack([row.to(like) for row in rows])


def _representable(alpha: Any, dtype: torch.dtype) -> Any:
    """Alpha as a number of the type of the sums, which stay finite beside it: a larger one would not count for more."""
    largest = torch.finfo(dtype).max * (2.0**-12 if dtype == torch.float64 else LARGEST)  # 1e150 squared is in range
    return alpha.clamp(max=largest).to(dtype) if isinstance(alpha, Tensor) else min(alpha, largest)


def share(groups: list[dict[str, Any]]) -> None:
    """Copy what belongs to several groups from the first of them to all, so that none can be saved without it."""
    first = groups[0]
    if len(groups) == 1:
        return
    for group in groups[1:]:
        for key in ("totals", "gradients", "pending", "unit"):
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
            found.setdefault(_label(group, place, None), []).append(group)
    return found


def _options(groups: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(g["granularity"], g["learner"], g["alpha"], g["kappa"], len(g["params"])) for g in groups]
