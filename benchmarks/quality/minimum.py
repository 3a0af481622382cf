"""Where the f* of convex problems come from."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.quality.objectives import Objective

__all__ = ["minimum", "newton"]


def minimum(objective: Objective, iterations: int = 2000) -> float:
    """The least value that L-BFGS in float64 finds from where the objective starts; its parameters are changed."""
    optimizer = torch.optim.LBFGS(
        objective.parameters(),
        max_iter=iterations,
        max_eval=2 * iterations,
        history_size=50,
        tolerance_grad=1e-9,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective.full()
        loss.backward()
        return loss

    optimizer.step(closure)
    return float(objective.full().detach())


def newton(objective: Objective, iterations: int = 100) -> float:
    """The least value that Newton's method with a line search finds, for one tensor of few parameters.

    For features in very different units, where L-BFGS is still on its way after thousands of steps.
    """
    (x,) = objective.parameters()
    value = objective.full()
    for _ in range(iterations):
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        rows = [torch.autograd.grad(s, x, retain_graph=True)[0].flatten() for s in slope.flatten()]
        step = torch.linalg.solve(torch.stack(rows), slope.detach().flatten()).view_as(x)
        before, share = value.detach(), 1.0
        with torch.no_grad():
            x.sub_(step)
            while not objective.full() < before and share > 1e-8:
                x.add_(step, alpha=share / 2)
                share /= 2
        value = objective.full()
        if not value.detach() < before:
            break
    return float(value.detach())
