r"""The learner of the multiplier, with its state where a torch optimizer's ``state_dict()`` saves it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sgdol.learners import FTRL, Learner, uses_hindsight
from sgdol.surrogate import momentum_signal

__all__ = ["KEY", "Multiplier", "check_momentum", "diagnostics", "inner", "with_momentum"]

KEY = "sgdol"
"""Under which name the numbers stand in the optimizer's state, beside those of the parameters."""


def inner(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """The inner product over all parameters, products in the parameters' own type and their sum in float64."""
    products = [torch.dot(a.reshape(-1), b.reshape(-1)).double() for a, b in zip(left, right, strict=True)]
    return torch.stack([product.to(products[0].device) for product in products]).sum()


def with_momentum(
    states: Sequence[dict[str, Any]], gradient: list[Tensor], signal: Tensor, momentum: float, updates: int
) -> tuple[list[Tensor], Tensor]:
    """The direction m_t/(1 - beta^t) and its signal; m_t is kept in the parameters' states.

    The past average is independent of the present gradient, whose own signal counts (1 - beta) only.
    """
    if momentum == 0:
        return gradient, signal
    past = [state.get("momentum_average", torch.zeros_like(g)) for state, g in zip(states, gradient, strict=True)]
    correction = 1 - momentum ** (updates + 1)
    u = momentum_signal(inner(past, gradient), signal, momentum, correction)
    for state, m, g in zip(states, past, gradient, strict=True):
        state["momentum_average"] = m.lerp(g, 1 - momentum)
    return [state["momentum_average"] / correction for state in states], u


def check_momentum(momentum: float) -> None:
    """Refuse what is not in [0, 1)."""
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum!r}")


class Multiplier:
    """One learned multiplier: asked before a step's numbers are seen, told of them afterwards.

    Args:
        alpha: how strongly to hold on to the base rate; None for kappa times the first n.
        kappa: positive; without meaning if alpha is given.
        learner: None for FTRL, the paper's.
    """

    def __init__(self, alpha: float | None, kappa: float, learner: Learner | None) -> None:
        if alpha is not None and not (math.isfinite(alpha) and alpha > 0):
            raise ValueError(f"alpha must be positive and finite, or None, got {alpha!r}")
        if not (math.isfinite(kappa) and kappa > 0):
            raise ValueError(f"kappa must be positive and finite, got {kappa!r}")
        if learner is not None and not isinstance(learner, Learner):
            raise ValueError(f"learner must have initial, predict and observe, as in sgdol.learners, got {learner!r}")
        if learner is not None and uses_hindsight(learner):
            raise ValueError(
                f"{type(learner).__name__} needs hindsight, which it is not given here: take a learner without it, "
                "such as sgdol.learners.FTRL"
            )
        self.alpha, self.kappa, self.learner = alpha, kappa, learner or FTRL()

    def step(self, numbers: dict[str, Any], u: Tensor, n: Tensor) -> Tensor:
        """The multiplier of this step, from the steps before it alone; then (u, n) are added to ``numbers``."""
        if "alpha" not in numbers:
            zero = torch.zeros_like(n)
            numbers["alpha"] = self.kappa * n if self.alpha is None else zero + self.alpha
            numbers["learner"] = self.learner.initial(zero)._asdict()
            numbers.update(u_sum=zero, n_sum=zero, updates=0)
        # Saved as a plain dict, so that it loads with weights_only=True; learners see their own type.
        state = type(self.learner.initial(torch.zeros_like(n)))(**numbers["learner"])
        multiplier = self.learner.predict(state, numbers["alpha"])
        numbers["learner"] = self.learner.observe(state, multiplier, u, n, numbers["alpha"])._asdict()
        numbers["u_sum"], numbers["n_sum"] = numbers["u_sum"] + u, numbers["n_sum"] + n
        numbers["updates"] += 1
        numbers["multiplier"] = multiplier
        return multiplier


def diagnostics(numbers: dict[str, Any]) -> dict[str, float]:
    """The multiplier, the number of updates and what the sums say of signal and noise, as Python numbers."""
    if "alpha" not in numbers:
        return {"updates": 0.0, "skipped": float(numbers.get("skipped", 0))}
    u_sum, n_sum = float(numbers["u_sum"]), float(numbers["n_sum"])
    noise = n_sum - u_sum
    return {
        "updates": float(numbers["updates"]),
        "skipped": float(numbers.get("skipped", 0)),
        "multiplier": float(numbers["multiplier"]),
        "u_sum": u_sum,
        "n_sum": n_sum,
        "signal_to_noise": max(u_sum, 0.0) / noise if noise > 0 else math.inf,
    }
