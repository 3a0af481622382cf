"""The end of an update: whether it counts, and moving the parameters, x <- x - eta (d + weight_decay unit x).

:class:`Gate` is the only place that knows whether numbers may be read on the host. A number on the CPU is read without
a wait, so an update whose gradients are not finite is simply not made. An accelerator would have to be waited for:
there a boolean scalar goes along with the update. Gradients are replaced by 0 where it is false, weights and step sizes
by 0, and every number that is kept is chosen by ``torch.where``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sgdol.torch._vectors import Layout, Vector

__all__ = ["Gate", "move"]


class Gate:
    """One update's.

    Args:
        squared: the squared norm of its gradient: a number, or a tensor on the device.
        signal: its signal; finite only if all of its gradients are.
        host: whether the host may read numbers that are on the CPU; False decides everything as on a device.
    """

    __slots__ = ("host", "ok", "signal", "skip", "squared")

    def __init__(self, squared: Any, signal: Any, host: bool = True) -> None:
        self.host = isinstance(squared, float) or (host and squared.device.type == "cpu" and type(squared) is Tensor)
        self.squared: Any = squared
        self.signal: Any = signal
        if self.host and not isinstance(squared, float):
            self.squared, self.signal = squared.item(), signal.item()
        self.skip = self.host and not math.isfinite(self.squared + self.signal)
        """True if the host knows that the update does not count."""
        self.ok: Any = self.host or torch.isfinite(squared + signal)

    def number(self, value: Any) -> Any:
        """A Python number if the host may read it, else the tensor."""
        return value.item() if self.host and isinstance(value, Tensor) else value

    def choose(self, new: Any, old: Any) -> Any:
        """The new value if the update counts, else the old one."""
        return new if self.host else torch.where(self.ok, new, old)

    def weight(self, value: Any, otherwise: float = 0.0) -> Any:
        """A factor that leaves everything as it is if the update does not count: 0, or 1 where that does."""
        if self.host:
            return value
        wide = value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64, device=self.ok.device)
        return torch.where(self.ok, wide, otherwise)

    def finite(self, vector: Vector) -> Vector:
        """A vector without what is not finite: 0 times infinity would poison what it is added to."""
        if self.host:
            return vector
        return [torch.where(self.ok.to(x.device), x, torch.zeros_like(x)) for x in vector]


def move(
    layout: Layout, d: Vector, scales: list[Any], etas: list[Any], gate: Gate, units: Sequence[float] | None = None
) -> None:
    """Move the parameters of a layout along a direction.

    Args:
        layout: the parameters.
        d: the direction of entry e is ``scales[e] * d[e]``.
        scales: see d.
        etas: the step size of each entry: a number, a number per tensor of a merged entry, or an array.
        gate: whether the update counts.
        units: what weight_decay of each of the optimizer's groups is multiplied by; None for 1.
    """
    own = layout.params if layout.plain else layout.real_parameters()
    for e, entry in enumerate(layout.entries):
        group = layout.groups[entry.group]
        decay = group["weight_decay"] * (1.0 if units is None else units[layout.places[entry.group]])
        xs: Any = own[entry.start : entry.stop]
        v, scale, eta, decays = d[e], scales[e], etas[e], None
        if not isinstance(eta, float):
            eta = gate.weight(eta)
            eta = gate.number(eta.reshape(())) if eta.numel() == 1 else eta
        if isinstance(eta, Tensor) and eta.dim():
            if not entry.coordinates:
                eta = layout.spread(e, eta)
            if decay:
                decays = layout.parts(e, eta * decay)
            one = entry.coordinates and not entry.merged and xs[0].dim() and xs[0].dtype == v.dtype == eta.dtype
            if one and not decay and not isinstance(scale, Tensor):
                xs[0].addcmul_(v, eta, value=scale if group["maximize"] else -scale)  # in one pass over memory
                continue
            v, factor = v * (eta * scale).to(v.dtype), 1.0
        else:
            factor = eta * scale
            if decay:
                decays = eta * decay
        ds = layout.parts(e, v, to_read=True)
        factor = factor if group["maximize"] else -factor
        if isinstance(factor, float) and decays is None and xs[0].dtype == v.dtype:
            torch._foreach_add_(xs, ds, alpha=factor)
        else:
            _move(xs, ds, factor, decays, entry.dtype)


def _move(xs: list[Tensor], ds: Sequence[Tensor], factor: Any, decays: Any, wide: torch.dtype) -> None:
    """Move tensors: x <- (1 - decay) x + factor d, each rounded once, in the type in which vectors are kept."""
    if isinstance(factor, Tensor):
        ds, factor = torch._foreach_mul(list(ds), factor.to(ds[0])), 1.0
    if xs[0].dtype != wide:  # a narrow parameter is rounded once, at the end
        for i, (x, d) in enumerate(zip(xs, ds, strict=True)):
            copy = x.to(d.dtype)
            decay = decays[i] if isinstance(decays, list) else decays
            x.copy_((copy if decay is None else copy * (1 - decay)).add(d, alpha=factor))
        return
    if isinstance(decays, list):
        torch._foreach_mul_(xs, [(1 - decay).to(x) for decay, x in zip(decays, xs, strict=True)])
    elif decays is not None:
        torch._foreach_mul_(xs, 1 - decays if isinstance(decays, float) else (1 - decays).to(xs[0]))
    torch._foreach_add_(xs, [d.to(x.dtype) for d, x in zip(ds, xs, strict=True)], alpha=factor)
