"""Whether an update counts: the only place that knows whether numbers may be read on the host.

A number on the CPU is read without a wait, so an update whose gradients are not finite is simply not made. An
accelerator would have to be waited for: there a boolean scalar goes along with the update. Gradients are replaced by 0
where it is false, weights and step sizes by 0, and every number that is kept is chosen by ``torch.where``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sgdol.torch._vectors import Vector

__all__ = ["Gate"]


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
        self.squared, self.signal = self.number(squared), self.number(signal)
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
