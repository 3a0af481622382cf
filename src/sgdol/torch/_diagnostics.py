"""Running sums over the updates (the totals), and what is reported of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgdol import summary

__all__ = ["added", "report", "skipped", "zeros"]

# Two counts, three sums weighted by lr/(1 - beta), and moving averages of the last two. Others read totals[0].
ROWS = ("updates", "skipped", "surrogate", "signal", "length", "recent_signal", "recent_length")

KEPT = [1.0] * 5 + [summary.RECENT] * 2  # the share of each row that an update keeps


def zeros(like: Tensor) -> Tensor:
    return like.new_zeros(len(ROWS))


def skipped(totals: Tensor) -> Tensor:
    return totals + totals.new_tensor([row == "skipped" for row in ROWS])


def added(totals: Tensor, sums: list[Any]) -> Tensor:
    """The totals after one more update, with these sums of the surrogate loss, of u and of n."""
    _, signal, length = sums
    row = [1.0, 0.0, *sums, (1 - summary.RECENT) * signal, (1 - summary.RECENT) * length]
    if isinstance(signal, Tensor):
        return totals * totals.new_tensor(KEPT) + torch.stack([torch.as_tensor(x).to(totals) for x in row])
    # In place, with Python's numbers: they are faster.
    totals.numpy()[:] = [share * old + new for share, old, new in zip(KEPT, totals.tolist(), row, strict=True)]
    return totals


def report(totals: Tensor | None, k: int) -> dict[str, Any]:
    """What ``diagnostics()`` says of the totals (None before the first update); k is the number of gradients."""
    values = dict(zip(ROWS, [0.0] * len(ROWS) if totals is None else totals.tolist(), strict=True))
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
