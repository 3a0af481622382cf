"""From the statistics of one update to its step sizes and the new parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol.learners import FTRL, LARGEST_MULTIPLIER, Learner
from sgdol.surrogate import loss, symmetric_signal
from sgdol.torch._blocks import Blocks
from sgdol.torch._passes import real_view, wide_dtype
from sgdol.torch._shards import local
from sgdol.torch._statistics import Draw, inner

__all__ = ["Outcome", "update"]

BUCKET = 1 << 22
"""How many scalars the multi-tensor path handles at once: its temporaries do not grow with the model."""

CHUNK = 1 << 18
"""How many scalars a per-coordinate update handles at once: its temporaries do not grow with the model either."""


SMALL = 1 << 12
"""Below so many scalars new memory is cheaper than a view of old memory."""


class Outcome(NamedTuple):
    """What one update did, for the records."""

    step_sizes: list[Tensor | None]
    """Eta of each group; None where no parameter of the group took part."""
    surrogate: Tensor
    """The surrogate loss at the step size that was played."""
    signal: Tensor
    """Lr times u, summed."""
    length: Tensor
    """Lr times n, summed."""


def update(
    blocks: Blocks,
    groups: list[dict[str, Any]],
    draw: Draw,
    learner: Learner,
    alpha: float | None,
    kappa: float,
    ok: Tensor | None,
) -> Outcome:
    """Learn from the draw and move the parameters along it.

    The multiplier is taken from the learner before it observes (u, n): it must not see the gradients that it scales.

    Args:
        blocks: which coordinates share a step size.
        groups: the parameter groups.
        draw: the direction and its statistics.
        learner: the online learner.
        alpha: the regulariser's alpha, None to take it from the first direction.
        kappa: how many times the first squared direction alpha is then.
        ok: None if the draw is known to be finite; else a boolean scalar that decides on the device.
    """
    n = blocks.total(draw.n)
    before = after = blocks.alpha(alpha, n)
    if alpha is None:
        blocks.learn_alpha(draw.n.sum(), kappa, ok)
        after = blocks.alpha(alpha, n)
    if blocks.granularity == "coordinate":
        return _update_coordinates(blocks, groups, draw, learner, before, after, ok)
    u = blocks.merge(draw.u)
    state = blocks.learner_state(learner, n)
    multiplier = learner.predict(state, before)
    blocks.write_learner_state(learner.observe(state, multiplier, u, n, after), state, ok)
    rates = blocks.rates(n)
    if blocks.granularity == "tensor":
        rates = rates[blocks.group_of] if len(groups) > 1 else rates.expand_as(n)
        eta = rates * multiplier
        shown = _root_mean_squares(eta, draw.n, blocks.per_group)
        each = eta.unbind()
    else:
        eta = rates * multiplier
        shown = [e if size else None for e, size in zip(eta.unbind(), blocks.per_group, strict=True)]
        by_group = eta.unbind()
        each = [by_group[i] for i in blocks.group_of]
        if blocks.granularity == "global" and len(groups) > 1:
            rates = _mean(rates, blocks.by_group(draw.n)).reshape(1)
    start = 0
    for group, size in zip(groups, blocks.per_group, strict=True):
        part = slice(start, start + size)
        start += size
        if size:
            _move(group, blocks.params[part], draw.vectors[part], draw.scales[part.start], each[part], ok)
    return Outcome(shown, (rates * loss(multiplier, u, n, 1.0)).sum(), (rates * u).sum(), (rates * n).sum())


# One step size per coordinate -----------------------------------------------------------------------------------------


def _update_coordinates(
    blocks: Blocks,
    groups: list[dict[str, Any]],
    draw: Draw,
    learner: Learner,
    before: Tensor,
    after: Tensor,
    ok: Tensor | None,
) -> Outcome:
    rates = blocks.rates(draw.n)
    rates = rates[blocks.group_of] if len(groups) > 1 else rates.expand_as(draw.n)
    kind = type(learner.initial(draw.n.new_zeros(())))
    # Numbers on the host are cheaper than a tensor for every number; an accelerator would have to wait for them.
    scalars = [v.tolist() if ok is None else v.unbind() for v in (rates, before, after)]
    signals: list[Tensor] = []
    moves: list[Tensor] = []
    quadratics: list[Tensor] = []
    lengths: list[Tensor] = []
    scratch: dict[torch.dtype, Tensor] = {}
    for i, (p, vector, rate, a, b) in enumerate(zip(blocks.params, draw.vectors, *scalars, strict=True)):
        known = draw.squares[i] if draw.squares else draw.signals[i]
        length = draw.lengths[i] if draw.lengths else vector
        tensors = [real_view(local(p)), vector, known, length, *blocks.tensor_state(learner, kind._fields, i, known)]
        pieces = zip(*(_chunks(t) for t in tensors), strict=True) if _flat(tensors) else [tensors]
        su, moved, ssn, dd = [], [], [], []
        for x, v, known, length, *fields in pieces:
            d = _scaled(v, draw.scales[i], known)
            if type(learner) is FTRL and draw.squares and ok is None:
                multiplier, signal = _learn_in_place(
                    learner, kind(*fields), d, known, draw.k, a, _scratch(scratch, known)
                )
            else:
                n = length if draw.lengths else d.square()
                u = symmetric_signal(n, known, draw.k) if draw.squares else known
                multiplier, signal = _learn(learner, kind(*fields), u, n, a, b, ok)
            su.append(signal)
            if draw.lengths:
                ssn.append(inner(multiplier.square(), length))
                dd.append(inner(d, d))
            moved.append(_move_coordinates(groups[blocks.group_of[i]], x, d, multiplier, rate, ok))
        for sums, parts in ((signals, su), (moves, moved), (quadratics, ssn), (lengths, dd)):
            if parts:
                sums.append(sum(parts[1:], parts[0]))
    su_each, moved_each = _stacked(signals, draw.n), _stacked(moves, draw.n)
    ssn_each, dd_each = (_stacked(quadratics, draw.n), _stacked(lengths, draw.n)) if lengths else (moved_each, draw.n)
    if blocks.shards is not None:
        rows = torch.stack([su_each, moved_each, ssn_each, dd_each])
        su_each, moved_each, ssn_each, dd_each = blocks.shards.sums(blocks.params, rows)[0].unbind()
        dd_each = dd_each if lengths else draw.n
    # The length of the move over that of the direction: a coordinate that never moves keeps eta = lr, and an unweighted
    # mean would show little else.
    eta = rates * torch.where(dd_each > 0, moved_each / torch.where(dd_each > 0, dd_each, 1), 1).sqrt()
    shown = _root_mean_squares(eta, dd_each, blocks.per_group)
    return Outcome(shown, (rates * (ssn_each / 2 - su_each)).sum(), (rates * draw.u).sum(), (rates * draw.n).sum())


def _stacked(numbers: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack([number.to(like.device) for number in numbers]).to(like)


def _scaled(vector: Tensor, scale: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(scale, float) and scale == 1.0:
        return vector if vector.dtype == like.dtype else vector.to(like)
    return vector.to(like) * (scale if isinstance(scale, float) else scale.to(like))


def _learn(
    learner: Learner, state: Any, u: Tensor, n: Tensor, before: Any, after: Any, ok: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The multipliers and <s, u>; the state is written to."""
    multiplier = learner.predict(state, before).clone()  # it may be the state itself
    observed = learner.observe(state, multiplier, u, n, after)
    fresh = [new.clone() if any(new is old for old in state) else new for new in observed]
    for field, new in zip(state, fresh, strict=True):
        field.copy_(new if ok is None else torch.where(ok, new, field))
    return multiplier, inner(multiplier, u)


