"""Sums over the updates, and what they say about the training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgdol import summary
from sgdol.torch._update import Outcome

__all__ = ["added", "report", "skipped", "updates", "zeros"]

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
        return _added_numbers(totals, outcome)
    one = torch.ones_like(outcome.surrogate)
    sums = torch.stack([one, 0 * one, outcome.surrogate, outcome.signal, outcome.length])
    recent = summary.recent(totals[5:], torch.stack([outcome.signal, outcome.length]))
    new = torch.cat([totals[:5] + sums, recent])
    return new if ok is None else torch.where(ok, new, skipped(totals))


def _added_numbers(totals: Tensor, outcome: Outcome) -> Tensor:
    """The same of Python's numbers, on the host."""
    *old, signal, length = totals.tolist()
    new = [1.0, 0.0, outcome.surrogate, outcome.signal, outcome.length]
    recent = [summary.recent(signal, outcome.signal), summary.recent(length, outcome.length)]
    return totals.new_tensor([*(a + b for a, b in zip(old, new, strict=True)), *recent])


def updates(totals: Tensor) -> Tensor:
    """How many updates there have been."""
    return totals[ROWS.index("updates")]


def report(totals: Tensor | None, k: int) -> dict[str, Any]:
    """The totals as numbers that people look at; ``k`` is the number of gradients in an update."""
    values = dict.fromkeys(ROWS, 0.0) if totals is None else dict(zip(ROWS, totals.tolist(), strict=True))
    recent = values["recent_signal"], values["recent_length"]
    return {
        "signal_to_noise": summary.signal_to_noise(*recent),
        "noise_scale": summary.noise_scale(*recent, k),
        "updates": int(values["updates"]),
        "skipped": int(values["skipped"]),
        "gradients": k,
        "cumulative_surrogate": values["surrogate"],
        "regret": summary.regret(values["surrogate"], values["signal"], values["length"]),
    }
