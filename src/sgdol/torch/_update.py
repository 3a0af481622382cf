"""Whether an update counts, and moving the parameters: x <- x - eta (d + weight_decay x).

An update counts if its gradients are finite. A number on the CPU is read without a wait, so an update that does not
count is not made. To read a number on an accelerator the host would have to wait: there the update is always made, with
a boolean scalar on the device. Where it is False, gradients, weights and step sizes are replaced by 0, and
``torch.where`` chooses the old value of every number that is kept. :class:`Gate` is the only place that knows of this.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sgdol.torch._vectors import Layout, Vector

__all__ = ["Gate", "move", "move_tensors"]


class Gate:
    """Decides whether one update counts.

    Args:
        squared: the squared norm of its gradient, a Python float or a tensor.
        signal: its signal; finite only if all of its gradients are.
        host: whether the host may read numbers that are on the CPU; False decides everything as on an accelerator.
    """

    __slots__ = ("host", "ok", "signal", "skip", "squared")

    def __init__(self, squared: Any, signal: Any, host: bool = True) -> None:
        self.host = isinstance(squared, float) or (host and squared.device.type == "cpu" and type(squared) is Tensor)
        self.squared: Any = squared
        self.signal: Any = signal
        if self.host and not isinstance(squared, float):
            self.squared, self.signal = squared.item(), signal.item()
        self.skip = self.host and not math.isfinite(self.squared + self.signal)  # the update is not to be made
        self.ok: Any = self.host or torch.isfinite(squared + signal)

    def number(self, value: Any) -> Any:
        """A Python float if the host may read the value, else the tensor unchanged."""
        return value.item() if self.host and isinstance(value, Tensor) else value

    def choose(self, new: Any, old: Any) -> Any:
        return new if self.host else torch.where(self.ok, new, old)

    def kept(self, new: Any, old: Any, like: Tensor) -> Tensor:
        """What is to be kept of a single number, as a tensor of the type of ``like``."""
        new = torch.as_tensor(new, dtype=like.dtype, device=like.device)
        return new if self.host else torch.where(self.ok, new, torch.as_tensor(old).to(like))

    def weight(self, value: Any, otherwise: float = 0.0) -> Any:
        """The value if the update counts; else ``otherwise``, with which nothing moves."""
        if self.host:
            return value
        wide = value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64, device=self.ok.device)
        return torch.where(self.ok, wide, otherwise)

    def finite(self, vector: Vector) -> Vector:
        """On a device, the vector if the update counts, else 0."""
        # A weight of 0 is not enough: 0 times infinity is nan.
        return [torch.where(self.ok.to(x.device), x, torch.zeros_like(x)) for x in vector]


def move(layout: Layout, d: Vector, scales: list[Any], etas: list[Any], gate: Gate) -> None:
    """Move the parameters: x <- x - eta (scale d + weight_decay x), or with + scale d to maximise.

    Args:
        layout: the parameters.
        d: the direction of entry e is ``scales[e] * d[e]``.
        scales: see d. They are kept apart to save a product of the size of the model.
        etas: the step size of each entry: a number, a number per tensor of a merged entry, or an array.
        gate: whether the update counts.
    """
    params = layout.real_parameters()
    for e, entry in enumerate(layout.entries):
        group, xs = layout.groups[entry.group], params[entry.start : entry.stop]
        decay = group["weight_decay"]
        v, scale, eta, decays = d[e], scales[e], etas[e], None
        if not isinstance(eta, float):
            eta = gate.weight(eta)  # 0 if the update does not count
            eta = gate.number(eta.reshape(())) if eta.numel() == 1 else eta
        if isinstance(eta, Tensor) and eta.dim():  # one step size per tensor or per coordinate
            if not entry.coordinates:
                eta = layout.spread(e, eta)
            if decay:
                decays = layout.parts(e, eta * decay)
            is_array = entry.coordinates and not entry.merged and xs[0].dim() and xs[0].dtype == v.dtype == eta.dtype
            if is_array and not decay and not isinstance(scale, Tensor):
                xs[0].addcmul_(v, eta, value=scale if group["maximize"] else -scale)  # in one pass over memory
                continue
            v, factor = v * (eta * scale).to(v.dtype), 1.0  # the factor is rounded once
        else:
            factor = eta * scale
            if decay:
                decays = eta * decay
        ds = layout.parts(e, v, to_read=True)
        move_tensors(xs, ds, factor if group["maximize"] else -factor, decays, entry.dtype)


def move_tensors(xs: list[Tensor], ds: list[Tensor], factor: Any, decays: Any, wide: torch.dtype) -> None:
    """Move tensors: x <- (1 - decay) x + factor d, computed in the wide type; decay None for 0."""
    if isinstance(factor, float) and decays is None and xs[0].dtype == ds[0].dtype:
        torch._foreach_add_(xs, ds, alpha=factor)  # the usual case: one kernel for many tensors
        return
    if isinstance(factor, Tensor):
        ds, factor = list(torch._foreach_mul(ds, factor.to(ds[0]))), 1.0
    if xs[0].dtype != wide:  # bfloat16 would be rounded by every operation: it is rounded once, at the end
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
