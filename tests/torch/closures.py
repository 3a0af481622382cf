"""Steps of a loop, and closures as ``opt.step(closure)`` takes them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def one_step(opt: torch.optim.Optimizer, losses: Iterable[Tensor]) -> None:
    """One backward pass for each loss, a step, and no gradients any more."""
    for loss in losses:
        loss.backward()
    opt.step()
    opt.zero_grad()


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
