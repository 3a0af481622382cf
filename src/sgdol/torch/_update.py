"""From the statistics of one update to its step sizes and the new parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol.learners import Learner, uses_hindsight
from sgdol.surrogate import loss
from sgdol.torch._blocks import Blocks, learners_of
from sgdol.torch._coordinates import Sums, update_tensor
from sgdol.torch._geometry import Geometry
from sgdol.torch._moves import move
from sgdol.torch._statistics import Direction
from sgdol.torch._tensors import stacked
from sgdol.torch._world import World, real_pieces

__all__ = ["Outcome", "update"]


class Outcome(NamedTuple):
    """What one update did, for the records."""

    step_sizes: list[Any]
    """Eta of each group; None where no parameter of the group took part."""
    surrogate: Any
    """The surrogate loss at the step sizes that were played."""
    signal: Any
    """Lr times u, summed."""
    length: Any
    """Lr times n, summed."""


LearnerOf = Callable[[dict[str, Any]], Learner]


def update(
    blocks: Blocks, direction: Direction, learner_of: LearnerOf, geometry: Geometry, world: World, ok: Tensor | None
) -> Outcome:
    """Learn from the direction's numbers and move the parameters along it.

    The multiplier is taken from the learner before it observes (u, n): it must not see the gradients that it scales.

    Args:
        blocks: which coordinates share a step size.
        direction: d, u and n.
        learner_of: the online learner of a parameter group.
        geometry: makes directions of vectors.
        world: sums over ranks.
        ok: None if the numbers are known to be finite; else a boolean scalar that decides on the device.
    """
    if ok is None and blocks.numbers(learner_of):
        return _update_by_numbers(blocks, direction, learner_of, geometry)
    n = direction.n
    before = blocks.alphas(n)
    coordinates_before = _coordinate_alphas(blocks, n, ok)
    blocks.learn_alpha(direction.squared.sum(), ok)
    multipliers = _learn(blocks, direction, learner_of, before, ok)
    rates = blocks.rates(n)
    eta = rates * blocks.spread(multipliers)
    played = blocks.spread(multipliers)
    losses = loss(played, direction.u, n, 1.0)
    lengths, means = n, eta
    if blocks.coordinates:
        alphas = (coordinates_before, _coordinate_alphas(blocks, n, ok))
        learned = _update_coordinates(blocks, direction, learner_of, geometry, rates, alphas, ok)
        losses, lengths, means = _with_coordinates(blocks, learned, world, losses, n, eta, rates)
    _move_tensors(blocks, direction, geometry, eta.tolist() if ok is None else eta.unbind(), ok)
    return Outcome(
        _shown(blocks, means, lengths, multipliers, rates),
        (rates * losses).sum(),
        (rates * direction.u).sum(),
        (rates * n).sum(),
    )


def _update_by_numbers(blocks: Blocks, direction: Direction, learner_of: LearnerOf, geometry: Geometry) -> Outcome:
    """The same where one block has everything and the host may look: arithmetic on Python's numbers is faster."""
    block, like = blocks.tensors[0], direction.n
    learner, rate = learner_of(block.group), block.group["lr"]
    n, u = sum(direction.n.tolist()), sum(direction.u.tolist())
    last = u if direction.last is direction.u else sum(direction.last.tolist())
    before = after = _number(blocks.alpha(block, like), None)
    if before == 0:
        blocks.learn_alpha(direction.squared.sum(), None)
        after = _number(blocks.alpha(block, like), None)
    fresh = learner.initial(0.0)
    keys = [f"learner.{name}" for name in fresh._fields]
    known = [block.owner.get(key, value) for key, value in zip(keys, fresh, strict=True)]
    state = type(fresh)(*(_number(value, None) for value in known))
    s = learner.predict(state, before)
    hindsight = {"last": last} if uses_hindsight(learner) else {}
    new = learner.observe(state, s, u, n, after, **hindsight)
    eta = rate * s
    *kept, shown_eta = like.new_tensor([*new, eta]).unbind()
    block.owner.update(zip(keys, kept, strict=True))
    _move_tensors(blocks, direction, geometry, [eta] * len(blocks.params), None)
    shown = [shown_eta if size else None for size in blocks.per_group]
    return Outcome(shown, rate * loss(s, u, n, 1.0), rate * u, rate * n)


def _learn(blocks: Blocks, direction: Direction, learner_of: LearnerOf, before: Tensor, ok: Tensor | None) -> Tensor:
    """The multiplier of each block that has one number; the learners' states are written to."""
    n, u, last = (blocks.sum(values) for values in (direction.n, direction.u, direction.last))
    multipliers, after = torch.ones_like(before), blocks.alphas(n)
    for learner, members in learners_of(blocks, learner_of):
        everything = len(members) == len(blocks.tensors)
        owners = [blocks.tensors[i].owner for i in members]
        state = blocks.state(learner, owners, n)
        mine = [n, u, last, before, after]
        mine = mine if everything else [values[members] for values in mine]
        multiplier = learner.predict(state, mine[3])
        hindsight = {"last": mine[2]} if uses_hindsight(learner) else {}
        blocks.write(owners, learner.observe(state, multiplier, mine[1], mine[0], mine[4], **hindsight), state, ok)
        if everything:
            multipliers = multiplier
        else:
            multipliers[members] = multiplier
    return multipliers


