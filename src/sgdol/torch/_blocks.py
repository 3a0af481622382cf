"""Blocks of coordinates that share a step size, what is learned for each, and where that is kept.

The four granularities are the same surrogate on blocks: ``"global"`` has one block, ``"group"`` one per parameter
group, ``"tensor"`` one per parameter and ``"coordinate"`` one per scalar. Parameter groups may differ in it. State that
belongs to a group (or to several) stands in the group's dictionary, state that belongs to parameters in
``optimizer.state[parameter]``: ``state_dict()`` saves both. A new granularity of whole tensors is a line in
:func:`_label`.

Learners take numbers of any kind: a Python float of one block if the host may read it, a float64 tensor with an entry
per block, or an array with an entry per coordinate.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from sgdol._numbers import ratio, sqrt
from sgdol.learners import Learner, uses_hindsight
from sgdol.summary import RECENT
from sgdol.torch._diagnostics import KEPT
from sgdol.torch._direction import Direction
from sgdol.torch._update import Gate
from sgdol.torch._vectors import Layout, Section, as_number, pieces, size
from sgdol.torch._world import World

__all__ = ["GRANULARITIES", "OF_GROUPS", "Blocks", "Granularity", "Learned", "share"]

Granularity = Literal["global", "group", "tensor", "coordinate"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)
OF_GROUPS = ("global", "group")  # their blocks are whole groups, which keep what is learned; else parameters do

# What numbers of the groups may differ by.
POOLED = ("lr", "momentum", "bias_correction", "statistics", "epoch", "metric", "momentum_weight")
BLOCKS = ("granularity", "learner", "alpha", "kappa")  # options that say what the blocks are
LARGEST = 2.0**-40  # alpha is at most this times the largest float, so that sums with it stay finite


# Parameters with the same label share a step size.
def _label(group: dict[str, Any], place: int, param: Tensor) -> Hashable:
    match group["granularity"]:
        case "global":
            return "global", group["learner"], group["alpha"], group["kappa"]
        case "group":
            return "group", place
        case other:
            return other, id(param)


class Block(NamedTuple):
    """Parameters that share a step size (or a tensor whose coordinates have their own)."""

    owners: list[dict[str, Any]]  # its groups or the states of its parameters: each has the learner's state
    group: dict[str, Any]  # the first of its groups: they have the learner and alpha in common
    size: int  # how many shares of alpha it has: one for each scalar, also of those that take no part
    rows: list[int]  # which of the numbers of parameters (those of all sections but arrays) are in it


class Learned(NamedTuple):
    """The step sizes of an update, and what is recorded of it; single numbers are floats if the host may read them."""

    etas: list[Any]  # by entry: a number, a number per tensor of a merged entry, or an array like the entry
    step_sizes: list[Any]  # one number to show for each group of the layout
    totals: Tensor  # the running sums after this update (sgdol.torch._diagnostics.ROWS)


class _Family:
    """The blocks of one learner, the rule, whose state is kept in their owners under ``learner.<field>``."""

    def __init__(self, rule: Learner, blocks: list[Block], layout: Layout) -> None:
        self.rule, self.blocks, self._hindsight = rule, blocks, uses_hindsight(rule)
        rows = [row for block in blocks for row in block.rows]
        index = [i for i, block in enumerate(blocks) for _ in block.rows]
        self._rows, self._index = (torch.tensor(x, device=layout.like.device) for x in (rows, index))
        initial: Any = rule.initial(layout.like)
        self._state, keys = type(initial), [f"learner.{name}" for name in initial._fields]
        # One tensor of shape (fields, blocks); what stands in the owners is views of it.
        self._table = layout.like.new_zeros(len(keys), len(blocks))
        for key, value, field in zip(keys, initial, self._table, strict=True):
            for block, number in zip(blocks, field.unbind(), strict=True):
                number.copy_(as_number(block.owners[0].get(key, value), number))
                for owner in block.owners:
                    owner[key] = number
        self._first = self._table[:, 0]
        self._on_host: Any = None  # the same memory as a numpy array, which is faster with so few numbers

    def learn(self, alpha: tuple[Any, Any], numbers: Sequence[Any], gate: Gate) -> Any:
        """The multiplier of each block; of a single block, a float if the host may read it."""
        numbers = numbers if self._hindsight else [*numbers[:2], None]
        numbers = [self._sums(x, gate) if isinstance(x, Tensor) else x for x in numbers]  # else a sum already, or None
        if len(self.blocks) > 1 or not gate.host:
            fields = self._table if len(self.blocks) > 1 else self._first
            return _learn(self.rule, self._state(*fields), alpha, numbers, gate)
        if self._on_host is None:
            self._on_host = self._first.numpy()
        s, self._on_host[:] = _learned(self.rule, self._state(*self._on_host.tolist()), alpha, numbers)
        return s

    def _sums(self, values: Tensor, gate: Gate) -> Any:
        if len(self.blocks) == 1:
            return gate.number(values[self._rows].sum())
        return values.new_zeros(len(self.blocks)).index_add_(0, self._index, values[self._rows])

    def spread(self, multipliers: Any, out: Tensor) -> None:
        """Write numbers of blocks to those of their tensors."""
        out[self._rows] = as_number(multipliers, out).expand(len(self.blocks))[self._index]


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
        members: dict[Hashable, list[tuple[dict[str, Any], Tensor]]] = {}  # also those that take no part
        for place, group in enumerate(groups):
            for p in group["params"]:
                members.setdefault(_label(group, place, p), []).append((group, p))
        # alpha_learned is the share of one coordinate, so that a block that joins later gets the share of its size. If
        # one block has everything, it is all of alpha.
        whole = len(members) == 1 and all(group["granularity"] == "global" for group in groups)
        self._shares = 1 if whole else sum(size(p) for group in groups for p in group["params"])
        found: dict[Hashable, Block] = {}
        numbered = [
            (layout.places[entry.group], p)
            for e, entry in enumerate(layout.entries)
            for p in layout.params[layout.rows(e)]
            if not entry.coordinates
        ]
        for row, (place, p) in enumerate(numbered):
            label = _label(groups[place], place, p)
            if label not in found:
                first, _ = members[label][0]
                owners = [group if first["granularity"] in OF_GROUPS else state[q] for group, q in members[label]]
                owners = list({id(owner): owner for owner in owners}.values())
                numel = 1 if whole else sum(size(q) for _, q in members[label])
                found[label] = Block(owners, first, numel, [])
            found[label].rows.append(row)
        blocks = list(found.values())
        learners = dict.fromkeys(block.group["learner"] for block in blocks)
        families = [[block for block in blocks if block.group["learner"] == name] for name in learners]
        self._families = [_Family(learner_of(family[0].group), family, layout) for family in families]
        self._has_one_block = len(blocks) == 1
        self._numbered = len(numbered)
        self._arrays = [section for section in layout.sections if section.array]
        self._options = [(*map(group.get, BLOCKS), len(group["params"])) for group in groups]
        self._final_alphas: list[tuple[Any, Any]] | None = None  # what _move_alphas returns once all are known

    def serves(self, layout: Layout) -> bool:
        options = [(*map(group.get, BLOCKS), len(group["params"])) for group in self._groups]
        return layout is self.layout and options == self._options

    def pooled(self) -> bool:
        """Whether sums over all tensors are all that is needed: there is one block, and no option differs by tensor."""
        groups = self.layout.groups
        if not self._has_one_block or self._arrays or any(isinstance(g["lr"], Tensor) for g in groups):
            return False
        return all(group.get(name) == groups[0].get(name) for group in groups[1:] for name in POOLED)

    # One update -------------------------------------------------------------------------------------------------------

    def learn(self, direction: Direction, squared: Any, totals: Tensor, gate: Gate) -> Learned:
        """eta_t = s_t lr/(1 - beta): predict the multipliers s_t of all blocks, then observe (u_t, n_t, last).

        Args:
            direction: d, u, n and last.
            squared: ||g||^2, of which alpha is made in the first update.
            totals: the running sums before this update.
            gate: whether the update counts.
        """
        layout, groups, sections = self.layout, self.layout.groups, direction.sections
        lrs = [g["lr"] if isinstance(g["lr"], float) else gate.number(g["lr"]) for g in groups]
        rates = [lr / (1 - group["momentum"]) for lr, group in zip(lrs, groups, strict=True)]
        alphas = self._final_alphas or self._move_alphas(squared, gate)
        multipliers = self._multipliers(direction, alphas, gate)
        arrays = iter(alphas[len(self._families) :])
        etas: list[Any] = []
        rows: list[Any] = []
        for i, section in enumerate(sections):
            rate, u, n = rates[section.group], direction.u[i], direction.n[i]
            if section.array:
                rows.append(self._learn_coordinates(section, direction, i, rate, next(arrays), gate))
                etas.append(u)
            else:
                s = multipliers[i]
                rows.append(_sums(s, u, n, n))
                one = not isinstance(s, Tensor) or not s.dim()
                sizes = [len(layout.entries[e].sizes) for e in section.entries]
                etas += [rate * s] * len(sizes) if one else (rate * s).split(sizes)
        if self._arrays:  # this rank's
            places = [i for i, section in enumerate(sections) if section.array]
            params = [layout.params[layout.entries[section.entries[0]].start] for section in self._arrays]
            table = self._world().total(params, torch.stack([rows[i] for i in places], dim=1))
            for i, row in zip(places, table.unbind(1), strict=True):
                rows[i] = row
        rows = [row if isinstance(row, list) else row.tolist() if gate.host else row.unbind() for row in rows]
        weights = [rates[section.group] for section in sections]
        sums = [sum(rate * row[i] for rate, row in zip(weights, rows, strict=True)) for i in range(3)]
        shown = [lr * self._shown(place, sections, multipliers, rows, gate) for place, lr in enumerate(lrs)]
        return Learned(etas, shown, _added(totals, sums))

    def _multipliers(self, direction: Direction, alphas: list[tuple[Any, Any]], gate: Gate) -> list[Any]:
        """The multipliers of each section: a number for all its parameters, or one of each; None of arrays."""
        sections, like = direction.sections, self.layout.like
        numbers = [
            values[0] if len(sections) == 1 else self._joined(sections, values)
            for values in (direction.u, direction.n, direction.last)
        ]
        found = [family.learn(alpha, numbers, gate) for family, alpha in zip(self._families, alphas, strict=False)]
        if self._has_one_block:
            return found * len(sections)
        out = like.new_ones(self._numbered)
        for family, s in zip(self._families, found, strict=True):
            family.spread(s, out)
        parts = iter(out.split([section.params for section in sections if not section.array]))
        return [None if section.array else next(parts) for section in sections]

    def _joined(self, sections: list[Section], values: list[Any]) -> Any:
        """The numbers of all sections but arrays; None if there are none."""
        some = [(s, x) for s, x in zip(sections, values, strict=True) if not s.array]
        blank = self.layout.like.expand(self._numbered)
        known = any(x is not None for _, x in some)
        return torch.cat([blank[: s.params] if x is None else x for s, x in some]) if known else None

    def _learn_coordinates(
        self, section: Section, direction: Direction, i: int, rate: Any, alpha: tuple[Any, Any], gate: Gate
    ) -> Tensor:
        """Write the step size of each coordinate of section i over u, which saves an array; returns :func:`_sums`."""
        (e,), rule = section.entries, self._learner_of(self.layout.groups[section.group])
        u, n, last = direction.u[i], direction.n[i], direction.last[i]
        fresh: Any = rule.initial(u.new_zeros(()))
        fields = [
            self.layout.vector(f"learner.{name}", e, value) for name, value in zip(fresh._fields, fresh, strict=True)
        ]
        alpha = _representable(alpha[0], u.dtype), _representable(alpha[1], u.dtype)
        sums = []
        # Piece by piece, so that what is computed of a coordinate stays in the cache.
        for u_, n_, d_, last_, *state in pieces([u, n, direction.d[e], u if last is None else last, *fields]):
            numbers = u_, n_, None if last is None else last_
            s = as_number(_learn(rule, type(fresh)(*state), alpha, numbers, gate), u_).expand_as(u_)
            sums.append(_sums(s, u_, n_, d_.to(u.dtype).square()))
            torch.mul(s, rate, out=u_)
        return torch.stack(sums).to(self.layout.like).sum(0)

    def _shown(self, place: int, sections: list[Section], multipliers: list[Any], rows: list[Any], gate: Gate) -> Any:
        """The one s of a group whose move has the same length: sqrt(sum (s_i d_i)^2 / sum d_i^2)."""
        of_group = [i for i, section in enumerate(sections) if len(sections) == 1 or section.group == place]
        if self.layout.groups[place]["granularity"] in OF_GROUPS:
            s = multipliers[of_group[0]]  # the same for all tensors
            return gate.number(s[0]) if isinstance(s, Tensor) and s.dim() else s
        lengths, moved = (sum(rows[j][i] for j in of_group) for i in (3, 4))
        return sqrt(ratio(moved, lengths, otherwise=1.0))

    # Alpha ------------------------------------------------------------------------------------------------------------

    def _move_alphas(self, squared: Any, gate: Gate) -> list[tuple[Any, Any]]:
        """Alpha of each learner's blocks, then of each entry of coordinates, before this update and from it on.

        The learner predicts with the one and observes with the other: with alpha=None they differ in the first update.
        """
        before = self._alphas(gate)
        self._learn_alpha(squared, gate)
        after = self._alphas(gate)
        # On an accelerator nobody asks whether there has been an update that moves.
        if gate.host and all(g["alpha"] is not None or g["alpha_learned"].item() > 0 for g in self._groups):
            self._final_alphas = list(zip(after, after, strict=True))
        return list(zip(before, after, strict=True))

    def _alphas(self, gate: Gate) -> list[Any]:
        layout = self.layout
        blocks = [[self._alpha(b.group, b.size, gate) for b in family.blocks] for family in self._families]
        coordinates = [self._alpha(layout.groups[section.group], 1, gate) for section in self._arrays]
        stacked = [torch.stack([as_number(x, layout.like) for x in row]) if row[1:] else row[0] for row in blocks]
        return [*stacked, *coordinates]

    def _alpha(self, group: dict[str, Any], shares: int, gate: Gate) -> Any:
        if group["alpha"] is not None:
            return float(group["alpha"])
        learned = group.get("alpha_learned")
        return 0.0 if learned is None else gate.number(learned.to(self.layout.like)) * shares

    def _learn_alpha(self, squared: Any, gate: Gate) -> None:
        """Alpha = kappa ||g_0||^2, where g_0 is the first gradient that is not 0; each block gets its share by size."""
        like = self.layout.like
        for group in self._groups:
            old = as_number(group.get("alpha_learned", 0.0), like)
            if group["alpha"] is not None or (gate.host and old.item() > 0):
                continue
            square = as_number(squared, like)
            # Bounded, so that sums stay finite; but not below 16 ||g_0||^2, so that it counts beside the first n.
            largest = (16 * square).clamp(min=torch.finfo(like.dtype).max * LARGEST)
            new = torch.minimum(square * group["kappa"] / self._shares, largest / self._shares)
            group["alpha_learned"] = gate.choose(torch.where(old > 0, old, new), old)


def _learned(rule: Any, state: Any, alpha: tuple[Any, Any], numbers: Sequence[Any]) -> tuple[Any, Any]:
    """The multipliers s of some blocks, and the learner's state after their numbers (u, n, last).

    ``alpha`` is that before this update, and that from this update on; last is None for a learner without hindsight.
    """
    # The multiplier is taken before (u, n) are observed: it must not see the gradients that it scales.
    s = rule.predict(state, alpha[0])
    u, n, last = numbers
    return s, rule.observe(state, s, u, n, alpha[1], **({} if last is None else {"last": last}))


def _learn(rule: Any, state: Any, alpha: tuple[Any, Any], numbers: Sequence[Any], gate: Gate) -> Any:
    """As :func:`_learned`; the new state is written to the tensors of the old one. Returns s."""
    s, new = _learned(rule, state, alpha, numbers)
    # What a learner returns may be a field of its state: all are read before any is written to.
    s, *new = (x.clone() if any(x is field for field in state) else x for x in (s, *new))
    for field, value in zip(state, new, strict=True):
        chosen = gate.choose(value, field)
        field.copy_(chosen) if isinstance(chosen, Tensor) else field.fill_(chosen)
    return s


def _sums(s: Any, u: Any, n: Any, lengths: Any) -> Any:
    """Sums of the surrogate loss, of u, of n, of the squared lengths, and of s^2 times these: floats or a tensor."""
    if isinstance(u, float):
        return [s * s * n / 2 - s * u, u, n, lengths, s * s * lengths]
    s, u, n, lengths = (x.reshape(-1) for x in (as_number(s, u).expand_as(u), u, n, lengths))
    squares = s * s
    losses = torch.dot(squares, n) / 2 - torch.dot(s, u)
    return torch.stack([losses, u.sum(), n.sum(), lengths.sum(), torch.dot(squares, lengths)])


def _added(totals: Tensor, sums: list[Any]) -> Tensor:
    """The totals after one more update, with these sums of the surrogate loss, of u and of n."""
    _, signal, length = sums
    row = [1.0, 0.0, *sums, (1 - RECENT) * signal, (1 - RECENT) * length]
    if isinstance(signal, Tensor):
        return totals * totals.new_tensor(KEPT) + torch.stack([torch.as_tensor(x).to(totals) for x in row])
    # In place, with Python's numbers: they are faster.
    totals.numpy()[:] = [share * old + new for share, old, new in zip(KEPT, totals.tolist(), row, strict=True)]
    return totals


def _representable(alpha: Any, dtype: torch.dtype) -> Any:
    # The learner's sums must not overflow. In float64 the bound is higher: 1e150 squared is in range.
    largest = torch.finfo(dtype).max * (2.0**-12 if dtype == torch.float64 else LARGEST)
    return alpha.clamp(max=largest).to(dtype) if isinstance(alpha, Tensor) else min(alpha, largest)


def share(groups: list[dict[str, Any]]) -> None:
    """Copy what belongs to several groups from the first of them to all, so that none can be saved without it."""
    first = groups[0]
    for group in groups[1:]:
        for key in ("totals", "gradients", "pending", "unit"):
            if key in first:
                group[key] = first[key]
        if "alpha_learned" in first and "alpha_learned" not in group and group["alpha"] is None:
            factor = group["kappa"] / first["kappa"]
            group["alpha_learned"] = first["alpha_learned"] if factor == 1 else first["alpha_learned"] * factor
