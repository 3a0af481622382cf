"""From the statistics of one update to its step sizes and the new parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol.learners import FTRL, LARGEST_MULTIPLIER, Learner
from sgdol.surrogate import loss
from sgdol.torch.blocks import Blocks
from sgdol.torch.draw import Draw, inner
from sgdol.torch.passes import real_view, wide_dtype

__all__ = ["Outcome", "update"]

BUCKET = 1 << 22
"""How many scalars the multi-tensor path handles at once: its temporaries do not grow with the model."""

CHUNK = 1 << 16
"""How many scalars a per-coordinate update handles at once, so that they stay in the cache of a CPU core."""


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
    blocks: Blocks, groups: list[dict[str, Any]], draw: Draw, learner: Learner, alpha: float | None, ok: Tensor | None
) -> Outcome:
    """Learn from the draw and move the parameters along it.

    The multiplier is taken from the learner before it observes (u, n): it must not see the gradients that it scales.

    Args:
        blocks: which coordinates share a step size.
        groups: the parameter groups.
        draw: the direction and its statistics.
        learner: the online learner.
        alpha: the regulariser's alpha, None to take it from the first direction.
        ok: None if the draw is known to be finite; else a boolean scalar that decides on the device.
    """
    before = blocks.alpha(alpha, draw.u)
    after = before if alpha is not None else blocks.alpha_after(before, draw.n.sum())
    blocks.write("alpha_learned", after, before, ok)
    if blocks.granularity == "coordinate":
        return _update_coordinates(blocks, groups, draw, learner, before, after, ok)
    n = blocks.total(draw.n)
    state = blocks.learner_state(learner, n)
    multiplier = learner.predict(state, before)
    blocks.write_learner_state(learner.observe(state, multiplier, draw.u, n, after), state, ok)
    rates = blocks.rates(n)
    if blocks.granularity == "tensor":
        rates = rates[blocks.group_of] if len(groups) > 1 else rates.expand_as(n)
        eta = rates * multiplier
        shown = _weighted_means(eta, draw.n, blocks.per_group)
        each = eta.unbind()
    else:
        eta = rates * multiplier
        shown = [e if size else None for e, size in zip(eta.unbind(), blocks.per_group, strict=True)]
        by_group = eta.unbind()
        each = [by_group[i] for i in blocks.group_of]
        if blocks.granularity == "global" and len(groups) > 1:
            rates = _weighted_mean(rates, blocks.by_group(draw.n)).reshape(1)
    start = 0
    for group, size in zip(groups, blocks.per_group, strict=True):
        part = slice(start, start + size)
        start += size
        if size:
            _move(group, blocks.params[part], draw.vectors[part], draw.scale, each[part], ok)
    return Outcome(shown, (rates * loss(multiplier, draw.u, n, 1.0)).sum(), (rates * draw.u).sum(), (rates * n).sum())


# One step size per coordinate ------------------------------------------------------------------------------------------


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
    numbers = []
    for i, (p, vector, u) in enumerate(zip(blocks.params, draw.vectors, draw.u_each, strict=True)):
        state = blocks.tensor_state(learner, i, u)
        scalars = [x if isinstance(x, float) else x.to(u) for x in (draw.scale, rates[i], before[i], after[i])]
        group = groups[blocks.group_of[i]]
        tensors = [real_view(p), vector, u, *state]
        pieces = zip(*(_chunks(t) for t in tensors), strict=True) if _flat(tensors) else [tensors]
        parts = [
            _update_chunk(learner, type(state)(*fields), x, d, u, scalars, group, ok) for x, d, u, *fields in pieces
        ]
        numbers.append((parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)).to(draw.n))
    sn, ssn, su, u_total = torch.stack(numbers).unbind(1)
    # Weighted by the squared direction: a coordinate that never moves keeps eta = lr and would hide the others.
    eta = rates * torch.where(draw.n > 0, sn / torch.where(draw.n > 0, draw.n, 1), 1)
    shown = _weighted_means(eta, draw.n, blocks.per_group)
    return Outcome(shown, (rates * (ssn / 2 - su)).sum(), (rates * u_total).sum(), (rates * draw.n).sum())


def _update_chunk(
    learner: Learner,
    state: Any,
    x: Tensor,
    vector: Tensor,
    u: Tensor,
    scalars: list[Any],
    group: dict[str, Any],
    ok: Tensor | None,
) -> Tensor:
    """Learn and move some coordinates; returns <s, n>, <s^2, n>, <s, u> and the sum of u."""
    scale, rate, before, after = scalars
    d = vector.to(u.dtype)
    if not isinstance(scale, float) or scale != 1.0:
        d = d * scale
    if type(learner) is FTRL and ok is None:
        # FTRL.predict and FTRL.observe in place; tested equal to the general path below.
        weight = learner.strength * before
        multiplier = state.u_sum + weight * learner.center
        denominator = state.n_sum + weight
        multiplier.div_(denominator)
        if learner.strength == 0 or before.tolist() == 0:
            multiplier.masked_fill_(denominator == 0, learner.center)
        multiplier.clamp_(0.0, LARGEST_MULTIPLIER)
        state.u_sum.add_(u)
        state.n_sum.addcmul_(d, d)
    else:
        n = d.square()
        multiplier = learner.predict(state, before)
        for field, new in zip(state, learner.observe(state, multiplier, u, n, after), strict=True):
            field.copy_(new if ok is None else torch.where(ok, new, field))
    su, u_total = inner(multiplier, u), u.sum()
    if group["weight_decay"] or ok is not None or x.dtype != u.dtype:
        _move_guarded(group, x, d, 1.0, multiplier * rate, ok)
        scaled = multiplier * d
    else:
        scaled = multiplier.mul_(d)
        x.addcmul_(scaled, rate, value=1.0 if group["maximize"] else -1.0)
    return torch.stack([inner(scaled, d), inner(scaled, scaled), su, u_total])


def _flat(tensors: list[Tensor]) -> bool:
    return tensors[0].numel() > CHUNK and all(t.is_contiguous() for t in tensors)


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.view(-1).split(CHUNK)


# The same step size for a whole tensor ---------------------------------------------------------------------------------


def _move(
    group: dict[str, Any],
    params: Sequence[Tensor],
    vectors: Sequence[Tensor],
    scale: float | Tensor,
    step_sizes: Sequence[Tensor],
    ok: Tensor | None,
) -> None:
    """Move x <- x - eta (scale vector + weight_decay x)."""
    xs = [real_view(p) for p in params]
    etas = [eta if eta.device == x.device else eta.to(x.device) for x, eta in zip(xs, step_sizes, strict=True)]
    if _use_foreach(group["foreach"], xs):
        for start, stop in _buckets(xs):
            _move_bucket(group, xs[start:stop], vectors[start:stop], scale, etas[start:stop], ok)
        return
    direction = 1.0 if group["maximize"] else -1.0
    decay = group["weight_decay"]
    if isinstance(scale, float):
        direction, scale = direction * scale, 1.0
    for x, v, eta in zip(xs, vectors, etas, strict=True):
        if ok is not None or x.dtype != wide_dtype(x.dtype):
            _move_guarded(group, x, v, scale, eta, ok)
            continue
        if decay:
            x.addcmul_(x, eta, value=-decay)
        x.addcmul_(v, eta if isinstance(scale, float) else eta * scale, value=direction)


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


def _weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    total = weights.sum()
    return torch.where(total > 0, (values * weights).sum() / torch.where(total > 0, total, 1), values.mean())


def _weighted_means(values: Tensor, weights: Tensor, sizes: list[int]) -> list[Tensor | None]:
    parts = zip(values.split(sizes), weights.split(sizes), sizes, strict=True)
    return [_weighted_mean(v, w) if size else None for v, w, size in parts]
