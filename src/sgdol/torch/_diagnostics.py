"""Sums over the updates, and what they say about the training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sgdol.surrogate import loss
from sgdol.torch._update import Outcome

__all__ = ["added", "report", "skipped", "updates", "zeros"]

RECENT = 0.99
"""The signal-to-noise ratio and the noise scale are averages over about the last 1 / (1 - RECENT) updates."""

ROWS = ("updates", "skipped", "surrogate", "signal", "length", "recent_signal", "recent_length")
"""Counts, sums weighted by lr, and two moving averages of the latter."""


def zeros(like: Tensor) -> Tensor:
    """The totals before any update."""
    return torch.zeros(len(ROWS), device=like.device, dtype=like.dtype)


def skipped(totals: Tensor) -> Tensor:
    """The totals after an update that was skipped because a gradient was not finite."""
    one = torch.zeros_like(totals)
    one[ROWS.index("skipped")] = 1
    return totals + one


def added(totals: Tensor, outcome: Outcome, ok: Tensor | None) -> Tensor:
    """The totals after one more update, or after one more that was skipped if ``ok`` turns out to be false."""
    if isinstance(outcome.surrogate, float):
        one_more = [1.0, 0.0, outcome.surrogate, outcome.signal, outcome.length]
        *old, signal, length = totals.tolist()
        lately = [new + RECENT * (before - new) for new, before in ((outcome.signal, signal), (outcome.length, length))]
        return totals.new_tensor([*(a + b for a, b in zip(old, one_more, strict=True)), *lately])
    one = torch.ones_like(outcome.surrogate)
    sums = torch.stack([one, 0 * one, outcome.surrogate, outcome.signal, outcome.length])
    recent = torch.lerp(torch.stack([outcome.signal, outcome.length]), totals[5:], RECENT)
    new = torch.cat([totals[:5] + sums, recent])
    return new if ok is None else torch.where(ok, new, skipped(totals))


def updates(totals: Tensor) -> Tensor:
    """How many updates there have been."""
    return totals[ROWS.index("updates")]


def report(totals: Tensor | None, k: int) -> dict[str, Any]:
    """The totals as numbers that people look at; ``k`` is the number of gradients in an update."""
    values = dict.fromkeys(ROWS, 0.0) if totals is None else dict(zip(ROWS, totals.tolist(), strict=True))
    signal, noise = values["recent_signal"], values["recent_length"] - values["recent_signal"]
    best = min(max(values["signal"] / values["length"], 0.0), 2.0) if values["length"] > 0 else 1.0
    return {
        "signal_to_noise": _quotient(signal, noise),
        "noise_scale": _quotient(k * noise, signal),
        "updates": int(values["updates"]),
        "skipped": int(values["skipped"]),
        "gradients": k,
        "cumulative_surrogate": values["surrogate"],
        "regret": values["surrogate"] - loss(best, values["signal"], values["length"], 1.0),
    }


def _quotient(numerator: float, denominator: float) -> float:
    if denominator == 0:
        return math.nan if numerator == 0 else math.copysign(math.inf, numerator)
    return numerator / denominator
