"""Accelerate: a log of what SGDOL learns, for the Accelerator's trackers.

``accelerator.prepare`` takes an ordinary ``sgdol.SGDOL``. Under ``accelerator.accumulate(model)`` each batch is one
gradient, and ``step()`` does nothing before the last of them. Accelerate divides the loss by
``gradient_accumulation_steps`` also where an epoch ends with fewer batches, as it does for every optimizer: choose a
number that divides the batches of an epoch.
"""

# ruff: noqa: E402  # what is missing is said before anything needs it
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgdol._extras import require

require("sgdol.trainers.accelerate", "trainers", "accelerate")

from accelerate import Accelerator

from sgdol.torch import Log

__all__ = ["StepSizeMonitor"]


class StepSizeMonitor(Log):
    """Logs the learned step size to the Accelerator's trackers.

    Call it after ``opt.step()``. Batches that are only accumulated are not steps. Put it into checkpoints by
    ``accelerator.register_for_checkpointing(monitor)``.

    Args:
        accelerator: whose trackers it writes to (none, if ``init_trackers`` was not called).
        every: log at every so many optimizer steps.

    Attributes:
        history: what was logged, a dict of numbers for each time; :func:`sgdol.plot` draws it.

    >>> import torch
    >>> from accelerate import Accelerator
    >>> from sgdol import SGDOL
    >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    >>> model = torch.nn.Linear(2, 1)
    >>> model, opt = accelerator.prepare(model, SGDOL(model.parameters(), lr=0.1))
    >>> monitor = StepSizeMonitor(accelerator, every=1)
    >>> for _ in range(4):
    ...     with accelerator.accumulate(model):
    ...         accelerator.backward(model(torch.randn(8, 2)).square().mean())
    ...         opt.step(); opt.zero_grad(); _ = monitor(opt)
    >>> [(row["step"], row["gradients"]) for row in monitor.history]
    [(1, 2), (2, 2)]
    """

    def __init__(self, accelerator: Accelerator, *, every: int = 10) -> None:
        super().__init__(self._write, every=every)
        self.accelerator = accelerator

    def __call__(self, optimizer: Any, step: int | None = None) -> dict[str, float] | None:
        """Record, if the optimizer has stepped and it is time to."""
        return super().__call__(optimizer, step) if self.accelerator.sync_gradients else None

    def _write(self, values: Mapping[str, float], step: int) -> None:
        self.accelerator.log(dict(values), step=step)
