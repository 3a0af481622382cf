"""Arithmetic on all parameters at once: the few vector operations that the optimizer without M is made of.

A vector is a list of real tensors. Inner products are taken per tensor in float32 or wider, and summed in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sgdol.torch._passes import scalar_dtype, wide_dtype

__all__ = ["add", "inner", "lerp", "numbers"]

Vector = Sequence[Tensor]


def inner(a: Vector, b: Vector) -> Tensor:
    """<a, b>, still on the device; :func:`numbers` reads several at once."""
    if not a:
        return torch.zeros(())
    each = [torch.dot(_wide(x).reshape(-1), _wide(y).reshape(-1)) for x, y in zip(a, b, strict=True)]
    device = each[0].device
    return torch.stack([e.to(device=device, dtype=scalar_dtype(device)) for e in each]).sum()


def numbers(*scalars: Tensor) -> list[float]:
    """These scalars on the host, in one wait."""
    return torch.stack([s.to(scalars[0]) for s in scalars]).tolist()


def add(x: Vector, v: Vector, factor: float, *, scale: float = 1.0, foreach: bool = False) -> None:
    """Turn x into scale x + factor v. Narrow x are moved in the type of v."""
    for xs, vs in _alike(x, v):
        same = xs[0].dtype == vs[0].dtype
        if foreach and same:
            if scale != 1.0:
                torch._foreach_mul_(xs, scale)
            torch._foreach_add_(xs, vs, alpha=factor)
            continue
        for a, b in zip(xs, vs, strict=True):
            wide = a if same else a.to(b.dtype)
            if scale != 1.0:
                wide.mul_(scale)
            wide.add_(b, alpha=factor)
            if not same:
                a.copy_(wide)


def lerp(a: Vector, b: Vector, weight: float, *, foreach: bool = False) -> None:
    """Turn a into a + weight (b - a). Narrow b are taken in the type of a."""
    for xs, ys in _alike(a, b):
        ys = ys if xs[0].dtype == ys[0].dtype else [y.to(xs[0].dtype) for y in ys]
        if foreach:
            torch._foreach_lerp_(xs, ys, weight)
        else:
            for x, y in zip(xs, ys, strict=True):
                x.lerp_(y, weight)


def _alike(a: Vector, b: Vector) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Pairs of tensors, those together that are of the same kind."""
    kinds: dict[tuple[torch.device, torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for x, y in zip(a, b, strict=True):
        xs, ys = kinds.setdefault((x.device, x.dtype, y.dtype), ([], []))
        xs.append(x)
        ys.append(y)
    yield from kinds.values()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_dtype(tensor.dtype))