def _move_tensors(
    blocks: Blocks, direction: Direction, geometry: Geometry, each: Sequence[Any], ok: Tensor | None
) -> None:
    """Move the parameters that have one step size."""
    start = 0
    for place, (group, size) in enumerate(zip(blocks.groups, blocks.per_group, strict=True)):
        start += size
        if not size or group["granularity"] == "coordinate":
            continue
        some = slice(start - size, start)
        params, vectors = blocks.params[some], direction.vectors[some]
        xs = real_pieces(params)
        scale = _number(direction.scales[some.start], ok)
        if place in direction.made or geometry.euclidean(params[0]):
            move(group, xs, vectors, scale, each[some], ok)
            continue
        for x, p, v, eta in zip(xs, params, vectors, each[some], strict=True):  # one by one: D^-1 v is new memory
            move(group, [x], [geometry.sharp(p, v)], scale, [eta], ok)


def _shown(blocks: Blocks, eta: Tensor, lengths: Tensor, multipliers: Tensor, rates: Tensor) -> list[Tensor | None]:
    """One number for each group that takes part: what eta would have to be for a move of the same length."""
    shown: list[Tensor | None] = []
    start = 0
    for group, size in zip(blocks.groups, blocks.per_group, strict=True):
        part = slice(start, start + size)
        start += size
        if not size:
            shown.append(None)
        elif group["granularity"] in ("global", "group"):
            shown.append(eta[part.start].clone())
        else:
            shown.append(_mean(eta[part].square(), lengths[part]).sqrt())
    return shown


# One step size per coordinate -----------------------------------------------------------------------------------------


def _coordinate_alphas(blocks: Blocks, like: Tensor, ok: Tensor | None) -> dict[int, Any]:
    """Alpha of the groups that have one step size per coordinate, as numbers where the host may look."""
    found: dict[int, Any] = {}
    for row in blocks.coordinates:
        place = blocks.group_of[row]
        if place not in found:
            group = blocks.groups[place]
            value = group["alpha"] if group["alpha"] is not None else group.get("alpha_learned", 0.0)
            found[place] = _number(value, ok)
    return found


def _update_coordinates(
    blocks: Blocks,
    direction: Direction,
    learner_of: LearnerOf,
    geometry: Geometry,
    rates: Tensor,
    alphas: tuple[dict[Any, Any], dict[Any, Any]],
    ok: Tensor | None,
) -> list[Sums]:
    # Numbers on the host are cheaper than a tensor for every number; an accelerator would have to wait for them.
    each: Any = rates.tolist() if ok is None else rates.unbind()
    scratch: dict[torch.dtype, Tensor] = {}
    found = []
    for row in blocks.coordinates:
        p, place = blocks.params[row], blocks.group_of[row]
        group, coordinate = blocks.groups[place], direction.coordinates[row]
        owner = blocks.owner(row)
        vector = direction.vectors[row]
        if vector is coordinate.left:
            d = coordinate.right
        else:
            d = vector if place in direction.made else geometry.sharp(p, vector)
        found.append(
            update_tensor(
                learner_of(group),
                group,
                owner,
                p,
                d,
                _number(direction.scales[row], ok),
                coordinate,
                each[row],
                (alphas[0][place], alphas[1][place]),
                ok,
                scratch,
            )
        )
    return found


def _with_coordinates(
    blocks: Blocks, sums: list[Sums], world: World, losses: Tensor, n: Tensor, eta: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(losses, lengths, step sizes) of each parameter, those with one step size per coordinate filled in."""
    rows = blocks.coordinates
    lengths = [n[row] if s.length is None else s.length for row, s in zip(rows, sums, strict=True)]
    own = torch.stack([stacked([s[i] for s in sums], n) for i in range(3)] + [stacked(lengths, n)])
    if world.spread:
        total = world.total([blocks.params[row] for row in rows], own)
        known = own.new_tensor([s.length is None for s in sums]) > 0
        own = torch.stack([*total[:3], torch.where(known, own[3], total[3])])
    su, ssn, moved, dd = own.unbind()
    losses, lengths_of, eta = losses.clone(), n.clone(), eta.clone()
    losses[rows] = ssn / 2 - su
    lengths_of[rows] = dd
    # The length of the move over that of the direction: a coordinate that never moves keeps eta = lr, and an unweighted
    # mean would show little else.
    eta[rows] = rates[rows] * torch.where(dd > 0, moved / torch.where(dd > 0, dd, 1), 1).sqrt()
    return losses, lengths_of, eta


def _number(value: Any, ok: Tensor | None) -> Any:
    """A number of the host where it may look, else what it is."""
    return value.tolist() if ok is None and isinstance(value, Tensor) else value


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    total = weights.sum()
    return torch.where(total > 0, (values * weights).sum() / torch.where(total > 0, total, 1), values.mean())
