"""Sums over the updates, and what they say about the training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgdol import summary
from sgdol.torch._blocks import Learned
from sgdol.torch._update import Gate
from sgdol.torch._vectors import as_number

__all__ = ["added", "report", "skipped", "zeros"]

ROWS = ("updates", "skipped", "surrogate", "signal", "length", "recent_signal", "recent_length")
"""Counts (that of the updates comes first), sums weighted by lr, and two moving averages of the latter."""


def zeros(like: Tensor) -> Tensor:
    """The totals before any update."""
    return like.new_zeros(len(ROWS))


def skipped(totals: Tensor) -> Tensor:
    """The totals after an update that was skipped because a gradient was not finite."""
    one = torch.zeros_like(totals)
    one[ROWS.index("skipped")] = 1
    return totals + one


def added(totals: Tensor, learned: Learned, gate: Gate) -> Tensor:
    """The totals after one more update, or after one more that was skipped if the gate turns out to be closed."""
    new = learned.surrogate, learned.signal, learned.length
    if gate.host:  # Python's numbers are faster
        updates, skips, *sums, signal, length = totals.tolist()
        values = [gate.number(value) for value in new]
        sums = [a + b for a, b in zip(sums, values, strict=True)]
        recent = summary.recent(signal, values[1]), summary.recent(length, values[2])
        return torch.from_numpy(np.array([updates + 1, skips, *sums, *recent]))  # faster than new_tensor
    values = [as_number(value, totals) for value in new]
    count = totals[:2] + totals.new_tensor([1.0, 0.0])
    recent = summary.recent(totals[5:], torch.stack(values[1:]))
    return gate.choose(torch.cat([count, totals[2:5] + torch.stack(values), recent]), skipped(totals))


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
