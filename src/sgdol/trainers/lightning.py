"""Lightning: a callback that logs what SGDOL learns.

``configure_optimizers`` returns an ordinary ``sgdol.SGDOL``; nothing else is needed. Lightning gives ``step()`` a
closure that runs ``training_step`` on the batch of the moment, however often it is called, so SGDOL calls it once: with
``accumulate_grad_batches=k`` each batch is one of k gradients, without it two consecutive batches make an update and
``trainer.global_step`` advances by two. Each batch passes through the model once. The same holds for manual
optimization.

Lightning divides the loss by ``accumulate_grad_batches`` also where an epoch ends with fewer batches, as it does for
every optimizer: choose a number that divides the batches of an epoch, for instance with ``limit_train_batches``.
"""

# ruff: noqa: E402  # what is missing is said before anything needs it
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgdol._extras import require

require("sgdol.trainers.lightning", "trainers", "lightning")

from lightning.pytorch import Callback, LightningModule, Trainer

from sgdol.torch import Log

__all__ = ["StepSizeMonitor"]


class StepSizeMonitor(Callback):
    """Logs the learned step size, which ``LearningRateMonitor`` cannot see: that one shows lr.

    All loggers of the Trainer get ``sgdol/step_size``, ``sgdol/signal_to_noise``, ``sgdol/noise_scale``,
    ``sgdol/updates``, ``sgdol/skipped`` and ``sgdol/gradients``, at the step at which Lightning logs the metrics of the
    same batch (see :func:`sgdol.torch.scalars`). The history goes into checkpoints.

    Args:
        every: log at every so many optimizer steps; None for the Trainer's ``log_every_n_steps``.

    >>> from lightning.pytorch import Trainer
    >>> monitor = StepSizeMonitor(every=10)
    >>> trainer = Trainer(
    ...     accelerator="cpu", accumulate_grad_batches=2, callbacks=[monitor], logger=False, enable_progress_bar=False
    ... )
    >>> monitor.history  # after trainer.fit(...): sgdol.plot(monitor)
    []
    """

    def __init__(self, every: int | None = None) -> None:
        super().__init__()
        self._log = Log(self._write, every=1 if every is None else every)
        self._every = every
        self._period = 0
        self._trainer: Trainer | None = None
        self._steps = 0

    @property
    def history(self) -> list[dict[str, float]]:
        """What was logged, a dict of numbers for each time; :func:`sgdol.plot` draws it."""
        return self._log.history

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make sure that there is something to log."""
        _optimizer(trainer)
        self._trainer, self._steps = trainer, trainer.global_step
        self._period = getattr(trainer, "log_every_n_steps", 50) if self._every is None else self._every

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, if the optimizer has stepped and it is time to."""
        before, self._steps = self._steps, trainer.global_step
        if self._period and self._steps // self._period > before // self._period:  # 0 is Lightning's word for never
            self._log.record(_optimizer(trainer), self._steps - 1)  # as Lightning, which counts from 0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let go of the Trainer."""
        self._trainer = None

    def state_dict(self) -> dict[str, Any]:
        """The history, for the checkpoint."""
        return self._log.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the history of a checkpoint."""
        self._log.load_state_dict(state_dict)

    def _write(self, values: Mapping[str, float], step: int) -> None:
        for logger in [] if self._trainer is None else self._trainer.loggers:
            logger.log_metrics(dict(values), step=step)


def _optimizer(trainer: Trainer) -> Any:
    found = [optimizer for optimizer in trainer.optimizers if hasattr(optimizer, "diagnostics")]
    if len(found) != 1:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "none"
        raise TypeError(f"StepSizeMonitor needs one SGDOL among the optimizers of the Trainer, which are: {kinds}")
    return found[0]
