"""Blocks of coordinates that share a step size, what is learned for each, and where that is kept.

The four granularities are the same surrogate on blocks: ``"global"`` has one block, ``"group"`` one per parameter
group, ``"tensor"`` one per parameter and ``"coordinate"`` one per scalar. Parameter groups may differ in it. State that
belongs to a group (or to several) stands in the group's dictionary, state that belongs to a parameter in
``optimizer.state[parameter]``: ``state_dict()`` saves both. A new granularity is a line in :func:`_label`.

Learners take numbers of any kind: a Python float of one block if the host may read it, a float64 tensor with an entry
per block, or an array with an entry per coordinate.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from sgdol.learners import Learner, uses_hindsight
from sgdol.summary import RECENT
from sgdol.surrogate import loss
from sgdol.torch._direction import Direction
from sgdol.torch._update import Gate
from sgdol.torch._vectors import Layout, as_number, pieces, size
from sgdol.torch._world import World

__all__ = ["GRANULARITIES", "Blocks", "Granularity", "Learned", "share"]

Granularity = Literal["global", "group", "tensor", "coordinate"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)

POOLED = ("lr", "momentum", "bias_correction", "statistics", "epoch", "metric")  # by which tensors' numbers may differ
BLOCKS = ("granularity", "learner", "alpha", "kappa")  # options that say what the blocks are
LARGEST = 2.0**-40  # alpha is at most this times the largest float, so that sums with it stay finite


# Parameters with the same label share a step size.
def _label(group: dict[str, Any], place: int, param: Tensor | None) -> Hashable:
    match group["granularity"]:
        case "global":
            return "global", group["learner"], group["alpha"], group["kappa"]
        case "group":
            return "group", place
        case other:
            return other, id(param)


class Block(NamedTuple):
    """Parameters that share a step size (or a tensor whose coordinates have their own)."""

    owner: dict[str, Any]  # a group or the state of a parameter, where the learner's state is kept
    group: dict[str, Any]  # the first of its groups: they have the learner and alpha in common
    size: int  # how many scalars it has, also those that take no part
    rows: list[int]  # which of the numbers (sgdol.torch._vectors.Numbers) are in it


class Learned(NamedTuple):
    """The step sizes of an update, and what is recorded of it."""

    etas: list[Any]  # by entry: a number, a number per tensor of a merged entry, or an array like the entry
    step_sizes: list[Any]  # one number to show for each group of the layout
    totals: Tensor  # what the update adds to each of the running sums (sgdol.torch._diagnostics.ROWS)


class _Learner:
    """An online learner whose state is kept in the owners of its blocks, under ``learner.<field>``.

    Args:
        rule: the learner.
        like: a number of the kind in which numbers are kept.
    """

    def __init__(self, rule: Learner, like: Tensor) -> None:
        self.rule: Any = rule
        self.hindsight = uses_hindsight(rule)
        self._initial: Any = rule.initial(like)
        self._keys = [f"learner.{name}" for name in self._initial._fields]
        self._written: tuple[Any, Any] = None, None  # the state that was written last, and what the first owner got

    def learn(
        self, owners: Sequence[dict[str, Any]], like: Tensor, gate: Gate, before: Any, after: Any, *numbers: Any
    ) -> Any:
        """Predict the multipliers of some blocks, then observe (u, n, last): a number, or a tensor with one per block.

        Args:
            owners: of the blocks.
            like: a number of the kind in which numbers are kept.
            gate: whether the update counts.
            before: alpha before this update.
            after: alpha from this update on.
            numbers: (u, n, last) of the blocks.
        """
        # Reading the state takes longer than learning. It is still what was written last if the first owner has the
        # very tensor that it got then; after load_state_dict it has another one.
        state, first_value = self._written
        if state is None or owners[0].get(self._keys[0]) is not first_value:
            fields = list(zip(self._keys, self._initial, strict=True))
            if len(owners) == 1:
                values = [owners[0].get(key, value) for key, value in fields]
                values = [value.item() if gate.host else value.to(like) for value in values]
            else:
                values = [torch.stack([owner.get(key, value).to(like) for owner in owners]) for key, value in fields]
            state = type(self._initial)(*values)
        # The multiplier is taken before (u, n) are observed: it must not see the gradients that it scales.
        s = self.rule.predict(state, before)
        u, n, last = numbers
        new = self.rule.observe(state, s, u, n, after, **({"last": last} if self.hindsight else {}))
        if not gate.host:
            new = type(new)(*(gate.choose(a, b) for a, b in zip(new, state, strict=True)))
        if len(owners) == 1:
            owners[0].update(zip(self._keys, [as_number(value, like) for value in new], strict=True))
        else:
            for key, values in zip(self._keys, new, strict=True):
                for owner, value in zip(owners, values.unbind(), strict=True):
                    owner[key] = value
        self._written = new, owners[0][self._keys[0]]
        return s


class Blocks:
    """The blocks of the parameters that take part in an update.

    Args:
        groups: all parameter groups of the optimizer.
        layout: the parameters that take part.
        state: the optimizer's state.
        learner_of: the online learner of a group.
        world: gives the world that the optimizer is in.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        layout: Layout,
        state: dict[Any, Any],
        learner_of: Callable[[dict[str, Any]], Learner],
        world: Callable[[], World],
    ) -> None:
        self.layout, self._groups, self._learner_of, self._world = layout, groups, learner_of, world
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
        families = [[b for b in self._blocks if b.group["learner"] == name] for name in learners]
        self._families = [(family, _Learner(learner_of(family[0].group), layout.like)) for family in families]
        self._all_in_one = len(labels) == 1 and all(group["granularity"] == "global" for group in groups)
        self._has_one_block = (
            len(self._blocks) == 1 and not layout.coordinates and self._blocks[0].group["granularity"] != "tensor"
        )
        self._options = [(*map(group.get, BLOCKS), len(group["params"])) for group in groups]
        in_order = [block.rows for block in self._blocks] == [[row] for row in range(len(layout.numbered))]
        self._block_per_number = in_order and len(self._families) == 1 < len(self._blocks)
        self._final_alphas: list[Any] | None = None  # what _alphas returns once alpha of all groups is known

    def serves(self, layout: Layout) -> bool:
        return layout is self.layout and self._options == [
            (*map(g.get, BLOCKS), len(g["params"])) for g in self._groups
        ]

    def pooled(self) -> bool:
        """Whether sums over all tensors are all that is needed: there is one block, and no option differs by tensor."""
        if not self._has_one_block or isinstance(self._groups[0]["lr"], Tensor):
            return False
        if len(self._groups) == 1:
            return True
        if any(isinstance(group["lr"], Tensor) for group in self._groups):
            return False
        options = [tuple(group[name] for name in POOLED) for group in self.layout.groups]
        return options.count(options[0]) == len(options)

    # One update -------------------------------------------------------------------------------------------------------

    def learn(self, direction: Direction, squared: Any, gate: Gate) -> Learned:
        """eta_t = s_t lr/(1 - beta): predict the multipliers s_t of all blocks, then observe (u_t, n_t, last).

        Args:
            direction: d, u, n and last.
            squared: ||g||^2, of which alpha is made in the first update.
            gate: whether the update counts.
        """
        layout, families = self.layout, len(self._families)
        # The learner predicts with alpha before this update, and observes with alpha after it: with alpha=None they
        # differ in the first update.
        before = after = self._final_alphas or self._alphas(gate)
        if self._final_alphas is None:
            self._learn_alpha(squared, gate)
            after = self._alphas(gate)
            # On an accelerator nobody asks whether there has been an update that moves.
            is_known = (group["alpha"] is not None or group["alpha_learned"].item() > 0 for group in self._groups)
            self._final_alphas = after if gate.host and all(is_known) else None
        by_family = []
        for (family, learner), a, b in zip(self._families, before[:families], after[:families], strict=True):
            numbers = direction.u[0], direction.n[0], direction.last[0]
            if not isinstance(numbers[0], float) and not self._block_per_number:
                numbers = tuple(_block_sums(family, values, gate) for values in numbers)
            by_family.append(learner.learn([block.owner for block in family], layout.like, gate, a, b, *numbers))
        if self._block_per_number or len(self._blocks) == 1:
            multipliers = by_family[0]
        else:
            multipliers = layout.like.new_ones(len(layout.numbered))
            for (family, _), s in zip(self._families, by_family, strict=True):
                index = [i for i, block in enumerate(family) for _ in block.rows]
                rows = [row for block in family for row in block.rows]
                multipliers[rows] = as_number(s, layout.like).expand(len(family))[index]
        lrs = [g["lr"] if isinstance(g["lr"], float) else gate.number(g["lr"]) for g in layout.groups]
        rates = [lr / (1 - group["momentum"]) for lr, group in zip(lrs, layout.groups, strict=True)]
        rate, *rates = layout.by_group(rates)
        alphas = zip(before[families:], after[families:], strict=True)
        arrays = [
            self._learn_coordinates(e, direction, 1 + place, rates[place], alpha, gate)
            for place, (e, alpha) in enumerate(zip(layout.coordinates, alphas, strict=True))
        ]
        return self._learned(direction, multipliers, rate, lrs, arrays)

    def _learn_coordinates(
        self, e: int, direction: Direction, place: int, rate: Any, alpha: tuple[Any, Any], gate: Gate
    ) -> tuple[Tensor, Tensor]:
        """The step size of each coordinate of an entry, and :func:`_coordinate_sums` of the entry.

        Args:
            e: the entry.
            direction: d, u, n and last. The step sizes are written over u, which saves an array like the entry.
            place: of the entry's arrays among the numbers.
            rate: lr/(1 - beta).
            alpha: before this update, and from this update on.
            gate: whether the update counts.
        """
        learner = self._learner_of(self.layout.groups[self.layout.entries[e].group])
        u, n, last = (values[place] for values in (direction.u, direction.n, direction.last))
        fresh = learner.initial(u.new_zeros(()))
        state = [
            self.layout.vector(f"learner.{name}", e, value) for name, value in zip(fresh._fields, fresh, strict=True)
        ]
        before, after = (_representable(value, u.dtype) for value in alpha)
        hindsight, sums = uses_hindsight(learner), []
        # Piece by piece, so that what is computed of a coordinate stays in the cache.
        for u_, n_, d_, last_, *fields in pieces([u, n, direction.d[e], last if hindsight else u, *state]):
            old = type(fresh)(*fields)
            s = learner.predict(old, before)
            new = learner.observe(old, s, u_, n_, after, **({"last": last_} if hindsight else {}))
            # What a learner returns may be a field of its state: all are read before any is written to.
            values = [value.clone() if any(value is field for field in fields) else value for value in (s, *new)]
            sums.append(_coordinate_sums(values[0].expand_as(u_), u_, n_, d_))
            for field, value in zip(fields, values[1:], strict=True):
                field.copy_(gate.choose(value, field))
            u_.copy_(values[0]).mul_(rate)
        return u, torch.stack(sums).to(self.layout.like).sum(0) * rate

    def _learned(
        self, direction: Direction, multipliers: Any, rate: Any, lrs: list[Any], arrays: list[tuple[Tensor, Tensor]]
    ) -> Learned:
        """Step sizes from multipliers, and what is recorded of them.

        Args:
            direction: of the update.
            multipliers: s, a number or one for each tensor that has one.
            rate: lr/(1 - beta), a number or one for each tensor that has one.
            lrs: lr of each group of the layout.
            arrays: what :meth:`_learn_coordinates` returned, of each entry whose coordinates have step sizes.
        """
        layout, groups = self.layout, self.layout.groups
        u, n = direction.u[0], direction.n[0]
        if isinstance(multipliers, float) and isinstance(rate, float) and isinstance(u, Tensor):
            u, n = u.sum().item(), n.sum().item()
        rows = [rate * loss(multipliers, u, n, 1.0), rate * u, rate * n]
        sums = [row if isinstance(row, float) else row.sum() for row in rows]
        eta = rate * multipliers
        etas = [eta] * len(layout.entries) if isinstance(eta, float) else layout.by_entry(eta)
        moved: dict[int, Any] = {}
        for e, (eta, sums_of_entry) in zip(layout.coordinates, arrays, strict=True):
            etas[e], moved[e] = eta, sums_of_entry
        if moved:
            params = [layout.params[layout.entries[e].start] for e in moved]
            table = torch.stack(list(moved.values()), dim=1)
            table = self._world().total(params, table)
            sums = [a + b for a, b in zip(sums, table[:3].sum(1), strict=True)]
            moved = dict(zip(moved, table[3:].T, strict=True))
        shown = []
        for place, group in enumerate(groups):
            if isinstance(multipliers, float) and group["granularity"] in ("global", "group"):
                s = multipliers
            else:
                s = self._equivalent_multiplier(place, layout.by_entry(multipliers), direction.n[0], moved)
            shown.append(lrs[place] * s)
        surrogate, signal, length = sums
        row = [1.0, 0.0, surrogate, signal, length, (1 - RECENT) * signal, (1 - RECENT) * length]
        if isinstance(signal, float):
            return Learned(etas, shown, torch.tensor(row, dtype=torch.float64))
        return Learned(etas, shown, torch.stack([as_number(value, layout.like) for value in row]))

    def _equivalent_multiplier(self, place: int, multipliers: list[Any], n: Tensor, moved: dict[int, Any]) -> Any:
        """The one s of a group whose move has the same length: sqrt(sum s_i^2 n_i / sum n_i).

        Args:
            place: of the group in the layout.
            multipliers: s_i by entry.
            n: n_i of each tensor that has one.
            moved: by entry, sums over its coordinates of d^2 and (s d)^2.
        """
        layout, group = self.layout, self.layout.groups[place]
        entries = [e for e, entry in enumerate(layout.entries) if entry.group == place]
        if group["granularity"] in ("global", "group"):
            s = multipliers[entries[0]]
            return s[0] if isinstance(s, Tensor) and s.dim() else s
        if group["granularity"] == "coordinate":
            lengths, squares = torch.stack([moved[e] for e in entries]).sum(0)
            return torch.where(lengths > 0, squares / torch.where(lengths > 0, lengths, 1), 1).sqrt()
        s = torch.cat([as_number(multipliers[e], n).expand(len(layout.entries[e].sizes)) for e in entries])
        n = n[[row for row, i in enumerate(layout.numbered) if layout.group_of[i] == place]]
        length = n.sum()
        mean = (s.square() * n).sum() / torch.where(length > 0, length, 1)
        return torch.where(length > 0, mean, s.square().mean()).sqrt()

    # Alpha ------------------------------------------------------------------------------------------------------------

    def _alphas(self, gate: Gate) -> list[Any]:
        """Alpha of the blocks of each learner (a number, or one for each block), then of each entry of coordinates."""
        layout = self.layout
        blocks = [[self._alpha(block.group, block.size, gate) for block in family] for family, _ in self._families]
        groups = [layout.groups[layout.entries[e].group] for e in layout.coordinates]
        coordinates = [self._alpha(group, 1, gate) for group in groups]
        return [*(_stacked(values, layout.like) for values in blocks), *coordinates]

    def _alpha(self, group: dict[str, Any], size: int, gate: Gate) -> Any:
        if group["alpha"] is not None:
            return float(group["alpha"])
        learned = group.get("alpha_learned")
        return 0.0 if learned is None else gate.number(learned.to(self.layout.like)) * (1 if self._all_in_one else size)

    def _learn_alpha(self, squared: Any, gate: Gate) -> None:
        """Alpha = kappa ||g_0||^2, where g_0 is the first gradient that is not 0; each block gets its share by size.

        The group keeps the share of one coordinate, so that a block that joins later gets the share of its size. If one
        block has everything, it keeps all of alpha.
        """
        for group in self._groups:
            old = group.get("alpha_learned")
            if group["alpha"] is not None or (gate.host and old is not None and old.item() > 0):
                continue
            like = self.layout.like
            square, old = as_number(squared, like), like if old is None else old.to(like)
            shares = 1 if self._all_in_one else sum(size(p) for g in self._groups for p in g["params"])
            # Bounded, so that sums stay finite; but not below 16 ||g_0||^2, so that it counts beside the first n.
            largest = (16 * square).clamp(min=torch.finfo(like.dtype).max * LARGEST)
            new = torch.minimum(square * group["kappa"] / shares, largest / shares)
            group["alpha_learned"] = gate.choose(torch.where(old > 0, old, new), old)


