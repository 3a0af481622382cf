"""From the statistics of one update to the new parameters, for every granularity.

The four granularities are the same surrogate on blocks of coordinates: ``"global"`` has one block, ``"group"`` one per
parameter group, ``"tensor"`` one per parameter and ``"coordinate"`` one per scalar. The learner's state is a vector with one
entry per block, or, for coordinates, a tensor per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from sgdol.learners import Learner
from sgdol.torch.passes import wide_dtype

__all__ = ["GRANULARITIES", "Granularity", "Learned", "learn", "move", "resolve_alpha"]

Granularity = Literal["global", "group", "tensor", "coordinate"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)

BUCKET = 1 << 22
"""How many scalars the multi-tensor path handles at once: its temporaries do not grow with the model."""


class Learned(NamedTuple):
    """What the learner says about one update."""

    multiplier: Tensor
    state: Any


def learn(learner: Learner, state: Any, u: Tensor, n: Tensor, alpha: Tensor, next_alpha: Tensor) -> Learned:
    """The multiplier for this update, from the updates before it, and the state after it.

    The multiplier is read before the learner observes (u, n): it must not see the gradients that it scales.
    """
    multiplier = learner.predict(state, alpha)
    return Learned(multiplier, learner.observe(state, multiplier, u, n, next_alpha))


def resolve_alpha(alpha: Tensor, sizes: Tensor, n_total: Tensor, size: int) -> Tensor:
    """Alpha after the first direction: ||d_0||^2, each block its even share by size.

    Args:
        alpha: per block, 0 where it is not known yet.
        sizes: how many coordinates each block has (1 where alpha is per coordinate).
        n_total: ||d||^2 of this update; as long as it is 0, alpha stays unknown.
        size: how many coordinates there are altogether.
    """
    known = alpha > 0
    share = torch.where(known.any(), alpha.sum() / (sizes * known).sum().clamp(min=1), n_total / size)
    return torch.where(known, alpha, share * sizes)


def move(
    params: Sequence[Tensor],
    directions: Sequence[Tensor],
    step_sizes: Sequence[Tensor],
    *,
    sign: float,
    weight_decay: float,
    foreach: bool,
    ok: Tensor | None,
) -> None:
    r"""Move x <- x - eta (d + weight_decay x), in place.

    Args:
        params: real views of the parameters.
        directions: d for each of them.
        step_sizes: eta for each of them: a scalar, or a tensor of the parameter's shape.
        sign: +1 to minimise, -1 to maximise.
        weight_decay: decoupled from the gradient, scaled by the same step size.
        foreach: many tensors at once, or one after the other.
        ok: None if the update is known to be finite; else a boolean scalar that decides on the device.
    """
    if not foreach:
        for p, d, eta in zip(params, directions, step_sizes, strict=True):
            if ok is not None or p.dtype != wide_dtype(p.dtype):
                _move_guarded(p, d, eta, sign, weight_decay, ok)
                continue
            if weight_decay:
                p.addcmul_(p, eta, value=-weight_decay)
            p.addcmul_(d, eta, value=-sign)
        return
    for start, stop in _buckets(params):
        _move_bucket(params[start:stop], directions[start:stop], step_sizes[start:stop], sign, weight_decay, ok)


def _move_guarded(p: Tensor, d: Tensor, eta: Tensor, sign: float, weight_decay: float, ok: Tensor | None) -> None:
    """One tensor, in float32 or wider, left as it is where ``ok`` is false: 0 * inf would poison it."""
    wide = p.to(wide_dtype(p.dtype))
    moved = wide - eta * (sign * d.to(wide.dtype) + weight_decay * wide)
    p.copy_(moved if ok is None else torch.where(ok, moved, wide))


def _move_bucket(
    params: Sequence[Tensor],
    directions: Sequence[Tensor],
    step_sizes: Sequence[Tensor],
    sign: float,
    weight_decay: float,
    ok: Tensor | None,
) -> None:
    by_dtype: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, p in enumerate(params):
        by_dtype.setdefault((p.device, p.dtype), []).append(i)
    for (_, dtype), members in by_dtype.items():
        ps = [params[i] for i in members]
        etas = [step_sizes[i] for i in members]
        wide = wide_dtype(dtype)
        steps = [directions[i].to(wide) * sign if dtype != wide else directions[i] for i in members]
        value = 1.0 if dtype != wide else sign
        if weight_decay:
            steps = list(torch._foreach_mul(steps, value))
            value = 1.0
            torch._foreach_add_(steps, ps, alpha=weight_decay)
        same = etas[0].dim() == 0 and all(eta is etas[0] for eta in etas)
        steps = list(torch._foreach_mul(steps, etas[0] if same else etas))
        if ok is not None:
            steps = [torch.where(ok, step, torch.zeros_like(step)) for step in steps]
        torch._foreach_add_(ps, steps, alpha=-value)


def _buckets(params: Sequence[Tensor]) -> list[tuple[int, int]]:
    buckets, start, size = [], 0, 0
    for i, p in enumerate(params):
        if size and size + p.numel() > BUCKET:
            buckets.append((start, i))
            start, size = i, 0
        size += p.numel()
    buckets.append((start, len(params)))
    return buckets
