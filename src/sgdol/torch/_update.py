"""Moving the parameters: x <- x - eta (d + weight_decay x)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgdol.torch._direction import Direction
from sgdol.torch._gate import Gate
from sgdol.torch._vectors import Layout, wide_dtype

__all__ = ["move"]


def move(layout: Layout, direction: Direction, etas: list[Any], gate: Gate) -> None:
    """Move the parameters of a layout along a direction.

    Args:
        layout: the parameters.
        direction: d, as scales and vectors.
        etas: the step size of each entry: a number, a number per tensor of a merged entry, or an array.
        gate: whether the update counts.
    """
    own = layout.own()
    for e, entry in enumerate(layout.entries):
        group = layout.groups[entry.group]
        xs = own[entry.start : entry.stop]
        d, scale, eta = direction.d[e], direction.scales[e], gate.weight(etas[e])
        if isinstance(eta, Tensor) and eta.numel() == 1:
            eta = gate.number(eta.reshape(()))
        if isinstance(eta, Tensor) and eta.dim():
            if not entry.coordinates:
                eta = layout.spread(e, eta)
            # A step size for each tensor or coordinate: they are multiplied first.
            decays = layout.parts(e, eta * group["weight_decay"]) if group["weight_decay"] else None
            d, factor = d * (eta * scale).to(d.dtype), 1.0
        else:
            decays = eta * group["weight_decay"] if group["weight_decay"] else None
            factor = eta * scale
        _move(xs, layout.parts(e, d), factor if group["maximize"] else -factor, decays)


def _move(xs: list[Tensor], ds: list[Tensor], factor: Any, decays: Any) -> None:
    """Move tensors: x <- (1 - decay) x + factor d, each rounded once."""
    if isinstance(factor, Tensor):
        ds = list(torch._foreach_mul(ds, factor.to(ds[0])))
        factor = 1.0
    if xs[0].dtype != wide_dtype(xs[0].dtype):  # a narrow parameter is rounded once, at the end
        for i, (x, d) in enumerate(zip(xs, ds, strict=True)):
            wide = x.to(d.dtype)
            decay = decays[i] if isinstance(decays, list) else decays
            x.copy_((wide if decay is None else wide * (1 - decay)).add(d, alpha=factor))
        return
    if isinstance(decays, list):
        torch._foreach_mul_(xs, [(1 - decay).to(x) for decay, x in zip(decays, xs, strict=True)])
    elif decays is not None:
        torch._foreach_mul_(xs, 1 - decays if isinstance(decays, float) else (1 - decays).to(xs[0]))
    if ds[0].dtype != xs[0].dtype:
        ds = [d.to(x.dtype) for d, x in zip(ds, xs, strict=True)]
    torch._foreach_add_(xs, ds, alpha=factor)
