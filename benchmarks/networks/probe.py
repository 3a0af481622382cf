"""Fixed samples of a network's data, on which its training and its validation loss are measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Probe"]

SAMPLES = 256
TOKENS = 4096
"""The training loss is of at most so many samples, and of so many tokens, but of 64 samples at least; the validation
loss, which is measured once, of at most twice as many."""


class Probe:
    """Some training samples and some kept ones, the same for all methods and seeds.

    Args:
        objective: any of the quality suite with ``samples`` and ``everything``, the numbers of all training samples,
            alone or in rows with the numbers of their noise. It is changed to evaluate on the probe only.
    """

    def __init__(self, objective: Any) -> None:
        self.objective, samples = objective, objective.samples
        size = min(SAMPLES, max(64, TOKENS // samples.targets[0].numel()))
        rows = objective.everything
        self.rows: Tensor = rows[:: max(1, len(rows) // size)][:size]
        self.kept_rows: Tensor = rows[: min(2 * size, len(samples.test_targets))].clone()
        self.kept_rows.view(len(self.kept_rows), -1)[:, 0] = torch.arange(len(self.kept_rows))
        self.samples = samples
        self.kept = samples._replace(inputs=samples.test_inputs, targets=samples.test_targets)
        self.norms = [m for m in objective.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        for m in self.norms:
            m.momentum = None  # the plain mean over what it has seen since it was reset
        objective.everything = self.rows

    @torch.no_grad()
    def training(self) -> float:
        """The loss on training samples in eval mode; BatchNorm gets the statistics of these samples and weights."""
        if self.norms:
            for m in self.norms:
                m.reset_running_stats()
            self.objective.full()
        return self._loss()

    @torch.no_grad()
    def validation(self) -> float:
        """The loss on kept samples in eval mode, with BatchNorm's statistics of the training samples."""
        self.training()
        self.objective.samples, self.objective.everything = self.kept, self.kept_rows
        try:
            return self._loss()
        finally:
            self.objective.samples, self.objective.everything = self.samples, self.rows

    def _loss(self) -> float:
        self.objective.eval()
        loss = float(self.objective.full())
        self.objective.train()
        return loss
