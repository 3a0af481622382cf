"""Closures, as ``opt.step(closure)`` takes them: zero the gradients, run the backward passes, return the loss."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def closure_of(
    opt: torch.optim.Optimizer, losses: Callable[[], Iterable[Tensor]], after: Callable[[], Any] = lambda: None
) -> Callable[[], Tensor]:
    """A closure with one backward pass for each loss.

    Args:
        opt: whose gradients are zeroed first.
        losses: called, and so the model run, whenever the closure is.
        after: called after the passes: counts calls, or does something to the gradients.
    """

    def closure() -> Tensor:
        opt.zero_grad()
        total = torch.zeros(())
        for loss in losses():
            loss.backward()
            total = total + loss.detach()
        after()
        return total

    return closure