def _learn_in_place(
    learner: FTRL, state: Any, d: Tensor, squares: Tensor, k: int, alpha: float, memory: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The same as ``_learn`` for FTRL, in fewer passes over memory and without new memory."""
    weight = learner.strength * alpha
    multiplier = torch.add(state.u_sum, weight * learner.center, out=memory[0])
    denominator = torch.add(state.n_sum, weight, out=memory[1])
    multiplier.div_(denominator)
    if weight == 0:
        multiplier.masked_fill_(denominator == 0, learner.center)
    multiplier.clamp_(0.0, LARGEST_MULTIPLIER)
    factor = k / (k - 1)
    squares.addcmul_(d, d, value=-1)  # now -u / factor
    state.n_sum.addcmul_(d, d)
    state.u_sum.add_(squares, alpha=-factor)
    return multiplier, -factor * inner(multiplier, squares)


def _move_coordinates(
    group: dict[str, Any], x: Tensor, d: Tensor, multiplier: Tensor, rate: float | Tensor, ok: Tensor | None
) -> Tensor:
    """Move x along d; returns ||s d||^2. The multipliers are written to."""
    if group["weight_decay"] or x.dtype != d.dtype or isinstance(rate, Tensor):
        _move_guarded(group, x, d, 1.0, multiplier * rate, ok)
        scaled = multiplier.mul_(d)
    else:
        scaled = multiplier.mul_(d)
        x.add_(scaled, alpha=rate if group["maximize"] else -rate)
    return inner(scaled, scaled)


def _scratch(kept: dict[torch.dtype, Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors like this one, from memory that is used again and again where allocating it would cost more."""
    if not SMALL < like.numel() <= CHUNK:
        return torch.empty_like(like), torch.empty_like(like)
    if like.dtype not in kept:
        kept[like.dtype] = torch.empty(2, CHUNK, dtype=like.dtype, device=like.device)
    first, second = kept[like.dtype][:, : like.numel()].unbind()
    return first.view(like.shape), second.view(like.shape)


def _flat(tensors: list[Tensor]) -> bool:
    return tensors[0].numel() > CHUNK and all(t.is_contiguous() for t in tensors)


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.view(-1).split(CHUNK)


# The same step size for a whole tensor --------------------------------------------------------------------------------


def _move(
    group: dict[str, Any],
    params: Sequence[Tensor],
    vectors: Sequence[Tensor],
    scale: float | Tensor,
    step_sizes: Sequence[Tensor],
    ok: Tensor | None,
) -> None:
    """Move x <- x - eta (scale vector + weight_decay x)."""
    xs = [real_view(local(p)) for p in params]
    etas = [eta if eta.device == x.device else eta.to(x.device) for x, eta in zip(xs, step_sizes, strict=True)]
    if _use_foreach(group["foreach"], xs):
        for start, stop in _buckets(xs):
            _move_bucket(group, xs[start:stop], vectors[start:stop], scale, etas[start:stop], ok)
        return
    sign = 1.0 if group["maximize"] else -1.0
    for x, v, eta in zip(xs, vectors, etas, strict=True):
        if ok is not None or x.dtype != wide_dtype(x.dtype):
            _move_guarded(group, x, v, scale, eta, ok)
            continue
        if group["weight_decay"]:
            x.addcmul_(x, eta, value=-group["weight_decay"])
        if isinstance(scale, float):
            x.addcmul_(v, eta, value=sign * scale)
        else:
            x.addcmul_(v, eta * scale, value=sign)


def _move_guarded(
    group: dict[str, Any], x: Tensor, v: Tensor, scale: float | Tensor, eta: Tensor, ok: Tensor | None
) -> None:
    """One tensor, in float32 or wider, left as it is where ``ok`` is false: 0 times infinity would poison it."""
    wide = x.to(wide_dtype(x.dtype))
    d = (v.to(wide.dtype) * scale).to(wide.dtype)
    moved = wide - eta.to(wide.dtype) * (group["weight_decay"] * wide + (-d if group["maximize"] else d))
    x.copy_(moved if ok is None else torch.where(ok, moved, wide))


def _move_bucket(
    group: dict[str, Any],
    xs: Sequence[Tensor],
    vectors: Sequence[Tensor],
    scale: float | Tensor,
    etas: Sequence[Tensor],
    ok: Tensor | None,
) -> None:
    """Many tensors with few kernel launches."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, x in enumerate(xs):
        alike.setdefault((x.device, x.dtype), []).append(i)
    for (_, dtype), members in alike.items():
        wide = wide_dtype(dtype)
        parts = [xs[i] for i in members]
        steps = [vectors[i].to(wide) for i in members]
        factor = -scale if group["maximize"] else scale
        if isinstance(factor, float) and factor == 1.0 and not group["weight_decay"]:
            steps = list(torch._foreach_mul(steps, [etas[i].to(wide) for i in members]))
        else:
            steps = list(torch._foreach_mul(steps, factor if isinstance(factor, float) else factor.to(wide)))
            if group["weight_decay"]:
                torch._foreach_add_(steps, [x.to(wide) for x in parts], alpha=group["weight_decay"])
            torch._foreach_mul_(steps, [etas[i].to(wide) for i in members])
        if ok is not None:
            steps = [torch.where(ok, step, torch.zeros_like(step)) for step in steps]
        torch._foreach_sub_(parts, steps)


def _buckets(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    buckets, start, size = [], 0, 0
    for i, t in enumerate(tensors):
        if size and size + t.numel() > BUCKET:
            buckets.append((start, i))
            start, size = i, 0
        size += t.numel()
    return [*buckets, (start, len(tensors))]


def _use_foreach(wanted: bool | None, tensors: Sequence[Tensor]) -> bool:
    return all(t.device.type != "cpu" for t in tensors) if wanted is None else wanted


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    total = weights.sum()
    return torch.where(total > 0, (values * weights).sum() / torch.where(total > 0, total, 1), values.mean())


def _root_mean_squares(values: Tensor, weights: Tensor, sizes: list[int]) -> list[Tensor | None]:
    """One number for each group that takes part: what eta would have to be for a move of the same length."""
    parts = zip(values.square().split(sizes), weights.split(sizes), sizes, strict=True)
    return [_mean(v, w).sqrt() if size else None for v, w, size in parts]
