"""Batches that are drawn without replacement: what that does to products of gradients, and its correction."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgdol.torch._sources import Gradients, Signal

__all__ = ["Epochs", "in_epochs"]


class Epochs(NamedTuple):
    """What drawing without replacement does to products of gradients, of each parameter."""

    lengths: Tensor
    """How many updates an epoch has; infinite with replacement."""
    share: Tensor
    """The weight of this epoch's gradients in the momentum before this update."""
    low: Tensor
    """By how much a product of two gradients of one epoch is low: (n - u) over the length."""


def in_epochs(gradients: Gradients, groups: list[dict[str, Any]], made: Tensor) -> tuple[Gradients, Epochs]:
    """The gradients with the signal that they really have.

    Args:
        gradients: of one step.
        groups: the parameter group of each of their parameters.
        made: how many updates there have been before.
    """
    n, u = gradients.n, gradients.u
    lengths = n.new_tensor([group["epoch"] or math.inf for group in groups])
    betas = n.new_tensor([float(group["momentum"]) for group in groups])
    share = 1 - betas ** torch.where(lengths.isinf(), 0.0, torch.remainder(made, lengths))
    epochs = Epochs(lengths, share, (n - u) / lengths)
    signals = {
        i: Signal(s.base, s.a + (1 - s.a) / groups[i]["epoch"], s.b - s.b / groups[i]["epoch"])
        if groups[i]["epoch"]
        else s
        for i, s in gradients.signals.items()
    }
    return gradients._replace(u=u + epochs.low, signals=signals), epochs
