"""Moving tensors that have one step size each: x <- x - eta (d + weight_decay x)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sgdol.torch._tensors import wide_dtype

__all__ = ["move", "move_guarded", "use_foreach"]

BUCKET = 1 << 22
"""How many scalars the multi-tensor path handles at once where it needs temporaries, which must not grow for ever."""


def use_foreach(wanted: bool | None, tensors: Sequence[Tensor]) -> bool:
    """Whether many tensors are to be handled at once; where nobody says, as it suits the device."""
    return all(t.device.type != "cpu" for t in tensors) if wanted is None else wanted


def move(
    group: dict[str, Any],
    xs: Sequence[Tensor],
    vectors: Sequence[Tensor],
    scale: Any,
    etas: Sequence[Any],
    ok: Tensor | None,
) -> None:
    """Move some tensors of a group along ``scale * vectors``.

    Args:
        group: its weight_decay, maximize and foreach are looked at.
        xs: real tensors, this rank's pieces.
        vectors: of the same shapes.
        scale: a number, or a tensor where the host must not wait.
        etas: the step size of each: numbers, or tensors where the host must not wait.
        ok: None, or whether to move, on the device.
    """
    if isinstance(etas[0], float):
        _move_by_numbers(group, xs, vectors, scale, etas)
    elif use_foreach(group["foreach"], xs):
        for start, stop in _buckets(xs):
            _move_bucket(group, xs[start:stop], vectors[start:stop], scale, etas[start:stop], ok)
    else:
        for x, v, eta in zip(xs, vectors, etas, strict=True):
            move_guarded(group, x, v, scale, eta.to(x.device), ok)


def _move_by_numbers(
    group: dict[str, Any], xs: Sequence[Tensor], vectors: Sequence[Tensor], scale: float, etas: Sequence[float]
) -> None:
    """Where the host knows the step sizes: one pass over memory, and one call if there is one step size."""
    sign = scale if group["maximize"] else -scale
    decay = group["weight_decay"]
    types = {x.dtype for x in xs}
    if any(dtype != wide_dtype(dtype) for dtype in types):
        narrow = {i for i, x in enumerate(xs) if x.dtype != wide_dtype(x.dtype)}
        for i in narrow:
            move_guarded(group, xs[i], vectors[i], scale, torch.tensor(etas[i], dtype=torch.float64), None)
        chosen = [i for i in range(len(xs)) if i not in narrow]
        xs, vectors, etas = [xs[i] for i in chosen], [vectors[i] for i in chosen], [etas[i] for i in chosen]
        types = {x.dtype for x in xs}
    many = len(xs) > 1 and group["foreach"] is not False and etas.count(etas[0]) == len(etas)
    if many and len(types) == 1 and types == {v.dtype for v in vectors}:
        if decay:
            torch._foreach_mul_(list(xs), 1 - etas[0] * decay)
        torch._foreach_add_(list(xs), list(vectors), alpha=sign * etas[0])
        return
    for x, v, eta in zip(xs, vectors, etas, strict=True):
        if decay:
            x.mul_(1 - eta * decay)
        x.add_(v, alpha=sign * eta)


def move_guarded(
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
    for (device, dtype), members in alike.items():
        wide = wide_dtype(dtype)
        parts = [xs[i] for i in members]
        steps = [vectors[i].to(wide) for i in members]
        factor = -scale if group["maximize"] else scale
        sizes = [etas[i].to(device=device, dtype=wide) for i in members]
        if isinstance(factor, float) and factor == 1.0 and not group["weight_decay"]:
            steps = list(torch._foreach_mul(steps, sizes))
        else:
            steps = list(torch._foreach_mul(steps, factor if isinstance(factor, float) else factor.to(steps[0])))
            if group["weight_decay"]:
                torch._foreach_add_(steps, [x.to(wide) for x in parts], alpha=group["weight_decay"])
            torch._foreach_mul_(steps, sizes)
        if ok is not None:
            steps = [torch.where(ok.to(device), step, torch.zeros_like(step)) for step in steps]
        torch._foreach_sub_(parts, steps)


def _buckets(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    buckets, start, size = [], 0, 0
    for i, t in enumerate(tensors):
        if size and size + t.numel() > BUCKET:
            buckets.append((start, i))
            start, size = i, 0
        size += t.numel()
    return [*buckets, (start, len(tensors))]
