"""An update that is not finite: the host knows before anything moves, or the device decides.

A number on the CPU is read without a wait, so an update whose gradients are not finite is simply not made. An
accelerator would have to be waited for: there a boolean scalar ``ok`` goes along with the update, and everything that
is written is chosen by ``torch.where`` between what it was and what it would be.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Guard", "Verdict"]


class Verdict(NamedTuple):
    """Whether an update is to be made."""

    skip: bool
    """True if the host knows that it is not."""
    ok: Tensor | None
    """None if the host knows that it is; else what the device says."""
    n: float
    """The sum of n, if the host knows it, else not a number."""
    u: float


class Guard:
    """Judges updates by their two numbers.

    Args:
        waits: whether numbers may be read wherever they are on the host; False leaves every decision to the device, as
            if all parameters were on one.
    """

    def __init__(self, *, waits: bool = True) -> None:
        self._waits = waits

    def judge(self, n: Tensor, u: Tensor) -> Verdict:
        """The verdict on gradients with these numbers, one per parameter."""
        if self._waits and n.is_cpu and type(n) is Tensor:
            length, signal = sum(n.tolist()), sum(u.tolist())
            return Verdict(not math.isfinite(length + signal), None, length, signal)
        return Verdict(False, torch.isfinite(n.sum() + u.sum()), math.nan, math.nan)