def _block_sums(family: list[Block], values: Any, gate: Gate) -> Any:
    """Numbers of tensors, summed over each block: a Python float if there is one block and the host may read it."""
    if not isinstance(values, Tensor):
        return values  # last = 0, if no learner uses hindsight
    if len(family) == 1:
        rows = family[0].rows
        return gate.number((values if len(rows) == len(values) else values[rows]).sum())
    if all(len(block.rows) == 1 for block in family):
        return values[[block.rows[0] for block in family]]
    return torch.stack([values[block.rows].sum() for block in family])


def _stacked(values: list[Any], like: Any) -> Any:
    if len(values) == 1:
        return values[0]
    if any(isinstance(value, Tensor) for value in values):
        return torch.stack([as_number(value, like) for value in values])
    return like.new_tensor(values)


def _coordinate_sums(s: Tensor, u: Tensor, n: Tensor, d: Tensor) -> Tensor:
    """Sums over coordinates: of the surrogate loss, u, n, d^2 and (s d)^2."""
    s, u, n, d = (x.reshape(-1) for x in (s, u, n, d.to(s.dtype)))
    moved = s * d
    losses = torch.dot(s * s, n) / 2 - torch.dot(s, u)
    return torch.stack([losses, u.sum(), n.sum(), torch.dot(d, d), torch.dot(moved, moved)])


def _representable(alpha: Any, dtype: torch.dtype) -> Any:
    # The learner's sums must not overflow. In float64 the bound is higher: 1e150 squared is in range.
    largest = torch.finfo(dtype).max * (2.0**-12 if dtype == torch.float64 else LARGEST)
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
    """The groups of each block of whole groups, also those that take no part."""
    found: dict[Hashable, list[dict[str, Any]]] = {}
    for place, group in enumerate(groups):
        if group["granularity"] in ("global", "group"):
            found.setdefault(_label(group, place, None), []).append(group)
    return found
